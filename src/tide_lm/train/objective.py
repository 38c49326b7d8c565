"""What a run trains: the model of its settings, and the loss as one module.

The module's forward is all that a step calls, so that sharding it from outside shards the step.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tide_lm.data.shards import Manifest
from tide_lm.model import Memory, TideConfig, TideDecoderLayer, TideForCausalLM
from tide_lm.model.pretrained import OF_MEMORY
from tide_lm.model.tide import MemoryNorm
from tide_lm.ops.cross_entropy import Loss, chunked_cross_entropy
from tide_lm.ops.memory_rows import normed_rows
from tide_lm.ops.row_index import RowIndex
from tide_lm.run.settings import RunConfig, TrainSection


def model_config(config: RunConfig, manifest: Manifest) -> TideConfig:
    """Return the start's config, or the preset's with what settings and the data's tokenizer change."""
    shape = config.model.shape()
    if config.model.start:
        if config.data.sequence > shape.max_position_embeddings:
            raise ValueError(
                f"data.sequence is {config.data.sequence}, and {config.model.name} knows "
                f"{shape.max_position_embeddings} positions: lower it"
            )
        return TideConfig.from_pretrained(config.model.start, num_memory_blocks=shape.num_memory_blocks)
    return TideConfig(
        **shape.to_transformers()
        | {
            "memory_gain_init": config.model.memory_gain_init,
            "memory_value_scale": config.model.memory_value_scale,
            "max_position_embeddings": max(shape.max_position_embeddings, config.data.sequence),
            "bos_token_id": manifest.bos_token_id,
            "eos_token_id": manifest.eos_token_id,
        }
    )


def choose_parts(model: TideForCausalLM, settings: TrainSection) -> None:
    """Freeze every parameter outside `train.parts`."""
    if settings.parts == "all":
        return
    if model.model.tables is None:
        raise ValueError(f"train.parts is {settings.parts!r}, and the model has no memory: set it to 'all'")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(bool(OF_MEMORY.search(name)))


@dataclass(frozen=True, eq=False)
class Lent:
    """Rows of the tables that a batch needs, as they are stored, and where it needs them."""

    raw_UKD: torch.Tensor
    where: RowIndex


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

    def forward(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor, lent: Lent | None = None) -> Loss:
        """`lent` are rows that were fetched beforehand; without them the model looks them up."""
        decoder = self.model.model
        with self.precision(inputs_BT.device):
            embedded_BTD = decoder.embed_tokens(inputs_BT)
            if self.in_bfloat16:  # and so is the residual stream
                embedded_BTD = embedded_BTD.to(torch.bfloat16)
            more: dict[str, Any] = {}
            if (tables := decoder.tables) is not None:
                more["memory"] = tables(inputs_BT) if lent is None else self._normed(lent, tables.norm)
            hidden_BTD = decoder(inputs_embeds=embedded_BTD, use_cache=False, **more).last_hidden_state
            head_VD = self.model.lm_head.weight
            return chunked_cross_entropy(hidden_BTD.flatten(0, 1), head_VD, targets_BT.flatten(), self.z_loss)

    def precision(self, device: torch.device) -> torch.autocast:
        """Return the context in which products are calculated."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.in_bfloat16)

    def _normed(self, lent: Lent, norm: MemoryNorm) -> Memory:
        dtype = torch.bfloat16 if self.in_bfloat16 else lent.raw_UKD.dtype
        layers, config = len(self.model.model.layers), self.model.config
        rows_UKD, placeholders = normed_rows(
            lent.raw_UKD,
            norm.weight,
            norm.eps,
            lent.where,
            layers,
            dtype,
            values=config.memory_values,
            own_block=config.memory_own_block,
        )
        return Memory(rows_UKD, lent.where.index_BT, placeholders)


def compile_layers(model: TideForCausalLM) -> None:
    """One graph for all layers: it compiles in seconds, and attention stays causal without a mask.

    Compiled as a whole, the model would build a mask, and attention would compute what the mask throws away.
    """
    for layer in model.model.layers:
        if isinstance(layer, TideDecoderLayer):
            layer.block = torch.compile(layer.block)  # type: ignore[method-assign]
        else:
            layer.compile()
