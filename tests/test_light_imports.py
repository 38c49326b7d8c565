"""What must answer at once never loads torch or transformers."""

import json
import os
import subprocess
import sys

import pytest
from transformers import LlamaConfig

from tide_lm.run.settings import RunConfig

MODULES = (
    "",
    ".spec.config",
    ".spec.presets",
    ".spec.estimate",
    ".run.directory",
    ".run.files",
    ".run.model_card",
    ".run.provenance",
    ".run.settings",
    ".report.page",
    ".cli",
)
REFUSED = {  # in a folder that has a run, an empty folder and a model without a config
    "evaluate runs/mni": "did you mean 'runs/mine'?",
    "evaluate ./nothing": "there is no ./nothing",
    "evaluate owner/name": "HF_HUB_OFFLINE",
    "evaluate owner--name": "there is no owner--name: give a run",
    "evaluate empty": "empty has no config.json, so it is no model",
    "evaluate runs": "choose one of runs/base, runs/mine",
    "evaluate blank": "blank/config.json describes neither a run nor a model",
    "evaluate blank/config.json": "is a file",
    "evaluate runs/mine --window 8 --stride 9": "--stride is 9 and --window 8: lower the stride",
    "evaluate runs/mine --memory cpu": "--memory cpu: runs/mine is not packed",
    "estimate blank": "blank/config.json has no model_type",
    "estimate empty": "cannot read a model config from empty/config.json (No such file or directory)",
    "train --from nowhere": "cannot read a model config from nowhere (No such file or directory)",
    "train empty": "cannot read the run's settings from empty (Is a directory)",
    "train --set train.dtype=bf16": "did you mean 'bfloat16'?",
    "train --set recipe=bst": "did you mean 'best'?",
    "prepare storys --out new": "did you mean 'stories'?",
    "prepare --tokenizer lama3 --out new": "did you mean 'llama3'?",
    "prepare --tokenizer blank/config.json --out new": "since it is a file",
    "prepare --executor slrm --tasks 2 --out new": "did you mean 'slurm'?",
    "analyze routing runs/base": "runs/base has no memory, which routing needs",
    "compress runs/base": "runs/base has no memory, which compress needs",
    "pack runs/base --out new": "runs/base has no memory, which pack needs",
    "pack runs/mine --out new --counts nowhere": "there is no nowhere",
    "pack runs/mine --out new --rank 0.5 --blocks jont": "did you mean 'joint'?",
    "pack runs/mine --verify": "runs/mine is not packed",
    "bench store tide-2e-tiny --folder nowhere": "--folder nowhere is not a folder",
    "report blank": "blank/config.json holds no settings of a run (it is empty)",
    "evaluate runs/mine --run blank/config.json": "there is a file where a folder is needed",
    "evaluate runs/mine --all-checkpoints --counts nowhere.npy": "there is no nowhere.npy",
    "evaluate runs/mine --text nowhere.txt": "there is no 'nowhere.txt'",
    "evaluate runs/mine --benchmarks hub --tasks pika": "did you mean 'piqa'?",
    "evaluate runs/mine --tokens 3": "No such option",
    "analyze routng runs/mine": "did you mean 'routing'?",
    "analyze all runs/mine runs/mni": "did you mean 'runs/mine'?",
    "compress runs/mni": "did you mean 'runs/mine'?",
    "compress runs/mine --form 4bits": "did you mean '4 bits'?",
    "pack runs/mni --out packed": "did you mean 'runs/mine'?",
    "pack runs/mine --out packed --bits 5": "bits is 5",
    "pack runs/mine --out blank/config.json/packed": "there is a file where a folder is needed",
    "upcycle runs/mine --out blank/config.json/more": "there is a file where a folder is needed",
    "figure nrms runs/mine": "did you mean 'norms'?",
    "figure norms runs/mni": "there is no run runs/mni",
    "report runs/mni": "there is no run runs/mni",
    "estimate tide-0e-tiny": "write 'base-tiny'",
    "estimate runs/mni": "did you mean 'runs/mine'?",
    "upcycle blnk --out new": "did you mean 'blank'?",
    "estimate tide-8e-1bb": "did you mean 'tide-8e-1b'?",
    "bench train tide-8e-tny": "did you mean 'tide-8e-tiny'?",
    "bench decode tide-2e-tiny --memory stor": "did you mean 'store'?",
    "bench store tide-2e-tiny --bits 5": "bits is 5",
    "trian": "train",
}
COMMANDS = "--help", "--version", "presets", "estimate", "estimate tide-24e-3b --json"


