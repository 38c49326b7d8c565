"""Read and write safetensors files piece by piece, so that no tensor has to be whole in memory."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_NUMBERS_PER_PIECE = 1 << 22


@dataclass(frozen=True)
class Streamed:
    """A tensor whose rows are read or made piece by piece; its type is named as in safetensors."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write(path: Path, tensors: Mapping[str, Streamed], advance: Callable[[int], None]) -> None:
    """Write a file; `advance` is called with the number of tensors' bytes that were just written."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, tensor in tensors.items():
            before = file.tell()
            for piece in tensor.pieces():
                advance(file.write(piece.detach().cpu().flatten().view(torch.uint8).numpy().data))
            assert file.tell() - before == tensor.nbytes, name


def read(path: Path) -> dict[str, Streamed]:
    """Return the tensors of a file, which must stay where it is until they are read."""
    try:
        with safe_open(path, "pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: Streamed(part.get_dtype(), tuple(part.get_shape()), partial(_pieces, path, name))
                for name, part in parts.items()
            }
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file, or cut short ({error}): copy it again") from error


def row_ranges(shape: tuple[int, ...]) -> Iterator[range]:
    """Yield the rows of each piece of a tensor."""
    rows = max(1, _NUMBERS_PER_PIECE // math.prod(shape[1:]))
    for first in range(0, shape[0], rows):
        yield range(first, min(first + rows, shape[0]))


def _pieces(path: Path, name: str) -> Iterator[torch.Tensor]:
    with safe_open(path, "pt") as file:  # opened for each tensor, so that its pages are given back after it
        part = file.get_slice(name)
        for rows in row_ranges(part.get_shape()):
            yield part[rows.start : rows.stop]


def weight_files(model: str | Path, variant: str | None = None, **of_hub: Any) -> list[Path]:
    """Return the files of a model that transformers would read, in a folder here or from the Hub."""

    def find(name: str) -> str | None:
        return cached_file(str(model), name, _raise_exceptions_for_missing_entries=False, **of_hub)

    weights, index = (
        f".{variant}.".join(name.rsplit(".", 1)) if variant else name for name in (WEIGHTS, INDEX)
    )
    if whole := find(weights):
        return [Path(whole)]
    if (found := find(index)) is None:
        raise ValueError(
            f"{model} has no {WEIGHTS}: weights in other forms are not read, since they may run code; save "
            "the model with transformers' save_pretrained first"
        )
    try:
        places = json.loads(Path(found).read_text(encoding="utf-8"))["weight_map"]
        names = sorted({Path(name).name for name in places.values()})
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{found} cannot be read: copy it again") from None
    paths = []
    for name in names:
        if (path := find(name)) is None:
            place = Path(found)
            raise ValueError(f"{place.parent / name}, which {place.name} names, is not there: copy it again")
        paths.append(Path(path))
    return paths
