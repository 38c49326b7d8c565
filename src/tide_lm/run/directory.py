"""The folder of a run: what is in it, and results that are added to it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tide_lm.run.files import locked, write_atomically
from tide_lm.run.provenance import write_record


def write_result(run: Path, what: str, result: dict[str, Any], seed: int | None = None) -> Path:
    """Writes `results/<what>.json` of a run directory, with all that is needed to get it again."""
    path = results_folder(run) / f"{what}.json"
    write_record(path, result, seed)
    return path


def results_folder(run: Path) -> Path:
    """The folder of a run's results, made if need be: long work calls this before it starts."""
    folder = run / "results"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_exists(model: str) -> None:
    """A name on the Hub is at most OWNER/NAME, and its owner is no folder here."""
    path = Path(model)
    if not path.exists() and (len(path.parts) > 2 or (len(path.parts) == 2 and path.parent.exists())):
        raise ValueError(f"there is no {model}: give a run, a checkpoint of one, or a folder with a model")


def exported(model: str) -> str:
    """The export of a run that has ended; what is no run stays as it is named."""
    run = RunDirectory(Path(model))
    if run.checkpoints.is_dir() and not run.export.is_dir():
        raise ValueError(f"{model} is a run that has not ended: let it end, or give a folder with a model")
    return str(run.export) if run.export.is_dir() else model


class RunDirectory:
    """A run's folder: config.json, metrics.jsonl, checkpoints/, results/ and export/.

    `start/` has the configuration of the model that a run started from, if there was one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.metrics = path / "config.json", path / "metrics.jsonl"
        self.checkpoints, self.export = path / "checkpoints", path / "export"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps a second trainer out for as long as this one lives, however it ends."""
        self.path.mkdir(parents=True, exist_ok=True)
        busy = f"{self.path} is in use by another trainer: wait for it, or stop it"
        # A shared disk may hold the lock of a machine that died for a while.
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        with locked(self.path / "lock", busy, patience=120 if restarted else 0):
            yield

    def add_metrics(self, record: dict[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read_config(self) -> dict[str, Any] | None:
        """The settings the run was started with, or None where there is no run.

        If the model that it started from is not there any more, its configuration is here.
        """
        try:
            values = json.loads(self.config.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"{self.config} cannot be read ({error}): put it back") from error
        model = values.get("model") if isinstance(values, dict) else None
        start = model.get("start") if isinstance(model, dict) else None
        if model and start and not Path(start, "config.json").is_file():
            kept = self.start_of(start)
            model["start"] = str(kept) if kept.is_dir() else start
        return values

    def start_of(self, folder: str) -> Path:
        return self.path / "start" / Path(folder).name

    def last_metrics(self) -> dict[str, Any]:
        """The newest record, empty if there is none."""
        lines = self.metrics.read_text(encoding="utf-8").split("\n")[:-1] if self.metrics.exists() else []
        return json.loads(lines[-1]) if lines else {}

    def cut_metrics(self, last_step: int) -> None:
        """Forgets what was written after a checkpoint, half a last line included: it will come again."""
        if self.metrics.exists():
            complete = self.metrics.read_text(encoding="utf-8").split("\n")[:-1]
            try:
                kept = [line for line in complete if json.loads(line)["step"] <= last_step]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{self.metrics} holds a line that is no record of a step ({error}): remove it"
                ) from error
            write_atomically(self.metrics, "".join(f"{line}\n" for line in kept))
