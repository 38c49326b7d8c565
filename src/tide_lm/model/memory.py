"""What layers receive of the memory. Shapes: B batch, T tokens, U rows held, K blocks, D hidden."""

from typing import NamedTuple

import torch

from tide_lm import ops


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
