"""The study's page: from runs that are made up, what is counted and how it is judged; and that of docs."""

import json
import re
from pathlib import Path

import pytest

from studies.claims import CLAIMS, verdicts
from studies.report import CONTROLS, page, summary, write_report
from studies.results import Kept, Spread, Study
from tide_lm.report.catalogue import FIGURES
from tide_lm.run_config import RunConfig

TOKENS = 1000
ROOT = Path(__file__).parents[2]


def keep(folder, model, recipe, k, loss, seed=0, size="small", curve=None, rare=0.0, common=0.0, **results):
    """A run whose rare and common tokens gain so much over losses of 10 and 3."""
    path = folder / f"{size}-{model}-{k}-{recipe.replace(' ', '-')}-{seed}"
    (path / "results").mkdir(parents=True)
    record = {
        "model": model,
        "recipe": recipe,
        "size": size,
        "k": k,
        "seed": seed,
        "tokens": TOKENS,
        "parameters": 10,
        "val_loss": loss,
        "loss_by_decile": [10 - rare, *[5.0] * 8, 3 - common],
    }
    validation = {"step": 1, **by_frequency(loss, record["loss_by_decile"])}
    for name, value in {"study": record, "validation": validation, **results}.items():
        (path / "results" / f"{name}.json").write_text(json.dumps(value))
    points = curve or [(500, loss + 1), (TOKENS, loss)]
    lines = [
        json.dumps({"step": tokens, "tokens": tokens, "loss": value, "validation": {"loss": value}})
        for tokens, value in points
    ]
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return Kept(path)


def by_frequency(loss, deciles):
    losses = {"rare": deciles[0], "mid": 5.0, "common": deciles[-1], "unbinned": 7.12}
    found = {name: {"loss": value, "tokens": 19} for name, value in losses.items()}
    return {**found, "loss": loss, "tokens": 100, "loss_by_decile": deciles, "tokens_by_decile": [9] * 10}


def test_tokens_to_a_loss_are_found_between_two_points(tmp_path):
    run = keep(tmp_path, "tide", "paper", 8, 4.0, curve=[(100, 8.0), (200, 6.0), (400, 4.0)])
    assert run.tokens_to(9.0) == 100
    assert run.tokens_to(7.0) == 150
    assert run.tokens_to(5.0) == 300
    assert run.tokens_to(3.0) is None


def test_seeds_have_a_spread_and_one_seed_has_none():
    assert str(Spread.of([1.0, 2.0, 3.0])) == "2.000 ± 1.000"
    assert str(Spread.of([1.0])) == "1.000"


def found(study, text):
    (verdict,) = [verdict for verdict in verdicts(study) if text in verdict.claim]
    return verdict


@pytest.mark.parametrize(("at_500", "verdict"), [(4.9, "confirmed"), (6.0, "not confirmed")])
def test_half_the_tokens(at_500, verdict, tmp_path):
    keep(tmp_path, "base", "paper", 0, 5.0)
    keep(tmp_path, "tide", "paper", 8, 4.5, curve=[(500, at_500), (TOKENS, 4.5)])
    assert found(Study(tmp_path), "half of its tokens").verdict == verdict


def of_every_k(folder, last, seeds):
    for seed, base in enumerate(seeds):
        keep(folder, "base", "paper", 0, base, seed)
        keep(folder, "tide", "paper", 8, base - 0.4 - seed / 20, seed, rare=8 / 24, common=8 / 240)
    for k, loss in zip((2, 4, 16, 24), (4.8, 4.7, 4.5, last), strict=True):
        keep(folder, "tide", "paper", k, loss, rare=k / 24, common=k / 240)
    return Study(folder)


@pytest.mark.parametrize(
    ("last", "seeds", "verdict"),
    [
        (4.4, (5.0, 5.5), "confirmed"),
        (4.6, (5.0, 5.5), "not confirmed"),
        (4.48, (5.0, 5.5), "cannot be told"),  # the step is smaller than seeds differ
        (4.4, (5.0,), "cannot be told"),  # how much they differ is not known
    ],
)
def test_monotone_in_blocks(last, seeds, verdict, tmp_path):
    study = of_every_k(tmp_path, last, seeds)
    assert study.noise("paper") == (pytest.approx(0.05 / 2**0.5) if len(seeds) > 1 else None)
    assert found(study, "every step of K").verdict == verdict
    assert found(study, "common ones, K = 24").with_paper == "10.0x (1.000 against 0.100 nats)"
    assert found(study, "each further block").with_paper == "10.0x"
    assert found(study, "most of the gain").with_paper == "8 %"
    assert found(study, "most of the gain").with_best == "not run"


