"""A model's matrices, moved together, so that what one vector is multiplied with is one matrix.

Shapes: L layers, N rows, D of a vector.
"""

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
    if others := [part for part in products if part.weight.ndim == 2 and not _is_plain(part)]:
        return f"a {type(others[0]).__name__} in the place of a matrix, such as an adapter"
    if len(types := {str(part.weight.dtype) for part in products}) > 1:
        return f"weights of {' and '.join(sorted(types))}"
    return None


def _is_plain(part: nn.Module) -> bool:
    return type(part) in (nn.Linear, MemoryRouter) and not part._forward_hooks and not part._forward_pre_hooks


def _projections(layer: Any) -> list[Any]:
    attention = layer.self_attn
    gates = [attention.value_gate] if hasattr(attention, "value_gate") else []
    return [attention.q_proj, attention.k_proj, attention.v_proj, *gates]


def _ffn(layer: Any) -> list[Any]:
    return [layer.mlp.gate_proj, layer.mlp.up_proj, *([layer.router] if hasattr(layer, "router") else [])]


def stack_weights(model: PreTrainedModel) -> DecodeWeights:
    """The weights by layers; the model's own become views of them. It is done once a model.

    Products of a multiple of 8 rows are faster, so that there are some of 0.
    """
    layers = model.model.layers
    done = getattr(model, "_stacked_weights", None)
    if done is not None and done.qkv.data_ptr() == layers[0].self_attn.q_proj.weight.data_ptr():
        return done

    def stacked(parts_of: Callable[[Any], Sequence[Any]]) -> torch.Tensor:
        first = [part.weight.data for part in parts_of(layers[0])]
        rows = sum(len(weight) for weight in first)
        out = first[0].new_zeros(len(layers), rows + -rows % 8, *first[0].shape[1:])
        for layer, into in zip(layers, out, strict=True):
            parts = parts_of(layer)
            for part, place in zip(parts, into[:rows].split([len(p.weight) for p in parts]), strict=True):
                place.copy_(part.weight.data)
                part.weight.data = place
        return out

    model._stacked_weights = DecodeWeights(
        qkv=stacked(_projections),
        o=stacked(lambda layer: [layer.self_attn.o_proj]),
        ffn=stacked(_ffn),
        down=stacked(lambda layer: [layer.mlp.down_proj]),
        embed=model.model.embed_tokens.weight,
        head=model.lm_head.weight,
        norm1=stacked(lambda layer: [layer.input_layernorm]),
        norm2=stacked(lambda layer: [layer.post_attention_layernorm]),
        norm3=model.model.norm.weight,
    )
    return model._stacked_weights


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
    """Has queries, keys and values made by one product, and so the FFN's first half and the router."""

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
