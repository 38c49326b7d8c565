"""TIDE as the difference from LLaMA: section 3 of the paper, in its order and with its symbols.

Shapes: B batch, T tokens, V vocabulary, K memory blocks, D hidden, U rows held, J blocks of a row (K, unless
there are rows for pairs of tokens).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder

from tide_lm import ops
from tide_lm.model.checks import check_memory, check_previous_ids, check_token_ids, checked_layers
from tide_lm.model.config import TideConfig
from tide_lm.model.extensions import extended
from tide_lm.model.generation import TideCausalLMOutputWithPast, TideGeneration, slice_logits_to_keep
from tide_lm.model.initialisation import draw_table
from tide_lm.model.memory import LayerMemory, Memory, MemorySource, taking_turns
from tide_lm.model.pairs import of_text
from tide_lm.model.pretrained import TidePreTrainedModel
from tide_lm.model.stored import StoredMemory
from tide_lm.spec.config import table_shape


class MemoryNorm(nn.Module):
    """RMSNorm with one learned gain vector per block."""

    def __init__(self, blocks: int, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(blocks, dim))
        self.eps = eps

    def forward(self, raw_UJD: torch.Tensor, part: int = 0) -> torch.Tensor:
        """Normalise rows; of several that a position has, whose blocks take turns, those of one part."""
        raw, parts = raw_UJD.to(torch.float32), len(self.weight) // raw_UJD.shape[-2]
        normed = raw * torch.rsqrt(raw.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight[part::parts] * normed.to(raw_UJD.dtype)

    def draw(self, config: TideConfig) -> None:
        init.constant_(self.weight, config.memory_gain_init)


class EmbeddingMemory(MemorySource):
    """The K tables E_k, token-major, and `M = Stack_k RMSNorm(E_k[x])` (eqs. 3.3 and 3.4)."""

    def __init__(self, config: TideConfig) -> None:
        super().__init__()
        self.pair_rows = config.memory_pair_rows
        self.weight = nn.Parameter(torch.empty(table_shape(config)))
        self.norm = MemoryNorm(config.num_memory_blocks, config.hidden_size, config.rms_norm_eps)

    @property
    def own(self) -> range:
        """The rows that are here."""
        return range(len(self.weight))

    def draw(self, config: TideConfig) -> None:
        if not self.weight.is_meta:
            draw_table(self.weight, self.own, torch.initial_seed(), config.initializer_range)

    def forward(
        self,
        input_ids_BT: torch.Tensor,
        dtype: torch.dtype | None = None,
        previous_BT: torch.Tensor | None = None,
    ) -> Memory:
        """Return all blocks of each position; tables have the model's type, whatever `dtype` is."""
        numbers_NP = torch.stack(self.numbers(input_ids_BT, previous_BT), -1).flatten(0, -2)
        rows = nn.functional.embedding(numbers_NP, self.weight.flatten(1))
        return Memory(self.norm(taking_turns(rows.unflatten(-1, self.weight.shape[1:]))))


class MemoryRouter(nn.Linear):
    """The logits `W_r n~` over the blocks of a layer and, last, the null bank; no bias (eq. 3.5)."""

    def __init__(self, config: TideConfig) -> None:
        super().__init__(config.hidden_size, config.num_memory_blocks + 1, bias=False)

    def forward(self, n_BTD: torch.Tensor) -> torch.Tensor:
        return ops.router_logits(n_BTD, self.weight)


class RouterWeights(nn.Module):
    """`alpha = softmax(W_r n~)`: a module, so that transformers can record what it returns."""

    def forward(self, logits_BTS: torch.Tensor) -> torch.Tensor:
        return ops.router_weights(logits_BTS)


