"""Tables that are spread over ranks: ids go out, rows come back, and gradients return to their owners.

No rank ever holds more than its own rows and those of its batch. Tokenizers number frequent tokens first, so
neighbouring ids belong to different ranks: token v is row v // ranks of rank v % ranks. All that fetches is
collective. Shapes: U rows asked for by this rank, W rows wanted from this rank, R of them different, K
blocks, D hidden.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tide_lm.model import EmbeddingMemory, Memory
from tide_lm.model.config import TideConfig
from tide_lm.ops.transfer import upload
from tide_lm.run import process_group


@dataclass(frozen=True)
class Exchange:
    """Which rows go where: made once for a step, on the host, and used for its rows and its gradients."""

    own_R: torch.Tensor  # rows of this rank, as places in its table
    asked: list[int]  # how many rows this rank asks of each
    wanted: list[int]  # how many rows each asks of this rank
    place_W: torch.Tensor  # of all that are wanted, in the order of those who ask: where in own_R

    @classmethod
    def plan(cls, keys_U: torch.Tensor, rows_a_rank: int) -> "Exchange":
        """Plan an exchange for keys of `ShardedMemory.keys` in ascending order, on the host."""
        asked_by_rank = torch.bincount(keys_U // rows_a_rank, minlength=process_group.count())
        wanted_by_rank = torch.empty_like(asked_by_rank)
        dist.all_to_all_single(wanted_by_rank, asked_by_rank)
        asked, wanted = asked_by_rank.tolist(), wanted_by_rank.tolist()
        keys_W = keys_U.new_empty(sum(wanted))
        dist.all_to_all_single(keys_W, keys_U, wanted, asked)
        own_R, place_W = (keys_W - process_group.rank() * rows_a_rank).unique(return_inverse=True)
        return cls(own_R, asked, wanted, place_W)

    def to(self, device: torch.device) -> "Exchange":
        return Exchange(upload(self.own_R, device), self.asked, self.wanted, upload(self.place_W, device))

    def fetch(self, own: torch.Tensor) -> torch.Tensor:
        """What this rank asked for, from what each owns, for the rows `own_R`."""
        sent = own[self.place_W]
        fetched = sent.new_empty(sum(self.asked), *sent.shape[1:])
        dist.all_to_all_single(fetched, sent, self.asked, self.wanted)
        return fetched

    def give_back(self, values: torch.Tensor) -> torch.Tensor:
        """The sum, for the rows `own_R`, of what the ranks that asked for them give back."""
        received = values.new_empty(sum(self.wanted), *values.shape[1:])
        dist.all_to_all_single(received, values, self.wanted, self.asked)
        return received.new_zeros(len(self.own_R), *received.shape[1:]).index_add_(0, self.place_W, received)


class ShardedMemory(EmbeddingMemory):
    """This rank's rows of the tables, in the place of a model's memory."""

    def __init__(self, config: TideConfig) -> None:
        super().__init__(config)
        self.vocabulary = config.vocab_size
        self.rows_a_rank = -(-self.vocabulary // process_group.count())
        own = self.weight.new_empty(len(self.tokens), *self.weight.shape[1:])
        self.weight = nn.Parameter(own, requires_grad=False)

    @property
    def tokens(self) -> range:
        return range(process_group.rank(), self.vocabulary, process_group.count())

    def keys(self, ids: torch.Tensor) -> torch.Tensor:
        """Numbers that sort token ids by owner, and then by their place with the owner."""
        return ids % process_group.count() * self.rows_a_rank + ids // process_group.count()

    def plan(self, keys_U: torch.Tensor) -> Exchange:
        return Exchange.plan(keys_U, self.rows_a_rank)

    def forward(self, input_ids_BT: torch.Tensor, dtype: torch.dtype | None = None) -> Memory:
        keys_U, index = self.keys(input_ids_BT.cpu()).unique(return_inverse=True)
        exchange = self.plan(keys_U).to(input_ids_BT.device)
        raw_UKD = exchange.fetch(self.weight[exchange.own_R])
        return Memory(self.norm(raw_UKD), index.to(input_ids_BT.device))

    @torch.no_grad()
    def read(self, own: torch.Tensor, ids_U: torch.Tensor) -> torch.Tensor:
        """Rows of different tokens, of a tensor that has a row for each of `tokens`."""
        keys_U, order_U = self.keys(ids_U).sort()
        exchange = self.plan(keys_U).to(own.device)
        fetched = exchange.fetch(own[exchange.own_R])
        return torch.empty_like(fetched).index_copy_(0, order_U.to(own.device), fetched)

    def range_like(self, own: torch.Tensor) -> DTensor:
        """Room for a tensor of all tokens in their order, on the host, of which each rank has a range."""
        begin = process_group.rank() * self.rows_a_rank
        rows = max(0, min(self.rows_a_rank, self.vocabulary - begin))
        local = torch.empty(rows, *own.shape[1:], dtype=own.dtype)
        mesh = init_device_mesh("cpu", (process_group.count(),))
        whole = torch.Size([self.vocabulary, *own.shape[1:]])
        return DTensor.from_local(local, mesh, [Shard(0)], shape=whole, stride=local.stride())

    def to_range(self, own: torch.Tensor) -> DTensor:
        """A tensor with a row for each of `tokens`, as it is in the order of all tokens."""
        whole = self.range_like(own)
        for ids_U, piece in self._pieces(whole):
            piece.copy_(self.read(own, ids_U))
        return whole

    @torch.no_grad()
    def from_range(self, own: torch.Tensor, whole: torch.Tensor) -> None:
        """The reverse of `to_range`, in place."""
        for ids_U, piece in self._pieces(whole):
            keys_U, order_U = self.keys(ids_U).sort()
            exchange = self.plan(keys_U).to(own.device)
            own[exchange.own_R] = exchange.give_back(piece[order_U].to(own.device))

    def _pieces(self, whole: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Tokens of this rank's range, and their rows: as many pieces on every rank, and none large."""
        assert isinstance(whole, DTensor)
        local, begin = whole.to_local(), process_group.rank() * self.rows_a_rank
        at_once = max(1, 2**24 // math.prod(whole.shape[1:]))
        for start in range(0, self.rows_a_rank, at_once):
            piece = local[start : min(start + at_once, self.rows_a_rank)]
            yield torch.arange(begin + start, begin + start + len(piece)), piece
