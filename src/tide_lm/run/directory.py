"""The run directory: what is in it, and results that are added to it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tide_lm.run.files import locked, write_atomically
from tide_lm.run.provenance import write_record


def write_result(run: Path, what: str, result: dict[str, Any], seed: int | None = None) -> Path:
    """Write `results/<what>.json` of a run directory, with its provenance."""
    path = results_folder(run) / f"{what}.json"
    write_record(path, result, seed)
    return path


def results_folder(run: Path) -> Path:
    """Return the folder of results, and make it if need be; long work calls this before it starts."""
    folder = run / "results"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_exists(model: str) -> None:
    """Check that a model exists here, unless its name may be one on the Hub: NAME, or OWNER/NAME."""
    path = Path(model)
    if not path.exists() and (len(path.parts) > 2 or (len(path.parts) == 2 and path.parent.exists())):
        raise ValueError(f"there is no {model}: give a run, one of its checkpoints, or a folder with a model")


def exported(model: str) -> str:
    """Return the export of a run, which must have ended; return any other name unchanged."""
    run = RunDirectory(Path(model))
    if run.checkpoints.is_dir() and not run.export.is_dir():
        raise ValueError(f"{model} is a run that has not ended: finish it, or give a folder with a model")
    return str(run.export) if run.export.is_dir() else model


class RunDirectory:
    """A run's folder: config.json, metrics.jsonl, checkpoints/, results/ and export/.

    `start/` has the configuration of the model that the run started from, if any.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.metrics = path / "config.json", path / "metrics.jsonl"
        self.checkpoints, self.export = path / "checkpoints", path / "export"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other trainers out for the length of the context."""
        self.path.mkdir(parents=True, exist_ok=True)
        busy = f"{self.path} is in use by another trainer: wait for it, or stop it"
        # A shared disk may keep the lock of a machine that died for a while.
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        with locked(self.path / "lock", busy, patience=120 if restarted else 0):
            yield

    def add_metrics(self, record: dict[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read_config(self) -> dict[str, Any] | None:
        """Return the settings of the run, or None if there is none.

        If the model that it started from is gone, its configuration in this folder takes its place.
        """
        try:
            values = json.loads(self.config.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"{self.config} cannot be read ({error}): restore it") from error
        if not isinstance(values, dict):
            raise ValueError(f"{self.config} is {values!r:.40}, and no settings of a run: restore it")
        model = values.get("model")
        start = model.get("start") if isinstance(model, dict) else None
        if model and start and not Path(start, "config.json").is_file():
            kept = self.start_of(start)
            model["start"] = str(kept) if kept.is_dir() else start
        return values

    def start_of(self, folder: str) -> Path:
        return self.path / "start" / Path(folder).name

    def last_metrics(self) -> dict[str, Any]:
        """Return the newest record, empty if there is none."""
        lines = self.metrics.read_text(encoding="utf-8").split("\n")[:-1] if self.metrics.exists() else []
        return json.loads(lines[-1]) if lines else {}

    def cut_metrics(self, last_step: int) -> None:
        """Remove records after a checkpoint's step, and half a last line: training will write them again."""
        if self.metrics.exists():
            complete = self.metrics.read_text(encoding="utf-8").split("\n")[:-1]
            try:
                kept = [line for line in complete if json.loads(line)["step"] <= last_step]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{self.metrics} has a line that is no record of a step ({error}): remove the line"
                ) from error
            write_atomically(self.metrics, "".join(f"{line}\n" for line in kept))
