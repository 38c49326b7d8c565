"""The memory's tables in training: a step fetches, moves and keeps in step the rows of its tokens alone.

No gradient of a whole table ever exists. Rows that a step does not need wait, and catch up when they are
needed again (see ops.row_adamw). Shapes: B batch, T tokens, U rows, K blocks, D hidden.
"""

from collections.abc import Sequence

import torch

from tide_lm.model import EmbeddingMemory, Memory
from tide_lm.ops import row_adamw
from tide_lm.ops.memory_rows import RowIndex, normed_rows
from tide_lm.run_config import OptimSection


class RowLazyTables:
    """Lends the rows of a batch to the model, gathers their gradients, and moves them."""

    def __init__(
        self, memory: EmbeddingMemory, settings: OptimSection, layers: int, dtype: torch.dtype
    ) -> None:
        memory.weight.requires_grad_(False)
        self.memory, self.layers, self.dtype = memory, layers, dtype
        self.table = row_adamw.RowTable.start(memory.weight)
        self._constants = (settings.beta1, settings.beta2), settings.eps, settings.table_weight_decay
        self.set_rates(None)
        self.ids_U = self.table.last_V.new_empty(0, dtype=torch.long)
        self.gradient_UKD = self.table.weight_VKD.new_empty(0)
        self._indices: Sequence[RowIndex] = ()
        self._lent: tuple[torch.Tensor, torch.Tensor] | None = None

    def begin(self, indices: Sequence[RowIndex]) -> None:
        """Brings the rows of a step's micro-batches up to date."""
        self._indices = indices
        ids = [index.ids_U for index in indices]
        self.ids_U = ids[0] if len(ids) == 1 else torch.cat(ids).unique()
        row_adamw.catch_up(self.table, self.ids_U, self.history)
        self.gradient_UKD = self.gradient_UKD.new_empty(0)

    def lend(self, micro_batch: int) -> Memory:
        """The memory of one of the step's micro-batches."""
        index = self._indices[micro_batch]
        raw_UKD = self.table.weight_VKD[index.ids_U].requires_grad_()
        self._lent = index.ids_U, raw_UKD
        norm = self.memory.norm
        rows_UKD, sinks = normed_rows(raw_UKD, norm.weight, norm.eps, index, self.layers, self.dtype)
        return Memory(rows_UKD, index.index_BT, sinks)

    def take_back(self) -> None:
        """Adds the gradient of what was lent, after the backward pass."""
        assert self._lent is not None
        ids_U, raw_UKD = self._lent
        assert raw_UKD.grad is not None
        if len(self._indices) == 1:
            self.gradient_UKD = raw_UKD.grad
        else:
            if not len(self.gradient_UKD):
                self.gradient_UKD = raw_UKD.new_zeros(len(self.ids_U), *raw_UKD.shape[1:])
            self.gradient_UKD.index_add_(0, torch.searchsorted(self.ids_U, ids_U), raw_UKD.grad)
        self._lent = None

    def step(self, rate: float, scale: torch.Tensor) -> None:
        """Takes a step of AdamW with the gradients that were taken back, times a scale."""
        self.history.append(rate)
        row_adamw.step(self.table, self.ids_U, self.gradient_UKD, self.history, scale)

    def flush(self) -> None:
        """Brings all rows up to date, for whoever reads the table."""
        row_adamw.flush(self.table, self.history)

    def set_rates(self, rates: torch.Tensor | None) -> None:
        """The learning rates of all steps so far, as a checkpoint has them."""
        self.history = row_adamw.History(*self._constants, rates)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds beside the weights and the learning rates."""
        return {
            "exp_avg": self.table.exp_avg_VKD,
            "exp_avg_sq": self.table.exp_avg_sq_VKD,
            "last": self.table.last_V,
            "touched": self.table.touched_V,
        }
