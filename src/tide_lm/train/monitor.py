"""A run's numbers where people watch them: TensorBoard, and Weights & Biases if asked for."""

import importlib.util
import secrets
from pathlib import Path
from typing import Any

from tide_lm.run import files


class Monitor:
    """Sends the numbers of each record on; metrics.jsonl stays the source."""

    def __init__(self, run: Path, tensorboard: bool, wandb: bool) -> None:
        self.run, self.tensorboard, self.wandb = run, tensorboard, wandb
        self._writer: Any = None
        self._wandb_run: Any = None
        if wandb and importlib.util.find_spec("wandb") is None:
            raise ValueError("train.wandb needs Weights & Biases: pip install 'tide-lm[wandb]'")

    def open(self) -> None:
        """Begins what may be refused, before anything of the run is written."""
        if self.wandb:
            self._wandb_run = _start_wandb(self.run)

    def add(self, record: dict[str, Any]) -> None:
        numbers = _numbers(record)
        step = numbers.pop("step")
        if self.tensorboard:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(self.run / "tensorboard", purge_step=int(step))
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, int(step))
            if "sample" in record:
                self._writer.add_text("sample", record["sample"], int(step))
            self._writer.flush()
        if self.wandb:
            self._wandb_run.log(numbers, step=int(step))

    def close(self) -> None:
        """Says that all was sent: a process of torchrun ends without its usual ending."""
        if self._writer is not None:
            self._writer.close()
        if self._wandb_run is not None:
            self._wandb_run.finish()


def _numbers(record: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of nested records under names such as `validation/loss_by_decile/0`."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            found |= _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, list):
            found |= _numbers({str(place): item for place, item in enumerate(value)}, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            found[f"{prefix}{key}"] = value
    return found


def _start_wandb(run: Path) -> Any:
    """A resumed run goes on under the id it was given first."""
    import wandb

    id_file = run / "wandb_id"
    known = id_file.read_text() if id_file.exists() else secrets.token_hex(4)
    try:
        begun = wandb.init(project="tide-lm", name=run.name, dir=run, resume="allow", id=known)
    except wandb.Error as error:
        raise ValueError(f"train.wandb is on, and Weights & Biases does not begin: {error}") from None
    files.write_atomically(id_file, known)
    return begun
