"""The run directory: what is in it, and results that are added to it."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tide_lm.run import hub, torchrun
from tide_lm.run.files import locked, make_folder, write_atomically
from tide_lm.run.provenance import write_record
from tide_lm.run.settings import RunConfig
from tide_lm.spec.names import suggestion


def write_result(
    run: Path, what: str, result: dict[str, Any], seed: int | None = None, command: str | None = None
) -> Path:
    """Write `results/<what>.json` of a run directory, with its provenance."""
    path = results_folder(run) / f"{what}.json"
    write_record(path, result, seed, command)
    return path


def results_folder(run: Path) -> Path:
    """Return the folder of results, and make it if need be."""
    return make_folder(run / "results")


def check_exists(model: str) -> None:
    """Check that there is a model of this name, here or maybe on the Hub, before anything is loaded."""
    path = Path(model)
    if not model:
        raise ValueError("the model's name is empty: give a run, or the folder of a model")
    if not path.exists():
        hint = hint_for(model)
        if not hub.may_be_name(model):
            raise ValueError(f"there is no {model}: {hint}")
        hub.check(model, hint)
        return
    if not path.is_dir():
        raise ValueError(f"{model} is a file: give a run, or the folder of a model")
    owner, step = owning_run(model)
    if owner is not None:
        run = RunDirectory(owner)
        if step is None and not run.export.is_dir() and not any(run.checkpoints.glob("*")):
            raise ValueError(f"{owner} has no checkpoint yet: train it")
        return
    config = path / "config.json"
    if not config.exists():
        inner = sorted(str(file.parent) for file in path.glob("*/config.json"))
        cure = f"choose one of {', '.join(inner)}" if inner else "give a run, or the folder of a model"
        raise ValueError(f"{model} has no config.json, so it is no model: {cure}")
    if not isinstance(values := _values(config), dict) or "model_type" not in values:
        raise ValueError(f"{config} describes neither a run nor a model: restore it, or give another folder")


def hint_for(
    missing: str, otherwise: str = "give a run, one of its checkpoints, or a folder with a model"
) -> str:
    """Ask for the folder that a mistyped path may mean, or say `otherwise`."""
    places = [*Path(missing).parent.glob("*"), *Path().glob("runs/*")]
    return suggestion(missing, sorted({str(place) for place in places if place.is_dir()}), otherwise)


def owning_run(model: str) -> tuple[Path | None, int | None]:
    """Return the run that a path is, or whose export or checkpoint it is, and the checkpoint's step."""
    path = Path(model)
    if _is_run(path):
        return path, None
    if path.name == "export" and _is_run(path.parent):
        return path.parent, None
    if path.name.isdigit() and path.parent.name == "checkpoints" and _is_run(path.parent.parent):
        return path.parent.parent, int(path.name)
    return None, None


def place_of_results(model: str, run: Path | None = None) -> Path:
    """Return the folder whose results/ a model fills: the one given, its run, or runs/NAME."""
    return run or owning_run(model)[0] or Path("runs") / name_of(model)


def name_of(model: str) -> str:
    path = Path(owning_run(model)[0] or model)
    return path.resolve().name if path.exists() else model.replace("/", "--")


def check_results(place: Path, model: str) -> None:
    """Check that a place has no results of another model."""
    for file in (place / "results").glob("*.json"):
        try:
            other = json.loads(file.read_text(encoding="utf-8"))["subject"]["model"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if not are_one(other, model):
            raise ValueError(
                f"{place} holds results of {other}, such as {file.name}: give another place for {model} with "
                "--run, or remove them"
            )


def are_one(other: str, model: str) -> bool:
    """Tell whether two paths are of one model; a run may have been moved or copied since."""
    ours, theirs = owning_run(model)[0], owning_run(other)[0]
    if ours is None:
        return Path(other).resolve() == Path(model).resolve()
    if theirs is None:
        return not Path(other).exists()
    return _values(ours / "config.json") == _values(theirs / "config.json")


def _is_run(folder: Path) -> bool:
    values = _values(folder / "config.json")
    return isinstance(values, dict) and {"model", "data", "optim", "train"} <= values.keys()


def _values(file: Path) -> Any:
    """Return what a JSON file holds, None if it cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


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
        self._lock = path / "lock"
        self._busy = f"{path} is in use by another trainer: wait for it, or stop it"

    def check_unused(self) -> None:
        """Check that no trainer is at work here."""
        if self._lock.exists():
            with locked(self._lock, self._busy):
                pass

    def check_free(self, resume: bool) -> None:
        """Check that a run that is not to be resumed finds no other, and no results of another model."""
        if resume:
            return
        if self.config.exists() or any(self.checkpoints.glob("[0-9]*")):
            raise ValueError(f"{self.path} holds a run already: add --resume, or choose another --run")
        check_results(self.path, str(self.path))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other trainers out for the length of the context."""
        make_folder(self.path)
        # A shared disk may keep the lock of a machine that died for a while.
        with locked(self._lock, self._busy, patience=120 if torchrun.restarted() else 0):
            yield

    def add_metrics(self, record: dict[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def settings(
        self,
        file: Path | None = None,
        overrides: Sequence[str | Mapping[str, Any]] = (),
        start: Path | None = None,
        resume: bool = False,
    ) -> RunConfig:
        """Return the settings of a run to begin or to `resume`; `start` is a model or a run to start from."""
        before = self.read_config() if resume else None
        if start is not None:
            overrides = [*overrides, {"model.start": exported(str(start))}]
        if resume and before is None and file is None and not overrides:
            if self.checkpoints.exists():
                raise ValueError(f"{self.path} has checkpoints and no config.json: give its settings again")
            raise ValueError(f"there is no run in {self.path} to resume: name it with --run")
        return RunConfig.load(file, overrides, before)

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
