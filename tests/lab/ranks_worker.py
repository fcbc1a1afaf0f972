"""Train a tiny model with one process and with several, kill some of them, and resume. test_ranks.py runs this.

The parent process only imports modules, so every process of a group is a fork of one that has loaded torch and has run
nothing yet. The output is one line of JSON: the name of each file → for each run, how its processes ended, and the
number of steps in the file.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes longer than all steps here
import torch.distributed.fsdp

import processes
from ropewalk import Rope, RopeError
from ropewalk.tools.lab import checkpoint, ranks, train
from ropewalk.tools.lab.model import LanguageModel, Size
from ropewalk.tools.lab.train import Batch, Recipe

# Over 3 processes, 17 rows of the embedding are 6, 6 and 5, and 6 of k_proj are 2 in each.
SIZE = Size(17, 12, 10, 2, 2, num_kv_heads=1)
TIED = Size(17, 12, 10, 2, 2, tied=True, absolute="learned", max_positions=7)
ROPE = Rope(6, 1e4, "half")
RECIPE = Recipe(14, 3e-2, warmup=3, clip=0.5)


def batch(step: int) -> Batch:
    """Return 2 to 5 sequences that count up by 1 or 3, modulo 17.

    Each has more targets that count than the previous one.
    """
    chance = np.random.default_rng((5, step))
    first, by = chance.integers(0, 17, size=(2 + step % 4, 1)), chance.choice([1, 3], size=(2 + step % 4, 1))
    rows = torch.from_numpy((first + by * np.arange(8)) % 17)
    counts = torch.from_numpy(chance.random((len(rows), 7)) < (np.arange(1, len(rows) + 1) / len(rows))[:, None] ** 3)
    counts[-1, 0] = True
    return Batch(rows[:, :-1], rows[:, 1:], counts)


@dataclass(frozen=True)
class Run:
    """A training by `world` processes, with a failure in the process `who`.

    Args:
        before: called with a step, before its batch is computed.
        prepare: called before the training.
    """

    world: int
    size: Size = SIZE
    who: int = 0
    before: Callable[[int], None] | None = None
    prepare: Callable[[], None] | None = None
    seed: int = 0


def trained(run: Run, rank: int, file: Path) -> None:
    wrong = rank == run.who
    if wrong and run.prepare is not None:
        run.prepare()
    torch.manual_seed(3 + (run.seed if wrong else 0))
    model = LanguageModel(run.size)

    def batches(step: int) -> Batch:
        if wrong and run.before is not None:
            run.before(step)
        return batch(step)

    losses = train.train(model, ROPE, batches, RECIPE, file=file, about={})
    every = ranks.gather_objects((losses, {name: value.tolist() for name, value in model.named_parameters()}))
    assert all(one == every[0] for one in every), "the processes end with different models"


def outcome(run: Run, file: Path, rendezvous: Path) -> list[str]:
    """Return how each process ended: "done", the signal, the error that it raised, or "hung"."""
    children = []
    for rank in range(run.world):
        said = rendezvous.with_name(f"{rendezvous.name}.{rank}")
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)
                with processes.group(rank, run.world, str(rendezvous)) if run.world > 1 else nullcontext():
                    trained(run, rank, file)
                said.write_text("done")
            except (RopeError, OSError) as e:
                said.write_text(f"{type(e).__name__}: {e}")
            except BaseException:
                said.write_text(f"traceback: {traceback.format_exc()}")
            finally:
                os._exit(0)
        children.append((child, said))
    ends, began = [], time.monotonic()
    for child, said in children:
        status = None
        while status is None and time.monotonic() - began < processes.PATIENCE:
            pid, code = os.waitpid(child, os.WNOHANG)
            status = code if pid else time.sleep(0.02)
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            ends.append("hung")
        elif os.WIFSIGNALED(status):
            ends.append(signal.Signals(os.WTERMSIG(status)).name)
        else:
            ends.append(said.read_text())
    return ends


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(step: int) -> Callable[[int], None]:
    return lambda now: die() if now == step else None


def die_at_replace(number: int) -> None:
    """Kill the first process when it is about to replace the file, with half of the new one written."""
    replace, left = os.replace, [number]

    def replace_or_die(new: Path, old: Path) -> None:
        left[0] -= old.suffix == ".safetensors"
        if left[0] == 0:
            os.truncate(new, os.path.getsize(new) // 2)
            die()
        replace(new, old)

    os.replace = replace_or_die


def full_disk(step: int) -> None:
    if step == 4:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))


RUNS: dict[str, list[Run]] = {
    **{f"{world}": [Run(world)] for world in (1, 2)},
    **{f"{world} tied": [Run(world, TIED)] for world in (1, 2)},
    "killed alone": [Run(1, before=die_at(4)), Run(1, prepare=partial(die_at_replace, 3)), Run(1)],
    "killed": [Run(2, who=1, before=die_at(8)), Run(2, who=0, prepare=partial(die_at_replace, 3)), Run(2)],
    "others": [Run(1, before=die_at(2)), Run(3, who=2, before=die_at(7)), Run(1)],
    "disagree": [Run(2, who=1, seed=1)],
    "full": [Run(2, who=0, before=full_disk)],
}


def main(folder: Path) -> None:
    outcomes: dict[str, list[tuple[list[str], int]]] = {name: [] for name in RUNS}
    for name, runs in RUNS.items():
        file = folder / f"{name}.safetensors"
        for number, run in enumerate(runs):
            ends = outcome(run, file, folder / f"rendezvous {name} {number}")
            outcomes[name].append((ends, len(checkpoint.read(file)[1].losses) if file.exists() else 0))
    sys.stdout.write(json.dumps(outcomes) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
