"""The processes that train one model together: joining them, what the first one does alone, errors that all share.

Alone, a process is the first of one, and nothing here communicates.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ropewalk import RopeError, _checks, _lock

T = TypeVar("T")


class FirstFailedError(RopeError):
    """An error that the first process raises too, and reports: the others only end."""


@contextmanager
def joined() -> Iterator[None]:
    """Join the processes that torchrun has started, while the body runs. Without torchrun, the process is alone.

    Each process gets a GPU of its own, and they communicate with NCCL; on a machine without GPUs, gloo and the CPU.
    When a process ends with an error, the others lose their connection to it, and end too.

    Raises:
        RopeError: the machine has GPUs, but fewer than processes.
    """
    if not dist.is_available() or not dist.is_torchelastic_launched() or os.environ["WORLD_SIZE"] == "1":
        yield
        return
    here, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if 0 < gpus < here:
        raise _checks.error(
            "lab",
            "each process must have a GPU of its own",
            f"{here} processes on a machine with {gpus}",
            f"Pass --nproc-per-node {gpus}, or set CUDA_VISIBLE_DEVICES to nothing to train on the CPU.",
        )
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    try:
        with reporting_lost_peers():
            yield
    except BaseException:
        if not gpus:  # NCCL would wait for the others, who may wait for this process; gloo closes its connections
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@contextmanager
def reporting_lost_peers() -> Iterator[None]:
    """Say in one line that another process has ended, where PyTorch raises an error of its own.

    Raises:
        RopeError: this process could no longer communicate.
    """
    try:
        yield
    except RuntimeError as e:
        if not isinstance(e, dist.DistError) and "gloo" not in str(e):
            raise
        must, came = "all processes must go on until the end", f"process {rank()} has lost another one"
        cure = "Read what that one has said, and start all of them again: they go on from the last checkpoint."
        raise _checks.error("lab", must, came, cure) from e


def count() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if count() > 1 else 0


def device() -> torch.device:
    """Where this process trains: on a GPU where `joined` gave it one, otherwise on the CPU."""
    if count() > 1 and "nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def on_first(act: Callable[[], T]) -> T:
    """Call `act` in the first process alone; return its result in every process.

    Args:
        act: the result must be picklable where there are several processes.

    Raises:
        Exception: what `act` raises, in the first process; in the others `FirstFailedError`, with the same message.
    """
    if count() == 1:
        return act()
    outcome: list[Any] = [None, None]
    error: Exception | None = None
    if rank() == 0:
        try:
            outcome[0] = act()
        except Exception as e:  # the others wait for an answer
            error, outcome[1] = e, str(e) or type(e).__name__
    dist.broadcast_object_list(outcome, src=0)
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise FirstFailedError(outcome[1])
    result: T = outcome[0]
    return result


def fail(error: Exception) -> NoReturn:
    """Raise an error that every process has found, so that the first one reports it.

    Raises:
        Exception: `error` in the first process; in the others `FirstFailedError`, with the same message.
    """
    if rank() == 0:
        raise error
    raise FirstFailedError(str(error)) from error


def from_all(value: T) -> list[T]:
    """The values of all processes, by rank. They must be picklable."""
    values: list[Any] = [value] * count()
    if count() > 1:
        dist.all_gather_object(values, value)
    return values


def total(value: torch.Tensor) -> float:
    """The sum over all processes of a scalar on `device()`, as a number."""
    value = value.detach()
    if count() > 1:
        dist.all_reduce(value)
    return float(value)


@contextmanager
def locked(file: Path, what: str) -> Iterator[None]:
    """`_lock.held` by the first process, for all of them.

    Raises:
        RopeError: somebody else holds it.
    """
    with ExitStack() as stack:
        on_first(lambda: stack.enter_context(_lock.held("lab", file, what)))
        yield
