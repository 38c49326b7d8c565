"""Encode the rows of a trained memory in a smaller form.

V rows, J blocks of a row, D hidden, U rows at once, N numbers that a row is stored as.
"""

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from tide_lm.model import EmbeddingMemory
from tide_lm.spec.form import Blocks, Form
from tide_lm.store.codec import RowCodec
from tide_lm.store.format import Header, checksum

_ROWS_AT_ONCE = 1024


def folded_rows(memory: EmbeddingMemory) -> Iterator[torch.Tensor]:
    """Yield what layers receive, U x J x D, in their order: with norm and gain, in float32."""
    tokens = len(memory.weight) - memory.pair_rows
    starts = [*range(0, tokens, _ROWS_AT_ONCE), *range(tokens, len(memory.weight), _ROWS_AT_ONCE)]
    for start, end in pairwise([*starts, len(memory.weight)]):
        with torch.no_grad():
            rows_UJD = memory.norm(memory.weight[start:end].float(), part=int(start >= tokens))
        if not (finite := rows_UJD.isfinite().all(-1)).all():
            row, block = (~finite).nonzero()[0].tolist()
            raise ValueError(
                f"row {start + row} of the tables is not finite in block {block + 1}: they are damaged"
            )
        yield rows_UJD


Directions = tuple[torch.Tensor, ...]  # eigenvectors of each space, those that keep most last


class Encoder:
    """The rows of a memory in a form: `header` and `sections` of their store, and `rows` as bytes.

    `known` keeps the eigenvectors, which take longest to find, for other forms of the same memory.
    """

    def __init__(
        self,
        memory: EmbeddingMemory,
        form: Form,
        fingerprint: str,
        counts_V: np.ndarray | None = None,
        known: dict[Blocks, Directions] | None = None,
    ) -> None:
        V, J, D = memory.weight.shape
        tokens = V - memory.pair_rows
        if counts_V is not None and len(counts_V) != tokens:
            raise ValueError(f"there are {len(counts_V)} counts of tokens: there must be {tokens}")
        self.memory, self.form = memory, form
        self.counts_V = None if counts_V is None else np.pad(counts_V, (0, memory.pair_rows))
        self.ranks: tuple[int, ...] = ()
        if form.rank < 1:
            known = {} if known is None else known
            if form.blocks not in known:
                known[form.blocks] = self._directions()
            size = max(1, math.ceil(form.rank * (D if form.blocks == "even" else J * D)))
            kept = [vectors[:, -size:].flip(1).T for vectors in known[form.blocks]]
            self.ranks, self._basis = (size,) * len(kept), torch.cat(kept).float()
        sections = self.sections
        self.header = Header(
            vocab_size=V,
            blocks=J,
            hidden=D,
            bits=form.bits,
            group=form.group,
            ranks=self.ranks,
            fingerprint=fingerprint,
            checksums={name: checksum(array) for name, array in sections.items()},
        )

    @cached_property
    def sections(self) -> Mapping[str, np.ndarray]:
        """The arrays that all rows share."""
        V, J, D = self.memory.weight.shape
        codec = RowCodec(sum(self.ranks) or J * D, self.form.bits, self.form.group)
        found = {} if self.counts_V is None else {"counts": self.counts_V.astype("<u8")}
        if self.form.bits < 16:
            squares = torch.stack([numbers_UN.double().square().sum(0) for numbers_UN in self._numbers()])
            columns_N = (squares.sum(0) / V).sqrt().float().cpu()
            columns_N[columns_N == 0] = 1
            found |= {"levels": codec.levels.numpy(), "columns": columns_N.numpy()}
        if self.ranks:
            found["basis"] = self._basis.half().cpu().numpy()
        return found

    def rows(self) -> Iterator[torch.Tensor]:
        """Yield the bytes of some rows at a time, in the order of tokens, on the device of the tables."""
        codec, columns = self.header.codec, self.sections.get("columns")
        for numbers_UN in self._numbers():
            if columns is not None:
                numbers_UN = numbers_UN / torch.from_numpy(columns).to(numbers_UN.device)
            yield codec.encode(numbers_UN)

    def _numbers(self) -> Iterator[torch.Tensor]:
        """Yield rows, or with a lower rank their coefficients."""
        for rows_UJD in folded_rows(self.memory):
            if not self.ranks:
                yield rows_UJD.flatten(1)
                continue
            parts = self._spaces(rows_UJD)
            bases = self._basis.half().float().split(self.ranks)  # as they are stored
            yield torch.cat([part @ basis.T for part, basis in zip(parts, bases, strict=True)], 1)

    def _spaces(self, rows_UJD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (rows_UJD.flatten(1),) if self.form.blocks == "joint" else rows_UJD.unbind(1)

    def _directions(self) -> Directions:
        """Return the eigenvectors of the rows' squares."""
        grams: list[torch.Tensor] = []
        for rows_UJD in folded_rows(self.memory):
            found = [part.T.double() @ part.double() for part in self._spaces(rows_UJD)]
            grams = [a + b for a, b in zip(grams, found, strict=True)] if grams else found
        return tuple(torch.linalg.eigh(gram).eigenvectors for gram in grams)
