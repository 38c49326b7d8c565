"""AdamW for tables of which each step moves a few rows: the result of dense AdamW, the traffic of those rows.

Without gradient a row still decays and follows its momentum. Those steps wait until the row is needed, and
are then replayed one by one, so that it makes no difference where the replay is cut: a table that is
brought up to date between two steps goes on to the same bits as one that is not. Moments of fewer bits than
the weights are the exception: they are rounded wherever the replay is cut. Some time after a row's last
gradient its momentum no longer moves it; from there on weights and moments only shrink.

Shapes: V vocabulary, U rows of a step, K blocks, D hidden.
"""

import math
from array import array
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tide_lm.ops.kernels import use_triton
from tide_lm.ops.transfer import upload

NEVER = 2**30  # in steps


@dataclass
class RowTable:
    """A table, its moments, and for each row the steps up to which it holds and in which it last learned."""

    weight_VKD: torch.Tensor
    exp_avg_VKD: torch.Tensor
    exp_avg_sq_VKD: torch.Tensor
    last_V: torch.Tensor
    touched_V: torch.Tensor

    @classmethod
    def start(cls, weight_VKD: torch.Tensor, moments: torch.dtype | None = None) -> "RowTable":
        """A table before its first step, its moments in the type of its weights or in another."""
        weight_VKD = weight_VKD.detach()
        steps_V = torch.zeros(len(weight_VKD), dtype=torch.int32, device=weight_VKD.device)
        exp_avg_VKD, exp_avg_sq_VKD = (torch.zeros_like(weight_VKD, dtype=moments) for _ in range(2))
        return cls(weight_VKD, exp_avg_VKD, exp_avg_sq_VKD, steps_V, steps_V.clone())

    @property
    def state(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.weight_VKD, self.exp_avg_VKD, self.exp_avg_sq_VKD


class Scalars(NamedTuple):
    """What differs from step to step, in AdamW's update of a weight w with moments m and v.

    `w <- decay w - size m / (sqrt(v) unbias + eps)`.
    """

    decay: float
    size: float
    unbias: float


class History:
    """AdamW's constants, and the learning rates of all steps so far."""

    def __init__(
        self,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        rates: torch.Tensor | None = None,
    ) -> None:
        if eps <= 0:
            raise ValueError(f"eps is {eps}: it must be above 0, as a row without gradient is divided by it")
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self._rates = array("d", () if rates is None else rates.tolist())
        self._on_device = torch.empty(0, len(Scalars._fields))
        self._copied = 0

    @property
    def steps(self) -> int:
        return len(self._rates)

    @property
    def rates(self) -> torch.Tensor:
        """The learning rates in float64: with the constants, all that a resumed run needs."""
        return torch.tensor(self._rates, dtype=torch.float64)

    @property
    def tail(self) -> int:
        """Steps after a gradient until `m / sqrt(v)` is a billionth of what it was: 260 for 0.9 and 0.95."""
        beta1, root = self.betas[0], math.sqrt(self.betas[1])
        if beta1 >= root:
            return NEVER
        return math.ceil(math.log(1e-9, beta1 / root)) if beta1 > 0 else 0

    def append(self, rate: float) -> None:
        """Begin the next step. A step that is left out is not begun."""
        self._rates.append(rate)

    def scalars(self, t: int) -> Scalars:
        """The scalars of step t, from 1 on; one by one, as powers of a whole tensor may round otherwise."""
        rate, (beta1, beta2) = self._rates[t - 1], self.betas
        return Scalars(
            decay=1 - rate * self.weight_decay,
            size=rate / (1 - beta1**t),
            unbias=1 / math.sqrt(1 - beta2**t),
        )

    def on_device(self, like: torch.Tensor) -> torch.Tensor:
        """The scalars of all steps, a row each, in the type and place of `like`; only new ones are copied."""
        if (self._on_device.dtype, self._on_device.device) != (like.dtype, like.device):
            self._on_device, self._copied = like.new_empty(0, len(Scalars._fields)), 0
        if self.steps > len(self._on_device):
            room = like.new_empty(max(1024, 2 * self.steps), len(Scalars._fields))
            room[: self._copied] = self._on_device[: self._copied]
            self._on_device = room
        for start in range(self._copied, self.steps, 2**16):  # in pieces, as a resumed run may have millions
            end = min(start + 2**16, self.steps)
            new = [self.scalars(t) for t in range(start + 1, end + 1)]
            self._on_device[start:end] = upload(torch.tensor(new, dtype=like.dtype), like.device)
        self._copied = self.steps
        return self._on_device


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
    """Weights and moments at the newest step, in plain torch, any device, any float type.

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
