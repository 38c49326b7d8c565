"""Read rows from a store's file, in parallel and past the page cache, and keep the hottest in memory."""

import errno
import mmap
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

try:
    from isal.isal_zlib import crc32  # zlib's is half as fast, and takes as long as the reads themselves
except ImportError:
    from zlib import crc32

from tide_lm.store.aio import AsyncReads
from tide_lm.store.format import BLOCK, HEADER_BYTES, Header, StoreError, read_header, read_section

THREADS = 16  # for reads where the system has no asynchronous ones
_ROWS_PER_READ = 1024  # when the cache is filled
_READS_UNDER_WAY = 256  # with more, the disk would idle while checksums are calculated
_FEW = 2  # rows that this thread reads one after the other


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Return the threads of this process; a child that was forked has none of its parent's."""
    return ThreadPoolExecutor(THREADS, "store")


class StoreFile:
    """An open store; any number of threads may read it.

    It reads the file that was opened, even if another takes its name.
    """

    def __init__(self, path: Path, direct: bool = True) -> None:
        self.path = path.absolute()
        with self._naming(), path.open("rb") as file:
            self.header = read_header(file, os.fstat(file.fileno()).st_size)
            self._plain = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._plain)
            self._descriptor, self.is_direct = _open_rows(self._plain, direct)
            weakref.finalize(self, os.close, self._descriptor)
        self.is_async = self.is_direct  # in the page cache asynchronous reads are no faster
        self._own = threading.local()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            raise StoreError(f"{self.path} cannot be read as a store: {error}") from None
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read as a store: {error.strerror}") from error

    def __reduce__(self) -> tuple[type, tuple[Path, bool]]:
        self.check_name()
        return StoreFile, (self.path, self.is_direct)  # opened once more, by another process

    def __deepcopy__(self, memo: dict[int, Any]) -> "StoreFile":
        return self  # in which nothing changes

    @property
    def sections(self) -> dict[str, np.ndarray]:
        """The arrays that all rows share, read each time they are asked for."""
        return {name: self.section(name) for name in self.header.sections}

    def section(self, name: str) -> np.ndarray:
        with self._naming():
            return read_section(self._plain, self.header.sections[name], name)

    def check_model(self, **expected: Any) -> None:
        """Check that the store belongs to a model of which the header has these values."""
        for name, value in expected.items():
            if (found := getattr(self.header, name)) != value:
                raise StoreError(
                    f"{self.path} belongs to another model: its {name} is {found}, and the model's is "
                    f"{value}; give the model the store that was packed from it, or pack it again with "
                    "`tide-lm pack`"
                )

    def check_name(self) -> None:
        """Check that the name is still this file's, and that it is as long as it was."""
        here = os.fstat(self._plain)
        if not self.path.exists() or not os.path.samestat(here, self.path.stat()):
            raise StoreError(f"{self.path} was replaced or removed after it was opened: open the model again")
        if here.st_size != self.header.file_bytes:
            raise StoreError(f"{self.path} was cut off after it was opened: copy it again, or pack it again")

    def read(self, tokens_U: np.ndarray) -> np.ndarray:
        """Return the bytes of rows, without checksums; ascending tokens are fastest."""
        batch = _Batch(self._descriptor, tokens_U, self.header)
        if len(tokens_U) <= _FEW:
            batch.read_each(slice(0, len(tokens_U)))
        elif (reads := self._async_reads()) is not None:
            reads.into = batch.blocks_UB
            try:
                batch.read_at_once(reads)
            except BaseException:
                del self._own.process
                reads.close()  # which waits for what is under way
                raise
            reads.into = None
        else:
            cuts = np.linspace(0, len(tokens_U), min(THREADS, len(tokens_U)) + 1).astype(int)
            list(_threads(os.getpid()).map(lambda cut: batch.read_each(slice(*cut)), pairwise(cuts)))
        self._check(tokens_U, batch)
        return batch.rows()

    def _async_reads(self) -> AsyncReads | None:
        """Return this thread's asynchronous reads; a child process cannot use those of its parent."""
        if self.is_async and getattr(self._own, "process", None) != os.getpid():
            self._own.reads = None
            with suppress(OSError):  # a system may have none, or only so many
                self._own.reads = AsyncReads(_READS_UNDER_WAY)
            self._own.process = os.getpid()
        return self._own.reads if self.is_async else None

    def _check(self, tokens_U: np.ndarray, batch: "_Batch") -> None:
        places_U4 = batch.end_U[:, None] + np.arange(4)
        sums_U = np.take_along_axis(batch.blocks_UB, places_U4, 1).view("<u4")[:, 0]
        wrong_U = (batch.found_U < batch.end_U + 4) | (batch.sums_U != sums_U)
        if not wrong_U.any():
            return
        first = int(wrong_U.argmax())
        row, found = f"{self.path}: row {tokens_U[first]}", int(batch.found_U[first])
        if found < 0:
            raise StoreError(f"{row} cannot be read: {os.strerror(-found)}")
        raise StoreError(
            f"{row} is damaged or cut off: copy the file again, or pack it again with `tide-lm pack`"
        )


