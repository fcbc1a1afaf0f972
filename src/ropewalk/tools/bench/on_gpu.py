"""The benchmark on a GPU: time fixed cases, then compare ropewalk with a plain copy and with the fastest other code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

import ropewalk
from ropewalk._checks import error
from ropewalk.tools.bench import machine, measure
from ropewalk.tools.bench.case import FAR, Case, Passes
from ropewalk.tools.bench.clocks import OnCpu, OnGpu
from ropewalk.tools.bench.contenders import CONTENDERS_ON_GPU
from ropewalk.tools.bench.peers_gpu import PEERS_ON_GPU
from ropewalk.tools.bench.report import HEADS, Report, Say, select_contenders

_BATCHES = (1, 8, 64, 256)  # rows that decode one token each


@dataclass(frozen=True)
class GpuSettings:
    """Settings of the benchmark on a GPU.

    Args:
        backward: whether to measure the backward pass as well.
        compiled, only, rounds, seconds: as in `run.Settings`.
        rehearse: whether to run small cases on the CPU, to test the benchmark itself. Their times are meaningless.
    """

    backward: bool = True
    compiled: bool = True
    only: Sequence[str] = ()
    rounds: int = 30
    seconds: float = 30.0
    rehearse: bool = False


def run_on_gpu(settings: GpuSettings, say: Say, *, json_file: Path | None = None) -> dict[str, Any]:
    """Run the benchmark on a GPU and report the results.

    Args:
        settings: what to measure.
        say: called with each line of the report.
        json_file: file for the results, or None.

    Returns:
        The content of the JSON file. It has the keys that `run.run` returns, but gpu instead of threads.
        Each row also has case (the title of the case), batch, in_place, and far (whether positions extend to FAR).
        Rows timed on a GPU also have host: the seconds until an eager call returns.

    Raises:
        RopeError: `only` matches no contender but the copy; or rehearse is False, and there is no GPU that the kernels
            can use.
        OSError: the file cannot be written.
    """
    contenders = select_contenders([*CONTENDERS_ON_GPU, *PEERS_ON_GPU], settings.only, settings.compiled)
    rehearsal = "Rehearsal on the CPU: times are meaningless"
    kernel = rehearsal if settings.rehearse else ropewalk.backends()["gpu kernel"]
    if kernel.startswith("not usable"):
        must, got = "--device cuda needs a GPU that the kernels can use", kernel.removeprefix("not usable: ")
        fix = "Run it on a machine with a GPU, or pass --rehearse to run small cases on the CPU."
        raise error("bench", must, got, fix)
    parts: dict[str, Any] = {"gpu": None if settings.rehearse else machine.gpu(), "rows": []}
    out = Report(asdict(settings), parts, say, json_file)
    out.introduce(f"{kernel.removeprefix('usable: ')}, torch {torch.__version__}", HEADS)
    in_place = {contender.name: contender.in_place for contender in contenders}
    for case in cases(settings):
        # At large positions only cos and sin are measured.
        supported = [contender for contender in contenders if contender.does == "tables" or not case.is_far]
        if supported:
            clock = OnCpu() if settings.rehearse else OnGpu(replay=case.decode)
            rows = measure.rows(case, supported, clock, rounds=settings.rounds, seconds=settings.seconds)
            more = {"case": case.title, "batch": case.batch, "far": case.is_far}
            out.add(case, [{**more, **row, "in_place": in_place[row["contender"]]} for row in rows])
        if case.device == "cuda":
            torch.cuda.empty_cache()
    for line in verdict(out.found["rows"]):
        say(line)
    return out.found


def cases(settings: GpuSettings) -> Iterator[Case]:
    """Yield the cases to measure.

    They are a batch of sequences (forward and, if set, backward), a long and a short prompt, decoding with several
    batch sizes, and cos and sin at large positions. For a rehearsal, there are fewer and smaller cases.
    """
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
    """Yield the lines that summarize the results.

    There is one line for each timed result of ropewalk. It compares ropewalk with the copy, and with the fastest other
    code that computes the same values for the same case. Code that works in place is compared only with code that also
    works in place. The last lines give the errors of cos and sin at large positions.
    """
    yield ""
    yield "ropewalk: its time / time of copy_, then time of the fastest other contender / its time"
    kind = itemgetter("case", "does", "in_place")
    timed = [row for row in rows if row["state"] == "timed"]
    for ours in timed:
        if ours["contender"].removesuffix(", interleaved") not in ("ropewalk", "ropewalk, in place"):
            continue
        peers = [row for row in timed if kind(row) == kind(ours) and not row["contender"].startswith("ropewalk")]
        best = min(peers, key=lambda row: float(row["median"]), default=None)
        speedup = f"{best['median'] / ours['median']:.2f} ({best['contender']})" if best else "no other contender"
        copy = f"{ours['times_copy']:.2f}" if ours["times_copy"] else "-"
        yield f"  {ours['case']:<38} {ours['contender']:<32} {copy:>7}  {speedup}"
    for row in rows:
        if row["far"] and "error" in row:
            yield f"{row['contender']}: error of cos and sin up to position {FAR:,}: {float(row['error']):.1e}"
