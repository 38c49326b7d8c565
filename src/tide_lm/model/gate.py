"""A gate for what a layer mixed: an extension, not in the paper, as in Gemma 3n's per-layer embeddings."""

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaRMSNorm


class MemoryGateNorm(LlamaRMSNorm):
    """The norm of what a layer adds; it begins with the memory's gain."""

    def draw(self, config: LlamaConfig) -> None:
        init.constant_(self.weight, config.memory_gain_init)


class MemoryGate(nn.Module):
    """`RMSNorm(W_out (gelu(W_gate n) * m))`, where m are the mixed rows."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.gate, self.out = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.norm = MemoryGateNorm(D, eps=config.rms_norm_eps)

    def forward(self, n_BTD: torch.Tensor, mixed_BTD: torch.Tensor) -> torch.Tensor:
        return self.norm(self.out(nn.functional.gelu(self.gate(n_BTD)) * mixed_BTD))


class Gated(nn.Module):
    """A layer that gates the mixed rows by the state after the FFN."""

    post_attention_layernorm: nn.Module

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.memory_gate = MemoryGate(config)

    @staticmethod
    def tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
        """Return what it adds to a layer's tensors."""
        D = config.hidden_size
        matrices = {f"memory_gate.{name}.weight": (D, D) for name in ("gate", "out")}
        return {**matrices, "memory_gate.norm.weight": (D,)}

    def inject(
        self, h: torch.Tensor, update: torch.Tensor, logits: torch.Tensor, memory: Any
    ) -> torch.Tensor:
        h, mixed = h + update, super().inject(None, None, logits, memory)  # type: ignore[misc]
        return h + self.memory_gate(self.post_attention_layernorm(h), mixed.to(h.dtype)).to(h.dtype)
