"""The report: one HTML page that needs nothing else."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tide_lm import __version__
from tide_lm.report import overview, paper
from tide_lm.report.answers import ANSWERS
from tide_lm.report.catalogue import FIGURES, QUESTIONS
from tide_lm.report.drawing import inline_chart, inline_svg, look
from tide_lm.report.figure import Figure, Runs
from tide_lm.report.formatting import NOT_MEASURED, difference
from tide_lm.report.meaning import sentence
from tide_lm.report.results import Run, open_runs
from tide_lm.run.files import check_writable, make_folder, write_atomically


def write_report(
    runs: list[Path],
    out: Path,
    warn: Callable[[str], None] = lambda line: None,
    log: Callable[[str], None] = lambda line: None,
    reload: int = 0,
) -> Path:
    """Write the page of these runs; the others are compared with the first.

    What is damaged or stale is left out, and `warn` is called with the reason. With `reload`, the page loads
    itself again after so many seconds.
    """
    if out.is_dir():
        raise ValueError(f"{out} is a folder: name the file to write, as in {out / 'index.html'}")
    opened = open_runs(runs)
    check_writable(out.parent)
    page = render(opened, log, reload)
    make_folder(out.parent)
    write_atomically(out, page)
    for run in opened:
        for reason in run.left_out:
            warn(reason)
    return out


def render(runs: Sequence[Run], log: Callable[[str], None] = lambda line: None, reload: int = 0) -> str:
    """Return the page."""
    shown: dict[str, dict[str, Any]] = {}
    missing: list[tuple[Figure, str]] = []
    for figure in FIGURES.values():
        log(figure.title)
        reasons = {run: reason for run in runs if (reason := figure.missing(run))}
        usable = [run for run in runs if run not in reasons]
        if few := figure.too_few(usable):
            missing.append((figure, _reason(reasons) or few))
            continue
        shown[figure.name] = _drawn(figure, usable)
        others = (run for run in reasons if not (figure.of_memory and run.blocks == 0))
        missing += [(figure, reasons[run]) for run in others]
    told = {reason for _, reason in missing}
    environment = templates("report")
    environment.filters["difference"] = difference
    return environment.get_template("page.html.jinja").render(
        version=__version__,
        runs=runs,
        colours={run.name: look(run)["color"] for run in runs},
        questions=QUESTIONS,
        answers={name: answer(runs) for name, answer in ANSWERS.items()},
        facts=overview.facts(runs),
        progress=overview.progress(runs),
        headlines=overview.headlines(runs),
        losses=overview.losses(runs),
        words=overview.words(runs),
        training_cost=overview.training_cost(runs),
        figures=sorted(FIGURES.values(), key=_place),
        shown=shown,
        missing=missing,
        left_out=[reason for run in runs for reason in run.left_out if reason not in told],
        elsewhere=paper.ELSEWHERE,
        origins=overview.origins(runs),
        not_measured=NOT_MEASURED,
        reload=reload,
    )


def _place(figure: Figure) -> tuple[str, float]:
    """Return where a figure stands in the paper's order: its kind and its number."""
    kind, number = figure.place.split()[:2]
    return kind, float(number)


def templates(room: str, **options: Any) -> Environment:
    """Return the HTML templates of a room of the package; they escape what is put into them."""
    return Environment(
        loader=PackageLoader("tide_lm", room),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )


def drawings(figure: Figure, runs: Runs) -> list[Markup]:
    """Return the panels of a figure, each with ids of its own."""
    panels = enumerate(figure.panels(runs))
    return [Markup(inline_svg(panel, f"{figure.name}-{number}")) for number, panel in panels]


def _drawn(figure: Figure, runs: Runs) -> dict[str, Any]:
    """Return what the template shows of a figure; it escapes all but the drawings, which are markup."""
    return {
        "runs": runs,
        "meant": {run.name: sentence(figure.reads, run.results.get(figure.reads, {})) for run in runs},
        "panels": [
            (panel.title, inline_chart(panel, f"{figure.name}-{number}"))
            for number, panel in enumerate(figure.panels(runs))
        ],
        "tables": figure.tables(runs),
        "comparisons": figure.compare(runs),
    }


def _reason(lacking: dict[Run, str]) -> str | None:
    """Return why a figure is not on the page: the reason of a run with memory, if there is one."""
    return next((lacking[run] for run in sorted(lacking, key=lambda run: -(run.blocks or 0))), None)
