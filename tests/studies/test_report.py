"""The study's tables, from runs that are made up: what is counted, and how it is judged."""

import re

import pytest
from kept_runs import TOKENS, by_frequency, keep

from studies import readme_report, report
from studies.claims import CLAIMS
from studies.compression_report import forms
from studies.plan import NARROW, final
from studies.report import write_report
from studies.results import Spread, Study
from tide_lm.spec.recipes import RECIPES


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
        (4.5, "0.300 (one seed) | is ahead |"),
        (3.9, "-0.300 (one seed) | **is behind** |"),
        (4.21, "0.010 (one seed) | differs by no more than chance |"),
    ],
)
def test_what_is_ahead_of_the_seeds_that_both_have(control, said, tmp_path):
    for seed in (0, 1):
        keep(tmp_path, "base", "paper", 0, 5.0 + 0.1 * seed, seed)
        keep(tmp_path, "tide", "best", 8, 4.2 + 0.11 * seed, seed)
    keep(tmp_path, "tide", "paper", 8, 4.6)
    keep(tmp_path, "input-only", "paper", 8, control + 0.1)
    keep(tmp_path, "input-only", "centre", 8, control)
    study = Study(tmp_path)
    by_recipe = report.gains_by_recipe(study)
    assert "| the paper's | 0.400 | 1.00 | 1 |" in by_recipe
    assert "| best, the default | 0.800 | 2.00 | 1 |" in by_recipe
    (row,) = report.beside_controls(study).splitlines()[2:]  # no control is without rows in values
    gain = f"{5 - control:.3f} (one seed)"
    assert row.startswith(f"| allowed | `input-only` | centre | {gain} | 0.795 ± 0.007 (2 seeds) | ")
    assert row.endswith(said)


@pytest.mark.parametrize(
    ("behind", "told"),
    [(0.08, "differs by no more than chance"), (0.11, "is ahead")],
    ids=["chance", "ahead"],
)
def test_chance_is_smaller_for_the_mean_of_several_seeds(behind, told, tmp_path):
    """Two runs may be 0.189 apart, and so two means of four 0.094."""
    for seed, loss in enumerate((3.9, 4.1, 3.9, 4.1)):
        keep(tmp_path, "base", "paper", 0, 5.0, seed)
        keep(tmp_path, "tide", "best", 8, loss, seed)
        keep(tmp_path, "input-only", "best", 8, 4.0 + behind, seed)
    study = Study(tmp_path)
    assert report.noise(study) == "0.189"
    (row,) = report.beside_controls(study).splitlines()[2:]
    assert row.endswith(f"| {behind:.3f} ± 0.115 (4 seeds) | {told} |")


def test_without_rows_in_values_controls_are_beside_the_centre(tmp_path):
    keep(tmp_path, "base", "paper", 0, 5.0)
    keep(tmp_path, "tide", "best", 8, 4.0)
    keep(tmp_path, "tide", "centre", 8, 4.4)
    keep(tmp_path, "value-tables", "best", 8, 4.1)
    keep(tmp_path, "layer-tables", "best", 8, 4.3)
    first, second = report.beside_controls(Study(tmp_path)).splitlines()[2:]
    assert first.startswith(
        "| allowed | `value-tables` | best | 0.900 (one seed) | 1.000 (one seed) | 0.100 "
    )
    assert second.startswith("| none | `layer-tables` | best | 0.700 (one seed) | 0.600 (one seed) | -0.100 ")


def test_recipes_that_share_no_seed_cannot_be_compared(tmp_path):
    keep(tmp_path, "base", "paper", 0, 5.0)
    keep(tmp_path, "tide", "best", 8, 4.0)
    with pytest.raises(ValueError, match=r"no seed with both .* recipe: run the study"):
        report.gains_by_recipe(Study(tmp_path))


SETTINGS = ["model.preset=tide-8e-350m", "train.steps=1234", "optim.warmup_steps=9", "optim.max_lr=0.002"]


def test_rows_are_shown_by_the_root_of_their_mean_square(tmp_path):
    tables = [[16.0 * (decile + 1) for decile in range(10)]] * 8
    keep(tmp_path, "tide", "paper", 8, 4.5, norms={"tables": tables}, settings=SETTINGS)
    study = Study(tmp_path)
    assert report.norm_eps(study) == "1e-05, the square of 0.0032"
    assert "| paper | 0.5000 | 1.0000 | 1.5000 |" in report.rows_after_training(study)


