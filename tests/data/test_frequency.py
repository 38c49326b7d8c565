"""Frequency deciles (the paper's appendix on bins) and loss per decile."""

import json
from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tide_lm.data.frequency import (
    BINS,
    COMMON,
    MID,
    RARE,
    UNBINNED,
    FrequencyBins,
    LossByBin,
    clean_types,
    deciles,
)
from tide_lm.data.shards import Manifest

COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=80).map(np.array)


def all_kept(counts_V: np.ndarray) -> np.ndarray:
    return np.ones(len(counts_V), dtype=bool)


def bins_of(bins_V: list[int]) -> FrequencyBins:
    return FrequencyBins(np.array(bins_V, dtype=np.int8), np.ones(len(bins_V), dtype=np.int64))


def test_the_papers_types_fall_into_its_bins():
    counts_V = np.random.default_rng(0).zipf(1.3, 65_541)
    bins_V = deciles(counts_V, all_kept(counts_V))
    assert np.bincount(bins_V).tolist() == [6_555] + 9 * [6_554]
    highest, lowest = ([pick(counts_V[bins_V == b]) for b in range(BINS)] for pick in (np.max, np.min))
    assert all(below <= above for below, above in zip(highest[:-1], lowest[1:], strict=True))


@given(COUNTS, st.data())
def test_deciles_follow_the_equation(counts_V, data):
    keep_V = np.array(data.draw(st.lists(st.booleans(), min_size=len(counts_V), max_size=len(counts_V))))
    ranked = sorted((count, id) for id, count in enumerate(counts_V) if keep_V[id])
    expected = [UNBINNED] * len(counts_V)
    for rank, (_, id) in enumerate(ranked):
        expected[id] = min(rank * 10 // len(ranked), 9)
    assert deciles(counts_V, keep_V).tolist() == expected


def test_ties_are_broken_by_id():
    counts_V = np.full(20, 7)
    assert deciles(counts_V, all_kept(counts_V)).tolist() == sorted([*range(BINS)] * 2)


def test_the_cap_leaves_out_the_most_frequent_and_ranks_the_rest():
    counts_V = np.array([*range(1, 11), 999_999, 1_000_000])
    capped = deciles(counts_V, all_kept(counts_V), cap=999_999)
    assert capped.tolist() == [*deciles(counts_V[:-1], all_kept(counts_V[:-1])), UNBINNED]
    assert deciles(counts_V, all_kept(counts_V))[-1] == 9


def test_groups_are_the_papers():
    assert (len(RARE), len(MID), len(COMMON)) == (3, 4, 3)
    assert [*RARE, *MID, *COMMON] == [*range(BINS)]


def test_the_filter_keeps_letters_and_digits_that_occur(tokenizer):
    def id_of(token: str) -> int:
        return tokenizer.convert_tokens_to_ids(token)

    counts_V = np.ones(len(tokenizer), dtype=np.int64)
    counts_V[id_of("b")] = 0
    keep_V = clean_types(counts_V, tokenizer)
    space, newline, lone_byte = "Ġ", "Ċ", "Ã"
    kept = ["a", "7", "Z", tokenizer.tokenize("the token")[-1]]
    left_out = ["b", "<bos>", "<eos>", "<pad>", space, newline, lone_byte, "!", "~", "_"]
    assert all(keep_V[id_of(token)] for token in kept)
    assert not any(keep_V[id_of(token)] for token in left_out)


def test_added_special_tokens_without_a_role_are_left_out(tokenizer):
    tokenizer = deepcopy(tokenizer)
    tokenizer.add_tokens(["reserved7"], special_tokens=True)
    tokenizer.add_tokens(["ordinary7"])
    assert clean_types(np.ones(len(tokenizer), dtype=np.int64), tokenizer)[-2:].tolist() == [False, True]


def test_bins_of_prepared_data_and_of_a_file_agree(tokenizer, tmp_path):
    counts_V = np.random.default_rng(1).integers(0, 50, len(tokenizer))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    np.save(tmp_path / "counts.npy", counts_V)
    Manifest("uint16", len(tokenizer), "0" * 64, 0, 1, {}, {"train": ()}).write(tmp_path)
    (tmp_path / "counts.json").write_text(json.dumps({id: int(n) for id, n in enumerate(counts_V) if n}))
    expected = FrequencyBins.from_prepared(tmp_path)
    assert (expected.bins_V == deciles(counts_V, clean_types(counts_V, tokenizer))).all()
    for bins in (
        FrequencyBins.from_counts_file(tmp_path / "counts.json", tokenizer),
        FrequencyBins.from_counts_file(tmp_path / "counts.npy", tokenizer),
    ):
        assert (bins.bins_V == expected.bins_V).all()
        assert (bins.counts_V == counts_V).all()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.npy", None, "No such file"),
        ("empty.npy", b"", "one per id"),
        ("damaged.npy", b"\x93NUMPY\x01\x00", "one per id"),
        ("text.npy", b"many", "another kind of file"),
        ("pickle.json", b'{"pickle": 4}', "'pickle'"),
        ("text.json", b"many", "JSON object"),
        ("list.json", b"[1, 2]", "JSON object"),
        ("words.json", b'{"the": 4}', "JSON object"),
        ("fractions.json", b'{"1": 0.5}', "not integers"),
        ("negative.json", b'{"1": -2}', "not integers"),
        ("zeros.json", b'{"1": 0}', "all are zero"),
        ("larger.json", b'{"1": 2, "300": 1}', "counts the id 300, but the tokenizer has 292 ids"),
    ],
)
def test_a_bad_counts_file_is_named(tokenizer, tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        FrequencyBins.from_counts_file(tmp_path / name, tokenizer)
    assert name in str(error.value)


def test_an_array_of_counts_has_one_for_each_id(tokenizer, tmp_path):
    np.save(tmp_path / "counts.npy", np.ones(100, np.int64))
    with pytest.raises(ValueError, match=r"has 100, for 292 ids.*one per id"):
        FrequencyBins.from_counts_file(tmp_path / "counts.npy", tokenizer)


def test_planted_losses_give_known_means():
    # Ids 0-9 have the decile of their id, 10 and 11 none; the loss of an id is its id, plus or minus a half.
    losses = LossByBin(bins_of([*range(BINS), UNBINNED, UNBINNED]))
    ids = torch.tensor([[0, 1, 3, 4, 7, 8], [9, 9, 9, 10, 10, 11]])
    losses.add(ids - 0.5, ids)
    losses.add((ids + 0.5).flatten(), ids.flatten())
    result = losses.result()
    assert result["loss_by_decile"] == [0, 1, None, 3, 4, None, None, 7, 8, 9]
    assert result["tokens_by_decile"] == [2, 2, 0, 2, 2, 0, 0, 2, 2, 6]
    assert result["rare"] == {"loss": 0.5, "tokens": 4}
    assert result["mid"] == {"loss": 3.5, "tokens": 4}
    assert result["common"] == {"loss": (7 + 8 + 3 * 9) / 5, "tokens": 10}
    assert result["unbinned"] == {"loss": 31 / 3, "tokens": 6}
    assert (result["loss"], result["tokens"]) == (81 / 12, 24)
    json.dumps(result)


@given(st.lists(st.tuples(st.integers(0, 19), st.floats(0, 20, width=32)), min_size=1), st.integers(0, 2**32))
def test_rows_weighted_by_count_give_the_total(tokens, seed):
    losses = LossByBin(bins_of(np.random.default_rng(seed).integers(UNBINNED, BINS, 20).tolist()))
    for id, loss in tokens:
        losses.add(torch.tensor([loss]), torch.tensor([id]))
    result = losses.result()
    rows = [*zip(result["loss_by_decile"], result["tokens_by_decile"], strict=True)]
    rows.append((result["unbinned"]["loss"], result["unbinned"]["tokens"]))
    assert sum(count for _, count in rows) == result["tokens"] == len(tokens)
    total = sum(loss * count for loss, count in rows if count) / len(tokens)
    assert total == pytest.approx(result["loss"], abs=1e-12)
    assert result["loss"] == pytest.approx(np.mean([loss for _, loss in tokens]), abs=1e-12)


def test_no_tokens_give_no_means():
    result = LossByBin(bins_of([0, 5])).result()
    assert (result["loss"], result["tokens"], result["unbinned"]) == (None, 0, {"loss": None, "tokens": 0})


def test_adding_keeps_no_graph_and_takes_half_precision():
    losses = LossByBin(bins_of([0, 5]))
    losses.add(torch.ones(300, dtype=torch.bfloat16, requires_grad=True), torch.ones(300, dtype=torch.int64))
    assert not losses.sums_R.requires_grad
    assert losses.result()["loss_by_decile"][5] == 1
    with pytest.raises(IndexError):  # an id to ignore, such as -100, must not count as the end of the table
        losses.add(torch.ones(1), torch.tensor([-1]))


def test_counts_that_were_changed_after_prepare_are_named(tmp_path):
    from tide_lm.data.prepare import Settings, prepare

    (tmp_path / "texts.jsonl").write_text('{"text": "every layer knows the token"}\n' * 3)
    prepare(Settings(str(tmp_path / "texts.jsonl"), train_tokenizer=260, validation=0), tmp_path / "data")
    assert FrequencyBins.from_prepared(tmp_path / "data").counts_V.any()
    counts = np.load(tmp_path / "data" / "counts.npy")
    np.save(tmp_path / "data" / "counts.npy", counts[::-1])
    with pytest.raises(ValueError, match=r"counts\.npy is damaged.*prepare the data again"):
        FrequencyBins.from_prepared(tmp_path / "data")
    (tmp_path / "data" / "counts.npy").unlink()
    with pytest.raises(ValueError, match=r"counts\.npy is missing: prepare the data again"):
        FrequencyBins.from_prepared(tmp_path / "data")
