"""What a run trains: the model of its settings, and the loss as one module.

The module's forward is all that a step calls, so that sharding it from outside shards the step.
"""

from typing import Any

import torch
from torch import nn

from tide_lm.data.shards import Manifest
from tide_lm.model import Memory, TideConfig, TideDecoderLayer, TideForCausalLM
from tide_lm.ops.cross_entropy import Loss, chunked_cross_entropy
from tide_lm.run_config import RunConfig


def model_config(config: RunConfig, manifest: Manifest) -> TideConfig:
    """The preset with what the settings and the data's tokenizer change."""
    shape = config.model.shape()
    return TideConfig(
        **shape.to_transformers()
        | {
            "memory_gain_init": config.model.memory_gain_init,
            "max_position_embeddings": max(shape.max_position_embeddings, config.data.sequence),
            "bos_token_id": manifest.bos_token_id,
            "eos_token_id": manifest.eos_token_id,
        }
    )


class Objective(nn.Module):
    """The loss of a batch, `inputs_BT` and `targets_BT`, in the run's precision."""

    def __init__(self, model: TideForCausalLM, config: RunConfig) -> None:
        super().__init__()
        self.model = model
        self.z_loss, self.in_bfloat16 = config.optim.z_loss, config.train.dtype == "bfloat16"
        if config.train.activation_checkpointing:
            model.gradient_checkpointing_enable()
        if config.train.compile:
            compile_layers(model)

    def forward(
        self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor, memory: Memory | None = None
    ) -> Loss:
        """`memory` are rows that were fetched beforehand; without it the model looks them up."""
        decoder = self.model.model
        with torch.autocast(inputs_BT.device.type, torch.bfloat16, enabled=self.in_bfloat16):
            embedded_BTD = decoder.embed_tokens(inputs_BT)
            if self.in_bfloat16:  # and so is the residual stream
                embedded_BTD = embedded_BTD.to(torch.bfloat16)
            more: dict[str, Any] = {}
            if decoder.memory is not None:
                more["memory"] = decoder.memory(inputs_BT) if memory is None else memory
            hidden_BTD = decoder(inputs_embeds=embedded_BTD, use_cache=False, **more).last_hidden_state
            head_VD = self.model.lm_head.weight
            return chunked_cross_entropy(hidden_BTD.flatten(0, 1), head_VD, targets_BT.flatten(), self.z_loss)


def compile_layers(model: TideForCausalLM) -> None:
    """One graph for all layers: it compiles in seconds, and attention stays causal without a mask.

    Compiled as a whole, the model would build a mask, and attention would compute what the mask throws away.
    """
    for layer in model.model.layers:
        if isinstance(layer, TideDecoderLayer):
            layer.block = torch.compile(layer.block)  # type: ignore[method-assign]
        else:
            layer.compile()
