"""The order of batches: deterministic, each window once an epoch, exact to resume, the same for any ranks."""

import json
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tide_lm.data.loader import Loader, validation_windows, window_order
from tide_lm.data.shards import Manifest, ShardWriter, TokenSplit

SEQUENCE, TOKENS = 5, 5 * 23 + 1 + 3  # 23 windows and a tail


@pytest.fixture
def make_split(tmp_path):
    """Writes tokens 0, 1, 2, ... over several shards, so that a token says where it stood."""

    def make(name="data", tokens=TOKENS, first=0, tokenizer_sha256="f" * 64) -> TokenSplit:
        folder = tmp_path / name
        folder.mkdir()
        writer = ShardWriter(folder, "train", "uint16", shard_tokens=40)
        for document in np.array_split(np.arange(first, first + tokens), max(tokens // 9, 1)):
            writer.add(document)
        splits = {"train": writer.finish()}
        Manifest("uint16", 2**16, tokenizer_sha256, 0, 1, {}, splits).write(folder)
        return TokenSplit(folder)

    return make


def global_batches(split, count, batch=4, ranks=1, seed=0, state=None):
    """The first tokens of the windows of each global batch, ranks one after another."""
    loaders = [Loader(split, SEQUENCE, batch, seed, rank, ranks) for rank in range(ranks)]
    if state is not None:
        for loader in loaders:
            loader.load_state_dict(state)
    batches = [[first for loader in loaders for first in firsts(loader)] for _ in range(count)]
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    return batches, json.loads(json.dumps(states[0]))


def firsts(loader):
    inputs_BT, _ = loader.peek()
    loader.advance()
    assert inputs_BT.shape == (loader.batch // loader.world_size, SEQUENCE)
    return inputs_BT[:, 0].tolist()


@given(st.integers(1, 3000) | st.sampled_from([2**k + d for k in range(1, 15) for d in (-1, 0, 1)]))
def test_an_epoch_is_a_permutation(n):
    for epoch in (0, 3):
        order = window_order(np.arange(n) + epoch * n, n, seed=n % 5)
        assert sorted(order.tolist()) == list(range(n))


@pytest.mark.parametrize("n", [10**8 + 7, 2**40, 2**40 + 1])
def test_a_large_epoch_has_no_repeats_and_needs_no_array(n):
    places = np.unique(np.random.default_rng(0).integers(0, n, 200_000))
    order = window_order(places, n, seed=1)
    assert order.min() >= 0
    assert order.max() < n
    assert len(np.unique(order)) == len(places)


@pytest.mark.parametrize("n", [1_000, 4_096, 99_991])
def test_the_order_looks_random(n):
    places = np.arange(n)
    order = window_order(places, n, seed=0)
    assert abs(np.corrcoef(places, order)[0, 1]) < 4 / np.sqrt(n)
    assert (order == places).sum() < 8  # fixed points of a random permutation: 1 on average
    steps = np.diff(order)
    assert np.abs(steps).mean() == pytest.approx(n / 3, rel=0.1)  # neighbours are far apart
    assert np.unique(steps, return_counts=True)[1].max() < 15  # and at no favourite distance
    parts = np.bincount(order[: n // 10] * 10 // n, minlength=10)  # any stretch draws from all of the text
    assert (np.abs(parts - n / 100) < 5 * np.sqrt(n / 100)).all()


@pytest.mark.parametrize("n", [2, 3, 5, 16])
def test_each_window_comes_first_as_often_over_seeds(n):
    draws = 200 * n
    first = np.bincount([int(window_order(np.zeros(1, dtype=np.int64), n, s)[0]) for s in range(draws)])
    assert len(first) == n
    assert (np.abs(first - 200) < 5 * np.sqrt(200)).all()


def test_epochs_and_seeds_differ():
    epochs = window_order(np.arange(300), 100, seed=0).reshape(3, 100)
    assert (epochs[0] == epochs[1]).sum() < 8
    assert (epochs[1] == epochs[2]).sum() < 8
    assert (epochs[0] == window_order(np.arange(100), 100, seed=1)).sum() < 8


def test_every_token_after_the_first_is_predicted_once_an_epoch(make_split):
    loader = Loader(make_split(), SEQUENCE, batch=1, seed=3)
    targets = []
    for _ in range(loader.epoch_windows):
        inputs_BT, targets_BT = loader.peek()
        loader.advance()
        assert inputs_BT.dtype == targets_BT.dtype == torch.int64
        assert inputs_BT.is_contiguous()
        assert targets_BT.is_contiguous()
        assert (targets_BT == inputs_BT + 1).all()
        targets += targets_BT.flatten().tolist()
    assert sorted(targets) == list(range(1, 23 * SEQUENCE + 1))


def test_a_batch_crosses_from_one_epoch_to_the_next(make_split):
    batches, _ = global_batches(make_split(), 12, batch=4)
    windows = [first // SEQUENCE for batch in batches for first in batch]
    assert sorted(windows[:23]) == sorted(windows[23:46]) == list(range(23))
    assert windows[:23] != windows[23:46]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_each_global_batch_in_order(make_split, ranks):
    split = make_split()
    alone, state = global_batches(split, 15)
    assert global_batches(split, 15, ranks=ranks) == (alone, state)
    assert all(len(set(batch)) == 4 for batch in alone[:5])  # within an epoch nobody overlaps


@pytest.mark.parametrize("done", [0, 1, 5, 6, 11])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (4, 2)])
def test_resuming_continues_the_same_order(make_split, done, before, after):
    split = make_split()
    expected, final = global_batches(split, 12)
    first, state = global_batches(split, done, ranks=before)
    assert state["windows"] == 4 * done
    rest, state = global_batches(split, 12 - done, ranks=after, state=state)
    assert (first + rest, state) == (expected, final)


def test_resuming_with_another_batch_continues_the_same_order(make_split):
    split = make_split()
    expected, _ = global_batches(split, 6)
    first, state = global_batches(split, 2)
    rest, _ = global_batches(split, 2, batch=8, state=state)
    assert [*chain(*first, *rest)] == [*chain(*expected)]


def test_a_batch_stays_the_next_until_the_loader_advances(make_split):
    loader = Loader(make_split(), SEQUENCE, 4, seed=0)
    first, again = loader.peek(), loader.peek()
    assert all(map(torch.equal, first, again))
    loader.advance()
    assert not torch.equal(loader.peek()[0], first[0])


def test_resuming_with_other_settings_or_data_is_refused_by_name(make_split):
    split = make_split()
    _, state = global_batches(split, 3)
    for loader, changed in [
        (Loader(split, 6, 4, 0), "sequence was 5 and is 6"),
        (Loader(split, SEQUENCE, 4, 1), "seed was 0 and is 1"),
        (Loader(split, 6, 4, 1), "sequence was 5 and is 6; seed was 0 and is 1"),
        (Loader(make_split("more", TOKENS + 1), SEQUENCE, 4, 0), "tokens was 119 and is 120"),
        (Loader(make_split("other", first=1), SEQUENCE, 4, 0), "shards_sha256 was"),
        (Loader(make_split("tok", tokenizer_sha256="e" * 64), SEQUENCE, 4, 0), "tokenizer_sha256 was fff"),
    ]:
        with pytest.raises(ValueError, match=changed):
            loader.load_state_dict(state)
        assert loader.windows == 0
    same = Loader(make_split("copy"), SEQUENCE, 4, 0)
    same.load_state_dict(state)
    assert same.windows == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": -1}, "non-negative"),
        ({"batch": 24}, r"24 windows.* 23: lower the batch"),
        ({"batch": 32, "world_size": 32}, "has 23: lower the batch"),
        ({"sequence": 119}, "119 tokens.* 119"),
    ],
)
def test_settings_that_cannot_work_name_the_cure(make_split, changes, message):
    with pytest.raises(ValueError, match=message):
        Loader(make_split(), **{"sequence": SEQUENCE, "batch": 4, "seed": 0, **changes}).peek()


def test_validation_windows_are_fixed_and_in_order(make_split):
    split = make_split()
    for _ in range(2):
        batches = list(validation_windows(split, SEQUENCE, limit=23, batch=8))
        assert [len(inputs_BT) for inputs_BT, _ in batches] == [8, 8, 7]
        assert torch.cat([targets_BT for _, targets_BT in batches]).flatten().tolist() == list(range(1, 116))


def test_limited_validation_windows_are_spread_over_the_split(make_split):
    split = make_split()
    [(inputs_BT, _)] = validation_windows(split, SEQUENCE, limit=4, batch=8)
    assert (inputs_BT[:, 0] // SEQUENCE).tolist() == [0, 5, 11, 17]
    assert sum(len(inputs_BT) for inputs_BT, _ in validation_windows(split, SEQUENCE, 99, batch=8)) == 23
    for ranks, batch, limit in ((2, 4, 5), (3, 8, 4), (3, 2, 23), (4, 1, 2)):
        shares = [
            list(validation_windows(split, SEQUENCE, limit, batch, rank, ranks)) for rank in range(ranks)
        ]
        assert len({len(share) for share in shares}) == 1  # as many batches on each rank, if empty ones
        assert all(len(inputs_BT) <= batch for share in shares for inputs_BT, _ in share)
        together = [inputs_BT for batches in zip(*shares, strict=True) for inputs_BT, _ in batches]
        (alone,) = validation_windows(split, SEQUENCE, limit, batch=99)
        assert torch.equal(torch.cat(together), alone[0])
    with pytest.raises(ValueError, match="too few for one window"):
        validation_windows(split, 500, limit=4, batch=8)
