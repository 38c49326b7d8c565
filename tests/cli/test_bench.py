"""`tide-lm bench train` on a CPU: the numbers are not judged, only that they are there and fit."""

import json

import torch
from typer.testing import CliRunner

from tide_lm.cli import app
from tide_lm.train import benchmark


def test_bench_times_models_beside_plain_ones(tmp_path):
    out = tmp_path / "results" / "train.json"
    arguments = ["base-tiny", "tide-2e-tiny", "--batch", "1", "--sequence", "16", "--steps", "1"]
    done = CliRunner().invoke(
        app,
        ["bench", "train", *arguments, "--vocab", "300", "--peers", "--out", str(out)],
        catch_exceptions=False,
    )
    assert done.exit_code == 0
    assert "tide-2e-tiny, plain" in done.stdout
    written = json.loads(out.read_text())
    assert [(run["k"], run["plain"]) for run in written["runs"]] == [
        (0, False),
        (0, True),
        (2, False),
        (2, True),
    ]
    for run in written["runs"]:
        assert run["vocab"] == 300
        assert run["tokens_per_s"] > 0
        assert sum(run["parts_ms"].values()) <= run["step_ms"] * 1.05
    assert written["provenance"]["command"]


def test_each_vocabulary_is_timed_and_what_needs_too_much_memory_is_told(tmp_path, monkeypatch):
    def give_up(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(benchmark, "_plain_step", give_up)
    out = tmp_path / "train.json"
    arguments = ["tide-2e-tiny", "--batch", "1", "--sequence", "16", "--steps", "1", "--peers"]
    done = CliRunner().invoke(
        app,
        ["bench", "train", *arguments, "--vocab", "300", "--vocab", "400", "--out", str(out)],
        catch_exceptions=False,
    )
    assert done.stdout.count("out of memory") == 2
    timed, failed, also_timed, also_failed = json.loads(out.read_text())["runs"]
    assert (timed["vocab"], also_timed["vocab"]) == (300, 400)
    assert failed == {"preset": "tide-2e-tiny", "k": 2, "vocab": 300, "plain": True, "out_of_memory": True}
    assert also_failed == {**failed, "vocab": 400}


def test_an_unknown_preset_is_named():
    done = CliRunner().invoke(app, ["bench", "train", "tide-9z"])
    assert done.exit_code == 1
    assert "tide-9z" in str(done.exception)
