"""How far apart two tokens stay in one context, layer by layer, with and without memory."""

import torch
from transformers import PreTrainedModel

from tide_lm.analysis.collapse import distance_and_norm, endings, last_states
from tide_lm.evaluate.subject import Subject

LONGEST = 256  # tokens of a template, the last ones


@torch.no_grad()
def distances(subject: Subject, words: tuple[str, str], template: str) -> dict[str, list[float]]:
    """By layer: the distance of both states over their mean norm; with memory and without, if there is one.

    The template ends where the words stand, so that nothing else differs.
    """
    tokenizer = subject.tokenizer
    found = endings(tokenizer, words)
    if found is None:
        counts = " and ".join(str(len(tokenizer(f" {word}").input_ids)) for word in words)
        raise ValueError(
            f"{words[0]!r} and {words[1]!r}, with a space before them, are not two different single tokens "
            f"of {subject.name}'s tokenizer (it has {counts} for them): choose others"
        )
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    prefix = tokenizer(template, add_special_tokens=False).input_ids[-LONGEST:]
    ids_WT = torch.tensor([start + prefix + ending for ending in found])
    if not subject.has_memory:
        return {"": _distance(subject.model, ids_WT)}
    layers = list(range(subject.config.num_hidden_layers))
    return {
        "with memory": _distance(subject.tide, ids_WT),
        "without memory": _distance(subject.tide, ids_WT, drop_memory_layers=layers),
    }


def _distance(model: PreTrainedModel, ids_WT: torch.Tensor, **options: list[int]) -> list[float]:
    states_WLD, *_ = last_states(model, ids_WT.to(model.device), **options)
    apart_PL, norm_PL = distance_and_norm(states_WLD)
    return (apart_PL / norm_PL.clamp(min=torch.finfo(norm_PL.dtype).tiny))[0].tolist()
