"""The processes of a group: `python worker.py SIZE FOLDER`. Runs every check and prints the outcomes.

Each line is a JSON list: the name of a check, and its error or null. The checks of all files are in `CHECKS`.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "support"))

import dtensor_checks
import module_checks
import tensor_parallel_checks

import processes

CHECKS = {**dtensor_checks.CHECKS, **module_checks.CHECKS, **tensor_parallel_checks.CHECKS}
FILES = (dtensor_checks, module_checks, tensor_parallel_checks)
assert len(CHECKS) == sum(len(file.CHECKS) for file in FILES), "two checks have one name, so one would not run"


def main(_: int, world: int) -> None:
    for name, check in CHECKS.items():
        failure = None
        try:
            for watching in (True, False) if name in dtensor_checks.CHECKS else (True,):
                dtensor_checks.WATCHING[0] = watching
                torch.manual_seed(0)
                check(world)
        except (Exception, pytest.fail.Exception):
            failure = traceback.format_exc()
        sys.stdout.write(json.dumps([name, failure]) + "\n")
        sys.stdout.flush()
        dist.barrier()


if __name__ == "__main__":
    processes.main(main)
