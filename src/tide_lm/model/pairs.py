"""Rows for pairs of tokens: an extension, not in the paper.

A position has two rows of the tables, each with half of the blocks: its token's, and one that its token and
the one before it find by a hash. Pairs that find the same row share it. Shapes: B batch, T tokens.
"""

import torch
from transformers.cache_utils import Cache


def previous_ids(ids_BT: torch.Tensor, mask_BT: torch.Tensor | None = None) -> torch.Tensor:
    """Return the token before each; before the first, and after a token that is masked out, it is 0."""
    if mask_BT is not None:
        ids_BT = ids_BT * mask_BT[:, -ids_BT.shape[1] :].to(ids_BT.dtype)
    return torch.nn.functional.pad(ids_BT, (1, 0))[:, :-1]


def of_text(
    ids_BT: torch.Tensor,
    mask: torch.Tensor | None = None,
    positions_BT: torch.Tensor | None = None,
    cache: Cache | None = None,
) -> torch.Tensor:
    """Return `previous_ids` of texts from their beginnings, which positions of 0 tell too.

    What goes on from a cache needs the token before it, which a compiled function cannot look for.
    """
    if cache is not None and (torch.compiler.is_compiling() or has_tokens(cache)):
        raise ValueError(
            "there are past_key_values, and this model has rows for pairs of tokens: pass previous_ids, the "
            "token before each of input_ids"
        )
    previous_BT = previous_ids(ids_BT, mask if mask is not None and mask.ndim == 2 else None)
    return previous_BT if positions_BT is None else torch.where(positions_BT == 0, 0, previous_BT)


def has_tokens(cache: Cache | None) -> bool:
    return cache is not None and bool(cache.get_seq_length() > 0)


def pair_numbers(ids: torch.Tensor, previous: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the row of each token and the one before it, from 0 to `rows` - 1.

    The hash is part of what a model has learned: ops/decode_kernel/lookup.cuh has it too.
    """
    mixed = ids.long() + 2 * 0x9E3779B1
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA77 + previous.long() * 0xC2B2AE3D
    mixed = (mixed ^ mixed >> 17) * 0x27D4EB2F165667C5
    return ((mixed ^ mixed >> 29) & 0x7FFFFFFF) % rows
