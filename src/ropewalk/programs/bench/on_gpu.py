"""The benchmark on a GPU: fixed cases, then ours against the copy and against the fastest other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

import ropewalk
from ropewalk._checks import error
from ropewalk.programs.bench import machine, measure
from ropewalk.programs.bench.case import FAR, Case, Passes
from ropewalk.programs.bench.clocks import OnCpu, OnGpu
from ropewalk.programs.bench.contenders import CONTENDERS_ON_GPU
from ropewalk.programs.bench.peers_gpu import PEERS_ON_GPU
from ropewalk.programs.bench.report import HEADS, Report, Say, check_files, chosen

_BATCHES = (1, 8, 64, 256)  # rows of which one token each is decoded


@dataclass(frozen=True)
class GpuSettings:
    """What to measure.

    backward: the backward pass as well as the forward pass. compiled, only, rounds, seconds: as in `Settings`.
    rehearse: small cases on the CPU, which show that all of it works; the times mean nothing.
    """

    backward: bool = True
    compiled: bool = True
    only: Sequence[str] = ()
    rounds: int = 30
    seconds: float = 30.0
    rehearse: bool = False


def run_on_gpu(settings: GpuSettings, say: Say, *, json_file: Path | None = None) -> dict[str, Any]:
    """Measure and report, as `run`.

    Returns:
        What JSON gets: as of `run`, with gpu instead of threads and stream. Rows also say case, its title; batch;
        in_place; far, up to position FAR; and host, seconds until an eager call comes back.

    Raises:
        RopeError: as `run`; or there is no GPU that the kernels can use, and it is no rehearsal.
    """
    contenders = chosen([*CONTENDERS_ON_GPU, *PEERS_ON_GPU], settings.only, settings.compiled)
    kernel = "A rehearsal on the CPU: times mean nothing" if settings.rehearse else ropewalk.backends()["gpu kernel"]
    if kernel.startswith("not usable"):
        must, got = "--device cuda must find a GPU that the kernels can use", kernel.removeprefix("not usable: ")
        cure = "Run it on a machine with one, or pass --rehearse: the same, small, on the CPU, to see that it works."
        raise error("bench", must, got, cure)
    parts: dict[str, Any] = {"gpu": None if settings.rehearse else machine.gpu(), "rows": []}
    check_files(json_file)
    out = Report(asdict(settings), parts, say, json_file)
    out.introduce(f"{kernel.removeprefix('usable: ')}, torch {torch.__version__}", f"{HEADS}, layout bshd")
    in_place = {one.name: one.in_place for one in contenders}
    for case in cases(settings):
        # Far away only cos and sin are of interest.
        able = [one for one in contenders if one.does == "tables" or not case.is_far]
        if able:
            clock = OnCpu() if settings.rehearse else OnGpu(replay=case.decode)
            rows = measure.rows(case, able, clock, rounds=settings.rounds, seconds=settings.seconds)
            more = {"case": case.title, "batch": case.batch, "far": case.is_far}
            out.add(case, [{**more, **row, "in_place": in_place[row["contender"]]} for row in rows])
        if case.device == "cuda":
            torch.cuda.empty_cache()
    for line in verdict(out.found["rows"]):
        say(line)
    return out.found


def cases(settings: GpuSettings) -> Iterator[Case]:
    """What is measured: a batch forward and backward, long and short prompts, decoding, tables far away."""
    device = "cpu" if settings.rehearse else "cuda"
    batch, tokens, prompts, rows = (2, 64, (32,), (4,)) if settings.rehearse else (4, 4096, (32_768, 1024), _BATCHES)
    passes: tuple[Passes, ...] = ("forward", "backward") if settings.backward else ("forward",)
    for dtype in (torch.bfloat16, torch.float32):
        for what in passes:
            yield Case(tokens, dtype, passes=what, batch=batch, device=device)
    for n in prompts:
        yield Case(n, torch.bfloat16, device=device)
    for n in rows:
        yield Case(1, torch.bfloat16, batch=n, decode=True, device=device)
    yield Case(tokens, torch.float32, first=FAR + 1 - tokens, device=device)


def verdict(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Ours against the copy, and against the fastest other that does the same: new tensors, or in place.

    Then the error of cos and sin far away.
    """
    yield ""
    yield "ropewalk: its time over that of copy_; the time of the fastest other over its own"
    same = itemgetter("case", "does", "in_place")
    timed = [row for row in rows if row["state"] == "timed"]
    for mine in timed:
        if mine["contender"].removesuffix(", interleaved") not in ("ropewalk", "ropewalk, in place"):
            continue
        others = [row for row in timed if same(row) == same(mine) and not row["contender"].startswith("ropewalk")]
        best = min(others, key=lambda row: float(row["median"]), default=None)
        against = f"{best['median'] / mine['median']:.2f} ({best['contender']})" if best else "no other"
        copy = f"{mine['times_copy']:.2f}" if mine["times_copy"] else "-"
        yield f"  {mine['case']:<38} {mine['contender']:<32} {copy:>7}  {against}"
    for row in rows:
        if row["far"] and "error" in row:
            yield f"{row['contender']}: error of cos and sin up to position {FAR:,}: {float(row['error']):.1e}"
