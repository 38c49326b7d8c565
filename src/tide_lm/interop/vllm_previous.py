"""The token before each in vLLM, whose models see the new tokens of a step alone.

Where vLLM keeps a token's keys and values, this keeps its id, so that preempted, chunked and shared prefixes
find it again. Shapes: N tokens per step, R requests, S slots of the cache.
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context


class PreviousTokens:
    """The ids of all tokens that are in vLLM's cache, by slot."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        if vllm_config.kv_transfer_config is not None:
            raise ValueError(
                "kv_transfer_config brings keys and values without their tokens, which rows for pairs of "
                "tokens need: leave it out"
            )
        self.cache = vllm_config.cache_config
        self.ids_S: torch.Tensor | None = None

    def before(self, ids_N: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
        """Keep the ids of a step's tokens, and return those before them; 0 before the first."""
        found = get_forward_context().attn_metadata
        if found is None:  # vLLM measures how much memory a step takes
            return torch.zeros_like(ids_N)
        metadata = next(iter(found.values())) if isinstance(found, dict) else found
        if missing := [
            name for name in ("block_table", "slot_mapping", "query_start_loc") if not hasattr(metadata, name)
        ]:
            raise ValueError(
                f"{type(metadata).__name__}, of the attention backend, has no {missing[0]}, which rows for "
                "pairs of tokens need: start vLLM with VLLM_ATTENTION_BACKEND=FLASH_ATTN"
            )
        return self._before(ids_N, positions_N, metadata)

    def _before(self, ids_N: torch.Tensor, positions_N: torch.Tensor, metadata: Any) -> torch.Tensor:
        size, starts_R = self.cache.block_size, metadata.query_start_loc
        blocks = self.cache.num_gpu_blocks
        assert blocks is not None
        if self.ids_S is None:
            self.ids_S = ids_N.new_zeros(blocks * size + 1)  # the last one is of padding
        tokens = min(len(ids_N), len(metadata.slot_mapping))
        slots_N = metadata.slot_mapping[:tokens].long()
        self.ids_S[torch.where(slots_N < 0, blocks * size, slots_N)] = ids_N[:tokens]
        places_N = torch.arange(len(ids_N), device=ids_N.device, dtype=starts_R.dtype)
        request_N = torch.searchsorted(starts_R, places_N, right=True).sub(1).clamp(max=len(starts_R) - 2)
        before_N = (positions_N - 1).clamp(min=0)
        block_N = metadata.block_table[request_N, before_N // size].long()
        previous_N = self.ids_S[(block_N * size + before_N % size).clamp(0, blocks * size)]
        return torch.where(positions_N == 0, 0, previous_N)
