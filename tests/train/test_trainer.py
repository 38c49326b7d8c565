"""A run that is killed, stopped or damaged ends as if nothing had happened."""

import json
import random
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tide_lm.run_config import RunConfig
from tide_lm.train.trainer import Trainer

STEPS = 24


def settings_for(prepared) -> list[str]:
    return [
        f"data.path={json.dumps(str(prepared))}",
        "data.sequence=32",
        "model.preset=tide-2e-tiny",
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


def command(settings, run, *more) -> list[str]:
    chosen = [argument for setting in settings for argument in ("--set", setting)]
    return [sys.executable, "-m", "tide_lm", "train", *chosen, "--run", str(run), *more]


def train(settings, run, *more) -> subprocess.CompletedProcess:
    return subprocess.run(command(settings, run, *more), capture_output=True, text=True, timeout=300)


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
def whole_run(prepared, tmp_path_factory):
    """An uninterrupted run to compare with."""
    run = tmp_path_factory.mktemp("whole") / "run"
    done = train(settings_for(prepared), run)
    assert done.returncode == 0, done.stderr
    return run


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
    assert "validation/common/loss" in events.Tags()["scalars"]
    card = (whole_run / "export" / "README.md").read_text()
    validation = json.loads((whole_run / "results" / "validation.json").read_text())
    assert f"{validation['loss']:.4f}" in card
    assert validation["provenance"]["seed"] == 0
    assert isinstance(metrics(whole_run)[-1]["sample"], str)


def test_the_export_opens_with_transformers(whole_run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(whole_run / "export")
    ids = AutoTokenizer.from_pretrained(whole_run / "export")("The statement", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


def test_a_run_killed_at_a_random_step_ends_the_same(settings, whole_run, tmp_path):
    run = tmp_path / "run"
    victim = subprocess.Popen(command(settings, run), stderr=subprocess.PIPE, text=True)
    last = random.randint(3, STEPS - 2)
    for line in victim.stderr:
        if line.startswith(f"step {last}/"):
            break
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    victim.stderr.close()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "los')  # the line that was being written
    done = train(settings, run, "--resume")
    assert done.returncode == 0, (last, done.stderr)
    assert_same_end(run, whole_run)


def test_a_terminated_run_saves_and_goes_on(settings, whole_run, tmp_path):
    run = tmp_path / "run"
    victim = subprocess.Popen(command(settings, run), stderr=subprocess.PIPE, text=True)
    for line in victim.stderr:
        if line.startswith("step 7/"):
            break
    victim.send_signal(signal.SIGTERM)
    rest = victim.stderr.read()
    assert victim.wait() == 0
    victim.stderr.close()
    assert "stopped by a signal at step" in rest
    done = train(settings, run, "--resume")
    assert "resumed from step" in done.stderr
    assert_same_end(run, whole_run)


def test_a_damaged_checkpoint_is_passed_over(settings, whole_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    shutil.rmtree(run / "export")
    weights = run / "checkpoints" / "00000024" / "model-00001-of-00001.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = train(settings, run, "--resume")
    assert done.returncode == 0, done.stderr
    assert "00000024 is damaged" in done.stderr
    assert "resumed from step 20" in done.stderr
    assert_same_end(run, whole_run)


def test_an_existing_run_a_changed_setting_and_a_second_trainer_are_refused(settings, whole_run, tmp_path):
    again = train(settings, whole_run)
    assert again.returncode == 1
    assert "holds a run already" in again.stderr
    changed = train([*settings, "optim.max_lr=0.004"], whole_run, "--resume")
    assert changed.returncode == 1
    assert "optim.max_lr: 0.003 -> 0.004" in changed.stderr

    run, endless = tmp_path / "run", [*settings, "train.steps=1000000"]
    first = subprocess.Popen(command(endless, run), stderr=subprocess.PIPE, text=True)
    first.stderr.readline()
    second = train(endless, run, "--resume")
    assert second.returncode == 1
    assert "in use by another trainer" in second.stderr
    first.kill()
    first.wait()
    first.stderr.close()


def test_accumulation_changes_no_gradient(settings, tmp_path):
    def first_steps(micro_batch: int) -> list[float]:
        config = RunConfig.load(None, [*settings, f"train.micro_batch={micro_batch}"])
        trainer = Trainer(config, tmp_path / str(micro_batch), print)
        return [value for _ in range(3) for value in _loss_and_norm(trainer)]

    assert first_steps(1) == pytest.approx(first_steps(4), rel=1e-4)


def _loss_and_norm(trainer: Trainer) -> tuple[float, float]:
    record = trainer._train_step()
    trainer.step += 1
    return record["loss"], record["gradient_norm"]


def test_losses_that_are_not_finite_end_the_run_with_step_and_place(settings, tmp_path):
    trainer = Trainer(RunConfig.load(None, settings), tmp_path / "run", print)
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = float("nan")
    before = trainer.model.lm_head.weight.clone()
    with pytest.raises(ValueError, match=r"not finite 3 times in a row, last at step 3 \(windows up to 12"):
        trainer.train()
    assert torch.equal(trainer.model.lm_head.weight, before)


def test_a_dry_run_writes_nothing(settings, tmp_path):
    done = train(settings, tmp_path / "run", "--dry-run")
    result = json.loads(done.stdout)
    assert result["config"]["train"]["steps"] == STEPS
    assert result["tokens"] == STEPS * 4 * 32
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "status", "message"),
    [
        ("optim.max_rl=1", 2, "did you mean 'max_lr'"),
        ("model.preset=tide-2e-tin", 2, "did you mean"),
        ("data.path=nowhere", 1, "tide-lm prepare"),
        ("train.batch=40000", 1, "lower the batch"),
    ],
)
def test_a_wrong_setting_is_named_and_nothing_is_written(settings, tmp_path, setting, status, message):
    done = train([*settings, "train.micro_batch=1", setting], tmp_path / "run")
    assert done.returncode == status, done.stderr
    assert message in " ".join(done.stderr.replace("│", " ").split())
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
