"""`ops.memory_mix` against a loop over positions and blocks, forward and backward.

Shapes: B batch, T tokens, U rows held, K blocks, S = K + 1 slots (the null bank is last), D hidden.
"""

from typing import NamedTuple

import pytest
import torch

from tide_lm import ops

# Against the largest element of the exact result, which the loop computes in float64 from the same inputs.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2}
SHAPES = [(1, 1, 1, 1), (2, 5, 3, 7), (3, 1, 8, 33)]
ROWS_HELD = {"a row per position": None, "fewer rows than positions": 0.5, "more rows than positions": 3}


class Inputs(NamedTuple):
    residual_BTD: torch.Tensor
    logits_BTS: torch.Tensor
    rows_UKD: torch.Tensor
    index_BT: torch.Tensor | None


def random_inputs(
    shape: tuple[int, int, int, int], dtype: torch.dtype, rows_held: float | None = None
) -> Inputs:
    B, T, K, D = shape
    generator = torch.Generator().manual_seed(B + T + K + D)
    U = B * T if rows_held is None else max(1, int(B * T * rows_held))

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    index_BT = None if rows_held is None else torch.randint(U, (B, T), generator=generator)
    return Inputs(normal(B, T, D), normal(B, T, K + 1), normal(U, K, D), index_BT)


def mix_by_loops(inputs: Inputs) -> torch.Tensor:
    """Equations router and tide_model, one position and one block at a time."""
    residual_BTD, logits_BTS, rows_UKD, index_BT = inputs
    B, T, _ = residual_BTD.shape
    mixed_BTD = []
    for b in range(B):
        for t in range(T):
            u = b * T + t if index_BT is None else int(index_BT[b, t])
            weights = torch.exp(logits_BTS[b, t] - logits_BTS[b, t].max().detach())
            h = residual_BTD[b, t]
            for k, row_D in enumerate(rows_UKD[u]):
                h = h + weights[k] / weights.sum() * row_D
            mixed_BTD.append(h)
    return torch.stack(mixed_BTD).view(residual_BTD.shape)


def in_float64(inputs: Inputs) -> Inputs:
    *tensors, index_BT = inputs
    return Inputs(*(tensor.detach().double().requires_grad_() for tensor in tensors), index_BT)


