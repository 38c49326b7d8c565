"""How fast a run goes, how much memory it takes, and the line that reports both."""

import resource
import sys
import time
from datetime import timedelta
from typing import Any

import torch

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}  # dense bfloat16


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak in FLOP/s, if it is known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return next((flops for known, flops in PEAK_FLOPS.items() if known in name), None)


class Speedometer:
    """Measures the speed of training steps since the last record, and estimates the time left.

    The time left includes all else that a run does: validation, checkpoints, compilation.
    """

    def __init__(self, device: torch.device, flops_per_token: float) -> None:
        self.device, self.flops_per_token = device, flops_per_token
        self.peak = peak_flops(device)
        self._tokens, self._seconds = 0, 0.0
        self._started, self._steps = time.monotonic(), 0

    def add(self, tokens: int, seconds: float) -> None:
        self._tokens += tokens
        self._seconds += seconds
        self._steps += 1

    def take(self, steps_left: int) -> dict[str, Any]:
        """Return tokens/s, MFU (None if the peak is unknown), peak memory and the time left; start anew."""
        speed = self._tokens / self._seconds
        self._tokens, self._seconds = 0, 0.0
        return {
            "tokens_per_s": round(speed, 1),
            "mfu": None if self.peak is None else round(speed * self.flops_per_token / self.peak, 4),
            "memory_gb": round(self._memory() / 1e9, 3),
            "seconds_left": round((time.monotonic() - self._started) / self._steps * steps_left),
        }

    def _memory(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def progress_line(record: dict[str, Any], steps: int) -> str:
    timing = record["timing"]
    parts = [
        f"step {record['step']:,}/{steps:,}",
        f"loss {'not finite' if record['loss'] is None else format(record['loss'], '.4f')}",
        f"lr {record['learning_rate']:.2e}",
        f"{timing['tokens_per_s']:,.0f} tokens/s",
        f"{timing['memory_gb']:.1f} GB",
        f"{timedelta(seconds=timing['seconds_left'])} left",
    ]
    if timing["mfu"] is not None:
        parts.insert(4, f"MFU {timing['mfu']:.1%}")
    if "validation" in record:
        parts.append(f"validation {record['validation']['loss']:.4f}")
    return "  ".join(parts)
