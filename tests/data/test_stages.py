"""Shards assembled from what tasks encoded are those that one writer cuts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tide_lm.data import stages
from tide_lm.data.prepare import Settings, Vocabulary
from tide_lm.data.shards import ShardWriter

DOCUMENT = st.integers(0, 9)  # its tokens


@given(
    tasks=st.lists(st.lists(DOCUMENT, max_size=6), min_size=1, max_size=5),
    shard_tokens=st.integers(1, 30),
)
def test_shards_are_cut_as_one_writer_cuts_them(tmp_path_factory, tasks, shard_tokens):
    folder = tmp_path_factory.mktemp("stages")
    (folder / "one").mkdir()
    (folder / "many").mkdir()
    writer = ShardWriter(folder / "one", "train", "uint16", shard_tokens)
    token = 0
    for task, documents in enumerate(tasks):
        (folder / str(task)).mkdir()
        encoded_writer = stages.EncodedWriter(folder / str(task), "train", "uint16")
        for length in documents:
            tokens, token = np.arange(token, token + length), token + length
            writer.add(tokens)
            half = length // 2
            encoded_writer.add(tokens[:half], ends=False)
            encoded_writer.add(tokens[half:], ends=True)
        encoded_writer.finish()
    wanted = writer.finish()

    settings = Settings("here", shard_tokens=shard_tokens)
    work = stages.Work(settings, [], len(tasks), "", Vocabulary("uint16", 300, "", None, None))
    encoded = [folder / str(task) for task in range(len(tasks))]
    assert stages.assemble(encoded, "train", work, folder / "many") == wanted
    for shard in wanted:
        assert (folder / "many" / shard.file).read_bytes() == (folder / "one" / shard.file).read_bytes()
