"""The learning rate of each step, which goes on where it stood when a resumed run has other steps."""

import math
from typing import NamedTuple

from tide_lm.run.settings import OptimSection, RunConfig


class Decay(NamedTuple):
    """Where the cosine begins: at which step, and at which rate."""

    step: int
    rate: float


def learning_rate(step: int, steps: int, settings: OptimSection, begin: Decay | None = None) -> float:
    """Return a step's rate: linear warm-up to `max_lr`, then a cosine down to `min_lr` at the last step.

    The cosine begins there, unless a run that was resumed with another number of steps says where.
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.warmup_lr + (settings.max_lr - settings.warmup_lr) * step / warmup
    first, rate = begin or (warmup, settings.max_lr)
    done = min((step - first) / max(steps - 1 - first, 1), 1)
    return settings.min_lr + (rate - settings.min_lr) * (1 + math.cos(math.pi * done)) / 2


def go_on(
    before: RunConfig, now: RunConfig, step: int, begin: Decay | None
) -> tuple[Decay | None, str | None]:
    """Return where the cosine of a resumed run begins, and what to tell if that is another place.

    The rate goes on from where it stood, unless its settings changed or it still rises.
    """
    settings, old, new = now.optim, before.train.steps, now.train.steps
    if before.optim.rates != settings.rates:
        return None, None
    if old == new or not settings.warmup_steps <= step < new:
        return begin, None
    stood, least = learning_rate(step, old, settings, begin), settings.min_lr
    if stood > 1.01 * least:
        way = f"falls from {stood:.2e}, where it stood, to {least:.2e}"
    else:
        way = f"has fallen and stays at {least:.2e}; a new run with --from would warm up again"
    return Decay(step, stood), f"train.steps was {old:,} and is {new:,}: the learning rate {way}"
