"""Text to token shards: read, split, encode, count, write; all of it, or nothing."""

import hashlib
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tide_lm import runs
from tide_lm.data import sources, tokenizers
from tide_lm.data.encoding import Encoder, encode_in_order
from tide_lm.data.shards import Manifest, ShardWriter, smallest_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPLITS = ("train", "validation")
DEFAULT_VOCABULARY = 4096

Progress = Callable[[int, int], None]


def prepare(
    source: str,
    out: str | Path,
    *,
    tokenizer: str | None = None,
    train_tokenizer: int = DEFAULT_VOCABULARY,
    validation: float = 0.005,
    text_field: str = "text",
    processes: int = 1,
    shard_tokens: int = 100_000_000,
    progress: Progress = lambda documents, tokens: None,
) -> Manifest:
    """Writes the source's text as token shards into the new folder `out`.

    The tokenizer is the named one; without a name, one of `train_tokenizer` tokens is trained on the
    training documents. `progress` is told the documents read and the tokens written so far.
    """
    if not 0 <= validation < 1:
        raise ValueError(f"the validation split is a fraction of at least 0 and below 1, not {validation}")
    if processes < 1:
        raise ValueError(f"the number of processes is at least 1, not {processes}")
    corpus = Corpus(source, text_field, validation)
    with _new_folder(Path(out).absolute()) as folder:
        if tokenizer is None:
            training = (text for text, split in Corpus(source, text_field, validation) if split == "train")
            fast = tokenizers.train(training, train_tokenizer)
        else:
            fast = tokenizers.load(tokenizer)
        fast.save_pretrained(folder / "tokenizer")
        manifest = _write_shards(folder, corpus, fast, processes, shard_tokens, progress)
        manifest.write(folder)
    return manifest


class Corpus:
    """The documents of a source and the split of each, counted and hashed on their way.

    The split depends on the text alone: any order gives the same one, and equal texts share it.
    """

    def __init__(self, source: str, text_field: str, validation: float) -> None:
        self.source, self.text_field, self.validation = source, text_field, validation
        self.documents = dict.fromkeys(SPLITS, 0)
        self.bytes = 0
        self.sha256 = hashlib.sha256()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for name, text in sources.documents(self.source, self.text_field):
            try:
                data = text.encode()
            except UnicodeEncodeError as error:
                half = text[error.start]
                raise ValueError(
                    f"{name} holds {half!r}, half of a pair and no text: mend or remove it"
                ) from None
            if not data:
                continue
            held_out = int.from_bytes(hashlib.sha256(data).digest()[-4:]) < self.validation * 2**32
            split = SPLITS[held_out]
            self.documents[split] += 1
            self.bytes += len(data)
            self.sha256.update(data)
            yield text, split

    def record(self) -> dict[str, Any]:
        """What the manifest says of it, once it was read."""
        return {
            "source": self.source,
            "text_field": self.text_field,
            "validation": self.validation,
            "documents": self.documents,
            "bytes": self.bytes,
            "sha256": self.sha256.hexdigest(),
        }


def _write_shards(
    folder: Path,
    corpus: Corpus,
    tokenizer: "PreTrainedTokenizerFast",
    processes: int,
    shard_tokens: int,
    progress: Progress,
) -> Manifest:
    """Writes shards and counts. A document is BOS and its tokens, or its tokens and EOS without a BOS."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    counts = np.zeros(tokenizers.vocab_size(tokenizer), np.int64)
    dtype = smallest_dtype(len(counts))
    first = np.array([] if bos is None else [bos], dtype)
    last = np.array([] if eos is None or len(first) else [eos], dtype)
    writers = {split: ShardWriter(folder, split, dtype, shard_tokens) for split in SPLITS}
    encoder = Encoder(tokenizers.plain_backend(tokenizer).to_str(), dtype)
    pieces = (piece for document in corpus for piece in encoder.pieces(*document))
    written = 0
    for batch in encode_in_order(pieces, encoder, processes):
        for piece, ids in batch:
            tokens = np.concatenate([first[: piece.begins], ids, last[: piece.ends]])
            writers[piece.split].add(tokens, ends=piece.ends)
            written += len(tokens)
            if piece.split == "train":
                np.add.at(counts, tokens, 1)
        progress(sum(corpus.documents.values()), written)
    if not counts.any():
        raise ValueError(
            f"the source {corpus.source!r} has no text to train on, and {corpus.documents['validation']:,} "
            "documents to validate with: give one with more text, or lower the validation split"
        )
    np.save(folder / "counts.npy", counts)
    splits = {split: writer.finish() for split, writer in writers.items()}
    fingerprint = tokenizers.fingerprint(tokenizer)
    return Manifest(dtype, len(counts), fingerprint, bos, eos, corpus.record(), splits)


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its name when all is on disk, and is removed if anything fails."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: remove it, or choose another --out")
    folder = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    folder.mkdir(parents=True)
    try:
        yield folder
        for path in (*folder.rglob("*"), folder):
            runs.sync(path)
        folder.replace(out)
        runs.sync(out.parent)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(out)  # a full disk does not say where
        raise
