"""The memory's tables in training: a step fetches, moves and keeps in step the rows of its tokens alone.

No gradient of a whole table ever exists. Rows that a step does not need wait, and catch up when they are
needed again (see ops.row_adamw). With several ranks a table is spread over them (see sharded_memory): rows
come from their owners, and gradients return there. Shapes: U rows of this rank's batch, R rows that this rank
owns and a batch needs, K blocks, D hidden.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from tide_lm.model import EmbeddingMemory
from tide_lm.ops import row_adamw
from tide_lm.ops.row_index import RowIndex
from tide_lm.ops.row_table import History, RowTable
from tide_lm.ops.transfer import upload
from tide_lm.run import process_group
from tide_lm.run.settings import OptimSection
from tide_lm.train.objective import Lent
from tide_lm.train.sharded_memory import Exchange, ShardedMemory


class StepRows(NamedTuple):
    """The rows of one step: for each micro-batch, and where those are among the rows of all."""

    indices: list[RowIndex]
    places: list[torch.Tensor]
    distinct: int
    own_R: torch.Tensor
    exchange: Exchange | None


def are_off(memory: EmbeddingMemory) -> bool:
    """Tell whether all gains are 0: rows get no gradient then, and must not decay."""
    size = torch.linalg.vector_norm(memory.norm.weight.detach())
    return not (size.full_tensor() if isinstance(size, DTensor) else size)


def let_wait(memory: EmbeddingMemory | None) -> None:
    """Leave a table that is trained densely out of the next step, while gains are 0."""
    if memory is not None and are_off(memory):
        memory.weight.grad = None


class RowLazyTables:
    """Lends the rows of a batch to the model, gathers their gradients, and moves them."""

    own_R: torch.Tensor
    gradient_RKD: torch.Tensor
    _rows: StepRows
    _fetched_UKD: torch.Tensor | None  # from their owners, if there are other ranks
    _gradient_UKD: torch.Tensor | None  # of the micro-batches so far

    def __init__(
        self, memory: EmbeddingMemory, settings: OptimSection, dtype: torch.dtype, waits: bool = False
    ) -> None:
        """A table `waits` for its first step until gains have left 0."""
        memory.weight.requires_grad_(False)
        self._memory, self._waits = memory, waits
        self.dtype = dtype
        self._sharded = memory if isinstance(memory, ShardedMemory) else None
        self.table = RowTable.start(memory.weight, getattr(torch, settings.table_moments))
        self._constants = (settings.beta1, settings.beta2), settings.eps, settings.table_weight_decay
        self.set_rates(None)
        device, alone = memory.weight.device, self._sharded is None
        self._beside = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" and alone else None

    def prepare(self, micro_batches: Sequence[torch.Tensor]) -> StepRows:
        """The rows of a step's micro-batches, given their ids on the host; all ranks do this together."""
        sharded, device = self._sharded, self.table.last_V.device
        indices = [RowIndex.of(ids if sharded is None else sharded.keys(ids)) for ids in micro_batches]
        ids_U = torch.cat([index.ids_U for index in indices]).unique()
        places = [upload(torch.searchsorted(ids_U, index.ids_U), device) for index in indices]
        exchange = None if sharded is None else sharded.plan(ids_U).to(device)
        own_R = upload(ids_U, device) if exchange is None else exchange.own_R
        return StepRows([index.to(device) for index in indices], places, len(ids_U), own_R, exchange)

    def begin_beside(self, rows: StepRows) -> None:
        """Brings the next step's rows up to date while other work goes on, where one GPU has all of them."""
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._beside):
                row_adamw.catch_up(self.table, rows.own_R, self.history)

    def begin(self, rows: StepRows) -> None:
        """Brings the rows of a step up to date, and fetches those of other ranks."""
        self._join()
        self._rows, self._fetched_UKD, self._gradient_UKD = rows, None, None
        row_adamw.catch_up(self.table, rows.own_R, self.history)
        if rows.exchange is not None:  # as FSDP does with weights, in the precision that they are used in
            self._fetched_UKD = rows.exchange.fetch(self.table.weight_VKD[rows.own_R].to(self.dtype))

    def lend(self, micro_batch: int) -> Lent:
        """The rows of one of the step's micro-batches."""
        index, place_U = self._rows.indices[micro_batch], self._rows.places[micro_batch]
        if self._fetched_UKD is None:
            raw_UKD = self.table.weight_VKD[index.ids_U]
        else:
            raw_UKD = self._fetched_UKD[place_U].to(self.table.weight_VKD.dtype)
        return Lent(raw_UKD.requires_grad_(), index)

    def take_back(self, micro_batch: int, lent: Lent) -> None:
        """Adds the gradient of what was lent, after its backward pass."""
        gradient_UKD = lent.raw_UKD.grad
        assert gradient_UKD is not None
        if len(self._rows.indices) == 1:
            self._gradient_UKD = gradient_UKD
            return
        if self._gradient_UKD is None:
            self._gradient_UKD = gradient_UKD.new_zeros(self._rows.distinct, *gradient_UKD.shape[1:])
        self._gradient_UKD.index_add_(0, self._rows.places[micro_batch], gradient_UKD)

    def collect(self) -> None:
        """Takes the gradients of a step to the ranks that own their rows."""
        gradient_UKD, exchange = self._gradient_UKD, self._rows.exchange
        assert gradient_UKD is not None
        if exchange is not None:  # their mean, as FSDP has it for all other weights
            gradient_UKD = exchange.give_back(gradient_UKD).div_(process_group.count())
        self.own_R, self.gradient_RKD = self._rows.own_R, gradient_UKD
        self._fetched_UKD = self._gradient_UKD = None

    def step(self, rate: float, scale: torch.Tensor) -> None:
        """Takes a step of AdamW with the gradients that were collected, times a scale."""
        self._waits = self._waits and are_off(self._memory)
        if self._waits:
            return
        self.history.append(rate)
        row_adamw.step(self.table, self.own_R, self.gradient_RKD, self.history, scale)

    def flush(self) -> None:
        """Brings all rows up to date, for whoever reads the table."""
        self._join()
        row_adamw.flush(self.table, self.history)

    def set_rates(self, rates: torch.Tensor | None) -> None:
        """The learning rates of all steps so far."""
        self.history = History(*self._constants, rates)

    def to_checkpoint(self) -> dict[str, torch.Tensor]:
        """All that a checkpoint holds of the tables, with rows in the order of tokens."""
        own, sharded = self._tensors(), self._sharded
        held = own if sharded is None else {name: sharded.to_range(tensor) for name, tensor in own.items()}
        return held | ({"tables.rates": self.history.rates} if self.history.steps else {})

    def room(self, steps: int) -> dict[str, torch.Tensor]:
        """Tensors for a checkpoint after so many steps to fill."""
        own, sharded = self._tensors(), self._sharded
        room = own if sharded is None else {name: sharded.range_like(tensor) for name, tensor in own.items()}
        return room | ({"tables.rates": torch.zeros(steps, dtype=torch.float64)} if steps else {})

    def from_checkpoint(self, filled: dict[str, torch.Tensor]) -> None:
        """Takes over what `room` made, and a checkpoint filled."""
        self.set_rates(filled.get("tables.rates"))
        if self._sharded is not None:
            for name, own in self._tensors().items():
                self._sharded.from_range(own, filled[name])

    def _join(self) -> None:
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {
            "model.model.memory.weight": self.table.weight_VKD,
            "tables.exp_avg": self.table.exp_avg_VKD,
            "tables.exp_avg_sq": self.table.exp_avg_sq_VKD,
            "tables.last": self.table.last_V,
            "tables.touched": self.table.touched_V,
        }
