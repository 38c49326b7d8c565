"""`tide-lm evaluate` and `tide-lm analyze` as a user calls them, on a finished run."""

import json
import os
import re
import shutil

import pytest
import torch
from command import result_of, tide_lm
from safetensors.torch import load_file, save_file

from tide_lm.cli import output, summary
from tide_lm.report.catalogue import FIGURES
from tide_lm.report.formatting import NOT_MEASURED
from tide_lm.report.meaning import sentence
from tide_lm.report.results import open_runs

TEXT = "every layer knows the token beneath the context. " * 20


@pytest.fixture
def run(trained, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    return copy


def test_evaluate_measures_the_held_out_text_and_any_other(run, tmp_path):
    (tmp_path / "other.txt").write_text(TEXT)
    result = result_of("evaluate", str(run), "--text", f"mine={tmp_path / 'other.txt'}")
    assert result["texts"]["mine"]["perplexity"] > 1
    assert (result["texts"]["mine"]["window"], result["texts"]["mine"]["stride"]) == (32, 16)
    more = result_of("evaluate", os.path.relpath(run))
    both = json.loads((run / "results" / "perplexity.json").read_text())["texts"]
    assert all(text.pop("provenance")["command"] for text in both.values())
    assert both == more["texts"] | result["texts"]
    assert len({text["sha256"] for text in both.values()}) == 2
    (run / "results" / "perplexity.json").write_text("{cut sh")
    result_of("evaluate", str(run), "--text", str(tmp_path / "other.txt"))
    assert json.loads((run / "results" / "perplexity.json").read_text())["texts"].keys() == {"other"}
    shown = tide_lm("evaluate", run, "--text", tmp_path / "other.txt").stdout
    perplexity = f"{result['texts']['mine']['perplexity']:,.3f}"
    assert perplexity in shown
    assert "other" in shown
    assert "rare" in shown


def test_a_run_that_has_not_ended_names_the_checkpoint_that_is_measured(run, tmp_path):
    (tmp_path / "other.txt").write_text(TEXT)
    shutil.rmtree(run / "export")
    done = tide_lm("evaluate", run, "--text", tmp_path / "other.txt", "--json")
    assert json.loads(done.stdout)["texts"].keys() == {"other"}
    assert done.stderr.count(f"{run} has not ended: this is its checkpoint of step 4\n") == 1
    (opened,) = open_runs([run])
    assert (opened.texts.keys(), opened.stale) == ({"other"}, {})


def test_a_folder_of_results_keeps_the_texts_of_one_model(run, tmp_path):
    (tmp_path / "other.txt").write_text(TEXT)
    results = tmp_path / "results of both"

    def texts(model, name):
        result_of("evaluate", model, "--run", results, "--text", f"{name}={tmp_path / 'other.txt'}")
        return json.loads((results / "results" / "perplexity.json").read_text())["texts"].keys()

    assert texts(run, "first") == {"first"}
    assert texts(run, "second") == {"first", "second"}
    assert texts(run / "export", "third") == {"first", "second", "third"}
    moved = run.rename(tmp_path / "moved")
    assert texts(moved, "fourth") == {"first", "second", "third", "fourth"}
    written = results / "results" / "perplexity.json"
    before = json.loads(written.read_text())
    written.write_text(json.dumps({**before, "subject": {**before["subject"], "tokens": 7}}))
    assert texts(moved, "fifth") == {"fifth"}  # the others were read by other weights


@pytest.mark.parametrize("held_out", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_evaluate_gives_perplexity_against_tokens(run, tmp_path, held_out):
    (tmp_path / "other.txt").write_text(TEXT)
    of = [] if held_out else ["--text", tmp_path / "other.txt"]
    result = result_of("evaluate", run, "--all-checkpoints", "--window", "32", "--stride", "32", *of)
    (how,) = result["texts"].values()
    assert ("held-out" in result["texts"]) == held_out
    assert (how["window"], how["stride"]) == (32, 32)
    assert [(point["step"], point["tokens"]) for point in result["points"]] == [(2, 256), (4, 512)]
    (name,) = result["texts"]
    values = [point["perplexity"][name] for point in result["points"]]
    assert values[0] != values[1]
    last = result_of("evaluate", run, "--window", "32", "--stride", "32", *of)["texts"][name]
    assert values[1] == pytest.approx(last["perplexity"], rel=1e-6)
    assert (run / "results" / "checkpoints.json").exists()


@pytest.mark.parametrize("wrong", [("--window", 100_000), ("--stride", 33), ("--text", "nowhere.txt")])
def test_wrong_windows_and_texts_are_named_before_a_checkpoint_is_evaluated(run, monkeypatch, wrong):
    monkeypatch.setattr("tide_lm.evaluation.texts.perplexity", lambda *_: pytest.fail("a text was read"))
    done = tide_lm("evaluate", run, "--all-checkpoints", *wrong)
    assert done.returncode == 2, done.stderr
    assert str(wrong[1]).replace("100000", "100,000") in done.said


def test_all_checkpoints_say_how_far_they_are_and_which_are_damaged(run, tmp_path, monkeypatch):
    (tmp_path / "other.txt").write_text(TEXT)
    monkeypatch.setattr("tide_lm.cli.progress.SECONDS_BETWEEN_LINES", 0)
    damaged = run / "checkpoints" / "00000002"
    next(damaged.glob("*.safetensors")).write_bytes(b"")
    done = tide_lm("evaluate", run, "--all-checkpoints", "--text", tmp_path / "other.txt")
    assert done.returncode == 0, done.stderr
    assert re.search(r"step 4, other, [\d,]+ tokens", done.stderr)
    assert f"left out: {damaged} is damaged" in done.stderr
    result = json.loads((run / "results" / "checkpoints.json").read_text())
    assert [point["step"] for point in result["points"]] == [4]
    assert list(result["left_out"]) == ["2"]

    next((run / "checkpoints" / "00000004").glob("*.safetensors")).unlink()
    done = tide_lm("evaluate", run, "--all-checkpoints", "--text", tmp_path / "other.txt")
    assert done.returncode != 0
    assert f"put one back; of the first: {damaged} is damaged (" in done.said


@pytest.mark.parametrize(
    "what",
    [
        "norms",
        "updates",
        "gradients",
        "collapse",
        "routing",
        "layer-drop",
        "distances",
        "neighbours",
        "footprint",
    ],
)
def test_analyze_writes_its_result_and_shows_it(run, tmp_path, monkeypatch, what):
    printed = []

    def print_table(title, columns, rows, numbers=True):
        printed.extend(rows)
        output.print_table(title, columns, rows, numbers)

    monkeypatch.setattr(summary, "print_table", print_table)
    (tmp_path / "short.txt").write_text(TEXT)
    of = ["--text", tmp_path / "short.txt"] if what == "layer-drop" else []  # which reads it six times
    done = tide_lm("analyze", what, run, *of)
    assert f"{what}of{run}" in "".join(done.stdout.split())
    assert "the paper" in done.stdout
    for row in FIGURES[what].compare(open_runs([run])):
        if row.ours != [NOT_MEASURED]:
            assert (row.what, row.paper, *row.ours) in printed
    for row in printed:
        assert all(part in done.stdout for cell in row for part in cell.split())
    written = json.loads((run / "results" / f"{what}.json").read_text())
    assert written["provenance"]["versions"]["torch"]
    result = result_of("analyze", what, run, *of)[str(run)]
    assert {key: written[key] for key in result} == result


def test_an_analysis_with_nothing_to_show_says_why(run, monkeypatch):
    def found(what, *_):
        return {"categories": {"numbers": {"pairs": [], "skipped": [["one", "two"]]}}, "delta": 0.1}

    monkeypatch.setattr("tide_lm.cli.analyze.analyze", found)
    done = tide_lm("analyze", "collapse", run)
    assert (done.returncode, done.stdout) == (0, "")
    assert "take a model with a larger vocabulary" in done.stderr


def test_analyze_all_opens_a_model_once_and_leaves_out_what_does_not_fit(
    run, tiny_model, tokenizer, tmp_path, monkeypatch
):
    from tide_lm.analysis.analyze import Analysis
    from tide_lm.model import opened

    (tmp_path / "short.txt").write_text(TEXT)
    calls, open_model = [], opened.open_model
    monkeypatch.setattr("tide_lm.cli.progress.SECONDS_BEFORE_A_LINE", 0)
    monkeypatch.setattr(opened, "open_model", lambda *_, **named: calls.append(_) or open_model(*_, **named))
    done = tide_lm("analyze", "all", run, "--text", tmp_path / "short.txt")
    assert (done.returncode, len(calls)) == (0, 1), done.stderr
    assert "left out" not in done.stderr
    for what in Analysis:
        written = json.loads((run / "results" / f"{what}.json").read_text())
        assert f"{run}, {what}: {sentence(what, written)}." in done.stdout
    assert f"Opening {run} ..." in done.stderr
    assert done.stderr.endswith(f"Next: tide-lm report {run}\n")

    folder = tmp_path / "base"
    tiny_model(num_memory_blocks=0, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    done = tide_lm("analyze", "all", folder, "--json")
    assert json.loads(done.stdout)[str(folder)].keys() == {"collapse", "footprint"}
    assert f"left out: routing: {folder.name} has no memory" in done.stderr
    assert f"left out: norms: {folder.name} has no token frequencies" in done.stderr
    assert len(list((tmp_path / "runs" / "base" / "results").glob("*.json"))) == 2


def test_analyze_all_leaves_out_nothing_for_a_mistake(run):
    done = tide_lm("analyze", "all", run, "--window", 9999)
    assert (done.returncode, "lower it" in done.said) == (2, True)
    weights = run / "export" / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor * torch.nan for name, tensor in tensors.items()}, weights, {"format": "pt"})
    done = tide_lm("analyze", "all", run)
    assert (done.returncode, "weights are damaged" in done.said) == (1, True)


@pytest.mark.parametrize("what", ["updates", "gradients", "footprint"])
def test_what_needs_no_weights_reads_none(run, what):
    (run / "export" / "model.safetensors").unlink()
    result_of("analyze", what, str(run))
    refused = tide_lm("analyze", "norms", run)
    assert refused.returncode == 1
    assert "cannot be opened as a model" in refused.stderr


def _llm(kind: str, vocabulary: int):
    import transformers

    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=vocabulary, n_embd=16, n_layer=2, n_head=2, n_positions=64
        )
    else:
        config = transformers.MixtralConfig(
            vocab_size=vocabulary,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=2,
        )
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_what_works_on_any_causal_model_works_on_others(kind, tokenizer, prepared, tmp_path, monkeypatch):
    folder = tmp_path / kind
    _llm(kind, len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    counts = ("--counts", str(prepared))
    norms = result_of("analyze", "norms", str(folder), *counts)[str(folder)]
    assert (len(norms["embedding"]), norms["tables"], norms["growth"]) == (10, [], [])
    updates = result_of("analyze", "updates", str(folder), *counts, "--batch", "4", "--sequence", "32")
    assert updates[str(folder)]["sequence"] == 32
    assert result_of("analyze", "collapse", str(folder))[str(folder)]["categories"]
    measured = result_of("evaluate", str(folder), "--text", str(prepared), "--window", "64", *counts)
    (text,) = measured["texts"].values()
    assert (text["window"], text["stride"]) == (64, 32)
    assert text["perplexity"] == pytest.approx(len(tokenizer), rel=0.3)  # it was not trained
    assert len(list((tmp_path / "runs" / kind / "results").glob("*.json"))) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("analyze", "norms", "RUN", "--delta", "0.2"), "--delta does nothing with norms: leave it out"),
        (("analyze", "norms", "RUN", "RUN"), "a model is given twice"),
        (("analyze", "collapse", "RUN", "--delta", "inf"), "give finite numbers"),
        (("analyze", "routing", "RUN", "--text", "a.txt", "--text", "b.txt"), "routing reads one text"),
        (("evaluate", "RUN", "--stride", "33"), "the stride is 33 and the window 32"),
        (("evaluate", "RUN", "--benchmarks", "/nowhere"), "/nowhere is not a folder"),
        (("evaluate", "RUN", "--benchmarks", "hub", "--tasks", "arc"), "unknown task 'arc'"),
        (
            ("evaluate", "RUN", "--benchmarks", "hub", "--window", "8"),
            "--window does nothing with --benchmarks",
        ),
        (("evaluate", "RUN", "--limit", "3"), "give --benchmarks"),
    ],
)
def test_wrong_calls_exit_with_2(run, arguments, words):
    done = tide_lm(*(run if word == "RUN" else word for word in arguments))
    assert done.returncode == 2
    assert words in done.said


