"""Controls: other uses of the parameters of TIDE's tables.

Each control has the K tables of TIDE, of V x D numbers each. Those with tables of their own for each layer
have one a layer, so that K is the number of layers. Shapes as in tide_lm.model.
"""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaModel

from studies.extensions import GatedLayer, MemoryGate, OwnBlockLayer
from tide_lm.model import EmbeddingMemory, Memory, TideConfig, TideDecoderLayer, TideForCausalLM, TideModel
from tide_lm.model.checks import checked_layers
from tide_lm.model.extensions import extended
from tide_lm.model.memory import LayerMemory
from tide_lm.model.tide import MemoryNorm
from tide_lm.model.values import RowInValues


@strict
class InputOnlyConfig(TideConfig):
    model_type = "tide-input-only"


class InputOnlyModel(TideModel):
    """The tables' rows, normalised and added once, to the input, with the weights that routers start at."""

    @classmethod
    def layer_class(cls, config: TideConfig) -> type[nn.Module]:
        return LlamaDecoderLayer

    @property
    def share(self) -> float:
        """The weight of each row."""
        return 1 / (self.config.num_memory_blocks + 1)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        memory: Memory | None = None,
        **kwargs: Any,
    ) -> Any:
        memory = self.memory_for(input_ids, memory)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        added = self.share * memory.rows_UJD.sum(1).view_as(inputs_embeds)
        if issubclass(self.layer_class(self.config), TideDecoderLayer):
            dropped = checked_layers(kwargs.get("drop_memory_layers"), len(self.layers))
            kwargs |= {"memory": memory, "drop_memory_layers": dropped}
        return LlamaModel.forward(self, inputs_embeds=inputs_embeds + added.to(inputs_embeds.dtype), **kwargs)


class InputOnly(TideForCausalLM):
    config_class = InputOnlyConfig
    decoder_class = InputOnlyModel


@strict
class WideInputConfig(TideConfig):
    model_type = "tide-wide-input"


class WideInputMemory(EmbeddingMemory):
    """A token's K rows as one wide embedding, projected to the residual stream."""

    def __init__(self, config: TideConfig) -> None:
        super().__init__(config)
        del self.norm
        K, D = config.num_memory_blocks, config.hidden_size
        self.projection = nn.Linear(K * D, D, bias=False)

    def forward(self, input_ids_BT: torch.Tensor, *_: object) -> Memory:
        rows = nn.functional.embedding(input_ids_BT.flatten(), self.weight.flatten(1))
        return Memory(self.projection(rows).unsqueeze(1))


class WideInputModel(InputOnlyModel):
    memory_class, share = WideInputMemory, 1.0


class WideInput(TideForCausalLM):
    """A wider, factorised input embedding."""

    config_class = WideInputConfig
    decoder_class = WideInputModel


class _OwnTables(TideModel):
    def __init__(self, config: TideConfig) -> None:
        if config.num_memory_blocks != config.num_hidden_layers:
            raise ValueError(
                f"{config.model_type} has a table for each of {config.num_hidden_layers} layers: set "
                f"num_memory_blocks, {config.num_memory_blocks}, to that"
            )
        super().__init__(config)


@strict
class LayerTablesConfig(TideConfig):
    """A config; if `narrow`, layers have no more parameters than those of other models."""

    model_type = "tide-layer-tables"

    narrow: bool = False


def narrower_ffn(config: TideConfig, matrices: float = 2) -> LlamaMLP:
    """Return an FFN that is narrower by the parameters of so many matrices of D x D, to a multiple of 8."""
    narrow = copy(config)
    narrow.intermediate_size = 8 * round((config.intermediate_size - matrices * config.hidden_size / 3) / 8)
    return LlamaMLP(narrow)


