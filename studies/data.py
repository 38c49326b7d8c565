"""The study's text as token shards: training and validation are files of their own."""

from collections.abc import Iterator
from pathlib import Path

from tide_lm.data import sources
from tide_lm.data.corpus import Corpus
from tide_lm.data.prepare import Settings, prepare_corpus
from tide_lm.data.shards import Manifest
from tide_lm.data.split import Split

TRAINING, VALIDATION = "*_train*.jsonl.xz", "*_valid.jsonl.xz"


class Both(Corpus):
    """Documents to train on, and then all documents of some other parts, to validate with."""

    def __init__(self, training: list[sources.Part], validation: list[sources.Part]) -> None:
        super().__init__(training, Split())
        self.held_out = Corpus(validation, Split.of_share(1.0))
        self.held_out.tally = self.tally

    def __iter__(self) -> Iterator[tuple[str, str]]:
        yield from super().__iter__()
        yield from self.held_out


def prepare(corpus: Path, out: Path, vocabulary: int, tokenizer: str | None) -> Manifest:
    """Write the shards of a corpus, with a tokenizer that is trained on it unless one is given."""
    settings = Settings(str(corpus), tokenizer, vocabulary, validation=0.0)
    training, validation = (sources.parts(str(corpus / files)) for files in (TRAINING, VALIDATION))
    return prepare_corpus(Both(training, validation), training, settings, out)
