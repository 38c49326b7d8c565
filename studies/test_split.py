"""The test split: documents of the new text that no model is trained or tuned on, by id and sha256.

`python -m studies.test_split SHARED` chose them, before the first run with the new text. The choice depends
on the documents alone: articles and authors come in the order of a sha256, and whoever shares text with the
rest is passed over. Every book of a chosen author is in the split, and no other text has that author.
"""

import hashlib
import json
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

from tide_lm.data import sources

LISTED = Path(__file__).with_name("test_split.json")
BOOK = "book-"
ARTICLE_CHARACTERS = BOOK_CHARACTERS = 2_100_000  # about 480,000 tokens each
AUTHOR_CHARACTERS = 700_000  # at most, so that there are several authors
SEQUENCE = 13  # words that two documents may not share by chance
SHARED = 0.01  # of a document's sequences: as many as the other held-out text may share
_FACTORS = np.random.default_rng(0).integers(1, 2**63, SEQUENCE, np.uint64) * 2 + 1


@dataclass(frozen=True)
class Document:
    id: str
    text: str

    @property
    def author(self) -> str:
        """The author of a book, empty for an article."""
        return self.id.removeprefix(BOOK).partition("/")[0] if self.id.startswith(BOOK) else ""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@cache
def hashes() -> frozenset[str]:
    """The sha256 of each text of the split."""
    listed = json.loads(LISTED.read_text(encoding="utf-8"))["documents"]
    return frozenset(document["sha256"] for document in listed)


def training(shared: Path) -> list[sources.Part]:
    """The parts of the text to train on, old and new, without the documents of the split."""
    parts = [sources.parts(str(shared / folder / "*_train*.jsonl.xz")) for folder in ("corpus", "more")]
    return [sources.Part(part.name, partial(_untouched, part)) for part in [*parts[0], *parts[1]]]


def _untouched(part: sources.Part) -> Iterator[sources.Document]:
    for name, text in part.documents():
        if hashlib.sha256(text.encode()).hexdigest() not in hashes():
            yield name, text


def documents(shared: Path) -> list[Document]:
    """The documents of the split in the order of its list; they must be there, as they were listed."""
    found = {document.sha256: document for document in _read(shared, "more/*_*")}
    listed = json.loads(LISTED.read_text(encoding="utf-8"))["documents"]
    if missing := [document["id"] for document in listed if document["sha256"] not in found]:
        raise ValueError(f"{shared} lacks {len(missing)} documents of the test split, such as {missing[0]!r}")
    return [found[document["sha256"]] for document in listed]


def choose(shared: Path) -> list[Document]:
    """Choose articles and whole authors of the new text that share almost nothing with all other text."""
    candidates = _candidate_articles(shared) + _candidate_books(shared)
    common = _shared_sequences(candidates, shared)
    unlike = [document for document in candidates if common[document.id] <= SHARED]
    articles = [document for document in unlike if not document.author]
    books: dict[str, list[Document]] = defaultdict(list)
    for document in candidates:
        if document.author:
            books[document.author].append(document)
    authors = [whole for whole in books.values() if all(book in unlike for book in whole)]
    chosen = _up_to(ARTICLE_CHARACTERS, [[article] for article in articles])
    return chosen + _up_to(BOOK_CHARACTERS, authors)


def _up_to(characters: int, groups: Sequence[list[Document]]) -> list[Document]:
    """The first groups that fit, each whole."""
    chosen: list[Document] = []
    for group in groups:
        size = sum(len(document.text) for document in group)
        if size <= characters:
            chosen += group
            characters -= size
    return chosen


def _candidate_articles(shared: Path) -> list[Document]:
    articles = [document for document in _read(shared, "more/wiki_*") if document.sha256 < "08"]
    return sorted(articles, key=lambda document: document.sha256)


def _candidate_books(shared: Path) -> list[Document]:
    """Books of authors that are new, write not too much, and have a name like nobody else's."""
    old = {document.author for document in _read(shared, "corpus/books_*")}
    books: dict[str, list[Document]] = defaultdict(list)
    for document in _read(shared, "more/books_*"):
        books[document.author].append(document)
    words = Counter(word for author in old | books.keys() for word in set(_words(author)))
    alone = [
        author
        for author, written in books.items()
        if author not in old
        and words[_words(author)[-1]] == 1
        and sum(len(book.text) for book in written) <= AUTHOR_CHARACTERS
    ]
    alone.sort(key=lambda author: hashlib.sha256(author.encode()).hexdigest())
    return [book for author in alone[:24] for book in books[author]]


def _shared_sequences(candidates: Sequence[Document], shared: Path) -> Mapping[str, float]:
    """The part of each candidate's sequences of words that some other document has."""
    numbers: dict[str, int] = {}
    own = {document.id: np.unique(_sequences(document.text, numbers)) for document in candidates}
    wanted, times = np.unique(np.concatenate(list(own.values())), return_counts=True)
    found = times > 1  # in two candidates
    seen = np.zeros(2**24, bool)  # a quick first look
    seen[wanted >> np.uint64(40)] = True
    for document in _read(shared, "*/*_*"):
        if document.id not in own:
            sequences = _sequences(document.text, numbers)
            sequences = sequences[seen[sequences >> np.uint64(40)]]
            places = np.searchsorted(wanted, sequences).clip(max=len(wanted) - 1)
            found[places[wanted[places] == sequences]] = True
    return {
        id: float(found[np.searchsorted(wanted, sequences)].mean()) if len(sequences) else 1.0
        for id, sequences in own.items()
    }


def _sequences(text: str, numbers: dict[str, int]) -> np.ndarray:
    """A number for each run of words; words are numbered as they are met."""
    found = [numbers.setdefault(word, len(numbers) + 1) for word in re.findall(r"[a-z0-9]+", text.lower())]
    words = np.array(found, np.uint64)
    if len(words) < SEQUENCE:
        return words[:0]
    windows = np.lib.stride_tricks.sliding_window_view(words, SEQUENCE)
    hashed = np.zeros(len(windows), np.uint64)
    for place, factor in enumerate(_FACTORS):
        hashed += windows[:, place] * factor
    return (hashed ^ hashed >> np.uint64(29)) * np.uint64(0x9E3779B97F4A7C15)


def _read(shared: Path, files: str) -> Iterator[Document]:
    """The documents of the corpus and the new text whose files match."""
    for path in sorted(shared.glob(f"{files}.jsonl.xz")):
        if path.parent.name in ("corpus", "more"):
            for _, record in sources.json_lines(path):
                yield Document(record["id"], record["text"])


def _words(name: str) -> list[str]:
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    return re.findall(r"[a-z]+", plain)


def main(shared: Path) -> None:
    """Write the list of the documents that are chosen."""
    if LISTED.exists():
        sys.exit(f"Error: {LISTED} is there: a split that runs have kept away from is not chosen again")
    chosen = choose(shared)
    rows = [json.dumps({"id": document.id, "sha256": document.sha256}) for document in chosen]
    LISTED.write_text('{"documents": [\n  ' + ",\n  ".join(rows) + "\n]}\n", encoding="utf-8")
    authors = sorted({document.author for document in chosen if document.author})
    characters = sum(len(document.text) for document in chosen)
    print(f"{len(chosen)} documents of {characters:,} characters; authors: {', '.join(authors)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
