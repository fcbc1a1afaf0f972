"""One of the processes of `torchrun -m ropewalk lab --quick`, with a task that takes seconds. test_ranks.py runs it."""

import runpy
import sys

import tiny_lab
from ropewalk.tools.lab import tasks

if __name__ == "__main__":
    tasks.COPY = tiny_lab.COPY
    sys.argv[0] = "ropewalk"
    runpy.run_module("ropewalk", run_name="__main__", alter_sys=True)
