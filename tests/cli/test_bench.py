"""`tide-lm bench train` on a CPU: the numbers are not judged, only that they are there and fit."""

import json

from typer.testing import CliRunner

from tide_lm.cli import app


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


def test_an_unknown_preset_is_named():
    done = CliRunner().invoke(app, ["bench", "train", "tide-9z"])
    assert done.exit_code == 1
    assert "tide-9z" in str(done.exception)
