"""TIDE as the difference from LLaMA: section 3 of the paper, in its order and with its symbols.

Shapes: B batch, T tokens, V vocabulary, K memory blocks, D hidden, U rows held.
"""

import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder

from tide_lm import ops
from tide_lm.pretrained import TideConfig, TidePreTrainedModel, draw_table
from tide_lm.stored_memory import ReadAhead, StoredMemory

try:
    from transformers.modeling_utils import slice_logits_to_keep
except ImportError:  # transformers 5.17 knows a count or a list of positions only

    def slice_logits_to_keep(hidden_BTD: torch.Tensor, keep: int | torch.Tensor) -> torch.Tensor:
        return hidden_BTD[:, slice(-keep, None) if isinstance(keep, int) else keep]


class Memory(NamedTuple):
    """What every layer receives: normalised rows, and which of them belongs to each position.

    Without an index there is one row per position, in order. Made outside the model (deduplicated, read
    from a store, exchanged between ranks) it is passed to `forward` as `memory=`. With sinks, one a layer,
    the gradient of the rows does not come back through them (see ops.memory_rows).
    """

    rows_UKD: torch.Tensor
    index_BT: torch.Tensor | None = None
    sinks: ops.Sinks | None = None


class MemoryNorm(nn.Module):
    """RMSNorm with one learned gain vector per block."""

    def __init__(self, blocks: int, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(blocks, dim))
        self.eps = eps

    def forward(self, raw_UKD: torch.Tensor) -> torch.Tensor:
        raw = raw_UKD.to(torch.float32)
        normed = raw * torch.rsqrt(raw.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(raw_UKD.dtype)


class EmbeddingMemory(nn.Module):
    """The K tables E_k, token-major, and `M = Stack_k RMSNorm(E_k[x])` (eqs. 3.3 and 3.4)."""

    def __init__(self, config: TideConfig) -> None:
        super().__init__()
        K, D = config.num_memory_blocks, config.hidden_size
        self.weight = nn.Parameter(torch.empty(config.vocab_size, K, D))
        self.norm = MemoryNorm(K, D, config.rms_norm_eps)

    @property
    def tokens(self) -> range:
        """The tokens whose rows these are."""
        return range(len(self.weight))

    def forward(self, input_ids_BT: torch.Tensor) -> Memory:
        rows = nn.functional.embedding(input_ids_BT.flatten(), self.weight.flatten(1))
        return Memory(self.norm(rows.unflatten(-1, self.weight.shape[1:])))

    def resize(self, vocab_size: int, std: float) -> None:
        """Keeps the first tokens' rows; rows that are added are drawn.

        Their seed is fixed: an adapter trained on a resized model has to find the same rows when it is
        loaded on the base model, resized again in another process.
        """
        kept = min(vocab_size, len(self.weight))
        if vocab_size == len(self.weight):
            return
        resized = self.weight.new_empty(vocab_size, *self.weight.shape[1:])
        resized[:kept] = self.weight.data[:kept]
        draw_table(resized[kept:], range(kept, vocab_size), seed=0, std=std)
        self.weight.data = resized


class MemoryRouter(nn.Linear):
    """The logits `W_r n~` over the blocks of a layer and, last, the null bank; no bias (eq. 3.5)."""

    def __init__(self, config: TideConfig) -> None:
        blocks = 1 if config.memory_own_block else config.num_memory_blocks
        super().__init__(config.hidden_size, blocks + 1, bias=False)

    def forward(self, n_BTD: torch.Tensor) -> torch.Tensor:
        slots = self.out_features
        if n_BTD.device.type != "cuda" or slots % 8 == 0:
            return super().forward(n_BTD)
        # Rows of 16 bytes, as products of fewer columns are slower than of more.
        padded = nn.functional.pad(self.weight, (0, 0, 0, -slots % 8))
        return nn.functional.linear(n_BTD, padded)[..., :slots]


class RouterWeights(nn.Module):
    """`alpha = softmax(W_r n~)`: a module, so that transformers can record what it returns.

    Of `hidden_blocks`, so many before the layer's own and so many after it, the weight is 0.
    """

    def __init__(self, hidden_blocks: tuple[int, int] = (0, 0)) -> None:
        super().__init__()
        self.hidden_blocks = hidden_blocks

    def forward(self, logits_BTS: torch.Tensor) -> torch.Tensor:
        alpha_BTS = ops.router_weights(logits_BTS)
        if not any(self.hidden_blocks):
            return alpha_BTS
        blocks_BTK = nn.functional.pad(alpha_BTS[..., :-1], self.hidden_blocks)
        return torch.cat([blocks_BTK, alpha_BTS[..., -1:]], -1)


class MemoryAttention(LlamaAttention):
    """Attention with a row of the token in its values, gated for each head, as value embeddings have it.

    As many values as all heads have fit into a row one or more times: such slices are added, each with gates
    of its own, `v = W_v n + c sum_s 2 sigmoid(W_s n) M_s`, c the config's `memory_value_scale`.
    """

    def __init__(self, config: TideConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.value_gate = nn.Linear(config.hidden_size, config.hidden_size // self.head_dim, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        row_BTD: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As in Llama; without a row, attention as Llama has it."""
        heads = (*hidden_states.shape[:2], -1, self.head_dim)
        q, k, v = (project(hidden_states).view(heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        if row_BTD is not None:
            gate = 2 * self.config.memory_value_scale * torch.sigmoid(self.value_gate(hidden_states))
            added = gate.unsqueeze(-1) * row_BTD.view(heads)
            v = v + added.unflatten(2, (-1, v.shape[2])).sum(2).to(v.dtype)
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *position_embeddings)
        v = v.transpose(1, 2)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        attended, weights = attend(
            self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.o_proj(attended.flatten(2)), weights


class MemoryGateNorm(LlamaRMSNorm):
    """Of what a layer adds, so that it begins with the memory's gain."""


class MemoryGate(nn.Module):
    """`RMSNorm(W_out (gelu(W_gate n) * m))` of what was mixed, as per-layer embeddings join in Gemma 3n."""

    def __init__(self, config: TideConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.gate, self.out = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.norm = MemoryGateNorm(D, eps=config.rms_norm_eps)

    def forward(self, n_BTD: torch.Tensor, mixed_BTD: torch.Tensor) -> torch.Tensor:
        return self.norm(self.out(nn.functional.gelu(self.gate(n_BTD)) * mixed_BTD))


class TideDecoderLayer(LlamaDecoderLayer):
    """`h = h~ + FFN(n~) + sum_k alpha_k M_k(v)`, `n~ = RMSNorm(h~)` (eqs. 3.1, 3.5 and 3.6)."""

    def __init__(self, config: TideConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        K, self.layer_idx = config.num_memory_blocks, layer_idx
        self.memory_values, self.memory_own_block = config.memory_values, config.memory_own_block
        self.block_idx = layer_idx % K
        if self.memory_values:
            self.self_attn = MemoryAttention(config, layer_idx)
        self.router = MemoryRouter(config)
        others = (self.block_idx, K - 1 - self.block_idx) if self.memory_own_block else (0, 0)
        self.router_weights = RouterWeights(others)
        self.memory_gate = MemoryGate(config) if config.memory_gate else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        memory: Memory,
        drop_memory_layers: tuple[int, ...] = (),
        output_router_weights: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        rows_UKD, index_BT, sinks = memory
        sink = None if sinks is None else sinks.mix[self.layer_idx]
        drop = self.layer_idx in drop_memory_layers
        if self.memory_values and not drop:
            kwargs["value_rows_UD"] = rows_UKD[:, self.block_idx]
            kwargs["value_sink_BTD"] = None if sinks is None else sinks.values[self.layer_idx]
        if self.memory_own_block:
            rows_UKD = rows_UKD[:, self.block_idx : self.block_idx + 1]
        return self.block(hidden_states, rows_UKD, index_BT, sink, drop, output_router_weights, **kwargs)

    def block(
        self,
        hidden_states: torch.Tensor,
        rows_UKD: torch.Tensor,
        index_BT: torch.Tensor | None,
        sink: ops.Sink | None,
        drop: bool,
        output_router_weights: bool,
        value_rows_UD: torch.Tensor | None = None,
        value_sink_BTD: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The layer without its number, so that one compiled graph serves all layers."""
        if value_rows_UD is not None:
            kwargs["row_BTD"] = ops.memory_row(hidden_states, value_rows_UD, index_BT, value_sink_BTD)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        h = hidden_states + attended
        n = self.post_attention_layernorm(h)
        update = self.mlp(n)
        logits = self.router(n)
        if output_router_weights:  # before the drop: what the layer would have drawn is of interest too
            self.router_weights(logits)
        if drop:
            return h + update
        return self.inject(h, update, logits, rows_UKD, index_BT, sink)

    def inject(
        self,
        h: torch.Tensor,
        update: torch.Tensor,
        logits: torch.Tensor,
        rows_UKD: torch.Tensor,
        index_BT: torch.Tensor | None,
        sink: ops.Sink | None,
    ) -> torch.Tensor:
        """The state after the layer: before its FFN, what that adds, and the memory's share."""
        if self.memory_gate is None:
            return ops.memory_mix(h, logits, rows_UKD, index_BT, update, sink)
        zero, h = torch.zeros_like(h), h + update
        mixed = ops.memory_mix(zero, logits, rows_UKD, index_BT, zero, sink)
        return h + self.memory_gate(self.post_attention_layernorm(h), mixed).to(h.dtype)


class TideModel(TidePreTrainedModel, LlamaModel):
    """The decoder: memory is looked up once from the token ids and handed to every layer."""

    memory_class = EmbeddingMemory
    layer_class = TideDecoderLayer
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
        K, D = config.num_memory_blocks, config.hidden_size
        self.memory: EmbeddingMemory | StoredMemory | None = None
        if K and config.memory_store is not None:
            self.memory = StoredMemory(config.vocab_size, K, D)
        elif K:
            self.memory = self.memory_class(config)
        layer = self.layer_class if config.num_memory_blocks else LlamaDecoderLayer
        self.layers = nn.ModuleList(layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()
        if config.memory_values:  # rows and their gates are for all heads, so heads are not split among GPUs
            self._tp_plan = {name: how for name, how in self.tp_plan.items() if "self_attn" not in name}

    @property
    def tables(self) -> EmbeddingMemory | None:
        """The memory as it is trained."""
        if isinstance(self.memory, StoredMemory):
            raise ValueError(
                "this model is packed, and has no tables: take the model that it was packed from"
            )
        return self.memory

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, MemoryNorm | MemoryGateNorm):
            init.constant_(module.weight, self.config.memory_gain_init)
        elif not isinstance(module, EmbeddingMemory):
            super()._init_weights(module)
        elif not module.weight.is_meta:
            draw_table(module.weight, module.tokens, torch.initial_seed(), self.config.initializer_range)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        memory: Memory | None = None,
        drop_memory_layers: Sequence[int] | None = None,
        output_router_weights: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """As in Llama; `memory` is a lookup made outside, `drop_memory_layers` get none of it."""
        if input_ids is not None:
            _check_token_ids(input_ids, self.config.vocab_size)
        if output_router_weights is None:
            output_router_weights = getattr(self.config, "output_router_weights", False)
        kwargs["output_router_weights"] = output_router_weights
        dropped = self._checked_layers(drop_memory_layers)
        if self.memory is not None:
            kwargs["memory"] = self.memory_for(input_ids, memory)
            kwargs["drop_memory_layers"] = dropped
            given = inputs_embeds if input_ids is None else input_ids
            if memory is not None and given is not None and not torch.compiler.is_compiling():
                rows_UKD, index_BT, _ = kwargs["memory"]
                shape = self.config.num_memory_blocks, self.config.hidden_size
                ops.check_rows(rows_UKD, index_BT, given.shape[:2], shape)
        elif memory is not None:
            raise ValueError("memory= was passed to a base model (num_memory_blocks=0): leave it out")
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )

    def memory_for(self, input_ids: torch.Tensor | None, memory: Memory | None = None) -> Memory:
        if isinstance(memory, tuple):
            return Memory(*memory)
        if memory is not None:
            raise ValueError(
                f"memory is a {type(memory).__name__}: pass Memory(rows, index), or leave it out"
            )
        if input_ids is None:
            raise ValueError(
                "there are no input_ids to look the memory up (inputs_embeds alone carry no token identity): "
                "pass input_ids, or memory=, looked up beforehand"
            )
        if not isinstance(self.memory, StoredMemory):
            assert self.memory is not None
            return self.memory(input_ids)
        return Memory(*self.memory(input_ids, self.embed_tokens.weight.dtype))

    def _checked_layers(self, layers: Sequence[int] | None) -> tuple[int, ...]:
        chosen = tuple(operator.index(layer) for layer in layers or ())
        if unknown := [layer for layer in chosen if not 0 <= layer < len(self.layers)]:
            raise ValueError(
                f"drop_memory_layers names layer {unknown[0]}: "
                f"this model has layers 0 to {len(self.layers) - 1}"
            )
        return chosen


@dataclass
class TideCausalLMOutputWithPast(CausalLMOutputWithPast):
    """`router_weights`: for each layer alpha, B x T x (K + 1), the null bank last; if asked for."""

    router_weights: tuple[torch.Tensor, ...] | None = None


class TideForCausalLM(TidePreTrainedModel, LlamaForCausalLM):
    """A TIDE decoder with a language-modelling head."""

    _pp_plan = None
    decoder_class = TideModel

    def __init__(self, config: TideConfig) -> None:
        super(LlamaForCausalLM, self).__init__(config)
        self.model = self.decoder_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: Any = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if kwargs.get("memory") is not None:
            raise ValueError("generate looks the memory up for each new token: leave memory= out")
        if isinstance(memory := self.model.memory, StoredMemory) and memory.rows is not None:
            stopping_criteria = [ReadAhead(memory), *(stopping_criteria or [])]
        return super().generate(
            inputs, generation_config, logits_processor, stopping_criteria, *args, **kwargs
        )

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


def _check_token_ids(input_ids: torch.Tensor, vocab_size: int) -> None:
    """Names a token id outside the vocabulary; on a GPU, where that waits, only with TIDE_LM_DEBUG=1."""
    if torch.compiler.is_compiling() or type(input_ids) is not torch.Tensor:  # traced, or fake
        return
    if not input_ids.numel():
        raise ValueError(f"input_ids of shape {tuple(input_ids.shape)} hold no token: pass at least one")
    if input_ids.device.type == "cpu" or os.environ.get("TIDE_LM_DEBUG") == "1":
        outside = input_ids[(input_ids < 0) | (input_ids >= vocab_size)]
        if outside.numel():
            raise ValueError(
                f"token id {int(outside[0])} is outside the vocabulary of {vocab_size} "
                f"(0 to {vocab_size - 1}): use the tokenizer that this model was trained with"
            )


AutoConfig.register("tide", TideConfig, exist_ok=True)
AutoModel.register(TideConfig, TideModel, exist_ok=True)
AutoModelForCausalLM.register(TideConfig, TideForCausalLM, exist_ok=True)
