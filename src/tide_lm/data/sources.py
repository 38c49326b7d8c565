"""Documents to prepare: built-in texts, local files, or a dataset of the Hugging Face Hub.

A document is a pair of its name and its text. The name says where it is from, as in `news.jsonl:17`.
A source is a list of parts, its files or its dataset's shards, which can be read independently.
"""

import glob
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from tide_lm.data import builtin, stories
from tide_lm.run.optional import require
from tide_lm.spec.names import suggestion

Document = tuple[str, str]
LONG_TEXT = 2**17  # characters: longer texts are read by line, and encoded in pieces of this size

_FORMAT = re.compile(r"\.(?:(?P<plain>txt|jsonl)(?:\.gz|\.xz|\.zst)?|parquet)\Z")
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_PARQUET_ROWS = 256
BUILT_IN = {"builtin": builtin.documents, "stories": stories.documents}


@dataclass(frozen=True)
class Part:
    """A part of a source, which another process or machine can read."""

    name: str
    documents: Callable[[], Iterator[Document]]


def parts(source: str, text_field: str = "text") -> list[Part]:
    """Return the parts of a built-in text, `hf:DATASET[:CONFIG]`, or a file, folder or glob, in order."""
    if not source:
        raise ValueError("the source is empty: name a file, a folder or a built-in text")
    if source in BUILT_IN:
        if (path := Path(source).absolute()).exists():
            raise ValueError(
                f"{source!r} is a built-in text, and a path here too: write {path} to read the path, or "
                "rename it to read the built-in text"
            )
        return [Part(source, BUILT_IN[source])]
    if source.startswith("hf:"):
        return _shards(source, text_field)
    return [Part(str(path), partial(_file, path, text_field)) for path in files(source)]


def streams(source: str, text_field: str = "text") -> Iterator[Iterator[str]]:
    """Yield each document in parts, most in one: a .txt file by line, so that its length costs no memory."""
    for part in parts(source, text_field):
        if (format := _FORMAT.search(part.name)) and format["plain"] == "txt":
            yield _lines(Path(part.name))
        else:
            yield from (lines(text) for _, text in part.documents())


def lines(text: str) -> Iterator[str]:
    """Yield the lines of a long text, and a short one as it is."""
    return iter([text]) if len(text) < LONG_TEXT else (line[0] for line in _LINE.finditer(text))


def _lines(path: Path) -> Iterator[str]:
    with _naming(path), _open(path) as file:
        for number, line in enumerate(file, 1):
            yield _decode(line, path, number)


def files(source: str) -> list[Path]:
    """Return the text files of a file, folder or glob, sorted."""
    path = Path(source)
    if path.is_dir():
        found = list(path.rglob("*"))
    else:
        found = [path] if path.exists() else [Path(name) for name in glob.glob(source, recursive=True)]
    texts = sorted(file for file in found if _FORMAT.search(file.name) and not file.is_dir())
    for file in texts:
        if not file.exists():
            raise ValueError(f"{file} is a link to a file that does not exist: correct or remove it")
    if not texts:
        hint = (
            "give `stories`, `builtin`, `hf:DATASET`, or a file, a folder or a glob of .txt or .jsonl (also "
            "with .gz, .xz or .zst) or .parquet"
        )
        if found or path.exists():
            raise ValueError(f"there is no text in {source!r}: {hint}")
        near = sorted(str(file) for file in path.parent.glob("*"))
        raise ValueError(f"there is no {source!r}: {suggestion(source, [*BUILT_IN, *near], hint)}")
    return texts


def _file(path: Path, field: str) -> Iterator[Document]:
    format = _FORMAT.search(path.name)
    assert format is not None
    if format["plain"] == "txt":
        with _naming(path), _open(path) as file:
            yield str(path), _decode(file.read(), path)
    else:
        records = json_lines(path) if format["plain"] == "jsonl" else _parquet_rows(path, field)
        yield from ((name, _text(record, field, name)) for name, record in records)


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the records of a .jsonl file, compressed or not, each with its name."""
    with _naming(path), _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            name = f"{path}:{number}"
            try:
                record = json.loads(_decode(line, path, number))
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{name} is not JSON ({error.msg}, column {error.colno}): correct or remove the line"
                ) from None
            yield name, record


def _parquet_rows(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    pyarrow = require("pyarrow", "a .parquet file")
    with _naming(path, pyarrow.ArrowException):
        file = require("pyarrow.parquet", "a .parquet file").ParquetFile(path)
        _text(dict.fromkeys(file.schema_arrow.names, ""), field, str(path))  # fails if there is no such field
        batches = file.iter_batches(_PARQUET_ROWS, columns=[field])
        records = (record for batch in batches for record in batch.to_pylist())
        yield from ((f"{path}:{row}", record) for row, record in enumerate(records, 1))


def _shards(source: str, field: str) -> list[Part]:
    dataset, _, config = source.removeprefix("hf:").partition(":")
    if not dataset:
        raise ValueError(f"the source {source!r} names no dataset: write hf:DATASET or hf:DATASET:CONFIG")
    load = require("datasets", f"the source {source!r}").load_dataset
    try:
        whole = load(dataset, config or None, split="train", streaming=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"the source {source!r} cannot be opened: {' '.join(str(error).split())}") from error
    count = whole.num_shards
    return [
        Part(f"{source}, shard {shard} of {count}", partial(_shard, whole, shard, source, field))
        for shard in range(count)
    ]


def _shard(whole: Any, shard: int, source: str, field: str) -> Iterator[Document]:
    """Yield one of the dataset's own shards; in their order, they are the dataset in its order."""
    where = f" of shard {shard}" if whole.num_shards > 1 else ""
    for row, record in enumerate(whole.shard(whole.num_shards, shard), 1):
        name = f"{source}:{row}{where}"
        yield name, _text(record, field, name)


def _open(path: Path) -> IO[bytes]:
    match path.suffix:
        case ".gz":
            return cast("IO[bytes]", gzip.open(path))
        case ".xz":
            return lzma.open(path)
        case ".zst":
            # pyarrow notices a file that was cut short; the package zstandard does not.
            stream = require("pyarrow", "a .zst file").input_stream(str(path), compression="zstd")
            return io.BufferedReader(stream)
        case _:
            return path.open("rb")


@contextmanager
def _naming(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Name the file in errors about its damage, which do not name it."""
    damage: tuple[type[Exception], ...] = (EOFError, OSError, lzma.LZMAError, zlib.error, *errors)
    try:
        yield
    except damage as error:
        if getattr(error, "filename", None):
            raise
        raise ValueError(f"{path} is damaged or cut short ({error}): download it again") from error


def _decode(data: bytes, path: Path, line: int = 1) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        raise ValueError(
            f"{path}:{line} is not UTF-8 ({error.reason}): convert the file, "
            "for example with `iconv -f latin1 -t utf-8`"
        ) from None


def _text(record: Any, field: str, name: str) -> str:
    fields = list(record) if isinstance(record, Mapping) else []
    if field not in fields:
        found = f"only {', '.join(map(repr, fields))}" if fields else "nor any other field"
        raise ValueError(f"{name} has no field {field!r}, {found}: name the text's field with --text-field")
    if not isinstance(text := record[field], str):
        raise ValueError(
            f"{name} has {text!r:.40} in its field {field!r}, which is no text: correct the record, "
            "or name another field with --text-field"
        )
    return text
