"""Rows with placeholders against plain autograd: the same output and gradients, in one pass or in many.

Shapes: B batch, T tokens, V vocabulary, K blocks, D hidden, L layers.
"""

import importlib
import os

import pytest
import torch

from tide_lm import ops
from tide_lm.model import Memory
from tide_lm.ops.memory_rows import normed_rows
from tide_lm.ops.row_index import PIECE, RowIndex
from tide_lm.training.objective import BatchRows

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}
EPS = 1e-5
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# A row of many pieces, rows of one position, and sizes that are no powers of two.
SHAPES = [(2, 3, 4, 1, 8), (1, 40, 3, 3, 33), (1, 1, 1, 2, 16), (2, 4, 50, 9, 20)]

KINDS = pytest.mark.parametrize(
    "kind",
    [{}, {"values": True}, {"pairs": True}, {"values": True, "pairs": True}],
    ids=["mixed", "in values too", "pairs", "pairs, in values too"],
)


def _losses(dtype, shape, fused, layers=3, dropped=(), values=False, pairs=False):
    """A loss through some layers of mixing, and the gradients of all that takes part.

    With `values` each layer adds a row of one block as well, and with `pairs` each position has another row.

    Not fused, it is computed in float64 from the same inputs.
    """
    B, T, V, J, D = shape
    K = 2 * J if pairs else J
    generator = torch.Generator().manual_seed(sum(shape))

    def normal(*size):
        drawn = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        return drawn if fused else drawn.double()

    ids = torch.randint(V, (B, T), generator=generator)
    ids[0, : T // 2] = 0  # one frequent token
    numbers = [ids, V + torch.randint(5, (B, T), generator=generator)] if pairs else [ids]
    wide = torch.promote_types(dtype, torch.float32) if fused else torch.float64
    table = normal(V + 5 if pairs else V, J, D).to(wide).requires_grad_()
    gain = normal(K, D).to(wide).requires_grad_()
    routers = [(normal(D, K + 1) / 4).requires_grad_() for _ in range(layers)]
    h = start = normal(B, T, D).requires_grad_()
    if fused:
        indices = tuple(RowIndex.of(part) for part in numbers)
        own = torch.cat([index.ids_U for index in indices])
        raw = table.detach()[own].requires_grad_()
        rows, placeholders = normed_rows(raw, gain, EPS, indices, layers, dtype, values)
        where = BatchRows(raw, indices).index()
    else:
        normed = table * torch.rsqrt(table.square().mean(-1, keepdim=True) + EPS)
        parts = [normed[part] * gain[at :: len(numbers)] for at, part in enumerate(numbers)]
        rows, where, placeholders = torch.stack(parts, 3).flatten(2, 3).flatten(0, 1), None, None
    memory = Memory(rows, where, placeholders)
    for layer, router in enumerate(routers):
        if layer in dropped:
            continue
        own_memory, logits = memory.for_layer(layer), torch.tanh(h) @ router
        if values:
            g_value = own_memory.placeholder and own_memory.placeholder.g_value_BTD
            row = ops.memory_row(h, own_memory.own_row_UD, own_memory.own_index_BT, g_value)
            h = h + torch.sigmoid(h) * row
        h = ops.memory_mix(h, logits, rows, where, h / 2, own_memory.placeholder)
    (h * normal(B, T, D)).sum().backward()
    d_table = torch.zeros_like(table).index_add_(0, own, raw.grad) if fused else table.grad
    kept = [router.grad for layer, router in enumerate(routers) if layer not in dropped]
    return [h.detach(), start.grad, d_table, gain.grad, *kept]


def assert_near(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).abs().max().item() <= tolerance * b.abs().max().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if INTERPRETED else list(TOLERANCES))
@pytest.mark.parametrize("shape", SHAPES)
@KINDS
def test_output_and_gradients_are_those_of_autograd(shape, dtype, kind):
    found, expected = (_losses(dtype, shape, fused, **kind) for fused in (True, False))
    assert_near(found, expected, TOLERANCES[dtype])


