"""Two processes train as one: the same losses and files, through kills and on another number of processes."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tide_lm import checkpoint

STEPS = 12
EXPORTED = "export/model.safetensors"


@pytest.fixture(scope="module")
def settings(prepared):
    return [
        f"data.path={json.dumps(str(prepared))}",
        "data.sequence=32",
        "model.preset=tide-2e-tiny",
        "model.vocab_size=331",  # not the same number of rows on each rank
        f"train.steps={STEPS}",
        "train.batch=4",
        "train.log_every=1",
        "train.validate_every=6",
        "train.validation_sequences=5",  # nor of windows
        "train.checkpoint_every=4",
        "train.keep=10",
        "train.tensorboard=false",
        "optim.warmup_steps=1",
        "optim.max_lr=0.003",
    ]


def command(ranks, settings, run, *more) -> list[str]:
    """`tide-lm train`, by torchrun if there are ranks."""
    chosen = [argument for setting in settings for argument in ("--set", setting)]
    start = [sys.executable, "-m"]
    if ranks:
        start += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *more, "-m", "--"]
    return [*start, "tide_lm", "train", *chosen, "--run", str(run), "--resume"]


def train(ranks, settings, run, *more) -> subprocess.CompletedProcess:
    done = subprocess.run(command(ranks, settings, run, *more), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def metrics(run) -> list[dict]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "timing"} for record in records]


def assert_same_training(found, expected) -> None:
    """Losses to 1e-5, validation and text included, and weights as near as Adam leaves them."""
    for one, other in zip(metrics(found), metrics(expected), strict=True):
        for key in ("loss", "gradient_norm", "learning_rate"):
            assert one[key] == pytest.approx(other[key], rel=1e-5), (one["step"], key)
        assert ("validation" in one, one.get("sample")) == ("validation" in other, other.get("sample"))
        if "validation" in one:
            assert one["validation"]["loss"] == pytest.approx(other["validation"]["loss"], rel=1e-5)
            assert one["validation"]["tokens_by_decile"] == other["validation"]["tokens_by_decile"]
    weights, others = load_file(found / EXPORTED), load_file(expected / EXPORTED)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert torch.allclose(weight, others[name], atol=2e-3 * others[name].abs().max().item()), name


@pytest.fixture(scope="module")
def alone(settings, tmp_path_factory):
    run = tmp_path_factory.mktemp("alone") / "run"
    train(0, settings, run)
    return run


@pytest.fixture(scope="module")
def pair(settings, tmp_path_factory):
    run = tmp_path_factory.mktemp("pair") / "run"
    done = train(2, settings, run)
    assert done.stderr.count("exported to") == done.stdout.count("validation loss") == 1  # the first alone
    return run


def test_two_processes_have_the_losses_of_one(alone, pair):
    assert_same_training(pair, alone)
    assert metrics(pair)[-1]["loss"] < metrics(pair)[0]["loss"] - 0.3


def test_each_process_writes_its_own_half_of_a_checkpoint(pair):
    """And holds no more: the tables are rows of its own."""
    shards = sorted(checkpoint.at(pair / "checkpoints", STEPS).glob("*.safetensors"))
    rows = []
    for shard in shards:
        with safe_open(shard, "pt") as file:
            for name in ("model.model.memory.weight", "tables.exp_avg", "tables.last"):
                rows.append((name, file.get_slice(name).get_shape()[0]))
    assert [count for name, count in rows if name == "tables.last"] == [166, 165]
    assert len({count for _, count in rows}) == len(shards) == 2


def test_the_export_is_an_ordinary_folder(alone, pair):
    found, expected = (json.loads((run / "export" / "config.json").read_text()) for run in (pair, alone))
    assert found == expected
    assert {path.name for path in (pair / "export").iterdir()} == {
        path.name for path in (alone / "export").iterdir()
    }
    model = AutoModelForCausalLM.from_pretrained(pair / "export")
    weights = load_file(pair / EXPORTED)
    assert torch.equal(model.model.memory.weight, weights["model.memory.weight"])
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_micro_batches_of_two_processes_add_up(alone, settings, tmp_path):
    train(2, [*settings, "train.micro_batch=1"], tmp_path / "run")
    assert_same_training(tmp_path / "run", alone)


@pytest.mark.parametrize(("ranks", "begun_by"), [(0, "pair"), (2, "alone")])
def test_a_run_goes_on_with_another_number_of_processes(alone, settings, tmp_path, request, ranks, begun_by):
    run = tmp_path / "run"
    shutil.copytree(request.getfixturevalue(begun_by), run)
    checkpoint.remove_after(run / "checkpoints", 4)
    shutil.rmtree(run / "export")
    assert "resumed from step 4" in train(ranks, settings, run).stderr
    assert_same_training(run, alone)


def test_a_process_that_is_killed_ends_the_others_and_the_restart_goes_on(pair, settings, tmp_path):
    """Killed twice: torchrun restarts once by itself, and once by hand."""
    run = tmp_path / "run"
    log = (tmp_path / "log").open("w")
    job = subprocess.Popen(command(2, settings, run, "--max-restarts=1"), stderr=log, stdout=log)
    try:
        for step in (5, 9):
            wait_for(lambda step=step: json.loads(last_line(run / "metrics.jsonl"))["step"] >= step, job)
            workers = children(job.pid)
            assert len(workers) == 2
            os.kill(workers[-1], signal.SIGKILL)
            wait_for(lambda workers=workers: not any(Path(f"/proc/{pid}").exists() for pid in workers), job)
        assert job.wait(60) != 0
    finally:
        job.kill()
    assert (tmp_path / "log").read_text().count("resumed from step 4") == 1
    assert "resumed from step 8" in train(2, settings, run).stderr
    assert metrics(run) == metrics(pair)
    weights, expected = load_file(run / EXPORTED), load_file(pair / EXPORTED)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def wait_for(condition, job, seconds=120) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError, ValueError):
            if condition():
                return
        time.sleep(0.05)
    raise AssertionError(f"nothing happened in {seconds} s; the job's status is {job.poll()}")


def last_line(path) -> str:
    return path.read_text().splitlines()[-1:][0]


def children(pid) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_signal_to_torchrun_saves_first(settings, tmp_path):
    run = tmp_path / "run"
    job = subprocess.Popen(command(2, settings, run), stderr=subprocess.PIPE, text=True)
    wait_for(lambda: json.loads(last_line(run / "metrics.jsonl"))["step"] >= 2, job)
    job.send_signal(signal.SIGTERM)
    told = job.communicate(timeout=60)[1]
    stopped = int(re.search(r"stopped by a signal at step (\d+)", told)[1])
    assert checkpoint.steps(run / "checkpoints")[-1] == stopped < STEPS


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optim.table_update=dense", "needs the tables whole in one process"),
        ("train.batch=5", "for 2 processes: the batch must be a multiple of 2"),
    ],
)
def test_what_several_processes_cannot_do_is_said_once(settings, tmp_path, setting, message):
    run = tmp_path / "run"
    done = subprocess.run(command(2, [*settings, setting], run), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.count(message) == 1
    assert not run.exists()
