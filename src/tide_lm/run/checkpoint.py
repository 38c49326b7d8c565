"""Checkpoints of a run: tensors in safetensors, all else in state.json, and a manifest written last.

A checkpoint gets its name when it is complete. The manifest has the size and checksum of every other file,
so that a checkpoint that was cut short or changed is found.
"""

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from tide_lm.run import files, process_group

MANIFEST = "manifest.json"
STATE = "state.json"


class DamagedCheckpointError(ValueError):
    """A checkpoint that was cut short or changed."""


def save(checkpoints: Path, step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> Path:
    """Write `checkpoints/<step>/`, whole or not at all; all ranks take part, each with its own file."""
    final = at(checkpoints, step)
    with process_group.open_on_first(lambda: files.write_folder(final)) as folder:
        with _plain_errors(final):
            writer = HuggingFaceStorageWriter(str(folder), save_distributed=process_group.is_distributed())
            dcp.save(tensors, storage_writer=writer, no_dist=not process_group.is_distributed())
        own = f"shard-{process_group.rank() + 1:05d}-*" if process_group.is_distributed() else "*"
        described = process_group.all_gather({path.name: _describe(path) for path in folder.glob(own)})
        if process_group.is_first():
            (folder / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
            written = {name: file for some in described for name, file in some.items()}
            written[STATE] = _describe(folder / STATE)
            # No newline at its end: a manifest that lacks its last byte must not be readable.
            (folder / MANIFEST).write_text(json.dumps(written, indent=2), encoding="utf-8")
    return final


def load(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill tensors, all or some of those saved, from a folder of safetensors files; all ranks take part."""
    with _plain_errors(folder):
        reader = HuggingFaceStorageReader(str(folder))
        dcp.load(tensors, storage_reader=reader, no_dist=not process_group.is_distributed())


def read_state(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / STATE).read_text(encoding="utf-8"))


def steps(checkpoints: Path) -> list[int]:
    """Return the steps that have a checkpoint, whole or not."""
    return sorted(int(path.name) for path in _finished(checkpoints))


def at(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"{step:08d}"


def newest(checkpoints: Path, log: Callable[[str], None]) -> Path | None:
    """Return the newest whole checkpoint, or None if there is no checkpoint.

    Damaged checkpoints are logged and passed over; if all are damaged, that is an error.
    """
    found = process_group.run_on_first(lambda: sorted(_finished(checkpoints), reverse=True))
    for path in found:
        fault = find_fault(path)
        if fault is None:
            return path
        log(f"{path} is damaged ({fault}): passed over")
    if found:
        raise ValueError(
            f"every checkpoint in {checkpoints} is damaged: put one back, or remove them to begin again"
        )
    return None


def remove_after(checkpoints: Path, step: int) -> None:
    """Remove checkpoints of later steps, and what a killed process left half-written."""
    for path in checkpoints.glob(".*.tmp"):
        shutil.rmtree(path)
    for path in _finished(checkpoints):
        if int(path.name) > step:
            _remove(path)


def find_fault(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None; each rank checks its share of the files."""
    faults = process_group.all_gather(_find_fault(checkpoint))
    return next((fault for fault in faults if fault is not None), None)


def _find_fault(checkpoint: Path) -> str | None:
    try:
        listed = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        if STATE not in listed:
            return f"{MANIFEST} does not name {STATE}"
        for name, expected in list(listed.items())[process_group.rank() :: process_group.world_size()]:
            path = checkpoint / name
            if not path.exists():
                return f"{name} is missing"
            if _describe(path) != expected:
                return f"{name} is not as it was written"
    except (OSError, ValueError, AttributeError, TypeError):
        return f"{MANIFEST} cannot be read"
    return None


def prune(checkpoints: Path, keep: int, keep_every: int) -> None:
    """Remove all checkpoints but the newest `keep` and those at multiples of `keep_every` steps."""
    for path in sorted(_finished(checkpoints))[: -keep or None]:
        if not keep_every or int(path.name) % keep_every:
            _remove(path)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint, its name first: a process killed meanwhile leaves nothing that looks like one."""
    shutil.rmtree(checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.removed.tmp")))


def _finished(checkpoints: Path) -> list[Path]:
    return [path for path in checkpoints.glob("[0-9]*") if path.is_dir() and path.name.isdigit()]


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


@contextmanager
def _plain_errors(checkpoint: Path) -> Iterator[None]:
    """Raise errors that name the checkpoint and the cause, and hide torch's warning about one process."""
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise OSError(f"{checkpoint}: {cause}") from error
