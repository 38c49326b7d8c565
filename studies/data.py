"""The study's text as token shards: training and validation are files of their own."""

from collections.abc import Iterator
from pathlib import Path

from tide_lm import runs
from tide_lm.data import sources
from tide_lm.data.corpus import SPLITS, Corpus, Tally
from tide_lm.data.prepare import Settings, claimed, complete, save_tokenizer, write_tokens
from tide_lm.data.shards import Manifest, ShardWriter

TRAINING, VALIDATION = "*_train*.jsonl.xz", "*_valid.jsonl.xz"


class _Both:
    """Documents to train on, and then those to validate with."""

    def __init__(self, folder: Path) -> None:
        self.training = sources.parts(str(folder / TRAINING))
        validation = sources.parts(str(folder / VALIDATION))
        self.corpora = Corpus(self.training, 0.0), Corpus(validation, 1.0)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for corpus in self.corpora:
            yield from corpus

    @property
    def tally(self) -> Tally:
        both = Tally()
        for corpus in self.corpora:
            both.add(corpus.tally)
        return both


def prepare(corpus: Path, out: Path, vocabulary: int, tokenizer: str | None, processes: int) -> Manifest:
    """Shards of a corpus, with a tokenizer that is trained on it unless one is given."""
    settings = Settings(str(corpus), tokenizer, vocabulary, validation=0.0)
    both = _Both(corpus)
    with claimed(out.absolute()), runs.write_folder(out.absolute()) as folder:
        words = save_tokenizer(settings, both.training, folder)
        writers = {split: ShardWriter(folder, split, words.dtype, settings.shard_tokens) for split in SPLITS}
        counts = write_tokens(both, folder, words, writers, processes)
        splits = {split: writer.finish() for split, writer in writers.items()}
        return complete(folder, settings, words, both.tally, counts, splits)
