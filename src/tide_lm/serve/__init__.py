"""Generation: an engine on caches that stay where they are."""

from tide_lm.serve.engine import Engine
from tide_lm.serve.sampling import Sampling

__all__ = ["Engine", "Sampling"]
