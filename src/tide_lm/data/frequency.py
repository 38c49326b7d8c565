"""How often each token occurs, the deciles of rare to common tokens, and loss per decile (appendix B).

Shapes: V vocabulary, N tokens, R = 11 rows: the ten deciles, then the tokens outside them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tide_lm.data import tokenizers
from tide_lm.data.shards import Manifest, check_checksum

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BINS = 10
UNBINNED = -1
RARE, MID, COMMON = range(3), range(3, 7), range(7, 10)
GROUPS = {"rare": RARE, "mid": MID, "common": COMMON}


def clean_types(counts_V: np.ndarray, tokenizer: "PreTrainedTokenizerBase") -> np.ndarray:
    """Return which ids occur, are not special, and have a letter or a digit: the structural filter.

    Each id is decoded alone. Bytes that are not UTF-8 by themselves become U+FFFD, which is neither letter
    nor digit: so a fragment of a character is left out, and a word that ends in a fragment stays.
    """
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = [id for id in np.flatnonzero(counts_V).tolist() if id not in special]
    texts = tokenizer.batch_decode([[id] for id in ids], clean_up_tokenization_spaces=False)
    keep_V = np.zeros(len(counts_V), dtype=bool)
    keep_V[ids] = [any(map(str.isalnum, text)) for text in texts]
    return keep_V


def deciles(counts_V: np.ndarray, keep_V: np.ndarray, cap: int | None = None) -> np.ndarray:
    """Return b(v) = min(floor(rank(v) / |V_clean| * 10), 9), or -1 for other ids (eq. bin_assignment).

    Ranks ascend with the count, ties by id, and start at 0, so that the minimum never binds. Types that occur
    more than `cap` times are left out.
    """
    kept = np.flatnonzero(keep_V if cap is None else keep_V & (counts_V <= cap))
    ascending = kept[np.argsort(counts_V[kept], kind="stable")]
    bins_V = np.full(len(counts_V), UNBINNED, dtype=np.int8)
    bins_V[ascending] = np.arange(len(kept)) * BINS // max(len(kept), 1)
    return bins_V


@dataclass(frozen=True, eq=False)
class FrequencyBins:
    """The decile of each token id, or -1, and how often the id occurs."""

    bins_V: np.ndarray
    counts_V: np.ndarray

    @classmethod
    def none(cls, vocab_size: int) -> "FrequencyBins":
        """Put no id in a decile, for when frequencies are not known."""
        return cls(np.full(vocab_size, UNBINNED, np.int8), np.zeros(vocab_size, np.int64))

    @classmethod
    def from_counts(cls, counts_V: np.ndarray, tokenizer: "PreTrainedTokenizerBase") -> "FrequencyBins":
        return cls(deciles(counts_V, clean_types(counts_V, tokenizer)), counts_V)

    @classmethod
    def from_prepared(cls, folder: Path) -> "FrequencyBins":
        """Read the bins of a prepared training split."""
        manifest, path = Manifest.read(folder), folder / "counts.npy"
        if not path.exists():
            raise ValueError(f"{path} is missing: prepare the data again")
        if manifest.counts_sha256 is not None:
            check_checksum(path, manifest.counts_sha256)
        counts_V = _read_counts(path, manifest.vocab_size)
        return cls.from_counts(counts_V, tokenizers.load(str(folder / "tokenizer")))

    @classmethod
    def from_counts_file(cls, path: Path, tokenizer: "PreTrainedTokenizerBase") -> "FrequencyBins":
        """Read another corpus's counts: a .npy of integers, one per id, or a JSON object {id: count}."""
        return cls.from_counts(_read_counts(path, len(tokenizer)), tokenizer)

    def extended(self, vocab_size: int) -> "FrequencyBins":
        """Add the ids that a model has and its tokenizer lacks: they occur nowhere."""
        more = vocab_size - len(self.bins_V)
        if more < 0:
            raise ValueError(
                f"there are counts for {len(self.bins_V):,} ids, and the model has {vocab_size:,}: "
                "count with the tokenizer of the model"
            )
        bins_V = np.pad(self.bins_V, (0, more), constant_values=UNBINNED)
        return FrequencyBins(bins_V, np.pad(self.counts_V, (0, more)))

    def decile(self, id: int) -> int | None:
        """Return an id's decile, where 0 is the rarest; None if it has none."""
        found = int(self.bins_V[id])
        return None if found == UNBINNED else found

    def rows(self) -> torch.Tensor:
        """Return each id's row in a table of 11: its decile, or the last if it has none."""
        return torch.from_numpy(np.where(self.bins_V == UNBINNED, BINS, self.bins_V))


