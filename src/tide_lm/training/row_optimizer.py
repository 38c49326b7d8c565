"""AdamW for the memory's tables: a step fetches, moves and brings up to date the rows of its tokens alone.

No gradient of a whole table ever exists. A row that a step does not need waits, and catches up when it is
needed again (see ops.row_adamw). Shapes: V rows of the tables, U rows of this process's batch, R rows of this
process that the step needs, K blocks, D hidden.
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
from tide_lm.run.settings import OptimSection
from tide_lm.training.exchange import Exchange
from tide_lm.training.objective import BatchRows


class StepRows(NamedTuple):
    """The rows of one step: per micro-batch, and where those are among the U rows of the step."""

    indices: list[tuple[RowIndex, ...]]  # one for each of a position's rows
    places: list[torch.Tensor]
    in_order: bool  # one micro-batch, whose rows are those of the step one by one
    distinct: int  # U
    own_R: torch.Tensor
    exchange: Exchange | None  # None if one process has all rows


def gains_are_zero(memory: EmbeddingMemory) -> bool:
    """Tell whether all gains are 0: rows get no gradient then, and must not decay."""
    size = torch.linalg.vector_norm(memory.norm.weight.detach())
    return not (size.full_tensor() if isinstance(size, DTensor) else size)


class RowOptimizer:
    """Fetches the rows of a batch, accumulates their gradients, and moves them."""

    own_R: torch.Tensor  # rows with a gradient, after `reduce`
    gradient_RKD: torch.Tensor
    _rows: StepRows
    _gradient_UKD: torch.Tensor | None  # of the micro-batches so far

    def __init__(
        self,
        memory: EmbeddingMemory,
        settings: OptimSection,
        dtype: torch.dtype,
        waits_for_gains: bool = False,
    ) -> None:
        """Start a table's optimiser; one that `waits_for_gains` takes no step until gains have left 0."""
        memory.weight.requires_grad_(False)
        self._memory, self._waits_for_gains = memory, waits_for_gains
        self.dtype = dtype
        self.table = RowTable.start(memory.weight, getattr(torch, settings.table_moments))
        self._constants = (settings.beta1, settings.beta2), settings.eps, settings.table_weight_decay
        self.set_rates(None)
        device = memory.weight.device
        self._ahead = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def prepare(self, micro_batches: Sequence[torch.Tensor]) -> StepRows:
        """Find the rows of a step's micro-batches, given their ids on the host; collective."""
        device = self.table.weight_VKD.device
        indices = [
            tuple(RowIndex.of(self._keys(numbers_BT)) for numbers_BT in self._memory.numbers(ids_BT))
            for ids_BT in micro_batches
        ]
        keys = [torch.cat([index.ids_U for index in parts]) for parts in indices]
        keys_U = torch.cat(keys).unique()
        places = [upload(torch.searchsorted(keys_U, keys_M), device) for keys_M in keys]
        in_order = len(keys) == 1 and torch.equal(keys[0], keys_U)
        on_device = [tuple(index.to(device) for index in parts) for parts in indices]
        return StepRows(on_device, places, in_order, len(keys_U), *self._locate(keys_U))

    def _keys(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return numbers of rows as this optimiser sorts them."""
        return numbers

    def _locate(self, keys_U: torch.Tensor) -> tuple[torch.Tensor, Exchange | None]:
        """Return the places of a step's rows in this process's table, and how they are exchanged."""
        return upload(keys_U, self.table.weight_VKD.device), None

    def catch_up_ahead(self, rows: StepRows) -> None:
        """Bring the next step's rows up to date on a GPU while it does other work."""
        if self._ahead is not None:
            self._ahead.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._ahead):
                row_adamw.catch_up(self.table, rows.own_R, self.history)

    def begin(self, rows: StepRows) -> None:
        """Bring the rows of a step up to date."""
        self._join()
        self._rows, self._gradient_UKD = rows, None
        row_adamw.catch_up(self.table, rows.own_R, self.history)

    def fetch(self, micro_batch: int) -> BatchRows:
        """Return the rows of one of the step's micro-batches."""
        indices = self._rows.indices[micro_batch]
        own_U = torch.cat([index.ids_U for index in indices])
        return BatchRows(self.table.weight_VKD[own_U].requires_grad_(), indices)

    def accumulate(self, micro_batch: int, rows: BatchRows) -> None:
        """Add the gradient of fetched rows, after their backward pass."""
        gradient_UKD = rows.raw_UJD.grad
        assert gradient_UKD is not None
        if self._rows.in_order:
            self._gradient_UKD = gradient_UKD
            return
        if self._gradient_UKD is None:
            self._gradient_UKD = gradient_UKD.new_zeros(self._rows.distinct, *gradient_UKD.shape[1:])
        self._gradient_UKD.index_add_(0, self._rows.places[micro_batch], gradient_UKD)

    def reduce(self) -> None:
        """Finish the gradients of a step."""
        assert self._gradient_UKD is not None
        self.own_R, self.gradient_RKD, self._gradient_UKD = self._rows.own_R, self._gradient_UKD, None

    def step(self, rate: float, scale: torch.Tensor) -> None:
        """Take a step of AdamW with the reduced gradients, times a scale."""
        self._waits_for_gains = self._waits_for_gains and gains_are_zero(self._memory)
        if self._waits_for_gains:
            return
        self.history.append(rate)
        row_adamw.step(self.table, self.own_R, self.gradient_RKD, self.history, scale)

    def flush(self) -> None:
        """Bring all rows up to date, before the table is read."""
        self._join()
        row_adamw.flush(self.table, self.history)

    def set_rates(self, rates: torch.Tensor | None) -> None:
        """Set the learning rates of all steps so far."""
        self.history = History(*self._constants, rates)

    def to_checkpoint(self) -> dict[str, torch.Tensor]:
        """Bring all rows up to date; return what a checkpoint holds of the tables, in the order of tokens."""
        self.flush()
        return self._tensors() | ({"tables.rates": self.history.rates} if self.history.steps else {})

    def placeholders(self, steps: int) -> dict[str, torch.Tensor]:
        """Return tensors for a checkpoint after so many steps to fill."""
        return self._tensors() | ({"tables.rates": torch.zeros(steps, dtype=torch.float64)} if steps else {})

    def from_checkpoint(self, filled: dict[str, torch.Tensor]) -> None:
        """Take over `placeholders` that a checkpoint filled."""
        self.set_rates(filled.get("tables.rates"))

    def _join(self) -> None:
        if self._ahead is not None:
            torch.cuda.current_stream().wait_stream(self._ahead)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {
            "model.model.memory.weight": self.table.weight_VKD,
            "tables.exp_avg": self.table.exp_avg_VKD,
            "tables.exp_avg_sq": self.table.exp_avg_sq_VKD,
            "tables.last": self.table.last_V,
            "tables.touched": self.table.touched_V,
        }
