"""What generation with TIDE needs besides transformers' own."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from tide_lm.model.stored import ReadAhead

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
    """Read the rows of a packed model as soon as a token is sampled."""

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: Any = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if kwargs.get("memory") is not None:
            raise ValueError("generate looks the memory up for each new token: leave memory= out")
        memory = self.model.memory
        if memory is not None and memory.in_file:
            stopping_criteria = [ReadAhead(memory), *(stopping_criteria or [])]
        return super().generate(
            inputs, generation_config, logits_processor, stopping_criteria, *args, **kwargs
        )
