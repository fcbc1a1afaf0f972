"""Time the rotation of one layer, and compare it with a copy and with the formula of transformers.

The contenders alternate in one process. The result of each is first checked against a rotation that is computed here in
float64, without code of ropewalk, and a contender with a wrong result is not timed. benchmarks/ in the repository
compares more: other libraries, gradients, decoding, caches and whole models.
"""

from __future__ import annotations

import datetime
import gc
import json
import math
import os
import platform
import re
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ropewalk

BASE, HEAD_DIM, Q_HEADS, KV_HEADS = 500_000.0, 128, 32, 8  # Llama 3 without scaling
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FLOOR = "copy_"  # the contender with which all others are compared

Inputs = tuple[Tensor, ...]
"""q and k."""
Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function from queries and keys to rotated queries and keys of the same shapes and dtypes."""
CHUNK = 512  # tokens checked at a time, to limit the memory of float64 tensors
_SAMPLE = 2e-3  # seconds: shorter calls on a CPU are repeated, and their mean is one sample
_ENVIRONMENT = ("ROPEWALK_", "OMP_", "GOMP_", "KMP_", "MALLOC_", "THP_")


@dataclass(frozen=True)
class Case:
    """The size, dtype and device of q `[1, tokens, 32, 128]` and k `[1, tokens, 8, 128]`."""

    tokens: int
    dtype: torch.dtype
    device: str = "cpu"

    def inputs(self, seed: int = 0) -> Inputs:
        """Draw normally distributed q and k. Equal seeds give equal inputs."""
        generator = torch.Generator(self.device).manual_seed(seed)
        how: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": self.device}
        return tuple(torch.randn(1, self.tokens, n, HEAD_DIM, **how).to(self.dtype) for n in (Q_HEADS, KV_HEADS))

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token, int64 `[tokens]`. They begin at 100, because position 0 is not rotated."""
        return torch.arange(100, 100 + self.tokens, device=self.device)

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Exact cos and sin at the positions, rounded to float32, `[tokens, 64]`."""
        angle = exact_angle(self.positions)
        return angle.cos().float(), angle.sin().float()

    @property
    def title(self) -> str:
        """The size and the dtype, as text."""
        return f"{self.tokens:,} token{'s' if self.tokens > 1 else ''}, {str(self.dtype).removeprefix('torch.')}"

    @property
    def bytes_moved(self) -> int:
        """The number of bytes if q and k are read and written once."""
        return 2 * self.tokens * (Q_HEADS + KV_HEADS) * HEAD_DIM * self.dtype.itemsize

    def allowed(self, contender: Contender) -> float:
        """Return the largest allowed error, relative to the length of a pair: 4 eps of the dtype.

        The code of most projects rounds cos and sin, two products and a sum, which costs at most 2.7 eps.
        """
        return 4 * torch.finfo(self.dtype).eps

    def error(self, does: str, inputs: Inputs, results: Sequence[Tensor]) -> float:
        """Return the largest error of q and k, relative to the length of a pair. It is NaN if a result has NaN.

        Args:
            does: "half" if they must be rotated by position · base^(−2i/head_dim), or "copy".
            inputs, results: q and k, before and after. A wrong shape or dtype is an infinite error.
        """
        if any(x.shape != y.shape or x.dtype != y.dtype for x, y in zip(inputs, results, strict=True)):
            return math.inf
        gaps = []
        for start in range(0, self.tokens, CHUNK):
            angle = (does != "copy") * exact_angle(self.positions[start : start + CHUNK]).unsqueeze(-2)
            factor = torch.polar(torch.ones_like(angle), angle)
            for x, y in zip(inputs, results, strict=True):
                gaps.append(rotation_error(x[:, start : start + CHUNK], y[:, start : start + CHUNK], factor, "half"))
        return torch.stack(gaps).max().item()  # torch's max propagates NaN, Python's does not


def exact_angle(positions: Tensor) -> Tensor:
    """Compute position · base^(−2i/head_dim) in radians, float64 `[*positions.shape, 64]`."""
    inv_freq = BASE ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64, device=positions.device) / HEAD_DIM)
    return positions.double().unsqueeze(-1) * inv_freq


def rotation_error(before: Tensor, after: Tensor, factor: Tensor, pairing: str) -> Tensor:
    """Compute the largest error of a rotated pair, relative to its length. A pair of length 0 is divided by 1e-30.

    Args:
        before, after: the tensor before and after the rotation, `[…, 2 · pairs]`.
        factor: exact cos + i sin, complex128, broadcastable to `[…, pairs]`.
        pairing: "half" or "interleaved".

    Returns:
        A float64 scalar, which is NaN if `after` has NaN.
    """
    exact = _pairs(before, pairing) * factor
    return ((_pairs(after, pairing) - exact).abs() / exact.abs().clamp_min(1e-30)).max()


def _pairs(x: Tensor, pairing: str) -> Tensor:
    """View `[…, 2n]` as complex128 `[…, n]`, pairing channels i and i + n, or 2i and 2i + 1."""
    x = x.detach().double()
    first, second = x.chunk(2, dim=-1) if pairing == "half" else (x[..., 0::2], x[..., 1::2])
    return torch.complex(first, second)


class Call(NamedTuple):
    """A call to time. `tensors` converts the result of `run` to tensors for the check."""

    run: Callable[[], Any]
    tensors: Callable[[Any], tuple[Tensor, ...]] = tuple


@dataclass(frozen=True)
class Contender:
    """An implementation to measure: one line in the table of the benchmark.

    Args:
        name: a unique name.
        does: the effect of a correct result on q and k, as for `Case.error`.
        make: does all preparation for a case, which is not timed, and returns a function that prepares the call for
            given inputs, which the call never modifies.
    """

    name: str
    does: str
    make: Callable[[Any], Callable[[Inputs], Call]]


def hugging_face(case: Case) -> Rotate:
    """Prepare Llama's apply_rotary_pos_emb, with tables of full width in the dtype of q and k.

    Source: transformers, models/llama/modeling_llama.py.
    """
    cos, sin = (torch.cat((t, t), dim=-1).to(case.dtype).unsqueeze(-2) for t in case.tables)

    def rotate_half(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    return lambda q, k: (q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin)


def copy(case: Case, inputs: Inputs) -> Call:
    """Copy the inputs into memory that is allocated beforehand."""
    pairs = [(torch.empty_like(x), x) for x in inputs]
    return Call(lambda: [to.copy_(x) for to, x in pairs])


def ropewalk_of(case: Case, pairing: Any = "half") -> Rotate:
    """Prepare ropewalk, which returns new tensors."""
    rotation = ropewalk.Rope(head_dim=HEAD_DIM, base=BASE, pairing=pairing).at(case.positions)
    return lambda q, k: rotation(q, k, layout="bshd")


def ropewalk_in_place(case: Case, inputs: Inputs, pairing: Any = "half") -> Call:
    """Prepare ropewalk, in place in copies of the inputs."""
    rotation = ropewalk.Rope(head_dim=HEAD_DIM, base=BASE, pairing=pairing).at(case.positions)
    q, k = (x.clone() for x in inputs)
    return Call(lambda: rotation.apply_(q, k, layout="bshd"), lambda _: (q, k))


def eager(rotate: Callable[[Any], Rotate], *, compiled: bool = False) -> Callable[[Any], Callable[[Inputs], Call]]:
    """Return a `make` of a `Contender` for a rotation in PyTorch, or for the same under torch.compile."""

    def make(case: Case) -> Callable[[Inputs], Call]:
        call = rotate(case)
        if compiled:
            call = torch.compile(call, fullgraph=True, dynamic=False)
        return lambda inputs: Call(lambda: call(*inputs))

    return make


CONTENDERS = (
    Contender(FLOOR, "copy", lambda case: partial(copy, case)),
    Contender("clone", "copy", eager(lambda case: lambda q, k: (q.clone(), k.clone()))),
    Contender("ropewalk", "half", eager(ropewalk_of)),
    Contender("ropewalk, in place", "half", lambda case: partial(ropewalk_in_place, case)),
    Contender("ropewalk, compiled", "half", eager(ropewalk_of, compiled=True)),
    Contender("Hugging Face", "half", eager(hugging_face)),
    Contender("Hugging Face, compiled", "half", eager(hugging_face, compiled=True)),
)


Calls = Sequence[Callable[[], Any]]
"""The same call for several sets of inputs, called one after another."""


class OnCpu:
    """A clock for the CPU. A call shorter than 2 ms is repeated, and one sample is the mean time of the repetitions."""

    def sets(self, moved: int) -> int:
        """Return 1: on a CPU, all contenders share one set of inputs, which may stay in the caches."""
        return 1

    def prepare(self, calls: Calls) -> Callable[[], float]:
        """Warm up the call, and return a function that returns its seconds."""
        (call,) = calls
        once = min(_sample(call, 1) for _ in range(3))
        return partial(_sample, call, min(1000, math.ceil(_SAMPLE / once)))


def _sample(call: Callable[[], object], repeats: int) -> float:
    """Measure the mean seconds of one call. A first untimed call warms up caches and threads for this contender.

    The previous result is freed before each call, so every result is allocated anew. If a call is not repeated, the
    time does not include freeing memory.
    """
    call()
    results: list[object] = []
    start = time.perf_counter()
    for _ in range(repeats):
        results.clear()
        results.append(call())
    return (time.perf_counter() - start) / repeats


class OnGpu:
    """A clock for the GPU: it times all calls between two events of the device.

    A waiting kernel is launched first, so that the host runs ahead and launch overhead is hidden.
    """

    def sets(self, moved: int) -> int:
        """Return the number of sets that together exceed three times the L2 cache, at least 4 and at most 64."""
        cache: int = torch.cuda.get_device_properties().L2_cache_size
        return min(64, max(4, 1 + 3 * cache // moved))

    def prepare(self, calls: Calls) -> Callable[[], float]:
        """Warm up the calls, and return a function that returns the mean seconds of one."""
        device_seconds(calls)
        return partial(device_seconds, calls)


def device_seconds(calls: Calls) -> float:
    """Measure the mean seconds of one call on the GPU."""
    event: Any = torch.cuda.Event
    wait: Any = torch.cuda._sleep
    begin, end = event(enable_timing=True), event(enable_timing=True)
    wait(4_000_000 + 400_000 * len(calls))  # cycles: a few milliseconds, during which the host runs ahead
    begin.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / len(calls)


def rows(
    case: Case, contenders: Sequence[Contender], clock: OnCpu | OnGpu, *, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Check and time each contender.

    Args:
        case: the inputs.
        contenders: the contenders, unique by name.
        clock: the clock of the device.
        rounds: number of samples of each contender.
        seconds: time limit. When it has passed and three rounds are complete, no further round begins.

    Returns:
        One row for JSON for each contender. Its state is "timed", "wrong" or "failed". Times are in seconds for one
        call.
    """
    if any("compiled" in contender.name for contender in contenders):
        torch.compiler.reset()  # compile each case with constant sizes, without reaching the recompile limit
    sets = [case.inputs(seed) for seed in range(clock.sets(case.bytes_moved))]
    results, samplers = [], {}
    for contender in contenders:
        row, sample = _check(contender, case, sets, clock)
        results.append(row)
        if sample is not None:
            samplers[contender.name] = sample
    samples = sample_alternately(samplers, rounds, seconds)
    floor = statistics.median(samples[FLOOR]) if FLOOR in samples else None
    for row in results:
        if row["state"] == "timed":
            row.update(summary(samples[row["contender"]]))
            row["gb_per_s"] = case.bytes_moved / row["median"] / 1e9
            row["times_copy"] = None if floor is None else row["median"] / floor
    return results


