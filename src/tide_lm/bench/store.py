"""Time a store: reads of many rows that are in no cache."""

import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tide_lm.bench import timing
from tide_lm.spec import presets
from tide_lm.spec.config import ModelConfig, table_shape
from tide_lm.store.format import BLOCK, Header, checksum, up_to, write_store
from tide_lm.store.reader import StoreFile

_ROWS_PER_WRITE = 4096
_FIO_SECONDS, _FIO_DEPTH = 3, 16
_READS = 5  # of the reader in a round
_SETTLING = 0.2  # seconds in which a system goes on dropping pages after it was asked to


def measure(
    model: str,
    bits: int,
    tokens: int,
    rounds: int,
    folder: Path,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Write a store as large as a model's, read rows from it, and remove it."""
    with TemporaryDirectory(dir=folder, prefix=".bench-store-") as place:
        log("writing it")
        header = random_store(Path(place) / "rows.tide", presets.get(model).model, bits)
        log("reading it")
        read = read_speed(Path(place) / "rows.tide", tokens, rounds)
    about = {"model": model, "bits": bits, "store_bytes": header.file_bytes, "padding": header.padding}
    return {**about, "read": read}


def random_store(
    path: Path, model: ModelConfig, bits: int, counts_V: np.ndarray | None = None, seed: int = 0
) -> Header:
    """Write a store as large as a model's, of random bytes; `counts_V` says how often tokens occur."""
    rows, blocks, hidden = table_shape(model)
    sections = {}
    if counts_V is not None:
        sections["counts"] = np.pad(counts_V, (0, model.memory_pair_rows)).astype("<u8")
    if bits < 16:
        sections |= {"levels": np.zeros(2**bits, "<f4"), "columns": np.ones(blocks * hidden, "<f4")}
    sums = {name: checksum(array) for name, array in sections.items()}
    header = Header(rows, blocks, hidden, bits, 32, (), "0" * 64, sums)
    random = np.random.default_rng(seed)

    def drawn() -> Iterator[np.ndarray]:
        for start in range(0, header.vocab_size, _ROWS_PER_WRITE):
            size = min(_ROWS_PER_WRITE, header.vocab_size - start), header.codec.row_bytes
            yield random.integers(256, size=size, dtype=np.uint8)

    write_store(path, header, sections, drawn())
    return header


def read_speed(path: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """Time reads of the rows of so many tokens, by a loop over a memory map and by the reader, in turns.

    Before each read the page cache forgets the file. Where fio is installed, its reads of as many bytes, 16
    at once, say what the disk can give. They take seconds, and the reader milliseconds, so it reads several
    times in a round.
    """
    file = StoreFile(path)
    header = file.header
    random = np.random.default_rng(0)
    block = up_to(header.row_bytes, BLOCK)
    found: dict[str, list[float]] = {"mmap": [], "reader": [], "fio": []}
    ways = [("mmap", lambda ids: mapped_rows(path, header, ids)), *[("reader", file.read)] * _READS]
    file.read(np.arange(tokens))  # makes what it needs once
    for _ in range(rounds):
        for name, way in ways:
            ids = np.sort(random.choice(header.vocab_size, tokens, replace=False))
            forget(path)
            found[name].append(timing.seconds(lambda: way(ids)))  # noqa: B023
        if (rate := fio_reads(path, block)) is not None:
            found["fio"].append(tokens / rate)
    seconds = {name: statistics.median(times) for name, times in found.items() if times}
    ours = seconds["reader"]
    return {
        "tokens": tokens,
        "rounds": rounds,
        "direct": file.is_direct,
        "block": block,
        "seconds": seconds,
        "over_mmap": seconds["mmap"] / ours,
        "over_fio": seconds["fio"] / ours if "fio" in seconds else None,
        "megabytes_per_s": tokens * block / ours / 1e6,
    }


def mapped_rows(path: Path, header: Header, ids: np.ndarray) -> np.ndarray:
    mapped, size = np.memmap(path, np.uint8, "r"), header.codec.row_bytes
    return np.stack([mapped[at : at + size] for at in header.row_at(ids).tolist()])


def forget(path: Path) -> None:
    """Ask the system to drop a file from its cache, and wait until that is done."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    time.sleep(_SETTLING)


def fio_reads(path: Path, block: int) -> float | None:
    """Return how many reads per second fio does at random places; None without fio."""
    if shutil.which("fio") is None:
        return None
    command = ["fio", "--name=rows", f"--filename={path}", "--rw=randread", f"--bs={block}", "--direct=1"]
    command += ["--ioengine=libaio", f"--iodepth={_FIO_DEPTH}", "--norandommap", "--randrepeat=0"]
    command += ["--readonly", f"--runtime={_FIO_SECONDS}", "--time_based", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True)
    return json.loads(done.stdout)["jobs"][0]["read"]["iops"] if done.returncode == 0 else None
