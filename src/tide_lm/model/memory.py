"""What layers receive of the memory, and where it comes from.

Shapes: B batch, T tokens, V rows of the tables, U rows held, P rows of a position, K blocks, D hidden. A row
has J = K / P blocks.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tide_lm import ops
from tide_lm.model.pairs import pair_numbers, previous_ids
from tide_lm.ops.decode import RowBytes
from tide_lm.store.format import Header


class Memory(NamedTuple):
    """What every layer receives: normalised rows, and which of them belongs to each position.

    Without an index there is one row per position, in order, with all blocks. An index of B x T has one row
    for each position, and an index of P x B x T has P, whose blocks take turns. Made outside the model
    (deduplicated, read from a store, fetched from other ranks) it is passed to `forward` as `memory=`. With
    placeholders the gradient of the rows comes through them (see ops.memory_rows).
    """

    rows_UJD: torch.Tensor
    row_index: torch.Tensor | None = None
    placeholders: ops.Placeholders | None = None

    def of_positions(self) -> torch.Tensor:
        """Return all blocks of each position, N x K x D."""
        if self.row_index is None:
            return self.rows_UJD
        parts = self.row_index if self.row_index.ndim == 3 else self.row_index[None]
        return torch.stack([self.rows_UJD[index_BT.flatten()] for index_BT in parts], 2).flatten(1, 2)

    def for_layer(self, layer: int) -> "LayerMemory":
        placeholder = None if self.placeholders is None else self.placeholders.of_layers[layer]
        block, own_index_BT = layer, self.row_index
        if self.row_index is not None and self.row_index.ndim == 3:
            block, part = divmod(layer, len(self.row_index))
            own_index_BT = self.row_index[part]
        own_row_UD = self.rows_UJD[:, block % self.rows_UJD.shape[1]]
        return LayerMemory(self.rows_UJD, self.row_index, placeholder, own_row_UD, own_index_BT)


def taking_turns(rows_NPJD: torch.Tensor) -> torch.Tensor:
    """Return the blocks of each position's rows as layers have them, N x K x D."""
    return rows_NPJD.transpose(1, 2).flatten(1, 2)


class LayerMemory(NamedTuple):
    """What one layer receives. Block l mod K, `own_row` at `own_index`, is for attention's values."""

    rows_UJD: torch.Tensor
    row_index: torch.Tensor | None
    placeholder: ops.Placeholder | None
    own_row_UD: torch.Tensor
    own_index_BT: torch.Tensor | None


class MemorySource(nn.Module):
    """Where a model's rows come from: tables on its device, tables spread over ranks, or a store.

    A source is called with token ids, and those before them if it has rows of pairs, and returns a `Memory`.
    What is defined here holds for tables.
    """

    weight: nn.Parameter  # V x J x D, of tables alone
    norm: Any

    header: Header | None = None  # of the store that packed rows come from
    on_device = True  # so that a step on the device can look rows up by itself
    pair_rows = 0  # the last ones of the tables, for pairs of tokens

    @property
    def height(self) -> int:
        """The number of the tables' rows."""
        return len(self.weight)

    def numbers(
        self, ids_BT: torch.Tensor, previous_BT: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return which rows each position has; the token before the first is 0 unless it is given."""
        if not self.pair_rows:
            return (ids_BT,)
        previous_BT = previous_ids(ids_BT) if previous_BT is None else previous_BT
        pairs_BT = pair_numbers(ids_BT, previous_BT, self.pair_rows)
        return ids_BT, self.height - self.pair_rows + pairs_BT

    def directions(self, ids_U: torch.Tensor) -> torch.Tensor:
        """Return the rows of tokens up to their length, in float32; the norm before the gain leaves that."""
        kinds = len(self.norm.weight) // self.weight.shape[1]
        return self.weight[ids_U].float() * self.norm.weight[::kinds].float()

    @property
    def tables(self) -> Any:
        """The memory as it is trained."""
        return self

    def row_bytes(self, ids_1: torch.Tensor) -> RowBytes | None:
        """Return where a kernel finds the rows of a token by itself; None if the host has to decode them."""
        return RowBytes(self.weight.flatten(1).view(torch.uint8), ids_1, gains_KD=self.norm.weight)

    def save(self, store: Path) -> None:
        """Save packed rows, which a checkpoint's tensors do not hold."""
