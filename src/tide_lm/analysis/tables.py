"""The tables as directions: distances between E and the blocks (figure 9), neighbours (figure 13, table 6).

V vocabulary, K blocks, D hidden, N tokens asked for.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tide_lm.data import tokenizers
from tide_lm.data.frequency import COMMON, RARE
from tide_lm.evaluate.subject import Subject
from tide_lm.model import TideForCausalLM
from tide_lm.stored_memory import StoredMemory

CHUNK = 4096
NEIGHBOURS = 10


def directions(model: TideForCausalLM, table: int, ids: torch.Tensor) -> torch.Tensor:
    """Unit rows of E (table 0) or of M_k (table k, from 1), as layers receive them: with their gain.

    The norm before the gain changes no direction.
    """
    if table == 0:
        rows_ND = model.get_input_embeddings().weight[ids].float()
    else:
        memory = model.model.memory
        assert memory is not None
        if isinstance(memory, StoredMemory):  # whose rows come whole
            rows_ND = memory.rows_of(ids)[:, table - 1]
        else:
            rows_ND = memory.weight[ids, table - 1].float() * memory.norm.weight[table - 1].float()
    if not rows_ND.isfinite().all():
        name = names(table)[table]
        raise ValueError(f"{name} has rows that are not finite: its weights are damaged")
    return torch.nn.functional.normalize(rows_ND, dim=-1)


def names(blocks: int) -> list[str]:
    return ["E", *(f"M{block + 1}" for block in range(blocks))]


@torch.no_grad()
def distances(subject: Subject) -> dict[str, Any]:
    """Mean cosine distance over the ids that occur, or all if that is not known, of every two tables."""
    model = subject.tide
    ids_N = known_ids(subject).to(model.device)
    tables = names(model.config.num_memory_blocks)
    cosines = torch.zeros(len(tables), len(tables), dtype=torch.float64, device=model.device)
    for ids in ids_N.split(CHUNK):
        rows = torch.stack([directions(model, table, ids) for table in range(len(tables))])
        cosines += torch.einsum("and,bnd->ab", rows, rows).double()
    return {
        "tables": tables,
        "ids": len(ids_N),
        "distance": (1 - cosines / len(ids_N)).clamp(min=0).tolist(),
    }


@torch.no_grad()
def neighbours(
    subject: Subject, words: Sequence[str] = (), sample: int = 200, seed: int = 0
) -> dict[str, Any]:
    """The overlap of nearest neighbours in E and in each block, for rare and common ids; and those of words.

    A neighbour is an id that occurs in the counts.
    """
    model = subject.tide
    candidates = known_ids(subject)
    generator = np.random.default_rng(seed)
    result: dict[str, Any] = {
        "neighbours": NEIGHBOURS,
        "tables": names(model.config.num_memory_blocks),
        "seed": seed,
    }
    for name, deciles in (("rare", RARE), ("common", COMMON)):
        members = np.flatnonzero(np.isin(subject.bins.bins_V, list(deciles)))
        chosen = np.sort(generator.permutation(members)[:sample])
        result[name] = _overlap(nearest(model, torch.from_numpy(chosen), candidates))
    result["words"] = {
        word: neighbours_of(subject, single_token(subject, word), candidates) for word in words
    }
    return result


def nearest(model: TideForCausalLM, ids_N: torch.Tensor, candidates: torch.Tensor) -> list[np.ndarray]:
    """For each table, the ids nearest by cosine to each id, itself left out: N x 10."""
    candidates, ids_N = candidates.to(model.device), ids_N.to(model.device)
    found = []
    for table in range(model.config.num_memory_blocks + 1):
        asked_ND = directions(model, table, ids_N)
        cosines = torch.cat(
            [asked_ND @ directions(model, table, part).T for part in candidates.split(CHUNK)], dim=1
        )
        cosines[ids_N[:, None] == candidates] = -torch.inf
        best = cosines.topk(min(NEIGHBOURS, len(candidates) - 1), dim=1).indices
        found.append(candidates[best].cpu().numpy())
    return found


def jaccard(a: Sequence[int], b: Sequence[int]) -> float:
    first, second = set(a), set(b)
    return len(first & second) / max(len(first | second), 1)


def _overlap(found: list[np.ndarray]) -> dict[str, Any]:
    """By block, Jaccard's index with E's neighbours for each id asked for."""
    base, *blocks = found
    return {
        "ids": len(base),
        "jaccard": [
            [jaccard(e, m) for e, m in zip(base.tolist(), block.tolist(), strict=True)] for block in blocks
        ],
    }


@torch.no_grad()
def neighbours_of(subject: Subject, id: int, candidates: torch.Tensor) -> dict[str, Any]:
    """Those of one token in E and in each block, and how much of E's each block shares."""
    found = nearest(subject.tide, torch.tensor([id]), candidates)
    return {
        "id": id,
        "neighbours": [tokenizers.token_texts(subject.tokenizer, table[0].tolist()) for table in found],
        "jaccard": [jaccard(found[0][0].tolist(), table[0].tolist()) for table in found[1:]],
    }


def single_token(subject: Subject, word: str) -> int:
    """The id of a word with a space before it, or without."""
    for text in (f" {word}", word):
        ids = subject.tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) == 1:
            return ids[0]
    raise ValueError(f"{word!r} is not a single token of {subject.name}'s tokenizer: choose another word")


def known_ids(subject: Subject) -> torch.Tensor:
    """Those that occur, or all if that is not known."""
    if subject.frequencies is None:
        return torch.arange(subject.vocabulary)
    return torch.from_numpy(np.flatnonzero(subject.frequencies.counts_V))
