"""The notebooks run from top to bottom, one after the other, as the first makes what the others look at."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
ORDER = "train", "upcycle", "serve", "study"


def cells(name: str) -> list[dict]:
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


def test_each_is_known_here_and_holds_no_output():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(ORDER)
    for name in ORDER:
        for cell in cells(name):
            assert not cell.get("outputs"), name
            assert cell.get("execution_count") is None, name


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("notebooks")


@pytest.mark.slow
def test_they_run_one_after_the_other(place):
    said = {}
    for name in ORDER:
        code = "\n".join("".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == "code")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=place)
        assert done.returncode == 0, f"{name}: {done.stderr[-3000:]}"
        said[name] = done.stdout
    assert "held-out loss: base" in said["train"]
    assert "to the bit" in said["upcycle"]
    assert "read from disk" in said["serve"]
    assert said["study"].count("null bank") > 2
    assert (place / "runs/notebook/report.html").exists()
