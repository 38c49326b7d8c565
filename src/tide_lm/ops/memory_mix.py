"""The router's softmax, the weighted sum of memory rows, and the residual addition (eqs. 3.5 and 3.6).

Shapes: B batch, T tokens, U rows held, P rows of a position, K blocks, J = K / P blocks of a row, S = K + 1
slots (the null bank is last), D hidden. An index is of B x T, and of P x B x T for more rows than one.
"""

from typing import Any

import torch
from torch import nn

from tide_lm.ops.kernels import use_triton
from tide_lm.ops.placeholders import Placeholder


def memory_mix(
    residual_BTD: torch.Tensor,
    logits_BTS: torch.Tensor,
    rows_UJD: torch.Tensor,
    index: torch.Tensor | None = None,
    update_BTD: torch.Tensor | None = None,
    placeholder: Placeholder | None = None,
) -> torch.Tensor:
    """Return `residual + update + sum_k alpha_k M_k(v)` with `alpha = softmax(logits)`; the null bank is 0.

    `rows_UJD` are normalised rows and `index` says which of them belongs to each position; the blocks of
    several rows take turns. Without an index there is one row per position, in order (U = B * T), and
    nothing is gathered.

    With a placeholder, which takes an index, the rows get no gradient here (see memory_rows).
    """
    if placeholder is not None:
        assert index is not None
        return _memory_mix(residual_BTD, logits_BTS, rows_UJD, index, update_BTD, *placeholder[:3])
    if rows_UJD.is_cuda and not torch.is_grad_enabled():  # the rows of all positions need not be gathered
        return _memory_mix(residual_BTD, logits_BTS, rows_UJD, index, update_BTD)
    return memory_mix_reference(residual_BTD, logits_BTS, rows_UJD, index, update_BTD)


def memory_mix_reference(
    residual_BTD: torch.Tensor,
    logits_BTS: torch.Tensor,
    rows_UJD: torch.Tensor,
    index: torch.Tensor | None = None,
    update_BTD: torch.Tensor | None = None,
) -> torch.Tensor:
    """`memory_mix` in plain torch, any device, any float type."""
    if index is None:
        memory_BTKD = rows_UJD.view(*logits_BTS.shape[:-1], *rows_UJD.shape[1:])
    else:
        memory_BTKD = _gathered(rows_UJD, index)
    alpha_BTK = router_weights(logits_BTS)[..., :-1]
    # Not an einsum: on a CPU its batch of 1 x K products takes several times as long.
    mixed_BTD = (alpha_BTK.unsqueeze(-1) * memory_BTKD).sum(-2)
    if update_BTD is not None:
        residual_BTD = residual_BTD + update_BTD
    return residual_BTD + mixed_BTD.to(residual_BTD.dtype)


