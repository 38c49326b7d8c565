"""The speed of `prepare` beside a bare `encode_batch` loop over the same text, and its peak memory.

The text is the built-in one, repeated to the sizes asked for.
"""

import argparse
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tide_lm.data import builtin, tokenizers
from tide_lm.data.prepare import Settings, prepare
from tide_lm.run.provenance import write_record

BATCH_DOCUMENTS = 1000


def write_corpus(path: Path, megabytes: int) -> None:
    lines = [json.dumps({"text": text}) + "\n" for _, text in builtin.documents()]
    left = megabytes * 1_000_000
    with path.open("w", encoding="ascii") as file:
        for line in itertools.cycle(lines):
            left -= file.write(line)
            if left <= 0:
                break


def bare_loop(corpus: Path, tokenizer: Path) -> float:
    """Return the seconds to encode the corpus and keep nothing of it; reading it is not counted."""
    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in corpus.open("rb")]
    start = time.perf_counter()
    for i in range(0, len(texts), BATCH_DOCUMENTS):
        backend.encode_batch(texts[i : i + BATCH_DOCUMENTS], add_special_tokens=False)
    return time.perf_counter() - start


def timed_prepare(corpus: Path, tokenizer: Path) -> float:
    """Return the seconds of the whole call, from loading the tokenizer to writing the last shard."""
    with tempfile.TemporaryDirectory(dir=corpus.parent) as folder:
        start = time.perf_counter()
        prepare(Settings(str(corpus), tokenizer=str(tokenizer)), Path(folder, "out"))
        return time.perf_counter() - start


def peak_memory(corpus: Path, tokenizer: Path) -> float:
    """Return the peak resident megabytes of a process that does nothing else."""
    command = [sys.executable, __file__, "--peak-of", str(corpus), str(tokenizer)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(folder: Path, sizes: list[int], rounds: int) -> dict[str, Any]:
    corpora = {size: folder / f"{size}.jsonl" for size in sizes}
    for size, path in corpora.items():
        write_corpus(path, size)
    tokenizer = folder / "tokenizer"
    tokenizers.train((text for _, text in builtin.documents()), 4096).save_pretrained(tokenizer)
    corpus = corpora[sizes[0]]
    ways = {
        "encode_batch": lambda: bare_loop(corpus, tokenizer),
        "prepare": lambda: timed_prepare(corpus, tokenizer),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            seconds[name].append(way())
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    return {
        "corpus_bytes": {str(size): path.stat().st_size for size, path in corpora.items()},
        "rounds": rounds,
        "seconds": {name: [round(second, 2) for second in taken] for name, taken in seconds.items()},
        "speed_over_encode_batch": {
            name: round(medians["encode_batch"] / median, 3) for name, median in medians.items()
        },
        "peak_megabytes": {str(size): round(peak_memory(path, tokenizer)) for size, path in corpora.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and memory of `tide-lm prepare`.")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[50, 500], help="the first is also timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--peak-of", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak_of:
        timed_prepare(Path(args.peak_of[0]), Path(args.peak_of[1]))
        # Not getrusage, whose peak includes that of the process that started this one.
        print(int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1e3)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), args.megabytes, args.rounds)
    print(json.dumps(result, indent=2))
    if args.json:
        write_record(args.json, result)


if __name__ == "__main__":
    main()
