"""A table with its AdamW moments, and the steps that its rows may still have to take.

Shapes: V vocabulary, K blocks, D hidden.
"""

import math
from array import array
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tide_lm.ops.transfer import upload

NEVER = 2**30  # in steps


@dataclass
class RowTable:
    """A table, its moments, and for each row the last step it has taken and the last with a gradient."""

    weight_VKD: torch.Tensor
    exp_avg_VKD: torch.Tensor
    exp_avg_sq_VKD: torch.Tensor
    last_V: torch.Tensor
    touched_V: torch.Tensor

    @classmethod
    def start(cls, weight_VKD: torch.Tensor, moments: torch.dtype | None = None) -> "RowTable":
        """Return a table before its first step; moments have the type of its weights, or another."""
        weight_VKD = weight_VKD.detach()
        steps_V = torch.zeros(len(weight_VKD), dtype=torch.int32, device=weight_VKD.device)
        exp_avg_VKD, exp_avg_sq_VKD = (torch.zeros_like(weight_VKD, dtype=moments) for _ in range(2))
        return cls(weight_VKD, exp_avg_VKD, exp_avg_sq_VKD, steps_V, steps_V.clone())

    @property
    def state(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.weight_VKD, self.exp_avg_VKD, self.exp_avg_sq_VKD


class Scalars(NamedTuple):
    """The scalars of one step of AdamW for a weight w with moments m and v.

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
        """The learning rates of all steps in float64, which a resumed run needs."""
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
        """Return the scalars of step t, from 1 on. Powers of a whole tensor might round otherwise."""
        rate, (beta1, beta2) = self._rates[t - 1], self.betas
        return Scalars(
            decay=1 - rate * self.weight_decay,
            size=rate / (1 - beta1**t),
            unbias=1 / math.sqrt(1 - beta2**t),
        )

    def on_device(self, like: torch.Tensor) -> torch.Tensor:
        """Return the scalars of all steps, one row per step, on the device of `like`; copy only new ones."""
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
