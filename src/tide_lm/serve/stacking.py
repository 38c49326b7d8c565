"""A model's matrices, moved together, so that what one vector is multiplied with is one matrix.

Shapes: L layers, N rows, D of a vector.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tide_lm.model import MemoryRouter
from tide_lm.ops.decode import DecodeWeights


def why_apart(model: PreTrainedModel) -> str | None:
    """What keeps a model's matrices from being moved, if anything does."""
    if model.config.attention_bias or model.config.mlp_bias:
        return "biases"
    products = [part for part in model.model.layers.modules() if getattr(part, "weight", None) is not None]
    if others := [part for part in products if part.weight.ndim == 2 and not is_plain(part)]:
        return f"a {type(others[0]).__name__} in the place of a matrix, such as an adapter"
    if len(types := {str(part.weight.dtype) for part in products}) > 1:
        return f"weights of {' and '.join(sorted(types))}"
    return None


def is_plain(part: nn.Module) -> bool:
    """Tell whether a part does what its weight says, and nothing else."""
    return type(part) in (nn.Linear, nn.Embedding, MemoryRouter) and "forward" not in vars(part)


def _projections(layer: Any) -> list[Any]:
    attention = layer.self_attn
    gates = [attention.value_gate] if hasattr(attention, "value_gate") else []
    return [attention.q_proj, attention.k_proj, attention.v_proj, *gates]


def _ffn(layer: Any) -> list[Any]:
    return [layer.mlp.gate_proj, layer.mlp.up_proj, *([layer.router] if hasattr(layer, "router") else [])]


def stack_weights(model: PreTrainedModel) -> DecodeWeights:
    """The weights by layers; the model's own become views of them, if they are not yet."""
    layers = model.model.layers
    return DecodeWeights(
        qkv=_stacked([_projections(layer) for layer in layers]),
        o=_stacked([[layer.self_attn.o_proj] for layer in layers]),
        ffn=_stacked([_ffn(layer) for layer in layers]),
        down=_stacked([[layer.mlp.down_proj] for layer in layers]),
        embed=model.model.embed_tokens.weight,
        head=model.lm_head.weight,
        norm1=_stacked([[layer.input_layernorm] for layer in layers]),
        norm2=_stacked([[layer.post_attention_layernorm] for layer in layers]),
        norm3=model.model.norm.weight,
    )


def _stacked(layers: Sequence[Sequence[Any]]) -> torch.Tensor:
    """The parts' weights of each layer, one below the other.

    Products of a multiple of 8 rows are faster, so that there are some of 0.
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
    stack = first.new_zeros(shape)
    for part, place in zip(parts, places(stack), strict=True):
        place.copy_(part.weight.data)
        part.weight.data = place
    return stack


class _Joint:
    """One product for several parts, each of which is asked for once, with the same vectors."""

    def __init__(self, weight_ND: torch.Tensor, parts: int) -> None:
        self.weight_ND, self.parts, self.asked = weight_ND, parts, 0
        self.product: torch.Tensor | None = None

    def part(self, first: int, last: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            if self.product is None:
                self.product = nn.functional.linear(x, self.weight_ND)
            found = self.product[..., first:last]
            self.asked += 1
            if self.asked == self.parts:
                self.product, self.asked = None, 0
            return found

        return forward


class JointProducts:
    """Make queries, keys and values by one product, and the FFN's first half and the router by another.

    All weights are stacked for it, so that an engine that needs them all moves none under another.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        weights = stack_weights(model)
        self._joints: list[_Joint] = []
        self._forwards: list[tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]] = []
        for number, layer in enumerate(model.model.layers):
            for weight_LND, parts in ((weights.qkv, _projections(layer)), (weights.ffn, _ffn(layer))):
                joint, first = _Joint(weight_LND[number], len(parts)), 0
                self._joints.append(joint)
                for part in parts:
                    last = first + len(part.weight)
                    self._forwards.append((part, joint.part(first, last)))
                    first = last

    @contextmanager
    def used(self) -> Iterator[None]:
        for part, forward in self._forwards:
            part.forward = forward
        try:
            yield
        finally:
            for part, _ in self._forwards:
                del part.forward
            for joint in self._joints:  # after an error, one may be at work
                joint.product, joint.asked = None, 0
