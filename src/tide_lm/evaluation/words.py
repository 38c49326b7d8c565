"""The words of a text that one model predicts better than another, and where.

A word's gain is the other model's loss less this model's, in nats, added up over the word's tokens.
"""

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from tide_lm.data import tokenizers
from tide_lm.evaluation.perplexity import Windows, read, token_losses
from tide_lm.model.opened import OpenedModel

_WORD = re.compile(r"(?<![^\W\d_])(?<![^\W\d_]')[^\W\d_]+")  # but no s of "king's"
_BYTES = re.compile(r"(<0x[0-9A-F]{2}>)+")  # tokens that are no whole character
_SENTENCE = re.compile(r"[^.!?\n]+[.!?]?")


def word_gains(
    model: OpenedModel, other: OpenedModel, text: Path, windows: Windows, least: int, most: int
) -> dict[str, Any]:
    """Return the words with the largest mean gain, of those that occur `least` times; at `most` so many.

    The text is prepared data, and both models have its tokenizer. `words` counts the words that occur often
    enough, and `better` those of them that gain. In its `sentence`, where it gains most, a word stands
    between asterisks.
    """
    ids, gains = _token_gains(model, other, text, windows)
    written, starts = _text(model, ids)
    places: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for found in _WORD.finditer(written):
        first, last = bisect_right(starts, found.start()) - 1, bisect_left(starts, found.end())
        places[found[0]].append((sum(gains[first:last]), found.start()))
    means = {word: fmean(gain for gain, _ in each) for word, each in places.items() if len(each) >= least}
    largest = sorted(means, key=lambda word: -means[word])[:most]
    return {
        "least": least,
        "words": len(means),
        "better": sum(gain > 0 for gain in means.values()),
        "largest": [
            {
                "word": word,
                "times": len(places[word]),
                "gain": means[word],
                "sentence": _sentence(written, max(places[word])[1], len(word)),
            }
            for word in largest
        ],
    }


@torch.no_grad()
def _token_gains(
    model: OpenedModel, other: OpenedModel, text: Path, windows: Windows
) -> tuple[list[int], list[float]]:
    """Return the predicted tokens of a text, and the gain of each."""
    found: list[int] = []
    gains: list[float] = []
    for ids, predicted in read(text, model.tokenizer, model.vocabulary, windows):
        theirs, ours = (
            token_losses(
                each.model, *(part.to(each.model.device) for part in (ids[:, :-1], ids[:, 1:]))
            ).cpu()
            for each in (other, model)
        )
        found += ids[:, 1:][predicted[:, 1:]].tolist()
        gains += (theirs - ours).double()[predicted[:, 1:]].tolist()
    return found, gains


def _text(model: OpenedModel, ids: list[int]) -> tuple[str, list[int]]:
    """Return the text of tokens, and where each begins in it; a special token ends a line."""
    special = set(model.tokenizer.all_special_ids)
    texts = [
        "\n" if id in special else "" if _BYTES.fullmatch(text) else text
        for id, text in zip(ids, tokenizers.texts_in_order(model.tokenizer, ids), strict=True)
    ]
    return "".join(texts), [0, *accumulate(map(len, texts[:-1]))]


def _sentence(text: str, start: int, length: int) -> str:
    """Return the sentence in which a word stands, and the word between asterisks."""
    within = next(found for found in _SENTENCE.finditer(text) if found.end() > start)
    before, after = text[within.start() : start], text[start + length : within.end()]
    return re.sub(r"\A['\")\s]+\s", "", before).lstrip() + f"*{text[start : start + length]}*{after}"
