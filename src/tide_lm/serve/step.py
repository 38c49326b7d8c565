"""The step of several sequences: the model's layers, written out for one token per sequence.

Shapes: B sequences, H heads, G key heads, T positions, d of a head.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tide_lm import ops
from tide_lm.model.memory import LayerMemory
from tide_lm.serve.cache import SlotCache
from tide_lm.serve.decoder import ModelForward
from tide_lm.serve.weights import ffn_parts, qkv_parts, stack_weights


class LayerForward(ModelForward):
    """A step through the model's layers. Their weights are stacked, so that one vector is multiplied once.

    Heads that share keys become tokens of one head, so that no key is repeated.
    """

    def __init__(self, model: PreTrainedModel, cache: SlotCache, memory: bool = True) -> None:
        super().__init__(model, cache, memory)
        self._weights = stack_weights(model)

    def _logits(self) -> torch.Tensor:
        decoder, memory = self.model.model, self._memory()
        h_B1D = decoder.embed_tokens(self.cache.ids_B[:, None])
        rope = decoder.rotary_emb(h_B1D, self.cache.place_B[:, None])
        mask = self.cache.mask()
        for number, layer in enumerate(decoder.layers):
            own = None if memory is None else memory.for_layer(number)
            h_B1D = h_B1D + self._attend(number, layer, layer.input_layernorm(h_B1D), rope, mask, own)
            n_B1D = layer.post_attention_layernorm(h_B1D)
            gate, up, *logits = _products(n_B1D, ffn_parts(layer), self._weights.ffn[number])
            update = layer.mlp.down_proj(layer.mlp.act_fn(gate) * up)
            h_B1D = h_B1D + update if own is None else layer.inject(h_B1D, update, logits[0], own)
        return self.model.lm_head(decoder.norm(h_B1D))[:, -1]

    def _attend(
        self,
        number: int,
        layer: Any,
        n_B1D: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
        own: LayerMemory | None,
    ) -> torch.Tensor:
        attention = layer.self_attn
        q, k, v, *gates = _products(n_B1D, qkv_parts(layer), self._weights.qkv[number])
        q, k, v = (part.view(*n_B1D.shape[:2], -1, attention.head_dim) for part in (q, k, v))
        if gates and own is not None:
            row_B1D = ops.memory_row(n_B1D, own.own_row_UD, own.own_index_BT, None)
            v = attention.add_row(v, gates[0], row_B1D)
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *rope)
        keys_BGTd, values_BGTd = self.cache.update(k, v.transpose(1, 2), number)
        grouped = q.view(len(q), keys_BGTd.shape[1], -1, attention.head_dim)
        out = nn.functional.scaled_dot_product_attention(
            grouped, keys_BGTd, values_BGTd, attn_mask=mask, scale=attention.scaling
        )
        return attention.o_proj(out.reshape(len(q), 1, -1))


def _products(n_B1D: torch.Tensor, parts: list[Any], stack_ND: torch.Tensor) -> list[torch.Tensor]:
    """Return the product of each part with a vector; a stack has the parts' weights, and rows of 0."""
    sizes = [len(part.weight) for part in parts]
    return list(nn.functional.linear(n_B1D, stack_ND)[..., : sum(sizes)].split(sizes, -1))
