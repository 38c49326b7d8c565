"""How the rows of a store are written: in how many bits, and of what rank. Nothing here needs torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from tide_lm.spec.names import suggestion

BITS = (16, 8, 4, 3, 2)
Blocks = Literal["even", "joint"]


def check_numbers(bits: int, group: int) -> None:
    """Check the bits of a number, and how many numbers share a scale."""
    if bits not in BITS:
        raise ValueError(f"bits is {bits!r}: use one of {', '.join(map(str, BITS))}")
    if not 8 <= group <= 2**20 or group % 8:
        raise ValueError(f"group is {group!r}: use a multiple of 8, at most {2**20:,}")


@dataclass(frozen=True)
class Form:
    """How rows are stored: in numbers of so many `bits`, and in a `rank` that is a share of the full one.

    With `"even"` blocks each has that share, as in the paper; `"joint"` ones have one basis for the K x D
    numbers of a row.
    """

    bits: int = 4
    group: int = 32
    rank: float = 1.0
    blocks: Blocks = "even"

    def __post_init__(self) -> None:
        if not 0 < self.rank <= 1:
            raise ValueError(f"the rank is {self.rank}: it is a share of the full one, above 0 and at most 1")
        if self.blocks not in get_args(Blocks):
            raise ValueError(f"blocks is {self.blocks!r}: {suggestion(self.blocks, get_args(Blocks))}")
        if self.rank == 1 and self.blocks != "even":
            raise ValueError(f"blocks is {self.blocks!r}, which is for a lower rank: give one below 1")
        check_numbers(self.bits, self.group)

    def __str__(self) -> str:
        if self.rank == 1:
            return f"{self.bits} bits"
        how = "" if self.blocks == "even" else ", joint"
        return f"{self.bits} bits, rank {self.rank:g}{how}"
