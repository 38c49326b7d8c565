"""The study's page: from runs that are made up, what is counted and how it is judged; and that of docs."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from kept_runs import by_frequency, keep

from studies import cache_report
from studies.claims import CLAIMS, verdicts
from studies.figures import opened
from studies.plan import NARROW, VALUES_BY_RECIPE
from studies.report import CONTROLS, page, summary, write_report
from studies.results import Spread, Study
from tide_lm.report.catalogue import FIGURES
from tide_lm.report.figures.compression import rare_change, worst_change
from tide_lm.report.wording import percent
from tide_lm.run_config import RunConfig

ROOT = Path(__file__).parents[2]


def test_tokens_to_a_loss_are_found_between_two_points(tmp_path):
    run = keep(tmp_path, "tide", "paper", 8, 4.0, curve=[(100, 8.0), (200, 6.0), (400, 4.0)])
    assert run.tokens_to(9.0) == 100
    assert run.tokens_to(7.0) == 150
    assert run.tokens_to(5.0) == 300
    assert run.tokens_to(3.0) is None


def test_seeds_have_a_spread_and_one_seed_has_none():
    assert str(Spread.of([1.0, 2.0, 3.0])) == "2.000 ± 1.000"
    assert str(Spread.of([1.0])) == "1.000"


@pytest.mark.parametrize(
    ("control", "said"),
    [
        (4.5, "is ahead of it: 0.300 nats"),
        (3.9, "**is behind it**: -0.300"),
        (4.21, "no more than"),
    ],
)
def test_the_page_begins_with_what_is_ahead_of_the_seeds_that_both_have(control, said, tmp_path):
    kept = tmp_path / "results" / "runs"
    for seed in (0, 1):
        keep(kept, "base", "paper", 0, 5.0 + 0.1 * seed, seed)
        keep(kept, "tide", "best", 8, 4.2 + 0.11 * seed, seed)
    keep(kept, "tide", "paper", 8, 4.6)
    keep(kept, "input-only", "paper", 8, control + 0.1)
    keep(kept, "input-only", "centre", 8, control)
    first = write_report(kept, tmp_path / "results", tmp_path / "docs").read_text().partition("##")[0]
    assert "0.400 nats less loss" in first
    assert "0.800 with the best recipe, the default: 2.00 times as much" in first
    assert "`input-only` (the same tables, normalised and added once" in first
    assert said in first


def test_rows_are_shown_by_the_root_of_their_mean_square(tmp_path):
    kept = tmp_path / "results" / "runs"
    keep(kept, "base", "paper", 0, 5.0)
    tables = [[16.0 * (decile + 1) for decile in range(10)]] * 8
    run = keep(kept, "tide", "paper", 8, 4.5, norms={"tables": tables})
    config = RunConfig.load(None, ["model.preset=tide-8e-350m"])
    (run.path / "config.json").write_text(json.dumps(config.to_dict()) + "\n")
    page = write_report(kept, tmp_path / "results", tmp_path / "docs").read_text()
    assert "the norm adds 1e-05, so that a row of 0.0032 counts for 0.71" in page
    assert "| paper | 0.5000 | 1.0000 | 1.5000 |" in page


def test_what_smaller_tables_cost_stands_beside_what_rare_tokens_lose(tmp_path):
    kept = tmp_path / "results" / "runs"
    keep(kept, "base", "paper", 0, 5.0)

    def texts(perplexity, rarest):
        return {"wiki": {"perplexity": perplexity, **by_frequency(4.5, [rarest, *[5.0] * 9])}}

    settings = {"bits": 16, "rank": 0.5, "blocks": "even", "weighted": 0.0}
    form = {"form": "16 bits, rank 0.5", **settings, "bytes": 9, "relative_bytes": 0.51}
    form["texts"] = texts(120.0, 9.25)
    found = {"as_trained": texts(100.0, 9.0), "forms": [form]}
    keep(kept, "tide", "paper", 8, 4.5, compression=found)
    page = write_report(kept, tmp_path / "results", tmp_path / "docs").read_text()
    assert "| form | bytes | wiki, TIDE-8E (paper) | rare, TIDE-8E (paper) |" in page
    assert "| 16 bits, rank 0.5 | 51.0 % | +20.00 % | +0.250 |" in page
    assert "</svg>" in (tmp_path / "docs" / "study" / "ranks.svg").read_text()
    whole, half = json.loads((tmp_path / "compression.json").read_text())["records"]
    assert whole["perplexity"] == {"wiki": 100.0}
    about = {"model": "TIDE-8E (paper)", "form": "16 bits, rank 0.5", "bytes": 9, "relative_bytes": 0.51}
    assert half == {**about, "perplexity": {"wiki": 120.0}}


def test_the_page_has_every_claim_and_the_summary_every_run_but_the_search(tmp_path):
    kept = tmp_path / "results" / "runs"
    for seed in (0, 1, 2):
        keep(kept, "base", "paper", 0, 5.0 + seed / 10, seed)
        keep(kept, "tide", "paper", 8, 4.6 + seed / 10, seed)
    keep(kept, "tide", "gain 0.3", 8, 4.7)
    page = write_report(kept, tmp_path / "results", tmp_path / "docs").read_text()
    assert all(claim.text in page for claim in CLAIMS)
    for name, alt in (("gains", "TIDE-8E (paper) 0.400"), ("loss-by-tokens", "base 5.100")):
        assert re.search(rf"!\[[^\]]*{re.escape(alt)}[^\]]*\]\(study/{name}.svg\)", page)
        assert "</svg>" in (tmp_path / "docs" / "study" / f"{name}.svg").read_text()
    assert (
        "| TIDE-8E | paper | 10 | 3 | 4.700 ± 0.100 | 10.000 ± 0.000 | 3.000 ± 0.000 | 0.400 ± 0.000 |"
        in page
    )
    assert "| tide | gain 0.3 | 4.700 |" in page
    summary = json.loads((tmp_path / "results" / "summary.json").read_text())["runs"]
    assert len(summary) == 6
    assert summary[0].keys() == {
        "model",
        "recipe",
        "size",
        "k",
        "seed",
        "tokens",
        "parameters",
        "val_loss",
        "loss_by_decile",
    }


def test_without_a_base_there_is_nothing_to_compare_with(tmp_path):
    keep(tmp_path / "runs", "tide", "paper", 8, 4.5)
    with pytest.raises(ValueError, match="holds no run of the base"):
        write_report(tmp_path / "runs", tmp_path, tmp_path / "docs")


def test_other_texts_and_the_tasks_that_are_above_chance(tmp_path):
    def more(perplexity, sciq):
        text = {
            "perplexity": perplexity,
            "bytes": 9,
            "window": 8,
            "stride": 4,
            **by_frequency(5.0, [5.0] * 10),
        }
        tasks = {
            name: {"score": score, "stderr": 0.01} for name, score in {"sciq": sciq, "boolq": 0.51}.items()
        }
        return {"perplexity": {"texts": {"news": text}}, "benchmarks": {"tasks": tasks}}

    keep(tmp_path, "base", "paper", 0, 5.0, **more(30.0, 0.26))
    keep(tmp_path, "base", "paper", 0, 5.1, seed=1, **more(31.0, 0.26))
    keep(tmp_path, "tide", "paper", 8, 4.5, **more(20.0, 0.28))
    found = page(Study(tmp_path))
    assert "| base | paper | 2 | 30.5 ± 0.7 |" in found
    assert "| TIDE-8E | paper | 1 | 20.0 |" in found
    assert "is ahead of it." not in found
    assert "| SciQ | 25 | 26.0 ± 1.0 | 28.0 ± 1.0 |" in found
    assert "| BoolQ |" not in found
    keep(tmp_path, "tide", "best", 8, 4.4, **more(40.0, 0.28))
    assert "TIDE-8E (best) has the lowest loss; on news `TIDE-8E (paper)` is ahead of it." in page(
        Study(tmp_path)
    )


@pytest.fixture(scope="module")
def kept():
    return Study(ROOT / "results" / "study" / "runs")


@pytest.fixture(scope="module")
def cache():
    return cache_report.read(ROOT / "results" / "study")


def test_the_page_in_docs_is_that_of_the_runs_that_are_kept(kept, cache):
    assert (ROOT / "docs" / "STUDY.md").read_text(encoding="utf-8") == page(kept, cache)
    assert (ROOT / "results" / "study" / "summary.json").read_text(encoding="utf-8") == summary(kept)


def test_the_page_in_docs_has_every_figure_of_the_paper(kept, cache):
    shown = set(re.findall(r"\]\(study/(.+?)\.svg\)", page(kept, cache)))
    assert shown >= FIGURES.keys()
    assert shown == {path.stem for path in (ROOT / "docs" / "study").iterdir()}


def test_the_readme_says_what_the_study_found(kept):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    paper, best = (Spread.of(list(kept.gains("tide", recipe, k=8).values())) for recipe in ("paper", "best"))

    def most(models) -> Spread:
        kinds = [kind for kind in kept.kinds(8) if kind[0] in models]
        found = [Spread.of(list(kept.gains(*kind, k=8).values())) for kind in kinds]
        return max(found, key=lambda gains: gains.mean)

    assert f"by {paper} nats as the paper trains them, and by {best} with" in readme
    assert f"{best.mean / paper.mean:.2f} times as much. Rows" in readme
    assert f"other uses give at most {most(CONTROLS)} (one seed), by" in readme
    larger, narrow, gated = (
        Spread.of(list(kept.gains(*kind, k=8).values()))
        for kind in (("tide", "values x5"), (NARROW, "values x5"), ("tide", "values x5, gated"))
    )
    assert f"(`model.memory_value_scale=5`) bring {larger}." in readme
    assert f"; {narrow} if the FFN is narrower" in readme
    assert f"scale and FFN gains {gated}, as much." in readme
    assert f"published, tuned here, give at most {most(CONTROLS.keys() - VALUES_BY_RECIPE)} (" in readme


def test_the_readme_has_the_papers_claims_with_the_verdicts_of_the_study(kept):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = verdicts(kept)
    shown = [line for line in readme.splitlines() if line.startswith("| ") and line.endswith("** |")]
    rows = [f"| {v.claim} | {v.paper} | {v.with_paper} | {v.with_best} | **{v.verdict}** |" for v in found]
    assert len(shown) >= 8
    assert set(shown) <= set(rows)
    count = Counter(verdict.verdict for verdict in found)
    told = f"{count['confirmed']} are confirmed, {count['not confirmed']} are not, and "
    assert f"Of {len(found)} claims, {told}{count['cannot be told']} cannot be told" in readme


def test_the_log_has_the_differences_of_the_runs_that_are_kept(kept):
    log = (ROOT / "docs" / "LOG.md").read_text(encoding="utf-8")
    entry = log.partition("which recipe is best for the tables?")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in entry.splitlines() if line.startswith("| ")]
    shown = {number for row in rows for number in re.findall(r"[+-]\d\.\d{3}", row[4])}
    first = [run.record for run in kept.whole if (run.record["size"], run.record["k"]) == ("small", 8)]
    losses = {(r["model"], r["recipe"]): r["val_loss"] for r in first if r["seed"] == 0}
    centre = losses.pop(("tide", "centre"))
    assert shown == {f"{loss - centre:+.3f}" for loss in losses.values()}


def test_the_readme_says_what_smaller_tables_cost(kept):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    run = next(run for run in opened(kept.looked) if run.name == "TIDE-8E (best)")
    result = run.result("compression")
    forms = {form["form"]: form for form in result["forms"]}
    told = {
        "8 bits": "in 8 bits",
        "4 bits": "in 4",
        "3 bits": "in 3",
        "4 bits, rank 0.5, joint, weighted 0.5": "in 4 bits with half the rank of all blocks together",
    }
    for name, words in told.items():
        most, size = percent(worst_change(result, forms[name]), 2), forms[name]["relative_bytes"]
        assert f"{most} {words}, with {size:.0%}".replace("%", " %").replace("  ", " ") in readme
    assert f"at most {max(rare_change(result, forms[name]) for name in told):.3f} nats by any" in readme
