"""What this machine has, and what it lacks for TIDE."""

import os
import platform
import re
import shutil
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from tide_lm import __version__
from tide_lm.run.provenance import cpu_name, installed_version

_FOR_DEVELOPERS = {"dev", "docs", "test"}  # extras
_PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"  # of a source tree


def examine() -> dict[str, Any]:
    """Return versions, processor, GPUs and disk; `problems` names what is missing or too old.

    `extras` names the extra of each package that belongs to one.
    """
    required, extras = _requirements()
    names = dict.fromkeys([*(each.name for each in required), *extras, "triton"])
    packages = {name: installed_version(name) for name in names}
    problems = [
        f"{each.name} {packages[each.name] or 'is missing'}: install {each}"
        for each in required
        # What is not for every kind of machine can be done without.
        if each.marker is None and Version(packages[each.name] or "0").base_version not in each.specifier
    ]
    if not required:
        problems = [
            f"tide-lm is not installed and there is no {_PYPROJECT}, so its requirements are unknown: "
            "install it"
        ]
    return {
        "tide_lm": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": {"name": cpu_name(), "cores": os.cpu_count(), "memory_bytes": _memory_bytes()},
        "gpus": _gpus() if installed_version("torch") else [],
        "cpp_compiler": shutil.which("g++") or shutil.which("clang++"),
        "disk_free_bytes": shutil.disk_usage(Path.cwd()).free,
        "packages": packages,
        "extras": extras,
        "problems": problems,
    }


def _requirements() -> tuple[list[Requirement], dict[str, str]]:
    """Return what the package requires, and the smallest extra of each package that only extras bring."""
    declared = [Requirement(line) for line in _declared()]
    required = [each for each in declared if "extra" not in str(each.marker)]
    members: dict[str, list[str]] = {}
    for each in declared:
        for extra in re.findall('extra == "(.+)"', str(each.marker)):
            members.setdefault(extra, []).append(each.name)
    largest_first = sorted(members.keys() - _FOR_DEVELOPERS, key=lambda extra: (-len(members[extra]), extra))
    extras = {name: extra for extra in largest_first for name in members[extra]}
    without = {"tide-lm", *(each.name for each in required)}
    return required, {name: extra for name, extra in extras.items() if name not in without}


def _declared() -> list[str]:
    """Return what the installed package declares, or the source tree that runs without being installed."""
    try:
        return metadata.requires("tide-lm") or []
    except metadata.PackageNotFoundError:
        pass
    try:
        project = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8"))["project"]
    except FileNotFoundError:
        return []
    lines = list(project["dependencies"])
    for extra, members in project["optional-dependencies"].items():
        for line in members:
            requirement, _, marker = line.partition(";")
            lines.append(f"{requirement}; {f'({marker}) and ' if marker else ''}extra == '{extra}'")
    return lines


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gpus() -> list[dict[str, Any]]:
    import torch

    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {"name": gpu.name, "memory_bytes": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"}
        for gpu in found
    ]
