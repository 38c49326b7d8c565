"""TIDE with one thing changed. Shapes as in tide_lm.model."""

from typing import Any, Literal

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from studies.controls import narrower_ffn
from tide_lm import ops
from tide_lm.model import (
    EmbeddingMemory,
    Memory,
    MemoryRouter,
    TideConfig,
    TideForCausalLM,
    TideModel,
)
from tide_lm.model.gate import MemoryGate
from tide_lm.model.initialisation import draw_table
from tide_lm.model.memory import LayerMemory


@strict
class VariantConfig(TideConfig):
    """TIDE with one thing changed.

    `null_bias` is where a learned bias of the null bank starts, and `router_temperature` divides the logits.
    A router that `starts_even` and is not learned gives every slot 1 / (K + 1).
    `layer_scale` is where a learned number starts that each layer multiplies its memory by; in layer l it
    starts at sqrt(l) times that if `deeper_is_larger`. `table_std` is what rows are drawn with.

    With `layer_groups` the layers are so many groups in a row, each of which has its own share of the blocks.
    `view_rank` is that of a product in each layer that changes what it is given, and `gate_rank` of one that
    lets its state scale each of the D. With `gated` it goes through `MemoryGate`, without the last norm if
    `"plain"`, and if `"sigmoid"` the state scales each of the D by a full matrix; the FFN is narrower.

    With `router_heads` so many slices of D have weights of their own, and with `input_too` memory is added to
    the embeddings as well. Where rows are in values, `values_of_all` puts a mix of them there: `"learned"`
    weights for each slice of D that a gate has, which start with the layer's own block alone, or `"routed"`
    ones, of a second router. A learned number that starts at `value_scale` multiplies what is in values. All
    these need tables that are trained densely.
    """

    model_type = "tide-variant"

    null_bank: bool = True
    null_bias: int | float | None = None
    router_temperature: int | float = 1.0
    router_starts_even: bool = False
    router_is_learned: bool = True
    layer_scale: int | float | None = None
    deeper_is_larger: bool = False
    gain_is_learned: bool = True
    table_std: int | float | None = None
    layer_groups: int = 1
    router_heads: int = 1
    input_too: bool = False
    view_rank: int = 0
    gate_rank: int = 0
    gated: bool | Literal["plain", "sigmoid"] = False
    values_of_all: Literal["learned", "routed"] | None = None
    value_scale: int | float | None = None


class VariantRouter(MemoryRouter):
    def __init__(self, config: VariantConfig, layer_idx: int) -> None:
        super().__init__(config)
        self.null_bank, self.temperature = config.null_bank, config.router_temperature
        group = layer_idx * config.layer_groups // config.num_hidden_layers
        share = config.num_memory_blocks // config.layer_groups
        self.hidden_blocks = group * share, config.num_memory_blocks - (group + 1) * share  # before and after
        if config.null_bias is not None:
            self.null_bias = nn.Parameter(torch.empty(()))

    def forward(self, n_BTD: torch.Tensor) -> torch.Tensor:
        logits_BTS = super().forward(n_BTD) / self.temperature
        blocks_BTK, null_BT1 = logits_BTS[..., :-1], logits_BTS[..., -1:]
        if any(self.hidden_blocks):
            before, after = self.hidden_blocks
            seen = blocks_BTK[..., before : blocks_BTK.shape[-1] - after]
            blocks_BTK = nn.functional.pad(seen, self.hidden_blocks, value=-1e4)
        if hasattr(self, "null_bias"):
            null_BT1 = null_BT1 + self.null_bias.to(null_BT1.dtype)
        if not self.null_bank:
            null_BT1 = torch.full_like(null_BT1, -1e4)
        return torch.cat([blocks_BTK, null_BT1], -1)


class RouterHeads(MemoryRouter):
    """Logits for each of some slices of D."""

    def __init__(self, config: VariantConfig) -> None:
        nn.Linear.__init__(
            self, config.hidden_size, config.router_heads * (config.num_memory_blocks + 1), bias=False
        )


class FromZero(nn.Linear):
    """A linear map that starts at 0."""


class LowRank(nn.Sequential):
    """A map of D to D through a narrow middle, which starts at 0."""

    def __init__(self, dim: int, rank: int) -> None:
        super().__init__(nn.Linear(dim, rank, bias=False), FromZero(rank, dim, bias=False))