def test_the_setting_is_that_of_the_base(tmp_path):
    keep(tmp_path, "base", "paper", 0, 5.0, settings=SETTINGS)
    study = Study(tmp_path)
    rows = report.setting(study).splitlines()
    assert "| model | `tide-8e-350m` |" in rows
    assert "| hidden size D | 1024 |" in rows
    assert "| steps | 1,234 |" in rows
    assert "| batch, sequences x tokens | 8 x 2048 |" in rows
    assert any(row.startswith("| learning rate, peak and last | 0.002 and ") for row in rows)
    assert f"| training tokens per parameter of the base | {TOKENS / 10:.1f} |" in rows
    assert "| held-out places to predict | 100 |" in rows
    assert report.places_by_decile(study).endswith("| places to predict |" + " 9 |" * 10)
    assert report.tokens(study) == "1,000"


def test_recipes_are_shown_setting_by_setting():
    rows = report.recipes().splitlines()[2:]
    assert len(rows) == sum(map(len, RECIPES["paper"].values())) == sum(map(len, RECIPES["best"].values()))
    assert "| `optim.table_lr_multiple` | 1.0 | 5.0 |" in rows
    assert "| `model.memory_values` | false | true |" in rows


def compressed():
    def texts(perplexity, rarest):
        return {"wiki": {"perplexity": perplexity, **by_frequency(4.5, [rarest, *[5.0] * 9])}}

    settings = {"bits": 16, "rank": 0.5, "blocks": "even"}
    form = {"form": "16 bits, rank 0.5", **settings, "bytes": 9, "relative_bytes": 0.51}
    return {"as_trained": texts(100.0, 9.0), "forms": [{**form, "texts": texts(120.0, 9.25)}]}


def test_figures_are_drawn_of_runs_that_are_kept(tmp_path):
    """What was not measured is not drawn."""
    kept, docs = tmp_path / "results", tmp_path / "docs"
    for seed in (0, 1, 2):
        keep(kept, "base", "paper", 0, 5.0 + seed / 10, seed)
        more = {} if seed else {"compression": compressed()}
        keep(kept, "tide", "paper", 8, 4.6 + seed / 10, seed, **more)
    assert write_report(kept, docs) == docs / "study"
    drawn = {path.stem: path.read_text() for path in (docs / "study").iterdir()}
    assert drawn.keys() >= {"gains", "loss-by-tokens", "ranks"}
    assert not drawn.keys() & {"cache", "norms"}
    assert all("</svg>" in text for text in drawn.values())


def test_what_smaller_tables_cost_stands_beside_what_rare_tokens_lose(tmp_path):
    keep(tmp_path, "base", "paper", 0, 5.0)
    with pytest.raises(ValueError, match="run the study"):
        forms(Study(tmp_path))
    keep(tmp_path, "tide", "paper", 8, 4.5, compression=compressed())
    found = forms(Study(tmp_path))
    assert "| form | bytes | wiki, TIDE-8E (paper) | rare, TIDE-8E (paper) |" in found
    assert "| 16 bits, rank 0.5 | 51.0 % | +20.00 % | +0.250 |" in found


