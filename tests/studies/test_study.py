"""The study's ways on a few documents and tiny models: text to shards, runs that are kept, and resumed."""

import json
import lzma
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import typer

from studies import data, runner
from studies.__main__ import _named
from studies.figures import opened
from studies.plan import Run, plan
from studies.results import RUNS, Kept, Study, read
from studies.runner import Places, run_all
from tide_lm.data.shards import TokenSplit
from tide_lm.report.catalogue import FIGURES

FIELDS = {"model", "recipe", "size", "k", "seed", "tokens", "parameters", "val_loss", "loss_by_decile"}
CHOICES = {"text": ["a", "b", "c", "d"], "label": ["A", "B", "C", "D"]}
BENCHMARKS = {
    "arc_challenge_test": {"question": "Why?", "choices": CHOICES, "answerKey": "A"},
    "arc_easy_test": {"question": "Why?", "choices": CHOICES, "answerKey": "B"},
    "boolq_validation": {"passage": "It is.", "question": "is it", "label": 1},
    "hellaswag_validation": {
        "activity_label": "Work",
        "ctx_a": "They",
        "ctx_b": "go",
        "endings": ["on", "off"],
        "label": "0",
    },
    "lambada_openai_test": {"text": "It is what it is"},
    "openbookqa_test": {"question_stem": "It is", "choices": CHOICES, "answerKey": "C"},
    "piqa_validation": {"goal": "Open", "sol1": "push", "sol2": "pull", "label": 0},
    "sciq_validation": {
        "support": "It is.",
        "question": "Is it?",
        **{f"distractor{i}": "no" for i in (1, 2, 3)},
        "correct_answer": "yes",
    },
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    texts = [topics[name][:800] for name in sorted(topics)[:40]]
    for name, part in {"a_train_00": texts[:20], "b_train": texts[20:34], "a_valid": texts[34:]}.items():
        with lzma.open(folder / f"{name}.jsonl.xz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in part)
    return folder


@pytest.fixture(scope="module")
def places(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    data.prepare(corpus, folder / "data", vocabulary=600, tokenizer=None)
    return Places(folder / "data", folder / "shared", folder / "scratch", folder / "kept")


def stand_in(places, corpus, patch):
    """Put a text and a record of each benchmark in the place of the shared data."""
    (places.shared / "benchmarks").mkdir(parents=True, exist_ok=True)
    for name, record in BENCHMARKS.items():
        (places.shared / "benchmarks" / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
    patch.setattr(runner, "WORDS", ("the",))
    patch.setattr(runner, "TEXTS", {"valid": str(corpus / "a_valid.jsonl.xz")})


@pytest.fixture
def shared_data(places, corpus, monkeypatch):
    stand_in(places, corpus, monkeypatch)


@pytest.fixture(scope="module")
def done(places, corpus):
    """A run that is kept, for tests that only read it."""
    run = Run("tide", "best", "tiny", 2)
    with pytest.MonkeyPatch.context() as patch:
        stand_in(places, corpus, patch)
        assert run_all([run], places, minutes=60, log=print) == 0
    return run


def test_training_and_validation_are_files_of_their_own(places):
    train, validation = (TokenSplit(places.data, split) for split in ("train", "validation"))
    assert train.manifest.source["documents"] == {"train": 34, "validation": 6}
    assert len(train) > 4 * len(validation) > 0


def test_a_trained_tokenizer_can_be_used_again(places, corpus, tmp_path):
    again = data.prepare(corpus, tmp_path / "data", 600, str(places.data / "tokenizer"))
    assert again.splits == TokenSplit(places.data, "train").manifest.splits


def test_a_run_is_made_once_and_kept_without_weights(done, places):
    ((kept,), told) = read(places.kept, done.slug), []
    assert kept.record.keys() >= FIELDS
    assert kept.record["provenance"]["seed"] == 0
    assert (kept.record["model"], kept.record["recipe"], kept.record["k"]) == ("tide", "best", 2)
    assert 0 < kept.record["val_loss"] < 7
    assert kept.curve[-1] == (kept.record["tokens"], pytest.approx(kept.record["val_loss"]))
    assert kept.texts.keys() == {"valid"}
    assert not (places.scratch / done.slug).exists()
    assert run_all([done], places, minutes=60, log=told.append) == 0
    assert not told


@pytest.mark.slow
def test_bases_and_controls_are_runs_too(places, shared_data, tmp_path):
    places = replace(places, scratch=tmp_path / "scratch", kept=tmp_path / "kept")
    runs = [
        Run("base", "paper", "tiny", 0),
        Run("input-only", "paper", "tiny", 2),
    ]
    told = []
    assert run_all(runs, places, minutes=60, log=told.append) == 0
    records = [run.record for run in Study(places.kept).runs]
    assert [record["model"] for record in records] == ["base", "input-only"]
    for record in records:
        assert record.keys() >= FIELDS
        assert 0 < record["val_loss"] < 7
    assert not list(places.scratch.iterdir())
    told.clear()
    assert run_all(runs, places, minutes=60, log=told.append) == 0
    assert not told


@pytest.mark.slow
@pytest.mark.parametrize(("model", "k"), [("base", 0), ("tide", 2)])
def test_all_figures_of_the_paper_can_be_drawn_of_runs_that_were_looked_into(model, k, places, shared_data):
    run = Run(model, "paper", "tiny", k, seed=1, diagnose=True)
    run_all([run], places, minutes=60, log=print)
    (kept,) = opened(read(places.kept, run.slug))
    missing = {name: figure.missing(kept) for name, figure in FIGURES.items()}
    of_memory = {name for name, figure in FIGURES.items() if figure.of_memory}
    assert {name for name, reason in missing.items() if reason} == (set() if k else of_memory)


@pytest.mark.slow
def test_a_look_that_was_cut_off_goes_on_where_it_was(places, shared_data, monkeypatch):
    def cut_off(*_, **__):
        raise KeyboardInterrupt

    run = Run("base", "cut off", "tiny", 0, diagnose=True)
    with monkeypatch.context() as patched:
        patched.setattr(runner.zero_shot, "score", cut_off)
        with pytest.raises(KeyboardInterrupt):
            run_all([run], places, minutes=60, log=print)
    monkeypatch.setattr(runner, "analyze", None)
    assert run_all([run], places, minutes=60, log=print) == 0
    (kept,) = read(places.kept, run.slug)
    assert kept.tasks


def test_what_was_made_with_other_settings_is_named(done, places):
    changed = replace(done, settings={**done.settings, "optim.max_lr": 0.01})
    with pytest.raises(ValueError, match=r"optim.max_lr: 0.003 -> 0.01\): remove its line, or .*--kept"):
        run_all([changed], places, 60, log=print)
    told = []
    assert run_all([done, replace(done, recipe="as long")], places, minutes=0.001, log=told.append) == 1
    assert not told  # since the one that is kept took longer


def test_a_record_that_names_what_its_model_is_now_is_read(done, places):
    (kept,) = read(places.kept, done.slug)
    model = {**kept.record["config"]["model"], "memory_own_block": True, "memory_gate": False}
    earlier = Kept({**kept.record, "config": {**kept.record["config"], "model": model}})
    assert earlier.config == kept.config


def test_a_run_may_have_half_of_the_text(places):
    whole = Run("tide", "paper", "tiny", 2)
    config, half = (run.config(places.data, gpu=False) for run in (whole, replace(whole, share=0.5)))
    assert half.train.steps == config.train.steps // 2
    assert half.optim.warmup_steps == half.train.steps // 10


def test_a_run_that_would_last_too_long_is_left(places):
    assert run_all([Run("base", "late", "tiny", 0)], places, minutes=0, log=print) == 1


SMALL, LOOK, MEDIUM = (
    Run("base", "paper", "small", 0),
    Run("base", "paper", "small", 0, diagnose=True),
    Run("base", "paper", "medium", 0),
)


@pytest.mark.parametrize(
    ("first", "then", "left"),
    [(SMALL, LOOK, 1), (LOOK, SMALL, 0), (SMALL, MEDIUM, 1), (MEDIUM, LOOK, 0), (SMALL, SMALL, 1)],
)
def test_a_run_takes_as_long_as_those_like_it_or_lighter(first, then, left, places, monkeypatch):
    """There are 50 s left after a run of 60 s."""
    now = [0.0]

    def one(run, places, log):
        now[0] += 60
        return {"val_loss": 1.0, "seconds": 60}

    monkeypatch.setattr(runner, "run_one", one)
    monkeypatch.setattr(runner.time, "monotonic", lambda: now[0])
    runs = [replace(first, recipe="first"), replace(then, recipe="then")]
    assert run_all(runs, places, minutes=110 / 60, log=print) == left


def test_a_run_that_another_process_is_at_is_left_to_it(places):
    run, told = Run("base", "busy", "tiny", 0), []
    with places.lock(run):
        assert run_all([run], places, minutes=60, log=told.append) == 1
    assert told == ["tiny base 0e, busy, seed 0 is left to another process"]


def test_what_is_missing_is_named_before_training(places, tmp_path):
    without = replace(places, shared=tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"there is no .*nothing/.*name the folder that holds benchmarks"):
        run_all([Run("base", "no texts", "tiny", 0)], without, minutes=60, log=print)
    assert not list(places.scratch.glob("*no-texts*/*"))


def test_a_record_that_is_cut_off_is_named(done, places, tmp_path):
    line = (places.kept / RUNS).read_text()
    (tmp_path / RUNS).write_text(line + line[:99])
    with pytest.raises(ValueError, match=r"last line of .*runs\.jsonl is cut off: remove"):
        run_all([done], replace(places, kept=tmp_path), 60, log=print)


def test_processes_side_by_side_write_logs_and_the_worst_status_is_told(tmp_path):
    """The first to make a folder ends with 0, and the other with 2."""
    script = (
        "import os, sys\nprint('begun')\ntry:\n    os.mkdir(sys.argv[1])\nexcept OSError:\n    sys.exit(2)"
    )
    told, logs = [], tmp_path / "logs"
    assert (
        runner.side_by_side(2, [sys.executable, "-c", script, str(tmp_path / "made")], logs, told.append) == 2
    )
    assert {log.name: log.read_text() for log in logs.iterdir()} == {
        f"process-{number}.log": "begun\n" for number in range(2)
    }
    assert told == [f"2 processes write to {logs}/process-*.log"]


@pytest.mark.slow
def test_a_wrong_call_side_by_side_is_in_the_logs(tmp_path):
    command = [sys.executable, "-m", "studies", "run", ".", "--only", "("]
    assert runner.side_by_side(2, command, tmp_path, print) == 2
    logs = [log.read_text() for log in tmp_path.glob("process-[01].log")]
    assert len(logs) == len(list(tmp_path.iterdir())) == 2
    assert all("is no regular expression" in log for log in logs)


def test_sigterm_reaches_processes_side_by_side(tmp_path):
    """Wait until the signal is listened to: before, it would end this process."""
    before, ended = signal.getsignal(signal.SIGTERM), threading.Event()

    def stop():
        while signal.getsignal(signal.SIGTERM) is before:
            if ended.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    try:
        assert runner.side_by_side(2, command, tmp_path, print) == 128 + signal.SIGTERM
    finally:
        ended.set()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report", "--results", "nothing"], "Error: nothing/runs.jsonl has no run of the base"),
        pytest.param(["run", "nothing", "--data", "nowhere"], "Error: ", marks=pytest.mark.slow),
    ],
)
def test_errors_are_one_line(words, said, tmp_path):
    command = [sys.executable, "-m", "studies", *words]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 1
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("only", "said"), [("(", "is no regular expression"), ("nothing", "finds none")])
def test_an_expression_that_finds_nothing_is_named(only, said):
    with pytest.raises(typer.BadParameter, match=re.escape(f"--only {only!r} {said}")):
        _named(plan(), only)


def test_runs_are_chosen_by_an_expression():
    assert {run.seed for run in _named(plan(), "tide 8e, best, seed [12]$")} == {1, 2}


def test_the_plan_names_each_run_once_and_all_fit_their_settings(places):
    slugs = [run.slug for run in plan()]
    assert len(set(slugs)) == len(slugs)
    seeds = {(run.model, run.recipe, run.k): set() for run in plan() if run.size == "small"}
    for run in plan():
        if run.size == "small":
            seeds[run.model, run.recipe, run.k].add(run.seed)
    for kind in (("base", "paper", 0), ("tide", "paper", 8), ("tide", "best", 8), ("input-only", "best", 8)):
        assert seeds[kind] == {0, 1, 2}
    assert {run.k for run in plan() if (run.model, run.recipe) == ("tide", "best")} == {2, 4, 8, 16, 24}
    assert len({run.size for run in plan()}) >= 2
