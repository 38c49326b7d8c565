"""Text to token shards: read, split, encode, count and write all of it, or nothing."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tide_lm.data import sources, tokenizers
from tide_lm.data.corpus import SPLITS, Corpus, Tally, split_of
from tide_lm.data.encoding import Encoder, encode_in_order
from tide_lm.data.shards import Manifest, Shard, ShardWriter, smallest_dtype
from tide_lm.data.split import Split
from tide_lm.run import files
from tide_lm.run.settings import SHORTEST_SEQUENCE

Progress = Callable[[int, int], None]
FEWEST_TOKENS = 8 * SHORTEST_SEQUENCE + 1, SHORTEST_SEQUENCE + 1  # to train on a batch, and to validate


@dataclass(frozen=True)
class Settings:
    """What to prepare. Without a `tokenizer`, one of `train_tokenizer` tokens is trained on the text."""

    source: str
    tokenizer: str | None = None
    train_tokenizer: int = 4096
    validation: float = 0.005
    text_field: str = "text"
    shard_tokens: int = 100_000_000

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ValueError(
                f"the validation split is {self.validation}: it must be a fraction of at least 0 and below 1"
            )


@dataclass(frozen=True)
class Vocabulary:
    """What a manifest says about the tokenizer."""

    dtype: str
    vocab_size: int
    tokenizer_sha256: str
    bos_token_id: int | None
    eos_token_id: int | None


def _ignore(documents: int, tokens: int) -> None:
    pass


def prepare(settings: Settings, out: str | Path, progress: Progress = _ignore) -> Manifest:
    """Write the source's text as token shards into the new folder `out`.

    `progress` is called with the documents read and the tokens written so far.
    """
    files.check_free(Path(out))
    parts = sources.parts(settings.source, settings.text_field)
    if settings.tokenizer is not None:
        tokenizers.check(settings.tokenizer)
    corpus = Corpus(parts, split_of(parts, settings.validation))
    return prepare_corpus(corpus, parts, settings, Path(out), progress)


def prepare_corpus(
    corpus: Corpus,
    training: Sequence[sources.Part],
    settings: Settings,
    out: Path,
    progress: Progress = _ignore,
) -> Manifest:
    """Write documents that have a split already; a tokenizer is trained on the parts `training`."""
    out = out.absolute()
    with files.claimed(out, "prepared"), files.write_folder(out) as folder:
        vocabulary = save_tokenizer(settings, Corpus(training, corpus.split), folder)
        writers = {
            split: ShardWriter(folder, split, vocabulary.dtype, settings.shard_tokens) for split in SPLITS
        }
        counts = write_tokens(corpus, folder, vocabulary, writers, progress)
        splits = {split: writer.finish() for split, writer in writers.items()}
        return complete(folder, settings, vocabulary, corpus.split, corpus.tally, counts, splits)


def save_tokenizer(settings: Settings, corpus: Corpus, folder: Path) -> Vocabulary:
    """Load the tokenizer, or train it on the training split, and save it in the folder."""
    if settings.tokenizer is None:
        training = (text for text, split in corpus if split == "train")
        tokenizer = tokenizers.train(training, settings.train_tokenizer)
    else:
        tokenizer = tokenizers.load(settings.tokenizer)
    tokenizer.save_pretrained(folder / "tokenizer")
    return Vocabulary(
        smallest_dtype(tokenizers.vocab_size(tokenizer)),
        tokenizers.vocab_size(tokenizer),
        tokenizers.fingerprint(tokenizer),
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
    )


def write_tokens(
    corpus: Corpus,
    folder: Path,
    vocabulary: Vocabulary,
    writers: Mapping[str, ShardWriter],
    progress: Progress = _ignore,
) -> np.ndarray:
    """Encode with the folder's tokenizer, write each split, and count the training tokens."""
    tokenizer_json = (folder / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8")
    encoder = Encoder(tokenizer_json, vocabulary.dtype, vocabulary.bos_token_id, vocabulary.eos_token_id)
    pieces = (piece for text, split in corpus for piece in encoder.pieces(sources.lines(text), split))
    counts = np.zeros(vocabulary.vocab_size, np.int64)
    written = 0
    for batch in encode_in_order(pieces, encoder):
        for piece, tokens in batch:
            writers[piece.split].add(tokens, ends=piece.ends)
            written += len(tokens)
            if piece.split == "train":
                np.add.at(counts, tokens, 1)
        progress(sum(corpus.tally.documents.values()), written)
    return counts


def complete(
    folder: Path,
    settings: Settings,
    vocabulary: Vocabulary,
    split: Split,
    tally: Tally,
    counts: np.ndarray,
    splits: Mapping[str, tuple[Shard, ...]],
) -> Manifest:
    """Add counts and manifest to a folder of shards; refuse too little text to train and validate on."""
    train, held_out = (sum(shard.tokens for shard in splits[split]) for split in SPLITS)
    least, to_validate = FEWEST_TOKENS if settings.validation else (1, 0)
    if train < least or held_out < to_validate:
        cure = ", or lower --validation (0 holds nothing out)" if train + held_out else ""
        raise ValueError(
            f"the source {settings.source!r} has {train:,} tokens to train on and {held_out:,} to validate "
            f"on, and at least {least:,} and {to_validate:,} are needed: give more text{cure}"
        )
    np.save(folder / "counts.npy", counts)
    source = {
        "source": settings.source,
        "text_field": settings.text_field,
        "validation": settings.validation,
        "documents": tally.documents,
        "bytes": tally.bytes,
        "sha256": tally.sha256(),
    }
    if split != Split.of_share(settings.validation):
        source["split"] = asdict(split)
    checksum = hashlib.sha256((folder / "counts.npy").read_bytes()).hexdigest()
    manifest = Manifest(**asdict(vocabulary), source=source, splits=splits, counts_sha256=checksum)
    manifest.write(folder)
    return manifest
