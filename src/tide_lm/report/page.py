"""The report: one HTML page that needs nothing else."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tide_lm import __version__
from tide_lm.report import overview, paper
from tide_lm.report.catalogue import FIGURES
from tide_lm.report.drawing import inline_svg
from tide_lm.report.figure import Figure, Runs
from tide_lm.report.results import Run, open_runs
from tide_lm.report.wording import NOT_MEASURED, difference
from tide_lm.runs import write_atomically


def write_report(runs: list[Path], out: Path) -> Path:
    """Writes the page of these runs, the first of which the others are compared with."""
    if out.is_dir():
        raise ValueError(f"{out} is a folder: name the file to write, as in {out / 'index.html'}")
    out.parent.mkdir(parents=True, exist_ok=True)
    page = render(open_runs(runs))
    write_atomically(out, page)
    return out


def render(runs: Sequence[Run]) -> str:
    sections, missing = [], []
    for figure in FIGURES.values():
        usable = [run for run in runs if figure.missing(run) is None]
        if usable and not figure.too_few(usable):
            with figure.naming(usable):
                sections.append(_section(figure, usable))
            others = [run for run in runs if run not in usable and not (figure.of_memory and run.blocks == 0)]
            usable_reasons = [figure.missing(run) for run in others]
            missing += [(figure, reason) for reason in usable_reasons if reason]
        else:
            missing.append((figure, _reason(figure, runs)))
    environment = Environment(
        loader=PackageLoader("tide_lm", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["difference"] = difference
    return environment.get_template("page.html.jinja").render(
        version=__version__,
        runs=runs,
        facts=overview.facts(runs),
        headlines=overview.headlines(runs),
        losses=overview.losses(runs),
        sections=sections,
        missing=missing,
        elsewhere=paper.ELSEWHERE,
        origins={run.name: overview.origins(run) for run in runs},
        not_measured=NOT_MEASURED,
    )


def _section(figure: Figure, runs: Runs) -> dict[str, Any]:
    """What the template shows of a figure. The drawings are markup made here; all else is escaped there."""
    panels = figure.panels(runs) if figure.drawn_on_page else []
    return {
        "figure": figure,
        "runs": runs,
        "panels": [
            Markup(inline_svg(panel, f"{figure.name}-{number}")) for number, panel in enumerate(panels)
        ],
        "tables": figure.tables(runs),
        "comparisons": figure.compare(runs),
    }


def _reason(figure: Figure, runs: Sequence[Run]) -> str:
    """Why a figure is not on the page: of a run with memory, if there is one."""
    reasons = [figure.missing(run) for run in sorted(runs, key=lambda run: -(run.blocks or 0))]
    found = next((reason for reason in reasons if reason), None)
    return found or figure.too_few(runs) or NOT_MEASURED
