"""Where layers put what the gradient of the memory's rows is made of; `memory_rows` collects it.

Shapes: B batch, T tokens, N = B * T positions, K blocks, D hidden.
"""

from dataclasses import dataclass

import torch

# What takes the gradient of the output, what takes alpha, and the order in which positions are mixed.
Sink = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Sinks:
    """A sink for each layer's mix, and one for the row in its values; not a tuple, so that what walks through
    the tensors that a layer is given, as FSDP does, leaves the sinks of other layers alone."""

    mix: tuple[Sink, ...]
    values: tuple[torch.Tensor, ...] = ()

    def for_layer(self, layer: int) -> tuple[Sink, torch.Tensor | None]:
        return self.mix[layer], self.values[layer] if self.values else None
