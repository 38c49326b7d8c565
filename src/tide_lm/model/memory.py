"""What layers receive of the memory, and where it comes from.

Shapes: B batch, T tokens, V vocabulary, U rows held, K blocks, D hidden.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tide_lm import ops
from tide_lm.ops.decode import RowBytes
from tide_lm.store.format import Header


class Memory(NamedTuple):
    """What every layer receives: normalised rows, and which of them belongs to each position.

    Without an index there is one row per position, in order. Made outside the model (deduplicated, read
    from a store, fetched from other ranks) it is passed to `forward` as `memory=`. With placeholders the
    gradient of the rows comes through them (see ops.memory_rows).
    """

    rows_UKD: torch.Tensor
    index_BT: torch.Tensor | None = None
    placeholders: ops.Placeholders | None = None

    def for_layer(self, layer: int) -> "LayerMemory":
        placeholder = None if self.placeholders is None else self.placeholders.of_layers[layer]
        own_row_UD = self.rows_UKD[:, layer % self.rows_UKD.shape[1]]
        return LayerMemory(self.rows_UKD, self.index_BT, placeholder, own_row_UD)


class LayerMemory(NamedTuple):
    """What one layer receives. The row of table l mod K is for extensions."""

    rows_UKD: torch.Tensor
    index_BT: torch.Tensor | None
    placeholder: ops.Placeholder | None
    own_row_UD: torch.Tensor


class MemorySource(nn.Module):
    """Where a model's rows come from: tables on its device, tables spread over ranks, or a store.

    A source is called with token ids and returns a `Memory`. What is defined here holds for tables.
    """

    weight: nn.Parameter  # V x K x D, of tables alone
    norm: Any

    header: Header | None = None  # of the store that packed rows come from
    on_device = True  # so that a step on the device can look rows up by itself

    def rows_of(self, ids_U: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a row for each id; packed rows in this type, tables in their own."""
        rows_UKD, index_U, _ = self(ids_U, dtype)
        return rows_UKD if index_U is None else rows_UKD[index_U]

    def directions(self, ids_U: torch.Tensor) -> torch.Tensor:
        """Return rows up to their length, in float32: the norm before the gain changes no direction."""
        return self.weight[ids_U].float() * self.norm.weight.float()

    @property
    def tables(self) -> Any:
        """The memory as it is trained."""
        return self

    def row_bytes(self, ids_1: torch.Tensor) -> RowBytes | None:
        """Return where a kernel finds the rows of a token by itself; None if the host has to decode them."""
        return RowBytes(self.weight.flatten(1).view(torch.uint8), ids_1, gains_KD=self.norm.weight)

    def save(self, store: Path) -> None:
        """Save packed rows, which a checkpoint's tensors do not hold."""
