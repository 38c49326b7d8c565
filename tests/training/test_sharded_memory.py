"""Rows come from their owners and gradients return there: among threads, and processes."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from training import sharded_memory as script

from tide_lm.run import process_group
from tide_lm.training import exchange, sharded_memory


@pytest.fixture
def two_threads(monkeypatch):
    """Stands in for a group of two processes: each thread is a rank, and what they send meets in a list."""
    own, sent = threading.local(), [None, None]
    meeting = threading.Barrier(2, timeout=600)

    def from_all(value) -> list:
        sent[own.rank] = value
        meeting.wait()
        values = list(sent)
        meeting.wait()
        return values

    def all_to_all_single(output, given, received_sizes=None, given_sizes=None) -> None:
        parts = from_all(given.split(given_sizes or len(given) // 2))
        received = [part[own.rank] for part in parts]
        assert received_sizes in (None, [len(part) for part in received])
        output.copy_(torch.cat(received))

    @dataclass
    class Whole:
        """A tensor of which each rank has a range, as DTensor has it."""

        local: torch.Tensor
        shape: torch.Size

        @classmethod
        def from_local(cls, local, mesh, placements, shape, stride) -> "Whole":
            return cls(local, shape)

        def to_local(self) -> torch.Tensor:
            return self.local

        def full_tensor(self) -> torch.Tensor:
            return torch.cat(from_all(self.local))

    monkeypatch.setattr(process_group, "rank", lambda: own.rank)
    monkeypatch.setattr(process_group, "world_size", lambda: 2)
    monkeypatch.setattr(sharded_memory, "DTensor", Whole)
    monkeypatch.setattr(sharded_memory, "init_device_mesh", lambda *_: None)
    monkeypatch.setattr(exchange.dist, "all_to_all_single", all_to_all_single)

    def run(work) -> None:
        def as_rank(rank: int) -> None:
            own.rank = rank
            try:
                work()
            except BaseException:
                meeting.abort()
                raise

        with ThreadPoolExecutor(2) as threads:
            done = [threads.submit(as_rank, rank) for rank in range(2)]
        errors = [error for each in done if (error := each.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error

    return run


def test_rows_come_from_their_owners_and_gradients_return_there(two_threads, capsys):
    two_threads(script.main)
    assert capsys.readouterr().out.count("equal on rank") == 2


@pytest.mark.torchrun
def test_it_is_so_between_processes():
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*start, Path(script.__file__)], capture_output=True, text=True, timeout=600)
    assert done.stdout.count("equal on rank") == 2, done.stderr
