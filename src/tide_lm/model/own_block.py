"""A table for each layer: an extension, not in the paper. Layer l mixes the row of table l mod K alone."""

from copy import copy
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig


class OwnBlock(nn.Module):
    """A layer that mixes its own row with the null bank, and no other."""

    router: nn.Module
    router_weights: nn.Module

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        alone = copy(config)
        alone.num_memory_blocks = 1
        self.router = type(self.router)(alone)
        weights = type("RouterWeights", (AmongAllBlocks, type(self.router_weights)), {})
        self.router_weights = weights(layer_idx % config.num_memory_blocks, config.num_memory_blocks)

    @staticmethod
    def tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
        """Return what it adds to a layer's tensors: nothing, and its router is smaller."""
        return {}

    def inject(
        self, h: torch.Tensor | None, update: torch.Tensor | None, logits: torch.Tensor, memory: Any
    ) -> torch.Tensor:
        own_U1D = memory.own_row_UD.unsqueeze(1)
        return super().inject(h, update, logits, memory._replace(rows_UKD=own_U1D))  # type: ignore[misc]


class AmongAllBlocks(nn.Module):
    """Zero-pads alpha for the blocks that the layer does not mix."""

    def __init__(self, own: int, blocks: int) -> None:
        super().__init__()
        self.others = own, blocks - 1 - own  # before it and after it

    def forward(self, logits_BT2: torch.Tensor) -> torch.Tensor:
        alpha_BT2 = super().forward(logits_BT2)
        return torch.cat([nn.functional.pad(alpha_BT2[..., :1], self.others), alpha_BT2[..., 1:]], -1)
