"""Which rows of the tables a batch needs, and at which positions.

Shapes: B batch, T tokens, N = B * T positions, U rows, P pieces.
"""

from typing import NamedTuple

import torch

from tide_lm.ops.transfer import upload

PIECE = 16  # positions that are summed at once: frequent tokens have many, and are shared out


class RowIndex(NamedTuple):
    """Which rows a batch needs, and where. It is made on the host, so that nobody waits for the GPU.

    Positions in the order of their rows are cut into pieces, none longer than `PIECE` and none of two rows:
    piece p is `order_N[start_P[p]:start_P[p + 1]]`, and row u has the pieces from `first_U[u]` to
    `first_U[u + 1]`.
    """

    ids_U: torch.Tensor
    index_BT: torch.Tensor
    order_N: torch.Tensor
    start_P: torch.Tensor
    first_U: torch.Tensor

    @classmethod
    def of(cls, ids_BT: torch.Tensor) -> "RowIndex":
        sorted_N, order_N = ids_BT.flatten().sort(stable=True)
        ids_U, rows_N, counts_U = sorted_N.unique_consecutive(return_inverse=True, return_counts=True)
        pieces_U = (counts_U + PIECE - 1) // PIECE
        before_U = pieces_U.cumsum(0) - pieces_U
        begin_P = (counts_U.cumsum(0) - counts_U - PIECE * before_U).repeat_interleave(pieces_U)
        start_P = begin_P + PIECE * torch.arange(len(begin_P))
        return cls(
            ids_U,
            torch.empty_like(order_N).scatter_(0, order_N, rows_N).view_as(ids_BT),
            order_N.int(),
            torch.cat([start_P, torch.tensor([len(order_N)])]).int(),
            torch.cat([before_U, torch.tensor([len(start_P)])]).int(),
        )

    def to(self, device: torch.device) -> "RowIndex":
        return RowIndex(*(upload(part, device) for part in self))
