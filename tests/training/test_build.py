"""What a run trains is what Python makes from the same preset and recipe."""

import json

import pytest
import torch

from tide_lm.model import TideConfig, TideForCausalLM
from tide_lm.run.settings import RunConfig
from tide_lm.spec import recipes
from tide_lm.training.trainer import Trainer


@pytest.mark.parametrize(
    ("preset", "recipe"), [("tide-2e-tiny", "best"), ("tide-2e-tiny", "paper"), ("base-tiny", "best")]
)
def test_a_preset_in_python_is_that_of_a_run(preset, recipe, prepared, tmp_path):
    """The configuration as it is written, and each weight at first; the data have another vocabulary."""
    settings = [f"model.preset={preset}", f"recipe={recipe}", f"data.path={json.dumps(str(prepared))}"]
    short = ["train.steps=1", "optim.warmup_steps=0", "data.sequence=32", "train.validation_sequences=1"]
    trainer = Trainer(RunConfig.load(None, [*settings, *short]), tmp_path / "run", lambda line: None)
    config = TideConfig.from_preset(preset, recipe=recipe)
    torch.manual_seed(trainer.config.train.seed)
    made = TideForCausalLM(config).state_dict()
    assert made.keys() == trainer.model.state_dict().keys()
    assert all(torch.equal(made[name], weight) for name, weight in trainer.model.state_dict().items())
    trainer.train()
    config.architectures, config.dtype = ["TideForCausalLM"], "float32"  # which a saved model adds
    config.save_pretrained(tmp_path / "made")
    exported, ours = (
        json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("run/export", "made")
    )
    assert exported == ours


def test_both_have_the_same_default_which_a_config_of_no_preset_does_not_have():
    default, best = TideConfig.from_preset("tide-2e-tiny"), TideConfig.from_preset("tide-2e-tiny", "best")
    assert recipes.DEFAULT == RunConfig.load(None).recipe == "best"
    assert default.to_dict() == best.to_dict()
    assert (best.memory_values, best.memory_gain_init) == (True, 0.1)
    assert (TideConfig().memory_values, TideConfig().memory_gain_init) == (False, 1.0)
    with pytest.raises(ValueError, match="recipe is 'good': use one of paper, best"):
        TideConfig.from_preset("tide-2e-tiny", recipe="good")
    with pytest.raises(ValueError, match="'base-tiny' says how many tables there are: name another preset"):
        TideConfig.from_preset("base-tiny", num_memory_blocks=4)
