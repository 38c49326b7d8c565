"""Which text is held out for validation: a share of the documents, and enough of it.

A document's place depends on the texts alone, by their keys: any order gives the same split, and equal texts
share it.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

ENOUGH = 2**15  # characters: with 4 to a token, four windows of 2,048
_ONE_WINDOW = 2**9  # characters: more than the 33 tokens of the shortest window
_KEYS = 2**32


@dataclass(frozen=True)
class Split:
    """The keys of documents to hold out: all below `below`, and of `cut` the last `end`, a share of it."""

    below: int = 0
    cut: int = -1
    end: float = 0.0

    @classmethod
    def of_share(cls, share: float) -> "Split":
        return cls(math.ceil(share * _KEYS))

    def divide(self, text: str, digest: bytes) -> dict[str, str]:
        """Return what of a document belongs to which split."""
        key = _key(digest)
        if key != self.cut:
            return {"validation" if key < self.below else "train": text}
        place = _seam(text, int(len(text) * (1 - self.end)))
        return {name: part for name, part in (("train", text[:place]), ("validation", text[place:])) if part}


def digest_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def enough(share: float, documents: Iterable[tuple[str, bytes]]) -> Split:
    """Return the split of a share of documents, each a text and its digest, which holds out enough.

    If either side has less than `ENOUGH`, or than a twentieth or one window of a small text, the split holds
    out twice `ENOUGH` or a tenth: the documents of the lowest keys, and only the end of one that is longer
    than what is still missing.
    """
    plain = Split.of_share(share)
    if not share:
        return plain
    sizes: Counter[int] = Counter()
    held = total = 0
    for text, digest in documents:
        key = _key(digest)
        sizes[key] += len(text)
        total += len(text)
        held += len(text) if key < plain.below else 0
        if min(held, total - held) >= ENOUGH:
            return plain
    least = min(ENOUGH, max(total / 20, min(_ONE_WINDOW, total / 10)))
    if min(held, total - held) >= least:
        return plain
    below, missing = 0, max(min(2 * ENOUGH, total / 10), share * total)
    for key, size in sorted(sizes.items()):
        if missing <= 0:
            break
        if size > 1.5 * missing:
            return Split(below, key, missing / size)
        below, missing = key + 1, missing - size
    return Split(below)


def _key(digest: bytes) -> int:
    return int.from_bytes(digest[-4:])


def _seam(text: str, place: int) -> int:
    """Return where a line, or else a word, begins before this place, if not far from it."""
    for sign in "\n", " ":
        if (found := text.rfind(sign, max(0, 2 * place - len(text)), place)) >= 0:
            return found + 1
    return place
