"""`tide-lm report`: one HTML page of all results of some runs."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tide_lm.cli.output import print_next
from tide_lm.cli.progress import working
from tide_lm.run.directory import RunDirectory


def command(
    runs: Annotated[list[Path], typer.Argument(help="Runs; the first is the one to compare with.")],
    out: Annotated[
        Path | None,
        typer.Option(show_default="RUN/report/index.html", help="The file to write."),
    ] = None,
    cards: Annotated[
        bool, typer.Option("--cards", help="Also put all results into the README of each run's export.")
    ] = False,
    watching: Annotated[
        bool, typer.Option("--watch", help="Write the page again at each change of a run, until Ctrl-C.")
    ] = False,
) -> None:
    """Write one HTML page of all results of runs, beside what the paper states. Nothing is measured.

    Example: tide-lm report runs/base runs/mine
    """
    from tide_lm.report.model_cards import write_cards
    from tide_lm.report.page import write_report
    from tide_lm.report.watch import watch

    def warn(line: str) -> None:
        typer.echo(f"warning: {line}", err=True)

    page = out or runs[0] / "report" / "index.html"
    for path in write_cards(runs) if cards else ():
        typer.echo(path)
    if watching:
        typer.echo(f"Following the runs until Ctrl-C; open {page.absolute().as_uri()}", err=True)
        watch(runs, page, warn)
        typer.echo(page)
        return
    with working("Drawing the page") as log:
        write_report(runs, page, warn, log)
    typer.echo(page)
    typer.echo("The page shows all that was measured; open it in a browser.", err=True)
    print_next(shlex.join(["tide-lm", "explore", *_models(runs)]))


def _models(runs: list[Path]) -> list[str]:
    """Return the words that name to `explore` the model to look into, and the one to compare it with."""
    first, *others = [str(run) for run in runs if RunDirectory(run).export.is_dir()] or ["MODEL"]
    return [others[0], "--compare", first] if others else [first]
