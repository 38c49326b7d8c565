"""Packages of the extras, imported only when they are needed."""

import importlib
from typing import Any


def require(module: str, use: str, extra: str = "data") -> Any:
    """Import a module; if it is missing, raise an error that names its `use` and the install command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(
            f"{use} needs the package {package} ({error}): pip install -e '.[{extra}]' in the checkout"
        ) from error