def test_each_command_ends_with_one_next_command(run, tmp_path):
    (tmp_path / "other.txt").write_text(TEXT)
    text = "--text", tmp_path / "other.txt"
    packed = f"tide-lm pack {run} --out run-packed --bits 4"
    for command, told in {
        ("evaluate", run, *text): f"tide-lm analyze all {run}",
        ("compress", run, *text, "--form", "4 bits"): packed,
        ("compress", run, *text, "--form", "4 bits, rank 0.5, joint"): f"{packed} --rank 0.5 --blocks joint",
        ("analyze", "footprint", run): f"tide-lm report {run}",
        ("figure", "footprint", run): f"tide-lm report {run}",
        ("report", run): f"tide-lm explore {run}",
        ("presets",): "tide-lm estimate tide-8e-1b",
        ("estimate", "tide-4e-tiny"): "tide-lm train --run runs/tide-4e-tiny --set model.preset=tide-4e-tiny "
        "--set data.path=data/mine",
    }.items():
        done = tide_lm(*command)
        assert done.returncode == 0, done.stderr
        assert [line for line in done.stderr.splitlines() if line.startswith("Next:")] == [f"Next: {told}"]
        assert done.stderr.endswith(f"Next: {told}\n")


def test_results_of_another_run_are_not_mixed_with_those_of_a_run(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    result_of("analyze", "footprint", other)
    shutil.copy(other / "results" / "footprint.json", run / "results")
    result_of("analyze", "footprint", run)  # the other is a copy of the same run
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(settings | {"recipe": "another"}))
    shutil.copy(other / "results" / "footprint.json", run / "results")
    done = tide_lm("analyze", "collapse", run)
    assert done.returncode == 1
    assert f"{run} holds results of {other}, such as footprint.json" in done.stderr


