"""Where each layer's backward leaves what the gradient of the memory's rows is made of (see memory_rows).

Shapes: B batch, T tokens, N = B * T positions, K blocks, D hidden.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Placeholder(NamedTuple):
    """One layer's: zeros that no forward reads, and whose gradients are what the names say.

    `g` is the gradient of what the layer mixed, and `g_value` that of the row in its attention's values.
    `order_N` are the positions in the order of their rows, in which kernels go through them.
    """

    g_BTD: torch.Tensor
    alpha_BTK: torch.Tensor
    order_N: torch.Tensor
    g_value_BTD: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Placeholders:
    """The placeholders of all layers.

    They are not a bare tuple: FSDP looks for tensors in the tuples that a layer is given, and must leave
    those of other layers alone.
    """

    of_layers: tuple[Placeholder, ...]
