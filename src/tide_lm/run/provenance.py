"""What a result records so that it can be repeated: versions, machine, commit, seed, command."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tide_lm.run.files import write_atomically

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton")


def write_record(path: Path, result: Mapping[str, Any], seed: int | None = None) -> None:
    """Write a result and its provenance as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {**result, "provenance": provenance(seed)}
    write_atomically(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def provenance(seed: int | None = None) -> dict[str, Any]:
    """Return versions, machine, commit, seed and the exact command."""
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
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    except (OSError, subprocess.CalledProcessError):
        return []


def cpu_name() -> str:
    """Return the processor's name; lscpu knows it even if /proc/cpuinfo does not."""
    try:
        listing = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
        return next(line.split(":", 1)[1].strip() for line in listing.splitlines() if "Model name" in line)
    except (OSError, subprocess.CalledProcessError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit of the source tree, with `+` if files were changed; None outside of one."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # installed inside another project's tree?
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