def test_wrong_calls_are_named(run, tmp_path):
    (tmp_path / "short.txt").write_text("A few words.")
    short = tide_lm("evaluate", str(run), "--text", str(tmp_path / "short.txt"))
    assert short.returncode == 1
    assert "fewer than one window" in short.stderr
    long = tide_lm("evaluate", str(run), "--window", "100000")
    assert long.returncode == 2
    twice = tide_lm("evaluate", str(run), "--text", "a.txt", "--text", "b/a.txt")
    assert twice.returncode == 2
    assert "two texts are called 'a'" in twice.stderr
    nothing = tide_lm("analyze", "routing", str(tmp_path / "nowhere"))
    assert nothing.returncode == 1
    assert "there is no" in nothing.stderr


def test_an_analysis_of_memory_refuses_a_base_model(tiny_model, tokenizer, tmp_path, monkeypatch):
    folder = tmp_path / "base"
    tiny_model(num_memory_blocks=0, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for what in ("routing", "layer-drop", "distances", "neighbours"):
        text = ("--text", "builtin") if what in ("routing", "layer-drop") else ()
        done = tide_lm("analyze", what, folder, *text)
        assert (done.returncode, done.stderr.splitlines()[-1][:6]) == (1, "error:")
        assert "base has no memory" in done.stderr
    monkeypatch.chdir(tmp_path)
    result_of("analyze", "collapse", str(folder))
    assert (tmp_path / "runs" / "base" / "results" / "collapse.json").exists()


def on_bare_axes(panel, name):
    """Draw a panel without laying it out and writing it, which takes most of the time."""
    from matplotlib.figure import Figure

    from tide_lm.report.drawing import Chart
    from tide_lm.report.values import read

    axes = Figure().add_subplot()
    panel.draw(axes)
    return Chart(f"<svg>{name}</svg>", read(axes))


@pytest.mark.parametrize(
    "laid_out", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["bare", "laid out"]
)
def test_every_figure_is_drawn_from_what_the_commands_write(run, tmp_path, monkeypatch, laid_out):
    """A run, a copy of it as the other, and every command: what one floor writes, the next one reads."""
    from tide_lm.analysis.analyze import Analysis
    from tide_lm.cli.analyze import READS
    from tide_lm.report.catalogue import FIGURES

    (tmp_path / "text.txt").write_text(TEXT)
    text = ["--text", tmp_path / "text.txt"]
    options = {"token": ["--token", "layer"], "delta": ["--delta", "9"], "text": text}
    for what in Analysis:
        chosen = [word for name in sorted(READS[what]) for word in options.get(name, [])]
        result_of("analyze", what.value, run, *chosen)
    result_of("evaluate", run, *text)
    result_of("evaluate", run, "--all-checkpoints", *text)
    result_of("compress", run, "--form", "4 bits", "--form", "16 bits, rank 0.5", *text)
    other = tmp_path / "other"
    shutil.copytree(run, other)
    if not laid_out:
        monkeypatch.setattr("tide_lm.report.page.inline_chart", on_bare_axes)
    done = tide_lm("report", run, other, "--cards")
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    assert "per word" in (run / "export" / "README.md").read_text()
    page = (run / "report" / "index.html").read_text()
    drawn = {name for name in FIGURES if f'id="{name}"' in page}
    assert FIGURES.keys() - drawn == {"benchmarks"}  # which takes lm-eval, and has tests of its own
