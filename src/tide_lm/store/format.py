"""The file of a store (docs/store-format.md): a header, arrays that all rows share, one row per token."""

import json
import math
import os
import re
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from tide_lm.store.codec import RowCodec

MAGIC, VERSION = b"TIDEROWS", 1
PREFIX = struct.Struct("<8sIII")  # magic, version, bytes of the header's text, its checksum
HEADER_BYTES = 1 << 16  # prefix, text, and zeros
ALIGNMENT = 4096  # of sections, and of the first row
BLOCK = 512  # what a disk reads at least
_MOST_PADDING = 1 / 16  # of a stride, if so many rows, or those of one block, can bring it down to that
_MOST_ROWS = 16
_PRIMARY = ("vocab_size", "blocks", "hidden", "bits", "group", "ranks", "fingerprint")


class StoreError(ValueError):
    """An error for a file that is no store, is damaged, or belongs to another model."""


class Section(NamedTuple):
    """An array that all rows share."""

    dtype: str
    shape: tuple[int, ...]
    at: int
    crc32: int

    @property
    def bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """What is in a store: rows of `vocab_size` tokens, of `blocks` x `hidden` numbers each.

    With `ranks`, one for all blocks together or one for each, a row holds so many coefficients of the vectors
    in `basis`. The `fingerprint` is that of the transformer that the rows belong to. There are `checksums` of
    all sections; only `counts` may be missing.
    """

    vocab_size: int
    blocks: int
    hidden: int
    bits: int
    group: int
    ranks: tuple[int, ...]
    fingerprint: str
    checksums: Mapping[str, int]

    def __post_init__(self) -> None:
        for name, most in (("vocab_size", 2**31), ("blocks", 2**12), ("hidden", 2**20), ("group", 2**20)):
            _check(name, getattr(self, name), 1, most)
        _check("bits", self.bits, 1, 16)
        if len(self.ranks) not in (0, 1, self.blocks):
            raise ValueError(
                f"there are {len(self.ranks)} ranks: give one, or one for each of {self.blocks} blocks"
            )
        for rank in self.ranks:
            _check("a rank", rank, 1, self.blocks * self.hidden // len(self.ranks))
        _ = self.codec  # which checks bits and group
        if not isinstance(self.fingerprint, str) or not re.fullmatch("[0-9a-f]{64}", self.fingerprint):
            raise ValueError(f"the fingerprint is {self.fingerprint!r:.80}: it must be 64 hexadecimal digits")
        if self.checksums.keys() | {"counts"} != self._arrays.keys():
            raise ValueError(
                f"the sections are {list(self.checksums)!r:.80}: they must be {list(self._arrays)}"
            )
        for name, checksum in self.checksums.items():
            _check(f"the checksum of {name}", checksum, 0, 2**32 - 1)

    @cached_property
    def codec(self) -> RowCodec:
        return RowCodec(sum(self.ranks) or self.blocks * self.hidden, self.bits, self.group)

    @cached_property
    def _arrays(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The types and shapes of the sections, in the order of the file."""
        found: dict[str, tuple[str, tuple[int, ...]]] = {"counts": ("<u8", (self.vocab_size,))}
        if self.bits < 16:
            found |= {"levels": ("<f4", (len(self.codec.levels),)), "columns": ("<f4", (self.codec.numbers,))}
        if self.ranks:
            found["basis"] = ("<f2", (sum(self.ranks), self.blocks * self.hidden // len(self.ranks)))
        return found

    @cached_property
    def sections(self) -> dict[str, Section]:
        found, at = {}, HEADER_BYTES
        for name, (dtype, shape) in self._arrays.items():
            if name in self.checksums:
                found[name] = Section(dtype, shape, at, self.checksums[name])
                at = up_to(at + found[name].bytes, ALIGNMENT)
        return found

    @property
    def row_bytes(self) -> int:
        """The bytes of a token's row, its checksum included."""
        return self.codec.row_bytes + 4

    @property
    def rows_at(self) -> int:
        last = max(self.sections.values(), key=lambda section: section.at, default=None)
        return HEADER_BYTES if last is None else up_to(last.at + last.bytes, ALIGNMENT)

    @cached_property
    def rows_in_stride(self) -> int:
        """How many rows share the blocks of a stride: as few as keep padding small."""
        most = max(_MOST_ROWS, BLOCK // self.row_bytes)
        padding = {rows: 1 - rows * self.row_bytes / self._stride(rows) for rows in range(1, most + 1)}
        few = (rows for rows, share in padding.items() if share <= _MOST_PADDING)
        return next(few, min(padding, key=lambda rows: padding[rows]))

    @property
    def stride(self) -> int:
        return self._stride(self.rows_in_stride)

    def _stride(self, rows: int) -> int:
        return up_to(rows * self.row_bytes, BLOCK)

    @property
    def file_bytes(self) -> int:
        return self.rows_at + -(-self.vocab_size // self.rows_in_stride) * self.stride

    @property
    def padding(self) -> float:
        """The share of the rows' part of the file that holds nothing."""
        return 1 - self.vocab_size * self.row_bytes / (self.file_bytes - self.rows_at)

    def row_at(self, tokens: np.ndarray) -> np.ndarray:
        stride, place = np.divmod(tokens.astype(np.int64), self.rows_in_stride)
        return self.rows_at + stride * self.stride + place * self.row_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the header as it is in JSON, with values that follow from others."""
        primary = {name: getattr(self, name) for name in _PRIMARY} | {"ranks": list(self.ranks)}
        derived = ("row_bytes", "rows_at", "rows_in_stride", "stride", "file_bytes")
        sections = {
            name: {**section._asdict(), "shape": list(section.shape)}
            for name, section in self.sections.items()
        }
        return primary | {name: getattr(self, name) for name in derived} | {"sections": sections}

    @property
    def checksum(self) -> str:
        """The checksum of the header's text, in hexadecimal digits: it differs between two packings."""
        return f"{PREFIX.unpack_from(self.to_bytes())[3]:08x}"

    def to_bytes(self) -> bytes:
        text = json.dumps(self.to_dict()).encode()
        start = PREFIX.pack(MAGIC, VERSION, len(text), zlib.crc32(text)) + text
        return start.ljust(HEADER_BYTES, b"\0")

    @classmethod
    def from_bytes(cls, start: bytes) -> "Header":
        """Read the first `HEADER_BYTES` of a file. Nothing in them decides how much is allocated."""
        if len(start) < HEADER_BYTES:
            raise StoreError(f"it has {len(start):,} bytes, and a header {HEADER_BYTES:,}: it is cut off")
        magic, version, size, crc32 = PREFIX.unpack_from(start)
        if magic != MAGIC:
            raise StoreError(f"it begins with {magic!r}, and a store with {MAGIC!r}")
        if version != VERSION:
            raise StoreError(
                f"its version is {version}, and {VERSION} is known here: install a newer tide-lm"
            )
        text = start[PREFIX.size : PREFIX.size + size]
        if len(text) < size or zlib.crc32(text) != crc32:
            raise StoreError("its header is damaged: the checksum does not fit")
        if any(start[PREFIX.size + size :]):
            raise StoreError("its header is damaged: what follows it is not zero")
        try:
            found = json.loads(text)
            primary = {name: found[name] for name in _PRIMARY} | {"ranks": tuple(found["ranks"])}
            checksums = {name: section["crc32"] for name, section in found["sections"].items()}
            header = cls(**primary, checksums=checksums)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"its header is none of a store ({error!r:.200})") from error
        if header.to_dict() != found:
            raise StoreError("its header contradicts itself")
        return header


def up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _check(name: str, value: Any, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {value!r:.40}: it must be a whole number from {least:,} to {most:,}")


def read_header(file: BinaryIO, size: int) -> Header:
    """Read the header of a file of so many bytes, which must be those that the header calls for."""
    header = Header.from_bytes(file.read(HEADER_BYTES))
    if size != header.file_bytes:
        raise StoreError(
            f"it has {size:,} bytes, and its header calls for {header.file_bytes:,}: copy it again"
        )
    return header


def read_section(descriptor: int, section: Section, name: str) -> np.ndarray:
    found, size = np.zeros(section.bytes, np.uint8), 0
    while some := os.preadv(descriptor, [found.data[size:]], section.at + size):  # at most 2 GiB at once
        size += some
    if zlib.crc32(found.data) != section.crc32:
        raise StoreError(f"its section {name} is damaged: the checksum does not fit")
    return found.view(section.dtype).reshape(section.shape)


def checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).data)


def write_store(
    path: Path, header: Header, sections: Mapping[str, np.ndarray], rows: Iterable[np.ndarray]
) -> None:
    """Write a file; `rows` come in parts, in the order of their tokens, as bytes of the codec."""
    with path.open("xb") as file:
        file.write(header.to_bytes())
        for name, section in header.sections.items():
            file.seek(section.at)
            file.write(sections[name].astype(section.dtype).tobytes())
        file.seek(header.rows_at)
        waiting, written = np.empty((0, header.row_bytes), np.uint8), 0
        for some in rows:
            sums = np.array([zlib.crc32(row.data, token) for token, row in enumerate(some, written)], "<u4")
            written += len(some)
            waiting = np.concatenate([waiting, np.concatenate([some, sums.view(np.uint8).reshape(-1, 4)], 1)])
            whole = len(waiting) // header.rows_in_stride * header.rows_in_stride
            _write_strides(file, header, waiting[:whole])
            waiting = waiting[whole:]
        _write_strides(file, header, waiting)
        if written != header.vocab_size:
            raise ValueError(f"there were {written:,} rows to write, and not {header.vocab_size:,}")


def _write_strides(file: BinaryIO, header: Header, rows: np.ndarray) -> None:
    """Write whole strides; fill the last up with zeros."""
    in_stride = header.rows_in_stride
    strides = np.pad(rows, ((0, -len(rows) % in_stride), (0, 0))).reshape(-1, in_stride * header.row_bytes)
    file.write(np.pad(strides, ((0, 0), (0, header.stride - strides.shape[1]))).data)
