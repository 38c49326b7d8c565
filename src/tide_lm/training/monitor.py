"""A run's numbers where people watch them: TensorBoard, and Weights & Biases if asked for."""

import secrets
from pathlib import Path
from typing import Any

from tide_lm.run import files
from tide_lm.run.optional import require


class Monitor:
    """Sends the numbers of each record on; metrics.jsonl stays the source."""

    def __init__(self, run: Path, tensorboard: bool, wandb: bool) -> None:
        self.run, self.tensorboard = run, tensorboard
        self._wandb = require("wandb", "train.wandb", "wandb") if wandb else None
        self._writer: Any = None
        self._wandb_run: Any = None

    def open(self) -> None:
        """Start Weights & Biases, which may refuse, before anything of the run is written.

        A resumed run continues under its first id.
        """
        if self._wandb is None:
            return
        id_file = self.run / "wandb_id"
        known = id_file.read_text() if id_file.exists() else secrets.token_hex(4)
        try:
            self._wandb_run = self._wandb.init(
                project="tide-lm", name=self.run.name, dir=self.run, resume="allow", id=known
            )
        except self._wandb.Error as error:
            raise ValueError(
                f"train.wandb is on, and Weights & Biases does not start: {error}; log in to it, or set "
                "train.wandb to false"
            ) from None
        files.write_atomically(id_file, known)

    def add(self, record: dict[str, Any]) -> None:
        numbers = _numbers({name: value for name, value in record.items() if name != "losses"})
        step = int(numbers.pop("step"))
        if self.tensorboard:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(self.run / "tensorboard", purge_step=step)
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)
            if "sample" in record:
                self._writer.add_text("sample", record["sample"], step)
            self._writer.flush()
        if self._wandb_run is not None:
            self._wandb_run.log(numbers, step=step)

    def close(self) -> None:
        """Send what is left: a process of torchrun ends without Python's usual cleanup."""
        if self._writer is not None:
            self._writer.close()
        if self._wandb_run is not None:
            self._wandb_run.finish()


def _numbers(record: Any, name: str = "") -> dict[str, float]:
    """Flatten the numbers of nested records under names such as `validation/loss_by_decile/0`."""
    if isinstance(record, list):
        record = dict(enumerate(record))
    if isinstance(record, dict):
        found: dict[str, float] = {}
        for key, value in record.items():
            found |= _numbers(value, f"{name}/{key}" if name else key)
        return found
    return {name: record} if isinstance(record, int | float) else {}