def _gathered(rows_UJD: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return all blocks of each position, B x T x K x D."""
    if index.ndim == 3:
        return torch.stack([_gathered(rows_UJD, index_BT) for index_BT in index], 3).flatten(2, 3)
    return nn.functional.embedding(index, rows_UJD.flatten(1)).unflatten(-1, rows_UJD.shape[1:])


def memory_row(
    like_BTD: torch.Tensor,
    rows_UD: torch.Tensor,
    index_BT: torch.Tensor | None,
    placeholder_BTD: torch.Tensor | None,
) -> torch.Tensor:
    """Return the row of one block at each position; a placeholder, which is zero, gets its gradient."""
    row_BTD = rows_UD.view_as(like_BTD) if index_BT is None else nn.functional.embedding(index_BT, rows_UD)
    return row_BTD if placeholder_BTD is None else row_BTD + placeholder_BTD


def router_logits(n_BTD: torch.Tensor, weight_SD: torch.Tensor) -> torch.Tensor:
    """Return `W_r n`."""
    slots = len(weight_SD)
    if n_BTD.device.type != "cuda" or slots % 8 == 0:
        return nn.functional.linear(n_BTD, weight_SD)
    # Whole vectors of 16 bytes: a product with 16 columns is faster than one with 9.
    padded = nn.functional.pad(weight_SD, (0, 0, 0, -slots % 8))
    return nn.functional.linear(n_BTD, padded)[..., :slots]


def router_weights(logits_BTS: torch.Tensor) -> torch.Tensor:
    """`alpha`: softmax over the K blocks and the null bank, in float32 at least (eq. 3.5)."""
    dtype = torch.promote_types(logits_BTS.dtype, torch.float32)
    return torch.softmax(logits_BTS, dim=-1, dtype=dtype)


@torch.library.custom_op("tide_lm::memory_mix", mutates_args=())
def _memory_mix(
    residual_BTD: torch.Tensor,
    logits_BTS: torch.Tensor,
    rows_UJD: torch.Tensor,
    index: torch.Tensor | None,
    update_BTD: torch.Tensor | None,
    g_BTD: torch.Tensor | None = None,
    alpha_BTK: torch.Tensor | None = None,
    order_N: torch.Tensor | None = None,
) -> torch.Tensor:
    places = rows_UJD[:, 0, 0] if index is None else index  # here, as graphs do not trace an op
    assert places.numel() * rows_UJD.shape[1] == logits_BTS[..., 1:].numel(), (places.shape, logits_BTS.shape)
    if use_triton(rows_UJD):
        from tide_lm.ops.memory_mix_triton import mix

        return mix(residual_BTD, update_BTD, logits_BTS, rows_UJD, index, order_N)
    return memory_mix_reference(residual_BTD, logits_BTS, rows_UJD, index, update_BTD)


@_memory_mix.register_fake
def _(residual_BTD: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(residual_BTD, memory_format=torch.contiguous_format)


@torch.library.custom_op("tide_lm::memory_mix_backward", mutates_args=())
def _memory_mix_backward(
    d_out_BTD: torch.Tensor,
    logits_BTS: torch.Tensor,
    rows_UJD: torch.Tensor,
    index: torch.Tensor,
    order_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the logits, and alpha again."""
    if use_triton(rows_UJD):
        from tide_lm.ops.memory_mix_triton import mix_backward

        return mix_backward(d_out_BTD, logits_BTS, rows_UJD, index, order_N)
    alpha_BTS = router_weights(logits_BTS)
    memory_BTKD = _gathered(rows_UJD, index)
    wide = alpha_BTS.dtype
    d_alpha_BTK = (memory_BTKD.to(wide) @ d_out_BTD.to(wide).unsqueeze(-1)).squeeze(-1)
    d_alpha_BTS = nn.functional.pad(d_alpha_BTK, (0, 1))
    inner_BT1 = (alpha_BTS * d_alpha_BTS).sum(-1, keepdim=True)
    d_logits_BTS = (alpha_BTS * (d_alpha_BTS - inner_BT1)).to(logits_BTS.dtype)
    return d_logits_BTS, alpha_BTS[..., :-1].contiguous()


@_memory_mix_backward.register_fake
def _(d_out_BTD: torch.Tensor, logits_BTS: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(logits_BTS.dtype, torch.float32)
    alpha = logits_BTS.new_empty(*logits_BTS.shape[:-1], logits_BTS.shape[-1] - 1, dtype=wide)
    return torch.empty_like(logits_BTS, memory_format=torch.contiguous_format), alpha


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, logits_BTS, rows_UJD, index, update_BTD, *_, order_N = inputs
    ctx.has_update = update_BTD is not None
    ctx.save_for_backward(logits_BTS, rows_UJD, index, order_N)


def _give(ctx: Any, d_out_BTD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    d_logits_BTS, alpha_BTK = _memory_mix_backward(d_out_BTD, *ctx.saved_tensors)
    d_update_BTD = d_out_BTD if ctx.has_update else None
    return d_out_BTD, d_logits_BTS, None, None, d_update_BTD, d_out_BTD, alpha_BTK, None


_memory_mix.register_autograd(_give, setup_context=_keep)
