"""Progress of long work on stderr: it changes in place on a terminal, and is lines elsewhere."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

SECONDS_BEFORE_A_LINE = 3  # what is done sooner, or refused, needs none
SECONDS_BETWEEN_LINES = 30


@contextmanager
def working(title: str) -> Iterator[Callable[[str], None]]:
    """Give `log(line)`, which shows a line behind the title.

    Elsewhere than on a terminal the title is a line once the work takes long, and the others now and then.
    """
    from rich.console import Console
    from rich.markup import escape

    if sys.stderr.isatty():
        with Console(stderr=True).status(escape(f"{title} ...")) as status:
            yield lambda what: status.update(escape(f"{title}: {what}"))
        return
    begun = threading.Timer(SECONDS_BEFORE_A_LINE, typer.echo, (f"{title} ...",), {"err": True})
    begun.daemon = True
    begun.start()
    last = time.monotonic()

    def log(what: str) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            typer.echo(f"{title}: {what}", err=True)

    try:
        yield log
    finally:
        begun.cancel()
        begun.join()


@contextmanager
def tidy_end() -> Iterator[None]:
    """Remove what is half-written at a request to end (SIGTERM), as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def writing_progress() -> Iterator[Callable[[int], Callable[[int], None]]]:
    """Give `begin(total)`, which gives `advance(count)`, both of bytes."""
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn

    if not sys.stderr.isatty():
        with working("Writing") as log:
            yield lambda total: _advance_in_lines(log, total)
        return
    with _bar("Writing", BarColumn(), DownloadColumn(), TimeRemainingColumn()) as bar:

        def begin(total: int) -> Callable[[int], None]:
            task = bar.add_task("", total=total)
            return lambda count: bar.advance(task, count)

        yield begin


def _advance_in_lines(log: Callable[[str], None], total: int) -> Callable[[int], None]:
    written = 0

    def advance(count: int) -> None:
        nonlocal written
        written += count
        log(f"{written / 1e9:,.1f} of {total / 1e9:,.1f} GB")

    return advance


@contextmanager
def training_progress(
    steps: int, shown: bool = True
) -> Iterator[tuple[Callable[[str], None], Callable[[int], None]]]:
    """Give `log(line)` and `advance(step)`, which do nothing if not `shown`."""
    from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # its own, for the files of an export
    if not shown or not sys.stderr.isatty():
        yield lambda line: typer.echo(line, err=True) if shown else None, lambda step: None
        return
    with _bar(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=steps)
        yield (
            lambda line: bar.console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True),
            lambda step: bar.update(task, completed=step),
        )


def _bar(*columns: Any) -> "Progress":
    """Return a bar for a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    return Progress(*columns, console=Console(stderr=True), transient=True)
