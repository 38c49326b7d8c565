"""A small set of prepared data: real text, a real tokenizer, shards as `prepare` writes them."""

import hashlib

import numpy as np
import pytest

from tide_lm.data.shards import Manifest, ShardWriter


@pytest.fixture(scope="session")
def prepared(tokenizer, tmp_path_factory):
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("prepared")
    tokenizer.save_pretrained(folder / "tokenizer")
    writers = {name: ShardWriter(folder, name, "uint16", 20_000) for name in ("train", "validation")}
    counts = np.zeros(len(tokenizer), dtype=np.int64)
    for i, name in enumerate(sorted(topics)[:30]):
        ids = np.array([0, *tokenizer(topics[name]).input_ids[:3_000]])
        split = "validation" if i % 5 == 0 else "train"
        writers[split].add(ids)
        if split == "train":
            counts += np.bincount(ids, minlength=len(counts))
    np.save(folder / "counts.npy", counts)
    text = (folder / "tokenizer" / "tokenizer.json").read_bytes()
    Manifest(
        dtype="uint16",
        vocab_size=len(tokenizer),
        tokenizer_sha256=hashlib.sha256(text).hexdigest(),
        bos_token_id=0,
        eos_token_id=1,
        source={"name": "topics"},
        splits={name: writer.finish() for name, writer in writers.items()},
    ).write(folder)
    return folder
