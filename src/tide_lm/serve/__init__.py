"""Generation with an engine that keeps its caches."""

from tide_lm.serve.engine import Engine
from tide_lm.serve.sampling import Sampling

__all__ = ["Engine", "Sampling"]