def _check(
    contender: Contender, case: Case, sets: Sequence[Inputs], clock: OnCpu | OnGpu
) -> tuple[dict[str, Any], Callable[[], float] | None]:
    """Check the result for the first inputs. Return the row without times, and a sampler if the result is correct."""
    row: dict[str, Any] = {
        "tokens": case.tokens,
        "dtype": str(case.dtype).removeprefix("torch."),
        "contender": contender.name,
    }
    try:
        with warnings.catch_warnings(action="ignore"):  # from other libraries and from compilation
            bind, allowed = contender.make(case), case.allowed(contender)
            call = bind(sets[0])
            gap = case.error(contender.does, sets[0], call.tensors(call.run()))
            row.update(error=gap if math.isfinite(gap) else str(gap), allowed=allowed)
            if not gap <= allowed:
                return {**row, "state": "wrong"}, None
            sample = clock.prepare([call.run, *(bind(inputs).run for inputs in sets[1:])])
    except Exception as e:  # also of a library that is not installed: it becomes a line of the table
        return {**row, "state": "failed", "reason": f"{type(e).__name__}: {e}".split("\n")[0][:200]}, None
    return {**row, "state": "timed"}, sample


def sample_alternately(
    samplers: Mapping[str, Callable[[], float]], rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Take one sample of each contender in every round, and return them by name. The limits are as for `rows`."""
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    gc.collect()
    gc.disable()
    try:
        started = time.perf_counter()
        for done in range(rounds):
            if done >= 3 and time.perf_counter() - started > seconds:
                break
            for name, sample in samplers.items():
                samples[name].append(sample())
    finally:
        gc.enable()
    return samples


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Summarize samples: rounds (how many), their median, and the 10th and 90th percentile (p10, p90)."""
    samples = sorted(samples)
    tenth = (len(samples) - 1) // 10
    median = statistics.median(samples)
    return {"rounds": len(samples), "median": median, "p10": samples[tenth], "p90": samples[-1 - tenth]}


def run(
    *,
    tokens: Sequence[int],
    dtype: Sequence[str],
    device: str,
    compiled: bool,
    limit: int,
    json_file: Path | None,
    say: Callable[[str], None],
) -> None:
    """Time the contenders for each number of tokens and dtype, and say one table for each.

    Args:
        tokens: the numbers of tokens.
        dtype: names in `DTYPES`.
        device: "cpu" or "cuda".
        compiled: whether to time the contenders under torch.compile as well.
        limit: both limits of `rows`: the number of samples, and the seconds of a table.
        json_file: the file for all results, or None.
        say: a function that is called with the text.
    """
    limits: dict[str, Any] = {"rounds": limit, "seconds": float(limit)}
    settings = {"tokens": tokens, "dtype": dtype, "device": device, **limits}
    found: dict[str, Any] = {**describe(), "settings": settings, "rows": []}
    write(found, json_file)  # raises now if the file cannot be written
    say(heading(found))
    contenders = [one for one in CONTENDERS if compiled or "compiled" not in one.name]
    clock = OnGpu() if device == "cuda" else OnCpu()
    for case in (Case(n, DTYPES[name], device) for name in dtype for n in tokens):
        timed = rows(case, contenders, clock, **limits)
        say(table(case.title, timed))
        found["rows"] += timed
        write(found, json_file)


def describe() -> dict[str, Any]:
    """Describe the run, machine, environment and versions, for JSON. Host names and paths are left out."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text(encoding="utf-8")) if info.exists() else []
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": names[0] if names else platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "torch_capability": torch.backends.cpu.get_cpu_capability(),
            "system": f"{platform.system()} {platform.release()}",
            "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        },
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_ENVIRONMENT)},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "ropewalk": ropewalk.__version__},
        "backends": ropewalk.backends(),
        "threads": torch.get_num_threads(),
    }


def write(found: dict[str, Any], json_file: Path | None) -> None:
    """Write the JSON file, if there is one."""
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def table(title: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of one case as a table, after an empty line."""
    width = max(24, *(len(row["contender"]) for row in rows))
    head = f"  {'':<{width}} {'median':>10}  {'10-90 % of samples':>23}  {'GB/s':>6}  {'x copy_':>7}"
    return "\n".join(["", title, head, *(f"  {row['contender']:<{width}} {_line(row)}" for row in rows)])


def heading(found: dict[str, Any]) -> str:
    """Return a line about the machine in `found`, the result of `describe`, with a warning if it is busy."""
    machine, load = found["machine"], found["machine"]["load"] or 0.0
    busy = f"\nWarning: the machine is busy (load {load:.1f}). Compare only times within the same table."
    return f"torch {torch.__version__}, {found['threads']} threads, {machine['cpu']}{busy if load > 0.5 else ''}"


def describe_time(seconds: float) -> str:
    """Return a time in microseconds or milliseconds, as text."""
    return f"{1e6 * seconds:.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


def _line(row: dict[str, Any]) -> str:
    if row["state"] == "wrong":
        return f"wrong: error {float(row['error']):.1e}, allowed {row['allowed']:.1e}; not timed"
    if row["state"] != "timed":
        return f"{row['state']}: {row['reason']}"
    spread = f"{describe_time(row['p10'])} - {describe_time(row['p90'])}"
    ratio = "" if row["times_copy"] is None else f"{row['times_copy']:.2f}"
    return f"{describe_time(row['median']):>10}  {spread:>23}  {row['gb_per_s']:>6.1f}  {ratio:>7}"
