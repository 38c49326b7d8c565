"""The package's functions do what the commands do, and their errors name a cure."""

import json
import pkgutil
import re
import signal
from pathlib import Path

import pytest
import torch
from command import result_of

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
        ({"lr": "fast"}, "lr is 'fast': it must be a number"),
        ({"lr": -1e-3}, r"lr is -0.001: it must be finite and at least 0"),
        ({"lr": 1e-3, "recipe": "good"}, "recipe is 'good': use one of paper, best"),
        ({"lr": 1e-3, "table_lr_multiple": -5.0}, r"table_lr_multiple is -5.0"),
        ({"lr": 1e-3, "model": "runs/mine"}, "the model is a str: give a torch module"),
    ],
)
def test_wrong_parameter_groups_are_refused(tiny_model, wrong, error):
    with pytest.raises(ValueError, match=error):
        tide_lm.param_groups(**{"model": tiny_model(), **wrong})


SHORT = {
    "model": {"preset": "tide-2e-tiny"},
    "train": {"steps": 2, "batch": 4, "validation_sequences": 4, "tensorboard": False},
    "optim.warmup_steps": 0,
    "data.sequence": 32,
}


def test_train_does_what_the_command_does(prepared, tmp_path):
    said = []
    settings = {**SHORT, "data.path": prepared, "train.steps": 3}
    found = tide_lm.train(tmp_path / "ours", settings, log=said.append)
    (tmp_path / "run.toml").write_text(
        f"[data]\npath = {json.dumps(str(prepared))}\nsequence = 32\n[model]\npreset = 'tide-2e-tiny'\n"
        "[train]\nsteps = 3\nbatch = 4\nvalidation_sequences = 4\ntensorboard = false\n"
        "[optim]\nwarmup_steps = 0\n"
    )
    assert result_of("train", tmp_path / "run.toml", "--run", tmp_path / "theirs") == found
    ours, theirs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs"))
    assert ours == theirs
    assert any("exported to" in line for line in said)
    again = tide_lm.train(
        tmp_path / "ours", {"train.steps": 4}, resume=True, allow_changes=True, log=said.append
    )
    assert (again["step"], len(again["loss_by_decile"])) == (4, 10)
    longer = {**SHORT, "data.path": prepared}
    del longer["model"]
    more = tide_lm.train(tmp_path / "more", longer, start=tmp_path / "ours", log=said.append)
    assert more["loss"] < found["loss"]


