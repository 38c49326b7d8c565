"""A run that is killed, stopped or damaged ends as if nothing had happened."""

import json
import os
import pty
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import pytest
import torch
from command import Done, call, process, tide_lm
from disk import files_of_at_most
from safetensors.torch import load_file

from tide_lm.cli import progress
from tide_lm.data.shards import Manifest
from tide_lm.run.settings import MANY_EPOCHS, RunConfig
from tide_lm.training.dry_run import activation_bytes, dry_run
from tide_lm.training.trainer import Trainer

STEPS = 24


def settings_for(prepared) -> list[str]:
    return [
        f"data.path={json.dumps(str(prepared))}",
        "data.sequence=32",
        "model.preset=tide-2e-tiny",
        "model.vocab_size=320",
        f"train.steps={STEPS}",
        "train.batch=4",
        "train.micro_batch=2",
        "train.log_every=1",
        "train.validate_every=8",
        "train.validation_sequences=4",
        "train.checkpoint_every=5",
        "optim.warmup_steps=2",
        "optim.max_lr=0.003",
        "train.record_gradients=true",
    ]


@pytest.fixture
def settings(prepared):
    return settings_for(prepared)


def arguments(settings, run, *more) -> list[str]:
    chosen = [argument for setting in settings for argument in ("--set", setting)]
    return ["train", *chosen, "--run", str(run), *more]


def train(settings, run, *more) -> Done:
    return tide_lm(*arguments(settings, run, *more))


@pytest.fixture
def at_step(monkeypatch):
    """Returns `at_step(step, act)`, which has `act` called in a training once so many steps are done."""

    def arrange(step, act) -> None:
        @contextmanager
        def watched(*options, **named):
            with progress.training_progress(*options, **named) as (tell, advance):
                yield tell, lambda done: (advance(done), act() if done == step else None)

        monkeypatch.setattr("tide_lm.cli.train.training_progress", watched)

    return arrange


@contextmanager
def running(settings, run, until: str):
    """A trainer in a process of its own, once it has written a line that begins as given."""
    trainer = subprocess.Popen(call(*arguments(settings, run)), stderr=subprocess.PIPE, text=True)
    try:
        assert any(line.startswith(until) for line in trainer.stderr), f"it never came to {until!r}"
        yield trainer
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stderr.close()


def metrics(run) -> list[dict]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record.pop("timing")
    return records


def assert_same_end(run, other) -> None:
    assert metrics(run) == metrics(other)
    for name in (
        "checkpoints/00000024/model-00001-of-00001.safetensors",
        "export/model.safetensors",
        "results/gradients.safetensors",
    ):
        found, expected = load_file(run / name), load_file(other / name)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)


@pytest.fixture(scope="module")
def whole_run(prepared, made_once):
    """An uninterrupted run to compare with: only to be read, as other workers do."""

    def make(folder) -> None:
        done = train(settings_for(prepared), folder / "run")
        assert done.returncode == 0, done.stderr

    return made_once("whole-run", make) / "run"


def test_a_run_learns_and_leaves_all_its_files(whole_run):
    records = metrics(whole_run)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    assert records[-1]["tokens"] == STEPS * 4 * 32
    validation = records[-1]["validation"]
    weighted = [
        loss * tokens
        for loss, tokens in zip(validation["loss_by_decile"], validation["tokens_by_decile"], strict=True)
        if tokens
    ]
    unbinned = validation["unbinned"]
    total = sum(weighted) + (unbinned["loss"] or 0) * unbinned["tokens"]
    assert total / validation["tokens"] == pytest.approx(validation["loss"])
    assert sorted(path.name for path in (whole_run / "checkpoints").iterdir()) == ["00000020", "00000024"]


def test_what_people_watch_is_written(whole_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(whole_run / "tensorboard")).Reload()
    losses = {event.step: event.value for event in events.Scalars("loss")}
    assert losses[STEPS] == pytest.approx(metrics(whole_run)[-1]["loss"])
    assert {"validation/common/loss", "validation/loss_by_decile/9"} <= set(events.Tags()["scalars"])
    assert "sample/text_summary" in events.Tags()["tensors"]
    card = (whole_run / "export" / "README.md").read_text()
    validation = json.loads((whole_run / "results" / "validation.json").read_text())
    assert f"{validation['loss']:.4f}" in card
    assert validation["provenance"]["seed"] == 0
    assert isinstance(metrics(whole_run)[-1]["sample"], str)