def assert_close(found: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    assert found.shape == exact.shape
    assert (found.double() - exact).abs().max() <= tolerance * exact.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows_held", ROWS_HELD.values(), ids=ROWS_HELD.keys())
def test_output_and_gradients_equal_the_loop(
    rows_held: float | None, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    inputs = random_inputs(shape, dtype, rows_held)
    exact_inputs = in_float64(inputs)

    found = ops.memory_mix(*inputs)
    exact = mix_by_loops(exact_inputs)
    cotangent_BTD = torch.randn(exact.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found.backward(cotangent_BTD)
    exact.backward(cotangent_BTD.double())

    assert found.dtype == dtype
    assert_close(found, exact, TOLERANCES[dtype])
    for tensor, exact_tensor in zip(inputs[:3], exact_inputs[:3], strict=True):
        assert tensor.grad.dtype == dtype
        assert_close(tensor.grad, exact_tensor.grad, TOLERANCES[dtype])


@pytest.mark.parametrize("rows_held", ROWS_HELD.values(), ids=ROWS_HELD.keys())
def test_gradients_equal_finite_differences(rows_held: float | None) -> None:
    inputs = random_inputs((2, 3, 2, 3), torch.float64, rows_held)
    assert torch.autograd.gradcheck(ops.memory_mix, tuple(inputs))


def test_rows_that_no_position_uses_get_no_gradient() -> None:
    inputs = random_inputs((2, 5, 3, 7), torch.float32, rows_held=3)
    ops.memory_mix(*inputs).sum().backward()
    used = torch.zeros(len(inputs.rows_UKD), dtype=torch.bool).index_fill(0, inputs.index_BT.flatten(), True)
    assert (inputs.rows_UKD.grad[~used] == 0).all()
    assert (inputs.rows_UKD.grad[used] != 0).all()


def test_positions_that_share_a_row_see_the_same_memory() -> None:
    residual_BTD, logits_BTS, rows_UKD, _ = random_inputs((2, 5, 3, 7), torch.float64)
    shared_BT = torch.zeros(2, 5, dtype=torch.long)
    copied_UKD = rows_UKD[:1].expand(10, -1, -1)
    found = ops.memory_mix(residual_BTD, logits_BTS, rows_UKD, shared_BT)
    assert torch.equal(found, ops.memory_mix(residual_BTD, logits_BTS, copied_UKD))


def test_softmax_is_float32_for_bfloat16_logits() -> None:
    """A bfloat16 softmax would be off by a thousandth; under autocast only the logits are bfloat16."""
    inputs = random_inputs((3, 5, 8, 33), torch.float32)
    inputs = inputs._replace(logits_BTS=inputs.logits_BTS.detach().bfloat16())
    assert_close(ops.memory_mix(*inputs), mix_by_loops(in_float64(inputs)), TOLERANCES[torch.float32])

    alpha_BTS = ops.router_weights(inputs.logits_BTS)
    assert alpha_BTS.dtype == torch.float32
    assert_close(alpha_BTS, inputs.logits_BTS.double().softmax(-1), TOLERANCES[torch.float32])


def test_bfloat16_memory_is_rounded_once() -> None:
    """Weights or products rounded on the way would be off by more than half a unit in the last place."""
    inputs = random_inputs((3, 5, 8, 33), torch.bfloat16)
    inputs = inputs._replace(residual_BTD=torch.zeros_like(inputs.residual_BTD))
    exact = mix_by_loops(in_float64(inputs))
    half_unit = torch.finfo(torch.bfloat16).eps / 2
    # A sum near zero carries the float32 error of its larger terms.
    assert ((ops.memory_mix(*inputs).double() - exact).abs() <= half_unit * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("K", [1, 3, 8])
def test_the_null_slot_is_last_and_adds_nothing(K: int) -> None:
    """Equal rows mix to themselves, less the share of the null slot."""
    residual_BTD, logits_BTS, rows_UKD, _ = random_inputs((2, 5, K, 7), torch.float64)
    same_UKD = rows_UKD[:, :1].expand(-1, K, -1)
    null_BT1 = logits_BTS.softmax(-1)[..., -1:]
    exact = residual_BTD + (1 - null_BT1) * same_UKD[:, 0].view_as(residual_BTD)
    assert_close(ops.memory_mix(residual_BTD, logits_BTS, same_UKD), exact, TOLERANCES[torch.float64])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_router_that_chooses_the_null_bank_leaves_the_residual_as_it_was(dtype: torch.dtype) -> None:
    inputs = random_inputs((2, 5, 3, 7), dtype)
    logits_BTS = torch.zeros_like(inputs.logits_BTS)
    logits_BTS[..., -1] = 1e4
    assert torch.equal(ops.memory_mix(inputs.residual_BTD, logits_BTS, inputs.rows_UKD), inputs.residual_BTD)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("others", "chosen"), [(0, 1e4), (-1e4, 0), (-1e4, 1e4)])
def test_huge_logits_choose_one_block_and_overflow_nowhere(
    others: float, chosen: float, dtype: torch.dtype
) -> None:
    inputs = random_inputs((2, 5, 3, 7), dtype)
    logits_BTS = torch.full_like(inputs.logits_BTS, others)
    logits_BTS[..., 1] = chosen
    inputs = inputs._replace(logits_BTS=logits_BTS.requires_grad_())

    found = ops.memory_mix(*inputs)
    found.sum().backward()

    row_BTD = inputs.rows_UKD[:, 1].view_as(inputs.residual_BTD)
    assert torch.equal(found, inputs.residual_BTD + row_BTD)
    assert all(tensor.grad.isfinite().all() for tensor in inputs[:3])


@pytest.mark.parametrize("indexed", [True, False])
def test_fewer_rows_than_positions_are_refused_before_a_kernel_reads_them(indexed):
    residual_BTD, logits_BTS, rows_UKD = torch.zeros(2, 5, 7), torch.zeros(2, 5, 4), torch.zeros(9, 3, 7)
    index_BT = torch.zeros(2, 4, dtype=torch.long) if indexed else None
    with pytest.raises(AssertionError, match=r"\[9\]|\[2, 4\]"):
        torch.ops.tide_lm.memory_mix(residual_BTD, logits_BTS, rows_UKD, index_BT, None)
