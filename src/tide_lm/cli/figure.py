"""`tide-lm figure`: one figure of the paper from the results of runs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tide_lm.report.catalogue import FIGURES

Name = StrEnum("Name", {name.replace("-", "_"): name for name in FIGURES})  # type: ignore[misc]


def command(
    name: Annotated[Name, typer.Argument(help="Which figure.")],
    runs: Annotated[list[Path], typer.Argument(help="Run directories; the first is the reference.")],
    out: Annotated[
        Path | None, typer.Option("--out", show_default="RUN/report", help="The folder to write into.")
    ] = None,
) -> None:
    """Draw a figure of the paper as NAME.svg and NAME.png; it only reads results."""
    from tide_lm.report.drawing import write
    from tide_lm.report.results import open_runs

    for path in write(FIGURES[name.value], open_runs(runs), out or runs[0] / "report"):
        typer.echo(path)
