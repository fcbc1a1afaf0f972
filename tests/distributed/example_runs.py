"""Run examples/train_many_gpus.py as one process or several, without importing torch for each process again.

`python example_runs.py` reads one JSON list per line: the number of processes, the options, and null or a file at whose
appearance all processes are killed. It answers with one: the exit status of each process, and what they printed.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes longer than all steps here
from torch import nn

SCRIPT = Path(__file__).parents[2] / "examples" / "train_many_gpus.py"
sys.path.insert(0, str(SCRIPT.parent))
import train_many_gpus  # noqa: E402


def rank(number: int, processes: int, port: int, options: list[str], output: int) -> None:
    """Run the example as one rank, in this process, and end it."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    environment = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ.update({name: str(value) for name, value in environment.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    nn.Module.compile = functools.partialmethod(nn.Module.compile, backend="aot_eager")  # seconds instead of a minute
    sys.argv = [str(SCRIPT), *options]
    status = 1
    try:
        train_many_gpus.main()
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)  # without finalization, as in processes.main


def run(processes: int, options: list[str], killed_after: str | None) -> tuple[list[int], str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile("w+") as output:
        children = []
        for number in range(processes):
            if not (child := os.fork()):
                rank(number, processes, port, options, output.fileno())
            children.append(child)
        if killed_after is not None:
            while not Path(killed_after).exists() and not os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                time.sleep(0.01)
            for child in children:
                os.kill(child, signal.SIGKILL)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        output.seek(0)
        return statuses, output.read()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run(*json.loads(line))) + "\n")
        sys.stdout.flush()
