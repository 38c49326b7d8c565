"""Normal draws that depend on the seed and on what is drawn, never on the order of drawing.

Base and TIDE models of one seed therefore share every Llama weight, and a table drawn in shards, on any
device and in any precision, equals the table drawn whole.
"""

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def _generator(seed: int, name: str, row: int = 0) -> np.random.Generator:
    key = np.array([seed % 2**64, zlib.crc32(name.encode())], dtype=np.uint64)
    # The draws advance the counter's first word, so rows (its third) never overlap.
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, row, 0]))


def normal(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw the parameter `name` from a standard normal."""
    return _generator(seed, name).standard_normal(shape, dtype=np.float32)


def normal_rows(seed: int, name: str, rows: Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    """Draw some rows of the table `name`, each of the given shape, from a standard normal."""
    drawn = np.empty((len(rows), *shape), dtype=np.float32)

    def draw(position: int) -> None:
        _generator(seed, name, rows[position]).standard_normal(out=drawn[position], dtype=np.float32)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(draw, range(len(rows)), chunksize=64))
    return drawn


@torch.no_grad()
def draw_table(weight_RKD: torch.Tensor, tokens: Sequence[int], seed: int, std: float) -> None:
    """Draw each row from the seed and its token, a few at a time so that no second table ever exists."""
    if isinstance(weight_RKD, DTensor):
        own = shard_like(weight_RKD, torch.tensor(tokens))
        assert isinstance(own, DTensor)
        tokens, weight_RKD = own.to_local().tolist(), weight_RKD.to_local()
    for start in range(0, len(tokens), 1024):
        some = tokens[start : start + 1024]
        drawn = normal_rows(seed, "model.memory.weight", some, tuple(weight_RKD.shape[1:]))
        weight_RKD[start : start + len(some)] = torch.from_numpy(drawn) * std


def shard_like(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of `whole` if the parameter is sharded; nothing is communicated."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def resize_rows(weight_RJD: torch.nn.Parameter, old: int, vocab_size: int, std: float) -> None:
    """Keep the rows of the first tokens, of `old`, and those after all tokens; draw those that are added.

    Their seed is fixed: an adapter trained on a resized model has to find the same rows when it is loaded on
    the base model, resized again in another process.
    """
    kept = min(vocab_size, old)
    if vocab_size == old:
        return
    resized = weight_RJD.new_empty(vocab_size + len(weight_RJD) - old, *weight_RJD.shape[1:])
    resized[:kept] = weight_RJD.data[:kept]
    resized[vocab_size:] = weight_RJD.data[old:]
    draw_table(resized[kept:vocab_size], range(kept, vocab_size), seed=0, std=std)
    weight_RJD.data = resized
