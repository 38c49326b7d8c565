"""The recipes: how tables begin and learn, and where rows go. The best is the study's: docs/STUDY.md."""

from typing import Any, Literal

Recipe = Literal["paper", "best"]
DEFAULT: Recipe = "best"  # of new runs and of configurations made from a preset; saved ones have their own
RECIPES: dict[Recipe, dict[str, dict[str, Any]]] = {
    "paper": {
        "model": {"memory_gain_init": 1.0, "memory_values": False},
        "optim": {"table_lr_multiple": 1.0, "table_weight_decay": 0.1},
    },
    "best": {
        "model": {"memory_gain_init": 0.1, "memory_values": True},
        "optim": {"table_lr_multiple": 5.0, "table_weight_decay": 0.0},
    },
}
_GAINS_FROM_ZERO = 10.0  # optim.gain_lr_multiple of an upcycled model: docs/upcycling.md


def optim_of(recipe: Recipe, gain_init: float) -> dict[str, Any]:
    """Return a recipe's settings of section `optim`, for a model whose gains began at `gain_init`."""
    faster = {} if gain_init else {"gain_lr_multiple": _GAINS_FROM_ZERO}
    return RECIPES[recipe]["optim"] | faster
