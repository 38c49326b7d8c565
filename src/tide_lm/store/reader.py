"""Rows from a store's file: read in parallel and past the page cache, the hottest of them kept in memory."""

import errno
import mmap
import os
import threading
import time
import weakref
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from tide_lm.store.aio import AsyncReads
from tide_lm.store.format import BLOCK, HEADER_BYTES, StoreError, read_header, read_section, up_to

THREADS = 16  # that read, where the system has no asynchronous reads
_AT_ONCE = 512  # reads that are begun, where it has
_ALONE = 2  # so few rows are not worth handing over


class _Threads:
    """A pool for each process: threads do not live on in a child."""

    def __init__(self, count: int, name: str) -> None:
        self.count, self.name = count, name
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def __call__(self) -> ThreadPoolExecutor:
        if self._pool is None or self._process != os.getpid():
            self._pool, self._process = ThreadPoolExecutor(self.count, self.name), os.getpid()
        return self._pool


class StoreFile:
    """A store that is open; any number of threads may read it.

    The file that was opened is read to the end, whatever takes its name meanwhile.
    """

    def __init__(self, path: Path, threads: int = THREADS, direct: bool = True) -> None:
        self.path, self._threads = path, _Threads(threads, "tide-store")
        try:
            with path.open("rb", buffering=0) as file:
                self.header = read_header(file, os.fstat(file.fileno()).st_size)
                arrays = self.header.sections.items()
                self.sections = {name: read_section(file, section, name) for name, section in arrays}
                self._descriptor, self.is_direct = _open_rows(file.fileno(), direct)
        except StoreError as error:
            raise StoreError(f"{path} cannot be read as a store: {error}") from None
        except OSError as error:
            raise StoreError(f"{path} cannot be read as a store: {error.strerror}") from error
        weakref.finalize(self, os.close, self._descriptor)
        self._own = threading.local()

    def read(self, tokens_U: np.ndarray, into_UR: np.ndarray) -> None:
        """The bytes of rows, without their checksums; of ascending tokens it is fastest."""
        if len(tokens_U) <= _ALONE:
            self._read_each(tokens_U, into_UR)
        elif (reads := self._async_reads()) is not None:
            for start in range(0, len(tokens_U), _AT_ONCE):
                self._read_at_once(reads, tokens_U[start : start + _AT_ONCE], into_UR[start:])
        else:
            cuts = np.linspace(0, len(tokens_U), min(self._threads.count, len(tokens_U)) + 1).astype(int)
            parts = [slice(*cut) for cut in pairwise(cuts)]
            begun = [self._threads().submit(self._read_each, tokens_U[part], into_UR[part]) for part in parts]
            for each in begun:
                each.result()

    def _async_reads(self) -> AsyncReads | None:
        """Those of this thread and process, if the system has them."""
        if not self.is_direct:  # of what is in the page cache they are no faster
            return None
        if getattr(self._own, "process", 0) != os.getpid():
            self._own.process, self._own.reads = os.getpid(), None
            with suppress(OSError):
                self._own.reads = AsyncReads(_AT_ONCE, up_to(self.header.row_bytes + BLOCK, BLOCK))
        return self._own.reads

    def _read_at_once(self, reads: AsyncReads, tokens_U: np.ndarray, into_UR: np.ndarray) -> None:
        at_U, size = self.header.row_at(tokens_U), self.header.row_bytes
        within_U = at_U % BLOCK
        sizes_U = -(-(within_U + size) // BLOCK) * BLOCK
        begun = ended = 0
        failed: StoreError | None = None
        while ended < (begun if failed else len(tokens_U)):
            if begun < len(tokens_U) and not failed:
                try:
                    begun += reads.begin(self._descriptor, begun, (at_U - within_U)[begun:], sizes_U[begun:])
                except OSError as error:
                    failed = StoreError(f"{self.path}: rows cannot be read: {error.strerror}")
                    continue
            slots, results = reads.done()
            ended += len(slots)
            for slot, found in zip(slots.tolist(), results.tolist(), strict=True):
                try:
                    token, start = int(tokens_U[slot]), int(within_U[slot])
                    into_UR[slot] = self._checked(token, reads.slots_SB[slot], start, found)
                except StoreError as error:
                    failed = error  # told when all that was begun has ended, for its memory is used again
        if failed:
            raise failed

    def _read_each(self, tokens_U: np.ndarray, into_UR: np.ndarray) -> None:
        header, size = self.header, self.header.row_bytes
        if not hasattr(self._own, "blocks"):
            pages = mmap.mmap(-1, size + 2 * BLOCK)  # whole ones, as direct reads need it
            self._own.blocks = np.frombuffer(pages, np.uint8)
        blocks = self._own.blocks
        for token, at, row in zip(tokens_U.tolist(), header.row_at(tokens_U).tolist(), into_UR, strict=True):
            within = at % BLOCK
            try:
                found = os.preadv(self._descriptor, [blocks[: up_to(within + size, BLOCK)]], at - within)
            except OSError as error:
                found = -(error.errno or errno.EIO)
            row[:] = self._checked(token, blocks, within, found)

    def _checked(self, token: int, blocks: np.ndarray, start: int, found: int) -> np.ndarray:
        """The row without its checksum; `found` bytes were read, or below 0 it is the number of an error."""
        if found < 0:
            why = os.strerror(-found)
            raise StoreError(f"{self.path}: the row of token {token} cannot be read: {why}")
        end = start + self.header.row_bytes
        row, sum_4 = blocks[start : end - 4], blocks[end - 4 : end]
        if found < end or zlib.crc32(row.data) != int.from_bytes(sum_4.tobytes(), "little"):
            raise StoreError(
                f"{self.path}: the row of token {token} is damaged or cut off: copy the file again, or "
                "pack it again with `tide-lm pack`"
            )
        return row


def _open_rows(descriptor: int, direct: bool) -> tuple[int, bool]:
    """The same file once more, past the page cache where the system can."""
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
    """Rows that were in memory when they were asked for and that were not, bytes read, and waits for them."""

    hits: int = 0
    misses: int = 0
    bytes: int = 0
    waits: int = 0
    seconds: float = 0.0


class StoredRows:
    """Rows by token, from a file; the most frequent stay in memory, once read, within a budget of bytes.

    Which those are is decided by the store's counts; without counts, by who comes first.
    """

    def __init__(self, file: StoreFile, cache_bytes: int) -> None:
        if cache_bytes < 0:
            raise ValueError(f"the cache has {cache_bytes:,} bytes: it must have 0 or more")
        header = file.header
        self.file, self.counters, self._lock = file, Counters(), threading.Lock()
        places = min(cache_bytes // header.codec.row_bytes, header.vocab_size)
        self._rows_CR = np.empty((places, header.codec.row_bytes), np.uint8)  # pages come when they are used
        counts_V = file.sections.get("counts", np.zeros(header.vocab_size, np.uint64))
        self._place_V = np.full(header.vocab_size, -1)
        self._place_V[np.argsort(-counts_V.astype(np.float64), kind="stable")[:places]] = np.arange(places)
        self._filled_V = np.zeros(header.vocab_size, bool)
        self._ahead: tuple[np.ndarray, Future[np.ndarray]] | None = None
        self._reader = _Threads(1, "tide-ahead")

    def fetch(self, tokens_U: np.ndarray, into_UR: np.ndarray) -> None:
        """Rows of ascending tokens, each once."""
        with self._lock:
            known = self._filled_V[tokens_U]
            into_UR[known] = self._rows_CR[self._place_V[tokens_U[known]]]
            missed = tokens_U[~known]
            self.counters.hits += len(tokens_U) - len(missed)
            self.counters.misses += len(missed)
            if len(missed):
                into_UR[~known] = rows = self._awaited(missed)
                kept = self._place_V[missed] >= 0
                self._rows_CR[self._place_V[missed[kept]]] = rows[kept]
                self._filled_V[missed[kept]] = True

    def prefetch(self, tokens_U: np.ndarray) -> None:
        """Begins to read rows that will be asked for next; what was begun before is forgotten."""
        with self._lock:
            missed = tokens_U[~self._filled_V[tokens_U]]
            self._ahead = (missed, self._reader().submit(self._read, missed)) if len(missed) else None

    def _awaited(self, tokens: np.ndarray) -> np.ndarray:
        started, ahead, self._ahead = time.perf_counter(), self._ahead, None
        if ahead is None or not np.array_equal(ahead[0], tokens):
            rows, waited = self._read(tokens), True
        else:
            waited, rows = not ahead[1].done(), ahead[1].result()
        if waited:
            self.counters.waits += 1
            self.counters.seconds += time.perf_counter() - started
        return rows

    def _read(self, tokens: np.ndarray) -> np.ndarray:
        rows = np.empty((len(tokens), self.file.header.codec.row_bytes), np.uint8)
        self.file.read(tokens, rows)
        self.counters.bytes += rows.nbytes
        return rows
