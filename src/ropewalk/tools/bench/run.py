"""The benchmark on a CPU, for several sizes and for a long sequence in chunks. It reports text, JSON and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ropewalk import plots
from ropewalk.tools.bench import measure
from ropewalk.tools.bench.case import Case, Layout, Passes
from ropewalk.tools.bench.clocks import OnCpu
from ropewalk.tools.bench.contenders import CONTENDERS
from ropewalk.tools.bench.peers import PEERS
from ropewalk.tools.bench.report import HEADS, Report, Say, select_contenders

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark on a CPU.

    Args:
        tokens: the numbers of tokens to measure.
        dtypes: names in DTYPES.
        layout: "bshd" or "bhsd".
        backward: whether to measure forward + backward as well.
        compiled: whether to include torch.compile.
        only: parts of the names of contenders to measure. Empty means all. copy_ is always measured.
        threads: the number of threads of PyTorch and ONNX Runtime. None means PyTorch's current number.
        rounds, seconds: as in `measure.rows`.
        stream: the length in tokens of the long sequence that is rotated in chunks. 0 skips it.
    """

    tokens: Sequence[int] = (1, 128, 1024, 4096)
    dtypes: Sequence[str] = tuple(DTYPES)
    layout: Layout = "bshd"
    backward: bool = True
    compiled: bool = True
    only: Sequence[str] = ()
    threads: int | None = None
    rounds: int = 30
    seconds: float = 30.0
    stream: int = 1_000_000


def run(
    settings: Settings, say: Say, *, json_file: Path | None = None, plot_file: Path | None = None
) -> dict[str, Any]:
    """Run the benchmark and report the results.

    Args:
        settings: what to measure.
        say: called with each line of the report.
        json_file, plot_file: files for the results. Both are first written at the start, so that an unwritable path
            raises before the long run.

    Returns:
        The content of the JSON file: the entries of `machine.describe`, and date, settings, threads, rows
        (`measure.rows`) and stream (`measure.stream`).

    Raises:
        RopeError: `only` matches no contender but copy_; or plot_file is passed, but cannot be written or matplotlib is
            missing.
        OSError: json_file cannot be written.
    """
    contenders = select_contenders([*CONTENDERS, *PEERS], settings.only, settings.compiled)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    threads = torch.get_num_threads()
    _draw([], plot_file)  # raises now if matplotlib is missing or the file cannot be written, as Report does
    out = Report(asdict(settings), {"threads": threads, "rows": [], "stream": []}, say, json_file)
    cpu, torch_version = out.found["machine"], out.found["versions"]["torch"]
    out.introduce(
        f"{cpu['cpu']}, {cpu['cores']} cores, {threads} threads, torch {torch_version}",
        f"THP_MEM_ALLOC_ENABLE={out.found['THP_MEM_ALLOC_ENABLE']}, huge pages: {cpu['transparent_hugepage']}",
        f"batch 1, {HEADS}, layout {settings.layout}",
    )
    passes: tuple[Passes, ...] = ("forward", "forward + backward") if settings.backward else ("forward",)
    for dtype in (DTYPES[name] for name in settings.dtypes):
        for case in (Case(n, dtype, settings.layout, what) for n in settings.tokens for what in passes):
            out.add(case, measure.rows(case, contenders, OnCpu(), rounds=settings.rounds, seconds=settings.seconds))
        if settings.stream:
            chunk = min(4096, settings.stream)
            out.add_stream(measure.stream(dtype, settings.layout, tokens=settings.stream, chunk=chunk))
    _draw(out.found["rows"], plot_file)
    return out.found


def _draw(rows: Sequence[dict[str, Any]], plot_file: Path | None) -> None:
    if plot_file is not None:
        plots.save(plots.times_copy(rows), plot_file)
