"""Lets transformers find TIDE with `trust_remote_code=True`. All code is in the package tide-lm."""

try:
    from tide_lm.model import TideConfig, TideForCausalLM, TideModel  # noqa: F401
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "tide_lm":
        raise
    raise ModuleNotFoundError("this is a TIDE model, which needs: pip install tide-lm") from error
