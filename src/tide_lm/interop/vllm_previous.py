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
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if (size := getattr(vllm_config.parallel_config, name, 1)) > 1:
                raise ValueError(
                    f"{name} is {size}, which spreads a text over processes, and rows for pairs of tokens "
                    "need the token before each: leave it out"
                )
        self.cache = vllm_config.cache_config
        self.ids_S: torch.Tensor | None = None

    def before(self, ids_N: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
        """Keep the ids of a step's tokens, and return those before them; 0 before the first."""
        context = get_forward_context()
        if (found := context.attn_metadata) is None:  # vLLM measures how much memory a step takes
            return torch.zeros_like(ids_N)
        if not isinstance(found, dict):
            raise ValueError(
                "vLLM splits steps into microbatches, which rows for pairs of tokens do not fit: leave "
                "--enable-dbo out"
            )
        layer, metadata = next(iter(found.items()))
        if self.ids_S is None:
            self._allocate(ids_N, metadata, context.no_compile_layers[layer].kv_cache)
        return self._before(ids_N, positions_N, metadata)

    def _allocate(self, ids_N: torch.Tensor, metadata: Any, cache: Any) -> None:
        """Check that the attention backend has vLLM's pages and says where they are."""
        kind, blocks = type(metadata).__name__, self.cache.num_gpu_blocks
        cure = "start vLLM with --attention-backend FLASH_ATTN"
        for name in ("block_table", "slot_mapping", "query_start_loc"):
            if not hasattr(metadata, name):
                raise ValueError(f"{kind} has no {name}, which rows for pairs of tokens need: {cure}")
        cache = cache[0] if isinstance(cache, list | tuple) else cache
        if blocks not in cache.shape:
            shape = tuple(cache.shape)
            raise ValueError(
                f"{kind} has other pages than vLLM's {blocks}, as its cache has the shape {shape}, and rows "
                f"for pairs of tokens need those: {cure}"
            )
        self.ids_S = ids_N.new_zeros(blocks * self.cache.block_size + 1)  # the last one is of padding

    def _before(self, ids_N: torch.Tensor, positions_N: torch.Tensor, metadata: Any) -> torch.Tensor:
        assert self.ids_S is not None
        size, starts_R, last = self.cache.block_size, metadata.query_start_loc, len(self.ids_S) - 1
        tokens = min(len(ids_N), len(metadata.slot_mapping))
        slots_N = metadata.slot_mapping[:tokens].long()
        self.ids_S[torch.where(slots_N < 0, last, slots_N)] = ids_N[:tokens]
        places_N = torch.arange(len(ids_N), device=ids_N.device, dtype=starts_R.dtype)
        request_N = torch.searchsorted(starts_R, places_N, right=True).sub(1).clamp(max=len(starts_R) - 2)
        before_N = (positions_N - 1).clamp(min=0)
        block_N = metadata.block_table[request_N, before_N // size].long()
        previous_N = self.ids_S[(block_N * size + before_N % size).clamp(0, last)]
        return torch.where(positions_N == 0, 0, previous_N)
