"""What all benchmarks share: the device, its clock, and models with random weights."""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig


def device(name: str | None = None) -> torch.device:
    """Return the device of this name, which becomes the current GPU if it is one; or the usual one."""
    found = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if found.type == "cuda" and found.index is not None:
        torch.cuda.set_device(found)
    return found


def now() -> float:
    """Return the time in seconds when all work on the device so far is done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def seconds(work: Callable[[], Any]) -> float:
    began = now()
    work()
    return now() - began


def forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_gb() -> float | None:
    """Return the most GPU memory that was used since `forget_peak`."""
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None


@torch.no_grad()
def random_weights(
    kind: Any, config: PreTrainedConfig, dtype: torch.dtype = torch.float32, on: torch.device | None = None
) -> Any:
    """Make a model with weights drawn on the device, which is fast."""
    on = on or device()
    with torch.device("meta"):
        model = kind(config).to(dtype)
    model.to_empty(device=on)
    model.tie_weights()
    for name, parameter in model.named_parameters():
        parameter.fill_(1) if "norm" in name else parameter.normal_(0, config.initializer_range)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(on)
    return model
