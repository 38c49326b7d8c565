"""TIDE models in vLLM: what its entry point `vllm.general_plugins` calls, in each of its processes."""

import logging
from typing import Any

KNOWN = ("0.32",)  # versions of vLLM that the model was written for
_LOG = logging.getLogger("vllm.tide_lm")


def register() -> None:
    """Register TIDE with transformers and vLLM. A failure here must not keep vLLM from other models."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    try:
        from tide_lm.model.config import TideConfig
    except ImportError as error:
        _LOG.warning("tide-lm is left out: %s", error)
        return
    AutoConfig.register("tide", TideConfig, exist_ok=True)
    ModelRegistry.register_model("TideForCausalLM", f"{__name__}:TideForCausalLM")


def __getattr__(name: str) -> Any:
    """Import the model when vLLM asks for it."""
    if name != "TideForCausalLM":
        raise AttributeError(name)
    from vllm import __version__

    versions = f"tide-lm knows vLLM {', '.join(KNOWN)}, and this is {__version__}"
    if not __version__.startswith(tuple(f"{known}." for known in KNOWN)):
        _LOG.warning("%s: if this model does not load, install one of those", versions)
    try:
        from tide_lm.interop.vllm_model import TideForCausalLM
    except ImportError as error:
        raise ImportError(f"{versions}: install one of those ({error})") from error
    return TideForCausalLM
