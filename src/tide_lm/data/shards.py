"""Token shards: flat little-endian arrays of token ids, and a manifest that describes them.

manifest.json                 describes all below, and where the text came from
tokenizer/                    the tokenizer, as Hugging Face saves it
train-00000.bin, ...          token ids, uint16 or uint32, documents one after another
validation-00000.bin, ...
counts.npy                    how often each id occurs in the training split
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Shard:
    file: str
    tokens: int
    documents: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` holds. `tokenizer_sha256` is the digest of the tokenizer's tokenizer.json.

    The sha256 in `source` is the digest of the digests of the text's parts (files, or shards of a dataset),
    and a part's digest that of its documents' digests; what holds no text is left out.
    """

    dtype: str
    vocab_size: int
    tokenizer_sha256: str
    bos_token_id: int | None
    eos_token_id: int | None
    source: Mapping[str, Any]
    splits: Mapping[str, tuple[Shard, ...]]
    counts_sha256: str | None = None
    format: int = FORMAT

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.splits[split])

    def write(self, folder: Path) -> None:
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"
        (folder / MANIFEST).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        path = folder / MANIFEST
        if folder.is_file():
            raise ValueError(f"{folder} is a file: prepare it with `tide-lm prepare {folder} --out FOLDER`")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["format"] != FORMAT:
                raise ValueError(f"its format is {values['format']!r}, and only {FORMAT} is known")
            if values["dtype"] not in ("uint16", "uint32"):
                raise ValueError(f"its dtype is {values['dtype']!r}, and only uint16 and uint32 are known")
            for name in ("vocab_size", "bos_token_id", "eos_token_id"):
                if not isinstance(values[name], int) and (values[name] is not None or name == "vocab_size"):
                    raise ValueError(f"its {name} is {values[name]!r}, which is no id")
            splits = {
                name: tuple(Shard(**shard) for shard in shards) for name, shards in values["splits"].items()
            }
            return cls(**{**values, "splits": splits})
        except FileNotFoundError:
            raise ValueError(
                f"{folder.absolute()} has no prepared data ({MANIFEST} is missing): run `tide-lm prepare`, "
                "or set data.path to a folder that has"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read: {error!r}: prepare the data again") from error


def check_checksum(path: Path, sha256: str) -> None:
    """Check that a file of prepared data is the one that its manifest describes."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(
            f"{path} is damaged, or of other data (sha256 {found[:12]}..., not {sha256[:12]}...): "
            "put it back, or prepare the data again"
        )


def smallest_dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 2**16 else "uint32"


def stored(dtype: str) -> np.dtype:
    """Return the token type on disk, which is the same on any machine."""
    return np.dtype(dtype).newbyteorder("<")


class ShardWriter:
    """Writes one split in shards of about `shard_tokens` tokens, each ending with a document."""

    def __init__(self, folder: Path, split: str, dtype: str, shard_tokens: int = 100_000_000) -> None:
        self._folder, self._split, self._dtype = folder, split, stored(dtype)
        self._shard_tokens = shard_tokens
        self._done: list[Shard] = []
        self._file: IO[bytes] | None = None

    def add(self, tokens: np.ndarray, ends: bool = True) -> None:
        """Append a document, or a piece of one, the last of which `ends` it."""
        if self._file is None:
            self._name = f"{self._split}-{len(self._done):05d}.bin"
            self._file = (self._folder / self._name).open("wb")
            self._hash, self._tokens, self._documents = hashlib.sha256(), 0, 0
        data = np.ascontiguousarray(tokens, dtype=self._dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._tokens += len(tokens)
        self._documents += ends
        if ends and self._tokens >= self._shard_tokens:
            self.finish()

    def finish(self) -> tuple[Shard, ...]:
        """End the last shard; return all."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            self._done.append(Shard(self._name, self._tokens, self._documents, self._hash.hexdigest()))
        return tuple(self._done)


class TokenSplit:
    """One split of prepared data as a flat sequence of tokens, memory-mapped."""

    def __init__(self, folder: Path, split: str = "train") -> None:
        self.manifest = Manifest.read(folder)
        if split not in self.manifest.splits:
            raise ValueError(f"{folder} has no split {split!r}: it has {', '.join(self.manifest.splits)}")
        self.folder, self.split = folder, split
        dtype = stored(self.manifest.dtype)
        self._maps = []
        for shard in self.manifest.splits[split]:
            path = folder / shard.file
            found, wanted = path.stat().st_size if path.exists() else None, shard.tokens * dtype.itemsize
            if found != wanted:
                size = "is missing" if found is None else f"has {found:,} bytes instead of {wanted:,}"
                raise ValueError(f"{path} {size}: prepare the data again")
            self._maps.append(np.memmap(path, dtype=dtype, mode="r"))
        self._starts = np.cumsum([0, *(len(shard) for shard in self._maps)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Read `count` tokens from position `start`, across shards if need be."""
        assert 0 <= start <= start + count <= len(self)
        parts = []
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        for tokens, offset in zip(self._maps[first:], self._starts[first:], strict=False):
            part = tokens[start - offset : start - offset + count]
            parts.append(part)
            start, count = start + len(part), count - len(part)
            if not count:
                break
        return np.concatenate(parts) if parts else np.empty(0, dtype=self.manifest.dtype)

    def verify(self, rank: int = 0, world_size: int = 1) -> None:
        """Read every shard, or this rank's share of them, and compare checksums."""
        for shard in self.manifest.splits[self.split][rank::world_size]:
            check_checksum(self.folder / shard.file, shard.sha256)
