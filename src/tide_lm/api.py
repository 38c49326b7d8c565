"""The functions of the package: what the commands do, for notebooks and scripts.

Heavy imports are inside them, so that a wrong call is an error at once.
"""

from typing import TYPE_CHECKING, Any

from tide_lm.run import strict
from tide_lm.run.settings import OptimSection
from tide_lm.spec import recipes
from tide_lm.spec.recipes import Recipe

if TYPE_CHECKING:
    from torch import nn


def param_groups(
    model: "nn.Module",
    lr: float,
    recipe: Recipe = recipes.DEFAULT,
    *,
    weight_decay: float = OptimSection.weight_decay,
    table_lr_multiple: float | None = None,
    table_weight_decay: float | None = None,
    gain_lr_multiple: float | None = None,
) -> list[dict[str, Any]]:
    """Return parameters in groups for an optimiser of torch, with the rates and decay of `tide-lm train`.

    Tables, and the gains of an upcycled model, have a multiple of `lr`, and tables have their own decay. What
    is not given is the recipe's. Schedules keep the multiples.

    Example: torch.optim.AdamW(tide_lm.param_groups(model, lr=1e-3), betas=(0.9, 0.95))
    """
    from torch import nn

    from tide_lm.model import TideConfig
    from tide_lm.training.optim import grouped

    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is a {type(model).__name__}: give a torch module, as in load(...).model")
    strict.check("recipe", recipe, Recipe)
    configs = (getattr(module, "config", None) for module in model.modules())  # a wrapper may have none
    config = next((config for config in configs if isinstance(config, TideConfig)), None)
    given = {
        "weight_decay": weight_decay,
        "table_lr_multiple": table_lr_multiple,
        "table_weight_decay": table_weight_decay,
        "gain_lr_multiple": gain_lr_multiple,
    }
    chosen = {name: strict.plain(value) for name, value in given.items() if value is not None}
    defaults = recipes.optim_of(recipe, 1.0 if config is None else config.memory_gain_init)
    groups = grouped(model, strict.build(OptimSection, defaults | chosen, "param_groups"))
    rate = strict.check("lr", strict.plain(lr), float)
    return [{"lr": rate * group.pop("lr_multiple"), **group} for group in groups]
