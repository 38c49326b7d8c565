"""Tensor operations: each a plain-torch reference behind one dispatching call."""

from tide_lm.ops.memory_mix import check_rows, memory_mix, memory_row, router_weights
from tide_lm.ops.sinks import Sink, Sinks

__all__ = ["Sink", "Sinks", "check_rows", "memory_mix", "memory_row", "router_weights"]
