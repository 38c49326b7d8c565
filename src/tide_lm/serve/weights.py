"""A model's matrices, moved together, so that one vector is multiplied with one matrix.

Shapes: L layers, N rows, D of a vector.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tide_lm.model import MemoryRouter
from tide_lm.ops.decode import DecodeWeights


def why_opaque(model: PreTrainedModel) -> str | None:
    """Return what keeps a model's layers from running part by part, on stacked weights, if anything does."""
    return next(_obstacles(model), None)


def _obstacles(model: PreTrainedModel) -> Iterator[str]:
    if model.config.attention_bias or model.config.mlp_bias:
        yield "biases"
    products = [part for part in model.model.layers.modules() if getattr(part, "weight", None) is not None]
    for part in products:
        if part.weight.ndim == 2 and not is_plain(part):
            yield f"a {type(part).__name__} in the place of a matrix, such as an adapter"
    if len(types := {str(part.weight.dtype) for part in products}) > 1:
        yield f"weights of {' and '.join(sorted(types))}"
    for name, part in model.named_modules():
        if _has_hooks(part):
            yield f"a hook on {name or 'the model'}"
    known = "tide_lm.", "transformers.", "torch.", "builtins"
    for part in (part for layer in model.model.layers for part in (layer, layer.self_attn, layer.mlp)):
        for kind in type(part).__mro__:
            if not kind.__module__.startswith(known):
                yield f"layers of type {kind.__name__}"
        if "forward" in vars(part):
            yield f"a changed forward of {type(part).__name__}"


def _has_hooks(part: nn.Module) -> bool:
    """Tell whether there are hooks besides those that transformers leaves where states were asked for."""
    hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    return any(not hook.__module__.startswith("transformers.") for hook in hooks)


def is_plain(part: nn.Module) -> bool:
    """Tell whether a part multiplies with its weight, and does nothing else."""
    return type(part) in (nn.Linear, nn.Embedding, MemoryRouter) and "forward" not in vars(part)


def qkv_parts(layer: Any) -> list[Any]:
    """Return what is multiplied with the first norm: queries, keys, values, and gates of rows in values."""
    attention = layer.self_attn
    gates = [attention.value_gate] if hasattr(attention, "value_gate") else []
    return [attention.q_proj, attention.k_proj, attention.v_proj, *gates]


def ffn_parts(layer: Any) -> list[Any]:
    """Return what is multiplied with the second norm: gate, up and the router."""
    return [layer.mlp.gate_proj, layer.mlp.up_proj, *([layer.router] if hasattr(layer, "router") else [])]


def stack_weights(model: PreTrainedModel) -> DecodeWeights:
    """Return the weights of all layers; the model's own become views of them, if they are not yet."""
    layers = model.model.layers
    return DecodeWeights(
        qkv=_stacked([qkv_parts(layer) for layer in layers]),
        o=_stacked([[layer.self_attn.o_proj] for layer in layers]),
        ffn=_stacked([ffn_parts(layer) for layer in layers]),
        down=_stacked([[layer.mlp.down_proj] for layer in layers]),
        embed=model.model.embed_tokens.weight,
        head=model.lm_head.weight,
        norm1=_stacked([[layer.input_layernorm] for layer in layers]),
        norm2=_stacked([[layer.post_attention_layernorm] for layer in layers]),
        norm3=model.model.norm.weight,
    )


def _stacked(layers: Sequence[Sequence[Any]]) -> torch.Tensor:
    """Return the parts' weights of each layer, one below the other.

    Products of a multiple of 8 rows are faster, so rows of 0 fill up.
    """
    sizes = [len(part.weight) for part in layers[0]]
    first = layers[0][0].weight.data
    shape = (len(layers), sum(sizes) + -sum(sizes) % 8, *first.shape[1:])

    def places(stack: torch.Tensor) -> list[torch.Tensor]:
        return [place for layer in stack for place in layer[: sum(sizes)].split(sizes)]

    parts = [part for layer in layers for part in layer]
    if first.untyped_storage().nbytes() == math.prod(shape) * first.itemsize:  # perhaps it was stacked before
        stack = first.new_empty(0).set_(first.untyped_storage(), 0, shape)
        if all(
            part.weight.data_ptr() == place.data_ptr()
            for part, place in zip(parts, places(stack), strict=True)
        ):
            return stack
    stack = first.new_empty(shape)  # on a CPU it takes memory as it is filled, and each original goes at once
    stack[:, sum(sizes) :] = 0
    for part, place in zip(parts, places(stack), strict=True):
        place.copy_(part.weight.data)
        part.weight.data = place
    return stack
