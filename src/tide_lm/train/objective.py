"""What a run trains: the model of its settings, and the loss as one module.

The module's forward is all that a step calls, so that sharding it from outside shards the step.
"""

import torch
from torch import nn

from tide_lm.data.shards import Manifest
from tide_lm.model import TideConfig, TideForCausalLM
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
        self._train_states = torch.compile(self._states) if config.train.compile else self._states

    def forward(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> Loss:
        # Validation has shapes of its own, which would each be compiled.
        states = self._train_states if self.training else self._states
        with torch.autocast(inputs_BT.device.type, torch.bfloat16, enabled=self.in_bfloat16):
            hidden_ND = states(inputs_BT).flatten(0, 1)
            head_VD = self.model.lm_head.weight
            return chunked_cross_entropy(hidden_ND, head_VD, targets_BT.flatten(), self.z_loss)

    def _states(self, inputs_BT: torch.Tensor) -> torch.Tensor:
        return self.model.model(inputs_BT, use_cache=False).last_hidden_state
