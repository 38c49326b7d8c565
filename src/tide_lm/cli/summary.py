"""Print a result as the report has it, beside what the paper states; the results file holds all of it."""

from pathlib import Path
from typing import Any

from tide_lm.cli.output import print_table
from tide_lm.report.catalogue import FIGURES
from tide_lm.report.results import Run


def print_summary(what: str, title: str, result: dict[str, Any]) -> None:
    runs = [Run(Path(), title, 0, {what: result}, [], None)]
    for figure in FIGURES.values():
        if figure.reads != what or figure.missing(runs[0]) or figure.too_few(runs):
            continue
        if rows := [(row.what, row.paper, *row.ours) for row in figure.compare(runs)]:
            print_table(f"{title}: {figure.title}", ["", "the paper", "this model"], rows, numbers=False)
        for table in figure.tables(runs):
            print_table(table.caption, table.columns, table.rows, table.numbers)
