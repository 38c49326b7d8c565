"""Triton twin of one chunk of the cross-entropy: logits become their own gradient, in place."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rows_kernel(
    logits,
    targets,
    losses,
    log_zs,
    z_loss,
    scale,
    V,
    LEARNING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a token's loss and log Z in one pass over its logits, and their gradient in a second."""
    n = tl.program_id(0).to(tl.int64)
    row = logits + n * V
    target = tl.load(targets + n)
    # Before the sums, for which all warps wait: later, another warp may have overwritten it.
    wanted = tl.load(row + target).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        v = start + lane
        x = tl.load(row + v, mask=v < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(most, x)
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(most - safe) + tl.exp(x - safe)
        most = higher
    largest = tl.max(most, 0)
    log_z = largest + tl.log(tl.sum(total * tl.exp(most - largest), 0))
    tl.store(losses + n, log_z - wanted)
    tl.store(log_zs + n, log_z)
    if LEARNING:
        weight = (1 + 2 * z_loss * log_z) * scale
        for start in range(0, V, BLOCK):
            v = start + lane
            x = tl.load(row + v, mask=v < V, other=-float("inf")).to(tl.float32)
            d = tl.exp(x - log_z) * weight - tl.where(v == target, scale, 0.0)
            tl.store(row + v, d.to(logits.dtype.element_ty), mask=v < V)


def rows(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, z_loss: float, scale: float, learning: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return losses and log Z; if learning, overwrite the logits with `scale` times their gradient."""
    N, V = logits_NV.shape
    losses_N = logits_NV.new_empty(N, dtype=torch.float32)
    log_z_N = torch.empty_like(losses_N)
    block = min(triton.next_power_of_2(V), 8192)
    _rows_kernel[(N,)](
        logits_NV, targets_N, losses_N, log_z_N, z_loss, scale, V, learning, block, num_warps=16
    )
    return losses_N, log_z_N
