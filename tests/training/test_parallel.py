"""Two processes train as one: the same losses and files, through kills and on another number of processes."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from command import Done, process, tide_lm
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tide_lm.run import checkpoint
from tide_lm.run.settings import RunConfig
from tide_lm.training.dry_run import dry_run

needs_proc = pytest.mark.skipif(not Path("/proc").exists(), reason="processes are looked up in /proc")
STEPS = 12
EXPORTED = "export/model.safetensors"


@pytest.fixture(scope="module")
def settings(prepared):
    return [
        "recipe=paper",  # whose rows move less, so that roundings grow less; and they decay
        "model.memory_values=true",
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


def command(processes, settings, run, *more, allow_changes=False) -> list[str]:
    """`tide-lm train`, by torchrun if there are processes, with more options for it."""
    chosen = [argument for setting in settings for argument in ("--set", setting)]
    start = [sys.executable, "-m"]
    if processes:
        machines = more if any("nnodes" in option for option in more) else ("--standalone", *more)
        start += ["torch.distributed.run", f"--nproc-per-node={processes}", *machines, "-m", "--"]
    end = ["--allow-changes"] if allow_changes else []
    return [*start, "tide_lm", "train", *chosen, "--run", str(run), "--resume", *end]


def train(processes, settings, run, **more) -> subprocess.CompletedProcess | Done:
    call = command(processes, settings, run, **more)
    if processes:
        done = subprocess.run(call, capture_output=True, text=True, timeout=600)
    else:
        done = tide_lm(*call[call.index("train") :])
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
def alone(settings, made_once):
    """The run of one process, without torchrun: only to be read."""
    return made_once("alone", lambda folder: train(0, settings, folder / "run")) / "run"


@pytest.fixture(scope="module")
def pair(settings, made_once):
    """The run of two processes: only to be read."""

    def make(folder):
        done = train(2, settings, folder / "run")
        # The first process alone tells.
        assert done.stderr.count("exported to") == done.stdout.count("validation loss") == 1

    return made_once("pair", make) / "run"


@pytest.mark.slow
def test_a_group_of_one_trains_as_a_process_alone_and_each_goes_on_with_the_others_run(
    alone, settings, tmp_path
):
    """Do all that several processes do, but for what they send one another."""
    run, names = tmp_path / "run", ("RANK", "LOCAL_RANK", "MASTER_PORT")
    group = {
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        **dict.fromkeys(names, "0"),
    }
    call = command(0, settings, run)
    done = process(*call[call.index("train") :], env={**os.environ, **group, "TORCHELASTIC_RUN_ID": "test"})
    assert done.returncode == 0, done.stderr
    assert_same_training(run, alone)
    assert [path.name for path in checkpoint.at(run / "checkpoints", STEPS).glob("*.safetensors")] == [
        "shard-00001-model-00001-of-00001.safetensors"
    ]
    checkpoint.remove_after(run / "checkpoints", 8)
    shutil.rmtree(run / "export")
    assert "resumed from step 8" in train(0, settings, run).stderr
    assert_same_training(run, alone)


@pytest.mark.torchrun
def test_two_processes_have_the_losses_of_one(alone, pair):
    assert_same_training(pair, alone)
    assert metrics(pair)[-1]["loss"] < metrics(pair)[0]["loss"] - 0.3


@pytest.mark.torchrun
def test_rows_of_pairs_come_from_their_owners_too(settings, tmp_path):
    pairs = [*settings, "model.memory_pairs=true"]
    train(0, pairs, tmp_path / "alone")
    train(2, [*pairs, "train.micro_batch=1"], tmp_path / "pair")
    assert_same_training(tmp_path / "pair", tmp_path / "alone")
    assert load_file(tmp_path / "pair" / EXPORTED)["model.memory.weight"].shape == (2 * 331, 1, 128)


@pytest.mark.torchrun
def test_each_process_writes_its_own_half_of_a_checkpoint(pair):
    shards = sorted(checkpoint.at(pair / "checkpoints", STEPS).glob("*.safetensors"))
    rows = []
    for shard in shards:
        with safe_open(shard, "pt") as file:
            for name in ("model.model.memory.weight", "tables.exp_avg", "tables.last"):
                rows.append((name, file.get_slice(name).get_shape()[0]))
    assert [count for name, count in rows if name == "tables.last"] == [166, 165]
    assert len({count for _, count in rows}) == len(shards) == 2


@pytest.mark.torchrun
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


@pytest.mark.torchrun
def test_micro_batches_of_two_processes_add_up(alone, settings, tmp_path):
    train(2, [*settings, "train.micro_batch=1"], tmp_path / "run")
    assert_same_training(tmp_path / "run", alone)


@pytest.mark.torchrun
@pytest.mark.parametrize(("processes", "begun_by"), [(0, "pair"), (2, "alone")])
def test_a_run_goes_on_with_another_number_of_processes(
    alone, settings, tmp_path, request, processes, begun_by
):
    run = tmp_path / "run"
    shutil.copytree(request.getfixturevalue(begun_by), run)
    checkpoint.remove_after(run / "checkpoints", 4)
    shutil.rmtree(run / "export")
    assert "resumed from step 4" in train(processes, settings, run).stderr
    assert_same_training(run, alone)


@pytest.mark.torchrun
def test_settings_for_speed_and_memory_work_on_three_processes(settings, tmp_path):
    """In bfloat16 weights and rows travel rounded, so losses are near. At the end a run is exported that was
    validated last, and wrote no sample."""
    settings = [
        *settings,
        "data.sequence=8",  # as some CPUs take long in bfloat16
        "train.batch=6",
        "train.micro_batch=1",
        "train.dtype=bfloat16",
        "train.activation_checkpointing=true",
        "optim.table_moments=bfloat16",
        "train.validate_every=0",
        "train.validation_sequences=2",  # fewer than processes
        "train.checkpoint_every=1",
        "optim.warmup_steps=0",
    ]
    losses = []
    for processes in (0, 3):
        run = tmp_path / str(processes)
        train(processes, [*settings, "train.steps=2"], run)
        losses.append([record["loss"] for record in metrics(run)])
        checkpoint.remove_after(run / "checkpoints", 1)
        shutil.rmtree(run / "export")
        train(processes, [*settings, "train.steps=1"], run, allow_changes=True)
        assert load_file(run / EXPORTED)["model.memory.weight"].dtype == torch.float32
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.torchrun
@needs_proc
def test_a_process_that_is_killed_ends_the_others_and_the_restart_goes_on(pair, settings, tmp_path):
    """Twice: by hand after the last was killed, and by torchrun itself after the first was."""
    run = tmp_path / "run"
    assert kill_one(command(2, settings, run), run, at_step=2, victim=-1) != 0
    assert kill_one(command(2, settings, run, "--max-restarts=1"), run, at_step=6, victim=0) == 0
    assert metrics(run) == metrics(pair)
    weights, expected = load_file(run / EXPORTED), load_file(pair / EXPORTED)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def kill_one(call, run, at_step, victim) -> int:
    """Kills a process of a job after a step; the status of the job, all of whose processes have ended."""
    begun = time.time()
    job = subprocess.Popen(call, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: last_step(run, begun) >= at_step, job)
        workers = children(job.pid)
        assert len(workers) == 2
        os.kill(workers[victim], signal.SIGKILL)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), job)
        return job.wait(600)
    finally:
        job.kill()


@pytest.mark.torchrun
@needs_proc
def test_another_machine_can_take_the_place_of_one_that_dies(pair, settings, tmp_path):
    """Two agents of torchrun stand for two machines."""
    run = tmp_path / "run"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    where = "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=test"
    meeting = "--nnodes=2", *where, "--max-restarts=3"
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def start() -> subprocess.Popen:
        call = command(1, settings, run, *meeting)
        return subprocess.Popen(call, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment)

    def meets() -> bool:
        with socket.socket() as caller:
            return caller.connect_ex(("localhost", port)) == 0

    agents = [start()]
    try:
        wait_for(meets, agents[0])  # so that they meet on the machine that stays
        agents.append(start())
        wait_for(lambda: last_step(run) >= 5, agents[0])
        for pid in (*children(agents[1].pid), agents[1].pid):
            os.kill(pid, signal.SIGKILL)
        agents.append(start())
        assert agents[0].wait(600) == agents[2].wait(600) == 0
    finally:
        for agent in agents:
            agent.kill()
    assert metrics(run) == metrics(pair)


def wait_for(condition, job, seconds=600) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError, ValueError, IndexError):
            if condition():
                return
        time.sleep(0.05)
    raise AssertionError(f"nothing happened in {seconds} s; the job's status is {job.poll()}")


def last_step(run, since=0.0) -> int:
    """The newest step in what was written since a time."""
    path = run / "metrics.jsonl"
    return metrics(run)[-1]["step"] if path.stat().st_mtime > since else 0


def children(pid) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.torchrun
def test_a_signal_to_torchrun_saves_first(settings, tmp_path):
    run, many = tmp_path / "run", [*settings, "train.steps=1000"]
    job = subprocess.Popen(command(2, many, run), stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: last_step(run) >= 2, job)
        job.send_signal(signal.SIGTERM)
        told = job.communicate(timeout=600)[1]
    finally:
        job.kill()
    stopped = int(re.search(r"stopped by a signal at step (\d+)", told)[1])
    assert checkpoint.steps(run / "checkpoints")[-1] == stopped


@pytest.mark.torchrun
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.batch=5", "multiple of 2"),
        ("train.btch=5", "unknown"),
    ],
)
def test_what_several_processes_cannot_do_is_said_once(settings, tmp_path, setting, message):
    run = tmp_path / "run"
    done = subprocess.run(command(2, [*settings, setting], run), capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert done.stderr.count(message) == 1, done.stderr
    assert not run.exists()


def test_a_dry_run_tells_what_each_process_takes(settings):
    config = RunConfig.load(None, settings)
    whole, share = (dry_run(config, processes) for processes in (1, 2))
    assert share["bytes"]["moments"] == whole["bytes"]["moments"] / 2
    assert share["bytes"]["activations"] == pytest.approx(whole["bytes"]["activations"] / 2, rel=0.1)
    assert whole["first_batch"] == share["first_batch"]


@pytest.mark.torchrun
def test_a_dry_run_of_two_processes_tells_it_once(settings, tmp_path):
    call = [*command(2, settings, tmp_path / "run"), "--dry-run", "--json"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=600)
    told, expected = json.loads(done.stdout), dry_run(RunConfig.load(None, settings), 2)
    assert told.pop("time").keys() == expected.pop("time").keys()  # estimated from a speed that is measured
    assert told == expected
    assert not (tmp_path / "run").exists()