class LayerTablesLayer(TideDecoderLayer):
    def __init__(self, config: LayerTablesConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.memory_gate = MemoryGate(config)
        self.router = self.router_weights = nn.Identity()
        if config.narrow:
            self.mlp = narrower_ffn(config)

    def inject(self, h: torch.Tensor, update: torch.Tensor, _: Any, memory: LayerMemory) -> torch.Tensor:
        h = h + update
        row = memory.own_row_UD.view_as(h)
        return h + self.memory_gate(self.post_attention_layernorm(h), row).to(h.dtype)


class LayerTablesModel(_OwnTables):
    @classmethod
    def layer_class(cls, config: TideConfig) -> type[nn.Module]:
        return extended(LayerTablesLayer, config)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MemoryNorm) and not self.config.memory_values:  # the last norm is what decides
            init.ones_(module.weight)


class LayerTables(TideForCausalLM):
    """One table per layer, without a router. With `memory_values` a layer's row is in its values too."""

    config_class = LayerTablesConfig
    decoder_class = LayerTablesModel


@strict
class ValueTablesConfig(TideConfig):
    model_type = "tide-value-tables"


class ValueTablesLayer(RowInValues, TideDecoderLayer):
    """Value embeddings, as in nanochat."""

    def __init__(self, config: TideConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.router = self.router_weights = nn.Identity()

    def inject(self, h: torch.Tensor, update: torch.Tensor, *_: Any) -> torch.Tensor:
        return h + update


class ValueTablesModel(_OwnTables):
    @classmethod
    def layer_class(cls, config: TideConfig) -> type[nn.Module]:
        return ValueTablesLayer


class ValueTables(TideForCausalLM):
    config_class = ValueTablesConfig
    decoder_class = ValueTablesModel


@strict
class InputAndValuesConfig(TideConfig):
    model_type = "tide-input-and-values"


class InputAndValuesModel(ValueTablesModel, InputOnlyModel):
    pass


class InputAndValues(TideForCausalLM):
    """The tables at the input, and a layer's own in its values."""

    config_class = InputAndValuesConfig
    decoder_class = InputAndValuesModel


@strict
class LayerRouterConfig(TideConfig):
    model_type = "tide-layer-router"


class LayerRouterModel(TideModel):
    @classmethod
    def layer_class(cls, config: TideConfig) -> type[nn.Module]:
        return extended(OwnBlockLayer, config)


class LayerRouter(TideForCausalLM):
    """TIDE whose layers weigh one table each against the null bank. Fewer tables than layers are shared."""

    config_class = LayerRouterConfig
    decoder_class = LayerRouterModel


@strict
class GatedConfig(TideConfig):
    model_type = "tide-gated"


class GatedModel(TideModel):
    @classmethod
    def layer_class(cls, config: TideConfig) -> type[nn.Module]:
        return extended(GatedLayer, config)


class Gated(TideForCausalLM):
    """TIDE whose layers gate what they mix."""

    config_class = GatedConfig
    decoder_class = GatedModel


_OF_ITS_KIND = {"auto_map", "model_type", "transformers_version"}


def builder(kind: type[TideForCausalLM], **changes: Any) -> Callable[[TideConfig], TideForCausalLM]:
    """Return a function that makes models of a kind from the shape that a trainer gives."""

    def build(shape: TideConfig) -> TideForCausalLM:
        values = {name: getattr(shape, name) for name in shape.to_diff_dict() if name not in _OF_ITS_KIND}
        return kind(kind.config_class(**{**values, **changes}))

    return build


_KINDS = {
    "input-only": InputOnly,
    "wide-input": WideInput,
    "layer-tables": LayerTables,
    "layer-router": LayerRouter,
    "layer-tables-and-values": LayerTables,
    "layer-router-and-values": LayerRouter,
    "value-tables": ValueTables,
    "input-and-values": InputAndValues,
    "gated": Gated,
}
for _kind in _KINDS.values():
    AutoConfig.register(_kind.config_class.model_type, _kind.config_class, exist_ok=True)
    AutoModelForCausalLM.register(_kind.config_class, _kind, exist_ok=True)

CONTROLS = {name: builder(kind) for name, kind in _KINDS.items()}
CONTROLS["narrow-layer-tables-and-values"] = builder(LayerTables, narrow=True)
