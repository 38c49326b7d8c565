"""What generation with TIDE needs besides transformers' own."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from tide_lm.model.pairs import has_tokens, previous_ids

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

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,  # transformers looks for this name
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> Any:
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length,
            past_key_values,
            attention_mask,
            inputs_embeds,
            is_first_iteration,
            **kwargs,
        )
        if self.config.memory_pair_rows and inputs.get("input_ids") is not None:
            new = inputs["input_ids"].shape[1]
            if new == input_ids.shape[1] and has_tokens(past_key_values):
                raise ValueError(
                    "this model has rows for pairs of tokens, and the token before the first of these is in "
                    "past_key_values alone: give generate the whole text, and leave prefill_chunk_size out"
                )
            # One more than are new, copied so that a compiled forward meets the same strides at each step.
            of_last = previous_ids(input_ids[:, -new - 1 :], attention_mask)[:, -new:]
            inputs["previous_ids"] = of_last.clone(memory_format=torch.contiguous_format)
        return inputs

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        if self.config.memory_pair_rows:
            raise ValueError(
                "continuous batching of transformers hides which tokens follow each other, and this model "
                "has rows for pairs of tokens: use generate, the engine of tide-lm, or vLLM"
            )
        return super().init_continuous_batching(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("memory") is not None:
            raise ValueError("generate looks the memory up for each new token: leave memory= out")
        return super().generate(*args, **kwargs)
