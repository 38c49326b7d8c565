"""Designs that may win, and STEM. Shapes as in tide_lm.model, and R rows that a gate sees of D.

All have K tables of V x D numbers. `tests/studies/test_designs.py` checks that their layers have as many
parameters as the base's, to 2 %, in the size of the study. Convolutions and hashes see no token that is in a
cache, so that the text these models generate is not theirs; losses are.
"""

from copy import copy
from itertools import pairwise
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import initialization as init

from studies.controls import builder, narrower_ffn
from studies.extensions import MemoryGateNorm
from studies.nulls import Pairs, PairsConfig, PairsModel, ShortConvolution, hashed
from tide_lm.model import EmbeddingMemory, Memory, MemoryRouter, TideConfig, TideDecoderLayer, TideForCausalLM
from tide_lm.model.extensions import extended
from tide_lm.model.initialisation import draw_table
from tide_lm.model.memory import LayerMemory
from tide_lm.model.tide import TideModel
from tide_lm.model.values import RowInValues

ORDERS = [1, 2] * 4  # as in the study's `pairs`, which the designs below build on


@strict
class SplitConfig(PairsConfig):
    """The first `mixed` tables are mixed by the router, and only the others are in values."""

    model_type = "tide-split"

    mixed: int = 4


class SplitLayer(RowInValues, TideDecoderLayer):
    """A layer that mixes some tables, and has a row of the others in its values."""

    def __init__(self, config: SplitConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        fewer = copy(config)
        fewer.num_memory_blocks = self.mixed = config.mixed
        self.router = MemoryRouter(fewer)
        self.in_values = config.mixed + layer_idx % (config.num_memory_blocks - config.mixed)

    def forward(self, hidden_states: torch.Tensor, memory: Memory, **kwargs: Any) -> torch.Tensor:
        dropped = self.layer_idx in kwargs.pop("drop_memory_layers", ())
        routed = kwargs.pop("output_router_weights", False)
        own = None if dropped else memory.for_layer(self.in_values)
        return self.block(hidden_states, own, routed, **kwargs)

    def inject(
        self, h: torch.Tensor, update: torch.Tensor, logits: torch.Tensor, memory: LayerMemory
    ) -> torch.Tensor:
        few = memory._replace(rows_UJD=memory.rows_UJD[:, : self.mixed])
        return super().inject(h, update, logits, few)


class SplitModel(PairsModel):
    @classmethod
    def layer_class(cls, config: SplitConfig) -> type[nn.Module]:
        return SplitLayer


class Split(TideForCausalLM):
    """Rows of single tokens in the residual stream, and of several tokens in attention's values."""

    config_class = SplitConfig
    decoder_class = SplitModel


@strict
class PairRowsConfig(TideConfig):
    """One table for tokens and pairs: part s has rows of the last `orders[s]` tokens, `shares[s]` times V.

    A row has K / parts blocks, and a position has a row of each part.
    """

    model_type = "tide-pair-rows"

    orders: list[int] | None = None
    shares: list[int] | None = None


class PairRowsMemory(EmbeddingMemory):
    """Whole rows of a token and of a hash of several tokens, whose blocks take turns."""

    def __init__(self, config: PairRowsConfig) -> None:
        super().__init__(config)
        self.orders, self.shares = config.orders or [1], config.shares or [1]
        V, K, D = self.weight.shape
        self.weight = nn.Parameter(torch.empty(V * sum(self.shares), K // len(self.orders), D))
        self.vocabulary = V

    def forward(self, input_ids_BT: torch.Tensor, *_: object) -> Memory:
        keys, first = [], 0
        for part, (order, share) in enumerate(zip(self.orders, self.shares, strict=True)):
            keys.append(first + hashed(input_ids_BT, order, part) % (share * self.vocabulary))
            first += share * self.vocabulary
        rows = nn.functional.embedding(torch.stack(keys, -1).flatten(0, 1), self.weight.flatten(1))
        blocks_USKD = rows.unflatten(-1, self.weight.shape[1:])
        return Memory(self.norm(blocks_USKD.transpose(1, 2).flatten(1, 2)))


class PairRowsModel(TideModel):
    memory_class = PairRowsMemory


class PairRows(TideForCausalLM):
    """Rows for pairs of tokens in the same table, found by one look-up for all their blocks."""

    config_class = PairRowsConfig
    decoder_class = PairRowsModel


@strict
class ScalarsConfig(TideConfig):
    model_type = "tide-scalars"


class RawMemory(EmbeddingMemory):
    """TIDE's tables without their norm."""

    def __init__(self, config: TideConfig) -> None:
        super().__init__(config)
        del self.norm

    def forward(self, input_ids_BT: torch.Tensor, *_: object) -> Memory:
        rows = nn.functional.embedding(input_ids_BT.flatten(), self.weight.flatten(1))
        return Memory(rows.unflatten(-1, self.weight.shape[1:]))


class Scalars(nn.Module):
    """The numbers that a layer multiplies E's row by, and its own in the stream and in values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.row, self.value = (nn.Parameter(torch.empty(())) for _ in range(3))

    def draw(self, config: TideConfig) -> None:
        init.zeros_(self.embedding)
        init.ones_(self.row)
        init.ones_(self.value)


class ScalarsLayer(RowInValues, TideDecoderLayer):
    """A layer that adds E's row and its own to its input, each times a learned number."""

    def __init__(self, config: ScalarsConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.scalars = Scalars()
        self.router = self.router_weights = nn.Identity()

    def block(
        self, hidden_states: torch.Tensor, memory: LayerMemory | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        embedded_BTD, h = kwargs.pop("embedded_BTD"), hidden_states
        if memory is not None:
            row_BTD = memory.own_row_UD.view_as(h).to(h.dtype)
            h = h + self.scalars.embedding.to(h.dtype) * embedded_BTD + self.scalars.row.to(h.dtype) * row_BTD
            memory = memory._replace(own_row_UD=self.scalars.value * memory.own_row_UD)
        return super().block(h, memory, *args, **kwargs)

    def inject(self, h: torch.Tensor, update: torch.Tensor, *_: Any) -> torch.Tensor:
        return h + update


class ScalarsModel(TideModel):
    memory_class = RawMemory

    @classmethod
    def layer_class(cls, config: ScalarsConfig) -> type[nn.Module]:
        return ScalarsLayer

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
        return super().forward(
            inputs_embeds=inputs_embeds, memory=memory, embedded_BTD=inputs_embeds, **kwargs
        )


class ByScalars(TideForCausalLM):
    """A table for each layer, and E, added by learned numbers and without a norm, as in modded-nanogpt."""

    config_class = ScalarsConfig
    decoder_class = ScalarsModel


@strict
class NarrowConfig(PairsConfig):
    model_type = "tide-narrow"


class NarrowGate(nn.Module):
    """`RMSNorm(W_out (gelu(W_gate n) * m))` of a row with R numbers, a quarter of D."""

    def __init__(self, config: TideConfig) -> None:
        super().__init__()
        D = config.hidden_size
        R = D // 4
        self.gate, self.out = nn.Linear(D, R, bias=False), nn.Linear(R, D, bias=False)
        self.norm = MemoryGateNorm(D, eps=config.rms_norm_eps)

    def forward(self, n_BTD: torch.Tensor, row_BTD: torch.Tensor) -> torch.Tensor:
        row_BTR = row_BTD[..., : self.gate.out_features]
        return self.norm(self.out(nn.functional.gelu(self.gate(n_BTD)) * row_BTR))


class NarrowLayer(TideDecoderLayer):
    """A layer with a gate for a quarter of its own row, and an FFN that is narrower by its matrices."""

    def __init__(self, config: NarrowConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.narrow_gate, self.mlp = NarrowGate(config), narrower_ffn(config, 0.5)
        self.router = self.router_weights = nn.Identity()

    def inject(self, h: torch.Tensor, update: torch.Tensor, _: Any, memory: LayerMemory) -> torch.Tensor:
        h = h + update
        row = memory.own_row_UD.view_as(h)
        return h + self.narrow_gate(self.post_attention_layernorm(h), row).to(h.dtype)


class NarrowModel(PairsModel):
    @classmethod
    def layer_class(cls, config: NarrowConfig) -> type[nn.Module]:
        return extended(NarrowLayer, config)


class Narrow(TideForCausalLM):
    """A table for each layer: a quarter of its row through a gate and a norm, and all of it in values."""

    config_class = NarrowConfig
    decoder_class = NarrowModel


@strict
class RowGatesConfig(PairsConfig):
    model_type = "tide-row-gates"


class RowGates(nn.Module):
    """A number from 0 to 1 for each row, by how near it is to the state, as in Engram.

    A key is the row itself, times a learned vector for each table. Rows begin near the weight that a router
    gives them at first, 1 / (K + 1).
    """

    def __init__(self, config: TideConfig) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.empty(config.num_memory_blocks, config.hidden_size))

    def draw(self, config: TideConfig) -> None:
        init.constant_(self.keys, 1 / (config.memory_gain_init or 1))  # keys begin with a mean square of 1

    def forward(self, n_BTD: torch.Tensor, rows_BTKD: torch.Tensor) -> torch.Tensor:
        K, D = self.keys.shape
        near_BTK = (n_BTD.unsqueeze(-2) * self.keys.to(n_BTD.dtype) * rows_BTKD).sum(-1) / D**0.5
        return 2 / (K + 1) * (torch.sigmoid(near_BTK).unsqueeze(-1) * rows_BTKD).sum(-2)


class RowGatesLayer(TideDecoderLayer):
    """A layer with a gate for each row in place of the router, and a short convolution over what it adds."""

    def __init__(self, config: RowGatesConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.row_gates, self.convolution = RowGates(config), ShortConvolution(config)
        self.router = self.router_weights = nn.Identity()

    def inject(self, h: torch.Tensor, update: torch.Tensor, n: torch.Tensor, memory: LayerMemory) -> Any:
        rows_BTKD = memory.rows_UJD.view(*h.shape[:2], -1, h.shape[-1]).to(h.dtype)
        return h + update + self.convolution(self.row_gates(n.to(h.dtype), rows_BTKD))


class RowGatesModel(PairsModel):
    @classmethod
    def layer_class(cls, config: RowGatesConfig) -> type[nn.Module]:
        return extended(RowGatesLayer, config)


class GatedRows(TideForCausalLM):
    """TIDE's rows with gates that see them, and a convolution, as in Engram without its matrices."""

    config_class = RowGatesConfig
    decoder_class = RowGatesModel


@strict
class StemConfig(TideConfig):
    """STEM. `intermediate_size` is that of layers without rows: those with rows have what the tables give.

    If `xavier`, rows begin as small as its authors draw them, and else as large as what they replace.
    """

    model_type = "tide-stem"

    xavier: bool = False


def stem_columns(config: TideConfig) -> dict[int, tuple[int, int]]:
    """The columns of a token's K x D numbers that a layer has: a third of the layers, at equal distances."""
    layers, units = -(-config.num_hidden_layers // 3), config.num_memory_blocks * config.hidden_size // 8
    ends = [8 * (units * number // layers) for number in range(layers + 1)]
    at = [int((number + 0.5) * config.num_hidden_layers / layers) for number in range(layers)]
    return dict(zip(at, pairwise(ends), strict=True))


class StemMemory(RawMemory):
    def draw(self, config: StemConfig) -> None:
        std = config.initializer_range * config.hidden_size**0.5  # of what an up projection gives
        if config.xavier:
            first, last = next(iter(stem_columns(config).values()))
            std = (2 / (config.vocab_size + last - first)) ** 0.5
        draw_table(self.weight, self.own, torch.initial_seed(), std)


class StemFFN(nn.Module):
    """`W_down (silu(W_gate n) * row)`."""

    def __init__(self, config: TideConfig, columns: tuple[int, int]) -> None:
        super().__init__()
        self.columns = columns
        D, F = config.hidden_size, columns[1] - columns[0]
        self.gate_proj, self.down_proj = nn.Linear(D, F, bias=False), nn.Linear(F, D, bias=False)

    def forward(self, n_BTD: torch.Tensor, rows_UKD: torch.Tensor) -> torch.Tensor:
        up = rows_UKD.flatten(1)[:, slice(*self.columns)].view(*n_BTD.shape[:2], -1)
        return self.down_proj(nn.functional.silu(self.gate_proj(n_BTD)) * up)


class StemLayer(TideDecoderLayer):
    """A Llama's layer, in whose FFN a row may replace the up projection."""

    def __init__(self, config: StemConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.router = self.router_weights = nn.Identity()
        columns = stem_columns(config).get(layer_idx)
        self.has_rows = columns is not None
        if columns is not None:
            self.mlp = StemFFN(config, columns)

    def block(
        self, hidden_states: torch.Tensor, memory: LayerMemory | None, _: bool, **kwargs: Any
    ) -> torch.Tensor:
        h = hidden_states + self.attend(self.input_layernorm(hidden_states), memory, **kwargs)
        n = self.post_attention_layernorm(h)
        if not self.has_rows:
            return h + self.mlp(n)
        return h if memory is None else h + self.mlp(n, memory.rows_UJD)


class StemModel(TideModel):
    memory_class = StemMemory

    @classmethod
    def layer_class(cls, config: StemConfig) -> type[nn.Module]:
        return StemLayer


class Stem(TideForCausalLM):
    """Rows in place of the FFN's up projection, in a third of the layers."""

    config_class = StemConfig
    decoder_class = StemModel


for _kind in (Split, PairRows, ByScalars, Narrow, GatedRows, Stem):
    AutoConfig.register(_kind.config_class.model_type, _kind.config_class, exist_ok=True)
    AutoModelForCausalLM.register(_kind.config_class, _kind, exist_ok=True)

DESIGNS = {
    "pairs-and-triples": builder(Pairs, orders=[1, 2, 1, 3] * 2),
    "split": builder(Split, orders=[1, 1, 1, 1, 2, 3, 2, 3]),
    "pair-rows": builder(PairRows, orders=[1, 2], shares=[1, 1]),
    "pair-rows-of-three": builder(PairRows, orders=[1, 2], shares=[1, 3], num_memory_blocks=4),
    "pair-rows-of-seven": builder(PairRows, orders=[1, 2], shares=[1, 7], num_memory_blocks=2),
    "pair-rows-by-three-hashes": builder(PairRows, orders=[1, 2, 2, 2], shares=[1, 1, 1, 1]),
    "scalars": builder(ByScalars),
    "narrow-gate": builder(Narrow, orders=ORDERS),
    "row-gates": builder(GatedRows, orders=ORDERS),
    "stem": builder(Stem),
    "stem-published": builder(Stem, xavier=True),
}