class _Batch:
    """Reads of whole blocks, with the bytes found by each (below 0: an error) and checksums."""

    def __init__(self, descriptor: int, tokens_U: np.ndarray, header: Header) -> None:
        self.tokens_U, at_U, row_bytes = tokens_U, header.row_at(tokens_U), header.row_bytes
        self.start_U = at_U % BLOCK  # of the row, in its blocks
        self.end_U = self.start_U + row_bytes - 4  # where its checksum begins
        self.descriptor, self.at_U = descriptor, at_U - self.start_U
        self.size_U = -(-(self.end_U + 4) // BLOCK) * BLOCK
        self.blocks_UB = _pages(len(at_U), int(self.size_U.max(initial=row_bytes)))
        self.found_U, self.sums_U = np.zeros_like(at_U), np.zeros(len(at_U), np.uint32)
        self._bytes, self._width = self.blocks_UB.reshape(-1).data, self.blocks_UB.shape[1]
        self._row_bytes = row_bytes - 4

    def rows(self) -> np.ndarray:
        """Return the rows without checksums; nothing is copied if all begin at the beginning of a block."""
        if not self.start_U.any():
            return self.blocks_UB[:, : self._row_bytes]
        places = zip(self.blocks_UB, self.start_U.tolist(), self.end_U.tolist(), strict=True)
        return np.stack([blocks[start:end] for blocks, start, end in places])

    def read_each(self, part: slice) -> None:
        """Read rows one after the other."""
        for place in range(part.start, part.stop):
            start = place * self._width
            blocks = self._bytes[start : start + int(self.size_U[place])]
            try:
                self.found_U[place] = os.preadv(self.descriptor, [blocks], int(self.at_U[place]))
            except OSError as error:
                self.found_U[place] = -(error.errno or errno.EIO)
        self._sum(np.arange(part.start, part.stop))

    def read_at_once(self, reads: AsyncReads) -> None:
        """Keep as many reads under way as possible, and calculate checksums of those that have ended."""
        addresses_U = self.blocks_UB.ctypes.data + np.arange(len(self.at_U)) * self._width
        begun = ended = 0
        stop = len(self.at_U)
        while ended < stop:
            some = slice(begun, min(stop, ended + reads.depth))
            if begun < some.stop:
                where = addresses_U[some], self.at_U[some], self.size_U[some]
                try:
                    begun += reads.begin(self.descriptor, begun, *where)
                except OSError as error:
                    if begun == ended or not isinstance(error, BlockingIOError):
                        self.found_U[begun:stop], stop = -(error.errno or errno.EIO), begun
                        continue
            places, found = reads.done()
            ended += len(places)
            self.found_U[places] = found
            self._sum(places)

    def _sum(self, places: np.ndarray) -> None:
        first_N = places * self._width
        starts, ends = (first_N + self.start_U[places]).tolist(), (first_N + self.end_U[places]).tolist()
        rows = zip(self.tokens_U[places].tolist(), starts, ends, strict=True)
        self.sums_U[places] = [crc32(self._bytes[start:end], token) for token, start, end in rows]


def _pages(rows: int, size: int) -> np.ndarray:
    """Allocate memory for so many reads, aligned for direct reads."""
    raw = np.empty(rows * size + mmap.PAGESIZE, np.uint8)
    shift = -raw.ctypes.data % mmap.PAGESIZE
    return raw[shift : shift + rows * size].reshape(rows, size)


def _open_rows(descriptor: int, direct: bool) -> tuple[int, bool]:
    """Open the file once more, past the page cache if the system can; return whether it does."""
    if direct and hasattr(os, "O_DIRECT"):
        try:
            again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT)
        except OSError:
            return os.dup(descriptor), False
        try:
            with mmap.mmap(-1, BLOCK) as block:
                os.preadv(again, [block], HEADER_BYTES - BLOCK)
            return again, True
        except OSError:
            os.close(again)
    return os.dup(descriptor), False


