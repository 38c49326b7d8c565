"""`tide-lm prepare` as a user calls it, and as it is killed."""

import json
import os
import shlex
import signal
import subprocess
import time
from pydoc_data.topics import topics

import numpy as np
import pytest
from command import call, tide_lm
from data.in_this_process import InThisProcess

from tide_lm.data.shards import Manifest, TokenSplit

IN_TASKS = ["--out", "out", "--executor", "local", "--tasks", 2]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    words = np.array(["every", "layer", "knows", "the", "token", "beneath", "context"])
    draw = np.random.default_rng(0)
    lines = [json.dumps({"body": " ".join(draw.choice(words, 50))}) for _ in range(200)]
    path.write_text("\n".join(lines))
    return path


def test_it_prints_what_it_made(text, tmp_path, monkeypatch):
    monkeypatch.setattr("tide_lm.cli.progress.SECONDS_BEFORE_A_LINE", 0)
    options = ["--train-tokenizer", 300, "--validation", 0.1, "--text-field", "body"]
    done = tide_lm("prepare", text, "--out", tmp_path / "a", *options, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == f"Preparing {text} ..."
    result = json.loads(done.stdout)
    assert result["tokens"]["train"] == len(TokenSplit(tmp_path / "a"))
    assert sum(result["documents"].values()) == 200
    table = tide_lm("prepare", text, "--out", tmp_path / "b", *options).stdout
    assert result["sha256"] in table
    assert f"{result['documents']['train']} train" in table
    assert (tmp_path / "a" / "manifest.json").read_bytes() == (tmp_path / "b" / "manifest.json").read_bytes()


def test_one_short_text_is_enough_for_the_command_that_is_named_next(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a text.txt").write_text("".join(topics.values())[:20_000])
    done = tide_lm("prepare", "a text.txt", "--out", "my data", "--train-tokenizer", 300)
    assert done.returncode == 0, done.stderr
    held_out, following = done.stderr.splitlines()
    tokens = Manifest.read(tmp_path / "my data").tokens("validation")
    assert held_out.startswith(f"Held out to validate on: {tokens:,} tokens, the end of a document; ")
    assert following.startswith("Next: tide-lm train --run 'runs/my data' --set 'data.path=my data' ")
    assert "model.preset=tide-4e-tiny --set model.vocab_size=300 --set train.steps=" in following
    trained = tide_lm(*shlex.split(following)[2:], "--set", "train.steps=1", "--json")
    assert trained.returncode == 0, trained.stderr
    assert json.loads(trained.stdout)["step"] == 1


@pytest.fixture(params=["here", pytest.param("datatrove", marks=pytest.mark.cluster)])
def executor(request, monkeypatch):
    """Runs tasks: datatrove's own, or what stands in for it."""
    if request.param == "here":
        monkeypatch.setattr("tide_lm.data.distributed._executor", lambda name: InThisProcess)


@pytest.mark.usefixtures("executor")
def test_an_executor_prints_the_same(text, tmp_path):
    options = ["--train-tokenizer", 300, "--validation", 0.1, "--text-field", "body", "--json"]
    usual = tide_lm("prepare", text, "--out", tmp_path / "a", *options)
    in_tasks = ["--executor", "local", "--tasks", 2, "--executor-option", "workers=1"]
    done = tide_lm("prepare", text, "--out", tmp_path / "b", *options, *in_tasks)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {**json.loads(usual.stdout), "folder": str(tmp_path / "b")}
    assert (tmp_path / "a" / "manifest.json").read_bytes() == (tmp_path / "b" / "manifest.json").read_bytes()


@pytest.mark.usefixtures("executor")
def test_a_failing_task_is_one_clear_error(text, tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    options = ["--tokenizer", tmp_path / "tokenizer", "--validation", 0, "--executor", "local", "--tasks", 2]
    done = tide_lm("prepare", text, "--out", tmp_path / "out", *options)  # without its --text-field
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: the stage 'encode' failed (")
    assert "has no field 'text', only 'body'" in last
    assert str(tmp_path / "out.work" / "logs" / "encode") in last
    assert not (tmp_path / "out").exists()


def test_the_builtin_text_is_the_default(tmp_path, monkeypatch):
    """Leave its largest part, the docstrings, to the demo."""
    monkeypatch.setattr("tide_lm.data.builtin.source_files", list)
    done = tide_lm(
        "prepare", "--out", tmp_path / "out", "--train-tokenizer", 258, "--validation", 0.1, "--json"
    )
    assert done.returncode == 0, done.stderr
    assert sum(json.loads(done.stdout)["documents"].values()) == len(topics)


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["nowhere"], 2, "Missing option '--out'"),
        (
            ["--out", "out", "--tokenizer", "llama3", "--train-tokenizer", 300],
            2,
            "--tokenizer and --train-tokenizer are both given",
        ),
        (["--out", "out", "--train-tokenizer", 257], 2, "258"),
        (["--out", "out", "--tasks", 2], 2, "are for --executor: add it"),
        (["--out", "out", "--executor-option", "workers=2"], 2, "are for --executor: add it"),
        (["--out", "out", "--executor", "ray"], 2, "--executor ray needs the number of tasks: add --tasks N"),
        (
            ["--out", "out", "--executor", "pbs", "--tasks", 2],
            2,
            "'pbs' is unknown: use one of local, ray, slurm",
        ),
        ([*IN_TASKS, "--executor-option", "workers"], 2, "'workers' is not KEY=VALUE"),
        ([*IN_TASKS, "--executor-option", "worker=2"], 2, "no option 'worker': did you mean 'workers'?"),
        (["--out", "out", "--executor", "slurm", "--tasks", 2], 2, "slurm needs time and partition: add"),
        (["nowhere", *IN_TASKS], 1, "error: there is no"),
        (["nowhere", "--out", "out"], 1, "error: there is no 'nowhere'"),
    ],
)
def test_a_wrong_call_says_why(tmp_path, monkeypatch, options, status, message):
    monkeypatch.chdir(tmp_path)
    done = tide_lm("prepare", *options)
    assert done.returncode == status
    assert message in done.said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT], ids=["kill", "interrupt"])
def test_killed_at_work_it_leaves_nothing_under_its_name_and_no_process(text, tmp_path, tokenizer, by):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    line = text.read_text().split("\n")[0] + "\n"
    text.write_text(line * 300_000)  # half a minute of work
    out = tmp_path / "work" / "out"
    options = ["--text-field", "body", "--tokenizer", tmp_path / "tokenizer"]
    command = call("prepare", text, "--out", out, *options)
    child = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not any(file.stat().st_size for file in out.parent.glob(".out.tmp/train-00000.bin")):
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(by)
    assert child.wait(600) != 0
    assert not out.exists()
    if by == signal.SIGINT:
        assert not list(out.parent.iterdir())
    while _group_lives(child.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
