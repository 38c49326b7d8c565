"""Tensor operations: each a plain-torch reference behind one dispatching call."""

from tide_lm.ops.memory_mix import Sink, memory_mix, router_weights

__all__ = ["Sink", "memory_mix", "router_weights"]
