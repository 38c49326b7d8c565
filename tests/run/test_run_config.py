import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tide_lm.run import strict
from tide_lm.run.settings import (
    Change,
    DataSection,
    ModelSection,
    OptimSection,
    RunConfig,
    TrainSection,
    compare,
    flat,
)
from tide_lm.spec.config import REMOVED
from tide_lm.spec.recipes import RECIPES

SHORT = ["optim.warmup_steps=10"]


def test_the_defaults_are_the_papers_recipe():
    optim = OptimSection()
    assert (optim.max_lr, optim.min_lr, optim.warmup_lr, optim.warmup_steps) == (1e-4, 1e-5, 1e-6, 10_000)
    assert (optim.weight_decay, optim.beta1, optim.beta2, optim.z_loss) == (0.1, 0.9, 0.95, 1e-6)
    paper = RunConfig.load(None, ["model.preset=tide-8e-1b", "recipe=paper"])
    assert (paper.optim, paper.model.memory_gain_init) == (optim, 1.0)
    for section, values in RECIPES["paper"].items():
        assert values.items() <= RunConfig().to_dict()[section].items()
    assert (paper.data.sequence, paper.train.batch) == (2048, 8)
    assert 0 <= paper.train.steps * 8 * 2048 - 200e9 < 8 * 2048


def test_a_new_run_has_the_best_recipe_and_its_settings_win_over_that():
    for recipe, settings in (("best", []), ("best", ["recipe=best"]), ("paper", ['recipe="paper"'])):
        run = RunConfig.load(None, [*settings, "optim.table_weight_decay=0.3"])
        values = flat(RECIPES[recipe]) | {"recipe": recipe, "optim.table_weight_decay": 0.3}
        assert values.items() <= flat(run.to_dict()).items()
    with pytest.raises(ValueError, match="recipe is 'pap': did you mean 'paper'"):
        RunConfig.load(None, ["recipe=pap"])
    for resumed in (None, RunConfig.load(None).to_dict()):
        with pytest.raises(ValueError, match=r"recipe is \{'gain': 1\}: use one of"):
            RunConfig.load(None, ["recipe.gain=1"], resumed)


def test_a_resumed_run_keeps_its_recipe_and_one_that_names_none_has_the_papers():
    best = RunConfig.load(None).to_dict()
    paper = RunConfig.load(None, ["recipe=paper"]).to_dict()
    unnamed = {name: section for name, section in paper.items() if name != "recipe"}
    assert RunConfig.load(None, resumed=best).to_dict() == best
    assert RunConfig.load(None, ["train.seed=0"], resumed=unnamed).to_dict() == paper
    (change,) = compare(RunConfig.load(None), RunConfig.load(None, ["recipe=paper"], resumed=best))
    assert str(change) == "recipe: 'best' -> 'paper'"
    assert change.is_fixed


def test_a_tiny_preset_has_its_own_settings_and_those_given_win_over_them():
    tiny = RunConfig.load(None)
    assert tiny.optim.warmup_steps * 10 <= tiny.train.steps < 10_000
    assert (tiny.data.sequence, tiny.optim.max_lr) == (128, 3e-3)
    chosen = RunConfig.load(None, ["optim.max_lr=0.5", "train.batch=16"])
    assert (chosen.optim.max_lr, chosen.optim.min_lr, chosen.train.batch) == (0.5, tiny.optim.min_lr, 16)


@pytest.mark.parametrize(
    ("settings", "warmup"),
    [
        (["model.preset=tide-8e-1b"], 10_000),
        (["model.preset=tide-8e-350m", "train.steps=2000"], 200),
        (["train.steps=40"], 4),
        (["train.steps=4"], 0),
        (["train.steps=100000"], 100),  # the preset's
        (["train.steps=40", "optim.warmup_steps=20"], 20),
    ],
)
def test_a_warm_up_that_was_not_given_follows_the_steps(settings, warmup):
    assert RunConfig.load(None, settings).optim.warmup_steps == warmup


def of_tokens(folder, **tokens) -> str:
    """Prepared data of so many tokens, of which only the manifest is there."""
    splits = {name: [{"tokens": count - 1}, {"tokens": 1}] for name, count in tokens.items()}
    (folder / "manifest.json").write_text(json.dumps({"splits": splits}))
    return f"data.path={folder}"


