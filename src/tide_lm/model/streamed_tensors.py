"""Read and write safetensors files piece by piece, so that no tensor has to be whole in memory."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from transformers.utils import cached_file

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_BYTES_PER_READ = 1 << 24
_LONGEST_HEADER = 100_000_000  # as in safetensors itself


@dataclass(frozen=True)
class Streamed:
    """A tensor that is read or made piece by piece; its type is named as in safetensors."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[bytes | memoryview]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def header(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> bytes:
    """Return a file's header: where tensors of these types and shapes lie, in the order of writing."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(path: Path, tensors: Mapping[str, Streamed], advance: Callable[[int], None]) -> None:
    """Write a file; `advance` is called with the number of tensors' bytes that were just written."""
    with path.open("wb") as file:
        file.write(header({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}))
        for name, tensor in tensors.items():
            before = file.tell()
            for piece in tensor.pieces():
                advance(file.write(piece))
            assert file.tell() - before == tensor.nbytes, name


def read(path: Path) -> dict[str, Streamed]:
    """Return the tensors of a file, which must stay where it is until they are read."""
    with path.open("rb") as file:
        size, entries = path.stat().st_size, _entries(file, path)
        start = file.tell()
    entries.pop("__metadata__", None)
    found = {}
    try:
        for name, entry in entries.items():
            if entry["dtype"] not in DTYPES:
                raise ValueError(
                    f"{path} holds {name} as {entry['dtype']}: only {', '.join(DTYPES)} are known"
                )
            offsets, shape = tuple(entry["data_offsets"]), tuple(entry["shape"])
            if len(offsets) != 2 or any(type(n) is not int or n < 0 for n in (*offsets, *shape)):
                raise TypeError(name)
            begin, end = offsets
            found[name] = Streamed(entry["dtype"], shape, _range(path, start + begin, start + end))
            if start + end > size or end - begin != found[name].nbytes:
                raise ValueError(f"{path} is cut short, or damaged, at {name}: copy it again")
    except (KeyError, TypeError):
        raise ValueError(f"{path} is no safetensors file: copy it again") from None
    return found


def weight_files(model: str | Path, variant: str | None = None, **of_hub: Any) -> list[Path]:
    """Return the files of a model that transformers would read, in a folder here or from the Hub."""

    def find(name: str, variant: str | None = None) -> Path | None:
        if variant:
            stem, kind = name.rsplit(".", 1)
            name = f"{stem}.{variant}.{kind}"
        found = cached_file(str(model), name, _raise_exceptions_for_missing_entries=False, **of_hub)
        return None if found is None else Path(found)

    if whole := find(WEIGHTS, variant):
        return [whole]
    if (index := find(INDEX, variant)) is None:
        raise ValueError(
            f"{model} has no {WEIGHTS}: weights in other forms are not read, since they may run code; save "
            "the model with transformers' save_pretrained first"
        )
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({Path(name).name for name in places.values()})
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{index} cannot be read: copy it again") from None
    found = []
    for name in names:
        if (path := find(name)) is None:
            raise ValueError(f"{index.parent / name}, which {INDEX} names, is not there: copy it again")
        found.append(path)
    return found


def _entries(file: BinaryIO, path: Path) -> dict:
    try:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length)) if length <= _LONGEST_HEADER else None
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, dict):
        raise ValueError(f"{path} is no safetensors file, or cut short: copy it again")
    return entries


def _range(path: Path, begin: int, end: int) -> Callable[[], Iterator[bytes]]:
    def pieces() -> Iterator[bytes]:
        with path.open("rb") as file:
            file.seek(begin)
            for at in range(begin, end, _BYTES_PER_READ):
                yield file.read(min(_BYTES_PER_READ, end - at))

    return pieces
