"""Checkpoints of a run: tensors in safetensors, all else in state.json, and a manifest written last.

A checkpoint is made under a temporary name and renamed when it is complete. One that was cut short or
damaged is told by its manifest, which holds size and checksum of every other file.
"""

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from tide_lm import runs

MANIFEST = "manifest.json"
STATE = "state.json"


def save(checkpoints: Path, step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> Path:
    """Writes `checkpoints/<step>/`, whole or not at all."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    final, temporary = checkpoints / f"{step:08d}", checkpoints / f".{step:08d}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        with _quiet():
            dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(temporary)), no_dist=True)
        (temporary / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        files = {path.name: _describe(path) for path in sorted(temporary.iterdir())}
        # No newline at its end: a manifest that lacks its last byte must not be readable.
        (temporary / MANIFEST).write_text(json.dumps(files, indent=2), encoding="utf-8")
        for path in [*temporary.iterdir(), temporary]:
            runs.sync(path)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        runs.sync(checkpoints)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def load(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Fills the given tensors in place and returns the state."""
    with _quiet():
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(checkpoint)), no_dist=True)
    return json.loads((checkpoint / STATE).read_text(encoding="utf-8"))


def newest(checkpoints: Path, tell: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole; damaged ones are named through `tell` and passed over."""
    for path in sorted(_finished(checkpoints), reverse=True):
        fault = find_fault(path)
        if fault is None:
            return path
        tell(f"{path} is damaged ({fault}): using the one before it")
    return None


def find_fault(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        for name, expected in files.items():
            path = checkpoint / name
            if not path.exists():
                return f"{name} is missing"
            if _describe(path) != expected:
                return f"{name} is not as it was written"
    except (OSError, ValueError, AttributeError, TypeError):
        return f"{MANIFEST} cannot be read"
    return None


def prune(checkpoints: Path, keep: int, keep_every: int) -> None:
    """Removes all but the newest `keep`, and those at multiples of `keep_every` steps."""
    for path in sorted(_finished(checkpoints))[: -keep or None]:
        if not keep_every or int(path.name) % keep_every:
            shutil.rmtree(path)


def _finished(checkpoints: Path) -> list[Path]:
    return [path for path in checkpoints.glob("[0-9]*") if path.is_dir() and path.name.isdigit()]


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _quiet() -> warnings.catch_warnings:
    """Without torch's remark that a single process saves and loads alone."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