@pytest.mark.parametrize(
    ("train", "validation", "settings", "sequence"),
    [
        (10**6, 2049, [], 2048),
        (10**6, 2048, [], 1024),
        (8 * 2048, 10**6, [], 1024),
        (10**6, 600, ["data.sequence=2048"], 2048),
        (10**6, 10**6, ["data.sequence=256"], 256),
        (10**6, 600, ["model.preset=tide-4e-tiny"], 128),
        (10**6, 70, ["model.preset=tide-4e-tiny"], 64),
        (10**6, 10, [], 2048),  # which is refused by name
    ],
)
def test_a_sequence_that_was_not_given_follows_the_data(tmp_path, train, validation, settings, sequence):
    path = of_tokens(tmp_path, train=train, validation=validation)
    config = RunConfig.load(None, ["model.preset=base-350m", path, *settings])
    assert config.data.sequence == sequence
    assert RunConfig.load(None, [path], config.to_dict()) == config


def test_a_sequence_that_was_not_given_follows_the_model_to_start_from(tmp_path):
    shape = ModelSection("base-tiny").shape().to_transformers()
    (tmp_path / "config.json").write_text(json.dumps({**shape, "model_type": "llama"}))
    start = f"model.start={tmp_path}"
    assert RunConfig.load(None, [start]).data.sequence == 512
    assert RunConfig.load(None, [start, "data.sequence=1024"]).data.sequence == 1024


def test_a_resumed_run_keeps_its_settings_and_new_ones_win():
    run = RunConfig.load(None, [*SHORT, "model.preset=base-tiny", "train.seed=3"]).to_dict()
    assert RunConfig.load(None, resumed=run).to_dict() == run
    changes = compare(RunConfig.from_saved(run), RunConfig.load(None, ["train.seed=4"], run))
    assert changes == [Change("train.seed", 3, 4)]


def test_a_run_of_an_earlier_version_keeps_its_settings_but_those_that_are_gone():
    config = RunConfig.load(None, [*SHORT, "model.preset=base-tiny"])
    before = config.to_dict()
    before["optim"]["table_update"], before["train"]["lora_rank"] = "row-lazy", 16
    assert RunConfig.from_saved(before) == RunConfig.load(None, resumed=before) == config
    with pytest.raises(ValueError, match=r"table_update"):
        strict.build(RunConfig, before)
    before["optim"]["table_update"] = "dense"  # which can be looked at, and not gone on with
    assert RunConfig.from_saved(before) == config
    with pytest.raises(ValueError, match=r"'dense'.*0\.1\.0"):
        RunConfig.load(None, resumed=before)
    before["optim"]["table_update"] = "row-lazy"
    before["train"]["parts"] = "lora"
    for read in RunConfig.from_saved, lambda values: RunConfig.load(None, resumed=values):
        with pytest.raises(ValueError, match=r"'lora'.*0\.1\.0"):
            read(before)


@pytest.mark.parametrize("name", REMOVED)
def test_a_run_with_an_extension_that_is_gone_is_refused(name):
    config = RunConfig.load(None, SHORT)
    with pytest.raises(ValueError, match=f"unknown setting of model '{name}'"):
        RunConfig.load(None, [*SHORT, f"model.{name}=true"])
    before = config.to_dict()
    before["model"][name] = False
    assert RunConfig.from_saved(before) == RunConfig.load(None, resumed=before) == config
    before["model"][name] = True
    for read in RunConfig.from_saved, lambda values: RunConfig.load(None, resumed=values):
        with pytest.raises(ValueError, match=rf"{name} is True.*0\.1\.0"):
            read(before)


