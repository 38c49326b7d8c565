"""What must answer at once never loads torch or transformers."""

import json
import os
import subprocess
import sys

import pytest

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
    "evaluate empty": "empty is no model, since it has no config.json",
    "evaluate runs": "choose one of runs/mine",
    "evaluate blank": "blank/config.json describes neither a run nor a model",
    "evaluate blank/config.json": "is a file",
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
    "figure nrms runs/mine": "did you mean 'norms'?",
    "figure norms runs/mni": "there is no run runs/mni",
    "report runs/mni": "there is no run runs/mni",
    "estimate tide-0e-tiny": "write 'base-tiny'",
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


def test_wrong_calls_are_refused_before_torch_is_loaded(tmp_path):
    (tmp_path / "runs" / "mine" / "export").mkdir(parents=True)
    settings = {"model": {}, "data": {}, "optim": {}, "train": {}}
    (tmp_path / "runs" / "mine" / "config.json").write_text(json.dumps(settings))
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


def test_the_packages_names_are_all_there():
    import tide_lm

    for name in tide_lm.__all__:
        assert getattr(tide_lm, name).__name__ == name
    assert set(tide_lm.__all__) <= set(dir(tide_lm))
    with pytest.raises(AttributeError, match="no attribute 'TideTransformer'"):
        tide_lm.TideTransformer  # noqa: B018
