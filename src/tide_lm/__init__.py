"""TIDE: Token Identity Delivered Everywhere.

Importing this package is cheap. Its names load torch and transformers when they are first used, and
transformers' Auto classes learn of the model type `tide` without either being loaded.
"""

import importlib
import importlib.util
import sys
from typing import Any

__version__ = "0.2.0"

_HOMES = {
    "EmbeddingMemory": "tide_lm.model",
    "Memory": "tide_lm.model",
    "MemoryRouter": "tide_lm.model",
    "TideConfig": "tide_lm.model",
    "TideDecoderLayer": "tide_lm.model",
    "TideForCausalLM": "tide_lm.model",
    "TideModel": "tide_lm.model",
    "analyze": "tide_lm.api",
    "evaluate": "tide_lm.api",
    "load": "tide_lm.api",
    "pack": "tide_lm.api",
    "param_groups": "tide_lm.api",
    "train": "tide_lm.api",
    "upcycle": "tide_lm.api",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


class _TideConfigOnDemand:
    """What AutoConfig holds until the first TIDE folder is opened; `tide_lm.model` then replaces it."""

    model_type = "tide"

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return __getattr__("TideConfig")(*args, **kwargs)

    @staticmethod
    def from_dict(*args: Any, **kwargs: Any) -> Any:
        return __getattr__("TideConfig").from_dict(*args, **kwargs)


class _AutoConfigHook:
    """Registers the model type as soon as transformers defines AutoConfig."""

    module = "transformers.models.auto.configuration_auto"

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.module:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: Any) -> None:
                execute(module)
                if module.__name__ == self.module:  # a loader may serve several modules
                    _register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register(configuration_auto: Any) -> None:
    # Should transformers ever know a model type `tide` of its own, importing it must not fail here.
    configuration_auto.AutoConfig.register("tide", _TideConfigOnDemand, exist_ok=True)


if _AutoConfigHook.module in sys.modules:
    _register(importlib.import_module(_AutoConfigHook.module))  # waits if another thread is importing it
else:
    sys.meta_path.insert(0, _AutoConfigHook())
