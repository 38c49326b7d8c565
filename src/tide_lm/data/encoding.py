"""Texts to token ids on all cores: in the order given, for any number of processes, in constant memory."""

import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

BATCH_CHARACTERS = 2**20
PIECE_CHARACTERS = 2**17

# A line's end where byte-level tokenizers cut anyway: a word follows, after at most one space.
_CUT = re.compile(r"(?<=\S)\n(?=\S)|\n(?= \S)")
_CUT_BEFORE, _CUT_AFTER = re.compile(r"\S\n\Z"), re.compile(r" ?\S")


class Piece(NamedTuple):
    """A document, or a part of a long document."""

    text: str
    split: str
    begins: bool
    ends: bool


class Encoder:
    """A tokenizer without special tokens: where a text spells one, it is encoded as any other text.

    A document is BOS and its tokens, or its tokens and EOS without a BOS.
    """

    def __init__(
        self, tokenizer_json: str, dtype: str, bos: int | None = None, eos: int | None = None
    ) -> None:
        from tokenizers import Tokenizer

        self._made_from, self._dtype = (tokenizer_json, dtype, bos, eos), dtype
        self._first = np.array([] if bos is None else [bos], dtype)
        self._last = np.array([] if eos is None or len(self._first) else [eos], dtype)
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._tokenizer.encode_special_tokens = True
        whole, *parts = self(["one\ntwo\n three", "one\n", "two\n", " three"])
        self._may_cut = np.array_equal(whole, np.concatenate(parts))

    def __reduce__(self) -> tuple[type["Encoder"], tuple[str, str, int | None, int | None]]:
        return Encoder, self._made_from

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def tokens(self, piece: Piece, ids: np.ndarray) -> np.ndarray:
        """Add BOS or EOS to a piece's ids where its document begins or ends."""
        return np.concatenate([self._first[: piece.begins], ids, self._last[: piece.ends]])

    def pieces(self, text: str, split: str) -> Iterator[Piece]:
        """Split a document into pieces whose ids, joined, are those of the whole; most are one piece.

        Otherwise one thread would encode a long document, in many times its own memory.
        """
        start = 0
        while self._may_cut and (cut := _CUT.search(text, start + PIECE_CHARACTERS)):
            yield Piece(text[start : cut.end()], split, begins=not start, ends=False)
            start = cut.end()
        yield Piece(text[start:], split, begins=not start, ends=True)

    def stream(self, parts: Iterable[str]) -> Iterator[Piece]:
        """Yield the pieces of a document whose text comes in lines or longer parts."""
        held: list[str] = []
        size, begins = 0, True
        for part in parts:
            cut = (
                held and size >= PIECE_CHARACTERS and _CUT_BEFORE.search(held[-1]) and _CUT_AFTER.match(part)
            )
            if self._may_cut and cut:
                yield Piece("".join(held), "", begins, ends=False)
                held, size, begins = [], 0, False
            held.append(part)
            size += len(part)
        for piece in self.pieces("".join(held), ""):
            yield piece._replace(begins=begins and piece.begins)


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


def encode_in_order(
    pieces: Iterable[Piece], encoder: Encoder, processes: int
) -> Iterator[list[tuple[Piece, np.ndarray]]]:
    """Yield pieces with their tokens, a batch at a time.

    One process encodes with the tokenizer's own threads, several with one thread each. Batches are read
    while others are encoded, but only as many as keep every worker busy.
    """
    executor: Executor
    if processes == 1:
        executor, encode = ThreadPoolExecutor(1), encoder.__call__
    else:
        # Not forked: a fork of a process with threads may hang.
        context = multiprocessing.get_context("spawn")
        executor = ProcessPoolExecutor(processes, context, _start_worker, (encoder,))
        encode = _encode_in_worker
    waiting: deque[tuple[list[Piece], Future[list[np.ndarray]]]] = deque()
    try:
        for batch in batches(pieces):
            waiting.append((batch, executor.submit(encode, [piece.text for piece in batch])))
            if len(waiting) > processes + 1:
                yield _joined(encoder, *waiting.popleft())
        while waiting:
            yield _joined(encoder, *waiting.popleft())
    finally:
        executor.shutdown(cancel_futures=True)


def _joined(
    encoder: Encoder, batch: list[Piece], encoded: Future[list[np.ndarray]]
) -> list[tuple[Piece, np.ndarray]]:
    pairs = zip(batch, encoded.result(), strict=True)
    return [(piece, encoder.tokens(piece, ids)) for piece, ids in pairs]


_encoder_of_worker: Encoder


def _start_worker(encoder: Encoder) -> None:
    global _encoder_of_worker
    _encoder_of_worker = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _encode_in_worker(texts: Sequence[str]) -> list[np.ndarray]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return _encoder_of_worker(texts)


def _exit_with_parent() -> None:
    """End a worker whose parent was killed: it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
