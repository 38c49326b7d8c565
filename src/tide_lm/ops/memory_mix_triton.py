"""Triton twins of memory_mix and memory_rows. N positions, U rows, K blocks, S slots, D hidden, L layers.

A position has P rows of J = K / P blocks, which take turns; `index` has P x N numbers.

Loads are turned into float32 at once: products and sums are in float32 whatever the tensors are. Only where
gradients are of 16 bits, tensor cores read the alphas that they are multiplied with as tf32. KS and LS are
K and L, rounded up to what a tile may have.
"""

import torch
import triton
import triton.language as tl

from tide_lm.ops.row_index import RowIndex
from tide_lm.ops.transfer import upload

FEW = 1024  # positions: fewer do not occupy a GPU
ROWS_A_PROGRAM = 16  # whose share of the gains' gradient one program adds up


@triton.jit
def _softmax(logits, K: tl.constexpr, k):
    """Return alpha of the K blocks, and of the null bank, which follows them."""
    x = tl.load(logits + k, mask=k < K, other=-float("inf")).to(tl.float32)
    null = tl.load(logits + K).to(tl.float32)
    largest = tl.maximum(tl.max(x, 0), null)
    e, e_null = tl.exp(x - largest), tl.exp(null - largest)
    total = tl.sum(e, 0) + e_null
    return e / total, e_null / total


@triton.jit
def _mix_kernel(
    residual,
    update,
    logits,
    rows,
    index,
    order,
    out,
    stride,
    row_stride,
    N,
    P: tl.constexpr,
    K: tl.constexpr,
    KS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Mix SPAN numbers of one position; in order, positions of one row follow each other: it is cached."""
    n = tl.program_id(0) if order is None else tl.load(order + tl.program_id(0))
    n = n.to(tl.int64)
    blocks = tl.arange(0, KS)
    alpha, _ = _softmax(logits + n * stride, K, blocks)
    for start in range(0, SPAN, BLOCK):
        d = tl.program_id(1) * SPAN + start + tl.arange(0, BLOCK)
        inside = d < D
        total = tl.load(residual + n * D + d, mask=inside, other=0).to(tl.float32)
        if update is not None:
            total += tl.load(update + n * D + d, mask=inside, other=0).to(tl.float32)
        for k in tl.static_range(K):
            weight = tl.sum(tl.where(blocks == k, alpha, 0), 0)
            u = n if index is None else tl.load(index + k % P * N + n).to(tl.int64)
            row = rows + u * row_stride + k // P * D
            total += weight * tl.load(row + d, mask=inside, other=0).to(tl.float32)
        tl.store(out + n * D + d, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _mix_backward_kernel(
    d_out,
    logits,
    rows,
    index,
    order,
    d_logits,
    alphas,
    stride,
    row_stride,
    N,
    P: tl.constexpr,
    K: tl.constexpr,
    KS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.load(order + tl.program_id(0)).to(tl.int64)
    k = tl.arange(0, KS)
    alpha, null = _softmax(logits + n * stride, K, k)
    if P == 1:
        row, place = rows + tl.load(index + n).to(tl.int64) * row_stride, k * D
    else:
        u = tl.load(index + k % P * N + n, mask=k < K, other=0).to(tl.int64)
        row, place = rows, u * row_stride + k // P * D
    products = tl.zeros((KS, BLOCK), tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        gradient = tl.load(d_out + n * D + d, mask=d < D, other=0).to(tl.float32)
        inside = (k < K)[:, None] & (d < D)[None, :]
        block = tl.load(row + place[:, None] + d[None, :], mask=inside, other=0).to(tl.float32)
        products += block * gradient[None, :]
    d_alpha = tl.sum(products, 1)
    inner = tl.sum(alpha * d_alpha, 0)
    d_logit = d_logits + n * (K + 1)
    tl.store(d_logit + k, (alpha * (d_alpha - inner)).to(d_logits.dtype.element_ty), mask=k < K)
    tl.store(d_logit + K, (-null * inner).to(d_logits.dtype.element_ty))
    tl.store(alphas + n * K + k, alpha, mask=k < K)


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
    gradients,  # of the first layer, and how far from it are those of each
    distances,
    alphas,
    order,
    start,
    out,
    N,
    L: tl.constexpr,
    LS: tl.constexpr,
    K: tl.constexpr,
    KS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The sum of alpha outer g over layers and over the positions of one piece."""
    piece = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k, layer = tl.arange(0, KS), tl.arange(0, LS)
    distance = tl.multiple_of(tl.load(distances + layer, mask=layer < L, other=0), 8)
    of_gradient = (layer < L)[:, None] & (d < D)[None, :]
    of_alpha = (k < K)[:, None] & (layer < L)[None, :]
    total = tl.zeros((KS, BLOCK), tl.float32)
    for place in range(tl.load(start + piece), tl.load(start + piece + 1)):
        n = tl.load(order + place).to(tl.int64)
        g = tl.load(gradients + (distance + n * D)[:, None] + d[None, :], mask=of_gradient, other=0)
        alpha = tl.load(alphas + (layer[None, :] * N + n) * K + k[:, None], mask=of_alpha, other=0)
        total = tl.dot(alpha, g.to(tl.float32), total, input_precision=PRECISION)
    where = (piece * K + k[:, None]) * D + d[None, :]
    tl.store(out + where, total, mask=(k < K)[:, None] & (d < D)[None, :])


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
    residual_BTD: torch.Tensor,
    update_BTD: torch.Tensor | None,
    logits_BTS: torch.Tensor,
    rows_UJD: torch.Tensor,
    index: torch.Tensor | None,
    order_N: torch.Tensor | None,
) -> torch.Tensor:
    K, (_, J, D) = logits_BTS.shape[-1] - 1, rows_UJD.shape
    logits_NS = logits_BTS.flatten(0, 1)
    residual_BTD = residual_BTD.contiguous()
    out = torch.empty_like(residual_BTD)
    N, block = len(logits_NS), min(triton.next_power_of_2(D), 256)
    span = block if N < FEW else D  # few positions are more programs
    _mix_kernel[(N, triton.cdiv(D, span))](
        residual_BTD,
        None if update_BTD is None else update_BTD.contiguous(),
        logits_NS,
        rows_UJD,
        None if index is None else index.contiguous(),
        order_N,
        out,
        logits_NS.stride(0),
        rows_UJD.stride(0),
        N,
        K // J,
        K,
        triton.next_power_of_2(K),
        D,
        block,
        span,
        num_warps=1,
    )
    return out


