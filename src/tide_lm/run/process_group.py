"""The processes that torchrun started, and their collectives; in a process alone all of them are no-ops."""

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


def is_distributed() -> bool:
    """Tell whether this process is one of a group, which torchrun started."""
    return dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    return dist.get_world_size() if is_distributed() else 1


def is_first() -> bool:
    return rank() == 0


def started() -> tuple[int, int]:
    """Return the rank and the world size that torchrun gave, before processes join; (0, 1) without it."""
    if not dist.is_torchelastic_launched():
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def device() -> torch.device:
    """Return the device of this process: the GPU with its local rank, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) if is_distributed() else 0)


@contextmanager
def joined() -> Iterator[None]:
    """Join torchrun's process group for the length of the context; do nothing in a process alone."""
    if not dist.is_torchelastic_launched():
        yield
        return
    on_gpu, local = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    if on_gpu:
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"torchrun started {os.environ['LOCAL_WORLD_SIZE']} processes on a machine with "
                f"{torch.cuda.device_count()} GPUs: lower --nproc-per-node"
            )
        torch.cuda.set_device(local)
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=TIMEOUT)))
    # Tensors on the host go through gloo, so that ids can be exchanged while the GPU is at work.
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    store = _store_of_this_start(store, rank, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        yield
    except RuntimeError as error:
        if re.search("closed by peer|reset by peer|Broken pipe", str(error)) is None:
            raise
        raise ConnectionError(f"rank {rank} stops: another process of the run has ended") from error
    dist.destroy_process_group()


def _store_of_this_start(store: dist.Store, rank: int, world_size: int) -> dist.Store:
    """Return a part of torchrun's store that is new to all ranks.

    torchrun keeps its store when it restarts processes, with the addresses of those that are gone. So the
    first rank draws a name for each start, and answers the ranks that ask under that name. A rank that reads
    the name of an earlier start gets no answer, and reads again.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        store.set("start", own)
        for other in range(1, world_size):
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
    """End this process at once, if torchrun started it.

    Gloo's threads outlive their group, since caches of DTensor hold it. They can abort the interpreter as it
    ends, which torchrun would take for a failure.
    """
    if not dist.is_torchelastic_launched():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def defer_to_first() -> None:
    """Wait before an error that all may report: the first reports it, and torchrun ends the others."""
    if started()[0] > 0:
        time.sleep(5)


def barrier() -> None:
    """Wait until all processes are here."""
    if is_distributed():
        dist.barrier()


def run_on_first(work: Callable[[], T]) -> T:
    """Run `work` on the first process, and return its result on all. If it fails, all processes end."""
    if not is_distributed():
        return work()
    done: list[Any] = [False, None]
    try:
        if is_first():
            done = [True, work()]
    finally:
        dist.broadcast_object_list(done)
    if not done[0]:
        defer_to_first()
        leave(1)
    return done[1]


@contextmanager
def open_on_first(opened: Callable[[], AbstractContextManager[T]]) -> Iterator[T]:
    """Enter a context on the first process, and exit it there when all are done; all get its value."""
    with ExitStack() as stack:
        yield run_on_first(lambda: stack.enter_context(opened()))
        barrier()
    barrier()


def all_gather(value: T) -> list[T]:
    """Return the values of all processes, by rank."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def all_max(number: int) -> int:
    """Return the largest of all processes' numbers."""
    if not is_distributed():
        return number
    tensor = torch.tensor(number)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return int(tensor)


def all_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Add up the tensors of all processes, in place."""
    if is_distributed():
        dist.all_reduce(tensor)
    return tensor
