"""Which of an op's two forms runs: plain torch or Triton."""

import importlib.util
import os

import torch

VARIABLE = "TIDE_LM_KERNELS"


def use_triton(tensor: torch.Tensor) -> bool:
    """Tell whether ops on a tensor run in Triton: on a GPU that has it, or as the variable says."""
    choice = os.environ.get(VARIABLE, "")
    if choice not in ("", "reference", "triton"):
        raise ValueError(f"{VARIABLE} is {choice!r}: set it to reference or triton, or leave it unset")
    if choice:
        return choice == "triton"
    return tensor.is_cuda and importlib.util.find_spec("triton") is not None