def mix_backward(
    d_out_BTD: torch.Tensor,
    logits_BTS: torch.Tensor,
    rows_UJD: torch.Tensor,
    index: torch.Tensor,
    order_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    K, (_, J, D) = logits_BTS.shape[-1] - 1, rows_UJD.shape
    d_out, index, logits_NS = d_out_BTD.contiguous(), index.contiguous(), logits_BTS.flatten(0, 1)
    N = len(logits_NS)
    d_logits = torch.empty_like(logits_BTS, memory_format=torch.contiguous_format)
    alpha = logits_NS.new_empty(*logits_BTS.shape[:-1], K, dtype=torch.float32)
    blocks = triton.next_power_of_2(K)
    _mix_backward_kernel[(N,)](
        d_out,
        logits_NS,
        rows_UJD,
        index,
        order_N,
        d_logits,
        alpha,
        logits_NS.stride(0),
        rows_UJD.stride(0),
        N,
        K // J,
        K,
        blocks,
        D,
        max(16, min(triton.next_power_of_2(D), 256, 4096 // blocks)),
        num_warps=1,
    )
    return d_logits, alpha


def norm(raw_UJD: torch.Tensor, gain_JD: torch.Tensor, eps: float, out_UJD: torch.Tensor) -> None:
    U, J, D = raw_UJD.shape
    _norm_kernel[(U * J,)](raw_UJD, gain_JD, out_UJD, eps, J, D, triton.next_power_of_2(D), num_warps=4)


def rows_backward(
    raw_UJD: torch.Tensor,
    gain_JD: torch.Tensor,
    eps: float,
    index: RowIndex,
    d_out_LBTD: list[torch.Tensor],
    alpha_LBTJ: list[torch.Tensor],
    d_raw_UJD: torch.Tensor,
) -> torch.Tensor:
    (U, J, D), N, L = raw_UJD.shape, index.index_BT.numel(), len(d_out_LBTD)
    if not L:
        d_raw_UJD.zero_()
        return torch.zeros_like(gain_JD)
    gradients = [_aligned(gradient) for gradient in d_out_LBTD]
    first = gradients[0]
    # Where they lie, since a copy that puts them side by side would take as long as reading them here.
    distances = [(each.data_ptr() - first.data_ptr()) // first.itemsize for each in gradients]
    count = len(index.start_P) - 1
    pieces = raw_UJD.new_empty(count, J, D, dtype=torch.float32)
    blocks, layers = max(16, triton.next_power_of_2(J)), max(16, triton.next_power_of_2(L))
    width = max(16, min(triton.next_power_of_2(D), 16384 // layers, 8192 // blocks))
    _pieces_kernel[(count, triton.cdiv(D, width))](
        first,
        upload(torch.tensor(distances), first.device),
        torch.stack(alpha_LBTJ),
        index.order_N,
        index.start_P,
        pieces,
        N,
        L,
        layers,
        J,
        blocks,
        D,
        width,
        "tf32" if first.itemsize == 2 else "ieee",
        num_warps=4,
    )
    programs = triton.cdiv(U, ROWS_A_PROGRAM)
    shares = raw_UJD.new_empty(programs, J, D, dtype=torch.float32)
    _rows_kernel[(programs, J)](
        raw_UJD,
        gain_JD,
        pieces,
        index.first_U,
        d_raw_UJD,
        shares,
        eps,
        U,
        J,
        D,
        triton.next_power_of_2(D),
        ROWS_A_PROGRAM,
        num_warps=4,
    )
    return shares.sum(0).to(gain_JD.dtype)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Lay a tensor out in rows, at an address for whole vectors; nearly all tensors lie so already."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 64 else tensor