def test_every_claim_and_run_is_in_a_table_and_numbers_stand_beside_the_figures(tmp_path):
    for seed in (0, 1, 2):
        keep(tmp_path, "base", "paper", 0, 5.0 + seed / 10, seed)
        keep(tmp_path, "tide", "paper", 8, 4.6 + seed / 10, seed)
    keep(tmp_path, "tide", "gain 0.3", 8, 4.7)
    keep(tmp_path, "base", "paper", 0, 4.5, size="medium")
    keep(tmp_path, "tide", "paper", 8, 4.2, size="medium")
    study = Study(tmp_path)
    found, rules = report.claims(study).splitlines()[2:], report.rules().splitlines()
    for claim, row, rule in zip(CLAIMS, found, rules, strict=True):
        assert row.startswith(f"| {claim.text} | {claim.paper} | ")
        assert rule == f"- {claim.text}: {claim.rule}."
    assert any(row.endswith("| 0.000 to 0.000 nats | not run | **not confirmed** |") for row in found)
    gains, curves = (report.own_figure(study, name) for name in ("gains", "loss-by-tokens"))
    assert gains == "![Nats less than the base: TIDE-8E (paper) 0.400.](study/gains.svg)"
    assert "base 5.100" in curves
    assert curves.endswith("(study/loss-by-tokens.svg)")
    spread = "4.700 ± 0.100 | 10.000 ± 0.000 | 3.000 ± 0.000 | 0.400 ± 0.000"
    assert report.losses(study).splitlines()[2:] == [
        f"| TIDE-8E | paper | 10 | 3 | {spread} |",
        "| base | paper | 10 | 3 | 5.100 ± 0.100 | 10.000 ± 0.000 | 3.000 ± 0.000 |  |",
    ]
    assert report.larger(study).splitlines()[2:] == [
        "| base | paper | 10 | 1 | 4.500 | 10.000 | 3.000 |  |",
        "| TIDE-8E | paper | 10 | 1 | 4.200 | 10.000 | 3.000 | 0.300 |",
    ]
    assert report.search(study).splitlines()[2:] == ["| tide | gain 0.3 | 4.700 | 10.000 | 3.000 |"]
    assert report.recipes_tried(study) == "tide 2"
    by_k = report.losses_by_k(study).splitlines()[2:]
    assert by_k[0] == "| 0 |" + " 5.000 | 10.000 | 3.000 |" * 2
    assert by_k[3] == "| 8 | 4.600 | 10.000 | 3.000 |  |  |  |"
    assert report.noise(study) == f"{2 * 2**0.5 * 0.1:.3f}"


def test_what_was_planned_and_not_run_is_named(tmp_path):
    done, *left = final()
    keep(tmp_path, "base", "paper", 0, 5.0, name=done.slug)
    assert report.not_run(Study(tmp_path)).split("; ") == [run.name for run in left]


def test_without_a_base_there_is_nothing_to_compare_with(tmp_path):
    keep(tmp_path, "tide", "paper", 8, 4.5)
    with pytest.raises(ValueError, match=r"runs\.jsonl has no run of the base.*run the study"):
        write_report(tmp_path, tmp_path / "docs")


def test_other_texts_and_the_tasks_that_are_above_chance(tmp_path):
    def more(perplexity, sciq):
        rest = {"bytes": 9, "window": 8, "stride": 4, **by_frequency(5.0, [5.0] * 10)}
        scores = {"sciq": sciq, "boolq": 0.51}
        tasks = {name: {"score": score, "stderr": 0.01} for name, score in scores.items()}
        return {
            "perplexity": {"texts": {"news": {"perplexity": perplexity, **rest}}},
            "benchmarks": {"tasks": tasks},
        }

    keep(tmp_path, "base", "paper", 0, 5.0, **more(30.0, 0.26))
    keep(tmp_path, "base", "paper", 0, 5.1, seed=1, **more(31.0, 0.26))
    keep(tmp_path, "tide", "paper", 8, 4.5, **more(20.0, 0.28))
    study = Study(tmp_path)
    assert "| base | paper | 2 | 30.5 ± 0.7 |" in report.texts(study)
    assert "| TIDE-8E | paper | 1 | 20.0 |" in report.texts(study)
    tasks = report.zero_shot(study)
    assert "| SciQ | 25 | 26.0 ± 1.0 | 28.0 ± 1.0 |" in tasks
    assert "| BoolQ |" not in tasks
    keep(tmp_path, "tide", "best", 8, 4.4, **more(40.0, 0.28))  # with the lowest loss
    assert report.best_by_text(Study(tmp_path)).endswith("| news | TIDE-8E | paper | 20.0 |")


