"""Every option of a command reaches the function that does the work."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from command import tide_lm

from tide_lm.data.prepare import Settings
from tide_lm.evaluation.perplexity import Windows
from tide_lm.evaluation.texts import TextSettings
from tide_lm.model.opened import open_model
from tide_lm.serve import Sampling
from tide_lm.spec.config import Place, Residence


class Reached(BaseException):
    """Ends a command where the work would begin."""


@pytest.fixture
def reached(monkeypatch):
    """Return `reached(function, *words)`: the arguments that a command gives, by position and by name."""

    def given(function: str, *words: object) -> tuple[list, dict]:
        calls = []

        def record(*arguments, **named):
            calls.append((list(arguments), named))
            raise Reached

        monkeypatch.setattr(f"tide_lm.{function}", record)
        try:
            done = tide_lm(*words)
        except Reached:
            return calls[0]
        raise AssertionError(done.stderr)

    return given


@pytest.fixture
def records(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps({"body": f"every layer knows token {n}"}) + "\n" for n in range(40)))
    return path


READING = "--text-field", "body", "--window", 16, "--stride", 4, "--batch", 3


def test_what_is_read_and_how(trained, records, reached):
    texts, text = {"mine": records}, ("--text", f"mine={records}")
    wanted = TextSettings(texts, "body", 16, 4, 3)
    (_, settings, _), _ = reached("evaluation.texts.evaluate_texts", "evaluate", trained, *text, *READING)
    assert settings == wanted
    assert settings.resolve(open_model(str(trained))) == (texts, Windows(16, 4, 3, "body"))
    (_, settings, _), _ = reached(
        "analysis.layer_drop.layer_drop", "analyze", "layer-drop", trained, *text, *READING
    )
    assert settings == wanted
    without_stride = ("--text-field", "body", "--window", 16, "--batch", 3)
    (_, settings, _), _ = reached(
        "analysis.routing.routing", "analyze", "routing", trained, *text, *without_stride
    )
    assert settings == replace(wanted, stride=None)
    (_, settings, forms, _), _ = reached(
        "compress.measure.measure", "compress", trained, *text, *READING, "--form", "3 bits"
    )
    assert (list(map(str, forms)), settings) == (["3 bits"], wanted)


def test_what_each_analysis_is_asked(trained, reached):
    (_, delta, _), _ = reached("analysis.collapse.collapse", "analyze", "collapse", trained, "--delta", 0.3)
    assert delta == 0.3
    training = ("--tokens", 1e6, "--batch", 3, "--sequence", 7)
    (_, *numbers), _ = reached("analysis.updates.updates", "analyze", "updates", trained, *training)
    assert numbers == [1e6, 3, 7]
    (_, words), _ = reached(
        "analysis.tables.neighbours", "analyze", "neighbours", trained, "--token", "a", "--token", "b"
    )
    assert list(words) == ["a", "b"]


@pytest.fixture(scope="module")
def packed(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed") / "model"
    assert tide_lm("pack", trained, "--out", folder, "--bits", 8).returncode == 0
    return folder


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (("analyze", "routing"), {"counts", "run", "memory", "device"}),
        (("evaluate",), {"counts", "run", "memory", "device"}),
        (("evaluate", "--all-checkpoints"), {"counts", "device"}),
        (("evaluate", "--benchmarks", "hub"), {"run", "memory", "device"}),
        (("compress",), {"counts", "run", "device"}),
        (("pack", "--out", "packed"), {"counts"}),
        (("generate", "a prompt"), {"memory", "device"}),
        (("explore",), {"counts", "memory", "device"}),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_whose_results_counts_and_rows(words, options, trained, packed, reached, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("counts.json").touch()
    monkeypatch.setattr("tide_lm.evaluation.tasks.check", lambda source, names: names)
    values = {"counts": "counts.json", "run": "elsewhere", "memory": "store:3", "device": "cpu"}
    given = [word for name in sorted(options) for word in (f"--{name}", values[name])]
    verb, *before = words[:2] if words[0] == "analyze" else words[:1]
    others = words[1 + len(before) :]
    opens = "evaluation.texts.open_model" if others == ("--all-checkpoints",) else "model.opened.open_model"
    subject = packed if "memory" in options else trained
    (model,), named = reached(opens, verb, *before, subject, *others, *given)
    assert model == str(subject)
    wanted = {
        "counts": Path("counts.json"),
        "run": Path("elsewhere"),
        "memory": Residence(Place.store, 3 << 20),
        "device": "cpu",
    }
    assert {name: named[name] for name in options} == {name: wanted[name] for name in options}


@pytest.mark.parametrize("words", [("generate", "a prompt"), ("pack", "--out", "packed"), ("evaluate",)])
def test_a_demo_stands_for_its_tide_run(words, trained, reached, tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "demo.json").write_text("{}")
    (tmp_path / "tide").symlink_to(trained)
    (model,), _ = reached("model.opened.open_model", words[0], tmp_path, *words[1:])
    assert model == str(tmp_path / "tide")


def test_which_benchmarks_are_run(trained, reached, monkeypatch, tmp_path):
    monkeypatch.setattr("tide_lm.evaluation.tasks.check", lambda source, names: names)
    options = ("--benchmarks", tmp_path, "--tasks", "piqa,sciq", "--limit", 5, "--batch", 3)
    (_, _, source, names), named = reached("evaluation.zero_shot.score", "evaluate", trained, *options)
    assert (source, names) == (str(tmp_path), ["piqa", "sciq"])
    assert (named["batch"], named["limit"]) == (3, 5)


def test_how_text_is_drawn(trained, reached):
    options = ("--max-new-tokens", 5, "--temperature", 0.7, "--top-k", 3, "--top-p", 0.9, "--seed", 2)
    (_, _, prompts, count, sampling, _), _ = reached(
        "serve.generate.generate", "generate", trained, "tide", "and time", *options
    )
    assert (prompts, count, sampling) == (["tide", "and time"], 5, Sampling(0.7, 3, 0.9, 2))


def test_how_text_is_prepared(records, reached, tmp_path):
    options = ("--train-tokenizer", 300, "--validation", 0.25, "--text-field", "body")
    asked = Settings(str(records), None, 300, validation=0.25, text_field="body")
    places = ("prepare", records, "--out", tmp_path / "out")
    (settings, out, _), _ = reached("data.prepare.prepare", *places, *options)
    assert (settings, out) == (asked, tmp_path / "out")
    tasks = ("--executor", "local", "--tasks", 2, "--executor-option", "workers=2")
    (settings, out), named = reached("data.distributed.prepare", *places, *options, *tasks)
    assert (settings, out) == (asked, tmp_path / "out")
    assert named == {"executor": "local", "tasks": 2, "options": {"workers": 2}}
    name = ("--tokenizer", "llama3")
    assert reached("data.prepare.prepare", *places, *name)[0][0].tokenizer == "llama3"


def test_how_a_run_is_trained(prepared, reached, tmp_path):
    file, run = tmp_path / "run.toml", tmp_path / "run"
    file.write_text(f'[data]\npath = "{prepared}"\n[train]\nsteps = 50\n')
    warm = ("--set", "optim.warmup_steps=2")
    (config, folder, _, _, resume, changes), _ = reached(
        "training.trainer.Trainer", "train", file, "--run", run, *warm, "--set", "train.seed=3"
    )
    assert (config.data.path, config.train.steps, config.train.seed) == (str(prepared), 50, 3)
    assert (folder, resume, changes) == (run, False, False)
    (*_, resume, changes), _ = reached(
        "training.trainer.Trainer", "train", file, "--run", run, *warm, "--resume", "--allow-changes"
    )
    assert (resume, changes) == (True, True)


def test_what_is_drawn_and_where(trained, reached, tmp_path):
    (_, runs, out), _ = reached("report.drawing.write", "figure", "training-loss", trained, "--out", tmp_path)
    assert ([run.path for run in runs], out) == ([trained], tmp_path)
    page = tmp_path / "page.html"
    (runs, out, _, _), _ = reached("report.page.write_report", "report", trained, "--out", page)
    assert (runs, out) == ([trained], page)
    assert reached("report.model_cards.write_cards", "report", trained, "--cards") == ([[trained]], {})


def test_what_is_timed(reached, monkeypatch, tmp_path):
    options = ("--batch", 3, "--sequence", 16, "--steps", 2)
    found = reached("bench.train.measure", "bench", "train", "tide-2e-tiny", *options)
    assert found == (["tide-2e-tiny", 3, 16, 2, False], {})
    monkeypatch.setattr("tide_lm.bench.decode.bandwidth", lambda device: 1.0)
    options = ("--memory", "cpu", "--batch", 3, "--context", 4, 9, "--peers", "--device", "cpu")
    found = reached("bench.decode.measure", "bench", "decode", "tide-2e-tiny", *options)
    assert found == (["tide-2e-tiny", Place.cpu, 3, (4, 9), True, torch.device("cpu")], {})
    monkeypatch.setattr("tide_lm.bench.decode.measure", lambda *_: [{"batch": 1, "k": 0, "floor_ms": 1.0}])
    for name, values in {"ids": [4, 5], "counts": [1] * 4096}.items():
        np.save(tmp_path / f"{name}.npy", np.array(values))
    options = ("--ids", tmp_path / "ids.npy", "--counts", tmp_path / "counts.npy", "--context", 4, 9)
    (name, _, ids, counts, device), _ = reached(
        "bench.decode.measure_store", "bench", "decode", "tide-2e-tiny", *options, "--device", "cpu"
    )
    assert (name, ids, len(counts), device) == ("tide-2e-tiny", [4, 5], 4096, "cpu")
    store = ("bench", "store", "tide-2e-tiny", "--folder", tmp_path)
    options = ("--bits", 3, "--tokens", 5, "--rounds", 2)
    (path, shape, bits), _ = reached("bench.store.random_store", *store, *options)
    assert (path.parent.parent, shape.num_memory_blocks, bits) == (tmp_path, 2, 3)
    monkeypatch.undo()
    (_, tokens, rounds), _ = reached("bench.store.read_speed", *store, *options)
    assert (tokens, rounds) == (5, 2)
