"""`tide-lm pack`, and a packed model in other commands, as a user calls them."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
from cli.test_analyze_and_evaluate import result_of
from cli.test_commands import tide_lm

from tide_lm.store.format import BLOCK
from tide_lm.store.reader import StoreFile


@pytest.fixture(scope="module")
def packed(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pack") / "packed"
    found = result_of("pack", str(trained), "--out", str(folder), "--bits", "8")
    return folder, found


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("every layer knows the token beneath the context. " * 20)
    return str(path)


def test_pack_writes_a_store_and_says_how_large_it_is(packed):
    folder, found = packed
    file = StoreFile(folder / "memory.tide")
    assert found["bytes"] == (folder / "memory.tide").stat().st_size
    assert (found["bits"], found["ranks"], found["stride"] % BLOCK) == (8, [], 0)
    assert found["row_bytes"] == file.header.row_bytes
    assert file.sections["counts"].sum() > 0
    assert (folder / "tokenizer.json").exists()


def test_verify_reads_all_of_it(packed, tmp_path):
    folder, found = packed
    verified = result_of("pack", str(folder), "--verify")
    assert (verified["bytes"], verified["store"]) == (found["bytes"], found["store"])
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    header = StoreFile(broken / "memory.tide").header
    with (broken / "memory.tide").open("r+b") as file:
        file.seek(header.file_bytes - header.stride)
        file.write(b"not what was here")
    done = tide_lm("pack", str(broken), "--verify")
    assert done.returncode == 1
    assert "is damaged or cut off" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_packed_model_is_evaluated_from_wherever_its_rows_are(packed, trained, text, tmp_path):
    folder, _ = packed

    def perplexity(model, *more):
        found = result_of(
            "evaluate", str(model), "--text", text, "--window", "32", "--run", str(tmp_path), *more
        )
        shutil.rmtree(tmp_path / "results")
        return found["texts"]["text"]["perplexity"]

    whole = perplexity(trained)
    places = {perplexity(folder, "--memory", place) for place in ("device", "cpu", "store")}
    assert len(places) == 1
    assert perplexity(folder) in places
    assert places.pop() == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize("what", ["routing", "layer-drop", "distances", "neighbours", "collapse", "norms"])
def test_a_packed_model_is_analysed_from_its_store(packed, text, tmp_path, what):
    """Which has the counts of tokens too."""
    reads = ["--text", text, "--window", "32"] if what in ("routing", "layer-drop") else []
    options = [*reads, "--run", str(tmp_path / "its")]
    found = result_of("analyze", what, str(packed[0]), "--memory", "store", *options)
    assert (tmp_path / "its" / "results" / f"{what}.json").exists()
    assert list(found) == [str(packed[0])]


def test_what_cannot_be_packed_is_refused(packed, trained, tmp_path):
    folder, _ = packed
    for arguments, code, said in (
        ([str(trained)], 2, "give --out, a folder to write, or --verify"),
        ([str(trained), "--out", str(tmp_path / "a"), "--verify"], 2, "and not both"),
        (
            [str(trained), "--out", str(tmp_path / "a"), "--bits", "5"],
            2,
            "bits is 5: use one of 16, 8, 4, 3, 2",
        ),
        ([str(trained), "--out", str(tmp_path / "a"), "--rank", "2"], 2, "the rank is 2.0"),
        ([str(trained), "--out", str(tmp_path / "a"), "--blocks", "joint"], 2, "give one below 1"),
        ([str(trained), "--out", str(tmp_path)], 1, "is there already"),
        ([str(trained), "--verify"], 1, "has its tables among its weights"),
        ([str(folder), "--out", str(tmp_path / "a")], 1, "a packed memory cannot be trained"),
    ):
        done = tide_lm("pack", *arguments)
        assert done.returncode == code, done.stderr
        assert said in " ".join(done.stderr.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []
    done = tide_lm("evaluate", str(trained), "--memory", "store", "--run", str(tmp_path))
    assert "pack it first, with `tide-lm pack`" in " ".join(done.stderr.split())


def test_a_kill_while_packing_leaves_no_folder(trained, tmp_path):
    out = tmp_path / "packed"
    command = [sys.executable, "-m", "tide_lm", "pack", str(trained), "--out", str(out)]
    for delay in (0.0, 0.02, 0.1):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 120
        while not (tmp_path / ".packed.tmp").exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if out.exists():  # it was done before
            assert result_of("pack", str(out), "--verify")["rows"]
            shutil.rmtree(out)
    result_of("pack", str(trained), "--out", str(out))
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


def test_compress_measures_forms_and_shows_them(trained, text, tmp_path):
    options = [str(trained), "--text", text, "--window", "32", "--run", str(tmp_path)]
    found = result_of("compress", *options, "--form", "16 bits", "--form", "2 bits")
    assert [record["form"] for record in found["forms"]] == ["16 bits", "2 bits"]
    assert found["forms"][1]["relative_bytes"] < found["forms"][0]["relative_bytes"]
    kept = json.loads((tmp_path / "results" / "compression.json").read_text())
    assert kept["forms"] == found["forms"]
    shown = tide_lm("compress", *options, "--form", "4 bits, rank 3")
    assert shown.returncode == 2
    assert "'4 bits, rank 3' is none of '16 bits', '8 bits'" in " ".join(
        shown.stderr.replace("│", " ").split()
    )
    assert "4 bits" in tide_lm("compress", *options, "--form", "4 bits").stdout