def test_the_loss_of_every_step_is_kept_however_few_lines_are_logged(settings, tmp_path):
    config = RunConfig.load(
        None, [*settings, "train.log_every=10", "train.steps=13", "train.validate_every=13"]
    )
    Trainer(config, tmp_path / "run", print).train()
    found = [(line["step"], len(line["losses"])) for line in metrics(tmp_path / "run")]
    assert found == [(5, 5), (10, 5), (13, 3)]  # a checkpoint at 5
    last = metrics(tmp_path / "run")[-1]
    assert last["losses"][-1] == pytest.approx(last["loss"], abs=1e-5)


def test_no_loss_is_lost_where_a_run_stops_and_goes_on(settings, tmp_path, at_step):
    rarely = [*settings, "train.log_every=10", "train.steps=13", "train.validate_every=13"]
    at_step(6, lambda: signal.raise_signal(signal.SIGTERM))
    assert train(rarely, tmp_path / "run").returncode == 128 + signal.SIGTERM
    assert train(rarely, tmp_path / "run", "--resume").returncode == 0
    found = [(line["step"], len(line["losses"])) for line in metrics(tmp_path / "run")]
    assert found == [(5, 5), (7, 2), (10, 3), (13, 3)]


def test_the_export_opens_with_transformers(whole_run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(whole_run / "export")
    ids = AutoTokenizer.from_pretrained(whole_run / "export")("The statement", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_run_killed_at_a_random_step_ends_the_same(settings, whole_run, tmp_path, seed):
    run, last = tmp_path / "run", random.Random(seed).randint(3, STEPS - 2)
    with running(settings, run, f"step {last}/") as victim:
        victim.send_signal(signal.SIGKILL)
        assert victim.wait() == -signal.SIGKILL
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "los')  # the line that was being written
    done = train(settings, run, "--resume")
    assert done.returncode == 0, (last, done.stderr)
    assert_same_end(run, whole_run)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_run_goes_on(settings, whole_run, tmp_path, at_step, number):
    run, before = tmp_path / "run", [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    at_step(6, lambda: signal.raise_signal(number))
    stopped = train(settings, run)
    assert stopped.returncode == 128 + number
    assert "stopped by a signal at step 7" in stopped.stderr
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["00000005", "00000007"]
    assert not (run / "export").exists()
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before
    if number == signal.SIGTERM:
        done = train([], run, "--resume")  # needs no settings
        assert "resumed from step 7" in done.stderr
        assert_same_end(run, whole_run)


def test_a_second_interrupt_does_not_wait(settings, tmp_path):
    def advance(step) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    trainer = Trainer(RunConfig.load(None, settings), tmp_path / "run", print, advance)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.step == 1
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_told_to_end_saves_and_says_which_signal(settings, whole_run, tmp_path, number):
    run = tmp_path / "run"
    with running(settings, run, "step 7/") as victim:
        victim.send_signal(number)
        assert "stopped by a signal at step" in victim.stderr.read()
        assert victim.wait() == 128 + number
    assert "resumed from step" in train([], run, "--resume").stderr
    assert_same_end(run, whole_run)


def test_a_damaged_checkpoint_is_passed_over(settings, whole_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    shutil.rmtree(run / "export")
    weights = run / "checkpoints" / "00000024" / "model-00001-of-00001.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = train(settings, run, "--resume")
    assert done.returncode == 0, done.stderr
    assert re.search("00000024 is damaged .*model-00001-of-00001.safetensors", done.stderr)
    assert "resumed from step 20" in done.stderr
    assert_same_end(run, whole_run)


def test_an_existing_run_and_changed_settings_are_refused(settings, whole_run):
    again = train(settings, whole_run)
    assert again.returncode == 1
    assert "holds a run already" in again.stderr
    changed = train([*settings, "optim.max_lr=0.004"], whole_run, "--resume")
    assert changed.returncode == 1
    assert "optim.max_lr: 0.003 -> 0.004" in changed.stderr
    fixed = train(["train.seed=1", "model.preset=base-tiny"], whole_run, "--resume", "--allow-changes")
    assert fixed.returncode == 1
    assert "model.preset: 'tide-2e-tiny' -> 'base-tiny'\n  train.seed: 0 -> 1" in fixed.stderr


def test_a_second_trainer_is_refused(settings, tmp_path, at_step):
    run, second = tmp_path / "run", []
    at_step(3, lambda: second.append(train([], run, "--resume")))
    first = train([*settings, "train.steps=4", "optim.warmup_steps=0"], run)
    assert first.returncode == 0, first.stderr
    assert second[0].returncode == 1
    assert "in use by another trainer" in second[0].stderr
    assert not (run / "lock").exists()


@pytest.mark.slow
def test_a_second_trainer_in_another_process_is_refused(settings, tmp_path):
    endless = [*settings, "train.steps=1000000"]
    with running(endless, tmp_path / "run", "step 1/"):
        second = train(endless, tmp_path / "run", "--resume")
    assert second.returncode == 1
    assert "in use by another trainer" in second.stderr


def test_accumulation_changes_no_gradient(settings, tmp_path):
    def first_steps(micro_batch: int) -> list[float]:
        config = RunConfig.load(None, [*settings, f"train.micro_batch={micro_batch}"])
        trainer = Trainer(config, tmp_path / str(micro_batch), print)
        return [value for _ in range(3) for value in _loss_and_norm(trainer)]

    assert first_steps(1) == pytest.approx(first_steps(4), rel=1e-4)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param("train.compile=true", marks=pytest.mark.slow),
        "train.dtype=bfloat16",
        "train.activation_checkpointing=true",
        "optim.clip_norm=0",
        "optim.table_moments=bfloat16",
    ],
)
def test_what_saves_time_or_memory_learns_the_same(settings, tmp_path, setting):
    expected = _losses([*settings, "optim.clip_norm=1000"] if "clip" in setting else settings, tmp_path)
    found = _losses([*settings, setting], tmp_path)
    assert found == pytest.approx(expected, rel=2e-3 if "bfloat16" in setting else 1e-5)


def test_where_rows_go_is_learned_as_with_dense_tables(settings, tmp_path):
    changed = [*settings, "model.memory_value_scale=5"]
    expected = _losses(changed, tmp_path, row_lazy=False)
    assert _losses(changed, tmp_path) == pytest.approx(expected, rel=1e-5)
    assert _losses(settings, tmp_path) != pytest.approx(expected, rel=1e-4)


def _losses(settings, folder, row_lazy=True) -> list[float]:
    config = RunConfig.load(None, [*settings, "train.record_gradients=false"])
    trainer = Trainer(config, folder / "run", print, row_lazy=row_lazy)
    return [_loss_and_norm(trainer)[0] for _ in range(4)]


def _loss_and_norm(trainer: Trainer) -> tuple[float, float]:
    record = trainer._train_step()
    trainer.step += 1
    return record["loss"], record["gradient_norm"]


def test_losses_that_are_not_finite_end_the_run_with_step_and_place(settings, tmp_path):
    config = RunConfig.load(None, [*settings, "train.checkpoint_every=2"])
    trainer = Trainer(config, tmp_path / "run", print)
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = float("nan")
    before = trainer.model.lm_head.weight.clone()
    with pytest.raises(ValueError, match=r"step 3 .*windows 8 to 11 .*3 times"):
        trainer.train()
    assert torch.equal(trainer.model.lm_head.weight, before)
    with pytest.raises(ValueError, match=r"step 3 .*3 times"):  # those before a checkpoint count too
        Trainer(config, tmp_path / "run", print, resume=True).train()
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])["loss"] is None


