"""`tide-lm report`: one HTML page of all results of some runs."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    runs: Annotated[list[Path], typer.Argument(help="Run directories; the first is the reference.")],
    out: Annotated[
        Path | None,
        typer.Option(show_default="RUN/report/index.html", help="The file to write."),
    ] = None,
    cards: Annotated[
        bool, typer.Option("--cards", help="Also put all results into the README of each run's export.")
    ] = False,
) -> None:
    """Write a self-contained HTML page that compares runs, beside the paper; it only reads results.

    Example: tide-lm report runs/base runs/mine
    """
    from tide_lm.report.model_cards import write_cards
    from tide_lm.report.page import write_report

    def warn(line: str) -> None:
        typer.echo(f"warning: {line}", err=True)

    for path in write_cards(runs) if cards else ():
        typer.echo(path)
    typer.echo(write_report(runs, out or runs[0] / "report" / "index.html", warn))