class SigmoidGate(nn.Module):
    """Twice what a sigmoid lets through, so that it starts near 1."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, dim, bias=False)

    def forward(self, n_BTD: torch.Tensor, rows_BTD: torch.Tensor) -> torch.Tensor:
        return 2 * torch.sigmoid(self.gate(n_BTD)) * rows_BTD


class VariantLayer(nn.Module):
    """What a variant changes of a layer; a class of layers, with extensions, is put below it."""

    def __init__(self, config: VariantConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        D, self.heads = config.hidden_size, config.router_heads
        self.router = VariantRouter(config, layer_idx) if self.heads == 1 else RouterHeads(config)
        self.layer_scale = None if config.layer_scale is None else nn.Parameter(torch.empty(()))
        self.view = LowRank(D, config.view_rank) if config.view_rank else None
        self.gate = LowRank(D, config.gate_rank) if config.gate_rank else None
        self.own_block = layer_idx % config.num_memory_blocks
        self.memory_gate: nn.Module | None = getattr(self, "memory_gate", None)
        if config.gated == "sigmoid":
            self.memory_gate, self.mlp = SigmoidGate(D), narrower_ffn(config, 1)
        elif config.gated:
            self.memory_gate, self.mlp = MemoryGate(config), narrower_ffn(config)
            if config.gated == "plain":
                self.memory_gate.norm = nn.Identity()
        self.value_scale = None if config.value_scale is None else nn.Parameter(torch.empty(()))
        self.value_weights = self.value_router = None
        if config.values_of_all == "learned":
            gates = D // self.self_attn.head_dim
            self.value_weights = nn.Parameter(torch.empty(config.num_memory_blocks, gates))
        elif config.values_of_all == "routed":
            self.value_router = MemoryRouter(config)
        self.input_too = config.input_too and layer_idx == 0
        if self.input_too:
            self.input_norm = LlamaRMSNorm(D, eps=config.rms_norm_eps)
            self.input_router = MemoryRouter(config)

    def forward(self, hidden_states: torch.Tensor, memory: Memory, **kwargs: Any) -> torch.Tensor:
        if self.input_too:
            logits = self.input_router(self.input_norm(hidden_states))
            hidden_states = ops.memory_mix(hidden_states, logits, memory.rows_UKD, memory.index_BT)
        return super().forward(hidden_states, memory, **kwargs)

    def attend(self, n: torch.Tensor, memory: LayerMemory | None, **kwargs: Any) -> torch.Tensor:
        if memory is None:  # dropped in this layer
            return super().attend(n, memory, **kwargs)
        rows_UKD, row_UD = memory.rows_UKD, memory.own_row_UD
        if self.value_weights is not None:
            slices = rows_UKD.unflatten(-1, (self.value_weights.shape[1], -1))
            row_UD = (self.value_weights.unsqueeze(-1) * slices).sum(1).flatten(1)
        if self.value_router is not None:
            mixed = ops.memory_mix(torch.zeros_like(n), self.value_router(n), rows_UKD)
            row_UD = mixed.flatten(0, 1)
        if self.value_scale is not None:
            row_UD = self.value_scale * row_UD
        return super().attend(n, memory._replace(own_row_UD=row_UD), **kwargs)

    def inject(
        self, h: torch.Tensor, update: torch.Tensor, logits: torch.Tensor, memory: LayerMemory
    ) -> torch.Tensor:
        plain = self.heads == 1 and self.layer_scale is self.view is self.gate is self.memory_gate is None
        if plain:
            return super().inject(h, update, logits, memory)
        if self.heads == 1:
            zero = torch.zeros_like(h)
            mixed = super().inject(zero, zero, logits, memory)
        else:
            mixed = self._by_heads(h, logits, memory.rows_UKD)
        if self.layer_scale is not None:
            mixed = self.layer_scale.to(h.dtype) * mixed
        if self.view is not None:
            mixed = mixed + self.view(mixed)
        if self.gate is not None:
            mixed = mixed * (1 + self.gate(self.post_attention_layernorm(h)))
        if self.memory_gate is not None:
            mixed = self.memory_gate(self.post_attention_layernorm(h + update), mixed)
        return h + update + mixed.to(h.dtype)

    def _by_heads(self, h: torch.Tensor, logits: torch.Tensor, rows_UKD: torch.Tensor) -> torch.Tensor:
        alpha_BTHK = ops.router_weights(logits.unflatten(-1, (self.heads, -1)))[..., :-1]
        rows_BTKHd = rows_UKD.view(*h.shape[:2], rows_UKD.shape[1], self.heads, -1)
        return (alpha_BTHK.transpose(-1, -2).unsqueeze(-1) * rows_BTKHd).sum(2).flatten(-2)


class VariantModel(TideModel):
    @classmethod
    def layer_class(cls, config: VariantConfig) -> type[nn.Module]:
        return type("VariantLayer", (VariantLayer, super().layer_class(config)), {})

    def __init__(self, config: VariantConfig) -> None:
        super().__init__(config)
        if self.memory is not None:
            self.memory.norm.weight.requires_grad_(config.gain_is_learned)
        for layer in self.layers:
            layer.router.requires_grad_(config.router_is_learned)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        config = self.config
        if isinstance(module, EmbeddingMemory) and config.table_std is not None:
            draw_table(module.weight, module.tokens, torch.initial_seed(), config.table_std)
        if isinstance(module, VariantRouter):
            if config.router_starts_even:
                init.zeros_(module.weight)
            if config.null_bias is not None:
                init.constant_(module.null_bias, config.null_bias)
        if isinstance(module, FromZero):
            init.zeros_(module.weight)
        if isinstance(module, VariantLayer) and module.layer_scale is not None:
            times = (module.layer_idx + 1) ** 0.5 if config.deeper_is_larger else 1
            init.constant_(module.layer_scale, config.layer_scale * times)
        if isinstance(module, VariantLayer) and module.value_weights is not None:
            init.zeros_(module.value_weights)
            init.ones_(module.value_weights[module.own_block])
        if isinstance(module, VariantLayer) and module.value_scale is not None:
            init.constant_(module.value_scale, config.value_scale)


class Variant(TideForCausalLM):
    config_class = VariantConfig
    decoder_class = VariantModel


AutoConfig.register(Variant.config_class.model_type, Variant.config_class, exist_ok=True)
AutoModelForCausalLM.register(Variant.config_class, Variant, exist_ok=True)
