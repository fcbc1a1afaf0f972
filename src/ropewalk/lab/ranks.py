"""Coordinate the processes that train one model: join them, run code in the first one, share errors.

A single process is the first of one, and nothing here communicates.
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
    """An error that the first process also raises and reports. Other processes end without a report."""


@contextmanager
def joined() -> Iterator[None]:
    """Join the processes started by torchrun while the body runs. Without torchrun, there is a single process.

    Each process uses its own GPU, and they communicate with NCCL. On a machine without GPUs they use gloo and the CPU.
    If a process ends with an error, the others lose their connection to it and end as well.

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
            "each process must have its own GPU",
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
        if not gpus:  # gloo closes its connections; NCCL would wait for processes that may wait for this one
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@contextmanager
def reporting_lost_peers() -> Iterator[None]:
    """Convert PyTorch's errors about lost connections into a one-line error.

    Raises:
        RopeError: this process could no longer communicate.
    """
    try:
        yield
    except RuntimeError as e:
        if not isinstance(e, dist.DistError) and "gloo" not in str(e):
            raise
        must, came = "all processes must run until the end", f"process {rank()} has lost another one"
        cure = "Read the error of that process, then start all of them again. They resume from the last checkpoint."
        raise _checks.error("lab", must, came, cure) from e


def count() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Rank of this process, from 0."""
    return dist.get_rank() if count() > 1 else 0


def device() -> torch.device:
    """Device on which this process trains: its GPU under `joined`, otherwise the CPU."""
    if count() > 1 and "nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def on_first(act: Callable[[], T]) -> T:
    """Call `act` only in the first process, and return its result in every process.

    Args:
        act: the function. With several processes, its result must be picklable.

    Raises:
        Exception: the exception of `act` in the first process, and `FirstFailedError` with its message in the others.
    """
    if count() == 1:
        return act()
    outcome: list[Any] = [None, None]
    error: Exception | None = None
    if rank() == 0:
        try:
            outcome[0] = act()
        except Exception as e:  # the other processes wait for an answer
            error, outcome[1] = e, str(e) or type(e).__name__
    dist.broadcast_object_list(outcome, src=0)
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise FirstFailedError(outcome[1])
    result: T = outcome[0]
    return result


def fail(error: Exception) -> NoReturn:
    """Raise an error that every process has detected, so that only the first one reports it.

    Raises:
        Exception: `error` in the first process, and `FirstFailedError` with its message in the others.
    """
    if rank() == 0:
        raise error
    raise FirstFailedError(str(error)) from error


def from_all(value: T) -> list[T]:
    """Gather the values of all processes by rank. They must be picklable."""
    values: list[Any] = [value] * count()
    if count() > 1:
        dist.all_gather_object(values, value)
    return values


def total(value: torch.Tensor) -> float:
    """Sum a scalar on `device()` over all processes, and return it as a float."""
    value = value.detach()
    if count() > 1:
        dist.all_reduce(value)
    return float(value)


@contextmanager
def locked(file: Path, what: str) -> Iterator[None]:
    """Hold the lock (`_lock.held`) in the first process on behalf of all of them.

    Raises:
        RopeError: another run holds the lock.
    """
    with ExitStack() as stack:
        on_first(lambda: stack.enter_context(_lock.held("lab", file, what)))
        yield
