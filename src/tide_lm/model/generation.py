"""What generation with TIDE needs besides transformers' own."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

try:
    from transformers.modeling_utils import slice_logits_to_keep
except ImportError:  # transformers 5.17 knows a count or a list of positions only

    def slice_logits_to_keep(hidden_BTD: torch.Tensor, keep: int | torch.Tensor) -> torch.Tensor:
        return hidden_BTD[:, slice(-keep, None) if isinstance(keep, int) else keep]


@dataclass
class TideCausalLMOutputWithPast(CausalLMOutputWithPast):
    """`router_weights`: for each layer alpha, B x T x (K + 1), the null bank last; if asked for."""

    router_weights: tuple[torch.Tensor, ...] | None = None


class TideGeneration(GenerationMixin):
    """Generation that looks the memory up for each new token."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("memory") is not None:
            raise ValueError("generate looks the memory up for each new token: leave memory= out")
        return super().generate(*args, **kwargs)
