"""Print a result as the report has it, beside what the paper states; the results file holds all of it."""

from pathlib import Path
from typing import Any

import typer

from tide_lm.cli.output import print_table
from tide_lm.report.catalogue import FIGURES
from tide_lm.report.formatting import NOT_MEASURED
from tide_lm.report.meaning import sentence
from tide_lm.report.results import Run


def print_summary(what: str, model: str, result: dict[str, Any], folder: Path) -> None:
    """Print a result's tables, what the paper states of it and what it means; or why there is nothing."""
    run = Run(folder, model, 0, {what: {"subject": {"model": model}, **result}}, [], None)
    figures = [figure for figure in FIGURES.values() if figure.reads == what and figure.at_least == 1]
    reasons = [figure.missing(run) for figure in figures]
    for figure, reason in zip(figures, reasons, strict=True):
        if reason:
            continue
        for table in figure.tables([run]):
            print_table(table.caption, table.columns, table.rows, table.numbers)
        rows = [(row.what, row.paper, *row.ours) for row in figure.compare([run])]
        if measured := [row for row in rows if row[-1] != NOT_MEASURED]:
            print_table(
                f"{what} of {model}: {figure.title}", ["", "the paper", "this model"], measured, numbers=False
            )
    if None not in reasons:
        typer.echo("\n".join(filter(None, reasons)), err=True)
    elif said := sentence(what, result):
        typer.echo(f"{model}, {what}: {said}.\n")
