"""Texts to token ids on all cores: in the order given and in constant memory."""

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from tide_lm.data import sources

BATCH_CHARACTERS = 2**20

# Around a line's end where byte-level tokenizers cut anyway: a word follows, after at most one space.
_CUT = re.compile(r"\S\n ?\S")


class Piece(NamedTuple):
    """A document, or a part of a long document."""

    text: str
    split: str
    begins: bool
    ends: bool


Encoded = list[tuple[Piece, np.ndarray]]


class Encoder:
    """A tokenizer without special tokens: where a text spells one, it is encoded as any other text.

    A document is BOS and its tokens, or its tokens and EOS without a BOS.
    """

    def __init__(
        self, tokenizer_json: str, dtype: str, bos: int | None = None, eos: int | None = None
    ) -> None:
        from tokenizers import Tokenizer

        self._dtype = dtype
        self._first = np.array([] if bos is None else [bos], dtype)
        self._last = np.array([] if eos is None or len(self._first) else [eos], dtype)
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._tokenizer.encode_special_tokens = True
        whole, *parts = self(["one\ntwo\n three", "one\n", "two\n", " three"])
        self._may_cut = np.array_equal(whole, np.concatenate(parts))

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def tokens(self, piece: Piece, ids: np.ndarray) -> np.ndarray:
        """Add BOS or EOS to a piece's ids where its document begins or ends."""
        return np.concatenate([self._first[: piece.begins], ids, self._last[: piece.ends]])

    def pieces(self, parts: Iterable[str], split: str = "") -> Iterator[Piece]:
        """Join a document's lines to pieces whose ids, joined, are those of the whole; most are one piece.

        Otherwise one thread would encode a long document, in many times its own memory.
        """
        held: list[str] = []
        size, begins = 0, True
        for part in parts:
            if self._may_cut and size >= sources.LONG_TEXT and _CUT.match(held[-1][-2:] + part[:2]):
                yield Piece("".join(held), split, begins, ends=False)
                held, size, begins = [], 0, False
            held.append(part)
            size += len(part)
        yield Piece("".join(held), split, begins, ends=True)


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_in_order(pieces: Iterable[Piece], encoder: Encoder) -> Iterator[Encoded]:
    """Yield pieces with their tokens, a batch at a time.

    The next batch is read while the tokenizer's own threads encode the one before.
    """

    def encode(batch: list[Piece]) -> Encoded:
        pairs = zip(batch, encoder([piece.text for piece in batch]), strict=True)
        return [(piece, encoder.tokens(piece, ids)) for piece, ids in pairs]

    with ThreadPoolExecutor(1) as thread:
        before: Future[Encoded] | None = None
        for batch in batches(pieces):
            present = thread.submit(encode, batch)
            if before is not None:
                yield before.result()
            before = present
        if before is not None:
            yield before.result()
