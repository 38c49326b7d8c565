"""Tensor operations: each a plain-torch reference behind one dispatching call."""

from tide_lm.ops.memory_mix import check_rows, memory_mix, memory_row, router_logits, router_weights
from tide_lm.ops.placeholders import Placeholder, Placeholders

__all__ = [
    "Placeholder",
    "Placeholders",
    "check_rows",
    "memory_mix",
    "memory_row",
    "router_logits",
    "router_weights",
]