@KINDS
def test_a_layer_without_its_memory_gives_nothing(kind):
    found, expected = (
        _losses(torch.float32, SHAPES[1], fused, dropped=(1,), **kind) for fused in (True, False)
    )
    assert_near(found, expected, 2e-6)


@pytest.mark.skipif(INTERPRETED, reason="kernels compute in float32, too coarse for differences")
def test_gradients_are_finite_differences():
    torch.manual_seed(0)
    ids = torch.tensor([[0, 2, 2], [1, 0, 0]])
    index = RowIndex.of(ids)

    def loss(raw, gain, logits, residual, update):
        rows, placeholders = normed_rows(raw, gain, EPS, (index,), 1, torch.float64)
        return ops.memory_mix(residual, logits, rows, index.index_BT, update, placeholders.of_layers[0])

    raw, gain = torch.randn(3, 2, 4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    logits = torch.randn(2, 3, 3, dtype=torch.float64)
    residual, update = torch.randn(2, 2, 3, 4, dtype=torch.float64)
    # Placeholders carry no gradient of their own, so rows are checked through a loss that reads the output.
    inputs = [value.requires_grad_() for value in (raw, gain, logits, residual, update)]
    assert torch.autograd.gradcheck(loss, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_reach_the_rows_in_the_type_of_the_layers(dtype, monkeypatch):
    """In a wider one they would be copied, and read at half the speed."""
    seen = []
    module = importlib.import_module(f"tide_lm.ops.{'memory_mix_triton' if INTERPRETED else 'memory_rows'}")
    name = "rows_backward" if INTERPRETED else "rows_backward_reference"
    original = getattr(module, name)

    def look(*arguments):
        seen.extend(gradient.dtype for gradient in arguments[4])
        return original(*arguments)

    monkeypatch.setattr(module, name, look)
    _losses(dtype, SHAPES[0], fused=True)
    assert seen == [dtype] * 3


@pytest.mark.parametrize(
    "ids",
    [
        torch.randint(7, (3, 50), generator=torch.Generator().manual_seed(0)) ** 2,
        torch.arange(3).repeat_interleave(torch.tensor([PIECE, 2 * PIECE, 1])).view(7, 7),  # whole pieces
    ],
    ids=["drawn", "whole"],
)
def test_pieces_cover_the_positions_of_each_row(ids):
    index = RowIndex.of(ids)
    assert torch.equal(index.ids_U[index.index_BT], ids)
    seen = []
    for u in range(len(index.ids_U)):
        for piece in range(index.first_U[u], index.first_U[u + 1]):
            places = index.order_N[index.start_P[piece] : index.start_P[piece + 1]]
            assert 1 <= len(places) <= PIECE
            assert (ids.flatten()[places] == index.ids_U[u]).all()
            seen += places.tolist()
    assert sorted(seen) == list(range(ids.numel()))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 8), (3, 1, 5, 24, 300), (2, 7, 5, 3, 33)])
@pytest.mark.parametrize("indexed", [False, True, "pairs"])
@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.parametrize("many", [False, True] if INTERPRETED else [False])
def test_without_gradients_the_mix_is_the_same(shape, indexed, updated, many, monkeypatch):
    """What runs on a GPU then, of logits that are columns of a wider product, and if there are many."""
    if many:
        monkeypatch.setattr(importlib.import_module("tide_lm.ops.memory_mix_triton"), "FEW", 1)
    B, T, U, K, D = shape
    generator = torch.Generator().manual_seed(0)
    residual, update = (torch.randn(B, T, D, generator=generator) for _ in range(2))
    logits = torch.randn(B, T, K + 9, generator=generator)[..., 8:]
    parts = (2,) if indexed == "pairs" and K % 2 == 0 else ()
    index = torch.randint(U, (*parts, B, T), generator=generator) if indexed else None
    rows = torch.randn(U if indexed else B * T, K // 2 if parts else K, D, generator=generator)
    given = (residual, logits, rows, index, update if updated else None)
    found = torch.ops.tide_lm.memory_mix(*given)
    assert torch.allclose(found, ops.memory_mix(*given), atol=1e-5)
