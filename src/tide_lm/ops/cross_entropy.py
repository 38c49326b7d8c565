"""Cross-entropy with z-loss over a large vocabulary, in chunks.

The logits of all tokens never exist at once: each chunk's give their loss and their gradients, and are
dropped. N tokens, V vocabulary, D hidden.
"""

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from tide_lm.ops.kernels import use_triton


class Loss(NamedTuple):
    objective: torch.Tensor  # what is minimised: mean cross-entropy and z-loss
    per_token_N: torch.Tensor  # cross-entropy of each token, without gradient


def chunked_cross_entropy(
    hidden_ND: torch.Tensor,
    head_VD: torch.Tensor,
    targets_N: torch.Tensor,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> Loss:
    """Return `mean(-log p(target)) + z_loss * mean(log Z ^ 2)`, in float32; products in autocast's type."""
    if len(targets_N) == 0:
        raise ValueError("there are 0 tokens to predict: the loss needs at least one")
    # On a GPU larger ones, so that the head's gradient is added to less often.
    chunk = chunk or (4096 if hidden_ND.device.type == "cuda" else 1024)
    learning = torch.is_grad_enabled() and (hidden_ND.requires_grad or head_VD.requires_grad)
    return Loss(*_ChunkedCrossEntropy.apply(hidden_ND, head_VD, targets_N, z_loss, chunk, learning))


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        head_VD: torch.Tensor,
        targets_N: torch.Tensor,
        z_loss: float,
        chunk: int,
        learning: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = hidden_ND.device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
        wide = torch.promote_types(low, torch.float32)
        head, tokens = head_VD.to(low), len(targets_N)
        losses_N = torch.empty(tokens, dtype=wide, device=hidden_ND.device)
        objective = losses_N.new_zeros(())
        d_head_VD = None
        if learning:
            d_hidden_ND = torch.empty_like(hidden_ND, dtype=low)
        if learning and ctx.needs_input_grad[1]:
            d_head_VD = torch.empty_like(head_VD, dtype=wide)  # wide, since chunks add up here
        with torch.autocast(device, enabled=False):
            for start in range(0, tokens, chunk):
                part = slice(start, start + chunk)
                hidden, targets = hidden_ND[part].to(low), targets_N[part]
                logits = hidden @ head.T
                if use_triton(logits):
                    from tide_lm.ops.cross_entropy_triton import rows

                    losses, log_z = rows(logits, targets, z_loss, 1 / tokens, learning)
                    d_logits = logits
                else:
                    losses, log_z, d_logits = _rows_reference(
                        logits.to(wide), targets, z_loss, 1 / tokens, learning
                    )
                losses_N[part] = losses
                objective += losses.sum() + z_loss * log_z.square().sum()
                if learning:
                    d_logits = d_logits.to(low)
                    d_hidden_ND[part] = d_logits @ head
                    if d_head_VD is not None:
                        _add_product(d_head_VD, d_logits.T, hidden, first=start == 0)
        if learning:
            ctx.save_for_backward(d_hidden_ND, d_head_VD)
        ctx.mark_non_differentiable(losses_N)
        return objective / tokens, losses_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_objective: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_hidden_ND, d_head_VD = ctx.saved_tensors
        if d_head_VD is not None:
            d_head_VD.mul_(d_objective)
        return d_hidden_ND * d_objective, d_head_VD, None, None, None, None


def _rows_reference(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, z_loss: float, scale: float, learning: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return losses, log Z and, if learning, `scale` times the gradient of the logits."""
    log_z_N1, targets_N1 = logits_NV.logsumexp(-1, keepdim=True), targets_N[:, None]
    losses_N = (log_z_N1 - logits_NV.gather(-1, targets_N1))[:, 0]
    if learning:
        logits_NV = (logits_NV - log_z_N1).exp_().mul_(1 + 2 * z_loss * log_z_N1)
        logits_NV.scatter_add_(-1, targets_N1, -torch.ones_like(log_z_N1)).mul_(scale)
    return losses_N, log_z_N1[:, 0], logits_NV


def _add_product(sum: torch.Tensor, left: torch.Tensor, right: torch.Tensor, first: bool) -> None:
    """Add `left @ right`, in the sum's precision where the device can; the first product replaces the sum."""
    if sum.device.type == "cuda" and sum.dtype == torch.float32 and left.dtype != sum.dtype:
        torch.addmm(sum, left, right, torch.float32, beta=0 if first else 1, out=sum)
    elif first:
        sum.copy_(left @ right)
    else:
        sum += left @ right
