"""Held-out loss, overall and by the frequency of the token that is predicted."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tide_lm.data.frequency import FrequencyBins, LossByBin

PerToken = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@torch.no_grad()
def held_out_loss(
    per_token: PerToken,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    bins: FrequencyBins,
    all_sum: Callable[[torch.Tensor], object] = lambda tensor: None,
) -> dict[str, Any]:
    """Return the mean loss of `(inputs, targets)` batches, per decile and for rare, mid and common tokens.

    `per_token` gives the loss of each target. Where processes have batches of their own, `all_sum` sums a
    tensor over them in place.
    """
    losses = LossByBin(bins)
    for inputs, targets in batches:
        losses_N = per_token(inputs, targets)
        losses.add(losses_N, targets.flatten().to(losses_N.device))
    all_sum(losses.sums_R)
    all_sum(losses.counts_R)
    return losses.result()
