"""A trained model as a Hugging Face folder."""

import shutil
from collections import deque
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from tide_lm.model import TideForCausalLM, streamed_tensors
from tide_lm.model.streamed_tensors import Streamed
from tide_lm.run import files, process_group
from tide_lm.training.sharded_memory import ShardedMemory

_PIECE_ROWS = 512  # of the tables, that the first rank holds at once


def export(
    model: TideForCausalLM, tokenizer: PreTrainedTokenizerBase, card: str, final: Path, start: str = ""
) -> None:
    """Write a model with its tokenizer and card, whole or not at all; all ranks take part.

    No rank ever holds more of sharded tables than its own rows and a piece. The generation settings of the
    folder `start`, which training began from, are kept.
    """
    kept = Path(start, "generation_config.json")
    has_kept = bool(start) and kept.is_file()
    tensors = {name: _streamed(model, parameter) for name, parameter in model.named_parameters()}
    with process_group.open_on_first(lambda: files.write_folder(final)) as folder:
        if not process_group.is_first():
            for tensor in tensors.values():
                deque(tensor.pieces(), maxlen=0)  # the first rank gathers them
            return
        streamed_tensors.write(folder / streamed_tensors.WEIGHTS, tensors, lambda written: None)
        model.config.architectures, model.config.dtype = [type(model).__name__], "float32"
        model.config.save_pretrained(folder)
        if has_kept:
            shutil.copyfile(kept, folder / kept.name)  # transformers cannot save some that it can use
        else:
            model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(card, encoding="utf-8")


def _streamed(model: TideForCausalLM, parameter: torch.nn.Parameter) -> Streamed:
    """Describe a parameter that all ranks gather on the first when its pieces are read."""
    assert parameter.dtype == torch.float32
    memory, shape = model.model.memory, tuple(parameter.shape)
    if not isinstance(memory, ShardedMemory) or parameter is not memory.weight:
        return Streamed("F32", shape, lambda: [_full(parameter)])
    rows_V = torch.arange(memory.height)
    own_V = rows_V if process_group.is_first() else rows_V[:0]
    pieces = range(0, memory.height, _PIECE_ROWS)
    return Streamed(
        "F32",
        (memory.height, *shape[1:]),
        lambda: (memory.read(parameter, own_V[start : start + _PIECE_ROWS]) for start in pieces),
    )


def _full(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
