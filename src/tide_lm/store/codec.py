"""Encode numbers in few bits: a code per number, a scale of one byte per group, and a scale per row.

A number is `levels[code] * (group_scale * row_scale)`, in float32 and in this order, so that it has the same
bits wherever it is decoded. In 16 bits numbers are bfloat16, without codes or scales.

Shapes: U rows, N numbers in a row, G groups of n numbers; the last is filled with zeros.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch

from tide_lm.spec.form import check_numbers

_SHARES = (0.6, 0.7, 0.8, 0.9, 1.0)  # of the scale that fits the largest number: where the search begins
_FINE, _WIDE = 64, 256  # steps in 1, and on each side of 0, of a grid on which levels are found quickly
_GRID = (torch.arange(2 * _WIDE + 1) - _WIDE) / _FINE


@dataclass(frozen=True)
class RowCodec:
    """Encodes and decodes rows of so many `numbers`, each row on its own."""

    numbers: int
    bits: int
    group: int = 32

    def __post_init__(self) -> None:
        check_numbers(self.bits, self.group)
        if self.numbers < 1:
            raise ValueError(f"numbers is {self.numbers!r}: a row has at least one")

    @property
    def groups(self) -> int:
        return -(-self.numbers // self.group)

    @property
    def row_bytes(self) -> int:
        """The bytes of a row: codes, then the scales of groups, then the row's, with nothing between them."""
        return 2 * self.numbers if self.bits == 16 else self.code_bytes + self.groups + 4

    @property
    def code_bytes(self) -> int:
        return self.groups * self.group * self.bits // 8

    @property
    def levels(self) -> torch.Tensor:
        """The levels: even ones in 8 bits; in fewer bits those with the least square error for a Gaussian."""
        if self.bits == 16:
            return torch.empty(0)
        return (torch.arange(256) - 128) / 127 if self.bits == 8 else gaussian_levels(self.bits)

    def encode(self, rows_UN: torch.Tensor) -> torch.Tensor:
        """Encode rows of finite numbers as bytes, U x `row_bytes`."""
        if self.bits == 16:
            return rows_UN.to(torch.bfloat16).view(torch.uint8)
        levels = self.levels.to(rows_UN.device)
        filled = torch.nn.functional.pad(
            rows_UN.to(torch.float32), (0, self.groups * self.group - self.numbers)
        )
        groups_UGn = filled.unflatten(1, (self.groups, self.group))
        largest_U = filled.abs().amax(1)
        share_UG1 = _fitted_scales(groups_UGn / _or_one(largest_U).view(-1, 1, 1), levels)
        most_U = share_UG1.amax((1, 2))
        group_scale = (share_UG1 * (255 / _or_one(most_U)).view(-1, 1, 1)).round().clamp(max=255)
        row_scale_U = most_U / 255 * largest_U
        codes = _nearest(groups_UGn, group_scale * row_scale_U.view(-1, 1, 1), levels)
        return torch.cat(
            [
                pack(codes.flatten(1), self.bits),
                group_scale.flatten(1).to(torch.uint8),
                row_scale_U.unsqueeze(1).view(torch.uint8),
            ],
            1,
        )

    def decode(self, bytes_UR: torch.Tensor, words: torch.Tensor | None) -> torch.Tensor:
        """Decode rows to float32; `words` is from `words_of`, and None in 16 bits."""
        if words is None:
            return bytes_UR.contiguous().view(torch.bfloat16).to(torch.float32)
        codes, group_scale, row_scale = bytes_UR.split([self.code_bytes, self.groups, 4], 1)
        scale_UG1 = (
            group_scale * row_scale.clone(memory_format=torch.contiguous_format).view(torch.float32)
        ).unsqueeze(-1)
        found = torch.nn.functional.embedding(_indices(codes, self.bits), words)
        groups_UGn = found.view(len(bytes_UR), self.groups, self.group) * scale_UG1
        return groups_UGn.flatten(1)[:, : self.numbers]


