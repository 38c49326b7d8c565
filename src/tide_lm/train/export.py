"""A trained model as a Hugging Face folder."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from tide_lm.model import TideForCausalLM, streamed_tensors
from tide_lm.run import files, process_group
from tide_lm.train.parallel import sharded_memory

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
    parameters = dict(model.named_parameters())
    with ExitStack() as stack:
        file = None
        if process_group.is_first():
            model.config.architectures, model.config.dtype = [type(model).__name__], "float32"
            model.config.save_pretrained(folder)
            model.generation_config.save_pretrained(folder)
            file = stack.enter_context((folder / "model.safetensors").open("wb"))
            file.write(streamed_tensors.header(_types_and_shapes(model, parameters)))
        for parameter in parameters.values():
            for piece in _pieces(model, parameter):
                if file is not None:
                    file.write(piece.detach().cpu().contiguous().numpy().data)


def _types_and_shapes(
    model: TideForCausalLM, parameters: dict[str, torch.nn.Parameter]
) -> dict[str, tuple[str, list[int]]]:
    """Return each parameter's type, and its shape over all ranks."""
    memory, found = sharded_memory(model), {}
    for name, parameter in parameters.items():
        shape = list(parameter.shape)
        if memory is not None and parameter is memory.weight:
            shape[0] = model.config.vocab_size
        assert parameter.dtype == torch.float32, name
        found[name] = "F32", shape
    return found


def _pieces(model: TideForCausalLM, parameter: torch.nn.Parameter) -> Iterator[torch.Tensor]:
    """Yield a parameter on the first rank: whole, or the tables some rows at a time."""
    memory = sharded_memory(model)
    if memory is None or parameter is not memory.weight:
        yield parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        return
    for ids_U in torch.arange(model.config.vocab_size).split(_PIECE_ROWS):
        yield memory.read(parameter, ids_U if process_group.is_first() else ids_U[:0])
