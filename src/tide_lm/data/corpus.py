"""Documents on their way to tokens: each is assigned to a split, and all are counted and hashed."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tide_lm.data.sources import Part
from tide_lm.data.split import Split, digest_of, enough

SPLITS = ("train", "validation")


@dataclass
class Tally:
    """What was read: documents per split, bytes, and the digest of each part that held a document.

    A part's digest is the sha256 of its documents' sha256 digests, one after another.
    """

    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    bytes: int = 0
    digests: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Add the tally of the parts that follow."""
        for split, count in other.documents.items():
            self.documents[split] += count
        self.bytes += other.bytes
        self.digests += other.digests

    def sha256(self) -> str:
        """Return the sha256 of the parts' digests, one after another."""
        return hashlib.sha256(bytes.fromhex("".join(self.digests))).hexdigest()


class Corpus:
    """The documents of some parts of a source, each with its split. One that is cut counts in both splits."""

    def __init__(self, parts: Iterable[Part], split: Split) -> None:
        self.parts, self.split = parts, split
        self.tally = Tally()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for part in self.parts:
            digests = hashlib.sha256()
            empty = True
            for text, data in _texts(part):
                digest = digest_of(data)
                self.tally.bytes += len(data)
                digests.update(digest)
                empty = False
                for split, piece in self.split.divide(text, digest).items():
                    self.tally.documents[split] += 1
                    yield piece, split
            if not empty:
                self.tally.digests.append(digests.hexdigest())


def split_of(parts: Iterable[Part], share: float) -> Split:
    """Return the split that holds out this share of some parts, and enough to validate on."""
    return enough(share, ((text, digest_of(data)) for part in parts for text, data in _texts(part)))


def _texts(part: Part) -> Iterator[tuple[str, bytes]]:
    """Yield the documents that hold text, and their bytes in UTF-8."""
    for name, text in part.documents():
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise ValueError(f"{name} has {half!r}, half of a surrogate pair: correct or remove it") from None
        if data:
            yield text, data
