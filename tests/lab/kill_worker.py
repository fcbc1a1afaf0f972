"""Train a tiny model in a child that is killed ten times, and in one that is not. test_train.py runs this.

The parent process only imports modules, so every child is a fork of a process that has loaded torch and has run nothing
yet.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes longer than all steps here

from ropewalk import Rope
from ropewalk.tools.lab import checkpoint
from ropewalk.tools.lab.model import LanguageModel, Size
from ropewalk.tools.lab.train import Batch, Recipe, train

KILLS = 10
STEPS_BETWEEN = 10
BEYOND = 2  # steps at most of a child after those that its parent waits for
STEPS = KILLS * (STEPS_BETWEEN + BEYOND) + 5  # more than are done until the last kill, however slow the machine


def batch(step: int) -> Batch:
    rows = torch.from_numpy(np.random.default_rng((7, step)).integers(0, 16, size=(4, 17)))
    return Batch(rows[:, :-1], rows[:, 1:], rows[:, 1:] > 2)


class Announcer:
    """Replaces Progress: writes one byte for every completed step. After the last allowed one it waits to be killed."""

    def __init__(self, pipe: int, allowed: int) -> None:
        self.pipe, self.allowed = pipe, allowed

    def __call__(self, done: int, steps: int, loss: float) -> None:
        os.write(self.pipe, b".")
        self.allowed -= 1
        while self.allowed == 0:
            signal.pause()


def die_while_writing(writes: int, share: float) -> None:
    """Kill this process in one of its writes, when a share of the new checkpoint is on disk."""
    left = [writes]
    replace = os.replace

    def replace_or_die(new: Path, old: Path) -> None:
        left[0] -= old.suffix == ".safetensors"
        if left[0] < 0:
            os.truncate(new, int(share * os.path.getsize(new)))
            os.kill(os.getpid(), signal.SIGKILL)
        replace(new, old)

    os.replace = replace_or_die


def start(file: Path, dies: tuple[int, float] | None = None, allowed: int = -1) -> tuple[int, int]:
    """Start a child.

    Return its id, and the pipe on which it announces its steps. It waits after `allowed` steps, if not negative.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        if dies is not None:
            die_while_writing(*dies)
        torch.set_num_threads(1)
        torch.manual_seed(3)
        model = LanguageModel(Size(16, 32, 48, 2, 2))
        recipe = Recipe(STEPS, 1e-2, warmup=5)
        rope = Rope(16, 1e4, "half")
        train(model, rope, batch, recipe, file=file, about={}, progress=Announcer(writing, allowed))
        os._exit(0)
    os.close(writing)
    return child, reading


def end(child: int, reading: int) -> tuple[int, int]:
    """Wait for a child. Return its exit status, and the number of announced steps that were not read yet."""
    _, status = os.waitpid(child, 0)
    announced = len(os.read(reading, 65536))
    os.close(reading)
    return status, announced


def steps_in(file: Path) -> int:
    return len(checkpoint.read(file)[1].losses) if file.exists() else 0


def main(folder: Path) -> None:
    chance = random.Random(0)
    file = folder / "killed.safetensors"
    done = 0
    for kill in range(KILLS):
        steps = chance.randint(0, STEPS_BETWEEN)
        if kill % 2:
            child, reading = start(file, (steps, chance.random()))
        else:
            child, reading = start(file, allowed=steps + BEYOND)
            for _ in range(steps):
                assert os.read(reading, 1) == b"."
                done += 1
            time.sleep(chance.random() * 0.01)
            os.kill(child, signal.SIGKILL)
        status, announced = end(child, reading)
        assert os.WIFSIGNALED(status), status
        assert os.WTERMSIG(status) == signal.SIGKILL
        done += announced
        assert steps_in(file) - done in (0, 1), "a step that was done is lost"
        done = steps_in(file)
    assert 0 < done < STEPS
    for last in (file, folder / "undisturbed.safetensors"):
        assert end(*start(last))[0] == 0
    sys.stdout.write(f"killed {KILLS} times until step {done} of {STEPS}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
