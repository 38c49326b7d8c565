"""Documents on their way to tokens: each is assigned to a split, and all are counted and hashed."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tide_lm.data.sources import Part

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
    """The documents of some parts of a source, and the split of each.

    The split depends on the text alone: any order gives the same one, and equal texts share it.
    """

    def __init__(self, parts: Iterable[Part], validation: float) -> None:
        self.parts, self.validation = parts, validation
        self.tally = Tally()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for part in self.parts:
            digests = hashlib.sha256()
            empty = True
            for name, text in part.documents():
                if not (data := _utf8(name, text)):
                    continue
                digest = hashlib.sha256(data).digest()
                split = SPLITS[int.from_bytes(digest[-4:]) < self.validation * 2**32]
                self.tally.documents[split] += 1
                self.tally.bytes += len(data)
                digests.update(digest)
                empty = False
                yield text, split
            if not empty:
                self.tally.digests.append(digests.hexdigest())


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(f"{name} has {half!r}, half of a surrogate pair: correct or remove it") from None
