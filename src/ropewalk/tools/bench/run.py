"""The benchmark on a CPU, for several sizes. It reports text, JSON and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ropewalk import plots
from ropewalk.tools.bench import measure
from ropewalk.tools.bench.case import Case, Passes
from ropewalk.tools.bench.clocks import OnCpu
from ropewalk.tools.bench.contenders import CONTENDERS
from ropewalk.tools.bench.memory import memories, using
from ropewalk.tools.bench.peers import PEERS
from ropewalk.tools.bench.report import HEADS, Report, Say, select_contenders

_LARGE = 16 * 2**20  # bytes: glibc's own rule keeps smaller blocks, and maps larger ones anew sooner or later
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark on a CPU.

    Args:
        tokens: the numbers of tokens to measure.
        dtypes: names in DTYPES.
        backward: whether to measure forward + backward as well.
        compiled: whether to include torch.compile.
        only: parts of the names of contenders to measure. Empty means all. copy_ is always measured.
        threads: the number of threads of PyTorch and ONNX Runtime. None means PyTorch's current number.
        rounds, seconds: as in `measure.rows`.
    """

    tokens: Sequence[int] = (1, 32, 128, 1024, 4096, 16_384)
    dtypes: Sequence[str] = tuple(DTYPES)
    backward: bool = True
    compiled: bool = True
    only: Sequence[str] = ()
    threads: int | None = None
    rounds: int = 30
    seconds: float = 30.0


def run(
    settings: Settings, say: Say, *, json_file: Path | None = None, plot_file: Path | None = None
) -> dict[str, Any]:
    """Run the benchmark and report the results.

    New tensors are in memory that the process has already used. Cases whose q has at least `_LARGE` bytes are also
    measured with new tensors in new memory from the system, for contenders that return new tensors. Where the C library
    is not glibc, there is one measurement, in memory of unknown origin.

    Args:
        settings: what to measure.
        say: called with each line of the report.
        json_file, plot_file: files for the results. Both are first written at the start, so that an unwritable path
            raises before the long run.

    Returns:
        The content of the JSON file: the entries of `machine.describe`, and date, settings, threads and rows
        (`measure.rows`, and memory: "new", "kept" or "unknown").

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
    out = Report(asdict(settings), {"threads": threads, "rows": []}, say, json_file)
    out.introduce(
        f"torch {torch.__version__}, {threads} threads, huge pages: {out.found['machine']['transparent_hugepage']}",
        f"batch 1, {HEADS}",
    )
    passes: tuple[Passes, ...] = ("forward", "forward + backward") if settings.backward else ("forward",)
    cases = [Case(n, DTYPES[name], what) for name in settings.dtypes for n in settings.tokens for what in passes]
    for memory in memories():
        with using(memory):
            for case in cases:
                if memory == "new" and case.q_bytes < _LARGE:
                    continue
                returning = [one for one in contenders if memory != "new" or not (one.in_place or one.does == "tables")]
                rows = measure.rows(case, returning, OnCpu(), rounds=settings.rounds, seconds=settings.seconds)
                out.add(case, [{"memory": memory, **row} for row in rows])
    _draw(out.found["rows"], plot_file)
    return out.found


def _draw(rows: Sequence[dict[str, Any]], plot_file: Path | None) -> None:
    if plot_file is not None:
        plots.save(plots.times_copy(rows), plot_file)
