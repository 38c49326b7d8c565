"""What a run leaves behind: results that are written whole or not at all, and say how to repeat them."""

import fcntl
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes under a temporary name, syncs, then renames."""
    with _written_whole(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def copy_atomically(source: Path, path: Path) -> None:
    """Copies a file under a temporary name, syncs, then renames."""
    with _written_whole(path) as temporary:
        shutil.copyfile(source, temporary)


@contextmanager
def _written_whole(path: Path) -> Iterator[Path]:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Waits until a file, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def write_folder(final: Path) -> Iterator[Path]:
    """A folder to fill under a temporary name; synced, it takes the place of `final`, or is removed."""
    temporary = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        publish(temporary, final)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(final)) from error  # writing names no file
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(folder: Path, final: Path) -> None:
    """Syncs all of a folder, then gives it its name, in the place of what has it."""
    mask = os.umask(0)
    os.umask(mask)
    for path in (*folder.rglob("*"), folder):
        if path.is_file():
            path.chmod(0o666 & ~mask)  # some libraries write what only its owner may read
        sync(path)
    before = final.with_name(f".{final.name}.before.tmp")
    shutil.rmtree(before, ignore_errors=True)
    if final.exists():
        final.rename(before)
    folder.rename(final)
    sync(final.parent)
    shutil.rmtree(before, ignore_errors=True)


@contextmanager
def locked(path: Path, busy: str, patience: float = 0) -> Iterator[None]:
    """Holds a lock file for as long as this process lives, however it ends.

    `busy` is said to another, after so many seconds of patience. The file is removed in the end.
    """
    given_up = time.monotonic() + patience
    while True:
        with path.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= given_up:
                    raise ValueError(busy) from None
                time.sleep(0.5)
                continue
            if not os.fstat(file.fileno()).st_nlink:  # its last holder removed it after it was opened here
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


@contextmanager
def claimed(out: Path, work: str) -> Iterator[None]:
    """Checks that `out` is free, and keeps others that do the same `work`, as in "prepared", from it."""
    check_free(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    busy = f"{out} is being {work} by another process: wait for it, or choose another --out"
    with locked(out.with_name(f".{out.name}.lock"), busy):
        check_free(out)  # again, since another may have made it meanwhile
        try:
            yield
        except OSError as error:
            if error.errno is not None and error.filename is None:
                error.filename = str(out)  # a full disk does not say where
            raise


def check_free(out: Path) -> None:
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: remove it, or choose another --out")


def write_result(run: Path, what: str, result: dict[str, Any], seed: int | None = None) -> Path:
    """Writes `results/<what>.json` of a run directory, with all that is needed to get it again."""
    path = results_folder(run) / f"{what}.json"
    write_record(path, result, seed)
    return path


def write_record(path: Path, result: Mapping[str, Any], seed: int | None = None) -> None:
    """Writes what was measured, and how, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {**result, "provenance": provenance(seed)}
    write_atomically(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


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


def provenance(seed: int | None = None) -> dict[str, Any]:
    """Versions, machine, commit, seed and the exact command."""
    return {
        "command": shlex.join([*_program(Path(sys.argv[0])), *sys.argv[1:]]),
        "seed": seed,
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := installed_version(name))},
        "machine": {
            "system": platform.platform(),
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "gpus": gpu_names(),
        },
    }


def _program(path: Path) -> list[str]:
    """What was called: the file, or the package that it is the main part of."""
    if path.name == "tide-lm" or path.parts[-2:] == ("tide_lm", "__main__.py"):
        return ["tide-lm"]
    return ["python", "-m", path.parent.name] if path.name == "__main__.py" else ["python", str(path)]


def installed_version(package: str) -> str | None:
    """The version of an installed package, without importing it."""
    from importlib import metadata  # not for commands that only calculate

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def gpu_names() -> list[str]:
    """The NVIDIA GPUs of this machine."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    except (OSError, subprocess.CalledProcessError):
        return []


def cpu_name() -> str:
    """The processor's name; lscpu knows it where /proc/cpuinfo does not."""
    try:
        listing = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
        return next(line.split(":", 1)[1].strip() for line in listing.splitlines() if "Model name" in line)
    except (OSError, subprocess.CalledProcessError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the source tree this code runs from, if it is one, with `+` if it was changed."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # installed inside another project's tree?
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
