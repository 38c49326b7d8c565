"""The processes that torchrun started, and what they tell one another; one alone needs no telling."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def together() -> bool:
    """Whether this process is one of a group, which torchrun started."""
    return dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if together() else 0


def count() -> int:
    return dist.get_world_size() if together() else 1


def is_first() -> bool:
    return rank() == 0


def device() -> torch.device:
    """The device of this process: the GPU that has its number on this machine, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) if together() else 0)


@contextmanager
def joined() -> Iterator[None]:
    """Joins the group of torchrun for as long as this lasts; does nothing in a process on its own."""
    if not dist.is_torchelastic_launched():
        yield
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Tensors on the host go through gloo, so that ids can be exchanged while the GPU is at work.
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(minutes=30))
    yield
    dist.destroy_process_group()


def leave(status: int) -> None:
    """Ends this process, as `sys.exit` does in a process on its own.

    In one of a group, threads of gloo outlive the group, since caches of DTensor hold it. They can abort the
    interpreter as it ends, which torchrun would take for a failure.
    """
    if not dist.is_torchelastic_launched():
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def wait() -> None:
    """Until all are here."""
    if together():
        dist.barrier()


def from_first(work: Callable[[], T]) -> T:
    """What `work` returns on the first process, on all. If it fails there, the others end without a word."""
    if not together():
        return work()
    told: list[Any] = [False, None]
    try:
        if is_first():
            told = [True, work()]
    finally:
        dist.broadcast_object_list(told)
    if not told[0]:
        leave(1)
    return told[1]


@contextmanager
def first_opens(opened: Callable[[], AbstractContextManager[T]]) -> Iterator[T]:
    """What the first process opens, on all; closed by the first, when all are done with it."""
    with ExitStack() as stack:
        yield from_first(lambda: stack.enter_context(opened()))
        wait()
    wait()


def gather(value: T) -> list[T]:
    """The values of all, in the order of ranks."""
    if not together():
        return [value]
    values: list[Any] = [None] * count()
    dist.all_gather_object(values, value)
    return values


def largest(number: int) -> int:
    """The largest of the numbers of all."""
    if not together():
        return number
    tensor = torch.tensor(number)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return int(tensor)


def add_up(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all, in place."""
    if together():
        dist.all_reduce(tensor)
    return tensor
