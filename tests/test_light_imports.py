"""What must answer at once never loads torch or transformers."""

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


def test_the_packages_names_are_all_there():
    import tide_lm

    for name in tide_lm.__all__:
        assert getattr(tide_lm, name).__name__ == name
    assert set(tide_lm.__all__) <= set(dir(tide_lm))
    with pytest.raises(AttributeError, match="no attribute 'TideTransformer'"):
        tide_lm.TideTransformer  # noqa: B018
