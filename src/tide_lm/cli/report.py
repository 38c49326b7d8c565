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
    if models := _models(runs):
        first, *others = models
        print_next(
            shlex.join(["tide-lm", "explore", *([others[0], "--compare", first] if others else [first])])
        )
    else:
        print_next(shlex.join(["tide-lm", "train", "--resume", "--run", str(runs[0])]))


def _models(runs: list[Path]) -> list[str]:
    """Return what `explore` can open: runs that have got so far, and models from elsewhere."""
    from tide_lm.report.results import open_runs

    found = []
    for run in open_runs(runs):
        folder = RunDirectory(run.path)
        if folder.export.is_dir() or any(folder.checkpoints.glob("*")):
            found.append(str(run.path))
        elif run.config is None and run.subject:
            found.append(run.subject)
    return found