class TideDecoderLayer(LlamaDecoderLayer):
    """`h = h~ + FFN(n~) + sum_k alpha_k M_k(v)`, `n~ = RMSNorm(h~)` (eqs. 3.1, 3.5 and 3.6)."""

    def __init__(self, config: TideConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.layer_idx = layer_idx
        self.router, self.router_weights = MemoryRouter(config), RouterWeights()

    def forward(
        self,
        hidden_states: torch.Tensor,
        memory: Memory,
        drop_memory_layers: tuple[int, ...] = (),
        output_router_weights: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        own = None if self.layer_idx in drop_memory_layers else memory.for_layer(self.layer_idx)
        return self.block(hidden_states, own, output_router_weights, **kwargs)

    def block(
        self,
        hidden_states: torch.Tensor,
        memory: LayerMemory | None,
        output_router_weights: bool,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute the layer without its number, so that one compiled graph serves all layers."""
        h = hidden_states + self.attend(self.input_layernorm(hidden_states), memory, **kwargs)
        n = self.post_attention_layernorm(h)
        update, logits = self.mlp(n), self.router(n)
        if output_router_weights:  # of a layer that drops its memory too
            self.router_weights(logits)
        return h + update if memory is None else self.inject(h, update, logits, memory)

    def attend(self, n: torch.Tensor, memory: LayerMemory | None, **kwargs: Any) -> torch.Tensor:
        """Return what attention adds to the state."""
        return self.self_attn(hidden_states=n, **kwargs)[0]

    def inject(
        self, h: torch.Tensor, update: torch.Tensor, logits: torch.Tensor, memory: LayerMemory
    ) -> torch.Tensor:
        """Return `h + update + m`."""
        return ops.memory_mix(h, logits, memory.rows_UJD, memory.row_index, update, memory.placeholder)


class TideModel(TidePreTrainedModel, LlamaModel):
    """The decoder: memory is looked up once from the token ids and handed to every layer."""

    memory_class = EmbeddingMemory
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": LlamaDecoderLayer,
        "attentions": LlamaAttention,
        "router_weights": OutputRecorder(RouterWeights),
    }

    def __init__(self, config: TideConfig) -> None:
        super(LlamaModel, self).__init__(config)  # LlamaModel's own layers are never built
        if not isinstance(config, TideConfig):
            raise ValueError(f"a TIDE model needs a TideConfig and got a {type(config).__name__}")
        config.validate()  # again: keywords of from_pretrained are set after the config's own check
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        K = config.num_memory_blocks
        self.memory: MemorySource | None = None
        if K and config.memory_store is not None:
            self.memory = StoredMemory(config.memory_pair_rows)
        elif K:
            self.memory = self.memory_class(config)
        layer = self.layer_class(config)
        self.layers = nn.ModuleList(layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    @classmethod
    def layer_class(cls, config: TideConfig) -> type[nn.Module]:
        return extended(TideDecoderLayer, config) if config.num_memory_blocks else LlamaDecoderLayer

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        *,
        memory: Memory | None = None,
        previous_ids: torch.Tensor | None = None,
        drop_memory_layers: Sequence[int] | None = None,
        output_router_weights: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run Llama's forward; `memory` was looked up outside, and `drop_memory_layers` get none of it.

        To go on from a cache, rows for pairs of tokens need `previous_ids`, the token before each.
        """
        if input_ids is not None:
            check_token_ids(input_ids, self.config.vocab_size)
        if output_router_weights is None:
            output_router_weights = getattr(self.config, "output_router_weights", False)
        kwargs["output_router_weights"] = output_router_weights
        dropped = checked_layers(drop_memory_layers, len(self.layers))
        check_memory(memory, inputs_embeds if input_ids is None else input_ids, self.config)
        if self.memory is not None:
            unknown = memory is None and previous_ids is None
            if self.config.memory_pair_rows and unknown and input_ids is not None:
                previous_ids = of_text(input_ids, attention_mask, position_ids, past_key_values)
            if previous_ids is not None and input_ids is not None:
                check_previous_ids(previous_ids, input_ids, self.config.vocab_size)
            memory = self.memory_for(input_ids, memory, previous_ids)
            kwargs |= {"memory": memory, "drop_memory_layers": dropped}
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )

    def memory_for(
        self,
        input_ids: torch.Tensor | None,
        memory: Memory | None = None,
        previous_ids: torch.Tensor | None = None,
    ) -> Memory:
        """Return the rows that were looked up outside, or look them up."""
        if memory is not None:
            return Memory(*memory)
        if input_ids is None:
            raise ValueError(
                "there are no input_ids to look the memory up (inputs_embeds alone carry no token identity): "
                "pass input_ids, or memory=, looked up beforehand"
            )
        assert self.memory is not None
        return self.memory(input_ids, self.embed_tokens.weight.dtype, previous_ids)


class TideForCausalLM(TideGeneration, TidePreTrainedModel, LlamaForCausalLM):
    """A TIDE decoder with a language-modelling head."""

    _pp_plan = None
    decoder_class = TideModel

    def __init__(self, config: TideConfig) -> None:
        super(LlamaForCausalLM, self).__init__(config)
        self.model = self.decoder_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        memory: Memory | None = None,
        previous_ids: torch.Tensor | None = None,
        drop_memory_layers: Sequence[int] | None = None,
        output_router_weights: bool | None = None,
        **kwargs: Any,
    ) -> TideCausalLMOutputWithPast:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            memory=memory,
            previous_ids=previous_ids,
            drop_memory_layers=drop_memory_layers,
            output_router_weights=output_router_weights,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return TideCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_weights=outputs.get("router_weights"),
        )
