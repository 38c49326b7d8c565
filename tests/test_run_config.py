import pytest

from tide_lm.run_config import OptimSection, RunConfig, TrainSection, differences

SHORT = ["optim.warmup_steps=10"]


def test_the_defaults_are_the_papers_recipe():
    optim = OptimSection()
    assert (optim.max_lr, optim.min_lr, optim.warmup_lr, optim.warmup_steps) == (1e-4, 1e-5, 1e-6, 10_000)
    assert (optim.weight_decay, optim.beta1, optim.beta2, optim.z_loss) == (0.1, 0.9, 0.95, 1e-6)
    assert RunConfig.load(None, SHORT).data.sequence == 2048


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
    assert RunConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optim.max_rl=1", "unknown setting of optim 'max_rl': did you mean 'max_lr'"),
        ("opt.max_lr=1", "unknown section 'opt': did you mean 'optim'"),
        ("train.steps=many", "train.steps is 'many': it must be of type int"),
        ("train.steps=1.5", "train.steps is 1.5"),
        ("train.steps=true", "train.steps is True"),
        ("train.steps=-1", "must not be negative"),
        ("train.dtype=float16", "use one of 'float32', 'bfloat16'"),
        ("train.compile=1", "train.compile is 1: it must be of type bool"),
        ("train.steps", "write section.key=value"),
        ("steps=3", "write section.key=value"),
        ("train.micro_batch=3", "train.batch is 8 and train.micro_batch is 3"),
        ("optim.warmup_steps=101", "optim.warmup_steps is 101 and train.steps is 1,000"),
    ],
)
def test_a_wrong_setting_is_named_with_its_cure(setting, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.load(None, [*SHORT, setting])


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "run.toml").write_text("[train")
    with pytest.raises(ValueError, match=r"run\.toml"):
        RunConfig.load(tmp_path / "run.toml")
    (tmp_path / "run.toml").write_text("train = 3")
    with pytest.raises(ValueError, match="train is 3: it must be a section"):
        RunConfig.load(tmp_path / "run.toml")


def test_differences_are_listed():
    old, new = RunConfig.load(None, SHORT), RunConfig.load(None, [*SHORT, "train.seed=4"])
    assert differences(old, new) == ["train.seed: 0 -> 4"]
    assert differences(old, old) == []
    assert TrainSection() == old.train
