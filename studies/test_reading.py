"""Read the test split with a trained model: the loss of each article, and of each chapter of a book.

`prepare` puts the split's text beside the encoded text, and `python -m studies.test_reading SHARED DATA` does
it for data that were prepared before. A run whose name ends in ", test" reads it when it is trained, with the
precision of its validation. A run reads it once: `run` refuses the name of one that has.

Each token is predicted from its own document, in windows of the training sequence's length, one every half of
it. A book's tokens are counted by chapter; the context of a chapter's first tokens is the chapter before.
Each piece is encoded on its own, so that a token never belongs to two.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from studies import test_split
from tide_lm.run import files

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedTokenizerBase

    from tide_lm.evaluation.perplexity import Windows
    from tide_lm.training.objective import Objective
    from tide_lm.training.trainer import Trainer

TEXT = "test_split.jsonl"
SHORTEST = 200  # characters of a piece, so that a title is no piece of its own
UNDIVIDED = 20_000  # characters of a piece, in a book without headings
BATCH = 64  # windows
_NUMBER = r"(?:[IVXLC]+|\d+|ONE|TWO|THREE|FOUR|FIVE)"
_HEADING = re.compile(
    rf"^[ \t]*(?:(?i:CHAPTER|BOOK|PART|ACT)[ \t]+{_NUMBER}\b.{{0,60}}|{_NUMBER}\.?|\d+\. .{{1,60}})[ \t]*$",
    re.MULTILINE,
)


class Piece(NamedTuple):
    """What a model made of one article or chapter: the sum of its losses, its tokens and its UTF-8 bytes."""

    document: str
    nats: float
    tokens: int
    bytes: int

    @property
    def is_chapter(self) -> bool:
        return self.document.startswith(test_split.BOOK)


def write(documents: Sequence[test_split.Document], data: Path) -> None:
    """Put the text of the test split into the folder of prepared data."""
    lines = [json.dumps({"id": document.id, "text": document.text}) + "\n" for document in documents]
    files.write_atomically(data / TEXT, "".join(lines))


def pieces(id: str, text: str) -> list[str]:
    """Return an article as it is, and a book cut at its chapters; joined they are the text.

    A heading is a line of its own: `CHAPTER I`, `Part 2`, `ACT ONE`, a number alone, or a number, a point and
    a title. A book without headings is cut at the first blank line after every 20,000 characters. Less than
    200 characters are no piece: they stay with what follows, or at the end with what is before.
    """
    if not id.startswith(test_split.BOOK):
        return [text]
    starts = [heading.start() for heading in _HEADING.finditer(text)]
    shortest = SHORTEST
    if not starts:
        starts, shortest = [blank.end() for blank in re.finditer(r"\n\s*\n", text)], UNDIVIDED
    cuts = [0]
    for start in starts:
        if start - cuts[-1] >= shortest and len(text) - start >= SHORTEST:
            cuts.append(start)
    return [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def read(trainer: "Trainer", data: Path) -> list[Piece]:
    """Return what a trained model makes of each piece of the test split."""
    from tide_lm.evaluation.perplexity import Windows

    if not (data / TEXT).exists():
        raise ValueError(f"there is no {data / TEXT}: write it with `python -m studies.test_reading`")
    documents = [json.loads(line) for line in (data / TEXT).read_text(encoding="utf-8").splitlines()]
    sequence = trainer.config.data.sequence
    windows = Windows(sequence, sequence // 2, BATCH)
    with trainer.held_out.evaluating():
        return of_documents(trainer.objective, trainer.inputs.tokenizer, trainer.device, documents, windows)


def of_documents(
    objective: "Objective",
    tokenizer: "PreTrainedTokenizerBase",
    device: "torch.device",
    documents: Sequence[Mapping[str, str]],
    windows: "Windows",
) -> list[Piece]:
    """Return what an objective's model makes of each piece of some documents."""
    import numpy as np

    from tide_lm.evaluation.perplexity import batched, cut, document_encoder

    encoder = document_encoder(tokenizer)
    texts = [pieces(document["id"], document["text"]) for document in documents]
    ids = [_tokens(encoder, parts) for parts in texts]
    windows_of_all = (window for parts in ids for window in cut(parts, windows))
    losses = np.concatenate(list(_losses(objective, device, batched(windows_of_all, windows.batch))))
    found, place = [], 0
    for document, parts, tokens in zip(documents, texts, ids, strict=True):
        for number, (text, piece) in enumerate(zip(parts, tokens, strict=True)):
            count = len(piece) - (number == 0)  # what stands before a document is not predicted
            nats = float(losses[place : place + count].sum())
            found.append(Piece(document["id"], round(nats, 4), count, len(text.encode())))
            place += count
    assert place == len(losses)
    return found


def _tokens(encoder: Any, parts: Sequence[str]) -> list["np.ndarray"]:
    from tide_lm.data.encoding import Piece as Encoded

    last = len(parts) - 1
    encoded = [Encoded(text, "", number == 0, number == last) for number, text in enumerate(parts)]
    return [encoder.tokens(piece, ids) for piece, ids in zip(encoded, encoder(parts), strict=True)]


def _losses(objective: "Objective", device: "torch.device", batches: Any) -> Iterator["np.ndarray"]:
    """Yield the loss of each predicted token, in the text's order."""
    import torch

    for ids, predicted in batches:
        targets = ids[:, 1:]
        with torch.no_grad():
            result = objective(ids[:, :-1].to(device), targets.to(device))
        yield result.per_token_N.view_as(targets)[predicted[:, 1:].to(device)].double().cpu().numpy()


if __name__ == "__main__":
    write(test_split.documents(Path(sys.argv[1])), Path(sys.argv[2]))
