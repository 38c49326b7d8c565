"""Rows of the memory for training: each token's once, their norm, and their gradient in one pass.

Every layer mixes the same rows, so the gradient of a row is a sum over layers and over the positions of its
token. Layers put what it is made of into sinks, and it is formed once, at the end: dM = sum alpha g. A row in
a layer's values is mixed with an alpha of 1, and all others with 0. A layer that mixes its own block alone
has an alpha for that.

Shapes: B batch, T tokens, N = B * T positions, U rows, K blocks, D hidden, P pieces.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tide_lm.ops.kernels import use_triton
from tide_lm.ops.row_index import RowIndex
from tide_lm.ops.sinks import Sinks


def normed_rows(
    raw_UKD: torch.Tensor,
    gain_KD: torch.Tensor,
    eps: float,
    index: RowIndex,
    layers: int,
    dtype: torch.dtype,
    values: bool = False,
    own_block: bool = False,
) -> tuple[torch.Tensor, Sinks]:
    """RMSNorm of the rows, in `dtype`, and sinks for each layer, through which their gradient comes.

    With `values` layers have a sink for the row of block l mod K too, to which it is added. With `own_block`
    that is also all that they mix.
    """
    rows_UKD, *sinks = _NormedRows.apply(raw_UKD, gain_KD, eps, index, layers, values, own_block, dtype)
    gradients, alphas, of_values = sinks[:layers], sinks[layers : 2 * layers], sinks[2 * layers :]
    orders = [index.order_N] * layers
    return rows_UKD, Sinks(tuple(zip(gradients, alphas, orders, strict=True)), tuple(of_values))


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
        own_block: bool,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, ...]:
        if use_triton(raw_UKD):
            from tide_lm.ops.memory_mix_triton import norm

            rows_UKD = norm(raw_UKD, gain_KD, eps, dtype)
        else:
            rows_UKD = (gain_KD * raw_UKD * _inverse_rms(raw_UKD, eps)).to(dtype)
        ctx.save_for_backward(raw_UKD, gain_KD)
        ctx.eps, ctx.index, ctx.layers, ctx.own_block = eps, index, layers, own_block
        ctx.mark_non_differentiable(rows_UKD)
        ctx.set_materialize_grads(False)
        K, D = gain_KD.shape
        # One zero each: a sink holds nothing, it is there to be given a gradient, which comes in its type.
        B, T = index.index_BT.shape
        gradients = [raw_UKD.new_zeros(1, dtype=dtype).expand(B, T, D) for _ in range(layers)]
        alphas = [raw_UKD.new_zeros(1).expand(B, T, 1 if own_block else K) for _ in range(layers)]
        of_values = [
            raw_UKD.new_zeros(1, dtype=dtype).expand(B, T, D) for _ in range(layers if values else 0)
        ]
        return rows_UKD, *gradients, *alphas, *of_values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, *given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        raw_UKD, gain_KD = ctx.saved_tensors
        L = ctx.layers
        mixes, alphas, values = given[:L], given[L : 2 * L], given[2 * L :]
        d_out_LBTD = [gradient for gradient in (*mixes, *values) if gradient is not None]  # or it was dropped
        K = len(gain_KD)
        own_LK = torch.eye(K, dtype=gain_KD.dtype, device=gain_KD.device).repeat(-(-L // K), 1)[:L]
        alpha_LBTK = [
            alpha * own_K if ctx.own_block else alpha
            for alpha, own_K in zip(alphas, own_LK, strict=True)
            if alpha is not None
        ]
        for gradient, own_K in zip(values, own_LK, strict=False):  # of no layer, or of each
            if gradient is not None:
                alpha_LBTK.append(own_K.expand(*gradient.shape[:2], -1))
        if use_triton(raw_UKD):
            from tide_lm.ops.memory_mix_triton import rows_backward

            d_raw_UKD, d_gain_KD = rows_backward(raw_UKD, gain_KD, ctx.eps, ctx.index, d_out_LBTD, alpha_LBTK)
        else:
            d_raw_UKD, d_gain_KD = rows_backward_reference(
                raw_UKD, gain_KD, ctx.eps, ctx.index, d_out_LBTD, alpha_LBTK
            )
        return d_raw_UKD, d_gain_KD, None, None, None, None, None, None


def rows_backward_reference(
    raw_UKD: torch.Tensor,
    gain_KD: torch.Tensor,
    eps: float,
    index: RowIndex,
    d_out_LBTD: list[torch.Tensor],
    alpha_LBTK: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of raw rows and gains, in plain torch."""
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
