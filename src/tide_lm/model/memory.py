"""What layers receive of the memory. Shapes: B batch, T tokens, U rows held, K blocks, D hidden."""

from typing import NamedTuple

import torch

from tide_lm import ops


class Memory(NamedTuple):
    """What every layer receives: normalised rows, and which of them belongs to each position.

    Without an index there is one row per position, in order. Made outside the model (deduplicated, read
    from a store, exchanged between ranks) it is passed to `forward` as `memory=`. With sinks, one a layer,
    the gradient of the rows does not come back through them (see ops.memory_rows).
    """

    rows_UKD: torch.Tensor
    index_BT: torch.Tensor | None = None
    sinks: ops.Sinks | None = None

    def for_layer(self, layer: int) -> "LayerMemory":
        sink, value_sink = (None, None) if self.sinks is None else self.sinks.for_layer(layer)
        own_row_UD = self.rows_UKD[:, layer % self.rows_UKD.shape[1]]
        return LayerMemory(self.rows_UKD, self.index_BT, sink, own_row_UD, value_sink)


class LayerMemory(NamedTuple):
    """What one layer receives. The row of table l mod K is for extensions."""

    rows_UKD: torch.Tensor
    index_BT: torch.Tensor | None
    sink: ops.Sink | None
    own_row_UD: torch.Tensor
    value_sink: torch.Tensor | None
