"""A model that was there before a run: an upcycled Llama, whole or frozen."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from command import tide_lm
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tide_lm.interop.upcycle import open_source, upcycle
from tide_lm.model import TideForCausalLM
from tide_lm.run.directory import RunDirectory, write_result
from tide_lm.run.settings import RunConfig
from tide_lm.training.dry_run import dry_run
from tide_lm.training.trainer import Trainer

GENERATION = '{"eos_token_id": [1, 5], "temperature": 0.6, "top_p": 0.9}'  # as some have it: not sampled
MEMORY = ("model.memory.", ".router.", ".value_gate.")


@pytest.fixture(scope="module")
def llama(prepared, tokenizer, tmp_path_factory):
    """A plain Llama in bfloat16, its positions scaled, with the tokenizer of the data."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 3,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_parameters=rope,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="40KB")
    (folder / "generation_config.json").write_text(GENERATION)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tide(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("upcycled") / "tide"
    memory = {"num_memory_blocks": 3, "memory_values": True}
    upcycle(open_source(str(llama)), folder, memory, 0)
    return folder


def settings_of(prepared, *more) -> list[str]:
    return [
        f"data.path={json.dumps(str(prepared))}",
        "data.sequence=32",
        "train.steps=20",
        "train.batch=8",
        "train.log_every=1",
        "train.validation_sequences=4",
        "train.tensorboard=false",
        "optim.warmup_steps=0",
        "optim.max_lr=0.003",
        "optim.table_weight_decay=0.1",
        *more,
    ]


def config_of(prepared, start, *more) -> RunConfig:
    return RunConfig.load(None, [f"model.start={json.dumps(str(start))}", *settings_of(prepared, *more)])


def trained(config, run, row_lazy=True) -> list[float]:
    Trainer(config, run, lambda line: None, row_lazy=row_lazy).train()
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def changed(before, after) -> set[str]:
    old, new = (TideForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (before, after))
    pairs = zip(old.named_parameters(), new.named_parameters(), strict=True)
    return {name for (name, one), (_, other) in pairs if not torch.equal(one, other)}


def test_the_first_step_has_the_llamas_loss_and_the_loss_falls(prepared, llama, tide, tmp_path):
    plain, memory = (trained(config_of(prepared, start), tmp_path / start.name) for start in (llama, tide))
    assert memory[0] == plain[0]
    assert memory[1] == pytest.approx(plain[1], abs=0.1)  # gains have moved, by little
    assert memory[1] != plain[1]
    assert memory[-1] < memory[0] - 0.5
    export = TideForCausalLM.from_pretrained(tmp_path / "tide" / "export")
    assert export.config.rope_parameters["rope_type"] == "linear"
    assert export.model.memory.norm.weight.abs().min() > 0
    assert "from `tide`" in (tmp_path / "tide" / "export" / "README.md").read_text()


def test_a_start_with_few_positions_trains_with_the_defaults(prepared, tide, tmp_path):
    settings = f"data.path={prepared}", "train.steps=1", "train.batch=2", "train.validation_sequences=2"
    chosen = [word for setting in settings for word in ("--set", setting)]
    done = tide_lm("train", "--from", tide, "--run", tmp_path / "run", *chosen)
    assert done.returncode == 0, done.stderr
    assert RunDirectory(tmp_path / "run").read_config()["data"]["sequence"] == 64
    assert f"Next: tide-lm generate {tmp_path / 'run'} The" in done.stderr


def test_gains_that_begin_at_zero_learn_faster_unless_told_otherwise(prepared, llama, tide):
    multiples = [
        config_of(prepared, start, *more).optim.gain_lr_multiple
        for start, more in [(llama, ()), (tide, ()), (tide, ("optim.gain_lr_multiple=2",))]
    ]
    assert multiples == [1, 10, 2]


@pytest.mark.parametrize("row_lazy", [True, False])
def test_rows_wait_until_gains_have_left_zero_and_only_then_decay(prepared, tide, tmp_path, row_lazy):
    before = load_file(tide / "model.safetensors")["model.memory.weight"].float()
    for steps in 1, 2:
        config = config_of(prepared, tide, f"train.steps={steps}", "optim.min_lr=0.003")
        trained(config, tmp_path / str(steps), row_lazy)
        after = load_file(tmp_path / str(steps) / "export" / "model.safetensors")
        assert after["model.memory.norm.weight"].abs().min() > 0
        assert torch.equal(after["model.memory.weight"], before) is (steps == 1)
    never = (after["model.memory.weight"] - before).abs().flatten(1).amax(1) < 1e-3  # did it occur
    assert 0 < never.sum() < len(before)
    torch.testing.assert_close(after["model.memory.weight"][never], before[never] * (1 - 0.003 * 5 * 0.1))


def test_a_frozen_backbone_stays_as_it_is(prepared, tide, tmp_path):
    losses = trained(config_of(prepared, tide, "train.parts=memory"), tmp_path / "run")
    assert losses[-1] < losses[0]
    moved = changed(tide, tmp_path / "run" / "export")
    assert moved == {name for name in moved if any(part in name for part in MEMORY)}
    assert len(moved) == 2 + 2 + 2  # tables and gains, and a router and a gate in each of two layers


@pytest.mark.parametrize("parts", ["all", "memory"])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits_without_its_start(prepared, tide, tmp_path, parts):
    start = tmp_path / "start"
    shutil.copytree(tide, start)
    chosen = config_of(prepared, start, f"train.parts={parts}", "train.steps=8", "train.checkpoint_every=4")
    trained(chosen, tmp_path / "whole")
    stopped = Trainer(chosen, tmp_path / "cut", lambda line: None)
    stopped.advance = lambda step: stopped._stop(15, None) if step == 4 else None
    stopped.train()
    shutil.rmtree(start)
    again = RunConfig.load(None, resumed=RunDirectory(tmp_path / "cut").read_config())
    assert again.model.shape().num_memory_blocks == 3
    Trainer(again, tmp_path / "cut", lambda line: None, resume=True).train()
    assert (tmp_path / "cut" / "export" / "generation_config.json").read_text() == GENERATION
    whole, cut = (load_file(tmp_path / run / "export" / "model.safetensors") for run in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_a_dry_run_counts_what_learns(prepared, tide):
    costs = {
        parts: dry_run(config_of(prepared, tide, f"train.parts={parts}"))["bytes"]
        for parts in ("all", "memory")
    }
    assert costs["memory"]["weights"] == costs["all"]["weights"]
    assert costs["memory"]["gradients"] < costs["all"]["gradients"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["model.memory_values=true"], r"model\.memory_values is decided by"),
        (["model.preset=tide-8e-1b"], r"model\.preset is decided by"),
        (["train.parts=some"], "train.parts is 'some'"),
        (["train.parts=memory", "train.record_gradients=true"], "'memory'.*record_gradients.*off"),
    ],
)
def test_settings_that_a_start_decides_are_refused(prepared, tide, settings, told):
    with pytest.raises(ValueError, match=told):
        config_of(prepared, tide, *settings)


