"""Rivals as their authors have them: value embeddings, per-layer embeddings, and lookup experts.

The part that reads the token is theirs, with its initialisation; all around it is our Llama, with grouped
key heads and AdamW for all. Where a rival has tables, its layers share the K x D numbers of a token, so that
it has as many bytes as TIDE with K blocks.

Shapes as in tide_lm.model, and C columns of a token's K x D numbers.
"""

from itertools import pairwise
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

from studies.controls import builder
from studies.designs import RawMemory, ScalarsModel
from studies.extensions import MemoryGateNorm
from tide_lm.model import Memory, TideConfig, TideDecoderLayer, TideForCausalLM
from tide_lm.model.initialisation import draw_table
from tide_lm.model.memory import LayerMemory
from tide_lm.model.tide import TideModel
from tide_lm.model.values import ValueAttention

Columns = tuple[int, int]


def shared_out(config: TideConfig, tables: int, unit: int) -> list[Columns]:
    """Share a token's K x D columns out among tables, in whole units and as evenly as these allow."""
    units = config.num_memory_blocks * config.hidden_size // unit
    return list(pairwise(unit * (units * table // tables) for table in range(tables + 1)))


def values_of_heads(config: TideConfig) -> int:
    """The numbers in the values of all key heads, which are one value embedding."""
    return config.num_key_value_heads * config.head_dim


class RowLayer(TideDecoderLayer):
    """A Llama's layer that is given some columns of the token's numbers, or none."""

    def __init__(self, config: TideConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.router = self.router_weights = nn.Identity()
        self.columns = self.columns_by_layer(config).get(layer_idx)

    @staticmethod
    def columns_by_layer(config: TideConfig) -> dict[int, Columns]:
        raise NotImplementedError

    def forward(self, hidden_states: torch.Tensor, memory: Memory, **kwargs: Any) -> torch.Tensor:
        dropped = self.layer_idx in kwargs.pop("drop_memory_layers", ())
        routed = kwargs.pop("output_router_weights", False)
        own = None
        if self.columns is not None and not dropped:
            row_UC = memory.rows_UJD.flatten(1)[:, slice(*self.columns)]
            own = LayerMemory(memory.rows_UJD, None, None, row_UC, None)
        return self.block(hidden_states, own, routed, **kwargs)

    def inject(self, h: torch.Tensor, update: torch.Tensor, *_: Any) -> torch.Tensor:
        return h + update


class ValueLayer(RowLayer):
    """A layer whose attention has value embeddings, as many as its columns are times the values."""

    attention: type[ValueAttention]

    def __init__(self, config: TideConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if self.columns is not None:
            embeddings = (self.columns[1] - self.columns[0]) // values_of_heads(config)
            self.self_attn = self.attention(config, layer_idx, embeddings)

    def attend(self, n: torch.Tensor, memory: LayerMemory | None, **kwargs: Any) -> torch.Tensor:
        if memory is not None:
            kwargs["row_BTD"] = memory.own_row_UD.view(*n.shape[:2], -1)
        return super().attend(n, memory, **kwargs)


@strict
class NanochatConfig(TideConfig):
    model_type = "tide-nanochat-values"


class FirstChannels(nn.Linear):
    """Gates that see 12 numbers of the state; weights begin slightly above 0."""

    def __init__(self, config: TideConfig, gates: int) -> None:
        super().__init__(min(12, config.hidden_size), gates, bias=False)

    def draw(self, _: TideConfig) -> None:
        init.uniform_(self.weight, 0.0, 0.02)

    def forward(self, n_BTD: torch.Tensor) -> torch.Tensor:
        return super().forward(n_BTD[..., : self.in_features])


class NanochatAttention(ValueAttention):
    """`v = W_v n + sum_s 3 sigmoid(W_s n[:12]) ve_s`, with one gate for each head and embedding."""

    def __init__(self, config: TideConfig, layer_idx: int, embeddings: int) -> None:
        super().__init__(config, layer_idx)
        self.value_gate = FirstChannels(config, embeddings * config.num_key_value_heads)

    def add_row(self, v: torch.Tensor, gates: torch.Tensor, row_BTD: torch.Tensor) -> torch.Tensor:
        added = 3 * torch.sigmoid(gates).unsqueeze(-1) * row_BTD.unflatten(-1, (-1, self.head_dim))
        return v + added.unflatten(2, (-1, v.shape[2])).sum(2).to(v.dtype)


class NanochatLayer(ValueLayer):
    """Every other layer has value embeddings, and the last is one of these."""

    attention = NanochatAttention

    @staticmethod
    def columns_by_layer(config: TideConfig) -> dict[int, Columns]:
        last = config.num_hidden_layers - 1
        layers = range(last % 2, last + 1, 2)
        return dict(zip(layers, shared_out(config, len(layers), values_of_heads(config)), strict=True))


class NanochatModel(TideModel):
    memory_class = RawMemory  # which begins as W_v does

    @classmethod
    def layer_class(cls, config: TideConfig) -> type[nn.Module]:
        return NanochatLayer


class NanochatValues(TideForCausalLM):
    """Value embeddings as nanochat has them in 2026, in gpt.py.

    There, value embeddings have 19 times the rate of the head (0.15 and 0.008, both with Adam), and a decay
    of 0.01. A layer has one embedding; with K = 8 ours have more, as TIDE has more bytes.
    """

    config_class = NanochatConfig
    decoder_class = NanochatModel


@strict
class ModdedConfig(TideConfig):
    model_type = "tide-modded-values"


class Lambdas(nn.Module):
    """The numbers that the values and each of the embeddings are multiplied by."""

    def __init__(self, embeddings: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1 + embeddings))

    def draw(self, _: TideConfig) -> None:
        init.constant_(self.weight, 0.5)

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.weight


class ModdedAttention(ValueAttention):
    """`v = lambda_0 W_v n + sum_s lambda_s ve_s`."""

    def __init__(self, config: TideConfig, layer_idx: int, embeddings: int) -> None:
        super().__init__(config, layer_idx)
        self.value_gate = Lambdas(embeddings)

    def add_row(self, v: torch.Tensor, lambdas: torch.Tensor, row_BTD: torch.Tensor) -> torch.Tensor:
        embeddings = row_BTD.unflatten(-1, (len(lambdas) - 1, *v.shape[2:]))
        added = (lambdas[1:, None, None] * embeddings).sum(2)
        return lambdas[0].to(v.dtype) * v + added.to(v.dtype)


class ModdedLayer(ValueLayer):
    """The first three layers have a table each, and the last three have the same tables again."""

    attention = ModdedAttention

    @staticmethod
    def columns_by_layer(config: TideConfig) -> dict[int, Columns]:
        layers, tables = config.num_hidden_layers, shared_out(config, 3, values_of_heads(config))
        return dict(enumerate(tables)) | dict(enumerate(tables, layers - 3))


class ModdedMemory(RawMemory):
    """Rows that begin twice as large as what W_v gives."""

    def draw(self, config: TideConfig) -> None:
        std = 2 * config.initializer_range * config.hidden_size**0.5
        draw_table(self.weight, self.own, torch.initial_seed(), std)


class ModdedModel(TideModel):
    memory_class = ModdedMemory

    @classmethod
    def layer_class(cls, config: TideConfig) -> type[nn.Module]:
        return ModdedLayer


class ModdedValues(TideForCausalLM):
    """Value embeddings as modded-nanogpt had them through 2025, in train_gpt.py.

    There, they have 75 times the rate of the head. By now it has five tables in five layers, with gates.
    """

    config_class = ModdedConfig
    decoder_class = ModdedModel


@strict
class GemmaConfig(TideConfig):
    model_type = "tide-gemma-tables"


class PerLayerInput(nn.Module):
    """What a layer adds: `RMSNorm(W_out (gelu(W_gate h) * i))`.

    The input i is `(RMSNorm(W e) + sqrt(C) row) / sqrt(2)`, with the token's row e of E. Gemma multiplies e
    by sqrt(D) and the product by 1 / sqrt(D); its RMSNorm of the product has the same gains in each layer.
    """

    def __init__(self, config: TideConfig, columns: Columns) -> None:
        super().__init__()
        D, C = config.hidden_size, columns[1] - columns[0]
        self.projection, self.gate = nn.Linear(D, C, bias=False), nn.Linear(D, C, bias=False)
        self.out = nn.Linear(C, D, bias=False)
        self.projection_norm = LlamaRMSNorm(C, eps=config.rms_norm_eps)
        self.norm = MemoryGateNorm(D, eps=config.rms_norm_eps)

    def forward(self, h_BTD: torch.Tensor, row_BTC: torch.Tensor, embedded_BTD: torch.Tensor) -> torch.Tensor:
        projected = self.projection_norm(self.projection(embedded_BTD))
        row_BTC = row_BTC.to(projected.dtype) * row_BTC.shape[-1] ** 0.5
        gate = nn.functional.gelu(self.gate(h_BTD), approximate="tanh")
        return self.norm(self.out(gate * (projected + row_BTC) * 0.5**0.5))


class GemmaLayer(RowLayer):
    """A layer that adds its per-layer input to the state after the FFN."""

    def __init__(self, config: GemmaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.per_layer_input = PerLayerInput(config, self.columns)

    @staticmethod
    def columns_by_layer(config: TideConfig) -> dict[int, Columns]:
        width = config.num_memory_blocks * config.hidden_size // config.num_hidden_layers
        return {layer: (layer * width, (layer + 1) * width) for layer in range(config.num_hidden_layers)}

    def block(
        self, hidden_states: torch.Tensor, memory: LayerMemory | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        embedded_BTD = kwargs.pop("embedded_BTD")
        h = super().block(hidden_states, memory, *args, **kwargs)
        if memory is None:
            return h
        row_BTC = memory.own_row_UD.view(*h.shape[:2], -1)
        return h + self.per_layer_input(h, row_BTC, embedded_BTD).to(h.dtype)


class GemmaModel(ScalarsModel):
    @classmethod
    def layer_class(cls, config: TideConfig) -> type[nn.Module]:
        return GemmaLayer


class GemmaTables(TideForCausalLM):
    """Per-layer embeddings as Gemma 3n and Gemma 4 have them, in transformers; as in 4, without AltUp.

    Their last norm begins with gains of 1, which is `memory_gain_init`. How they were trained is not known.
    """

    config_class = GemmaConfig
    decoder_class = GemmaModel


@strict
class MoleConfig(TideConfig):
    """In training a layer has so many `experts` of the FFN's size, and afterwards a table for each."""

    model_type = "tide-mole"

    experts: int = 4


class MoleLayer(LlamaDecoderLayer):
    """`h = h~ + FFN(n~) + sum_j softmax(W_r n~)_j FFN_j(RMSNorm(e))`, with the token's row e of E."""

    def __init__(self, config: MoleConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.experts = nn.ModuleList(LlamaMLP(config) for _ in range(config.experts))
        self.expert_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.router = nn.Linear(config.hidden_size, config.experts, bias=False)

    def forward(self, hidden_states: torch.Tensor, embedded_BTD: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        h = hidden_states + self.self_attn(hidden_states=normed, **kwargs)[0]
        n, e = self.post_attention_layernorm(h), self.expert_layernorm(embedded_BTD)
        weights_BTJ = torch.softmax(self.router(n), -1, dtype=torch.float32).to(h.dtype)
        rows_BTJD = torch.stack([expert(e) for expert in self.experts], -2)
        return h + self.mlp(n) + (weights_BTJ.unsqueeze(-1) * rows_BTJD).sum(-2)


class MoleModel(TideModel):
    def __init__(self, config: MoleConfig) -> None:
        if config.num_memory_blocks:
            raise ValueError(
                f"{config.model_type} has no tables in training: set num_memory_blocks, "
                f"{config.num_memory_blocks}, to 0"
            )
        super().__init__(config)

    @classmethod
    def layer_class(cls, config: TideConfig) -> type[nn.Module]:
        return MoleLayer

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        return super().forward(inputs_embeds=inputs_embeds, embedded_BTD=inputs_embeds, **kwargs)


class Mole(TideForCausalLM):
    """MoLE, whose experts see E alone, so that each of their tables is computed once, after training.

    A layer's experts then are tables of V x D numbers each. As many bytes as TIDE with a block for each layer
    has allow one expert in a layer, and nothing to route; MoLE's authors have 4 or 16.
    """

    config_class = MoleConfig
    decoder_class = MoleModel


for _kind in (NanochatValues, ModdedValues, GemmaTables, Mole):
    AutoConfig.register(_kind.config_class.model_type, _kind.config_class, exist_ok=True)
    AutoModelForCausalLM.register(_kind.config_class, _kind, exist_ok=True)

RIVALS = {
    "nanochat-values": builder(NanochatValues),
    "modded-values": builder(ModdedValues),
    "gemma-tables": builder(GemmaTables),
    "mole": builder(Mole),
    "mole-one": builder(Mole, experts=1),
}
