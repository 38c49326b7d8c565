"""Packages of the extras, imported where they are needed."""

import importlib
from typing import Any


def require(module: str, use: str, extra: str = "data") -> Any:
    """The module, or an error that names what needs it and the install command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(
            f"{use} needs the package {package} ({error}): pip install 'tide-lm[{extra}]'"
        ) from error
