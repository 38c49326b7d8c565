"""Tensor operations: each a plain-torch reference behind one dispatching call."""

from tide_lm.ops.memory_mix import memory_mix, memory_row, router_logits, router_weights
from tide_lm.ops.placeholders import Placeholder, Placeholders

__all__ = [
    "Placeholder",
    "Placeholders",
    "memory_mix",
    "memory_row",
    "router_logits",
    "router_weights",
]