def test_the_readme_has_gains_over_the_base_and_over_the_papers(tmp_path):
    losses = {("tide", "paper"): 4.9, ("tide", "best"): 4.8, ("tide", "values x5"): 4.7}
    losses |= {("tide", "values x5, gated"): 4.65, (NARROW, "values x5"): 4.6, ("value-tables", "best"): 4.75}
    losses |= {("input-only", "gain 1"): 4.85, ("layer-tables-and-values", "values x5"): 4.5}
    keep(tmp_path, "base", "paper", 0, 5.0)
    keep(tmp_path, "base", "paper", 0, 5.2, seed=1)
    keep(tmp_path, "tide", "best", 8, 4.8, seed=1)
    for (model, recipe), loss in losses.items():
        keep(tmp_path, model, recipe, 8, loss)
    rows = [row.split(" | ", 1) for row in readme_report.gains(Study(tmp_path)).splitlines()[2:]]
    assert [row[1] for row in rows] == [
        "0.100 | 1.00 | 1 |",
        "0.300 ± 0.141 | 2.00 | 2 |",  # the paper's recipe has one seed
        "0.300 | 3.00 | 1 |",
        "0.350 | 3.50 | 1 |",
        "0.400 | 4.00 | 1 |",
        "0.500 | 5.00 | 1 |",
        "0.250 | 2.50 | 1 |",
    ]
    assert "`layer-tables-and-values`" in rows[-2][0]
    assert "`value-tables`" in rows[-1][0]


def test_the_readme_has_some_claims_and_counts_all(tmp_path):
    keep(tmp_path, "base", "paper", 0, 5.0)
    keep(tmp_path, "tide", "paper", 8, 4.5, rare=0.5, common=0.1)
    study = Study(tmp_path)
    all_rows = set(report.claims(study).splitlines())
    rows = readme_report.claims(study).splitlines()
    assert len(rows) >= 10
    assert set(rows) <= all_rows
    verdicts = [row.split("**")[1] for row in all_rows if "**" in row]
    counts = [verdicts.count(name) for name in ("confirmed", "not confirmed", "cannot be told", "not run")]
    assert min(counts[0], counts[1], counts[3]) > 0
    columns, _, row = readme_report.verdict_counts(study).splitlines()
    assert columns == "| claims | confirmed | not confirmed | cannot be told | not run |"
    assert row == f"| {len(CLAIMS)} | {' | '.join(map(str, counts))} |"


def test_the_readme_has_the_worst_text_of_smaller_tables(tmp_path):
    def texts(*perplexities):
        rest = by_frequency(4.5, [9.0, *[5.0] * 9])
        return {name: {"perplexity": each, **rest} for name, each in zip("ab", perplexities, strict=True)}

    made = [
        {"form": form, "bits": 4, "rank": 1.0, "relative_bytes": 0.504, "texts": texts(99.0, 10.25)}
        for form in readme_report.FORMS
    ]
    keep(tmp_path, "tide", "best", 8, 4.5, compression={"as_trained": texts(100.0, 10.0), "forms": made})
    columns, _, *rows = readme_report.smaller_tables(Study(tmp_path)).splitlines()
    assert "worst of 2 texts" in columns
    assert len(rows) == len(readme_report.FORMS)
    assert all(row.endswith(" | 50 % | +2.50 % | +0.000 |") for row in rows)


def test_the_demo_is_shown_by_decile_with_where_it_ran():
    def model(preset, loss):
        return {
            "preset": preset,
            "parameters": 1234,
            "tokens": 5678,
            "val_loss": loss,
            "loss_by_decile": [loss + 2, *[0.0] * 8, loss - 1],
        }

    provenance = {"python": "3.11.7", "machine": {"cpu": "Chip", "cores": 4}}
    found = {"base": model("b", 5.0), "tide": model("t", 4.25), "seconds": 90, "provenance": provenance}
    assert readme_report.demo(found).splitlines() == [
        "| decile | `b`, 1,234 parameters | `t`, 1,234 parameters | difference |",
        "| --- | --- | --- | --- |",
        "| 0, the rarest | 7.000 | 6.250 | -0.750 |",
        "| 9, the commonest | 4.000 | 3.250 | -0.750 |",
        "| all | 5.000 | 4.250 | -0.750 |",
    ]
    told = "5,678 training tokens; 1.5 minutes with Python 3.11 on 4 cores (Chip)"
    assert readme_report.demo_setting(found) == told


def test_a_newcomer_reads_how_long_each_command_takes():
    found = {"seconds": {"environments": 300.0, "test": 301.0, "others": 1800.0}}
    found |= {"provenance": {"machine": {"cores": 4}}}
    told = readme_report.waiting_times(found, {"seconds": 179.0})
    assert re.findall(r"\d+", told) == ["4", "5", "3", "40"]