@dataclass
class Counters:
    """Counts of rows that were in memory and that were not, of bytes read, and of seconds that it took."""

    hits: int = 0
    misses: int = 0
    bytes: int = 0
    seconds: float = 0.0


class StoredRows:
    """The rows of a file, with a cache of the most recently used within a budget of bytes.

    If the store has counts, the cache begins with the most frequent tokens.
    """

    def __init__(self, file: StoreFile, cache_bytes: int) -> None:
        header = file.header
        self.file, self.counters, self.cache_bytes = file, Counters(), cache_bytes
        places = min(cache_bytes // header.codec.row_bytes, header.vocab_size)
        self.cached_CR = np.empty(
            (places, header.codec.row_bytes), np.uint8
        )  # the system allocates pages when they are used
        self._places: OrderedDict[int, int] = OrderedDict()  # by token, the least recently used first
        self._free = list(range(places))
        self._locks: dict[int, threading.Lock] = {}
        if "counts" in header.sections:
            by_count = np.argsort(-file.section("counts").astype(np.float64), kind="stable")[:places]
            for some in np.array_split(by_count[::-1], -(-places // _ROWS_PER_READ)) if places else ():
                self._keep(some, file.read(some), places)

    def __reduce__(self) -> tuple[type, tuple[StoreFile, int]]:
        return StoredRows, (self.file, self.cache_bytes)

    def _lock(self) -> threading.Lock:
        """Return this process's lock: a child must not wait for a thread of its parent."""
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def fetch(self, tokens_U: np.ndarray, into_UR: np.ndarray) -> None:
        """Copy the rows of ascending tokens, each given once."""
        with self._lock():
            places = [self._places.get(token) for token in tokens_U.tolist()]
            known_U = np.array([place is not None for place in places], bool)
            into_UR[known_U] = self.cached_CR[[place for place in places if place is not None]]
            for token in tokens_U[known_U].tolist():
                self._places.move_to_end(token)
            missed = tokens_U[~known_U]
            self.counters.hits += len(tokens_U) - len(missed)
            self.counters.misses += len(missed)
            if len(missed):
                into_UR[~known_U] = rows = self._read(missed)
                self._keep(missed, rows, len(self.cached_CR) - int(known_U.sum()))

    def place_of(self, token: int) -> int:
        """Return the place of a row in `cached_CR`, which has room for one; read it if need be.

        The row before it stays: the least recently used one goes.
        """
        with self._lock():
            if token in self._places:
                self._places.move_to_end(token)
                self.counters.hits += 1
            else:
                tokens_1 = np.array([token])
                self.counters.misses += 1
                self._keep(tokens_1, self._read(tokens_1), 1)
            return self._places[token]

    def move_to(self, array_CR: np.ndarray) -> None:
        """Move the cache into an array of its shape, such as one that a GPU can read."""
        with self._lock():
            array_CR[:] = self.cached_CR
            self.cached_CR = array_CR

    def _keep(self, tokens_U: np.ndarray, rows_UR: np.ndarray, most: int) -> None:
        """Keep rows in free places, and evict the least recently used rows for others.

        If there are too many, the first are kept: tokenizers number frequent tokens before rare ones. If it
        is interrupted, a place may be lost, but no token ever gets another's row.
        """
        wanted = min(len(tokens_U), most)
        while len(self._free) < wanted and self._places:
            self._free.append(self._places.popitem(last=False)[1])
        places = self._free[:wanted]
        kept = slice(0, len(places))
        self.cached_CR[places] = rows_UR[kept]
        del self._free[:wanted]
        self._places.update(zip(tokens_U[kept].tolist(), places, strict=True))

    def _read(self, tokens: np.ndarray) -> np.ndarray:
        started = time.perf_counter()
        rows = self.file.read(tokens)
        self.counters.bytes += rows.size
        self.counters.seconds += time.perf_counter() - started
        return rows