def _read_counts(path: Path, vocab_size: int) -> np.ndarray:
    try:
        if path.suffix == ".json":
            table = json.loads(path.read_text(encoding="utf-8"))
            ids, counts = np.array([int(id) for id in table], dtype=np.int64), np.array(list(table.values()))
        else:
            with path.open("rb") as file:
                if file.read(6) != np.lib.format.MAGIC_PREFIX:
                    raise ValueError("it is another kind of file")
            counts = np.load(path, allow_pickle=False)
            if counts.ndim == 1 and len(counts) < vocab_size:
                raise ValueError(f"it has {len(counts)}, for {vocab_size} ids")
            ids = np.arange(len(counts))
        if not counts.any():
            raise ValueError("all are zero")
        if counts.ndim != 1 or counts.dtype.kind not in "iu" or (counts < 0).any():
            raise ValueError("they are not integers of 0 or more")
    except (OSError, EOFError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} holds no token counts ({error}): "
            "it must be a .npy of integers, one per id, or a JSON object {id: count}"
        ) from error
    ids, counts = ids[counts > 0], counts[counts > 0]
    if outside := ids[(ids < 0) | (ids >= vocab_size)].tolist():
        raise ValueError(
            f"{path} counts the id {outside[0]}, but the tokenizer has {vocab_size} ids: "
            "count with the tokenizer of the model"
        )
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    counts_V[ids] = counts
    return counts_V


def by_bin(
    losses_N: torch.Tensor, targets_N: torch.Tensor, rows_V: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up losses and tokens in each of the 11 rows, by the target token; N may have any shape."""
    target_rows_N = rows_V.index_select(0, targets_N.flatten())
    member_RN = target_rows_N == torch.arange(BINS + 1, device=rows_V.device).unsqueeze(1)
    # A masked sum is reproducible to the bit, while a scatter on a GPU adds in any order.
    wide = torch.float32 if losses_N.device.type == "mps" else torch.float64  # MPS has no float64
    losses_N = losses_N.detach().flatten().to(wide)
    return torch.where(member_RN, losses_N, 0).sum(1), member_RN.sum(1)


class LossByBin:
    """Adds up losses per row over batches, on their device, which only `result` waits for.

    `sums_R` and `counts_R` add across ranks.
    """

    def __init__(self, bins: FrequencyBins) -> None:
        self.rows_V = bins.rows()
        self.sums_R = torch.zeros(BINS + 1, dtype=torch.float64)
        self.counts_R = torch.zeros(BINS + 1, dtype=torch.int64)

    def add(self, losses_N: torch.Tensor, targets_N: torch.Tensor) -> None:
        self.rows_V = self.rows_V.to(losses_N.device)
        sums_R, counts_R = by_bin(losses_N, targets_N, self.rows_V)
        self.sums_R = self.sums_R.to(sums_R) + sums_R
        self.counts_R = self.counts_R.to(counts_R) + counts_R

    def result(self) -> dict[str, Any]:
        """Return mean losses (None without tokens) and counts: of all, per decile, per group, unbinned."""
        sums, counts = self.sums_R.tolist(), self.counts_R.tolist()

        def mean(rows: range) -> dict[str, Any]:
            tokens = sum(counts[row] for row in rows)
            return {"loss": sum(sums[row] for row in rows) / tokens if tokens else None, "tokens": tokens}

        by_decile = [mean(range(row, row + 1)) for row in range(BINS)]
        return {
            **mean(range(BINS + 1)),
            "loss_by_decile": [decile["loss"] for decile in by_decile],
            "tokens_by_decile": [decile["tokens"] for decile in by_decile],
            **{name: mean(rows) for name, rows in GROUPS.items()},
            "unbinned": mean(range(BINS, BINS + 1)),
        }
