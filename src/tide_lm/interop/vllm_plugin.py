"""TIDE models in vLLM: what its entry point `vllm.general_plugins` calls, in each of its processes."""

import logging

KNOWN = ("0.32",)  # versions of vLLM that the model was written for


def register() -> None:
    """Tells transformers and vLLM of TIDE; the model's own module is imported when one is loaded."""
    from transformers import AutoConfig
    from vllm import ModelRegistry, __version__

    from tide_lm.pretrained import TideConfig

    if not __version__.startswith(tuple(f"{known}." for known in KNOWN)):
        logging.getLogger("vllm.tide_lm").warning(
            "tide-lm knows vLLM %s, and this is %s: if a TIDE model does not load, install one of those",
            ", ".join(KNOWN),
            __version__,
        )
    AutoConfig.register("tide", TideConfig, exist_ok=True)
    ModelRegistry.register_model("TideForCausalLM", "tide_lm.interop.vllm_model:TideForCausalLM")
