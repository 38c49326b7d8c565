"""`tide-lm bench` on a CPU: the numbers are not judged, only that they are there and fit."""

import json
import os
import re
import signal
import subprocess
import tempfile
import time

import numpy as np
import pytest
import torch
from command import call, tide_lm

from tide_lm.bench import train as benchmark
from tide_lm.cli import bench
from tide_lm.spec import presets

GAVE_UP = {"plain": True, "out_of_memory": True}


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Warm up for one step, and leave the process to the next test as it was."""
    monkeypatch.setattr(benchmark, "WARM_UP", 1)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def measured(monkeypatch):
    """Return a list that a bench adds its result to, which it prints as tables."""
    found, measure = [], bench._measured
    monkeypatch.setattr(bench, "_measured", lambda work: found.append(measure(work)) or found[-1])
    return found


def test_bench_times_models_beside_plain_ones(measured):
    arguments = ["base-tiny", "tide-2e-tiny", "--batch", "1", "--sequence", "16", "--steps", "1"]
    done = tide_lm("bench", "train", *arguments, "--peers")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tide-2e-tiny, plain") == 2
    assert re.search(r"model +ids +rows +forward +backward +optimizer", done.stdout)
    (written,) = measured
    assert [(run["k"], run["plain"]) for run in written["runs"]] == [
        (0, False),
        (0, True),
        (2, False),
        (2, True),
    ]
    for run in written["runs"]:
        assert run["vocab"] == presets.get(run["preset"]).model.vocab_size
        assert run["tokens_per_s"] > 0
        assert sum(run["parts_ms"].values()) <= run["step_ms"] * 1.05
    assert written["provenance"]["command"]


def test_each_vocabulary_is_timed_and_what_needs_too_much_memory_is_told(measured, monkeypatch):
    def give_up(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(benchmark, "_plain_step", give_up)
    arguments = ["--batch", "1", "--sequence", "16", "--steps", "1", "--peers"]
    models = ["tide-2e-tiny", "tide-2e-tiny:300", "tide-2e-tiny+values+pairs:400"]
    done = tide_lm("bench", "train", *models, *arguments)
    assert done.stdout.count("out of memory") == 1
    ((timed, failed, *others),) = (result["runs"] for result in measured)
    assert failed == {**{name: timed[name] for name in ("preset", "k", "vocab")}, **GAVE_UP}
    assert [(run["preset"], run["vocab"], run["plain"]) for run in others] == [
        ("tide-2e-tiny", 300, False),
        ("tide-2e-tiny+values+pairs", 400, False),
    ]


def test_extensions_may_be_timed_too():
    assert benchmark.shape_of("tide-2e-tiny+values:300").memory_values
    assert benchmark.shape_of("tide-2e-tiny+pairs:300").memory_pair_rows == 300
    assert not benchmark.shape_of("tide-2e-tiny").memory_values


def refused(*arguments):
    done = tide_lm("bench", "train", *arguments)
    assert done.returncode == 2
    return done.said


@pytest.mark.parametrize("ids", ["", "1", "-3", "many"])
def test_a_vocabulary_that_is_no_number_is_named(ids):
    assert f"of {ids!r} ids: write a number from 2 on" in refused(f"base-tiny:{ids}")


def test_a_base_has_nothing_to_put_into_values():
    assert "'base-tiny+values' has no memory: leave +values out" in refused("base-tiny+values")
    assert "'tide-2e-tiny+value' asks for +value" in refused("tide-2e-tiny+value")


def test_a_vocabulary_that_no_model_can_have_is_named_before_anything_is_timed():
    assert "vocab_size is 3000000000" in refused("base-1b", "base-tiny:3000000000")


def test_an_unknown_preset_is_named():
    assert "tide-9z" in refused("tide-9z")


def test_a_store_is_timed_and_removed(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    options = ["tide-4e-tiny", "--tokens", "50", "--rounds", "1", "--bits", "8"]
    done = tide_lm("bench", "store", *options, "--folder", place, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["provenance"]["command"]
    assert found["read"]["seconds"].keys() >= {"mmap", "reader"}
    assert not list(place.iterdir())


@pytest.mark.parametrize(
    ("kind", "at_work"),
    [("store", "bench.store.read_speed"), ("decode", "bench.decode._timed")],
    ids=["store", "decode"],
)
def test_a_store_is_removed_when_this_process_is_told_to_end(tmp_path, monkeypatch, kind, at_work):
    """Do in this process what the next test does in one of its own."""
    written = []

    def told_to_end(*_):
        written.extend(tmp_path.glob("*/rows.tide"))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(f"tide_lm.{at_work}", told_to_end)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = ["--folder", tmp_path] if kind == "store" else ["--context", "4", "8", "--memory", "store"]
    assert tide_lm("bench", kind, "tide-2e-tiny", *place).returncode == 128 + signal.SIGTERM
    assert len(written) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["store", "tide-8e-small", "--rounds", "99", "--folder", "."],
        ["decode", "tide-8e-small", "--context", "8", "500", "--memory", "store"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_store_is_removed_when_the_bench_is_ended(tmp_path, arguments):
    places = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(call("bench", *arguments), cwd=tmp_path, env=places)
    until = time.monotonic() + 600
    while not [*tmp_path.glob("*/rows.tide"), *tmp_path.glob(".*/rows.tide")] and time.monotonic() < until:
        time.sleep(0.05)
    assert [*tmp_path.glob("*/rows.tide"), *tmp_path.glob(".*/rows.tide")]
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["base-tiny"], "a base model has no store"),
        (["tide-4e-tiny", "--bits", "5"], "bits is 5"),
        (["tide-4e-tiny", "--tokens", "99999"], "has 4096: give fewer"),
        (["no-such"], "no-such"),
    ],
)
def test_what_has_no_store_is_refused(arguments, said):
    done = tide_lm("bench", "store", *arguments)
    assert done.returncode == 2
    assert said in done.said


def test_bench_decodes_beside_its_peers_wherever_rows_are(measured, tmp_path):
    np.save(tmp_path / "ids.npy", np.array([3, 1, 4, 1, 5]))
    np.save(tmp_path / "counts.npy", np.arange(4096))
    arguments = [
        "base-tiny",
        "tide-2e-tiny",
        "--context",
        "4",
        "8",
        "--batch",
        "1",
        "--batch",
        "2",
        "--peers",
    ]
    arguments += ["--memory", "device", "--memory", "store"]
    arguments += ["--ids", str(tmp_path / "ids.npy"), "--counts", str(tmp_path / "counts.npy")]
    done = tide_lm("bench", "decode", *arguments)
    assert done.returncode == 0, done.stderr
    assert re.search(r"ms/token +tokens/s +GB/s +of floor +over base", done.stdout)
    (written,) = measured
    engines = [run for run in written["runs"] if run["by"] == "engine"]
    places = [(0, "device"), (2, "device"), (2, "store")]
    assert [(run["batch"], run["k"], run["memory"]) for run in engines] == [
        *((1, *place) for place in places),
        *((2, *place) for place in places[:2]),
    ]
    peers = [run for run in written["runs"] if run["by"] != "engine"]
    assert [run["by"] for run in peers] == ["transformers", "transformers, static cache"]
    assert all((run["batch"], run["k"]) == (1, 0) for run in peers)
    shape = presets.get("base-tiny").model
    weights = engines[0]["weight_bytes"]
    assert weights > 2 * shape.vocab_size * shape.hidden_size
    assert written["floor_ms"] == pytest.approx(weights / written["bandwidth_tb_s"] / 1e9)
    for run in engines:
        assert run["gb_per_s"] == pytest.approx(run["weight_bytes"] / run["ms_per_token"] / 1e6)
        assert run["tokens_per_s"] == pytest.approx(1e3 * run["batch"] / run["ms_per_token"])
        base = next(other for other in engines if (other["k"], other["batch"]) == (0, run["batch"]))
        assert run["over_base"] == pytest.approx(run["ms_per_token"] / base["ms_per_token"] - 1)
    assert written["store"]["tokens"] == 5
    assert written["store"]["hit_rate"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing-1b"], "nothing-1b"),
        (["base-tiny", "--context", "8", "9"], "end with two more at least"),
        (["base-tiny", "--context", "8", "999999"], "knows 512 positions: lower it"),
        (["tide-2e-tiny", "base-tiny", "--context", "4", "8", "--ids", "ids.npy"], "base-tiny has no memory"),
        (["tide-2e-tiny", "--context", "4", "8", "--ids", "nowhere.npy"], "is no .npy file of whole numbers"),
        (["base-tiny", "--context", "4", "8", "--memory", "store"], "have no rows to be in store"),
        (["base-tiny", "--context", "4", "8", "--counts", "counts.npy"], "--counts goes with --ids"),
    ],
)
def test_what_cannot_be_decoded_is_told(arguments, told):
    done = tide_lm("bench", "decode", *arguments)
    assert done.returncode == 2
    assert told in done.said
