"""The shard format: what is written is what is read, and damage is named."""

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide_lm.data.shards import MANIFEST, Manifest, ShardWriter, TokenSplit, smallest_dtype


def write(folder, documents, shard_tokens=5, vocab_size=70_000) -> Manifest:
    dtype = smallest_dtype(vocab_size)
    writer = ShardWriter(folder, "train", dtype, shard_tokens)
    for document in documents:
        writer.add(np.array(document))
    manifest = Manifest(dtype, vocab_size, "0" * 64, 0, None, {"source": "here"}, {"train": writer.finish()})
    manifest.write(folder)
    return manifest


@given(
    documents=st.lists(st.lists(st.integers(0, 69_999), min_size=1, max_size=9), min_size=1, max_size=9),
    shard_tokens=st.integers(1, 30),
    start=st.integers(0, 80),
    count=st.integers(0, 80),
)
def test_any_stretch_is_read_across_shards(tmp_path_factory, documents, shard_tokens, start, count):
    folder = tmp_path_factory.mktemp("shards")
    manifest = write(folder, documents, shard_tokens)
    split = TokenSplit(folder)
    tokens = [token for document in documents for token in document]
    assert manifest == split.manifest
    assert len(split) == len(tokens) == manifest.tokens("train")
    assert sum(shard.documents for shard in manifest.splits["train"]) == len(documents)
    if start + count <= len(tokens):
        assert split.read(start, count).tolist() == tokens[start : start + count]
    else:
        with pytest.raises(AssertionError):
            split.read(start, count)
    split.verify()


def test_a_shard_ends_with_the_document_that_fills_it(tmp_path):
    writer = ShardWriter(tmp_path, "train", "uint16", shard_tokens=4)
    for tokens, ends in (([1, 2, 3], False), ([4, 5], False), ([6], True), ([7], True)):
        writer.add(np.array(tokens), ends)
    first, second = writer.finish()
    assert (first.tokens, first.documents, second.tokens, second.documents) == (6, 1, 1, 1)
    assert np.fromfile(tmp_path / first.file, "<u2").tolist() == [1, 2, 3, 4, 5, 6]


def test_a_shard_is_on_disk_when_it_is_done(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor)))
    write(tmp_path, [[1, 2, 3, 4, 5], [6, 7, 8]])
    shards = [(tmp_path / f"train-0000{number}.bin").stat() for number in range(2)]
    assert [(found.st_ino, found.st_size) for found in synced[:2]] == [
        (shard.st_ino, size) for shard, size in zip(shards, (20, 12), strict=True)
    ]


def test_ranks_share_the_work_of_looking_for_damage(tmp_path):
    write(tmp_path, [[token] * 5 for token in range(5)])
    for number in range(5):
        path = tmp_path / f"train-0000{number}.bin"
        whole = path.read_bytes()
        path.write_bytes(b"\xff" + whole[1:])
        for rank in range(2):
            if rank == number % 2:
                with pytest.raises(ValueError, match=f"{path.name} is damaged"):
                    TokenSplit(tmp_path).verify(rank, 2)
            else:
                TokenSplit(tmp_path).verify(rank, 2)
        path.write_bytes(whole)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(258, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_ids_take_no_more_bytes_than_the_vocabulary_needs(vocab_size, dtype):
    assert smallest_dtype(vocab_size) == dtype


def test_a_shard_that_is_missing_cut_or_changed_is_named(tmp_path):
    write(tmp_path, [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    path = tmp_path / "train-00001.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"train-00001.bin .*19.*20.*prepare"):
        TokenSplit(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"train-00001.bin is missing.*prepare"):
        TokenSplit(tmp_path)
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(ValueError, match=r"train-00001.bin is damaged.*prepare"):
        TokenSplit(tmp_path).verify()


def test_a_folder_without_a_manifest_or_with_a_bad_one_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"manifest.json.*`tide-lm prepare`"):
        TokenSplit(tmp_path)
    write(tmp_path, [[1]])
    with pytest.raises(ValueError, match="has no split 'test': it has train"):
        TokenSplit(tmp_path, "test")
    values = json.loads((tmp_path / MANIFEST).read_text())
    for damaged in ("{", "[]", json.dumps({**values, "format": 9}), json.dumps({**values, "more": 1})):
        (tmp_path / MANIFEST).write_text(damaged)
        with pytest.raises(ValueError, match=r"manifest.json.*prepare"):
            Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("dtype", "float8", "its dtype is 'float8'"), ("vocab_size", "x", "vocab_size is 'x'")],
)
def test_a_manifest_with_wrong_values_is_named(tmp_path, field, value, message):
    Manifest("uint16", 10, "0" * 64, 0, None, {}, {"train": ()}).write(tmp_path)
    values = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(values | {field: value}))
    with pytest.raises(ValueError, match=message):
        Manifest.read(tmp_path)
