"""`row_adamw` in Triton: a row is read once, takes all its missing steps in registers, and is written once.

Operations are the reference's, in its order, rounded as there: fusion is off, and `fma` stands for `lerp_`.
Only in steps without gradient are roots and quotients of float32 the GPU's own, each off by two units in the
last place at most: exact ones take several times as long, and a move is far smaller than what it moves.
"""

import torch
import triton
import triton.language as tl

from tide_lm.ops.row_table import History, RowTable

BLOCK = 1024


def advance_triton(
    table: RowTable,
    ids_U: torch.Tensor,
    history: History,
    grad_UKD: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    """Bring weights and moments to the newest step; the caller sets `last_V`, which other blocks read."""
    assert all(tensor.is_contiguous() for tensor in table.state)
    row = table.weight_VKD[0].numel()
    block = min(BLOCK, triton.next_power_of_2(row))
    beta1, beta2 = history.betas
    advance_kernel[len(ids_U), triton.cdiv(row, block)](
        *table.state,
        table.last_V,
        table.touched_V,
        ids_U.contiguous(),
        None if grad_UKD is None else grad_UKD.contiguous(),
        scale,
        history.on_device(table.weight_VKD),
        history.steps,
        row,
        1 - beta1,
        beta2,
        1 - beta2,
        history.eps,
        history.tail,
        block,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["newest"])
def advance_kernel(
    weight_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    last_ptr,
    touched_ptr,
    ids_ptr,
    grad_ptr,  # None: without gradient
    scale_ptr,  # None: 1
    steps_ptr,  # decay, size and unbias of each step
    newest,
    row,
    ONE_LESS_BETA1: tl.constexpr,  # constants, since an argument would be rounded to float32
    BETA2: tl.constexpr,
    ONE_LESS_BETA2: tl.constexpr,
    EPS: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    u = tl.program_id(0).to(tl.int64)
    id = tl.load(ids_ptr + u).to(tl.int64)
    last = tl.load(last_ptr + id).to(tl.int32)
    if last < newest:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < row
        here = id * row + column
        weight = tl.load(weight_ptr + here, inside, other=0.0)
        exp_avg = tl.load(exp_avg_ptr + here, inside, other=0.0).to(weight.dtype)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + here, inside, other=0.0).to(weight.dtype)

        end = newest if grad_ptr is not None else newest + 1
        still = tl.minimum(tl.load(touched_ptr + id).to(tl.int32) + TAIL + 1, end)
        for t in range(last + 1, still):
            weight *= tl.load(steps_ptr + 3 * t - 3)
            exp_avg = _lerp(exp_avg, 0.0, ONE_LESS_BETA1)
            exp_avg_sq *= BETA2
            size, unbias = tl.load(steps_ptr + 3 * t - 2), tl.load(steps_ptr + 3 * t - 1)
            weight -= exp_avg * size / (tl.sqrt(exp_avg_sq) * unbias + EPS)
        for t in range(tl.maximum(last + 1, still), end):
            weight *= tl.load(steps_ptr + 3 * t - 3)
            exp_avg = _lerp(exp_avg, 0.0, ONE_LESS_BETA1)
            exp_avg_sq *= BETA2

        if grad_ptr is not None:
            grad = tl.load(grad_ptr + u * row + column, inside, other=0.0).to(weight.dtype)
            if scale_ptr is not None:
                grad *= tl.load(scale_ptr).to(weight.dtype)
            weight *= tl.load(steps_ptr + 3 * newest - 3)
            exp_avg = _lerp(exp_avg, grad, ONE_LESS_BETA1)
            exp_avg_sq = exp_avg_sq * BETA2 + grad * ONE_LESS_BETA2 * grad
            size, unbias = tl.load(steps_ptr + 3 * newest - 2), tl.load(steps_ptr + 3 * newest - 1)
            weight -= _quotient(exp_avg * size, _root(exp_avg_sq) * unbias + EPS)

        tl.store(weight_ptr + here, weight, inside)
        tl.store(exp_avg_ptr + here, exp_avg, inside)
        tl.store(exp_avg_sq_ptr + here, exp_avg_sq, inside)


@triton.jit
def _lerp(start, end, WEIGHT: tl.constexpr):
    return tl.fma(end - start, tl.full((), WEIGHT, start.dtype), start)


@triton.jit
def _root(x):
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


@triton.jit
def _quotient(x, y):
    return tl.div_rn(x, y) if x.dtype == tl.float32 else x / y
