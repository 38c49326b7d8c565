"""Reading a store: what comes back, from many sides at once, and what happens when it cannot."""

import errno
import fcntl
import gc
import multiprocessing
import os
import runpy
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from stores import COLUMNS, FINGERPRINT, HEADER, LEVELS, written

from tide_lm.store import reader
from tide_lm.store.aio import AsyncReads
from tide_lm.store.format import Header, StoreError, checksum
from tide_lm.store.reader import StoredRows, StoreFile

COUNTS = np.roll(np.arange(50, dtype="<u8")[::-1], 20)  # the most frequent are 20, 21 and so on
ROW = HEADER.codec.row_bytes


asynchronous = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has such reads")
no_direct_reads = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="the system has no direct reads")


@pytest.fixture
def store(tmp_path):
    """The path of a store with counts, and its rows."""
    sections = {"counts": COUNTS, "levels": LEVELS, "columns": COLUMNS}
    sums = {name: checksum(array) for name, array in sections.items()}
    header = Header(50, 3, 32, 4, 32, (), FINGERPRINT, sums)
    return tmp_path / "rows.tide", written(tmp_path / "rows.tide", header, sections)


def read(file: StoreFile, tokens) -> np.ndarray:
    return file.read(np.array(tokens, dtype=np.int64))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("tokens", [[], [0], [49], [3, 4], [49, 0, 7, 7], list(range(50))])
def test_rows_come_back(store, direct, tokens):
    path, rows = store
    file = StoreFile(path, direct=direct)
    assert np.array_equal(read(file, tokens), rows[tokens])
    assert direct or not file.is_direct
    assert np.array_equal(file.sections["levels"], LEVELS)


@pytest.mark.parametrize("hidden", [255, 256, 257])
def test_a_checksum_may_stand_in_the_next_block(tmp_path, hidden):
    header = replace(HEADER, blocks=1, hidden=hidden, bits=16, checksums={})
    rows = written(tmp_path / "rows.tide", header, {})
    file = StoreFile(tmp_path / "rows.tide")
    for token in range(50):
        assert np.array_equal(read(file, [token]), rows[[token]])


@pytest.mark.parametrize("way", ["direct", "plain", "threads"])
def test_rows_beyond_four_gigabytes_come_back(tmp_path, monkeypatch, way):
    """Write four rows of a store that has holes elsewhere, and takes no room."""
    header = replace(HEADER, vocab_size=2**26)
    tokens, rows = (
        np.array([0, 2**25, 2**26 - 2, 2**26 - 1]),
        np.arange(4 * ROW, dtype=np.uint8).reshape(4, ROW),
    )
    assert int(header.row_at(tokens)[-1]) > 2**32
    assert np.array_equal(header.row_at(tokens.astype(np.int32)), header.row_at(tokens))
    path = tmp_path / "holes.tide"
    with path.open("wb") as file:
        file.write(header.to_bytes())
        for name, array in {"levels": LEVELS, "columns": COLUMNS}.items():
            file.seek(header.sections[name].at)
            file.write(array.tobytes())
        for token, row, at in zip(tokens.tolist(), rows, header.row_at(tokens).tolist(), strict=True):
            file.seek(at)
            file.write(row.tobytes() + zlib.crc32(row, token).to_bytes(4, "little"))
        file.truncate(header.file_bytes)
    if way == "threads":
        monkeypatch.setattr(reader, "AsyncReads", refuse_asynchronous)
    assert np.array_equal(read(StoreFile(path, direct=way != "plain"), tokens), rows)


