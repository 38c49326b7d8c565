import json
import os
import signal
import subprocess
import sys

import pytest

from tide_lm.run import files, hub
from tide_lm.run.directory import RunDirectory, are_one, write_result
from tide_lm.run.provenance import provenance


def test_a_result_says_how_it_was_made(tmp_path):
    path = write_result(tmp_path / "run", "norms", {"value": 1.5, "token": "é"}, seed=7)
    assert path == tmp_path / "run" / "results" / "norms.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    assert (record["value"], record["token"]) == (1.5, "é")
    provenance = record["provenance"]
    assert provenance["seed"] == 7
    assert provenance["versions"]["torch"]
    assert provenance["machine"]["cores"] == os.cpu_count()
    assert provenance["command"]


def test_results_of_a_folder_that_is_no_run_are_not_a_runs(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in run, other:
        folder.mkdir()
    (run / "config.json").write_text('{"model": {}, "data": {}, "optim": {}, "train": {}}')
    assert not are_one(str(other), str(run))
    other.rmdir()
    assert are_one(str(other), str(run))  # it may have been moved


@pytest.mark.parametrize("name", ["a--b", "a..b", "me/model.git", "me/mine-", "runs/mine", "a/b/c", "./a"])
def test_what_cannot_be_a_name_on_the_hub_is_not_looked_for_there(name):
    assert hub.may_be_name("me/mine")
    assert not hub.may_be_name(name)


@pytest.mark.parametrize("variable", ["https_proxy", "all_proxy"])
def test_behind_a_proxy_the_hub_is_asked(variable, monkeypatch):
    monkeypatch.setattr(
        hub.socket, "create_connection", lambda *_, **__: pytest.fail("it went past the proxy")
    )
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    assert hub._answers("https://huggingface.co")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "result.json"
    files.write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        files.write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]


@pytest.fixture
def events(monkeypatch):
    """What is synced to disk, as inode and size, and when something is given its name, in their order."""
    seen: list = []

    def note_sync(descriptor) -> None:
        found = os.fstat(descriptor)
        seen.append((found.st_ino, found.st_size))

    monkeypatch.setattr(os, "fsync", note_sync)
    for name in ("rename", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *paths, real=real: (real(*paths), seen.append("named")))
    return seen


def on_disk(*paths) -> list[tuple[int, int]]:
    return [(path.stat().st_ino, path.stat().st_size) for path in paths]


@pytest.mark.parametrize("write", ["write", "copy"])
def test_a_file_is_on_disk_before_it_has_its_name_and_then_so_is_the_name(tmp_path, events, write):
    path, other = tmp_path / "result.json", tmp_path / "other"
    other.write_text("whole")
    if write == "write":
        files.write_atomically(path, "whole")
    else:
        files.copy_atomically(other, path)
    assert events == [*on_disk(path), "named", *on_disk(tmp_path)]
    assert path.read_text() == "whole"


def test_a_folder_is_on_disk_with_all_in_it_before_it_has_its_name(tmp_path, events):
    final = tmp_path / "export"
    for replaced in (False, True):
        events.clear()
        with files.write_folder(final) as folder:
            (folder / "inner").mkdir()
            (folder / "inner" / "file").write_text(f"replaced: {replaced}")
        *before, at_last = events
        named = before.index("named")
        assert set(before[:named]) == {*on_disk(final / "inner" / "file", final / "inner", final)}
        assert before[named:] == ["named"] * (1 + replaced)
        assert at_last[0] == tmp_path.stat().st_ino
        assert (final / "inner" / "file").read_text() == f"replaced: {replaced}"
    assert os.listdir(tmp_path) == ["export"]


def test_a_record_of_metrics_is_on_disk_when_it_was_added(tmp_path, events):
    run = RunDirectory(tmp_path)
    for step in (1, 2):
        events.clear()
        run.add_metrics({"step": step})
        assert events == on_disk(run.metrics)
    assert run.last_metrics() == {"step": 2}


def test_a_writer_killed_at_any_time_leaves_a_whole_file(tmp_path):
    path = tmp_path / "result.json"
    code = """
import sys, pathlib
from tide_lm.run import files
for i in range(10**9):
    files.write_atomically(pathlib.Path(sys.argv[1]), str(i % 10) * 2_000_000)
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
    assert provenance()["command"] == command
