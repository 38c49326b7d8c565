"""The loss of a batch as one module, so that sharding it from outside shards the whole step."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tide_lm.model import Memory, TideDecoderLayer, TideForCausalLM
from tide_lm.model.tide import MemoryNorm
from tide_lm.ops.cross_entropy import Loss, chunked_cross_entropy
from tide_lm.ops.memory_rows import normed_rows
from tide_lm.ops.row_index import RowIndex
from tide_lm.run.settings import TrainSection


@dataclass(frozen=True, eq=False)
class BatchRows:
    """The rows of the tables that a batch needs, as they are stored, and where it needs them."""

    raw_UJD: torch.Tensor
    indices: tuple[RowIndex, ...]  # one for each of a position's rows

    def index(self) -> torch.Tensor:
        """Return which rows each position has."""
        parts, first = [], 0
        for index in self.indices:
            parts.append(index.index_BT + first if first else index.index_BT)
            first += len(index.ids_U)
        return torch.stack(parts) if len(parts) > 1 else parts[0]


class Objective(nn.Module):
    """The loss of a batch, `inputs_BT` and `targets_BT`, in the run's precision."""

    def __init__(self, model: TideForCausalLM, settings: TrainSection, z_loss: float) -> None:
        super().__init__()
        self.model, self.z_loss, self.in_bfloat16 = model, z_loss, settings.dtype == "bfloat16"
        if settings.activation_checkpointing:
            model.gradient_checkpointing_enable()
        if settings.compile:
            compile_layers(model)

    def forward(
        self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor, rows: BatchRows | None = None
    ) -> Loss:
        """Return the loss; `rows` were fetched beforehand, and without them the model looks them up."""
        decoder = self.model.model
        with self.precision(inputs_BT.device):
            embedded_BTD = decoder.embed_tokens(inputs_BT)
            if self.in_bfloat16:  # and so is the residual stream
                embedded_BTD = embedded_BTD.to(torch.bfloat16)
            more: dict[str, Any] = {}
            if (tables := decoder.tables) is not None:
                more["memory"] = tables(inputs_BT) if rows is None else self._normed(rows, tables.norm)
            hidden_BTD = decoder(inputs_embeds=embedded_BTD, use_cache=False, **more).last_hidden_state
            head_VD = self.model.lm_head.weight
            return chunked_cross_entropy(hidden_BTD.flatten(0, 1), head_VD, targets_BT.flatten(), self.z_loss)

    def precision(self, device: torch.device) -> torch.autocast:
        """Return the context in which products are calculated."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.in_bfloat16)

    def _normed(self, rows: BatchRows, norm: MemoryNorm) -> Memory:
        config = self.model.config
        rows_UJD, placeholders = normed_rows(
            rows.raw_UJD,
            norm.weight,
            norm.eps,
            rows.indices,
            config.num_hidden_layers,
            torch.bfloat16 if self.in_bfloat16 else rows.raw_UJD.dtype,
            values=config.memory_values,
        )
        return Memory(rows_UJD, rows.index(), placeholders)


def compile_layers(model: TideForCausalLM) -> None:
    """Compile one graph for all layers, which takes seconds; attention stays causal without a mask.

    Compiled as a whole, the model would build a mask, and attention would compute what the mask discards.
    """
    for layer in model.model.layers:
        if isinstance(layer, TideDecoderLayer):
            layer.block = torch.compile(layer.block)  # type: ignore[method-assign]
        else:
            layer.compile()
