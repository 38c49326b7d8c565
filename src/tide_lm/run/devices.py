"""The devices that a model can run on."""

import ctypes
import re
import sys
from pathlib import Path


def check_device(name: str) -> str:
    """Return the name of a device, which must be here."""
    if not re.fullmatch(r"cpu|mps|cuda(:\d{1,2})?", name):
        raise ValueError(f"{name!r} is no device: use cpu, cuda, cuda:1 or mps")
    found = ["cpu"] if name == "cpu" else _devices()
    if name not in found and not (name == "cuda" and "cuda:0" in found):
        raise ValueError(f"{name} is not here: PyTorch finds {', '.join(found)} on this machine")
    return name


def _devices() -> list[str]:
    """List the devices; without torch, which takes seconds to import, where there is no driver of a GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        if sys.platform != "darwin" and not Path("/dev/kfd").exists():
            return ["cpu"]
    import torch

    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return ["cpu", *gpus, *(["mps"] if torch.backends.mps.is_available() else [])]
