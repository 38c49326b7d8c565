"""A page that follows runs: it is written again when their results or logs change."""

import functools
import time
from collections.abc import Callable
from pathlib import Path

from tide_lm.report.page import write_report
from tide_lm.run.directory import RunDirectory

EVERY = 2  # seconds between looks at the runs
RELOAD = 5  # seconds after which the page loads itself again
REST = 9  # times as long as a page took to write: a training on this machine keeps most of its time


def watch(runs: list[Path], out: Path, warn: Callable[[str], None]) -> None:
    """Write the page at each change until an interrupt, and then once more: it no longer loads itself."""
    warn_once, seen, took = functools.cache(warn), None, 0.0
    try:
        while True:
            if (found := _state(runs)) != seen:
                started = time.monotonic()
                write_report(runs, out, warn_once, reload=RELOAD)
                seen, took = found, time.monotonic() - started
            time.sleep(max(EVERY, REST * took))
    except KeyboardInterrupt:
        if seen is None:
            raise  # there is no page yet
        write_report(runs, out, warn_once)


def _state(runs: list[Path]) -> dict[Path, tuple[int, int]]:
    """Return the times and sizes of all files that the page reads."""
    files: list[Path] = []
    for run in map(RunDirectory, runs):
        files += (run.config, run.metrics, *(run.path / "results").glob("*.json"))
    stats = {file: file.stat() for file in files if file.exists()}
    return {file: (stat.st_mtime_ns, stat.st_size) for file, stat in stats.items()}
