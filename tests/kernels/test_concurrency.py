"""Concurrent calls from Python threads, PyTorch threads and forked processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from kernel_cases import check, expected, unchanged
from ropewalk import Rope, Rotation

SEQ = 331  # with 3 heads and 64 channels, enough elements for two threads of PyTorch


@pytest.mark.parametrize("count", [1, 2])
def test_two_threads_of_python(calls: list[str], threads: None, count: int) -> None:
    torch.set_num_threads(count)
    start, wrong = threading.Barrier(2), list[BaseException]()

    def work(number: int) -> None:
        try:
            draw = torch.Generator().manual_seed(number)
            cos, sin = torch.randn(2, SEQ, 32, generator=draw).unbind()
            dtype, layout, pairing = ((torch.float32, "bshd", "half"), (torch.bfloat16, "bshd", "interleaved"))[number]
            x = torch.randn(2, SEQ, 3, 64, generator=draw).to(dtype)
            exact, size = expected(x, cos, sin, layout, pairing, 0, inverse=False)
            rope = Rope(64, 1e4, pairing)
            table = rope.at(torch.arange(SEQ) + number).cos.clone()
            start.wait(timeout=600)
            for _ in range(30):
                check(Rotation(cos, sin, pairing=pairing)(x, layout=layout), exact, size, layout, number)
                assert unchanged(rope.at(torch.arange(SEQ) + number).cos, table)
        except BaseException as e:
            wrong.append(e)

    workers = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=600)
        assert not worker.is_alive()
    if wrong:
        raise wrong[0]
    assert calls.count("rotate") == 60


def test_number_of_threads_makes_no_difference(calls: list[str], threads: None) -> None:
    """The number also applies in a new thread, where OpenMP itself has another setting."""
    q, k = torch.randn(2, SEQ, 3, 64), torch.randn(2, SEQ, 1, 64)
    rope, made = Rope(64, 1e4, "half"), []
    for count in (1, 2):
        torch.set_num_threads(count)

        def work() -> None:
            rotation = rope.at(torch.arange(SEQ))
            made.append([rotation.cos, rotation.sin, *rotation(q, k, layout="bshd")])

        work()
        other = threading.Thread(target=work)
        other.start()
        other.join(timeout=600)
    assert len(made) == 4
    for result in made[1:]:
        assert all(unchanged(x, y) for x, y in zip(made[0], result, strict=True))
    check(made[0][2], *expected(q, made[0][0], made[0][1], "bshd", "half", 0, inverse=False), "bshd", "all")


PROGRAM = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import torch
import oracle
from ropewalk import Rope
from ropewalk._layout import Options
from ropewalk.kernels import cpu

torch.set_num_threads(2)
rope, q = Rope(64, 1e4, "half"), torch.randn(2, 331, 3, 64)
angle = np.arange(331)[:, None] * rope.inv_freq

def work():  # NumPy checks: large operators of PyTorch itself hang in a forked process
    rotation = rope.at(torch.arange(331))
    assert abs(rotation.cos.numpy() - np.cos(angle)).max() < 1e-7
    y = rotation(q, layout="bshd")
    cos, sin = (table.numpy()[:, None] for table in (rotation.cos, rotation.sin))
    assert abs(y.numpy() - oracle.rotate_by_tables(q.numpy(), cos, sin, "half")[0]).max() < 1e-5
    d_cos, d_sin = cpu.table_gradient([q], [y], 32, Options("bshd", False, 0))
    exact = oracle.table_gradient(q.numpy(), y.numpy(), 32, "half")
    assert abs(d_cos.numpy() - exact[0]).max() < 1e-4 > abs(d_sin.numpy() - exact[1]).max()

if sys.argv[2] == "after":
    work()  # PyTorch has its threads, and they do not go over
child = os.fork()
if child == 0:
    signal.alarm(60)  # one that waits for them waits for ever
    work()
    os._exit(0)
status = os.waitpid(child, 0)[1]
assert status == 0, status
work()  # and the parent goes on
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("when", ["before", "after"])
def test_forked_process(used: None, when: str) -> None:
    """A process that was forked before or after PyTorch started its threads."""
    tests = str(Path(__file__).parents[1] / "support")
    ran = subprocess.run([sys.executable, "-c", PROGRAM, tests, when], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_the_kernel_runs_on_the_threads_of_torch() -> None:
    """PyTorch's pool has no threads until the first parallel call, which is the rotation here."""
    program = """
import os, numpy, torch
from ropewalk import Rotation
torch.set_num_threads(2)
x, cos, sin = (torch.from_numpy(numpy.ones((4096, *rest), dtype="float32")) for rest in ((8, 64), (32,), (32,)))
before = len(os.listdir("/proc/self/task"))
Rotation(cos, sin, pairing="half")(x[None], layout="bshd")
print(len(os.listdir("/proc/self/task")) - before)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "1\n"
