"""The table on smaller tables, from the runs with all diagnostics."""

from studies.figures import opened
from studies.markdown import table
from studies.results import Study
from tide_lm.report.figures.compression import RANKS, changes, rare_change
from tide_lm.report.formatting import difference, percent
from tide_lm.report.results import Run


def _measured(study: Study) -> list[Run]:
    return [run for run in opened(study.diagnosed) if RANKS.missing(run) is None]


def forms(study: Study) -> str:
    """Return what each form of the tables costs."""
    if not (measured := _measured(study)):
        raise ValueError("no run of TIDE-8E has tables that were compressed: run the study first")
    rows = []
    for form in measured[0].result("compression")["forms"]:
        cells = [form["form"], f"{100 * form['relative_bytes']:.1f} %"]
        for result in (run.result("compression") for run in measured):
            same = next(other for other in result["forms"] if other["form"] == form["form"])
            cells += [percent(change, 2) for change in changes(result, same).values()]
            cells.append(difference(rare_change(result, same)))
        rows.append(cells)
    texts = measured[0].result("compression")["as_trained"]
    columns = [f"{what}, {run.name}" for run in measured for what in (*texts, "rare")]
    return table(["form", "bytes", *columns], rows)
