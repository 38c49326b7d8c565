"""`tide-lm pack`, and a packed model in other commands, as a user calls them."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from command import call, result_of, tide_lm

from tide_lm.spec.form import Form
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
    header = file.header
    assert found["relative_bytes"] == found["bytes"] / (2 * header.vocab_size * header.blocks * header.hidden)
    assert file.sections["counts"].sum() > 0
    assert (folder / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("options", "form"),
    [
        (["--bits", 3, "--group", 16], Form(3, group=16)),
        (["--rank", 0.5, "--blocks", "joint"], Form(rank=0.5, blocks="joint")),
        (["--rank", 0.25], Form(rank=0.25)),
    ],
    ids=lambda value: str(value) if isinstance(value, Form) else "",
)
def test_the_options_of_pack_are_a_form(options, form, trained, tmp_path, monkeypatch):
    import tide_lm.compress.pack as module

    given, pack = [], module.pack
    monkeypatch.setattr(module, "pack", lambda *arguments: given.append(arguments[2]) or pack(*arguments))
    found = result_of("pack", trained, "--out", tmp_path / "packed", *options)
    assert given == [form]
    header = StoreFile(tmp_path / "packed" / "memory.tide").header
    assert (header.bits, header.group, header.ranks) == (form.bits, form.group, tuple(found["ranks"]))


def test_verify_reads_all_of_it(packed, tmp_path):
    folder, found = packed
    verified = result_of("pack", str(folder), "--verify")
    assert (verified["bytes"], verified["store"]) == (found["bytes"], found["store"])
    done = tide_lm("pack", folder, "--verify")
    assert done.stdout.startswith(
        f"{folder} is whole: {verified['tensors']} tensors and {verified['rows']:,} rows are as they were"
    )
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    header = StoreFile(broken / "memory.tide").header
    with (broken / "memory.tide").open("r+b") as file:
        file.seek(header.file_bytes - header.stride)
        file.write(b"not what was here")
    done = tide_lm("pack", str(broken), "--verify")
    assert done.returncode == 1
    assert f"{broken} is not whole: " in done.stderr
    assert "is damaged or cut off" in done.stderr


def test_the_store_of_another_packing_is_noticed(packed, trained, tmp_path):
    folder, broken = packed[0], tmp_path / "broken"
    result_of("pack", trained, "--out", tmp_path / "coarse", "--bits", "2")
    shutil.copytree(folder, broken)
    shutil.copy(tmp_path / "coarse" / "memory.tide", broken)
    done = tide_lm("pack", broken, "--verify")
    assert done.returncode == 1
    assert f"{broken} is not whole: " in done.said
    assert "is of another packing of this model, with 2 bits" in done.said
    config = json.loads((broken / "config.json").read_text())
    del config["memory_store"]["header"]  # as it was in folders of before
    (broken / "config.json").write_text(json.dumps(config))
    assert result_of("pack", broken, "--verify")["rows"]


def test_pack_names_the_next_command_and_no_empty_value(trained, tmp_path):
    done = tide_lm("pack", trained, "--out", tmp_path / "my model")
    assert "ranks" not in done.stdout
    assert done.stderr.endswith(f"Next: tide-lm serve '{tmp_path / 'my model'}'\n")


def test_what_needs_no_model_is_refused_without_torch(trained, tmp_path):
    """Which takes seconds to import."""
    (tmp_path / "taken").write_text("")
    calls = [
        ("pack", trained, "--out", tmp_path / "a", "--bits", 5),
        ("pack", trained, "--out", tmp_path / "taken"),
        ("pack", tmp_path / "missing", "--out", tmp_path / "a"),
        ("generate", tmp_path / "missing", "every"),
        ("generate", trained, "every", "--top-k", 5),
        ("generate", trained),
        ("generate", trained, "every", "--device", "gpu"),
    ]
    for words in calls:
        code = (
            "import sys; from tide_lm.cli import main\n"
            "try: main()\nfinally: assert 'torch' not in sys.modules"
        )
        command = [sys.executable, "-c", code, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode in (1, 2), words
        assert "AssertionError" not in done.stderr, words


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


def test_a_store_may_be_given_a_budget_and_tells_what_was_read(packed, text, tmp_path):
    folder, _ = packed
    rows = {}
    for budget in ("0", "64"):
        options = ["--text", text, "--window", "32", "--run", str(tmp_path), "--memory", f"store:{budget}"]
        done = tide_lm("evaluate", str(folder), *options)
        assert done.returncode == 0, done.stderr
        found = re.search(r"rows from the store: ([\d,]+) were in memory and ([\d,]+) were read", done.stderr)
        rows[budget] = [int(number.replace(",", "")) for number in found.groups()]
    assert rows["0"][0] == 0 < rows["0"][1]
    assert rows["64"] == [rows["0"][1], 0]
    for wrong in ("disk", "store:", "store:-1", "cpu:64"):
        done = tide_lm("evaluate", str(folder), "--memory", wrong)
        assert done.returncode == 2
        assert repr(wrong) in done.said
        assert "device, cpu, store and store:MIB" in done.said


def test_a_damaged_store_is_named_in_full(packed, text, tmp_path):
    broken = tmp_path / ("a folder with a name that is long " * 6)
    shutil.copytree(packed[0], broken)
    with (broken / "memory.tide").open("r+b") as file:
        file.truncate(70_000)
    done = tide_lm("evaluate", str(broken), "--memory", "store", "--text", text, "--run", str(tmp_path))
    assert done.returncode == 1
    assert f"{broken / 'memory.tide'} " in done.stderr
    assert "70,000 bytes" in done.stderr
    assert done.stderr.rstrip().endswith("copy it again")


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
        ([str(trained), "--out", str(folder)], 1, "is not an empty folder"),
        ([str(folder), "--verify", "--bits", "8"], 2, "--bits does nothing with --verify: leave it out"),
        ([str(trained), "--verify"], 1, "is not packed"),
        ([str(folder), "--out", str(tmp_path / "a")], 1, "this model is packed"),
    ):
        done = tide_lm("pack", *arguments)
        assert done.returncode == code, done.stderr
        assert said in done.said
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a.txt").write_text("a text")
    done = tide_lm("compress", str(folder), "--run", str(tmp_path), "--text", str(tmp_path / "a.txt"))
    assert "this model is packed, and has no tables" in done.stderr, done.stderr
    done = tide_lm("evaluate", str(trained), "--memory", "store", "--run", str(tmp_path))
    assert "pack it first, with `tide-lm pack`" in done.said


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.02, 0.1])
def test_a_kill_while_packing_leaves_no_folder(trained, tmp_path, delay):
    out = tmp_path / "packed"
    command = call("pack", trained, "--out", out)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 600
    while not (tmp_path / ".packed.tmp").exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.002)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert out.exists() or (tmp_path / ".packed.tmp").exists()
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
    assert "'4 bits, rank 3' is no form of tables: did you mean '16 bits, rank 0.3'?" in shown.said
    shown = tide_lm("compress", *options, "--form", "4 bits").stdout
    (trained_as,) = (text["perplexity"] for text in found["as_trained"].values())
    assert f"{trained_as:,.3f}" in shown
    assert "not measured" not in shown
    assert "4 bits" in shown
    assert "rare tokens" in shown
