"""`tide-lm report --cards`: what was measured, in the README of each export."""

import json

import pytest
from command import Done, tide_lm

from tide_lm.report.model_cards import write_cards


def cards(*runs: object) -> Done:
    return tide_lm("report", *runs, "--cards")


def test_every_export_gets_a_card_of_all_results(plant, tmp_path):
    told = ("validation", "perplexity", "benchmarks")  # all that a card has: a page of more takes longer
    base, tide = (plant(tmp_path / name, blocks, only=told) for name, blocks in (("base", 0), ("tide", 3)))
    (tide / "export").mkdir()
    done = cards(base, tide)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tide / "export" / "README.md"), str(base / "report" / "index.html")]
    card = (tide / "export" / "README.md").read_text()
    assert "A TIDE model with 3 memory blocks" in card
    assert "| wiki | 123.257 |" in card
    assert "| arc_challenge | 30.0 |" in card
    assert not (base / "export").exists()


def test_the_tokens_are_those_of_the_step_that_was_exported(plant, tmp_path):
    """The planted run was validated at step 20 and has gone on to step 60."""
    path = plant(tmp_path / "x")
    (path / "export").mkdir()
    (written,) = write_cards([path])
    assert "for 20 steps on 2,000 tokens" in written.read_text()


def test_without_an_export_nothing_is_written(two_runs):
    done = cards(*two_runs)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: no export in {two_runs[0]}, {two_runs[1]}")
    assert not (two_runs[0] / "report").exists()


@pytest.mark.parametrize("content", ["{", '{"tasks": {"arc_easy": {}}, "average": null}'])
def test_a_damaged_result_makes_no_card(content, plant, tmp_path):
    path = plant(tmp_path / "x")
    (path / "export").mkdir()
    (path / "results" / "benchmarks.json").write_text(content)
    with pytest.raises(ValueError, match=r"benchmarks\.json"):
        write_cards([path])
    assert not any((path / "export").iterdir())


def test_a_card_needs_the_runs_own_files(plant, tmp_path):
    path = plant(tmp_path / "x", without=("validation",))
    (path / "export").mkdir()
    with pytest.raises(ValueError, match=r"has no results/validation\.json"):
        write_cards([path])
    (path / "results" / "validation.json").write_text(json.dumps({"step": 20, "loss": 1.0, "tokens": 1}))
    (path / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="no settings, metrics or losses"):
        write_cards([path])
