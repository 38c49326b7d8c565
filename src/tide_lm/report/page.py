"""The report: one HTML page that needs nothing else."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tide_lm import __version__
from tide_lm.report import overview, paper
from tide_lm.report.catalogue import FIGURES
from tide_lm.report.drawing import inline_svg
from tide_lm.report.figure import Figure, Runs
from tide_lm.report.formatting import NOT_MEASURED, difference
from tide_lm.report.results import Run, open_runs
from tide_lm.run.files import check_writable, make_folder, write_atomically


def write_report(
    runs: list[Path],
    out: Path,
    warn: Callable[[str], None] = lambda line: None,
    log: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write the page of these runs; the others are compared with the first.

    What is damaged is left out, and `warn` is called with the reason.
    """
    if out.is_dir():
        raise ValueError(f"{out} is a folder: name the file to write, as in {out / 'index.html'}")
    opened = open_runs(runs)
    check_writable(out.parent)
    page = render(opened, log)
    make_folder(out.parent)
    write_atomically(out, page)
    for run in opened:
        for reason in run.damaged.values():
            warn(reason)
    return out


def render(runs: Sequence[Run], log: Callable[[str], None] = lambda line: None) -> str:
    """Return the page."""
    sections, missing = [], []
    for figure in FIGURES.values():
        log(figure.title)
        reasons = {run: reason for run in runs if (reason := figure.missing(run))}
        usable = [run for run in runs if run not in reasons]
        if figure.too_few(usable):
            missing.append((figure, _reason(reasons) or figure.too_few(usable)))
            continue
        sections.append(_section(figure, usable))
        others = (run for run in reasons if not (figure.of_memory and run.blocks == 0))
        missing += [(figure, reasons[run]) for run in others]
    told = {reason for _, reason in missing}
    damaged = [reason for run in runs for reason in run.damaged.values() if reason not in told]
    environment = templates("report")
    environment.filters["difference"] = difference
    return environment.get_template("page.html.jinja").render(
        version=__version__,
        runs=runs,
        facts=overview.facts(runs),
        headlines=overview.headlines(runs),
        losses=overview.losses(runs),
        sections=sections,
        missing=missing,
        damaged=damaged,
        elsewhere=paper.ELSEWHERE,
        origins={run.name: overview.origins(run) for run in runs},
        not_measured=NOT_MEASURED,
    )


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


def _section(figure: Figure, runs: Runs) -> dict[str, Any]:
    """Return what the template shows of a figure; it escapes all but the drawings, which are markup."""
    return {
        "figure": figure,
        "runs": runs,
        "panels": drawings(figure, runs),
        "tables": figure.tables(runs),
        "comparisons": figure.compare(runs),
    }


def _reason(lacking: dict[Run, str]) -> str | None:
    """Return why a figure is not on the page: the reason of a run with memory, if there is one."""
    return next((lacking[run] for run in sorted(lacking, key=lambda run: -(run.blocks or 0))), None)
