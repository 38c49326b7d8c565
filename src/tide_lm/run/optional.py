"""Packages of the extras, imported only when they are needed, and how to install them."""

import importlib
import json
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

# What others can do who were only given a model: the package is on no index, and paths of here are private.
ELSEWHERE = "`pip install .` in a clone of tide-lm's repository"
_TREE = Path(__file__).parents[3]


def require(module: str, use: str, extra: str = "data") -> Any:
    """Import a module; if it is missing, raise an error that names its `use` and the install command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(f"{use} needs the package {package} ({error}): {install(extra)}") from error


def install(extra: str) -> str:
    """Return the command that adds an extra to this package, from where it was installed."""
    try:
        record = json.loads(metadata.distribution("tide-lm").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:  # a source tree that runs without being installed
        record = {"url": _TREE.as_uri(), "dir_info": {"editable": True}}
    url = record.get("url")
    if "dir_info" in record:
        editable = "-e " if record["dir_info"].get("editable") else ""
        return f"pip install {editable}'{unquote(urlsplit(url).path)}[{extra}]'"
    if "vcs_info" in record:
        url = f"{record['vcs_info']['vcs']}+{url}@{record['vcs_info']['commit_id']}"
    return f"pip install 'tide-lm[{extra}]{f' @ {url}' if url else ''}'"
