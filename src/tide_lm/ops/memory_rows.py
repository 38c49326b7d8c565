"""Rows of the memory for training: each token's once, their norm, and their gradient in one pass.

Every layer l adds `m = sum_k alpha_k M_k(v)` at each position. With g the gradient of m, the gradient of row
u of block k is a sum over layers and over the positions of that row:

    dM[u, k] = sum over l and over p with index[p] = u of alpha[l, p, k] g[l, p]

Autograd would add to all rows once per layer. Here it is formed once, when all layers are done. To get g and
alpha there, `normed_rows` also returns placeholders, which each layer's op takes as inputs: the op's backward
returns g and alpha as the gradients of its placeholders, and autograd brings them to the backward below.
A row in a layer's values counts as a mix with an alpha of 1 for its own block and of 0 for all others.

Shapes: B batch, T tokens, N = B * T positions, U rows, K blocks, D hidden, P pieces.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tide_lm.ops.kernels import use_triton
from tide_lm.ops.placeholders import Placeholder, Placeholders
from tide_lm.ops.row_index import RowIndex


def normed_rows(
    raw_UKD: torch.Tensor,
    gain_KD: torch.Tensor,
    eps: float,
    index: RowIndex,
    layers: int,
    dtype: torch.dtype,
    values: bool = False,
) -> tuple[torch.Tensor, Placeholders]:
    """Return RMSNorm of the rows, in `dtype`, and the placeholders through which their gradient comes.

    With `values` the row of block l mod K also joins layer l's values.
    """
    rows_UKD, *rest = _NormedRows.apply(raw_UKD, gain_KD, eps, index, layers, values, dtype)
    kinds = [rest[start : start + layers] for start in range(0, len(rest), layers)]
    return rows_UKD, Placeholders(
        tuple(
            Placeholder(g, alpha, index.order_N, *g_value) for g, alpha, *g_value in zip(*kinds, strict=True)
        )
    )


class _NormedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        raw_UKD: torch.Tensor,
        gain_KD: torch.Tensor,
        eps: float,
        index: RowIndex,
        layers: int,
        values: bool,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, ...]:
        if use_triton(raw_UKD):
            from tide_lm.ops.memory_mix_triton import norm

            rows_UKD = norm(raw_UKD, gain_KD, eps, dtype)
        else:
            rows_UKD = (gain_KD * raw_UKD * _inverse_rms(raw_UKD, eps)).to(dtype)
        ctx.save_for_backward(raw_UKD, gain_KD)
        ctx.eps, ctx.index, ctx.layers = eps, index, layers
        ctx.mark_non_differentiable(rows_UKD)
        ctx.set_materialize_grads(False)
        K, D = gain_KD.shape
        B, T = index.index_BT.shape

        def placeholders(numbers: int, dtype: torch.dtype) -> list[torch.Tensor]:
            """One zero for each layer: gradients come in its shape and type."""
            return [raw_UKD.new_zeros(1, dtype=dtype).expand(B, T, numbers) for _ in range(layers)]

        g_values = placeholders(D, dtype) if values else []
        return rows_UKD, *placeholders(D, dtype), *placeholders(K, raw_UKD.dtype), *g_values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, *given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        raw_UKD, gain_KD = ctx.saved_tensors
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
        if use_triton(raw_UKD):
            from tide_lm.ops.memory_mix_triton import rows_backward
        else:
            rows_backward = rows_backward_reference
        d_raw_UKD, d_gain_KD = rows_backward(raw_UKD, gain_KD, ctx.eps, ctx.index, d_out_LBTD, alpha_LBTK)
        return d_raw_UKD, d_gain_KD, None, None, None, None, None


def rows_backward_reference(
    raw_UKD: torch.Tensor,
    gain_KD: torch.Tensor,
    eps: float,
    index: RowIndex,
    d_out_LBTD: list[torch.Tensor],
    alpha_LBTK: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of raw rows and gains, in plain torch."""
    d_rows_UKD = torch.zeros_like(raw_UKD)
    positions_N = index.index_BT.flatten()
    for d_out_BTD, alpha_BTK in zip(d_out_LBTD, alpha_LBTK, strict=True):
        outer_BTKD = alpha_BTK.unsqueeze(-1) * d_out_BTD.to(alpha_BTK.dtype).unsqueeze(-2)
        d_rows_UKD.index_add_(0, positions_N, outer_BTKD.flatten(0, 1).to(raw_UKD.dtype))
    inverse_UK1 = _inverse_rms(raw_UKD, eps)
    normed_UKD, d_normed_UKD = raw_UKD * inverse_UK1, d_rows_UKD * gain_KD
    along_UK1 = (d_normed_UKD * normed_UKD).mean(-1, keepdim=True)
    d_gain_KD = (d_rows_UKD * normed_UKD).sum(0)
    return inverse_UK1 * (d_normed_UKD - normed_UKD * along_UK1), d_gain_KD


def _inverse_rms(raw_UKD: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt(raw_UKD.square().mean(-1, keepdim=True) + eps)
