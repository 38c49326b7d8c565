"""`tide-lm evaluate` and `tide-lm analyze` as a user calls them, on a finished run."""

import json
import shutil

import pytest
from cli.test_commands import tide_lm
from typer.testing import CliRunner

from tide_lm.cli import app


def result_of(*arguments: str) -> dict:
    """In this process, since a new one takes seconds to load torch."""
    done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def run(trained, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    return copy


def test_evaluate_measures_the_held_out_text_and_any_other(run, tmp_path):
    (tmp_path / "other.txt").write_text("every layer knows the token beneath the context. " * 20)
    result = result_of("evaluate", str(run), "--text", f"mine={tmp_path / 'other.txt'}")
    assert result["texts"]["mine"]["perplexity"] > 1
    assert (result["texts"]["mine"]["window"], result["texts"]["mine"]["stride"]) == (32, 16)
    written = json.loads((run / "results" / "perplexity.json").read_text())
    assert written["texts"] == result["texts"]
    more = result_of("evaluate", str(run))
    both = json.loads((run / "results" / "perplexity.json").read_text())["texts"]
    assert both == more["texts"] | result["texts"]
    shown = tide_lm("evaluate", str(run))
    assert "held-out" in shown.stdout
    assert "rare" in shown.stdout


def test_evaluate_gives_perplexity_against_tokens(run):
    result = result_of("evaluate", str(run), "--all-checkpoints", "--window", "32", "--stride", "32")
    assert [(point["step"], point["tokens"]) for point in result["points"]] == [(2, 256), (4, 512)]
    assert (run / "results" / "checkpoints.json").exists()


@pytest.mark.parametrize(
    "what",
    [
        "norms",
        "updates",
        "gradients",
        "collapse",
        "routing",
        "layer-drop",
        "distances",
        "neighbours",
        "footprint",
    ],
)
def test_analyze_writes_its_result(run, what):
    result = result_of("analyze", what, str(run), "--window", "32", "--stride", "32")[str(run)]
    written = json.loads((run / "results" / f"{what}.json").read_text())
    assert {key: written[key] for key in result} == result
    assert written["provenance"]["versions"]["torch"]


def test_wrong_calls_are_named(run, tmp_path):
    (tmp_path / "short.txt").write_text("A few words.")
    short = tide_lm("evaluate", str(run), "--text", str(tmp_path / "short.txt"))
    assert short.returncode == 1
    assert "fewer than one window" in short.stderr
    long = tide_lm("evaluate", str(run), "--window", "100000")
    assert long.returncode == 2
    twice = tide_lm("evaluate", str(run), "--text", "a.txt", "--text", "b/a.txt")
    assert twice.returncode == 2
    assert "two texts are called 'a'" in twice.stderr
    nothing = tide_lm("analyze", "routing", str(tmp_path / "nowhere"))
    assert nothing.returncode == 1
    assert "there is no" in nothing.stderr
    assert "Traceback" not in nothing.stderr + short.stderr


def test_an_analysis_of_memory_refuses_a_base_model(tiny_model, tokenizer, tmp_path, monkeypatch):
    folder = tmp_path / "base"
    tiny_model(num_memory_blocks=0, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for what in ("routing", "layer-drop", "distances", "neighbours"):
        with pytest.raises(ValueError, match="base has no memory"):
            result_of("analyze", what, str(folder), "--text", str(folder / "config.json"))
    done = tide_lm("analyze", "distances", str(folder))
    assert (done.returncode, done.stderr.splitlines()[-1][:6]) == (1, "error:")
    monkeypatch.chdir(tmp_path)
    result_of("analyze", "collapse", str(folder))
    assert (tmp_path / "runs" / "base" / "results" / "collapse.json").exists()
