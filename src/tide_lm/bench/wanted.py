"""What is to be timed, checked before torch is loaded."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tide_lm.spec import presets
from tide_lm.spec.config import ModelConfig, Place
from tide_lm.spec.form import check_numbers


def shape_of(model: str) -> ModelConfig:
    """Parse `PRESET`, which `+values` and `+pairs` may follow for rows in attention's values and for rows of
    pairs of tokens, and at last `:IDS`, which sets the size of the vocabulary."""
    name, colon, ids = model.partition(":")
    if colon and not (ids.isdecimal() and int(ids) >= 2):
        raise ValueError(f"{model!r} asks for a vocabulary of {ids!r} ids: write a number from 2 on")
    preset, *extensions = name.split("+")
    if unknown := [extension for extension in extensions if extension not in ("values", "pairs")]:
        raise ValueError(f"{model!r} asks for +{unknown[0]}: there are +values and +pairs")
    shape = presets.get(preset).model
    if extensions and not shape.num_memory_blocks:
        raise ValueError(f"{model!r} has no memory: leave +{extensions[0]} out")
    vocabulary = int(ids or shape.vocab_size)
    pairs = vocabulary if "pairs" in extensions else 0
    return replace(shape, vocab_size=vocabulary, memory_values="values" in extensions, memory_pair_rows=pairs)


def check_decoding(
    names: Sequence[str], places: Sequence[Place], context: tuple[int, int], through_store: bool
) -> None:
    """Check the arguments of `bench decode`."""
    shapes = {name: shape_of(name) for name in names}
    start, end = context
    if not 1 <= start < end - 1:
        raise ValueError(f"--context is {start} {end}: begin with 1 or more, end with two more at least")
    for name, shape in shapes.items():
        if end > (known := shape.max_position_embeddings):
            raise ValueError(f"--context ends at {end}, and {name} knows {known} positions: lower it")
    if Place.device not in places and not any(shape.num_memory_blocks for shape in shapes.values()):
        raise ValueError(f"base models have no rows to be in {places[0]}: leave --memory out")
    if through_store and not shapes[names[-1]].num_memory_blocks:
        raise ValueError(
            f"--ids goes through the last preset, and {names[-1]} has no memory: end with another"
        )


def read_tokens(ids: Path, counts: Path | None, preset: str) -> tuple[list[int], np.ndarray | None]:
    """Read the tokens to force through a preset, and how often each of its tokens occurs."""
    vocabulary = shape_of(preset).vocab_size
    tokens = _whole_numbers("--ids", ids)
    if not len(tokens) or not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise ValueError(f"--ids {ids} must hold token ids from 0 to {vocabulary - 1}")
    counts_V = None if counts is None else _whole_numbers("--counts", counts)
    if counts_V is not None and (counts_V.shape != (vocabulary,) or counts_V.min() < 0):
        raise ValueError(
            f"--counts {counts} must hold {vocabulary} numbers, 0 or more, one for each token id"
        )
    return tokens.tolist(), counts_V


def _whole_numbers(option: str, path: Path) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        array = None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or array.ndim != 1:
        raise ValueError(
            f"{option} {path} is no .npy file of whole numbers in a row: write it with numpy.save"
        )
    return array


def check_reading(model: str, bits: int, tokens: int) -> None:
    """Check the arguments of `bench store`."""
    shape = presets.get(model).model
    if not shape.num_memory_blocks:
        raise ValueError("a base model has no store: name a preset with memory, such as tide-8e-1b")
    if tokens > shape.vocab_size:
        raise ValueError(f"--tokens is {tokens}, and {model} has {shape.vocab_size}: give fewer")
    check_numbers(bits, 32)
