"""What a model in training makes of held-out text, and what it writes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tide_lm.data.frequency import LossByBin
from tide_lm.data.loader import validation_windows
from tide_lm.run import process_group
from tide_lm.run.settings import RunConfig
from tide_lm.training import parallel
from tide_lm.training.inputs import Inputs
from tide_lm.training.objective import Objective
from tide_lm.training.row_optimizer import RowOptimizer


class HeldOut:
    """Measures the model of an objective between steps; with several processes, all call it together."""

    def __init__(
        self, config: RunConfig, inputs: Inputs, objective: Objective, rows: RowOptimizer | None
    ) -> None:
        self.config, self.inputs, self.objective, self.rows = config, inputs, objective, rows
        self.device = process_group.device()

    def validate(self) -> dict[str, Any]:
        """Return the loss on the validation split, and that of each bin of token frequencies."""
        train, sequence = self.config.train, self.config.data.sequence
        rank, world_size = process_group.rank(), process_group.world_size()
        size = train.micro_batch_size(world_size)
        windows = validation_windows(
            self.inputs.validation, sequence, train.validation_sequences, size, rank, world_size
        )
        losses = LossByBin(self.inputs.bins)
        with self.evaluating(), torch.no_grad():
            for inputs, targets in windows:
                targets_N = targets.flatten().to(self.device)
                if not len(targets_N):  # a rank without a window left takes part in the collectives
                    inputs = targets = torch.zeros(1, sequence, dtype=torch.long)
                result = self.objective(inputs.to(self.device), targets.to(self.device))
                losses.add(result.per_token_N[: len(targets_N)], targets_N)
            process_group.all_sum(losses.sums_R)
            process_group.all_sum(losses.counts_R)
        return losses.result()

    def sample(self) -> str:
        """Return what the model writes at the beginning of a document, the likeliest token each time."""
        start = self.inputs.manifest.bos_token_id
        ids = torch.tensor([[0 if start is None else start]], device=self.device)
        with self.evaluating(), self.objective.precision(self.device):
            parallel.unshard(self.objective)
            written = self.objective.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=32,
                do_sample=False,
                pad_token_id=0,
                synced_gpus=process_group.is_distributed(),
            )
        return self.inputs.tokenizer.decode(written[0], skip_special_tokens=True)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the model into evaluation, not compiled: validation and generation have other shapes."""
        if self.rows is not None:
            self.rows.flush()
        self.objective.eval()
        with torch.compiler.set_stance("force_eager"):
            yield
        parallel.reshard(self.objective)
        self.objective.train()
