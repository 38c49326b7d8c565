"""How far apart two tokens stay in one context, layer by layer, with and without memory."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tide_lm.analysis.collapse import differ_at_the_end, distance_and_norm, last_states
from tide_lm.explore.vocabulary import numbered
from tide_lm.model.opened import OpenedModel

LONGEST = 256  # tokens of a template, the last ones


def endings_of(
    tokenizer: PreTrainedTokenizerBase, words: tuple[str, str], vocabulary: int
) -> list[list[int]]:
    """Return the ids of both words, each after a space, or of `#7`; they differ in the last id alone."""
    for word in words:
        if not word:
            raise ValueError("a token is missing: type one into each field")
        if (id := numbered(word)) is not None and id >= vocabulary:
            raise ValueError(f"{word} is not there: of {vocabulary:,} tokens the first is #0")
    first, second = (
        tokenizer(f" {word}", add_special_tokens=False).input_ids if id is None else [id]
        for word, id in zip(words, map(numbered, words), strict=True)
    )
    if first == second:
        raise ValueError(f"{words[0]!r} and {words[1]!r} are the same: choose two that differ")
    if not differ_at_the_end(tokenizer, first, second):
        raise ValueError(
            f"{words[0]!r} and {words[1]!r} are not two different single tokens: they are {len(first)} and "
            f"{len(second)}, a word with a space before it. Choose others, or give ids, as in #7"
        )
    return [first, second]


@torch.no_grad()
def distances(opened: OpenedModel, endings: list[list[int]], template: str) -> dict[str, list[float]]:
    """Return, by layer, the distance of both states over their mean norm: with memory, and without it.

    The template ends where the tokens stand, so that nothing else differs.
    """
    tokenizer = opened.tokenizer
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    prefix = tokenizer(template, add_special_tokens=False).input_ids[-LONGEST:]
    ids_WT = torch.tensor([start + prefix + ending for ending in endings])
    if not opened.has_memory:
        return {"": _distance(opened.model, ids_WT)}
    layers = list(range(opened.config.num_hidden_layers))
    return {
        "with memory": _distance(opened.model_with_memory, ids_WT),
        "without memory": _distance(opened.model_with_memory, ids_WT, drop_memory_layers=layers),
    }


def _distance(model: PreTrainedModel, ids_WT: torch.Tensor, **options: list[int]) -> list[float]:
    states_WLD, *_ = last_states(model, ids_WT.to(model.device), **options)
    if not states_WLD.isfinite().all():
        raise ValueError("the states of these tokens are not finite: the model's weights are damaged")
    apart_PL, norm_PL = distance_and_norm(states_WLD)
    return (apart_PL / norm_PL.clamp(min=torch.finfo(norm_PL.dtype).tiny))[0].tolist()
