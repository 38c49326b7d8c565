"""The store's reader beside other ways to the same rows, timed on this machine's disk.

    OMP_NUM_THREADS=1 python benchmarks/store_reader.py --json results/cpu/store_reader.json

Each way reads the rows of 2,048 tokens, which the page cache is told to forget before. The ways take turns,
and after each round comes fio, which reads as many bytes at random places, 16 reads at once.
"""

import argparse
import json
import statistics
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tide_lm.bench.store import fio_reads, forget, mapped_rows, random_store
from tide_lm.run import files
from tide_lm.run.provenance import provenance
from tide_lm.spec import presets
from tide_lm.store import reader
from tide_lm.store.format import BLOCK, up_to

TOKENS = 2048
Way = Callable[[np.ndarray], np.ndarray]


def ways(path: Path) -> dict[str, Way]:
    """Return the reader as it was, and as it is."""
    threads, asynchronous = reader.StoreFile(path), reader.StoreFile(path)
    threads.is_async = False

    pool = ThreadPoolExecutor(4)

    def read(file: reader.StoreFile, crc32: Callable[..., int], parts: int = 1) -> Way:
        def way(ids: np.ndarray) -> np.ndarray:
            reader.crc32 = crc32
            if parts == 1:
                return file.read(ids)
            return np.concatenate(list(pool.map(file.read, np.array_split(ids, parts))))

        return way

    return {
        "memory map, row by row": lambda ids: mapped_rows(path, threads.header, ids),
        "16 threads": read(threads, zlib.crc32),
        "asynchronous": read(asynchronous, zlib.crc32),
        "asynchronous, four threads": read(asynchronous, zlib.crc32, 4),
        "asynchronous, four threads, a faster CRC": read(asynchronous, reader.crc32, 4),
        "asynchronous, a faster CRC (reader)": read(asynchronous, reader.crc32),
    }


def measure(path: Path, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each way, after a check that all agree."""
    found, random = ways(path), np.random.default_rng(0)
    header = reader.StoreFile(path).header
    ids = np.arange(TOKENS)
    expected = next(iter(found.values()))(ids)
    for way in found.values():
        np.testing.assert_array_equal(way(ids), expected)
    seconds: dict[str, list[float]] = {name: [] for name in [*found, "fio"]}
    for _ in range(rounds):
        for name, way in found.items():
            ids = np.sort(random.choice(header.vocab_size, TOKENS, replace=False))
            forget(path)
            start = time.perf_counter()
            way(ids)
            seconds[name].append(time.perf_counter() - start)
        if (rate := fio_reads(path, up_to(header.row_bytes, BLOCK))) is not None:
            seconds["fio"].append(TOKENS / rate)
    return {name: round(1e3 * statistics.median(taken), 2) for name, taken in seconds.items() if taken}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to time")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory(dir=options.folder, prefix=".store-reader-") as place:
        header = random_store(Path(place) / "rows.tide", presets.get("tide-8e-1b").model, bits=4)
        found = measure(Path(place) / "rows.tide", options.rounds)
    result = {
        "what": f"median milliseconds, rows of {TOKENS} tokens, {header.row_bytes} bytes each, cold",
        "rounds": options.rounds,
        "ways": found,
        "provenance": provenance(seed=0),
    }
    for name, taken in found.items():
        print(f"{taken:9.2f} ms  {name}")
    if options.json:
        files.write_atomically(options.json, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
