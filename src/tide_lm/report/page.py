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
from tide_lm.report.results import DamagedError, Run, open_runs
from tide_lm.report.wording import NOT_MEASURED, difference
from tide_lm.run.files import write_atomically

Damage = dict[str, list[Figure]]  # by what is wrong, the figures that it is left out of


def write_report(runs: list[Path], out: Path, warn: Callable[[str], None] = lambda line: None) -> Path:
    """Writes the page of these runs, the first of which the others are compared with.

    What is damaged is left out, and `warn` is told.
    """
    if out.is_dir():
        raise ValueError(f"{out} is a folder: name the file to write, as in {out / 'index.html'}")
    opened = open_runs(runs)
    damage: Damage = {str(error): [] for run in opened for error in run.damaged.values()}
    page = render(opened, damage)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    for reason in damage:
        warn(reason)
    return out


def render(runs: Sequence[Run], damage: Damage) -> str:
    """The page; what is found damaged on the way is added."""
    sections, missing = [], []
    for figure in FIGURES.values():
        reasons: dict[Run, str | None] = {}
        for run in runs:
            try:
                reasons[run] = figure.missing(run)
            except DamagedError as error:
                damage.setdefault(str(error), []).append(figure)
        usable = [run for run, reason in reasons.items() if reason is None]
        if usable and not figure.too_few(usable):
            if section := _section(figure, usable, damage):
                sections.append(section)
            missing += [
                (figure, reason)
                for run, reason in reasons.items()
                if reason and not (figure.of_memory and run.blocks == 0)
            ]
        elif len(reasons) == len(runs):
            missing.append((figure, _reason(figure, reasons)))
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
        damage=damage,
        elsewhere=paper.ELSEWHERE,
        origins={run.name: overview.origins(run) for run in runs},
        not_measured=NOT_MEASURED,
    )


def _section(figure: Figure, runs: Runs, damage: Damage) -> dict[str, Any] | None:
    """What the template shows of a figure: of all runs, or of those whose results are sound."""
    try:
        with figure.naming(runs):
            return _content(figure, runs)
    except DamagedError as error:
        alone = runs if len(runs) > figure.at_least == 1 else []
        sound = [run for run in alone if _section(figure, [run], damage)]
        if len(sound) == len(alone):  # no run by itself is at fault
            damage.setdefault(str(error), []).append(figure)
            return None
        return _section(figure, sound, damage) if sound else None


def _content(figure: Figure, runs: Runs) -> dict[str, Any]:
    """The drawings are markup made here; all else is escaped in the template."""
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


def _reason(figure: Figure, reasons: dict[Run, str | None]) -> str:
    """Why a figure is not on the page: of a run with memory, if there is one."""
    ordered = sorted(reasons, key=lambda run: -(run.blocks or 0))
    found = next((reason for run in ordered if (reason := reasons[run])), None)
    return found or figure.too_few(ordered) or NOT_MEASURED
