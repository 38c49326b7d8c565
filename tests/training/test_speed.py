import time

import pytest
import torch

from tide_lm.training.speed import Speedometer, progress_line


def test_speed_is_that_of_the_steps_and_the_time_left_that_of_all(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    speed = Speedometer(torch.device("cpu"), flops_per_token=1000)
    for _ in range(4):
        speed.add(tokens=50, seconds=0.5)
    now[0] += 8  # of which 6 went into a checkpoint
    found = speed.take(steps_left=3600)
    assert found["tokens_per_s"] == 100
    assert found["seconds_left"] == 7200
    assert found["mfu"] is None
    assert found["memory_gb"] > 0.05
    speed.add(tokens=50, seconds=1)
    assert speed.take(0)["tokens_per_s"] == 50  # since the last time


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(5, "0:00:05 left"), (7384, "2:03:04 left"), (86_400 * 12 + 61, "12 days, 0:01:01 left")],
)
def test_the_line_says_what_is_known(seconds, shown):
    timing = {"tokens_per_s": 1234.5, "mfu": 0.417, "memory_gb": 3.04, "seconds_left": seconds}
    record = {"step": 10, "loss": 2.5, "learning_rate": 1e-4, "timing": timing}
    line = progress_line(record, 1000)
    assert line == f"step 10/1,000  loss 2.5000  lr 1.00e-04  1,234 tokens/s  MFU 41.7%  3.0 GB  {shown}"
    record |= {"loss": None, "validation": {"loss": 3.0}, "timing": timing | {"mfu": None}}
    line = progress_line(record, 1000)
    assert "loss not finite" in line
    assert "MFU" not in line
    assert line.endswith("validation 3.0000")
