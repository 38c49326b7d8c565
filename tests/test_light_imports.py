"""What must answer at once never loads torch or transformers."""

import resource
import subprocess
import sys

import pytest

LOADED = "; import sys; print([name for name in ('torch', 'transformers', 'triton') if name in sys.modules])"


@pytest.mark.parametrize(
    "module", ["", ".config", ".presets", ".estimate", ".runs", ".model_card", ".report.page", ".cli"]
)
def test_importing_loads_neither_torch_nor_transformers(module):
    done = subprocess.run(
        [sys.executable, "-c", f"import tide_lm{module}{LOADED}"], capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["presets"], ["estimate"], ["estimate", "tide-24e-3b", "--json"]]
)
def test_commands_that_only_calculate_load_neither(arguments):
    code = f"""
import sys
from tide_lm.cli import main
sys.argv = ["tide-lm", *{arguments!r}]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
assert not {{"torch", "transformers", "triton"}} & set(sys.modules)
print("light")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip().endswith("light"), done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["estimate"]])
def test_commands_that_only_calculate_answer_within_half_a_second(arguments):
    """In processor time, the best of ten, so that a busy machine does not count."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "tide_lm", *arguments], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert any(seconds() < 0.5 for _ in range(10))


def test_the_figures_that_are_offered_are_those_of_the_catalogue():
    from tide_lm.cli.figure import NAMES
    from tide_lm.report.catalogue import FIGURES

    assert tuple(FIGURES) == NAMES


def test_the_packages_names_are_all_there():
    import tide_lm

    for name in tide_lm.__all__:
        assert getattr(tide_lm, name).__name__ == name
    assert set(tide_lm.__all__) <= set(dir(tide_lm))
    with pytest.raises(AttributeError, match="no attribute 'TideTransformer'"):
        tide_lm.TideTransformer  # noqa: B018
