"""How far apart two tokens stay in one context: figures 2 and 6, definition 2.1, proposition 2.2.

Templates end where the token stands, so that the states of two tokens differ by the token alone. Shapes: P
pairs, W words, L layers, D hidden.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tide_lm.analysis.contexts import PAIRS, TEMPLATES
from tide_lm.evaluation.perplexity import check_ids
from tide_lm.model.opened import OpenedModel

Pair = tuple[str, str]
POINTS = 9  # of the segment between two states
ITERATIONS = 24  # of the power method


@torch.no_grad()
def collapse(
    opened: OpenedModel, delta: float = 0.1, log: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Return distances by category, pair and layer, raw and over the mean norm; what collapsed; FFN bounds.

    A pair has collapsed after a layer if its states, averaged over templates, are nearer than `delta` times
    their mean norm; and before a layer's FFN, if that holds for the FFN's inputs.
    """
    categories = {}
    for name, pairs in PAIRS.items():
        log(name)
        categories[name] = category(opened.model, opened.tokenizer, pairs, TEMPLATES[name], delta)
    return {"delta": delta, "categories": categories}


def category(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Pair],
    templates: Sequence[str],
    delta: float,
) -> dict[str, Any]:
    words = {pair: ids for pair in pairs if (ids := endings(tokenizer, pair)) is not None}
    result: dict[str, Any] = {
        "pairs": [list(pair) for pair in words],
        "skipped": [list(pair) for pair in pairs if pair not in words],
        "templates": len(templates),
    }
    if not words:
        return result
    words_W = [ids for both in words.values() for ids in both]
    distance_PL, relative_PL, mean_WLD, inputs_WLD = _measure(model, tokenizer, words_W, templates)
    apart_PL, norm_PL = distance_and_norm(mean_WLD)
    return result | {
        "distance": distance_PL.tolist(),
        "relative": relative_PL.tolist(),
        "collapse_set": _members(apart_PL <= delta * norm_PL),
        "ffn": None if inputs_WLD is None else _ffn(model, inputs_WLD, delta),
    }


def _measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    words_W: Sequence[list[int]],
    templates: Sequence[str],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return mean distances, raw and relative; then mean states and mean inputs of the FFNs."""
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    distance, relative, states, inputs = [], [], [], []
    for template in templates:
        prefix = start + tokenizer(template, add_special_tokens=False).input_ids
        ids = [prefix + word for word in words_W]
        by_length: dict[int, list[int]] = {}
        for word, sequence in enumerate(ids):
            by_length.setdefault(len(sequence), []).append(word)
        seen: list[tuple[torch.Tensor, ...]] = [()] * len(ids)
        for words in by_length.values():
            batch = torch.tensor([ids[word] for word in words], device=model.device)
            for word, *tensors in zip(words, *last_states(model, batch), strict=True):
                seen[word] = tuple(tensors)
        states_WLD, *inputs_WLD = (torch.stack(tensors) for tensors in zip(*seen, strict=True))
        apart_PL, norm_PL = distance_and_norm(states_WLD)
        distance.append(apart_PL)
        relative.append(apart_PL / norm_PL.clamp(min=torch.finfo(norm_PL.dtype).tiny))
        states.append(states_WLD)
        inputs += inputs_WLD

    def mean(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(values).mean(0)

    return mean(distance), mean(relative), mean(states), mean(inputs) if inputs else None


def last_states(model: PreTrainedModel, ids_WT: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """Return the state of the last token after each layer, W x L x D, and the input of each gated FFN.

    A model whose layers are not known gives the states that it returns, the last one after its final norm.
    `options` go to the model's forward.
    """
    check_ids(ids_WT, model.get_input_embeddings().num_embeddings)
    layers = getattr(model.base_model, "layers", None)
    with watching(layers or []) as (states, inputs):
        outputs = model.base_model(ids_WT, output_hidden_states=True, use_cache=False, **options)
    returned = outputs.hidden_states[1:]
    if layers is None or any(state.ndim != 3 for state in states):
        # OPT's last may be narrower.
        alike = [state for state in returned if state.shape == returned[0].shape]
        return (torch.stack([state[:, -1].float() for state in alike], 1),)
    found = [states, inputs] if _has_gated_ffn(layers) else [states]
    return tuple(torch.stack([tensor[:, -1].float() for tensor in tensors], 1) for tensors in found)


@contextmanager
def watching(layers: Iterable[nn.Module]) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Give two lists that a forward pass fills: the outputs of layers, and the inputs of their FFNs."""
    states: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []

    def after_layer(module: nn.Module, arguments: Any, output: Any) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)

    def before_ffn(module: nn.Module, arguments: Any) -> None:
        inputs.append(arguments[0])

    hooks = [layer.register_forward_hook(after_layer) for layer in layers]
    ffns = [layer.get_submodule("mlp") for layer in layers if hasattr(layer, "mlp")]
    hooks += [ffn.register_forward_pre_hook(before_ffn) for ffn in ffns]
    try:
        yield states, inputs
    finally:
        for hook in hooks:
            hook.remove()


