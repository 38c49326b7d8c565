"""Held-out loss, overall and by the frequency of the token that is predicted."""

from collections.abc import Iterable
from typing import Any

import torch

from tide_lm.data.frequency import FrequencyBins, LossByBin
from tide_lm.model import TideForCausalLM


@torch.no_grad()
def held_out_loss(
    model: TideForCausalLM, batches: Iterable[tuple[torch.Tensor, torch.Tensor]], bins: FrequencyBins
) -> dict[str, Any]:
    """Mean loss of `(inputs, targets)` batches, per decile and for rare, mid and common tokens."""
    was_training = model.training
    model.eval()
    losses = LossByBin(bins)
    for inputs, targets in batches:
        logits_BTV = model(inputs.to(model.device), use_cache=False).logits.float()
        targets = targets.to(model.device).flatten()
        losses.add(
            torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets, reduction="none"), targets
        )
    model.train(was_training)
    return losses.result()
