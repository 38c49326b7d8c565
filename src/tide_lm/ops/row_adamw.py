"""AdamW for tables of which a step updates a few rows: the result of dense AdamW, at the cost of those rows.

Without gradient a row still decays and follows its momentum. Those steps wait until the row is needed, and
are then replayed one by one, so that it makes no difference where the replay is cut: a table that is
brought up to date between two steps goes on to the same bits as one that is not. Moments of fewer bits than
the weights are the exception: they are rounded wherever the replay is cut. Some time after a row's last
gradient its momentum no longer moves it; from there on weights and moments only shrink.

Shapes: V vocabulary, U rows of a step, K blocks, D hidden.
"""

import torch

from tide_lm.ops.kernels import use_triton
from tide_lm.ops.row_table import History, RowTable


@torch.no_grad()
def catch_up(table: RowTable, ids_U: torch.Tensor, history: History) -> None:
    """Bring rows to the newest step, as if each step since had come without gradient. Ids are unique."""
    _advance(table, ids_U, history)


@torch.no_grad()
def step(
    table: RowTable,
    ids_U: torch.Tensor,
    grad_UKD: torch.Tensor,
    history: History,
    scale: torch.Tensor | None = None,
) -> None:
    """Take the newest step of the history with gradients, times a scale if there is one. Ids are unique.

    Rows that lag behind the step before are brought there first; rows already at this step are left alone.
    """
    _advance(table, ids_U, history, grad_UKD, scale)
    table.touched_V.index_fill_(0, ids_U, history.steps)


def flush(table: RowTable, history: History) -> None:
    """Bring all rows to the newest step."""
    V, K, D = table.weight_VKD.shape
    rows_at_once = max(1, 2**24 // (K * D))
    for ids_U in torch.arange(V, device=table.weight_VKD.device).split(rows_at_once):
        catch_up(table, ids_U, history)


def _advance(
    table: RowTable,
    ids_U: torch.Tensor,
    history: History,
    grad_UKD: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    if len(ids_U) == 0:
        return
    if use_triton(table.weight_VKD):
        from tide_lm.ops.row_adamw_triton import advance_triton

        advance_triton(table, ids_U, history, grad_UKD, scale)
    else:
        advance_reference(table, ids_U, history, grad_UKD, scale)
    table.last_V.index_fill_(0, ids_U, history.steps)


def advance_reference(
    table: RowTable,
    ids_U: torch.Tensor,
    history: History,
    grad_UKD: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    """Bring weights and moments to the newest step, in plain torch, on any device, in any float type.

    Operations are those of `torch.optim.AdamW`, in its order. Where torch adds a product without saying how
    often that is rounded (`addcmul_`, `addcdiv_`), each operation stands alone, so that no row depends on
    how it and its neighbours fall into vectors; `lerp_` is rounded once. All are in the weights' type, and
    moments of another are rounded when they are stored.
    """
    last_U, order_U = table.last_V[ids_U].sort()
    order_U = order_U[last_U < history.steps]
    if len(order_U) == 0:
        return
    ids_U, last_U = ids_U[order_U], last_U[: len(order_U)]
    touched_U = table.touched_V[ids_U]
    dtype = table.weight_VKD.dtype
    weight_UKD, exp_avg_UKD, exp_avg_sq_UKD = rows = [tensor[ids_U].to(dtype) for tensor in table.state]
    zero, (beta1, beta2) = weight_UKD.new_zeros(()), history.betas
    tail, newest = history.tail, history.steps

    first, end = int(last_U[0]) + 1, newest + (grad_UKD is None)
    counts = torch.searchsorted(last_U, torch.arange(first, end, dtype=last_U.dtype, device=last_U.device))
    for t, count in enumerate(counts.tolist(), start=first):
        weight, exp_avg, exp_avg_sq = (tensor[:count] for tensor in rows)  # the rows that lag behind t
        now = history.scalars(t)
        weight.mul_(now.decay)
        exp_avg.lerp_(zero, 1 - beta1)
        exp_avg_sq.mul_(beta2)
        moving_U = touched_U[:count] >= t - tail
        if moving_U.any():
            denominator = (exp_avg_sq.sqrt() * now.unbias).add_(history.eps)
            weight.sub_((exp_avg * moving_U[:, None, None]).mul_(now.size).div_(denominator))

    if grad_UKD is not None:
        grad_UKD = grad_UKD[order_U].to(dtype)
        if scale is not None:
            grad_UKD.mul_(scale.to(dtype))
        now = history.scalars(newest)
        weight_UKD.mul_(now.decay)
        exp_avg_UKD.lerp_(grad_UKD, 1 - beta1)
        exp_avg_sq_UKD.mul_(beta2).add_((grad_UKD * (1 - beta2)).mul_(grad_UKD))
        denominator = (exp_avg_sq_UKD.sqrt() * now.unbias).add_(history.eps)
        weight_UKD.sub_((exp_avg_UKD * now.size).div_(denominator))

    for tensor, new in zip(table.state, rows, strict=True):
        tensor[ids_U] = new.to(tensor.dtype)