def words_of(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a table of words: the levels of numbers that are decoded together, by their codes together."""
    numbers, all_bits = _WORD[bits]
    word = torch.arange(2**all_bits, device=levels.device)
    if bits == 3:  # two low bits of each number in the first byte, and one high bit of each after it
        parts = [(word >> 2 * i & 3) + (word >> 8 + i & 1) * 4 for i in range(numbers)]
    else:
        parts = [word >> bits * i & 2**bits - 1 for i in range(numbers)]
    return levels[torch.stack(parts, 1)]


_WORD = {8: (1, 8), 4: (2, 8), 3: (4, 12), 2: (4, 8)}  # by bits: the numbers of a word, and its bits


def pack(codes_UN: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes into bytes, the first in the lowest bits.

    In 3 bits eight codes are three bytes: the low two bits of the first four, those of the others, and the
    high bit of each.
    """
    if bits == 3:
        eight = codes_UN.unflatten(1, (-1, 8))
        low = pack((eight & 3).flatten(1), 2).unflatten(1, (-1, 2))
        return torch.cat([low, _joined(eight >> 2, 1).unsqueeze(-1)], -1).flatten(1)
    return _joined(codes_UN.unflatten(1, (-1, 8 // bits)), bits)


def _joined(codes: torch.Tensor, bits: int) -> torch.Tensor:
    shifts = bits * torch.arange(codes.shape[-1], device=codes.device)
    return (codes << shifts).sum(-1).to(torch.uint8)


def _indices(codes_UP: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the indices of words in `words_of`."""
    if bits != 3:
        return codes_UP.int()
    first, second, high = codes_UP.unflatten(1, (-1, 3)).int().unbind(-1)
    return torch.stack([first + 256 * (high & 15), second + 256 * (high >> 4)], -1).flatten(1)


@cache
def gaussian_levels(bits: int) -> torch.Tensor:
    """Return the levels of the Lloyd-Max quantiser for a standard Gaussian."""
    edges = torch.linspace(-4, 4, 2**bits + 1, dtype=torch.float64)[1:-1]
    infinity = torch.tensor([math.inf], dtype=torch.float64)
    for _ in range(2000):
        wide = torch.cat([-infinity, edges, infinity])
        density = torch.exp(-wide.square() / 2) / math.sqrt(2 * math.pi)
        mass = torch.special.ndtr(wide[1:]) - torch.special.ndtr(wide[:-1])
        levels = (density[:-1] - density[1:]) / mass
        edges = (levels[1:] + levels[:-1]) / 2
    return levels.to(torch.float32)


def _nearest(groups: torch.Tensor, scale: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Return the code of the level that is nearest to each number."""
    return torch.bucketize(groups / _or_one(scale), (levels[1:] + levels[:-1]) / 2)


def _fitted_scales(groups_UGn: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Return scales with a small square error: try a few, fit each to its codes, and take the best."""
    largest = groups_UGn.abs().amax(-1, keepdim=True) / levels[-1]
    if len(levels) == 256:  # so many that no number has to be cut off
        return largest
    best, most = torch.zeros_like(largest), torch.zeros_like(largest)
    near = levels[_nearest(_GRID.to(levels.device), torch.ones_like(levels[0]), levels)]
    for share in _SHARES:
        steps = (groups_UGn * (_FINE / _or_one(largest * share))).clamp(-_WIDE, _WIDE)
        chosen = near[(steps + (_WIDE + 0.5)).int()]
        overlap, weight = (groups_UGn * chosen).sum(-1, keepdim=True), chosen.square().sum(-1, keepdim=True)
        taken = overlap.square() / weight  # from the square error, by the best scale for these codes
        best, most = torch.where(taken > most, overlap / weight, best), torch.maximum(taken, most)
    return best


def _or_one(scale: torch.Tensor) -> torch.Tensor:
    """Replace 0 by 1, to divide by where what is divided is 0 as well."""
    return torch.where(scale > 0, scale, 1)