def test_the_example_of_the_page(prepared, tmp_path, monkeypatch):
    """docs/api.md trains for longer, on data that the reader has prepared."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine").symlink_to(prepared)
    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
    block = re.search(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[1]
    exec(block.replace('"train.steps": 2000', '"train.steps": 2, "data.sequence": 32'), {})


def test_an_interrupted_run_does_not_look_finished(prepared, tmp_path):
    def interrupt(line: str) -> None:
        if line.startswith("step 1/"):
            signal.raise_signal(signal.SIGINT)

    settings = {**SHORT, "data.path": prepared, "train.log_every": 1, "train.steps": 3}
    with pytest.raises(KeyboardInterrupt):
        tide_lm.train(tmp_path / "run", settings, log=interrupt)
    assert tide_lm.train(tmp_path / "run", resume=True, log=lambda line: None)["step"] == 3


def test_evaluate_takes_a_path_or_what_load_has_opened(trained, tmp_path):
    (tmp_path / "wiki.txt").write_text("every layer knows the token beneath the context " * 40)
    windows = {"window": 16, "stride": 16}
    opened = tide_lm.load(trained, run=tmp_path / "run")
    found = tide_lm.evaluate(opened, tmp_path / "wiki.txt", **windows)
    named = tide_lm.evaluate(opened, {"w": str(tmp_path / "wiki.txt")}, **windows)
    assert named["w"] == found["wiki"]
    written = json.loads((tmp_path / "run/results/perplexity.json").read_text())["texts"]
    assert written["w"]["loss"] == written["wiki"]["loss"] == found["wiki"]["loss"]
    command = ("evaluate", trained, "--run", tmp_path / "other", "--window", 16, "--stride", 16)
    theirs = result_of(*command, "--text", tmp_path / "wiki.txt")["texts"]["wiki"]
    assert theirs == found["wiki"]
    held_out = tide_lm.evaluate(trained, run=tmp_path / "other", window=32)["held-out"]
    assert len(held_out["loss_by_decile"]) == 10


def test_analyze_pack_and_upcycle_do_what_the_commands_do(trained, tmp_path):
    opened = tide_lm.load(trained, run=tmp_path / "run")
    routing = tide_lm.analyze("routing", opened, window=16)
    written = json.loads((tmp_path / "run/results/routing.json").read_text())
    assert written["by_layer"] == routing["by_layer"]
    assert "token" in tide_lm.analyze("neighbours", opened, words=["token"])["words"]
    ours = tide_lm.pack(trained, tmp_path / "ours", bits=8)
    theirs = result_of("pack", trained, "--out", tmp_path / "theirs", "--bits", 8)
    assert (tmp_path / "ours/memory.tide").read_bytes() == (tmp_path / "theirs/memory.tide").read_bytes()
    assert {**ours, "store": 0} == {**theirs, "store": 0}
    llama = tmp_path / "llama"
    result_of("upcycle", trained, "--out", llama, "--strip", "--anyway")
    tide = tide_lm.upcycle(llama, tmp_path / "tide", memory_blocks=2)
    assert tide_lm.load(tmp_path / "tide").config.num_memory_blocks == 2
    assert tide["tables"] > 0


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda run: tide_lm.train("", {}), "run is '': give a path"),
        (lambda run: tide_lm.train({"train.steps": 1}), r"run is \{'train.steps': 1\}: give a path"),
        (lambda run: tide_lm.train(run / "new", 5), "the settings are 5: give a dict, such as"),
        (
            lambda run: tide_lm.train(run / "new", "none.toml"),
            "cannot read the run's settings from none.toml",
        ),
        (lambda run: tide_lm.train(run / "new", {"train.step": 1}), "did you mean 'steps'"),
        (lambda run: tide_lm.train(run / "new", {"trian": {"steps": 1}}), "did you mean 'train'"),
        (
            lambda run: tide_lm.train(run / "new", {"train.steps": "9"}),
            "train.steps is '9': it must be a whole number",
        ),
        (lambda run: tide_lm.train(run / "new", {"model": 5, "model.preset": "a"}), "model is 5: it must be"),
        (lambda run: tide_lm.train(run), "holds a run already"),
        (lambda run: tide_lm.train(run / "new", resume=True), "there is no run in .*/new to resume"),
        (
            lambda run: tide_lm.train(run / "new", start=run / "none"),
            "cannot read a model config from .*none",
        ),
        (lambda run: tide_lm.load(run / "none"), "there is no .*/none: "),
        (lambda run: tide_lm.load(7), "model is 7: give a path"),
        (lambda run: tide_lm.load(run, step="last"), "has no checkpoint of step last: it has 2, 4"),
        (lambda run: tide_lm.load(run, device="gpu"), "'gpu' is no device: use cpu, cuda"),
        (lambda run: tide_lm.evaluate(7), "model is 7: give a path, or what tide_lm.load returned"),
        (lambda run: tide_lm.load(run, memory="disk"), "'disk' is none of device, cpu, store"),
        (lambda run: tide_lm.analyze("routng", run), "unknown analysis 'routng': did you mean 'routing'"),
        (lambda run: tide_lm.analyze("norms", run, texts="a.txt"), "texts does nothing with norms"),
        (lambda run: tide_lm.analyze("collapse", run, delta=-1), "delta is -1: give a finite number"),
        (lambda run: tide_lm.pack(run, "packed", bits=5), "bits is 5: use one of 16, 8, 4, 3, 2"),
        (lambda run: tide_lm.pack(run, run), "exists and is not an empty folder"),
        (lambda run: tide_lm.upcycle(run, "tide", memory_blocks=0), "memory_blocks is 0: it must be finite"),
        (lambda run: tide_lm.upcycle("no/such/llama", "tide"), "there is no no/such/llama"),
        (lambda run: tide_lm.evaluate(run, {"wiki": "none.txt"}), "none.txt"),
        (lambda run: tide_lm.evaluate(run, {"wiki": None}), "the text 'wiki' is None: give a path"),
        (lambda run: tide_lm.evaluate(run, window="all"), "window is 'all': give a whole number"),
        (
            lambda run: tide_lm.evaluate(tide_lm.load(run), memory="cpu"),
            "memory does nothing: .*tide_lm.load",
        ),
    ],
)
def test_wrong_calls_are_refused_with_a_cure(trained, call, error, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=error):
        call(trained)


def test_no_part_of_the_package_hides_a_function():
    """Importing `tide_lm.analysis` sets an attribute `analysis` of the package, and so do all parts."""
    parts = {module.name for module in pkgutil.iter_modules(tide_lm.__path__)}
    assert {"analysis", "api", "serve", "training"} <= parts
    assert not parts & set(tide_lm.__all__)
