"""Coordinate the processes that train one model: connect them, shard it, run code in the first one only, share errors.

A single process counts as the first one, and then nothing here communicates.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ropewalk import RopeError
from ropewalk.tools import _lock
from ropewalk.tools.lab.model import LanguageModel

T = TypeVar("T")


class FirstFailedError(RopeError):
    """The error that ends the other processes after an error in the first one. Only the first process reports it."""


@contextmanager
def process_group() -> Iterator[None]:
    """Connect the processes that torchrun started while the body runs. Without torchrun, there is a single process.

    Each process uses its own GPU, and the processes communicate with NCCL. On a machine without GPUs they use the CPU
    and gloo. If a process ends with an error, the others lose their connection to it and end as well.
    """
    if not dist.is_available() or not dist.is_torchelastic_launched() or os.environ["WORLD_SIZE"] == "1":
        yield
        return
    gpus = torch.cuda.is_available()
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    try:
        yield
    except BaseException:
        if not gpus:  # gloo closes its connections; NCCL would wait for processes that may wait for this one
            dist.destroy_process_group()
        raise
    dist.barrier()  # no process ends while another one still communicates with it
    dist.destroy_process_group()


def count() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process, from 0."""
    return dist.get_rank() if count() > 1 else 0


def device() -> torch.device:
    """Return the device on which this process trains: its GPU inside `process_group`, otherwise the CPU."""
    if count() > 1 and "nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def shard(model: LanguageModel) -> LanguageModel:
    """Return a copy of the model on `device()`, with its parameters sharded over all processes by FSDP2.

    Each of `model.layers` is gathered on its own. A single process gets the model itself.
    """
    if count() == 1:
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device().type, (count(),))
    shards = copy.deepcopy(model).to(device())
    for layer in shards.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(shards, mesh=mesh)
    return shards


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
        except Exception as e:  # the other processes wait for a result or an error
            error, outcome[1] = e, str(e) or type(e).__name__
    dist.broadcast_object_list(outcome, src=0)
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise FirstFailedError(outcome[1])
    result: T = outcome[0]
    return result


def gather_objects(value: T) -> list[T]:
    """Return the values of all processes, in the order of the ranks. They must be picklable."""
    values: list[Any] = [value] * count()
    if count() > 1:
        dist.all_gather_object(values, value)
    return values


def sum_over_processes(value: torch.Tensor) -> float:
    """Sum a scalar tensor on `device()` over all processes, and return the sum as a float."""
    value = value.detach()
    if count() > 1:
        dist.all_reduce(value)
    return float(value)


@contextmanager
def hold_lock(file: Path, what: str) -> Iterator[None]:
    """Hold a lock file (`_lock.hold`) while the body runs. The first process holds it for all processes.

    Args:
        file: the lock file.
        what: what the lock protects, for the error message.

    Raises:
        RopeError: another run holds the lock.
    """
    with ExitStack() as stack:
        on_first(lambda: stack.enter_context(_lock.hold("lab", file, what)))
        yield
