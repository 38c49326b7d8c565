"""`tide-lm figure`: one figure of the paper from the results of runs."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tide_lm.cli.options import one_of
from tide_lm.cli.output import print_next
from tide_lm.cli.progress import working
from tide_lm.report.catalogue import FIGURES
from tide_lm.run.files import check_writable


def command(
    name: Annotated[str, typer.Argument(parser=one_of(FIGURES), help=f"Which figure: {', '.join(FIGURES)}.")],
    runs: Annotated[list[Path], typer.Argument(help="Runs; the first is the one to compare with.")],
    out: Annotated[
        Path | None, typer.Option("--out", show_default="RUN/report", help="The folder to write into.")
    ] = None,
) -> None:
    """Draw one of the paper's figures from the results of runs, as NAME.svg and NAME.png.

    Example: tide-lm figure norms runs/mine runs/base
    """
    from tide_lm.report.results import open_runs

    opened = open_runs(runs)
    FIGURES[name].demand(opened)
    folder = out or runs[0] / "report"
    check_writable(folder)
    with working(f"Drawing {name}"):
        from tide_lm.report.drawing import write

        written = write(FIGURES[name], opened, folder)
    for path in written:
        typer.echo(path)
    print_next(shlex.join(["tide-lm", "report", *map(str, runs)]))
