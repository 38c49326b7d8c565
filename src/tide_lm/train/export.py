"""A trained model as a Hugging Face folder."""

import shutil
from collections import deque
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from tide_lm.model import TideForCausalLM, streamed_tensors
from tide_lm.model.streamed_tensors import Streamed
from tide_lm.run import files, process_group
from tide_lm.train.sharded_memory import ShardedMemory

_PIECE_ROWS = 512  # of the tables, that the first rank holds at once


def export(
    model: TideForCausalLM, tokenizer: PreTrainedTokenizerBase, card: str, final: Path, start: str = ""
) -> None:
    """Write a model with its tokenizer and card, whole or not at all; all ranks take part.

    The generation settings of the folder `start`, which training began from, are kept.
    """
    kept = Path(start, "generation_config.json")
    if has_kept := bool(start) and kept.is_file():
        model.generation_config = GenerationConfig()  # transformers cannot save some that it can use
    with process_group.open_on_first(lambda: files.write_folder(final)) as folder:
        if process_group.is_distributed():
            save_sharded(model, folder)
        else:
            try:
                model.save_pretrained(folder)
            except SafetensorError as error:  # above all if the disk is full
                raise OSError(f"{final}: {error}") from error
        if process_group.is_first():
            if has_kept:
                shutil.copyfile(kept, folder / kept.name)
            tokenizer.save_pretrained(folder)
            (folder / "README.md").write_text(card, encoding="utf-8")


def save_sharded(model: TideForCausalLM, folder: Path) -> None:
    """Write a sharded model from the first rank, a piece at a time; all ranks take part.

    No rank ever holds more of the tables than its own rows and a piece.
    """
    tensors = {name: _streamed(model, parameter) for name, parameter in model.named_parameters()}
    if process_group.is_first():
        model.config.architectures, model.config.dtype = [type(model).__name__], "float32"
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        streamed_tensors.write(folder / streamed_tensors.WEIGHTS, tensors, lambda written: None)
    else:
        for tensor in tensors.values():
            deque(tensor.pieces(), maxlen=0)


def _streamed(model: TideForCausalLM, parameter: torch.nn.Parameter) -> Streamed:
    """Describe a parameter that all ranks gather on the first when its pieces are read."""
    assert parameter.dtype == torch.float32
    memory, shape = model.model.memory, tuple(parameter.shape)
    if not isinstance(memory, ShardedMemory) or parameter is not memory.weight:
        return Streamed("F32", shape, lambda: [_full(parameter)])
    ids_V = torch.arange(memory.vocabulary)
    own_V = ids_V if process_group.is_first() else ids_V[:0]
    pieces = range(0, memory.vocabulary, _PIECE_ROWS)
    return Streamed(
        "F32",
        (memory.vocabulary, *shape[1:]),
        lambda: (memory.read(parameter, own_V[start : start + _PIECE_ROWS]) for start in pieces),
    )


def _full(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
