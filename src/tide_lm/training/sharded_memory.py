"""Tables that are sharded over processes: ids go out, rows come back, gradients return to their owners.

No process ever holds more than its own rows and those of its batch. Tokenizers number frequent tokens first,
so neighbouring rows have different owners: of n processes, row v is row v // n of rank v % n. Every method
that fetches is collective. Shapes: U rows that are requested, J blocks of a row, D hidden.
"""

import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tide_lm.model import EmbeddingMemory, Memory
from tide_lm.model.config import TideConfig
from tide_lm.run import process_group
from tide_lm.training.exchange import Exchange
from tide_lm.training.objective import BatchRows
from tide_lm.training.row_optimizer import RowOptimizer, StepRows

_PIECE_VALUES = 2**24  # how many values of a table are exchanged at once


class ShardedMemory(EmbeddingMemory):
    """This process's rows of the tables, in the place of a model's memory."""

    def __init__(self, config: TideConfig) -> None:
        super().__init__(config)
        self._height = len(self.weight)
        self.rows_per_rank = -(-self.height // process_group.world_size())
        own = self.weight.new_empty(len(self.own), *self.weight.shape[1:])
        self.weight = nn.Parameter(own, requires_grad=False)

    @property
    def height(self) -> int:
        return self._height

    @property
    def own(self) -> range:
        return range(process_group.rank(), self.height, process_group.world_size())

    def keys(self, rows: torch.Tensor) -> torch.Tensor:
        """Return numbers that sort rows by owner, and then by their place there."""
        return rows % process_group.world_size() * self.rows_per_rank + rows // process_group.world_size()

    def plan(self, keys_U: torch.Tensor, device: torch.device) -> Exchange:
        return Exchange.plan(keys_U, self.rows_per_rank, device)

    def forward(
        self,
        input_ids_BT: torch.Tensor,
        dtype: torch.dtype | None = None,
        previous_BT: torch.Tensor | None = None,
    ) -> Memory:
        previous_BT = None if previous_BT is None else previous_BT.cpu()
        rows, index, first = [], [], 0
        for part, numbers_BT in enumerate(self.numbers(input_ids_BT.cpu(), previous_BT)):
            keys_U, index_BT = self.keys(numbers_BT).unique(return_inverse=True)
            exchange = self.plan(keys_U, input_ids_BT.device)
            rows.append(self.norm(exchange.fetch(self.weight[exchange.own_R]), part))
            index.append(index_BT.to(input_ids_BT.device) + first)
            first += len(keys_U)
        return Memory(torch.cat(rows), torch.stack(index) if len(index) > 1 else index[0])

    @torch.no_grad()
    def read(self, own: torch.Tensor, ids_U: torch.Tensor) -> torch.Tensor:
        """Return different rows from a tensor that has each of `own`."""
        keys_U, order_U = self.keys(ids_U).sort()
        exchange = self.plan(keys_U, own.device)
        fetched = exchange.fetch(own[exchange.own_R])
        return torch.empty_like(fetched).index_copy_(0, order_U.to(own.device), fetched)

    def dtensor_like(self, own: torch.Tensor) -> DTensor:
        """Return an unfilled tensor of all rows on the host, of which each rank has a contiguous range."""
        begin = process_group.rank() * self.rows_per_rank
        rows = max(0, min(self.rows_per_rank, self.height - begin))
        local = torch.empty(rows, *own.shape[1:], dtype=own.dtype)
        mesh = init_device_mesh("cpu", (process_group.world_size(),))
        whole = torch.Size([self.height, *own.shape[1:]])
        return DTensor.from_local(local, mesh, [Shard(0)], shape=whole, stride=local.stride())

    def to_dtensor(self, own: torch.Tensor) -> DTensor:
        """Copy a tensor that has each row of `own` into one of all rows in their order."""
        whole = self.dtensor_like(own)
        for ids_U, piece in self._pieces(whole):
            piece.copy_(self.read(own, ids_U))
        return whole

    @torch.no_grad()
    def from_dtensor(self, own: torch.Tensor, whole: torch.Tensor) -> None:
        """Reverse `to_dtensor`, in place."""
        for ids_U, piece in self._pieces(whole):
            keys_U, order_U = self.keys(ids_U).sort()
            exchange = self.plan(keys_U, own.device)
            own[exchange.own_R] = exchange.reduce(piece[order_U].to(own.device))

    def _pieces(self, whole: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the numbers of this rank's range and their rows, in as many pieces on every rank."""
        assert isinstance(whole, DTensor)
        local, begin = whole.to_local(), process_group.rank() * self.rows_per_rank
        rows = max(1, _PIECE_VALUES // math.prod(whole.shape[1:]))
        for start in range(0, self.rows_per_rank, rows):
            piece = local[start : min(start + rows, self.rows_per_rank)]
            yield torch.arange(begin + start, begin + start + len(piece)), piece


class ShardedRowOptimizer(RowOptimizer):
    """A row optimiser whose rows come from their owners, and whose gradients return there."""

    _memory: ShardedMemory
    _fetched_UKD: torch.Tensor

    def _keys(self, numbers: torch.Tensor) -> torch.Tensor:
        return self._memory.keys(numbers)

    def _locate(self, keys_U: torch.Tensor) -> tuple[torch.Tensor, Exchange]:
        exchange = self._memory.plan(keys_U, self.table.weight_VKD.device)
        return exchange.own_R, exchange

    def catch_up_ahead(self, rows: StepRows) -> None:
        """Do nothing: the exchange in `begin` waits for its rows in any case."""

    def begin(self, rows: StepRows) -> None:
        super().begin(rows)
        assert rows.exchange is not None
        # Rows travel in the precision that they are used in, as weights do with FSDP.
        self._fetched_UKD = rows.exchange.fetch(self.table.weight_VKD[rows.own_R].to(self.dtype))

    def fetch(self, micro_batch: int) -> BatchRows:
        raw_UKD = self._fetched_UKD[self._rows.places[micro_batch]].to(self.table.weight_VKD.dtype)
        return BatchRows(raw_UKD.requires_grad_(), self._rows.indices[micro_batch])

    def reduce(self) -> None:
        """Average each row's gradient over processes, as FSDP does for all other weights."""
        super().reduce()
        del self._fetched_UKD
        assert self._rows.exchange is not None
        self.gradient_RKD = self._rows.exchange.reduce(self.gradient_RKD).div_(process_group.world_size())

    def to_checkpoint(self) -> dict[str, torch.Tensor]:
        whole = super().to_checkpoint()  # which brings rows up to date first
        return whole | {name: self._memory.to_dtensor(own) for name, own in self._tensors().items()}

    def placeholders(self, steps: int) -> dict[str, torch.Tensor]:
        held = {name: self._memory.dtensor_like(tensor) for name, tensor in self._tensors().items()}
        return super().placeholders(steps) | held

    def from_checkpoint(self, filled: dict[str, torch.Tensor]) -> None:
        super().from_checkpoint(filled)
        for name, own in self._tensors().items():
            self._memory.from_dtensor(own, filled[name])
