"""The table on smaller tables, and a record of each form, from the runs that were looked into."""

import json

from studies.figures import opened
from studies.markdown import table
from studies.results import Study
from tide_lm.report.figures.compression import RANKS, changes, rare_change
from tide_lm.report.results import Run
from tide_lm.report.wording import difference, percent


def _measured(study: Study) -> list[Run]:
    return [run for run in opened(study.looked) if RANKS.missing(run) is None]


def records(study: Study) -> str | None:
    """One for each form that was measured, and one for the tables as trained."""
    found = []
    for run in _measured(study):
        result = run.result("compression")
        whole = {"form": "as trained", "bytes": None, "relative_bytes": None, "texts": result["as_trained"]}
        for form in (whole, *result["forms"]):
            texts = {name: text["perplexity"] for name, text in form["texts"].items()}
            about = {key: form[key] for key in ("form", "bytes", "relative_bytes")}
            found.append({"model": run.name, **about, "perplexity": texts})
    return json.dumps({"records": found}, indent=2) + "\n" if found else None


def forms(study: Study) -> str:
    """What each form of the tables costs."""
    if not (measured := _measured(study)):
        raise ValueError("no run of TIDE-8E has results/compression.json: run the study first")
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
