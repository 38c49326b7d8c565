"""Pick the next token, greedily or at random. B sequences, V vocabulary, C candidates."""

import math
from dataclasses import dataclass
from operator import index
from typing import SupportsIndex

import torch


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 takes the most likely token. `top_k`, then `top_p`, leave out unlikely ones.

    With a seed an engine gives the same tokens for the same prompts again.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(
                f"temperature is {self.temperature}: it must be 0, which is greedy, or more, and finite"
            )
        if self.top_k is not None and whole_number("top_k", self.top_k) < 1:
            raise ValueError(f"top_k is {self.top_k}: it must be 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: it must be above 0 and at most 1")
        if self.seed is not None and not 0 <= whole_number("seed", self.seed) < 2**63:
            raise ValueError(f"seed is {self.seed}: it must be a whole number from 0 to 2**63 - 1")

    def pick(self, logits_BV: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Return one token per sequence, without waiting for the device."""
        if not self.temperature:
            return logits_BV.argmax(-1)
        scaled_BV = logits_BV.float()
        scaled_BV = (scaled_BV - scaled_BV.amax(-1, keepdim=True)) / self.temperature  # which overflows to 0
        if self.top_k is None and self.top_p is None:
            return _drawn(scaled_BV, generator)
        if self.top_k is None:
            likely_BC, ids_BC = scaled_BV.sort(-1, descending=True)
        else:
            likely_BC, ids_BC = scaled_BV.topk(min(self.top_k, scaled_BV.shape[-1]))
        if self.top_p is not None:
            chance_BC = likely_BC.softmax(-1)
            before_BC = chance_BC.cumsum(-1) - chance_BC  # so the first is never left out
            likely_BC = likely_BC.masked_fill(before_BC >= self.top_p, -math.inf)
        return ids_BC.gather(-1, _drawn(likely_BC, generator)[:, None])[:, 0]


def whole_number(name: str, value: SupportsIndex) -> int:
    try:
        return index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}: it must be a whole number") from None


def _drawn(logits_BC: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Draw by an exponential race: each candidate wins as often as its probability says."""
    clocks_BC = torch.empty_like(logits_BC).exponential_(generator=generator)
    return (logits_BC.softmax(-1) / clocks_BC).argmax(-1)
