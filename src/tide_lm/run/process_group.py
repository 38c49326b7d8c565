"""The processes that torchrun started, and what they tell one another; one alone needs no telling."""

import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=30)
T = TypeVar("T")


def together() -> bool:
    """Tell whether this process is one of a group, which torchrun started."""
    return dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if together() else 0


def count() -> int:
    return dist.get_world_size() if together() else 1


def is_first() -> bool:
    return rank() == 0


def started() -> tuple[int, int]:
    """Rank and number of the processes that torchrun started, before they join: (0, 1) without it."""
    if not dist.is_torchelastic_launched():
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


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
    on_gpu, local = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    if on_gpu:
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"torchrun started {os.environ['LOCAL_WORLD_SIZE']} processes on a machine of "
                f"{torch.cuda.device_count()} GPUs: lower --nproc-per-node"
            )
        torch.cuda.set_device(local)
    store, rank, ranks = next(iter(dist.rendezvous("env://", timeout=TIMEOUT)))
    # Tensors on the host go through gloo, so that ids can be exchanged while the GPU is at work.
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    store = _of_this_start(store, rank, ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    try:
        yield
    except RuntimeError as error:
        if re.search("closed by peer|reset by peer|Broken pipe", str(error)) is None:
            raise
        raise ConnectionError(f"rank {rank} ends, as another process of the run has ended") from error
    dist.destroy_process_group()


def _of_this_start(store: dist.Store, rank: int, ranks: int) -> dist.Store:
    """A part of torchrun's store that is new to all ranks.

    torchrun keeps its store when it restarts processes, with the addresses of those that are gone. The first
    rank therefore names each start anew, and answers those who ask under that name; a rank that finds the
    name of an earlier start gets no answer, and looks again.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        store.set("start", own)
        for other in range(1, ranks):
            asking = store.get(f"{own}/{other}").decode()
            store.set(f"{own}/{other}/{asking}", "")
        return dist.PrefixStore(own, store)
    while True:
        start = store.get("start").decode()
        store.set(f"{start}/{rank}", own)
        if store.check([f"{start}/{rank}/{own}"]):
            return dist.PrefixStore(start, store)
        time.sleep(0.1)


def leave(status: int) -> None:
    """Ends this process at once, if torchrun started it.

    Threads of gloo outlive their group, since caches of DTensor hold it. They can abort the interpreter as it
    ends, which torchrun would take for a failure.
    """
    if not dist.is_torchelastic_launched():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def let_first_speak() -> None:
    """Wait before an error that all processes may have met: the first tells it, torchrun ends the others."""
    if started()[0] > 0:
        time.sleep(5)


def wait() -> None:
    """Until all are here."""
    if together():
        dist.barrier()


def from_first(work: Callable[[], T]) -> T:
    """What `work` returns on the first process, on all. If it fails there, the others end with it."""
    if not together():
        return work()
    told: list[Any] = [False, None]
    try:
        if is_first():
            told = [True, work()]
    finally:
        dist.broadcast_object_list(told)
    if not told[0]:
        let_first_speak()
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