def test_one_batch_that_is_not_finite_is_left_out_of_weights_and_records(settings, tmp_path):
    told: list[str] = []
    trainer = Trainer(RunConfig.load(None, settings), tmp_path / "run", told.append)
    norm = trainer.model.model.norm.weight
    kept = norm.detach().clone()
    with torch.no_grad():
        norm[0] = float("nan")
    assert trainer._train_step()["loss"] is None
    assert re.search("step 1 .*nan.*windows 0 to 3 ", told[0])
    with torch.no_grad():
        norm.copy_(kept)
    trainer._train_step()
    assert trainer.non_finite == 0
    assert all(squared.isfinite().all() for squared in trainer.recorder.squared.values())


def test_a_finished_run_can_be_resumed_and_keeps_its_numbers(whole_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    shutil.rmtree(run / "export")
    done = train([], run, "--resume", "--json")
    assert done.returncode == 0, done.stderr
    before, after = (json.loads((path / "results/validation.json").read_text()) for path in (whole_run, run))
    before.pop("provenance"), after.pop("provenance")
    assert after == before
    assert json.loads(done.stdout)["loss"] == before["loss"]
    assert_same_end(run, whole_run)
    fewer = train(["train.steps=20"], run, "--resume", "--allow-changes")
    assert re.search("24.*train.steps.*20", fewer.stderr)


@pytest.mark.parametrize(
    ("stands", "told"), [(24, r"24 and is 34: .* stays at 3.00e-04; .*--from"), (20, r"falls from 4.34e-04,")]
)
def test_more_steps_never_raise_the_rate(whole_run, tmp_path, stands, told):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    for path in (run / "checkpoints").glob("*"):
        if int(path.name) > stands:
            shutil.rmtree(path)
    done = train(["train.steps=34", "train.keep=9"], run, "--resume", "--allow-changes")
    assert done.returncode == 0, done.stderr
    assert re.search(told, done.stderr)
    before, rates = ([record["learning_rate"] for record in metrics(path)] for path in (whole_run, run))
    assert rates[:stands] == before[:stands]
    assert rates[stands] == pytest.approx(before[min(stands, 23)])
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(3e-4)
    shutil.rmtree(run / "checkpoints" / "00000034")
    again = train([], run, "--resume")
    assert [record["learning_rate"] for record in metrics(run)] == rates
    assert "train.steps was" not in again.stderr


def test_a_run_can_be_ended_where_it_stands(whole_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    shutil.rmtree(run / "checkpoints" / "00000024")
    done = train(["train.steps=20"], run, "--resume", "--allow-changes", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 20
    assert metrics(run)[-1]["step"] == 20


def test_milestones_stay_and_left_overs_go(settings, tmp_path):
    left_over = tmp_path / "run" / "checkpoints" / ".00000003.tmp"
    left_over.mkdir(parents=True)
    done = train([*settings, "train.keep=1", "train.keep_every=7"], tmp_path / "run")
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["00000007", "00000014", "00000021", "00000024"]


def test_a_full_disk_ends_the_run_with_one_line_and_the_last_checkpoint(settings, whole_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    shutil.rmtree(run / "checkpoints" / "00000024")
    with files_of_at_most(1_000_000):
        done = train([], run, "--resume")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "File too large" in done.stderr
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["00000020"]


def test_a_checkpoint_knows_its_settings_whatever_is_done_to_the_runs(whole_run, settings, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    text = (run / "config.json").read_text()
    (run / "config.json").write_text(text.replace("tide-2e-tiny", "base-tiny"))
    edited = train([], run, "--resume")
    assert edited.returncode == 1
    assert "model.preset: 'tide-2e-tiny' -> 'base-tiny'" in edited.stderr
    (run / "config.json").write_text(text.replace('"batch": 4', '"batch": 8'))
    assert "train.batch: 4 -> 8" in train([], run, "--resume").stderr
    (run / "config.json").unlink()
    assert "holds a run already" in train(settings, run).stderr
    (run / "metrics.jsonl").unlink()
    resumed = train(settings, run, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert re.search(r"metrics\.jsonl .*24", resumed.stderr)


def test_a_run_goes_on_from_another_place_with_its_data_elsewhere(whole_run, prepared, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    shutil.rmtree(run / "checkpoints" / "00000024")
    shutil.copytree(prepared, tmp_path / "moved")
    done = train([f"data.path={json.dumps(str(tmp_path / 'moved'))}"], run, "--resume")
    assert done.returncode == 0, done.stderr
    assert_same_end(run, whole_run)


def test_a_damaged_record_of_metrics_is_named(whole_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    (run / "metrics.jsonl").write_text("x\n")
    done = train([], run, "--resume")
    assert done.returncode == 1
    assert re.search(r"metrics\.jsonl .*remove", done.stderr)


def test_what_is_not_there_cannot_be_resumed(tmp_path):
    done = train([], tmp_path / "run", "--resume")
    assert done.returncode == 2
    assert f"{tmp_path / 'run'} to resume" in done.said
    assert "--run" in done.said
    assert not (tmp_path / "run").exists()


def test_a_run_that_lost_its_settings_is_told_so(whole_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    (run / "config.json").unlink()
    assert re.search(r"config\.json.*settings again", train([], run, "--resume").said)


def test_a_full_disk_at_the_export_is_a_line(whole_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    shutil.rmtree(run / "export")
    with files_of_at_most(2_000_000):  # bytes: less than the weights, more than all else
        done = train([], run, "--resume")
    assert done.returncode == 1
    assert re.search(r"^error: cannot write .*/export: File too large", done.stderr, re.MULTILINE)
    assert not (run / "export").exists()
    assert not list(run.glob(".*.tmp"))


@pytest.mark.slow
def test_a_full_disk_is_no_traceback_in_a_process_of_its_own(whole_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    shutil.rmtree(run / "checkpoints" / "00000024")
    limit = 1_000_000, 1_000_000
    done = process(
        *arguments([], run, "--resume"),
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},  # or modules would be cut off
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dry_run_shows_costs_and_the_first_batch_and_writes_nothing(settings, prepared, tmp_path):
    done = train(settings, tmp_path / "run", "--dry-run", "--json")
    result = json.loads(done.stdout)
    assert result["config"]["train"]["steps"] == STEPS
    assert result["tokens"] == STEPS * 4 * 32
    trainer = Trainer(RunConfig.load(None, settings), tmp_path / "other", print)
    parameters = trainer.model.num_parameters()
    assert sum(result["parameters"].values()) == parameters
    assert result["bytes"]["moments"] == 8 * parameters
    halved = train([*settings, "optim.table_moments=bfloat16"], tmp_path / "run", "--dry-run", "--json")
    less = {name: result["bytes"][name] - size for name, size in json.loads(halved.stdout)["bytes"].items()}
    assert less.pop("moments") == less.pop("most") == 4 * result["parameters"]["tables"]
    assert not any(less.values())
    ids, _ = trainer.loader.peek()
    assert result["first_batch"]["shape"] == list(ids.shape)
    assert result["first_batch"]["first_ids"] == ids[0, :16].tolist()
    assert trainer.inputs.tokenizer.decode(ids[0]).startswith(result["first_batch"]["first_text"])

    shown = train(settings, tmp_path / "run", "--dry-run").stdout
    for text in (
        "optim.max_lr",
        f"{result['parameters']['tables']:,}",
        "First batch: [4, 32]",
        "row-lazy AdamW",
        "Time: about 0:0",
        "from a step of",
    ):
        assert text in shown
    assert "Warning" not in shown
    assert 0 < result["time"]["seconds"] < 100
    assert not (tmp_path / "run").exists()
    # At once: to count what such a batch needs would take minutes.
    large = train([*settings, "train.batch=1000000"], tmp_path / "run", "--dry-run")
    assert (large.returncode, "a global batch takes 1000000 windows" in large.said) == (1, True)


def test_what_a_run_wastes_is_told_before_and_at_its_start(settings, prepared, tmp_path):
    wasteful = [
        *settings,
        "model.vocab_size=4096",
        "train.batch=100",
        "train.steps=300",
        "train.micro_batch=0",
    ]
    shown = train(wasteful, tmp_path / "run", "--dry-run").stdout
    manifest = Manifest.read(prepared)
    tokens, used = manifest.tokens("train"), manifest.vocab_size
    times = 300 * 100 * 32 / tokens
    assert times > MANY_EPOCHS
    model = Trainer(RunConfig.load(None, settings), tmp_path / "other", print).model
    wasted = sum(p.numel() for p in (model.model.embed_tokens.weight, model.model.memory.weight)) // 320
    said = [
        f"reads the data {times:.1f} times, and learns little from more than 20: prepare more text, or set "
        f"train.steps={20 * tokens // 3200}",
        f"{used:,} of the model's 4,096 ids, and {wasted * (4096 - used):,} of its ",
        f"set model.vocab_size={used}",
    ]
    config, lines = RunConfig.load(None, [*wasteful, "train.tensorboard=false"]), []
    Trainer(config, tmp_path / "run", lines.append)._describe()
    for text in said:
        assert text in shown
        assert text in "\n".join(lines)


def test_steps_that_are_slow_say_soon_how_long_the_run_will_take(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("tide_lm.training.trainer.SLOW_STEP", 0)
    done = train([*settings, "train.steps=4", "train.log_every=4"], tmp_path / "run")
    assert re.search(r"^a step takes \d.* s: about 0:0\d.* for those left$", done.stderr, re.MULTILINE)


def test_the_time_of_steps_too_slow_to_try_is_estimated(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr("tide_lm.training.dry_run.SMALL_STEP", 0)
    settings = settings_for(prepared)
    few, many = (dry_run(RunConfig.load(None, [*settings, f"train.steps={n}"]))["time"] for n in (24, 2400))
    assert "FLOPs" in few["from"]
    assert 20 < many["seconds"] / few["seconds"] < 500


def saved_by_autograd(trainer, ids, targets, rows=None):
    """Bytes that a forward pass keeps, besides weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in trainer.model.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trainer.objective(ids, targets, rows)
    return sum(size for size, _ in saved.values())


def test_the_activations_of_a_dry_run_are_those_that_autograd_saves(settings, tmp_path):
    settings = [*settings, "model.vocab_size=4096", "model.memory_values=false"]
    config = RunConfig.load(None, settings)
    trainer = Trainer(config, tmp_path / "run", print)
    ids, targets = (part[:2] for part in trainer.loader.peek())
    real = saved_by_autograd(trainer, ids, targets)
    manifest = trainer.inputs.manifest
    assert activation_bytes(config, manifest, len(ids)) == pytest.approx(real, rel=0.05)
    with_less = RunConfig.load(None, [*settings, "train.activation_checkpointing=true"])
    assert activation_bytes(with_less, manifest, len(ids)) < 0.5 * real


def test_rows_that_are_gathered_into_values_count_as_activations(settings, tmp_path):
    real, counted = [], []
    for values in ("false", "true"):
        config = RunConfig.load(None, [*settings, f"model.memory_values={values}"])
        trainer = Trainer(config, tmp_path / values, print)
        ids, targets = (part[:2] for part in trainer.loader.peek())
        trainer.row_optimizer.begin(trainer.row_optimizer.prepare([ids]))
        real.append(saved_by_autograd(trainer, ids, targets, trainer.row_optimizer.fetch(0)))
        counted.append(activation_bytes(config, trainer.inputs.manifest, len(ids)))
    assert counted[1] - counted[0] == pytest.approx(real[1] - real[0], rel=0.05)
    assert real[1] > real[0]


def shown_on_a_terminal(write) -> str:
    """What `write(file)` puts on a terminal, up to where all have closed it."""
    leader, follower = pty.openpty()
    with open(follower, "w", encoding="utf-8") as file:
        write(file)
    shown = b""
    with suppress(OSError):  # the terminal is gone when its last writer is
        while part := os.read(leader, 4096):
            shown += part
    os.close(leader)
    return shown.decode()


def test_a_bar_is_shown_on_a_terminal_only(monkeypatch, capsys):
    def write(file) -> None:
        monkeypatch.setattr(sys, "stderr", file)
        with progress.training_progress(STEPS) as (tell, advance):
            tell("step 1/24  [red]1,234 tokens/s :cat:")
            advance(STEPS)
        monkeypatch.undo()

    text = shown_on_a_terminal(write)
    assert "━" in text
    assert f"{STEPS}/{STEPS}" in text
    assert "[red]1,234 tokens/s :cat:" in text
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes no terminal of a file
    with progress.training_progress(STEPS) as (tell, advance):
        tell("step 1/24 :cat:")
        advance(STEPS)
    assert capsys.readouterr().err == "step 1/24 :cat:\n"


def test_only_long_work_says_elsewhere_that_it_has_begun(monkeypatch, capsys):
    with progress.working("Adding"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "SECONDS_BEFORE_A_LINE", 0.01)
    with progress.working("Adding"):
        time.sleep(0.2)
    assert capsys.readouterr().err == "Adding ...\n"


def test_bytes_that_are_written_are_told_in_lines_elsewhere(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    with progress.writing_progress() as begin:
        advance = begin(3 * 10**9)
        advance(10**9)
        advance(2 * 10**9)
    said = "Writing: 1.0 of 3.0 GB", "Writing: 3.0 of 3.0 GB"
    assert capsys.readouterr().err.splitlines() == list(said)


@pytest.mark.slow
def test_a_training_shows_its_bar_on_a_terminal_only(settings, whole_run, tmp_path):
    command, started = call(*arguments(settings, tmp_path / "run")), []
    text = shown_on_a_terminal(
        lambda file: started.append(subprocess.Popen(command, stderr=file, stdout=subprocess.DEVNULL))
    )
    assert started[0].wait() == 0
    assert "━" in text
    assert f"{STEPS}/{STEPS}" in text
    assert "tokens/s" in text
    assert_same_end(tmp_path / "run", whole_run)
    assert "━" not in train([*settings, "train.steps=20"], tmp_path / "other").stderr


@pytest.mark.parametrize(
    ("setting", "status", "message"),
    [
        ("optim.max_rl=1", 2, "did you mean 'max_lr'"),
        ("model.preset=tide-2e-tin", 2, "did you mean"),
        ("data.path=nowhere", 1, "tide-lm prepare"),
        ("train.batch=40000", 1, "lower the batch"),
        ("data.sequence=1000000", 1, "(validation) has"),
        ("model.vocab_size=100", 1, "set model.vocab_size="),
    ],
)
def test_a_wrong_setting_is_named_and_nothing_is_written(settings, tmp_path, setting, status, message):
    done = train([*settings, "train.micro_batch=1", setting], tmp_path / "run")
    assert done.returncode == status, done.stderr
    assert message in done.said
    assert not (tmp_path / "run").exists()


def test_a_damaged_shard_is_named(settings, prepared, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(prepared, data)
    shard = data / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    done = train([*settings, f"data.path={json.dumps(str(data))}"], tmp_path / "run")
    assert done.returncode == 1
    assert "train-00000.bin is damaged" in done.stderr


def test_a_tokenizer_that_is_not_that_of_the_shards_is_named(settings, prepared, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(prepared, data)
    path = data / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text().replace("[", " [", 1))
    done = train([*settings, f"data.path={json.dumps(str(data))}"], tmp_path / "run")
    assert done.returncode == 1
    assert re.search(r"tokenizer\.json .*put it back", done.stderr)
    assert not (tmp_path / "run").exists()


def test_data_that_hold_nothing_out_are_named_with_the_cure(settings, prepared, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(prepared, data)
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["splits"]["validation"] = []
    (data / "manifest.json").write_text(json.dumps(manifest))
    done = train([*settings, f"data.path={json.dumps(str(data))}"], tmp_path / "run")
    assert "--validation" in done.stderr


def test_the_vocabulary_can_be_that_of_the_data(settings, prepared, tmp_path):
    config = RunConfig.load(None, [*settings, "model.preset=base-tiny", "model.vocab_size=5000"])
    trainer = Trainer(config, tmp_path / "run", print)
    assert trainer.model.lm_head.weight.shape[0] == 5000
    assert config.model.shape().vocab_size == 5000