def test_a_file_is_read_and_settings_win_over_it(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\npreset = "base-tiny"\n[train]\nsteps = 500\n[optim]\nmax_lr = 1\nwarmup_steps = 5'
    )
    config = RunConfig.load(file, ["train.steps=200", "train.dtype=bfloat16", "model.preset=tide-2e-tiny"])
    assert (config.train.steps, config.train.dtype) == (200, "bfloat16")
    assert config.model.preset == "tide-2e-tiny"
    assert config.optim.max_lr == 1.0
    assert isinstance(config.optim.max_lr, float)
    assert RunConfig.from_saved(config.to_dict()) == config


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optim.max_rl=1", "unknown setting of optim 'max_rl': did you mean 'max_lr'"),
        ("opt.max_lr=1", "unknown section 'opt': did you mean 'optim'"),
        ("train.steps=many", "train.steps is 'many': it must be a whole number"),
        ("train.steps=1.5", "train.steps is 1.5"),
        ("train.steps=true", "train.steps is True"),
        ("train.steps=-1", "train.steps is -1: .*at least 1"),
        ("optim.max_lr=nan", "optim.max_lr is nan"),
        ("optim.max_lr=inf", "optim.max_lr is inf"),
        ("train.keep=0", "train.keep is 0: .*at least 1"),
        ("optim.beta2=1", "they must be below 1"),
        ("optim.min_lr=1", "optim.min_lr is 1.*max_lr is"),
        ("optim.table_moments=float16", "did you mean 'bfloat16'"),
        ("train.seed=9223372036854775808", "it must be below"),
        ("train.batch=0", "train.batch is 0"),
        ("train.log_every=0", "train.log_every is 0"),
        ("model.preset=3", "unknown preset '3'"),
        ("model.preset=tide-8e-1B", "did you mean 'tide-8e-1b'"),
        ("train.dtype=float16", "did you mean 'bfloat16'"),
        ("train.compile=1", "train.compile is 1: it must be true or false"),
        ("train.steps", "write section.key=value"),
        ("steps=3", "write section.key=value"),
        ("train.micro_batch=3", "train.batch is 8 and train.micro_batch is 3"),
        (
            "optim.warmup_steps=501",
            "optim.warmup_steps is 501.* 1,000.*optim.warmup_steps=500",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_cure(setting, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.load(None, [*SHORT, setting])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"train": TrainSection(batch=0)}, "train.batch is 0: .*at least 1"),
        ({"train": TrainSection(log_every=0)}, "train.log_every is 0: .*at least 1"),
        ({"train": TrainSection(micro_batch=-4)}, "train.micro_batch is -4: .*at least 0"),
        ({"data": DataSection(sequence=0)}, "data.sequence is 0: .*at least 1"),
        ({"optim": OptimSection(max_lr=math.nan)}, "optim.max_lr is nan"),
        ({"recipe": "good"}, "recipe is 'good': use one of"),
    ],
)
def test_settings_that_are_made_in_python_are_checked_too(section, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**section)
    with pytest.raises(ValueError, match=message):
        replace(RunConfig(), **section)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.batch=5"], "train.batch is 5 .*multiple of 2"),
        (["train.batch=6", "train.micro_batch=2"], "train.batch is 6 .*multiple of 4"),
        (["train.record_gradients=true"], "train.record_gradients .*2: turn it off"),
    ],
)
def test_what_several_processes_cannot_share_is_named_with_its_cure(settings, message):
    config = RunConfig.load(None, [*SHORT, *settings])
    with pytest.raises(ValueError, match=message):
        config.check_processes(2)
    RunConfig.load(None, [*SHORT, "train.batch=8", "train.micro_batch=2"]).check_processes(4)


def test_rows_in_values_are_of_tide_and_named():
    settings = [*SHORT, "model.memory_values=true", "model.intermediate_size=40"]
    run = RunConfig.load(None, [*settings, "model.preset=tide-4e-tiny"])
    assert (run.model.shape().memory_values, run.model.shape().intermediate_size) == (True, 40)
    assert run.table_policy.startswith("rows in values times 1, ")
    assert not replace(run.model, preset="base-tiny").shape().memory_values


def test_moments_of_tables_are_chosen_and_named():
    chosen = RunConfig.load(None, [*SHORT, "optim.table_moments=bfloat16"])
    assert chosen.table_policy.endswith("row-lazy AdamW, moments in bfloat16")
    (change,) = compare(RunConfig.load(None, SHORT), chosen)
    assert change.is_fixed
    with pytest.raises(ValueError, match=r"'bfloat16'.*round.*beta2"):
        RunConfig.load(None, [*SHORT, "optim.table_moments=bfloat16", "optim.beta2=0.999"])


def test_every_setting_is_described_with_its_default():
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    described = dict(re.findall(r"^\| `([\w.]+)` \| `?(.*?)`? \|", page, re.MULTILINE))
    defaults = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in flat(RunConfig.load(None, ["model.preset=tide-8e-1b"]).to_dict()).items()
    } | {"model.preset": ModelSection.preset}
    assert described == defaults


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "run.toml").write_text("[train")
    with pytest.raises(ValueError, match=r"run\.toml"):
        RunConfig.load(tmp_path / "run.toml")
    (tmp_path / "run.toml").write_text("train = 3")
    for settings in ([], ["train.seed=1"]):
        with pytest.raises(ValueError, match="train is 3: it must be a section"):
            RunConfig.load(tmp_path / "run.toml", settings)


def test_a_name_that_looks_like_a_number_stays_a_name():
    assert RunConfig.load(None, ["data.path=2024-01-01"]).data.path == "2024-01-01"
    assert RunConfig.load(None, ['data.path="a b"']).data.path == "a b"


def test_changes_are_listed():
    old, new = RunConfig.load(None, SHORT), RunConfig.load(None, [*SHORT, "train.seed=4"])
    assert [str(change) for change in compare(old, new)] == ["train.seed: 0 -> 4"]
    assert compare(old, old) == []
    assert Change("train.seed", 0, 4).is_fixed
    assert Change("model.preset", "a", "b").is_fixed
    assert not Change("optim.max_lr", 1.0, 2.0).is_fixed
