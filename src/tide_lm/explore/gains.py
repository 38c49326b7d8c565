"""The words that memory helps most: their mean gain on a little text.

A gain is how much lower the model's loss is than that of the other model, or than its own without memory. A
model with neither has its losses in the place of gains. V vocabulary, B windows, T tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tide_lm.evaluation.perplexity import (
    TextSize,
    Windows,
    batched,
    check_ids,
    cut,
    document_tokens,
    token_losses,
)
from tide_lm.explore.reader import Reader

TOKENS = 8192  # that are read
SHOWN = 40
FEWEST = 3  # occurrences


@dataclass(frozen=True)
class Gains:
    """The words so far as (id, mean, occurrences), the largest mean first, and the tokens that were read."""

    words: list[tuple[int, float, int]]
    read: int
    whole: bool


def source(reader: Reader) -> str:
    return "the run's held-out text" if _has_data(reader) else "the examples of the Text tab"


def against(reader: Reader) -> str | None:
    """Say what the model is compared with, if there is anything."""
    if reader.base is not None:
        return "the other model"
    return "this model without memory" if reader.opened.has_memory else None


def gains(reader: Reader, texts: list[str], examples: list[str]) -> Iterator[Gains]:
    """Yield the words as more is read: held-out text where the run's data is here, or else some examples.

    `texts` are those of all ids: a word is a token of letters that has a space before it, in English. Where
    there is none, all tokens count.
    """
    is_word_V = torch.tensor([_is_word(text) for text in texts])
    sums_V, counts_V = torch.zeros(len(texts)), torch.zeros(len(texts))
    tokens, words = 0, []
    fewest = FEWEST if _has_data(reader) else 1
    for ids_BT, predicted_BT in _batches(reader, examples):
        check_ids(ids_BT, len(texts))
        with reader.lock, torch.no_grad():
            gain_N = _gain(reader, ids_BT).cpu()[predicted_BT[:, 1:]]
        id_N = ids_BT[:, 1:][predicted_BT[:, 1:]]
        sums_V.index_add_(0, id_N, gain_N)
        counts_V.index_add_(0, id_N, torch.ones(len(id_N)))
        tokens += len(id_N)
        wanted_V = counts_V * is_word_V
        wanted_V = wanted_V if wanted_V.any() else counts_V
        too_few_V = wanted_V < min(fewest, float(wanted_V.max()))
        means_V = (sums_V / counts_V).masked_fill(too_few_V, -torch.inf)
        best = means_V.topk(min(SHOWN, len(texts)))
        found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        words = [(id, mean, int(counts_V[id])) for id, mean in found if mean > -torch.inf]
        yield Gains(words, tokens, whole=False)
        if tokens >= TOKENS:
            break
    yield Gains(words, tokens, whole=True)


def _is_word(text: str) -> bool:
    word = text.strip()
    return word.isalpha() and (len(word) < len(text) and len(word) > 1 if word.isascii() else True)


def _has_data(reader: Reader) -> bool:
    data = reader.opened.data
    return data is not None and data.exists()


def _batches(reader: Reader, examples: list[str]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ids, a token more than a window, and which of them are predicted."""
    opened = reader.opened
    if _has_data(reader):
        documents = document_tokens(str(opened.data), "text", opened.tokenizer, TextSize())
        windows = Windows(reader.window, reader.window)
        yield from batched((window for one in documents for window in cut(one, windows)), windows.batch)
        return
    for example in examples:
        ids_BT = torch.tensor([reader.encoded(example).ids[: reader.window + 1]])
        yield ids_BT, torch.ones_like(ids_BT, dtype=torch.bool)


def _gain(reader: Reader, ids_BT: torch.Tensor) -> torch.Tensor:
    model = reader.opened.model
    pair = ids_BT[:, :-1].to(model.device), ids_BT[:, 1:].to(model.device)
    losses_BT = token_losses(model, *pair)
    if reader.base is not None:
        return token_losses(reader.base.model, *pair) - losses_BT
    if reader.opened.has_memory:
        layers = list(range(model.config.num_hidden_layers))
        return token_losses(model, *pair, drop_memory_layers=layers) - losses_BT
    return losses_BT
