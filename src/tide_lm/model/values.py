"""Rows in attention's values: an extension, not in the paper, as value embeddings have it.

Shapes: B batch, T tokens, D hidden.
"""

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from tide_lm import ops


class ValueAttention(LlamaAttention):
    """Attention with a row of the token in its values, with a gate for each slice.

    A row is as long as the values of all key heads, or a multiple. Its slices are added, each with its gates:
    `v = W_v n + c sum_s 2 sigmoid(W_s n) M_s`, where c is the config's `memory_value_scale`.
    """

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.value_gate = nn.Linear(config.hidden_size, config.hidden_size // self.head_dim, bias=False)

    def add_row(self, v: torch.Tensor, gates: torch.Tensor, row_BTD: torch.Tensor) -> torch.Tensor:
        """Return the values, B x T x heads x d, with the row, whose slices are gated."""
        gate = 2 * self.config.memory_value_scale * torch.sigmoid(gates)
        added = gate.unsqueeze(-1) * row_BTD.view(*v.shape[:2], -1, self.head_dim)
        return v + added.unflatten(2, (-1, v.shape[2])).sum(2).to(v.dtype)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        row_BTD: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend as Llama does; `row_BTD` joins the values."""
        heads = (*hidden_states.shape[:2], -1, self.head_dim)
        q, k, v = (project(hidden_states).view(heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        if row_BTD is not None:
            v = self.add_row(v, self.value_gate(hidden_states), row_BTD)
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


class RowInValues(nn.Module):
    """A layer that gives its own row, of block l mod K, to its attention."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = ValueAttention(config, layer_idx)

    @staticmethod
    def tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
        """Return what it adds to a layer's tensors."""
        D = config.hidden_size
        return {"self_attn.value_gate.weight": (D // config.head_dim, D)}

    def attend(self, n: torch.Tensor, memory: Any, **kwargs: Any) -> torch.Tensor:
        row = None
        if memory is not None:
            placeholder = memory.placeholder and memory.placeholder.g_value_BTD
            row = ops.memory_row(n, memory.own_row_UD, memory.own_index_BT, placeholder)
        return super().attend(n, memory, row_BTD=row, **kwargs)  # type: ignore[misc]
