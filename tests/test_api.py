"""The package's functions do what the commands do, and their errors name a cure."""

import pytest
import torch

import tide_lm
from tide_lm.run.settings import OptimSection
from tide_lm.spec.recipes import RECIPES
from tide_lm.training import optim


@pytest.mark.parametrize("recipe", ["best", "paper"])
def test_a_plain_loop_takes_the_trainers_steps(tiny_model, token_ids, recipe):
    """AdamW on `param_groups` leaves the weights that the trainer's AdamW leaves, tables included."""
    settings = OptimSection(**RECIPES[recipe]["optim"], clip_norm=0.0)
    ours, plain = tiny_model(memory_values=True), tiny_model(memory_values=True)
    trainers = optim.make_optimizer(ours, settings)
    betas = {"betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    optimizer = torch.optim.AdamW(tide_lm.param_groups(plain, lr=1e-2, recipe=recipe), **betas)
    for _ in range(3):
        for model in ours, plain:
            model.zero_grad()
            model(token_ids, labels=token_ids).loss.backward()
        optim.step(trainers, None, 1e-2, settings, norm=torch.tensor(1.0))
        optimizer.step()
    for (name, parameter), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, other), name


def rates(model, **settings) -> dict[str, float]:
    groups = tide_lm.param_groups(model, **settings)
    found = {parameter: group["lr"] for group in groups for parameter in group["params"]}
    return {name: found[each] for name, each in model.named_parameters() if each in found}


def test_gains_that_began_at_0_learn_faster_and_what_is_frozen_has_no_group(tiny_model):
    upcycled = tiny_model(memory_gain_init=0.0)
    found = rates(torch.nn.ModuleDict({"wrapped": upcycled}), lr=1e-3)
    assert found["wrapped.model.memory.norm.weight"] == pytest.approx(1e-2)
    assert found["wrapped.model.memory.weight"] == pytest.approx(5e-3)
    assert found["wrapped.model.layers.0.router.weight"] == 1e-3
    assert rates(upcycled, lr=1e-3, gain_lr_multiple=1)["model.memory.norm.weight"] == 1e-3
    upcycled.requires_grad_(False).model.memory.requires_grad_(True)
    assert rates(upcycled, lr=1e-3).keys() == {"model.memory.weight", "model.memory.norm.weight"}
    assert len(tide_lm.param_groups(tiny_model(num_memory_blocks=0), 1e-3)) == 1


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"lr": "fast"}, "lr is 'fast': it must be of type float"),
        ({"lr": -1e-3}, r"lr is -0.001: it must be finite and at least 0"),
        ({"lr": 1e-3, "recipe": "good"}, "recipe is 'good': use one of 'paper', 'best'"),
        ({"lr": 1e-3, "table_lr_multiple": -5.0}, r"table_lr_multiple is -5.0"),
        ({"lr": 1e-3, "model": "runs/mine"}, "the model is a str: give a torch module"),
    ],
)
def test_wrong_parameter_groups_are_refused(tiny_model, wrong, error):
    with pytest.raises(ValueError, match=error):
        tide_lm.param_groups(**{"model": tiny_model(), **wrong})
