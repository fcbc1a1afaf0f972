"""The processes of one group: a test starts them with `run`, and each process joins the group in `main` or `group`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

PATIENCE = 900.0
"""Seconds until a process that has not ended is taken to hang. On a busy machine, some need minutes to import torch."""


def run(worker: Path, size: int, folder: Path) -> list[tuple[int, str]]:
    """Run `python worker RANK SIZE RENDEZVOUS` for each rank. Return the exit status and the output of each process."""
    command = [sys.executable, str(worker)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(folder / "rendezvous")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, said, strict=True)]


@contextmanager
def group(rank: int, size: int, rendezvous: str) -> Iterator[None]:
    """Join the group, with gloo and one thread, while the body runs. No process leaves before all have run the body."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    patience = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=patience)
    yield
    dist.barrier()
    dist.destroy_process_group()


def main(body: Callable[[int, int], None]) -> None:
    """Join the group that `run` describes, call body with RANK and SIZE, and end this process.

    It ends without Python's finalization. A thread of gloo may still have to release the tensors of a finished
    collective, for which it needs Python. If Python is finalizing, this aborts the process.
    """
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    with group(rank, size, sys.argv[3]):
        body(rank, size)
        sys.stdout.flush()
    os._exit(0)
