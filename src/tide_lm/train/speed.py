"""How fast a run goes, what it holds, and the line that says so."""

import resource
import sys
import time
from typing import Any

import torch

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}  # dense bfloat16


def peak_flops(device: torch.device) -> float | None:
    """What the device can do a second, where it is known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return next((flops for known, flops in PEAK_FLOPS.items() if known in name), None)


class Speedometer:
    """Speed since the last record, from the seconds that training steps took; and what is left to do.

    The time left counts all that a run does besides: validation, checkpoints, compilation.
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
        """Tokens a second, MFU (None where no peak is known), the most memory held, the time left."""
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
        f"{_duration(timing['seconds_left'])} left",
    ]
    if timing["mfu"] is not None:
        parts.insert(4, f"MFU {timing['mfu']:.1%}")
    if "validation" in record:
        parts.append(f"validation {record['validation']['loss']:.4f}")
    return "  ".join(parts)


def _duration(seconds: int) -> str:
    """Such as 4:05, 2:13:07 or 31 days 0:00:00."""
    days, rest = divmod(seconds, 86_400)
    hours, minutes, seconds = rest // 3600, rest // 60 % 60, rest % 60
    clock = f"{hours}:{minutes:02}:{seconds:02}" if days or hours else f"{minutes}:{seconds:02}"
    return f"{days} days {clock}" if days else clock