def endings(tokenizer: PreTrainedTokenizerBase, pair: Pair) -> list[list[int]] | None:
    """Return the ids of both words after a space, if they differ in their last token alone."""
    first, second = (tokenizer(f" {word}", add_special_tokens=False).input_ids for word in pair)
    return [first, second] if differ_at_the_end(tokenizer, first, second) else None


def differ_at_the_end(tokenizer: PreTrainedTokenizerBase, first: list[int], second: list[int]) -> bool:
    same = len(first) == len(second) and first[:-1] == second[:-1] and first != second
    # A word of several tokens may share all but its last with the other, as " 17" does after a bare space.
    return same and not tokenizer.decode(first[:-1]).strip()


def distance_and_norm(states_WLD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distance and the mean norm, P x L, of pairs that follow one another among the words."""
    first, second = states_WLD[0::2], states_WLD[1::2]
    norms = torch.linalg.vector_norm(states_WLD, dim=-1)
    return torch.linalg.vector_norm(first - second, dim=-1), (norms[0::2] + norms[1::2]) / 2


def _has_gated_ffn(layers: nn.ModuleList) -> bool:
    """Tell whether FFNs are gated as in Llama, functions of one state; experts and quantised ones are not."""
    ffns = [getattr(layer, "mlp", nn.Identity()) for layer in layers]
    return all(
        hasattr(ffn, "down_proj")
        and hasattr(ffn, "gate_proj")
        and all(weight.is_floating_point() for weight in ffn.parameters())
        for ffn in ffns
    )


def _members(near_PL: torch.Tensor) -> list[list[int]]:
    """Return the pairs that are near, by layer."""
    return [torch.nonzero(near_P).flatten().tolist() for near_P in near_PL.T]


def _ffn(model: PreTrainedModel, inputs_WLD: torch.Tensor, delta: float) -> dict[str, Any]:
    """Return, by pair and layer: how far apart the FFN's inputs are, its largest slope between them, their
    product, and how far apart its outputs are; and by layer the pairs that have collapsed before it."""
    apart_PL, norm_PL = distance_and_norm(inputs_WLD)
    found: dict[str, list[torch.Tensor]] = {"input_distance": [], "slope": [], "bound": [], "separation": []}
    for layer, inputs_WD in zip(model.base_model.layers, inputs_WLD.unbind(1), strict=True):
        ffn = copy.deepcopy(layer.mlp).float()  # in bfloat16, near states would differ by rounding alone
        first, second = inputs_WD[0::2], inputs_WD[1::2]
        apart_P = torch.linalg.vector_norm(first - second, dim=-1)
        slope_P = largest_slope(ffn, first, second)
        separation_P = torch.linalg.vector_norm(ffn(first) - ffn(second), dim=-1)
        for values, value_P in zip(
            found.values(), (apart_P, slope_P, slope_P * apart_P, separation_P), strict=True
        ):
            values.append(value_P)
    by_pair = {name: torch.stack(values, 1).tolist() for name, values in found.items()}
    return {"members": _members(apart_PL <= delta * norm_PL), **by_pair}


def largest_slope(
    function: Callable[[torch.Tensor], torch.Tensor], first_PD: torch.Tensor, second_PD: torch.Tensor
) -> torch.Tensor:
    """Return the largest norm of the Jacobian on the segment between two points, for each pair.

    A gated FFN has no slope that holds everywhere, but it has one on a segment. The power method estimates it
    at evenly spread points, so the result may be a little below the largest.
    """
    shares = torch.linspace(0, 1, POINTS, dtype=first_PD.dtype, device=first_PD.device)[:, None, None]
    points = (first_PD + shares * (second_PD - first_PD)).flatten(0, 1)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(points.shape, generator=generator).to(points)
    for _ in range(ITERATIONS):
        direction = torch.nn.functional.normalize(direction, dim=-1)
        pushed = torch.func.jvp(function, (points,), (direction,))[1]
        norm = torch.linalg.vector_norm(pushed, dim=-1)
        (direction,) = torch.func.vjp(function, points)[1](pushed)
    return norm.view(POINTS, -1).amax(0)
