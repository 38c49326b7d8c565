"""Null models, which have no tables, and TIDE with rows for pairs of tokens. Shapes as in tide_lm.model."""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from studies.controls import GatedModel, builder
from tide_lm.model import EmbeddingMemory, Memory, TideConfig, TideForCausalLM, TideModel
from tide_lm.model.values import ValueAttention

START = 0.1  # of the learned scalars, as gains have it in the best recipe


@strict
class ReinjectedConfig(TideConfig):
    """Puts E's row into attention's values too if `in_values`, gated as TIDE's rows are there.

    If `convolved`, a short convolution goes over what a layer adds to its state.
    """

    model_type = "tide-reinjected"

    in_values: bool = False
    convolved: bool = False


class ShortConvolution(nn.Module):
    """`m + silu(conv(RMSNorm(m)))`: each of the D over the last tokens, and nothing of it at first."""

    def __init__(self, config: TideConfig, tokens: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tokens, config.hidden_size))
        self.eps = config.rms_norm_eps

    def draw(self, _: TideConfig) -> None:
        init.zeros_(self.weight)

    def forward(self, m_BTD: torch.Tensor) -> torch.Tensor:
        normed = nn.functional.rms_norm(m_BTD.float(), m_BTD.shape[-1:], eps=self.eps).to(m_BTD.dtype)
        T, weight = m_BTD.shape[1], self.weight.to(m_BTD.dtype)
        shifted = (nn.functional.pad(normed, (0, 0, back, 0))[:, :T] for back in range(len(weight)))
        return m_BTD + nn.functional.silu(sum(w * past for w, past in zip(weight, shifted, strict=True)))


class ReinjectedLayer(LlamaDecoderLayer):
    """A Llama's layer that adds the token's own row of E, times a learned scalar."""

    def __init__(self, config: ReinjectedConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.scale = nn.Parameter(torch.empty(()))
        self.value_scale = None
        self.convolution = ShortConvolution(config) if config.convolved else nn.Identity()
        if config.in_values:
            self.value_scale = nn.Parameter(torch.empty(()))
            self.self_attn = ValueAttention(config, layer_idx)

    def forward(self, hidden_states: torch.Tensor, row_BTD: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.value_scale is not None:
            kwargs["row_BTD"] = self.value_scale.to(row_BTD.dtype) * row_BTD
        h = super().forward(hidden_states, **kwargs)
        return h + self.convolution(self.scale.to(row_BTD.dtype) * row_BTD)


class ReinjectedModel(TideModel):
    def __init__(self, config: ReinjectedConfig) -> None:
        if config.num_memory_blocks:
            raise ValueError(
                f"{config.model_type} has no tables: set num_memory_blocks, {config.num_memory_blocks}, to 0"
            )
        super().__init__(config)
        self.layers = nn.ModuleList(ReinjectedLayer(config, i) for i in range(config.num_hidden_layers))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ReinjectedLayer):
            init.constant_(module.scale, START)
            if module.value_scale is not None:
                init.constant_(module.value_scale, START)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        shape, eps = inputs_embeds.shape[-1:], self.config.rms_norm_eps
        row_BTD = nn.functional.rms_norm(inputs_embeds.float(), shape, eps=eps).to(inputs_embeds.dtype)
        return super().forward(inputs_embeds=inputs_embeds, row_BTD=row_BTD, **kwargs)


class Reinjected(TideForCausalLM):
    """E itself in every layer, normalised, by learned scalars: the token without tables."""

    config_class = ReinjectedConfig
    decoder_class = ReinjectedModel


def embedding_as_table(optimizer: torch.optim.Optimizer, weight_VD: nn.Parameter, rate: float) -> None:
    """Let E, and with it a tied head, learn as tables do: so many times the rate, and no decay."""
    (others, *_) = optimizer.param_groups
    others["params"] = [parameter for parameter in others["params"] if parameter is not weight_VD]
    optimizer.add_param_group({"params": [weight_VD], "weight_decay": 0.0, "lr_multiple": rate})


@strict
class PairsConfig(TideConfig):
    """The row of block k is that of the last `orders[k]` tokens: 1 is TIDE's own."""

    model_type = "tide-pairs"

    orders: list[int] | None = None


class PairsMemory(EmbeddingMemory):
    """TIDE's tables, some of which are looked up by a hash of several tokens, another hash for each block."""

    def __init__(self, config: PairsConfig) -> None:
        super().__init__(config)
        self.orders = config.orders or [1] * config.num_memory_blocks
        if len(self.orders) != config.num_memory_blocks:
            raise ValueError(f"{len(self.orders)} orders are given for {config.num_memory_blocks} blocks")

    def forward(self, input_ids_BT: torch.Tensor, *_: object) -> Memory:
        V, K, D = self.weight.shape
        keys = [hashed(input_ids_BT, order, k) % V * K + k for k, order in enumerate(self.orders)]
        raw_UKD = nn.functional.embedding(torch.stack(keys, -1).flatten(0, 1), self.weight.view(V * K, D))
        return Memory(self.norm(raw_UKD))


def hashed(ids_BT: torch.Tensor, order: int, block: int) -> torch.Tensor:
    """A number of a token and those before it; of one token alone its id."""
    if order == 1:
        return ids_BT
    mixed = ids_BT + (block + 1) * 0x9E3779B1
    for back in range(1, order):
        before = nn.functional.pad(ids_BT, (back, 0))[:, : ids_BT.shape[1]]
        mixed = (mixed ^ mixed >> 15) * 0x85EBCA77 + before * 0xC2B2AE3D
    mixed = (mixed ^ mixed >> 17) * 0x27D4EB2F165667C5
    return (mixed ^ mixed >> 29) & 0x7FFFFFFF


class PairsModel(TideModel):
    memory_class = PairsMemory


class Pairs(TideForCausalLM):
    """TIDE with some rows for the token and the one before it."""

    config_class = PairsConfig
    decoder_class = PairsModel


@strict
class GatedPairsConfig(PairsConfig):
    model_type = "tide-gated-pairs"


class GatedPairsModel(GatedModel, PairsModel):
    pass


class GatedPairs(TideForCausalLM):
    """Pairs whose layers gate what they mix."""

    config_class = GatedPairsConfig
    decoder_class = GatedPairsModel


for _kind in (Reinjected, Pairs, GatedPairs):
    AutoConfig.register(_kind.config_class.model_type, _kind.config_class, exist_ok=True)
    AutoModelForCausalLM.register(_kind.config_class, _kind, exist_ok=True)

NULLS = {
    "reinjected": builder(Reinjected),
    "reinjected-and-values": builder(Reinjected, in_values=True),
    "reinjected-and-convolved": builder(Reinjected, in_values=True, convolved=True),
    "pairs": builder(Pairs, orders=[1, 2] * 4),
    "gated-pairs": builder(GatedPairs, orders=[1, 2] * 4),
}
