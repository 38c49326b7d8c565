"""Checks of what a forward pass is given."""

import operator
import os
from collections.abc import Sequence

import torch

from tide_lm.model.config import TideConfig


def check_token_ids(input_ids: torch.Tensor, vocab_size: int) -> None:
    """Name a token id outside the vocabulary; on a GPU, where that waits, only with TIDE_LM_DEBUG=1."""
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


def check_previous_ids(previous_ids: torch.Tensor, input_ids: torch.Tensor, vocab_size: int) -> None:
    """Check the tokens before those that a model is given."""
    if previous_ids.shape != input_ids.shape or previous_ids.is_floating_point():
        raise ValueError(
            f"previous_ids are of shape {tuple(previous_ids.shape)} and {previous_ids.dtype}: pass a whole "
            f"number for each of input_ids, of shape {tuple(input_ids.shape)}"
        )
    check_token_ids(previous_ids, vocab_size)


def checked_layers(chosen: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Return the numbers of the layers that drop the memory."""
    layers = tuple(operator.index(layer) for layer in chosen or ())
    if unknown := [layer for layer in layers if not 0 <= layer < count]:
        raise ValueError(
            f"drop_memory_layers names layer {unknown[0]}: this model has layers 0 to {count - 1}"
        )
    return layers


def check_memory(memory: object, tokens: torch.Tensor | None, config: TideConfig) -> None:
    """Refuse a memory made outside that does not fit the model or its tokens."""
    if memory is None:
        return
    if not config.num_memory_blocks:
        raise ValueError("memory= was passed to a base model (num_memory_blocks=0): leave it out")
    if not isinstance(memory, tuple):
        raise ValueError(f"memory is a {type(memory).__name__}: pass Memory(rows, index), or leave it out")
    if tokens is None or torch.compiler.is_compiling():
        return
    rows_UJD, index, *_ = memory
    (B, T), K, D, held = tokens.shape[:2], config.num_memory_blocks, config.hidden_size, tuple(rows_UJD.shape)
    several = index is not None and index.ndim == 3
    if several and K % len(index):
        raise ValueError(f"memory has {len(index)} rows for a position: that must divide {K} blocks")
    blocks = K // len(index) if several else K
    if len(held) != 3 or held[1:] != (blocks, D):
        raise ValueError(f"memory holds rows of shape {held}: this model needs (U, {blocks}, {D})")
    if index is None and len(rows_UJD) != B * T:
        raise ValueError(f"memory holds {len(rows_UJD)} rows for {B} x {T} tokens: pass an index too")
    if index is not None and index.shape[several:] != (B, T):
        raise ValueError(f"memory has an index of shape {tuple(index.shape)} for {B} x {T} tokens")
