"""Zero-shot benchmarks in the order of the paper's columns."""

from typing import TYPE_CHECKING, Any

from tide_lm.report import paper
from tide_lm.report.drawing import legend, look, numbers
from tide_lm.report.figure import Figure, Panel, Runs, Table
from tide_lm.report.formatting import NOT_MEASURED
from tide_lm.report.results import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _task(run: Run, name: str) -> dict[str, Any]:
    return run.result("benchmarks")["tasks"].get(name, {})


def _percent(value: float | None) -> float | None:
    return None if value is None else value * 100


def scores(run: Run, key: str = "score") -> list[float | None]:
    """Return scores in per cent, in the order of the paper's tasks."""
    return [_percent(_task(run, name).get(key)) for name in paper.TASKS]


def _average(run: Run) -> str:
    return _one(_percent(run.result("benchmarks").get("average")))


def _panels(runs: Runs) -> list[Panel]:
    def draw(axes: "Axes") -> None:
        places = range(len(paper.TASKS))
        for number, run in enumerate(runs):
            shift = 0.5 * (number - (len(runs) - 1) / 2) / len(runs)
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

    told = "; ".join(f"{run.name} average {_average(run)}" for run in runs)
    return [Panel("Zero-shot benchmarks", f"Points for eight tasks: {told}", draw, height=4.2)]


def _tables(runs: Runs) -> list[Table]:
    columns = ["model", "LAMBADA perplexity", *paper.TASKS.values(), "Average"]
    ours = [(run.name, _perplexity(run), *_cells(run), _average(run)) for run in runs]
    theirs = [
        (f"{row.model} (paper)", f"{row.perplexity:.2f}", *map(_one, row.scores), _one(row.average))
        for row in paper.TABLE_2
    ]
    return [Table(_caption(runs), columns, [*ours, *theirs])]


def _cells(run: Run) -> list[str]:
    """Scores; of a run on some samples of each task, with their standard errors and numbers."""
    cells = [_one(score) for score in scores(run)]
    if not run.result("benchmarks").get("limit"):
        return cells
    errors = [_one(error) for error in scores(run, "stderr")]
    samples = [_task(run, name).get("samples") for name in paper.TASKS]
    return [
        cell if size is None else f"{cell} ± {error} ({size:,})"
        for cell, error, size in zip(cells, errors, samples, strict=True)
    ]


def _caption(runs: Runs) -> str:
    caption = "Scores in percent; below ours, the paper's Table 2 for reference."
    if limited := [run.name for run in runs if run.result("benchmarks").get("limit")]:
        caption += (
            f" Of {', '.join(limited)} only the first samples of each task: ± is the standard error, and in "
            "brackets is the number of samples."
        )
    if other := [run.name for run in runs if _task(run, "sciq").get("split") == "validation"]:
        caption += f" SciQ of {', '.join(other)} is its validation split."
    return caption


def _perplexity(run: Run) -> str:
    value = run.result("benchmarks").get("lambada_perplexity")
    return NOT_MEASURED if value is None else f"{value:,.3f}"


def _one(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.1f}"


BENCHMARKS = Figure(
    name="benchmarks",
    place="Table 2",
    title="Zero-shot benchmarks",
    says="Normalised accuracy, but plain accuracy for BoolQ and LAMBADA. A model of a few million parameters "
    "is near chance on most of these tasks.",
    needs=("benchmarks",),
    panels=_panels,
    tables=_tables,
)
