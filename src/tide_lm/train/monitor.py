"""A run's numbers where people watch them: TensorBoard, and Weights & Biases if asked for."""

from pathlib import Path
from typing import Any


class Monitor:
    """Sends the numbers of each record on; metrics.jsonl stays the source."""

    def __init__(self, run: Path, tensorboard: bool, wandb: bool) -> None:
        self.run, self.tensorboard, self.wandb = run, tensorboard, wandb
        self._writer: Any = None
        self._wandb_run: Any = None

    def add(self, record: dict[str, Any]) -> None:
        numbers = _numbers(record)
        step = numbers.pop("step")
        if self.tensorboard:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(self.run / "tensorboard", purge_step=int(step))
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, int(step))
            self._writer.flush()
        if self.wandb:
            if self._wandb_run is None:
                self._wandb_run = _start_wandb(self.run)
            self._wandb_run.log(numbers, step=int(step))


def _numbers(record: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of nested records under names such as `validation/rare/loss`."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            found |= _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            found[f"{prefix}{key}"] = value
    return found


def _start_wandb(run: Path) -> Any:
    try:
        import wandb
    except ModuleNotFoundError:
        raise ValueError("train.wandb needs Weights & Biases: pip install 'tide-lm[wandb]'") from None
    return wandb.init(project="tide-lm", name=run.name, dir=run, resume="allow", id=run.name)
