"""What a result records so that it can be repeated: versions, machine, commit, seed, command."""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tide_lm.run.files import make_folder, write_atomically

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton")


def write_record(
    path: Path, result: Mapping[str, Any], seed: int | None = None, command: str | None = None
) -> None:
    """Write a result and its provenance as JSON."""
    make_folder(path.parent)
    record = {**result, "provenance": provenance(seed, command)}
    write_atomically(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def provenance(seed: int | None = None, command: str | None = None) -> dict[str, Any]:
    """Return versions, machine, commit, seed and the exact command: this process's, unless one is given."""
    return {
        "command": command or shlex.join([*_program(Path(sys.argv[0])), *sys.argv[1:]]),
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
    """Return what was called: the file, or the package whose `__main__` it is."""
    if path.name == "tide-lm" or path.parts[-2:] == ("tide_lm", "__main__.py"):
        return ["tide-lm"]
    return ["python", "-m", path.parent.name] if path.name == "__main__.py" else ["python", str(path)]


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, without importing it."""
    from importlib import metadata  # slow, and not needed by every command

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def gpu_names() -> list[str]:
    """Return the names of this machine's NVIDIA GPUs."""
    return (_printed_by("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "").splitlines()


def cpu_name() -> str:
    """Return the processor's name; lscpu knows it even if /proc/cpuinfo does not."""
    found = re.search(r"Model name:\s*(.+)", _printed_by("lscpu") or "")
    return found[1] if found else platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit of the source tree, with `+` if files were changed; None outside of one."""
    here = Path(__file__)
    git = "git", "-C", str(here.parent)
    commit, changes = _printed_by(*git, "rev-parse", "HEAD"), _printed_by(*git, "status", "--porcelain")
    is_tracked = _printed_by(*git, "ls-files", "--error-unmatch", here.name)  # or in another project's tree
    return commit.strip() + ("+" if changes else "") if commit and is_tracked else None


def _printed_by(*command: str) -> str | None:
    """Return what a command prints; None if it fails, or is not on this machine."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
