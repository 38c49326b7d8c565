"""What a cache of rows finds, on streams that can be counted by hand and on text from end to end."""

import json
import lzma
import re
from pydoc_data.topics import topics

import numpy as np
import pytest
from kept_runs import keep
from typer.testing import CliRunner

from studies import cache, data, runner
from studies.__main__ import app
from studies.cache import AT_ONCE, at_budget, budgets, first_tokens, hits_by_use, look_up
from studies.cache_report import figure, hits, read, store, with_default
from studies.report import write_report
from tide_lm.bench.store import random_store
from tide_lm.data.tokenizers import load
from tide_lm.spec.presets import get
from tide_lm.store.reader import StoredRows, StoreFile

SHAPE = get("tide-2e-tiny").model
COUNTS = np.arange(SHAPE.vocab_size)[::-1]  # the first tokens are the most frequent


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "rows.tide"
    random_store(path, SHAPE, 4, COUNTS)
    return StoreFile(path)


def some_text(length):
    """Return tokens of which five in six are drawn by frequency, and the others come in bursts."""
    random = np.random.default_rng(0)
    frequent = random.zipf(1.3, length * 5 // 6) % SHAPE.vocab_size
    bursts = np.repeat(random.integers(SHAPE.vocab_size, size=length // 30), 5)
    return np.insert(frequent, random.integers(len(frequent), size=len(bursts)), bursts)


def test_a_store_may_have_counts_and_need_not(file, tmp_path):
    assert np.array_equal(file.sections["counts"], COUNTS)
    random_store(tmp_path / "rows.tide", SHAPE, 4)
    assert "counts" not in StoreFile(tmp_path / "rows.tide").sections


def test_hits_and_misses_of_a_stream_are_those_counted_by_hand(file):
    """With places for two, which begin with 0 and 1: 9 comes for 1, 1 for 0, 0 for 9, and 9 for 1."""
    row_bytes, stream = file.header.codec.row_bytes, np.array([0, 9, 0, 9, 1, 9, 0, 0])
    found = look_up(StoredRows(file, 2 * row_bytes), stream, 1)
    assert (found["hits"], found["misses"]) == (5, 3)
    assert found["hit_rate"] == pytest.approx(5 / 8)
    assert found["bytes_per_token"] == pytest.approx(3 * row_bytes / 8)
    assert found["median_us"] > 0
    assert found["mean_us"] > 0


def test_tokens_that_are_fetched_together_count_once(file):
    """Chunks {0, 9}, {1, 9} and {0, 1}, with the same places."""
    stream = np.array([0, 9, 0, 9, 1, 9, 1, 1, 0, 1])
    found = look_up(StoredRows(file, 2 * file.header.codec.row_bytes), stream, 4)
    assert (found["hits"], found["misses"]) == (3, 3)


@pytest.mark.parametrize("length", [300, pytest.param(3600, marks=pytest.mark.slow)])
def test_more_bytes_never_find_less(file, length):
    """Take a text that is longer than what prefill looks up at once, too."""
    text = some_text(length)
    sizes = [rows * file.header.codec.row_bytes for rows in (0, 1, 30, 300, SHAPE.vocab_size)]
    points = [at_budget(file, size, {"text": text})["texts"]["text"] for size in sizes]
    for way in AT_ONCE:
        rates = [point[way]["hit_rate"] for point in points]
        assert rates == sorted(rates)
        assert (rates[0], rates[-1]) == (0, 1)
    assert points[-1]["by_frequency"] == 1
    assert points[-1]["by_use"] == (len(text) - len(np.unique(text))) / len(text)


@pytest.mark.parametrize("rows", [1, 7, 60, 900])
def test_alone_frequency_and_use_find_what_was_counted(file, rows):
    text = some_text(300)
    found = at_budget(file, rows * file.header.codec.row_bytes, {"text": text})
    assert found["rows"] == rows
    assert found["texts"]["text"]["by_frequency"] == (text < rows).mean()
    assert found["texts"]["text"]["decode"]["hit_rate"] >= found["texts"]["text"]["by_use"]


@pytest.mark.parametrize(
    ("stream", "rows", "hits"),
    [
        ([1, 2, 1, 2, 1, 2], 1, 0),
        ([1, 2, 3, 1, 2, 3], 2, 0),
        ([1, 1, 2, 2, 3, 3], 1, 3),
        ([1, 2, 1, 3, 1], 2, 2),
        ([1, 2, 3, 1, 2, 3], 3, 3),
        ([1, 1, 1], 0, 0),
    ],
)
def test_by_use_alone_is_what_was_counted_by_hand(stream, rows, hits):
    assert hits_by_use(np.array(stream), rows) == hits


def test_budgets_are_nothing_powers_of_two_and_the_whole_table():
    assert budgets(5 << 20) == [0, 1 << 20, 2 << 20, 4 << 20, 5 << 20]
    assert budgets(4 << 20) == [0, 1 << 20, 2 << 20, 4 << 20]
    assert budgets(1000) == [0, 1000]


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Prepared data, and a text in the place of the shared ones."""
    texts = [topics[name][:800] for name in sorted(topics)[:20]]
    for name, part in {"a_train": texts[:16], "a_valid": texts[16:]}.items():
        with lzma.open(tmp_path / f"{name}.jsonl.xz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in part)
    data.prepare(tmp_path, tmp_path / "data", vocabulary=500, tokenizer=None)
    monkeypatch.setattr(runner, "TEXTS", {"valid": "a_valid.jsonl.xz"})
    return tmp_path


def call(study, *options):
    places = [str(study), "--data", str(study / "data"), "--folder", str(study)]
    return CliRunner().invoke(
        app, ["cache", *places, "--out", str(study / "results" / "cache.json"), *options]
    )


def test_text_is_measured_and_written_with_how_and_the_store_removed(study, monkeypatch):
    monkeypatch.setattr(cache, "CACHE_BYTES", 1 << 20)
    done = call(study, "--model", "tide-8e-small", "--bits", "16", "--tokens", "300")
    assert done.exit_code == 0, done.output
    found = read(study / "results")
    assert found["provenance"]["commit"]
    assert found["texts"]["valid"]["tokens"] == 300
    assert found["vocab_size"] == 500
    assert found["table_bytes"] == 500 * found["row_bytes"] > 1 << 20
    assert [point["cache_bytes"] for point in found["curve"]] == budgets(found["table_bytes"])
    assert found["curve"][-1]["share"] == 1
    assert found["curve"][-1]["texts"]["valid"]["decode"]["misses"] == 0
    assert found["curve"][0]["texts"]["valid"]["decode"]["misses"] == 300
    assert not list(study.glob(".cache-study-*"))
    tokens = first_tokens(study / "a_valid.jsonl.xz", load(str(study / "data" / "tokenizer")), 300)
    point, counts = found["curve"][1], np.load(study / "data" / "counts.npy")
    most_frequent = np.argsort(-counts, kind="stable")[: point["rows"]]
    expected = np.isin(tokens, most_frequent).mean()
    assert point["texts"]["valid"]["by_frequency"] == pytest.approx(expected)
    keep(study / "results", "base", "paper", 0, 5.0)
    write_report(study / "results", study / "docs")
    assert "valid" in (study / "docs" / "study" / "cache.svg").read_text()
    point = found["curve"][1]
    rate, alone = point["texts"]["valid"]["decode"]["hit_rate"], point["texts"]["valid"]["by_frequency"]
    row = f"| 1 | {100 * point['share']:.1f} | {100 * rate:.1f} | {100 * alone:.1f} |"
    assert hits(found).splitlines()[3] == row
    columns, _, row = with_default(found).splitlines()
    assert columns.startswith("| text, with 1 MiB | different tokens | ")
    decode = point["texts"]["valid"]["decode"]
    told = f"{decode['bytes_per_token']:,.0f} | {decode['mean_us']:,.0f} | {decode['median_us']:,.0f} |"
    assert row.startswith(f"| valid | {len(set(tokens.tolist()))} | {100 * rate:.1f} | {100 * alone:.1f} | ")
    assert row.endswith(told)
    assert f"| bytes per row, without its checksum | {found['row_bytes']:,} |" in store(found)
    assert "| tokens of valid | 300 |" in store(found)
    assert figure(found).endswith("to 100.0 %.](study/cache.svg)")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "base-tiny"], "base-tiny.*a preset with memory"),
        (["--model", "tide-8e"], "preset 'tide-8e'"),
        (["--bits", "5"], "5.*use one of"),
        (["--data", "nowhere"], "nowhere.*prepared data"),
    ],
)
def test_what_cannot_be_measured_is_named(study, options, said):
    done = call(study, *options)
    assert isinstance(done.exception, ValueError)
    assert re.search(said, str(done.exception))
    assert not (study / "results" / "cache.json").exists()


def test_a_text_that_is_missing_or_empty_is_named(study, monkeypatch):
    monkeypatch.setattr(runner, "TEXTS", {"gone": "gone.jsonl"})
    assert "there is no" in str(call(study).exception)
    monkeypatch.setattr(runner, "TEXTS", {"empty": "empty.jsonl"})
    (study / "empty.jsonl").touch()
    assert "empty.jsonl holds no tokens: give a file with text" in str(call(study).exception)


def test_a_result_that_is_cut_off_is_named_and_none_is_none(tmp_path):
    assert read(tmp_path) is None
    (tmp_path / "cache.json").write_text('{"curve": [')
    with pytest.raises(ValueError, match=r"cache.json is no JSON .*: make it again with"):
        read(tmp_path)
