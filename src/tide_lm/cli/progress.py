"""What a person sees of a run: lines, and below them a bar where stderr is a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer


@contextmanager
def training_progress(steps: int) -> Iterator[tuple[Callable[[str], None], Callable[[int], None]]]:
    """Gives `tell(line)` and `advance(step)`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # its own, for the files of an export
    if not sys.stderr.isatty():
        yield lambda line: typer.echo(line, err=True), lambda step: None
        return
    console = Console(stderr=True)
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("train", total=steps)
        yield (
            lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
            lambda step: bar.update(task, completed=step),
        )
