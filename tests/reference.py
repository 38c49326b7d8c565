"""The paper's forward pass as loops over batch, position, layer, head and block, in float64.

It shares no code with `tide_lm` or with transformers, so that an error in either shows as a difference.
Every operation is on vectors and differentiable. K, the paper's number of blocks, is at least 1.

Shapes: B batch, T tokens, V vocabulary, S = K + 1 slots (the null bank is last), D hidden, H head.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Outputs(NamedTuple):
    logits_BTV: Tensor
    alpha_LBTS: list[Tensor]


def tide_forward(
    tensors: Mapping[str, Tensor],
    config: Any,
    input_ids: Tensor,
    drop_memory_layers: Collection[int] = (),
) -> Outputs:
    """Logits and router weights of a checkpoint's tensors; m = 0 in the layers to be dropped."""
    head_VD = tensors["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    sequences = [_sequence(tensors, config, ids, drop_memory_layers) for ids in input_ids.tolist()]
    logits = [
        torch.stack([head_VD @ rms_norm(h_D, tensors["model.norm.weight"], config.rms_norm_eps) for h_D in h])
        for h, _ in sequences
    ]
    alpha_LBTS = [
        torch.stack([torch.stack(alphas[layer]) for _, alphas in sequences])
        for layer in range(config.num_hidden_layers)
    ]
    return Outputs(torch.stack(logits), alpha_LBTS)


def _sequence(
    tensors: Mapping[str, Tensor], config: Any, ids: list[int], drop: Collection[int]
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The last layer's state at each position, and alpha by layer and position."""
    memory = [_memory(tensors, config, v) for v in ids]
    h = [tensors["model.embed_tokens.weight"][v] for v in ids]
    alphas: list[list[Tensor]] = []
    for layer in range(config.num_hidden_layers):
        own = _Layer(tensors, layer)
        n = [rms_norm(h_D, own["input_layernorm"], config.rms_norm_eps) for h_D in h]
        in_values = config.memory_values and layer not in drop
        rows = [M[layer % config.num_memory_blocks] for M in memory] if in_values else None
        attended = _attention(own, config, n, rows)
        alphas.append([])
        for t in range(len(ids)):
            h_tilde = h[t] + attended[t]  # eq:attn
            n_tilde = rms_norm(h_tilde, own["post_attention_layernorm"], config.rms_norm_eps)
            alpha_S = softmax(own["router"] @ n_tilde)  # eq:router
            m = torch.zeros_like(h_tilde)
            for k, M_k in enumerate(memory[t]):
                m = m + alpha_S[k] * M_k
            if layer in drop:
                m = torch.zeros_like(m)
            h[t] = h_tilde + _ffn(own, n_tilde) + m  # eq:tide_model
            alphas[-1].append(alpha_S)
    return h, alphas


def _memory(tensors: Mapping[str, Tensor], config: Any, v: int) -> list[Tensor]:
    """M_1(v) to M_K(v) and the null bank's zero (eqs. memblock and ensemble)."""
    blocks = []
    for k in range(config.num_memory_blocks):
        row_D = tensors["model.memory.weight"][v, k]
        blocks.append(rms_norm(row_D, tensors["model.memory.norm.weight"][k], config.rms_norm_eps))
    return [*blocks, torch.zeros_like(blocks[0])]


def _attention(own: "_Layer", config: Any, n: list[Tensor], memory: list[Tensor] | None) -> list[Tensor]:
    """Causal attention with rotary positions, in which a group of query heads shares a key head.

    Rows of memory, one a position, join the values of each key head (not in the paper).
    """
    heads, H = config.num_attention_heads, config.head_dim
    group = heads // config.num_key_value_heads
    theta = config.rope_parameters["rope_theta"]
    outputs = []
    for t in range(len(n)):
        mixed = []
        for head in range(heads):
            rows, shared = _head_rows(head, H), _head_rows(head // group, H)
            query_H = rotate(own["self_attn.q_proj"][rows] @ n[t], t, theta)
            keys = [rotate(own["self_attn.k_proj"][shared] @ n[s], s, theta) for s in range(t + 1)]
            values = [own["self_attn.v_proj"][shared] @ n[s] for s in range(t + 1)]
            for s in range(t + 1 if memory is not None else 0):
                for part in range(head // group, config.hidden_size // H, config.num_key_value_heads):
                    logit = own["self_attn.value_gate"][part] @ n[s]
                    gate = config.memory_value_scale * 2 / (1 + torch.exp(-logit))
                    values[s] = values[s] + gate * memory[s][_head_rows(part, H)]
            weights = softmax(torch.stack([query_H @ key_H for key_H in keys]) / math.sqrt(H))
            mixed.append(sum(weights[s] * values[s] for s in range(t + 1)))
        outputs.append(own["self_attn.o_proj"] @ torch.cat(mixed))
    return outputs


def _head_rows(head: int, H: int) -> slice:
    return slice(head * H, (head + 1) * H)


def _ffn(own: "_Layer", n_D: Tensor) -> Tensor:
    gate = own["mlp.gate_proj"] @ n_D
    return own["mlp.down_proj"] @ (gate / (1 + torch.exp(-gate)) * (own["mlp.up_proj"] @ n_D))


def rotate(x_H: Tensor, position: int, theta: float) -> Tensor:
    """Turns the plane of coordinates i and i + H/2 by position * theta^(-2i/H), as in Hugging Face."""
    half = len(x_H) // 2
    first, second = [], []
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x_H))
        first.append(x_H[i] * math.cos(angle) - x_H[i + half] * math.sin(angle))
        second.append(x_H[i + half] * math.cos(angle) + x_H[i] * math.sin(angle))
    return torch.stack(first + second)


def rms_norm(x_D: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    return gain_D * x_D / torch.sqrt((x_D * x_D).sum() / len(x_D) + eps)


def softmax(logits_S: Tensor) -> Tensor:
    weights = torch.exp(logits_S - logits_S.max().detach())
    return weights / weights.sum()


class _Layer:
    """The tensors of one layer, by their names within it."""

    def __init__(self, tensors: Mapping[str, Tensor], layer: int) -> None:
        self._tensors, self._prefix = tensors, f"model.layers.{layer}"

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[f"{self._prefix}.{name}.weight"]
