"""The processes of one group: a test starts them with `run`, and each process joins the group in `main` or `group`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

PATIENCE = 900.0
"""Seconds until a process that has not ended is taken to hang. On a busy machine, some need minutes to import torch."""


def run(worker: Path, size: int, folder: Path) -> list[tuple[int, str]]:
    """Run `python worker SIZE FOLDER`. Return the exit status and the output of each process that `main` forks."""
    command = [sys.executable, str(worker), str(size), str(folder)]
    statuses = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return [(status, (folder / f"rank-{rank}").read_text("utf-8")) for rank, status in enumerate(statuses)]


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
    """Fork the processes of the group that `run` describes, and call body(rank, size) in each. Only one imports torch.

    They end without Python's finalization. A thread of gloo may still have to release the tensors of a finished
    collective, for which it needs Python. If Python is finalizing, this aborts the process.
    """
    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    children = []
    for rank in range(size):
        if not (child := os.fork()):
            signal.alarm(int(PATIENCE))
            with (folder / f"rank-{rank}").open("w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            status = 1
            try:
                with group(rank, size, str(folder / "rendezvous")):
                    body(rank, size)
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(status)
        children.append(child)
    sys.stdout.write(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))