def refuse_asynchronous(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")


def test_checksums_are_zlibs_with_and_without_the_faster_package(store, monkeypatch):
    path, rows = store
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    plain = runpy.run_path(reader.__file__)
    assert plain["crc32"] is zlib.crc32
    assert plain["crc32"](rows.data) == reader.crc32(rows.data)
    assert np.array_equal(read(plain["StoreFile"](path), [3, 49]), rows[[3, 49]])


@no_direct_reads
def test_a_system_without_direct_reads_is_read_plainly(store, monkeypatch):
    path, rows = store
    opened = os.open

    def refuse(name, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(name, flags, *more)

    monkeypatch.setattr(reader.os, "open", refuse)
    file = StoreFile(path)
    assert not file.is_direct
    assert np.array_equal(read(file, range(50)), rows)


@no_direct_reads
def test_a_disk_whose_blocks_are_larger_is_read_plainly(store, monkeypatch):
    """Its file opens for direct reads, and then refuses those of 512 bytes."""
    path, rows = store
    read_at = os.preadv

    def refuse(descriptor, buffers, at):
        if at % 4096 and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return read_at(descriptor, buffers, at)

    monkeypatch.setattr(reader.os, "preadv", refuse)
    file = StoreFile(path)
    assert not file.is_direct
    assert np.array_equal(read(file, range(50)), rows)


def test_a_file_that_is_not_there_or_a_folder(tmp_path):
    for path in (tmp_path / "none.tide", tmp_path):
        with pytest.raises(StoreError, match=rf"{path} cannot be read as a store: "):
            StoreFile(path)


def test_a_file_that_is_cut_off_anywhere_is_found_when_it_is_opened(store):
    path, _ = store
    content = path.read_bytes()
    for size in (*range(0, len(content), 4001), len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(StoreError, match=r"cut off|calls for"):
            StoreFile(path)


def test_a_bit_that_is_turned_in_a_row_is_found_when_it_is_read(store):
    path, rows = store
    content, header = path.read_bytes(), StoreFile(path).header
    random = np.random.default_rng(0)
    for token in range(50):
        bad = bytearray(content)
        at = int(header.row_at(np.array([token]))[0]) + int(random.integers(header.row_bytes))
        bad[at] ^= 1 << int(random.integers(8))
        path.write_bytes(bad)
        file = StoreFile(path)
        others = [other for other in range(50) if other != token]
        assert np.array_equal(read(file, others), rows[others])
        for tokens in ([token], range(50)):
            with pytest.raises(StoreError, match=f"row {token} is damaged"):
                read(file, tokens)


@pytest.mark.parametrize("name", ["counts", "levels", "columns"])
def test_a_bit_that_is_turned_in_what_rows_share_is_found_when_that_is_read(store, name):
    path, _ = store
    content = bytearray(path.read_bytes())
    content[StoreFile(path).header.sections[name].at + 5] ^= 16
    path.write_bytes(content)
    with pytest.raises(StoreError, match=f"its section {name} is damaged"):
        _ = StoreFile(path).sections


def test_a_file_that_is_replaced_while_it_is_open_is_read_to_the_end(store):
    path, rows = store
    file = StoreFile(path)
    path.with_name("other").write_bytes(b"other")
    path.with_name("other").rename(path)
    assert np.array_equal(read(file, range(50)), rows)


def test_a_file_that_is_cut_off_while_it_is_open_is_an_error_and_no_crash(store):
    path, rows = store
    file = StoreFile(path)
    os.truncate(path, file.header.rows_at + file.header.stride)
    assert np.array_equal(read(file, [0]), rows[:1])
    with pytest.raises(StoreError, match=r"row \d+ is damaged or cut off"):
        read(file, range(50))


def test_a_read_that_fails_names_the_token(store, monkeypatch):
    path, _ = store
    file = StoreFile(path)

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(reader.os, "preadv", fail)
    with pytest.raises(StoreError, match=r"row 7 cannot be read: Input/output error"):
        read(file, [7])


def test_a_system_without_asynchronous_reads_has_threads(store, monkeypatch):
    path, rows = store
    monkeypatch.setattr(reader, "AsyncReads", refuse_asynchronous)
    file = StoreFile(path)
    assert np.array_equal(read(file, range(50)), rows)
    os.truncate(path, file.header.rows_at + file.header.stride)
    with pytest.raises(StoreError, match=r"row \d+ is damaged or cut off"):
        read(file, range(50))


@asynchronous
@pytest.mark.parametrize("room", [1, 7, 50])
def test_reads_that_the_system_takes_a_few_at_a_time(store, monkeypatch, room):
    path, rows = store
    begin = AsyncReads.begin

    def take_some(self, file, first, *where):
        return begin(self, file, first, *(each[:room] for each in where))

    monkeypatch.setattr(AsyncReads, "begin", take_some)
    assert np.array_equal(read(StoreFile(path), range(50)), rows)


@asynchronous
def test_one_read_of_many_that_fails_is_named_and_the_next_call_works(store, monkeypatch):
    path, rows = store
    file, done = StoreFile(path), AsyncReads.done

    def fail(self):
        slots, results = done(self)
        return slots, np.where(slots == 30, -errno.EIO, results)

    with monkeypatch.context() as broken:
        broken.setattr(AsyncReads, "done", fail)
        with pytest.raises(StoreError, match="row 30 cannot be read: Input/output error"):
            read(file, range(50))
    assert np.array_equal(read(file, range(50)), rows)


@asynchronous
def test_a_call_that_is_interrupted_leaves_no_read_under_way(store, monkeypatch):
    """Reads go on after it, to memory that is no longer theirs, unless they are waited for."""
    path, rows = store
    file, closed = StoreFile(path), []

    def interrupt(self):
        closed.append(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(AsyncReads, "done", interrupt)
        with pytest.raises(KeyboardInterrupt):
            read(file, range(50))
    assert not closed[0].close.alive
    assert np.array_equal(read(file, range(50)), rows)


@asynchronous
def test_reads_that_cannot_begin_are_an_error(store):
    path, _ = store
    file = StoreFile(path)
    file._descriptor = 10**6
    with pytest.raises(StoreError, match="row 0 cannot be read: Bad file descriptor"):
        read(file, range(50))


@no_direct_reads
def test_a_store_that_is_no_longer_used_leaves_nothing_open(store, monkeypatch):
    def open_files():
        return len(os.listdir("/proc/self/fd"))

    made, make = [], AsyncReads.__init__

    def noted(reads, depth):
        make(reads, depth)
        made.append(reads.close)

    monkeypatch.setattr(AsyncReads, "__init__", noted)
    gc.collect()
    before = open_files()
    for _ in range(3):
        read(StoreFile(store[0]), range(50))
    gc.collect()
    assert open_files() == before
    assert [close.alive for close in made] == [False] * 3


def test_many_threads_read_at_once(store):
    path, rows = store
    file, cached = StoreFile(path), StoredRows(StoreFile(path), 10 * ROW)
    random = np.random.default_rng(1)
    asked = [np.unique(random.integers(50, size=20)) for _ in range(200)]

    def both(tokens):
        found = np.zeros((len(tokens), ROW), np.uint8)
        cached.fetch(tokens, found)
        return np.array_equal(read(file, tokens), rows[tokens]) and np.array_equal(found, rows[tokens])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(both, asked))
    assert cached.counters.hits + cached.counters.misses == sum(map(len, asked))


def test_threads_are_kept_for_the_next_read(store):
    path, rows = store
    file = StoreFile(path, direct=False)
    first = reader._threads(os.getpid())
    for _ in range(3):
        assert np.array_equal(read(file, range(50)), rows)
    assert reader._threads(os.getpid()) is first
    assert 1 <= sum(thread.name.startswith("store_") for thread in threading.enumerate()) <= reader.THREADS


def _reads_all(file: StoreFile, cached: StoredRows, rows: np.ndarray) -> None:
    found, tokens = np.zeros_like(rows), np.arange(50)
    cached.fetch(tokens, found)
    for _ in range(20):
        cached.fetch(tokens, found)
        if not np.array_equal(found, rows) or not np.array_equal(read(file, range(50)), rows):
            os._exit(1)
    os._exit(0)


@pytest.mark.parametrize("kind", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_two_processes_read_at_once(store, kind):
    """A child that was forked has no threads of its parent, and must make its own."""
    path, rows = store
    context = multiprocessing.get_context(kind)
    if kind == "fork":
        file, cached = StoreFile(path), StoredRows(StoreFile(path), 9 * ROW)
        read(file, range(50))
        cached.fetch(np.arange(50), np.zeros_like(rows))
        children = [context.Process(target=_reads_all, args=(file, cached, rows)) for _ in range(2)]
    else:
        children = [context.Process(target=_opens_and_reads, args=(path, rows)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0


def _opens_and_reads(path, rows) -> None:
    _reads_all(StoreFile(path), StoredRows(StoreFile(path), 9 * ROW), rows)


def fetch(cached: StoredRows, tokens) -> np.ndarray:
    rows = np.zeros((len(tokens), ROW), np.uint8)
    cached.fetch(np.array(tokens), rows)
    return rows


@pytest.mark.parametrize("at_once", [1024, 2])
def test_the_cache_begins_with_the_most_frequent_rows_and_keeps_what_was_used_last(
    store, at_once, monkeypatch
):
    monkeypatch.setattr(reader, "_ROWS_PER_READ", at_once)
    path, rows = store
    cached = StoredRows(StoreFile(path), 5 * ROW + ROW // 2)
    found = []
    for tokens in (
        [20, 21],
        [10],
        [24],
        [10, 20, 21, 22],
        range(50),
        [10, 20, 21, 22],
        range(5),
        range(30, 50),
        range(30, 35),
    ):
        before = cached.counters.hits, cached.counters.misses
        assert np.array_equal(fetch(cached, tokens), rows[list(tokens)])
        found.append((cached.counters.hits - before[0], cached.counters.misses - before[1]))
    # 10 takes the place of 24, the least frequent of those that were not used; and 24 that of 23.
    # Of a batch that is too large its own rows stay, and then the first.
    assert found == [(2, 0), (0, 1), (0, 1), (4, 0), (5, 45), (4, 0), (0, 5), (0, 20), (5, 0)]
    assert cached.counters.bytes == 72 * ROW


def test_an_interrupt_leaves_no_token_with_the_row_of_another(store):
    """Raised at any line of `_keep`, as Ctrl-C may be."""
    path, rows = store
    cached, random = StoredRows(StoreFile(path), 6 * ROW), np.random.default_rng(0)
    interrupted = 0

    def interrupt(frame, event, _):
        nonlocal left
        left -= frame.f_code.co_name == "_keep"
        if left < 0:
            raise KeyboardInterrupt
        return interrupt

    for _ in range(100):
        tokens = np.unique(random.integers(50, size=4))
        left = int(random.integers(15))
        sys.settrace(interrupt)
        try:
            fetch(cached, tokens)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        assert np.array_equal(fetch(cached, range(50)), rows)
    assert interrupted > 30


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_child_does_not_wait_for_a_thread_of_its_parent(store, monkeypatch):
    path, rows = store
    cached = StoredRows(StoreFile(path), 9 * ROW)
    read_rows, parent, begun = cached.file.read, os.getpid(), threading.Event()

    def slowly(tokens):
        begun.set()
        time.sleep(1 if os.getpid() == parent else 0)
        return read_rows(tokens)

    monkeypatch.setattr(cached.file, "read", slowly)
    reading = threading.Thread(target=fetch, args=(cached, [5]))
    reading.start()
    begun.wait(600)
    child = multiprocessing.get_context("fork").Process(target=_reads_all, args=(cached.file, cached, rows))
    child.start()
    child.join(600)
    child.kill()
    reading.join()
    assert child.exitcode == 0


def test_a_batch_that_is_larger_than_the_cache_takes_no_place_of_its_own_rows(store):
    path, rows = store
    cached = StoredRows(StoreFile(path), 10 * ROW)
    fetch(cached, range(40, 48))
    assert np.array_equal(fetch(cached, range(50)), rows)
    before = cached.counters.hits
    fetch(cached, range(40, 48))
    assert cached.counters.hits == before + 8


def test_no_section_is_read_before_the_header_is_compared(tmp_path):
    """A header may call for terabytes that a sparse file seems to have."""
    wide = replace(HEADER, blocks=1, hidden=2**20, bits=16, ranks=(2**20,), checksums={"basis": 0})
    with (tmp_path / "rows.tide").open("wb") as file:
        file.write(wide.to_bytes())
        file.truncate(wide.file_bytes)
    with pytest.raises(StoreError, match="belongs to another model: its blocks is 1, and the model's is 3"):
        StoreFile(tmp_path / "rows.tide").check_model(blocks=3)


def test_without_counts_the_cache_begins_empty(tmp_path):
    rows = written(tmp_path / "rows.tide")
    cached = StoredRows(StoreFile(tmp_path / "rows.tide"), 3 * ROW)
    for tokens in ([0, 1, 2], [0, 1], [3], [0, 1, 3], [2]):
        assert np.array_equal(fetch(cached, tokens), rows[list(tokens)])
    assert (cached.counters.hits, cached.counters.misses) == (5, 5)


@pytest.mark.parametrize("cache", [0, 1, ROW, 10**9])
def test_any_budget_gives_the_same_rows(store, cache):
    path, rows = store
    cached = StoredRows(StoreFile(path), cache)
    for tokens in ([3], [0, 49], range(50), [3, 4, 5]):
        assert np.array_equal(fetch(cached, tokens), rows[list(tokens)])


def test_a_row_has_a_place_in_the_cache_until_the_next(store):
    path, rows_VR = store
    rows = StoredRows(StoreFile(path), cache_bytes=2 * rows_VR.shape[1])
    rows.move_to(np.zeros_like(rows.cached_CR))
    for token in (3, 0, 3, 5, 3, 4):  # 5 takes the place of 0, which was not used for longer
        assert np.array_equal(rows.cached_CR[rows.place_of(token)], rows_VR[token])
    assert (rows.counters.hits, rows.counters.misses) == (2, 4)