def test_neither_modules_nor_commands_that_only_calculate_load_torch_or_transformers():
    """Fork a process for each from one that has imported nothing."""
    code = f"""
import importlib, os, sys
def apart(name, act):
    if os.fork():
        assert os.wait()[1] == 0, name
        return
    try:
        act(name)
    except SystemExit as stop:
        assert not stop.code, stop.code
    assert not {{"torch", "transformers", "triton"}} & set(sys.modules)
    assert act is not run or not {{"matplotlib", "numpy"}} & set(sys.modules)
    assert act is not run or name.startswith("--") or "tide_lm.cli.explore" not in sys.modules
    sys.stdout.flush()
    os._exit(0)
def run(command):
    from tide_lm.cli import main
    sys.argv = ["tide-lm", *command.split()]
    main()
for module in {MODULES}:
    apart("tide_lm" + module, importlib.import_module)
for command in {COMMANDS}:
    apart(command, run)
print("light")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.endswith("\nlight\n"), done.stderr
    assert '"tables"' in done.stdout


@pytest.mark.slow
def test_wrong_calls_are_refused_before_torch_is_loaded(tmp_path):
    (tmp_path / "runs" / "mine" / "export").mkdir(parents=True)
    settings: dict[str, dict] = {"model": {}, "data": {}, "optim": {}, "train": {}}
    (tmp_path / "runs" / "mine" / "config.json").write_text(json.dumps(settings))
    (tmp_path / "runs" / "mine" / "export" / "config.json").write_text('{"num_memory_blocks": 4}')
    (tmp_path / "runs" / "base" / "export").mkdir(parents=True)
    settings["model"]["preset"] = "base-tiny"
    (tmp_path / "runs" / "base" / "config.json").write_text(json.dumps(settings))
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "config.json").write_text("{}")
    code = f"""
import contextlib, io, os, sys
from tide_lm.cli import main
for command, words in {REFUSED}.items():
    if os.fork():
        assert os.wait()[1] == 0, command
        continue
    sys.argv = ["tide-lm", *command.split()]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main()
        except SystemExit as stop:
            status = stop.code
    shown = " ".join(said.getvalue().replace("│", " ").split())
    assert words in shown, shown
    assert status == (2 if "Usage:" in shown else 1), status
    assert not {{"torch", "transformers", "triton"}} & set(sys.modules)
    os._exit(0)
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "1000"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)


def test_a_call_that_cannot_work_is_refused_without_torch_or_transformers(prepared, tmp_path):
    for name, values in ("gpt", {"model_type": "gpt2"}), ("llama", LlamaConfig(vocab_size=5000).to_dict()):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    vocabulary = {"model": {"vocab": {"other": 0}}}
    (tmp_path / "llama" / "tokenizer.json").write_text(json.dumps(vocabulary))
    (tmp_path / "run").mkdir()
    config = RunConfig.load(None, [f"data.path={prepared}"])
    (tmp_path / "run" / "config.json").write_text(json.dumps(config.to_dict()))
    (tmp_path / "a.txt").write_text("some text")
    data = f"--set data.path={prepared}"
    calls = {
        f"train --run run {data}": (1, "holds a run already"),
        f"train --run run {data} --resume --set optim.max_lr=0.5": (1, "the settings differ"),
        "train --run busy --resume": (1, "in use by another trainer"),
        "train --run new --set data.path=nowhere": (1, "nowhere has no prepared data"),
        "train --run new --set data.path=a.txt": (1, "tide-lm prepare a.txt --out"),
        f"train --run new {data} --set train.stepps=2": (2, "did you mean 'steps'"),
        f"train --run new {data} --recume": (2, "--resume"),
        f"train --run a.txt/run {data}": (1, "a.txt"),
        f"train --run new {data} --set model.vocab_size=100": (1, "set model.vocab_size="),
        f"train --run new {data} --from llama": (1, "was not prepared with the tokenizer of llama"),
        "prepare a.txt --out run": (1, "run exists and is not an empty folder"),
        "prepare nowhere.txt --out new": (1, "there is no 'nowhere.txt'"),
        "prepare a.txt --tokenizer gpt --out new": (
            1,
            "'gpt' cannot be loaded, since the folder has no tokenizer.json",
        ),
        "prepare a.txt --tokenizer ./none --out new": (1, "'./none' cannot be loaded, since there is no"),
        "prepare a.txt --tokenizer none --out new": (1, "HF_HUB_OFFLINE"),
        "upcycle llama --out run": (1, "run exists and is not an empty folder"),
        "upcycle my-llama --out new": (1, "there is no my-llama"),
        "upcycle a.txt --out new": (1, "a.txt is a file"),
        "upcycle gpt --out new": (1, "of type 'gpt2'"),
    }
    code = """
import json, os, sys
from tide_lm.run.directory import RunDirectory
from pathlib import Path
for call, (status, said) in json.loads(sys.argv[1]).items():
    if not os.fork():
        from tide_lm.cli import main
        sys.argv = ["tide-lm", *call.split()]
        try:
            with RunDirectory(Path("busy")).locked():
                json.dump(json.load(open("run/config.json")), open("busy/config.json", "w"))
                main()
        except SystemExit as stop:
            print(stop.code, sorted({"torch", "transformers", "triton"} & set(sys.modules)), flush=True)
        os._exit(0)
    os.wait()
    print(file=sys.stderr, flush=True)
    print("=====", file=sys.stderr, flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(calls)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "1000"},
    )
    said = done.stderr.split("=====\n")
    for call, found, (status, told), lines in zip(
        calls, done.stdout.splitlines(), calls.values(), said, strict=False
    ):
        assert (found, told in lines) == (f"{status} []", True), (call, found, lines)
    assert len(done.stdout.splitlines()) == len(calls)
    assert {path.name for path in tmp_path.iterdir()} == {"gpt", "llama", "run", "busy", "a.txt"}


def test_the_packages_names_are_all_there():
    import tide_lm

    for name in tide_lm.__all__:
        assert getattr(tide_lm, name).__name__ == name
    assert set(tide_lm.__all__) <= set(dir(tide_lm))
    with pytest.raises(AttributeError, match="no attribute 'TideTransformer'"):
        tide_lm.TideTransformer  # noqa: B018
