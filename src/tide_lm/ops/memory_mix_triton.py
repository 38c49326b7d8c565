"""Triton twins of memory_mix and memory_rows. N positions, U rows, K blocks, S slots, D hidden, L layers.

Loads are turned into float32 at once: products and sums are in float32 whatever the tensors are.
"""

import torch
import triton
import triton.language as tl

from tide_lm.ops.memory_rows import RowIndex

ROWS_A_PROGRAM = 32  # whose share of the gains' gradient one program adds up


@triton.jit
def _softmax(logits, n, stride, slots, S: tl.constexpr):
    x = tl.load(logits + n * stride + slots, mask=slots < S, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    return e / tl.sum(e, 0)


@triton.jit
def _mix_kernel(
    residual,
    logits,
    rows,
    index,
    out,
    stride,
    K: tl.constexpr,
    S: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, SLOTS)
    alpha = _softmax(logits, n, stride, slots, S)
    row = rows + tl.load(index + n).to(tl.int64) * (K * D)
    for start in tl.static_range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        inside = d < D
        total = tl.load(residual + n * D + d, mask=inside, other=0).to(tl.float32)
        for k in tl.static_range(K):
            weight = tl.sum(tl.where(slots == k, alpha, 0), 0)
            total += weight * tl.load(row + k * D + d, mask=inside, other=0).to(tl.float32)
        tl.store(out + n * D + d, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _mix_backward_kernel(
    d_out,
    logits,
    rows,
    index,
    d_logits,
    alphas,
    stride,
    K: tl.constexpr,
    S: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, SLOTS)
    alpha = _softmax(logits, n, stride, slots, S)
    row = rows + tl.load(index + n).to(tl.int64) * (K * D)
    products = tl.zeros((SLOTS, BLOCK), tl.float32)
    for start in tl.static_range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        gradient = tl.load(d_out + n * D + d, mask=d < D, other=0).to(tl.float32)
        inside = (slots < K)[:, None] & (d < D)[None, :]
        block = tl.load(row + slots[:, None] * D + d[None, :], mask=inside, other=0).to(tl.float32)
        products += block * gradient[None, :]
    d_alpha = tl.sum(products, 1)
    inner = tl.sum(alpha * d_alpha, 0)
    d = alpha * (d_alpha - inner)
    tl.store(d_logits + n * S + slots, d.to(d_logits.dtype.element_ty), mask=slots < S)
    tl.store(alphas + n * K + slots, alpha, mask=slots < K)


@triton.jit
def _norm_kernel(raw, gain, out, eps, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)  # u * K + k
    d = tl.arange(0, BLOCK)
    inside = d < D
    x = tl.load(raw + place * D + d, mask=inside, other=0).to(tl.float32)
    inverse = 1 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
    g = tl.load(gain + (place % K) * D + d, mask=inside, other=0).to(tl.float32)
    tl.store(out + place * D + d, (g * x * inverse).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _pieces_kernel(
    gradients,
    alphas,
    order,
    start,
    out,
    N,
    L: tl.constexpr,
    K: tl.constexpr,
    KS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of alpha outer g over layers and over the positions of one piece."""
    piece = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, KS)
    inside = d < D
    total = tl.zeros((KS, BLOCK), tl.float32)
    for place in range(tl.load(start + piece), tl.load(start + piece + 1)):
        n = tl.load(order + place).to(tl.int64)
        for layer in range(L):
            at = n + layer * N
            alpha = tl.load(alphas + at * K + k, mask=k < K, other=0)
            g = tl.load(gradients + at * D + d, mask=inside, other=0).to(tl.float32)
            total += alpha[:, None] * g[None, :]
    where = (piece * K + k[:, None]) * D + d[None, :]
    tl.store(out + where, total, mask=(k < K)[:, None] & inside[None, :])


@triton.jit
def _rows_kernel(
    raw,
    gain,
    pieces,
    first,
    d_raw,
    d_gain,
    eps,
    U,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The pieces of each row together, and back through the norm; and these rows' share for the gain."""
    program, k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < D
    g = tl.load(gain + k * D + d, mask=inside, other=0).to(tl.float32)
    share = tl.zeros((BLOCK,), tl.float32)
    for u in range(program * ROWS, tl.minimum((program + 1) * ROWS, U)):
        total = tl.zeros((BLOCK,), tl.float32)
        for piece in range(tl.load(first + u).to(tl.int64), tl.load(first + u + 1).to(tl.int64)):
            total += tl.load(pieces + (piece * K + k) * D + d, mask=inside, other=0)
        at = (u * K + k) * D + d
        x = tl.load(raw + at, mask=inside, other=0).to(tl.float32)
        inverse = 1 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
        normed = x * inverse
        share += total * normed
        d_normed = total * g
        along = tl.sum(d_normed * normed, 0) / D
        d_x = inverse * (d_normed - normed * along)
        tl.store(d_raw + at, d_x.to(d_raw.dtype.element_ty), mask=inside)
    tl.store(d_gain + (program * K + k) * D + d, share, mask=inside)


def mix(
    residual_BTD: torch.Tensor, logits_BTS: torch.Tensor, rows_UKD: torch.Tensor, index_BT: torch.Tensor
) -> torch.Tensor:
    (_, K, D), S = rows_UKD.shape, logits_BTS.shape[-1]
    residual, index, logits_NS = residual_BTD.contiguous(), index_BT.contiguous(), logits_BTS.flatten(0, 1)
    out = torch.empty_like(residual)
    _mix_kernel[(index.numel(),)](
        residual,
        logits_NS,
        rows_UKD,
        index,
        out,
        logits_NS.stride(0),
        K,
        S,
        triton.next_power_of_2(S),
        D,
        min(triton.next_power_of_2(D), 2048),
        num_warps=4,
    )
    return out


def mix_backward(
    d_out_BTD: torch.Tensor, logits_BTS: torch.Tensor, rows_UKD: torch.Tensor, index_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    (_, K, D), S = rows_UKD.shape, logits_BTS.shape[-1]
    d_out, index, logits_NS = d_out_BTD.contiguous(), index_BT.contiguous(), logits_BTS.flatten(0, 1)
    d_logits = torch.empty_like(logits_BTS, memory_format=torch.contiguous_format)
    alpha = logits_NS.new_empty(*index.shape, K, dtype=torch.float32)
    slots = triton.next_power_of_2(S)
    _mix_backward_kernel[(index.numel(),)](
        d_out,
        logits_NS,
        rows_UKD,
        index,
        d_logits,
        alpha,
        logits_NS.stride(0),
        K,
        S,
        slots,
        D,
        min(triton.next_power_of_2(D), 8192 // slots),
        num_warps=4,
    )
    return d_logits, alpha


def norm(raw_UKD: torch.Tensor, gain_KD: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    U, K, D = raw_UKD.shape
    out = torch.empty_like(raw_UKD, dtype=dtype)
    _norm_kernel[(U * K,)](raw_UKD, gain_KD, out, eps, K, D, triton.next_power_of_2(D), num_warps=4)
    return out


def rows_backward(
    raw_UKD: torch.Tensor,
    gain_KD: torch.Tensor,
    eps: float,
    index: RowIndex,
    d_out_LBTD: list[torch.Tensor],
    alpha_LBTK: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    (U, K, D), N, L = raw_UKD.shape, index.index_BT.numel(), len(d_out_LBTD)
    if not L:
        return torch.zeros_like(raw_UKD), torch.zeros_like(gain_KD)
    gradients, alphas = torch.stack(d_out_LBTD), torch.stack(alpha_LBTK)
    count = len(index.start_P) - 1
    pieces = raw_UKD.new_empty(count, K, D, dtype=torch.float32)
    blocks = triton.next_power_of_2(K)
    width = min(triton.next_power_of_2(D), max(4096 // blocks, 64))
    _pieces_kernel[(count, triton.cdiv(D, width))](
        gradients, alphas, index.order_N, index.start_P, pieces, N, L, K, blocks, D, width, num_warps=4
    )
    programs = triton.cdiv(U, ROWS_A_PROGRAM)
    d_raw = torch.empty_like(raw_UKD)
    shares = raw_UKD.new_empty(programs, K, D, dtype=torch.float32)
    _rows_kernel[(programs, K)](
        raw_UKD,
        gain_KD,
        pieces,
        index.first_U,
        d_raw,
        shares,
        eps,
        U,
        K,
        D,
        triton.next_power_of_2(D),
        ROWS_A_PROGRAM,
        num_warps=4,
    )
    return d_raw, shares.sum(0).to(gain_KD.dtype)
