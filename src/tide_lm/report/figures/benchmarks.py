"""Zero-shot benchmarks in the order of the paper's columns."""

from functools import partial
from typing import Any

from tide_lm.report import paper
from tide_lm.report.drawing import legend, look, numbers
from tide_lm.report.figure import Axes, Figure, Panel, Runs, Table
from tide_lm.report.formatting import number, percents
from tide_lm.report.results import Run


def _task(run: Run, name: str) -> dict[str, Any]:
    return run.result("benchmarks")["tasks"].get(name, {})


def scores(run: Run, key: str = "score") -> list[float | None]:
    """Return scores in per cent, in the order of the paper's tasks."""
    return percents([_task(run, name).get(key) for name in paper.TASKS])


def _average(run: Run) -> str:
    return _one(*percents([run.result("benchmarks")["average"]]))


def _draw(axes: Axes, runs: Runs) -> None:
    places = range(len(paper.TASKS))
    for position, run in enumerate(runs):
        shift = 0.5 * (position - (len(runs) - 1) / 2) / len(runs)
        axes.errorbar(
            numbers(scores(run)),
            [place + shift for place in places],
            xerr=numbers(scores(run, "stderr")),
            **(look(run) | {"linestyle": "none"}),
            elinewidth=1,
        )
    axes.set_yticks(places, list(paper.TASKS.values()))
    axes.invert_yaxis()
    axes.set_xlabel("score in percent, and its standard error")
    legend(axes)


def _panels(runs: Runs) -> list[Panel]:
    title = "Zero-shot benchmarks"
    averages = (f"{run.name} {_average(run)}" for run in runs)
    alt = "; ".join((title, "average score in percent", *averages))
    return [Panel(title, partial(_draw, runs=runs), height=4.2, alt=alt)]


def _tables(runs: Runs) -> list[Table]:
    columns = ["model", "LAMBADA perplexity", *paper.TASKS.values(), "Average"]
    ours = []
    for run in runs:
        perplexity = number(run.result("benchmarks")["lambada_perplexity"], ",.3f")
        ours.append((run.name, perplexity, *_cells(run), _average(run)))
    theirs = [
        (f"{row.model} (paper)", f"{row.perplexity:.2f}", *map(_one, row.scores), _one(row.average))
        for row in paper.TABLE_2
    ]
    return [Table(_caption(runs), columns, [*ours, *theirs])]


def _cells(run: Run) -> list[str]:
    """Return scores, with their standard errors and samples if only some of each task were taken."""
    cells = [_one(score) for score in scores(run)]
    if not run.result("benchmarks")["limit"]:
        return cells
    errors = [_one(error) for error in scores(run, "stderr")]
    samples = [_task(run, name).get("samples") for name in paper.TASKS]
    return [
        cell if size is None else f"{cell} ± {error} ({size:,})"
        for cell, error, size in zip(cells, errors, samples, strict=True)
    ]


def _caption(runs: Runs) -> str:
    caption = "Scores in percent; below ours, the paper's Table 2 for reference."
    if limited := [run.name for run in runs if run.result("benchmarks")["limit"]]:
        caption += (
            f" {', '.join(limited)}: only the first samples of each task; ± is the standard error, and the "
            "number of samples is in brackets."
        )
    if other := [run.name for run in runs if _task(run, "sciq").get("split") == "validation"]:
        caption += f" {', '.join(other)}: SciQ is its validation split."
    return caption


def _one(value: float | None) -> str:
    return number(value, ".1f")


BENCHMARKS = Figure(
    name="benchmarks",
    place="Table 2",
    title="Zero-shot benchmarks",
    says="Normalised accuracy, but plain accuracy for BoolQ and LAMBADA. A model of a few million parameters "
    "is near chance on most of these tasks.",
    reads="benchmarks",
    panels=_panels,
    tables=_tables,
)
