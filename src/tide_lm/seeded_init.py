"""Normal draws that depend on the seed and on what is drawn, never on the order of drawing.

Base and TIDE models of one seed therefore share every Llama weight, and a table drawn in shards, on any
device and in any precision, equals the table drawn whole.
"""

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np


def _generator(seed: int, name: str, row: int = 0) -> np.random.Generator:
    key = np.array([seed % 2**64, zlib.crc32(name.encode())], dtype=np.uint64)
    # The draws advance the counter's first word, so rows (its third) never overlap.
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, row, 0]))


def normal(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal values of the parameter `name`."""
    return _generator(seed, name).standard_normal(shape, dtype=np.float32)


def normal_rows(seed: int, name: str, rows: Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal values of some rows of the table `name`, each row of the given shape."""
    drawn = np.empty((len(rows), *shape), dtype=np.float32)

    def draw(position: int) -> None:
        _generator(seed, name, rows[position]).standard_normal(out=drawn[position], dtype=np.float32)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(draw, range(len(rows)), chunksize=64))
    return drawn