def test_what_does_not_fit_a_start_is_told(prepared, llama, tide, tmp_path):
    with pytest.raises(ValueError, match=r"train\.parts is 'memory'.*'all'"):
        Trainer(config_of(prepared, llama, "train.parts=memory"), tmp_path / "run", lambda line: None)
    with pytest.raises(ValueError, match=r"config.*nowhere"):
        config_of(prepared, tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"train\.parts is 'memory'.*--from"):
        RunConfig.load(None, settings_of(prepared, "train.parts=memory"))
    with pytest.raises(ValueError, match=r"128.*64.*lower"):
        Trainer(config_of(prepared, llama, "data.sequence=128"), tmp_path / "run", lambda line: None)
    other = tmp_path / "other"
    shutil.copytree(tide, other)
    changed_one = json.loads((other / "tokenizer.json").read_text())
    changed_one["model"]["merges"] = changed_one["model"]["merges"][:-1]
    (other / "tokenizer.json").write_text(json.dumps(changed_one))
    with pytest.raises(ValueError, match=r"other.*--tokenizer .*other"):
        Trainer(config_of(prepared, other), tmp_path / "run", lambda line: None)


def test_a_llama_is_trained_as_a_base_and_that_is_said(prepared, llama, tmp_path, capfd):
    said: list[str] = []
    Trainer(config_of(prepared, llama), tmp_path / "run", said.append)._describe()
    assert f"{llama} has no memory, so a base is trained: `tide-lm upcycle` adds tables" in said
    assert "model of type" not in capfd.readouterr().err


def test_a_folder_with_results_of_another_model_is_no_place_for_a_run(prepared, tide, tmp_path):
    write_result(tmp_path / "run", "perplexity", {"subject": {"model": str(tide)}})
    with pytest.raises(
        ValueError, match=r"run holds results of .*tide, such as perplexity.json: give another"
    ):
        Trainer(config_of(prepared, tide), tmp_path / "run", lambda line: None)


def test_a_damaged_start_is_not_trained(prepared, llama, tide, tmp_path):
    shutil.copytree(llama, tmp_path / "lacking")
    values = json.loads((llama / "config.json").read_text())
    (tmp_path / "lacking" / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"lacks model\.layers\.2\."):
        Trainer(config_of(prepared, tmp_path / "lacking"), tmp_path / "run", lambda line: None)
    shutil.copytree(tide, tmp_path / "nan")
    tensors = load_file(tide / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, tmp_path / "nan" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"3 times.*nan.*damaged"):
        trained(config_of(prepared, tmp_path / "nan"), tmp_path / "run")


def test_the_tokenizer_of_the_data_is_taken_where_there_is_no_other(prepared, tide, tmp_path):
    shutil.copytree(tide, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    lines = []
    Trainer(config_of(prepared, tmp_path / "bare", "train.steps=1"), tmp_path / "run", lines.append).train()
    assert any("bare has no tokenizer" in line for line in lines)


@pytest.mark.torchrun
@pytest.mark.parametrize("parts", ["all", "memory"])
def test_two_processes_start_from_the_same_weights(prepared, tide, tmp_path, parts):
    """And end where one does, but for rounding."""
    more = [f"train.parts={parts}", "train.steps=4", "train.checkpoint_every=2"]
    alone = trained(config_of(prepared, tide, *more), tmp_path / "alone")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        "-m",
        "--",
    ]
    command += ["tide_lm", "train", "--from", str(tide), "--run", str(tmp_path / "two")]
    command += [word for setting in settings_of(prepared, *more) for word in ("--set", setting)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    metrics = (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in metrics] == pytest.approx(alone, abs=1e-4)
    one, two = (load_file(tmp_path / run / "export" / "model.safetensors") for run in ("alone", "two"))
    assert one.keys() == two.keys()
    for run in "alone", "two":
        assert (tmp_path / run / "export" / "generation_config.json").read_text() == GENERATION
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=2e-3)
