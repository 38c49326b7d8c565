"""The memory's tables in training: a step fetches, moves and keeps in step the rows of its tokens alone.

No gradient of a whole table ever exists. Rows that a step does not need wait, and catch up when they are
needed again (see ops.row_adamw). With several ranks a table is spread over them (see sharded_memory): rows
come from their owners, and gradients return there. Shapes: U rows of this rank's batch, R rows that this rank
owns and a batch needs, K blocks, D hidden.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tide_lm import ranks
from tide_lm.model import EmbeddingMemory
from tide_lm.ops import row_adamw
from tide_lm.ops.memory_rows import RowIndex
from tide_lm.ops.transfer import upload
from tide_lm.run_config import OptimSection
from tide_lm.train.objective import Lent
from tide_lm.train.sharded_memory import Exchange, ShardedMemory


class StepRows(NamedTuple):
    """The rows of one step: for each micro-batch, and where those are among the rows of all together."""

    indices: list[RowIndex]
    places: list[torch.Tensor]
    own_R: torch.Tensor
    exchange: Exchange | None


class RowLazyTables:
    """Lends the rows of a batch to the model, gathers their gradients, and moves them."""

    def __init__(self, memory: EmbeddingMemory, settings: OptimSection, dtype: torch.dtype) -> None:
        memory.weight.requires_grad_(False)
        self.memory, self.dtype = memory, dtype
        self.table = row_adamw.RowTable.start(memory.weight, getattr(torch, settings.table_moments))
        self._constants = (settings.beta1, settings.beta2), settings.eps, settings.table_weight_decay
        self.set_rates(None)

    def prepare(self, micro_batches: Sequence[torch.Tensor]) -> StepRows:
        """The rows of a step's micro-batches, given their ids on the host; all ranks do this together."""
        memory, device = self.memory, self.table.last_V.device
        sharded = memory if isinstance(memory, ShardedMemory) else None
        indices = [RowIndex.of(ids if sharded is None else sharded.keys(ids)) for ids in micro_batches]
        ids_U = torch.cat([index.ids_U for index in indices]).unique()
        places = [upload(torch.searchsorted(ids_U, index.ids_U), device) for index in indices]
        exchange = None if sharded is None else sharded.plan(ids_U).to(device)
        own_R = upload(ids_U, device) if exchange is None else exchange.own_R
        return StepRows([index.to(device) for index in indices], places, own_R, exchange)

    def begin(self, rows: StepRows) -> None:
        """Brings the rows of a step up to date, and fetches them."""
        self._rows = rows
        row_adamw.catch_up(self.table, rows.own_R, self.history)
        own_RKD = self.table.weight_VKD[rows.own_R]
        if rows.exchange is not None:  # as FSDP does with weights, in the precision that they are used in
            own_RKD = rows.exchange.fetch(own_RKD.to(self.dtype)).to(own_RKD.dtype)
        self._raw_UKD = own_RKD.requires_grad_()

    def lend(self, micro_batch: int) -> Lent:
        """The rows of one of the step's micro-batches."""
        index = self._rows.indices[micro_batch]
        if len(self._rows.indices) == 1:
            return Lent(self._raw_UKD, index)
        return Lent(self._raw_UKD.index_select(0, self._rows.places[micro_batch]), index)

    def take_back(self) -> None:
        """Takes the gradients of the rows that this rank owns, after the last backward pass of a step."""
        gradient_UKD, exchange = self._raw_UKD.grad, self._rows.exchange
        assert gradient_UKD is not None
        if exchange is not None:  # their mean, as FSDP has it for all other weights
            gradient_UKD = exchange.give_back(gradient_UKD).div_(ranks.count())
        self.own_R, self.gradient_RKD = self._rows.own_R, gradient_UKD

    def step(self, rate: float, scale: torch.Tensor) -> None:
        """Takes a step of AdamW with the gradients that were taken back, times a scale."""
        self.history.append(rate)
        row_adamw.step(self.table, self.own_R, self.gradient_RKD, self.history, scale)

    def flush(self) -> None:
        """Brings all rows up to date, for whoever reads the table."""
        row_adamw.flush(self.table, self.history)

    def set_rates(self, rates: torch.Tensor | None) -> None:
        """The learning rates of all steps so far, as a checkpoint has them."""
        self.history = row_adamw.History(*self._constants, rates)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds beside the learning rates: tensors with a row for each token."""
        return {
            "model.model.memory.weight": self.table.weight_VKD,
            "tables.exp_avg": self.table.exp_avg_VKD,
            "tables.exp_avg_sq": self.table.exp_avg_sq_VKD,
            "tables.last": self.table.last_V,
            "tables.touched": self.table.touched_V,
        }
