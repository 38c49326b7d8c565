import json
import os
import signal
import subprocess
import sys

import pytest

from tide_lm import runs


def test_a_result_says_how_it_was_made(tmp_path):
    path = runs.write_result(tmp_path / "run", "norms", {"value": 1.5, "token": "é"}, seed=7)
    assert path == tmp_path / "run" / "results" / "norms.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    assert (record["value"], record["token"]) == (1.5, "é")
    provenance = record["provenance"]
    assert provenance["seed"] == 7
    assert provenance["versions"]["torch"]
    assert provenance["machine"]["cores"] == os.cpu_count()
    assert provenance["command"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "result.json"
    runs.write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        runs.write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]


def test_a_writer_killed_at_any_time_leaves_a_whole_file(tmp_path):
    path = tmp_path / "result.json"
    code = """
import sys, pathlib
from tide_lm import runs
for i in range(10**9):
    runs.write_atomically(pathlib.Path(sys.argv[1]), str(i % 10) * 2_000_000)
    print(i, flush=True)
"""
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    for _ in range(5):
        writer.stdout.readline()
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    text = path.read_text()
    assert len(text) == 2_000_000
    assert set(text) == {text[0]}


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("bin/tide-lm", "tide-lm run"),
        ("src/tide_lm/__main__.py", "tide-lm run"),
        ("studies/__main__.py", "python -m studies run"),
        ("benchmarks/row_adamw.py", "python benchmarks/row_adamw.py run"),
    ],
)
def test_the_command_is_what_was_called(file, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", [file, "run"])
    assert runs.provenance()["command"] == command
