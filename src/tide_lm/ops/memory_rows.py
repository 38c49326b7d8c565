"""Rows of the memory for training: each token's once, their norm, and their gradient in one pass.

Every layer l adds `m = sum_k alpha_k M_k(v)` at each position. With g the gradient of m, the gradient of row
u of block k is a sum over layers and over the positions of that row:

    dM[u, k] = sum over l and over p with index[p] = u of alpha[l, p, k] g[l, p]

Autograd would add to all rows once per layer. Here it is formed once, when all layers are done. To get g and
alpha there, `normed_rows` also returns placeholders, which each layer's op takes as inputs: the op's backward
returns g and alpha as the gradients of its placeholders, and autograd brings them to the backward below.
A row in a layer's values counts as a mix with an alpha of 1 for its own block and of 0 for all others.

Shapes: B batch, T tokens, N = B * T positions, U rows, P rows of a position, K blocks, J = K / P blocks of a
row, D hidden.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tide_lm.ops.kernels import use_triton
from tide_lm.ops.placeholders import Placeholder, Placeholders
from tide_lm.ops.row_index import RowIndex


def normed_rows(
    raw_UJD: torch.Tensor,
    gain_KD: torch.Tensor,
    eps: float,
    indices: Sequence[RowIndex],
    layers: int,
    dtype: torch.dtype,
    values: bool = False,
) -> tuple[torch.Tensor, Placeholders]:
    """Return RMSNorm of the rows, in `dtype`, and the placeholders through which their gradient comes.

    There is an index for each of a position's rows. Its rows in `raw_UJD` follow those of the one before, and
    the blocks of all take turns. With `values` the row of block l mod K also joins layer l's values.
    """
    rows_UJD, *rest = _NormedRows.apply(raw_UJD, gain_KD, eps, indices, layers, values, dtype)
    kinds = [rest[start : start + layers] for start in range(0, len(rest), layers)]
    order_N = indices[0].order_N
    return rows_UJD, Placeholders(
        tuple(Placeholder(g, alpha, order_N, *g_value) for g, alpha, *g_value in zip(*kinds, strict=True))
    )


def _parts(indices: Sequence[RowIndex]) -> Iterator[tuple[RowIndex, slice, slice]]:
    """Yield each index, its rows, and its blocks."""
    first = 0
    for part, index in enumerate(indices):
        yield index, slice(first, first + len(index.ids_U)), slice(part, None, len(indices))
        first += len(index.ids_U)


class _NormedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        raw_UJD: torch.Tensor,
        gain_KD: torch.Tensor,
        eps: float,
        indices: Sequence[RowIndex],
        layers: int,
        values: bool,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, ...]:
        if use_triton(raw_UJD):
            from tide_lm.ops.memory_mix_triton import norm
        else:
            norm = norm_reference
        rows_UJD = torch.empty_like(raw_UJD, dtype=dtype)
        for _, rows, blocks in _parts(indices):
            norm(raw_UJD[rows], gain_KD[blocks].contiguous(), eps, rows_UJD[rows])
        ctx.save_for_backward(raw_UJD, gain_KD)
        ctx.eps, ctx.indices, ctx.layers = eps, indices, layers
        ctx.mark_non_differentiable(rows_UJD)
        ctx.set_materialize_grads(False)
        K, D = gain_KD.shape
        B, T = indices[0].index_BT.shape

        def placeholders(numbers: int, dtype: torch.dtype) -> list[torch.Tensor]:
            """One zero for each layer: gradients come in its shape and type."""
            return [raw_UJD.new_zeros(1, dtype=dtype).expand(B, T, numbers) for _ in range(layers)]

        g_values = placeholders(D, dtype) if values else []
        return rows_UJD, *placeholders(D, dtype), *placeholders(K, raw_UJD.dtype), *g_values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, *given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        raw_UJD, gain_KD = ctx.saved_tensors
        L, K = ctx.layers, len(gain_KD)
        eye_KK = torch.eye(K, dtype=gain_KD.dtype, device=gain_KD.device)
        d_out_LBTD, alpha_LBTK = [], []
        for g, alpha in zip(given[:L], given[L : 2 * L], strict=True):
            if g is not None and alpha is not None:  # the layer was not dropped
                d_out_LBTD.append(g)
                alpha_LBTK.append(alpha)
        for layer, g_value in enumerate(given[2 * L :]):  # of each layer, or of none
            if g_value is not None:
                d_out_LBTD.append(g_value)
                alpha_LBTK.append(eye_KK[layer % K].expand(*g_value.shape[:2], -1))
        if use_triton(raw_UJD):
            from tide_lm.ops.memory_mix_triton import rows_backward
        else:
            rows_backward = rows_backward_reference
        d_raw_UJD, d_gain_KD = torch.empty_like(raw_UJD), torch.empty_like(gain_KD)
        for index, rows, blocks in _parts(ctx.indices):
            alphas = [alpha_BTK[..., blocks] for alpha_BTK in alpha_LBTK]
            gain_JD = gain_KD[blocks].contiguous()
            d_gain_KD[blocks] = rows_backward(
                raw_UJD[rows], gain_JD, ctx.eps, index, d_out_LBTD, alphas, d_raw_UJD[rows]
            )
        return d_raw_UJD, d_gain_KD, None, None, None, None, None


def norm_reference(raw_UJD: torch.Tensor, gain_JD: torch.Tensor, eps: float, out_UJD: torch.Tensor) -> None:
    """Write RMSNorm of the rows, in plain torch."""
    out_UJD.copy_(gain_JD * raw_UJD * _inverse_rms(raw_UJD, eps))


def rows_backward_reference(
    raw_UJD: torch.Tensor,
    gain_JD: torch.Tensor,
    eps: float,
    index: RowIndex,
    d_out_LBTD: list[torch.Tensor],
    alpha_LBTJ: list[torch.Tensor],
    d_raw_UJD: torch.Tensor,
) -> torch.Tensor:
    """Write the gradient of raw rows, and return that of gains, in plain torch."""
    d_rows_UJD = torch.zeros_like(raw_UJD)
    positions_N = index.index_BT.flatten()
    for d_out_BTD, alpha_BTJ in zip(d_out_LBTD, alpha_LBTJ, strict=True):
        outer_BTJD = alpha_BTJ.unsqueeze(-1) * d_out_BTD.to(alpha_BTJ.dtype).unsqueeze(-2)
        d_rows_UJD.index_add_(0, positions_N, outer_BTJD.flatten(0, 1).to(raw_UJD.dtype))
    inverse_UJ1 = _inverse_rms(raw_UJD, eps)
    normed_UJD, d_normed_UJD = raw_UJD * inverse_UJ1, d_rows_UJD * gain_JD
    along_UJ1 = (d_normed_UJD * normed_UJD).mean(-1, keepdim=True)
    d_raw_UJD.copy_(inverse_UJ1 * (d_normed_UJD - normed_UJD * along_UJ1))
    return (d_rows_UJD * normed_UJD).sum(0)


def _inverse_rms(raw_UJD: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt(raw_UJD.square().mean(-1, keepdim=True) + eps)
