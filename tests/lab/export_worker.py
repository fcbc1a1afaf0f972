"""Kill exports that replace others, at each of their steps and while they write. test_files.py runs this.

A step is a call of Python that opens, renames, removes or changes a file next to the target, as reported by Python's
audit events. To kill a process while it writes, the system limits the size of its files. The parent process only
imports modules, so every child is a fork of a process that has loaded torch and has run nothing yet.
"""

import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import torch
import torch._dynamo  # the first table of a process imports it

from ropewalk.tools.lab import export

EVENTS = ("open", "os.chmod", "os.mkdir", "os.remove", "os.rename", "os.rmdir")


def contents(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {path.name: path.read_bytes()}
    return {file.name: file.read_bytes() for file in path.iterdir()} if path.exists() else {}


def child(source: Path, target: Path, form: str, length: int, steps: int = -1, size: int | None = None) -> int:
    """Export in a child process, and return its exit status.

    It dies at a step (unless negative), or when a file reaches a size.
    """
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        if size is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        left = [steps]

        def count(event: str, arguments: tuple[object, ...]) -> None:
            if event in EVENTS and isinstance(arguments[0], str | bytes | Path):
                path = Path(os.fsdecode(arguments[0]))
                if path.is_relative_to(target.parent) or not path.is_absolute():  # rmtree works relative to a folder
                    left[0] -= 1
                if left[0] == -1:
                    os.kill(os.getpid(), signal.SIGKILL)

        if steps >= 0:
            sys.addaudithook(count)
        export.run(source, target, form, max_positions=length, force=True)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def main(source: Path, folder: Path) -> None:
    for form, name in (("hf", "folder"), ("llama2.c", "model.bin")):
        states = []
        for length in (32, 64):
            target = folder / str(length) / name
            assert child(source, target, form, length) == 0
            states.append(contents(target))
        old, new = states
        assert old != new
        seen = []
        for steps in range(100):
            work = folder / f"{form}-{steps}"
            shutil.copytree(folder / "32", work)
            status = child(source, work / name, form, 64, steps)
            if status == 0:
                break
            assert os.WTERMSIG(status) == signal.SIGKILL, status
            # Between two renames the old folder lies beside, whole.
            found = contents(work / name) or contents(work / f"{name}.old")
            assert found in (old, new), f"{form}: neither the old nor the new export after {steps} steps: {list(found)}"
            seen.append(found == new)
        assert status == 0
        assert contents(work / name) == new
        assert not seen[0]
        assert seen == sorted(seen)
        for size in (0, 1000, 20_000):
            killed = folder / f"{form}-of-{size}"
            shutil.copytree(folder / "32", killed)
            status = child(source, killed / name, form, 64, size=size)
            assert os.WTERMSIG(status) == signal.SIGXFSZ, status
            assert contents(killed / name) == old, f"{form}: the old export is gone after {size} bytes"
        assert [path.name for path in work.iterdir() if path.name not in (name, "tokenizer.bin")] == []
        shutil.rmtree(folder / "32")
        shutil.rmtree(folder / "64")
        sys.stdout.write(f"{form}: killed {len(seen)} times, {sum(seen)} of them after the new one was there\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
