"""Cross-entropy with z-loss over a large vocabulary, in chunks.

The logits of all tokens never exist at once: each chunk's are computed, used, and computed again in the
backward pass. N tokens, V vocabulary, D hidden.
"""

from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint


class Loss(NamedTuple):
    objective: torch.Tensor  # what is minimised: mean cross-entropy and z-loss
    per_token_N: torch.Tensor  # cross-entropy of each token, without gradient


def chunked_cross_entropy(
    hidden_ND: torch.Tensor,
    head_VD: torch.Tensor,
    targets_N: torch.Tensor,
    z_loss: float = 0.0,
    chunk: int = 1024,
) -> Loss:
    """`mean(-log p(target)) + z_loss * mean(log Z ^ 2)`, in float32."""
    objective = hidden_ND.new_zeros((), dtype=torch.float32)
    losses = []
    for hidden, targets in zip(hidden_ND.split(chunk), targets_N.split(chunk), strict=True):
        if len(targets_N) <= chunk:  # one chunk: nothing is saved by computing it twice
            total, per_token = _chunk_loss(hidden, head_VD, targets, z_loss)
        else:
            total, per_token = checkpoint(_chunk_loss, hidden, head_VD, targets, z_loss, use_reentrant=False)
        objective = objective + total
        losses.append(per_token)
    return Loss(objective / len(targets_N), torch.cat(losses))


def _chunk_loss(
    hidden_ND: torch.Tensor, head_VD: torch.Tensor, targets_N: torch.Tensor, z_loss: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_NV = torch.nn.functional.linear(hidden_ND, head_VD).float()
    log_z_N = logits_NV.logsumexp(-1)
    loss_N = log_z_N - logits_NV.gather(-1, targets_N[:, None])[:, 0]
    return loss_N.sum() + z_loss * log_z_N.square().sum(), loss_N.detach()
