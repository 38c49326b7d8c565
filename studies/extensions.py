"""Extensions that a study tried and that did not stay: parts of a layer. Shapes as in tide_lm.model.

One reads a table per layer, the other gates what a layer mixes. Both may be in one layer.
"""

from copy import copy

import torch
from torch import nn
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tide_lm.model import TideConfig, TideDecoderLayer
from tide_lm.model.memory import LayerMemory


class OwnBlockLayer(TideDecoderLayer):
    """A layer that mixes the row of table l mod K with the null bank, and no other."""

    def __init__(self, config: TideConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        alone = copy(config)
        alone.num_memory_blocks = 1
        self.router = type(self.router)(alone)
        weights = type("RouterWeights", (AmongAllBlocks, type(self.router_weights)), {})
        self.router_weights = weights(layer_idx % config.num_memory_blocks, config.num_memory_blocks)

    def inject(
        self, h: torch.Tensor, update: torch.Tensor, logits: torch.Tensor, memory: LayerMemory
    ) -> torch.Tensor:
        own_U1D = memory.own_row_UD.unsqueeze(1)
        return super().inject(h, update, logits, memory._replace(rows_UJD=own_U1D))


class AmongAllBlocks(nn.Module):
    """Zero-pads alpha for the blocks that the layer does not mix."""

    def __init__(self, own: int, blocks: int) -> None:
        super().__init__()
        self.others = own, blocks - 1 - own  # before it and after it

    def forward(self, logits_BT2: torch.Tensor) -> torch.Tensor:
        alpha_BT2 = super().forward(logits_BT2)
        return torch.cat([nn.functional.pad(alpha_BT2[..., :1], self.others), alpha_BT2[..., 1:]], -1)


class MemoryGateNorm(LlamaRMSNorm):
    """The norm of what a layer adds; it begins with the memory's gain."""

    def draw(self, config: TideConfig) -> None:
        init.constant_(self.weight, config.memory_gain_init)


class MemoryGate(nn.Module):
    """`RMSNorm(W_out (gelu(W_gate n) * m))`, where m are the mixed rows, as in Gemma 3n."""

    def __init__(self, config: TideConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.gate, self.out = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.norm = MemoryGateNorm(D, eps=config.rms_norm_eps)

    def forward(self, n_BTD: torch.Tensor, mixed_BTD: torch.Tensor) -> torch.Tensor:
        return self.norm(self.out(nn.functional.gelu(self.gate(n_BTD)) * mixed_BTD))


class GatedLayer(TideDecoderLayer):
    """A layer that gates the mixed rows by the state after the FFN."""

    def __init__(self, config: TideConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.memory_gate = MemoryGate(config)

    def inject(
        self, h: torch.Tensor, update: torch.Tensor, logits: torch.Tensor, memory: LayerMemory
    ) -> torch.Tensor:
        h = h + update
        nothing = torch.zeros_like(h, dtype=torch.promote_types(h.dtype, torch.float32))
        mixed = super().inject(nothing, nothing, logits, memory).to(h.dtype)
        return h + self.memory_gate(self.post_attention_layernorm(h), mixed).to(h.dtype)