@pytest.mark.parametrize(
    ("control", "said"),
    [
        (4.5, "TIDE is ahead of it: 0.300 nats"),
        (3.9, "TIDE **is behind it**: -0.300"),
        (4.21, "no more than"),
    ],
)
def test_the_page_begins_with_what_is_ahead_of_the_seeds_that_both_have(control, said, tmp_path):
    kept = tmp_path / "results" / "runs"
    for seed in (0, 1):
        keep(kept, "base", "paper", 0, 5.0 + seed, seed)
        keep(kept, "tide", "best", 8, 4.2 + 1.1 * seed, seed)
    keep(kept, "tide", "paper", 8, 4.6)
    keep(kept, "input-only", "paper", 8, control + 0.1)
    keep(kept, "input-only", "centre", 8, control)
    first = write_report(kept, tmp_path / "results", tmp_path / "docs").read_text().partition("##")[0]
    assert "0.400 nats less loss" in first
    assert "0.800 with the best that was found: 2.00 times as much" in first
    assert "`input-only` (the same tables, normalised and added once" in first
    assert said in first


@pytest.mark.parametrize(("gain", "verdict"), [(0.1, "confirmed"), (1.0, "not confirmed")])
def test_rare_against_common(gain, verdict, tmp_path):
    keep(tmp_path, "base", "paper", 0, 5.0)
    keep(tmp_path, "tide", "paper", 8, 4.5, rare=0.5, common=gain)
    assert found(Study(tmp_path), "common ones, K = 8").verdict == verdict


def test_the_null_bank_and_the_layers(tmp_path):
    null = [0.5 + number / 20 for number in range(10)]
    layers = (null[::-1], null)
    routing = {"by_layer": [[[1 - w, 0.0, w] for w in layer] + [[0.5, 0, 0.5]] for layer in layers]}
    drop = {"texts": {"one": {"change": [9.0, 0.1, 0.01, 0.01, 0.1, 0.1]}}}
    distances = {"distance": [[0, 0.9, 0.8], [0.9, 0, 0.2], [0.8, 0.2, 0]]}
    more = {"routing": routing, "layer-drop": drop, "distances": distances}
    keep(tmp_path, "tide", "paper", 8, 4.5, **more)
    study = Study(tmp_path)
    assert found(study, "null bank").verdict == "confirmed"
    assert "(rank correlation 1.00; above 0 in 1 of 2 layers)" in found(study, "null bank").with_paper
    assert found(study, "specialise").verdict == "not confirmed"
    assert found(study, "indispensable").verdict == "confirmed"
    assert found(study, "far from E").with_paper == "0.80 to 0.90 from E, 0.20 to 0.20 among each other"


@pytest.mark.parametrize("null", [[0.7] * 10, [0.7]])
def test_a_null_bank_that_is_the_same_everywhere_does_not_rise(null, tmp_path):
    routing = {"by_layer": [[[1 - weight, weight] for weight in null]]}
    keep(tmp_path, "tide", "paper", 8, 4.5, routing=routing)
    assert found(Study(tmp_path), "null bank").verdict != "confirmed"


def test_rows_are_shown_by_the_root_of_their_mean_square(tmp_path):
    kept = tmp_path / "results" / "runs"
    keep(kept, "base", "paper", 0, 5.0)
    tables = [[16.0 * (decile + 1) for decile in range(10)]] * 8
    run = keep(kept, "tide", "paper", 8, 4.5, norms={"tables": tables})
    config = RunConfig.load(None, ["model.preset=tide-8e-350m"])
    (run.path / "config.json").write_text(json.dumps(config.to_dict()))
    page = write_report(kept, tmp_path / "results", tmp_path / "docs").read_text()
    assert "the norm adds 1e-05, so that a row of 0.0032 counts for 0.71" in page
    assert "| paper | 0.5000 | 1.0000 | 1.5000 |" in page


def test_what_was_not_run_cannot_be_told(tmp_path):
    keep(tmp_path, "base", "paper", 0, 5.0)
    assert {verdict.verdict for verdict in verdicts(Study(tmp_path))} == {"cannot be told"}


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
    assert "19 % and 7.1 on news" in found
    assert "| SciQ | 25 | 26.0 ± 1.0 | 28.0 ± 1.0 |" in found
    assert "| BoolQ |" not in found


@pytest.fixture(scope="module")
def kept():
    return Study(ROOT / "results" / "study" / "runs")


def test_the_page_in_docs_is_that_of_the_runs_that_are_kept(kept):
    assert (ROOT / "docs" / "STUDY.md").read_text(encoding="utf-8") == page(kept)
    assert (ROOT / "results" / "study" / "summary.json").read_text(encoding="utf-8") == summary(kept)


def test_the_page_in_docs_has_every_figure_of_the_paper(kept):
    shown = set(re.findall(r"\]\(study/(.+?)\.svg\)", page(kept)))
    assert shown >= FIGURES.keys()
    assert shown == {path.stem for path in (ROOT / "docs" / "study").iterdir()}


def test_the_readme_says_what_the_study_found(kept):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    paper, best = (Spread.of(list(kept.gains("tide", recipe, k=8).values())) for recipe in ("paper", "best"))
    others = [kept.gains(*kind, k=8).values() for kind in kept.kinds(8) if kind[0] in CONTROLS]
    most = max(Spread.of(list(gains)).mean for gains in others)
    assert f"by {paper} nats as the paper trains them, and by {best} with" in readme
    assert f"{best.mean / paper.mean:.2f} times as much. As many" in readme
    assert f"other uses give at most {most:.3f}" in readme
