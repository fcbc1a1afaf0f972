"""The whole benchmark: every case, then a long sequence in chunks; lines to read, JSON to keep, a picture."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ropewalk import plots
from ropewalk._checks import error
from ropewalk.programs.bench import machine, measure
from ropewalk.programs.bench.case import HEAD_DIM, KV_HEADS, Q_HEADS, Case, Layout
from ropewalk.programs.bench.contenders import CONTENDERS, Contender
from ropewalk.programs.bench.peers import PEERS

Say = Callable[[str], None]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    """What to measure.

    tokens: sizes. dtypes: names of DTYPES. layout: "bshd" or "bhsd". backward: forward + backward as well as forward.
    compiled: torch.compile too. only: parts of the names of contenders, all if empty; copy_ is always there. threads:
    of PyTorch and ONNX Runtime, None for what PyTorch has. rounds, seconds: as in `measure.rows`. stream: tokens of
    the long sequence, 0 for none.
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
    """Measure and report.

    Args:
        say: called with each line of the report.
        json_file, plot_file: written at the start already, so that a long run does not end in vain.

    Returns:
        What JSON gets: date, machine, versions, commit, settings, threads, rows (`measure.rows`) and stream
        (`measure.stream`).

    Raises:
        RopeError: no contender has a name like those of `only`; a file cannot be written; matplotlib is missing.
    """
    contenders = _chosen(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **machine.describe(),
        "settings": asdict(settings),
        "threads": torch.get_num_threads(),
        "rows": [],
        "stream": [],
    }
    _write(report, json_file, plot_file)
    _introduce(report, say)
    for name in settings.dtypes:
        for tokens in settings.tokens:
            for backward in (False, True) if settings.backward else (False,):
                case = Case.make(tokens, DTYPES[name], settings.layout, backward=backward)
                rows = measure.rows(case, contenders, rounds=settings.rounds, seconds=settings.seconds)
                report["rows"] += rows
                _show(rows, case.bytes_moved, say)
                _write(report, json_file, None)
        if settings.stream:
            chunk = min(4096, settings.stream)
            row = measure.stream(DTYPES[name], settings.layout, tokens=settings.stream, chunk=chunk)
            report["stream"].append(row)
            _show_stream(row, say)
    _write(report, json_file, plot_file)
    return report


def _chosen(settings: Settings) -> list[Contender]:
    every = [*CONTENDERS, *PEERS]
    chosen = [
        one
        for one in every
        if one.name == measure.FLOOR or not settings.only or any(part in one.name for part in settings.only)
    ]
    if settings.only and len(chosen) == 1:
        names = ", ".join(one.name for one in every)
        raise error("bench", "only must name a contender", repr(list(settings.only)), f"There are: {names}.")
    return [one for one in chosen if settings.compiled or "compiled" not in one.name]


def _write(report: dict[str, Any], json_file: Path | None, plot_file: Path | None) -> None:
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
        except OSError as e:
            got = f"{str(json_file)!r} ({e.strerror})"
            raise error("bench", "the JSON file must be writable", got, "Pass another.") from e
    if plot_file is not None:
        plots.save(plots.times_copy(report["rows"]), plot_file)


def _introduce(report: dict[str, Any], say: Say) -> None:
    cpu, versions = report["machine"], report["versions"]
    say(f"{cpu['cpu']}, {cpu['cores']} cores, {report['threads']} threads, torch {versions['torch']}")
    say(f"THP_MEM_ALLOC_ENABLE={report['THP_MEM_ALLOC_ENABLE']}, huge pages: {cpu['transparent_hugepage']}")
    layout = report["settings"]["layout"]
    say(f"batch 1, {Q_HEADS} query heads, {KV_HEADS} key heads, head_dim {HEAD_DIM}, layout {layout}")
    if (cpu["load"] or 0.0) > 0.5:
        say(f"Warning: the machine is busy (load {cpu['load']:.1f}). Only ratios within one table mean something.")


def _show(rows: Sequence[dict[str, Any]], moved: int, say: Say) -> None:
    first = rows[0]
    passes = "forward + backward" if first["backward"] else "forward"
    say("")
    tokens = f"{first['tokens']:,} token{'s' if first['tokens'] > 1 else ''}"
    say(f"{tokens}, {first['dtype']}, {passes}: {moved / 1e6:,.2f} MB read and written")
    say(f"  {'':<24} {'median':>10}  {'10-90 % of samples':>23}  {'GB/s':>6}  {'x copy_':>7}")
    for row in rows:
        say(f"  {row['contender']:<24} {_line(row)}")
    table, turned = (
        next((r.get("median") for r in rows if r["contender"] == name), None)
        for name in ("ropewalk, table", "ropewalk")
    )
    if table and turned:
        say(f"  Building the table takes {table / turned:.2f} of rotating with it.")


def _line(row: dict[str, Any]) -> str:
    if row["state"] == "wrong":
        return f"wrong: error {float(row['error']):.1e}, allowed {row['allowed']:.1e}; not timed"
    if row["state"] != "timed":
        return f"{row['state']}: {row['reason']}"
    spread = f"{_time(row['p10'])} - {_time(row['p90'])}"
    speed, ratio = ("" if x is None else f"{x:.{n}f}" for x, n in ((row["gb_per_s"], 1), (row["times_copy"], 2)))
    return f"{_time(row['median']):>10}  {spread:>23}  {speed:>6}  {ratio:>7}"


def _show_stream(row: dict[str, Any], say: Say) -> None:
    grown = "unknown" if row["growth_bytes"] is None else f"{row['growth_bytes'] / 1e6:+.1f} MB"
    first, last = row["first_per_token"], row["last_per_token"]
    say("")
    say(f"{row['tokens']:,} tokens, {row['dtype']}, in chunks of {row['chunk']:,}, angles included")
    say(f"  per token: first chunks {_time(first)}, last chunks {_time(last)} ({last / first:.2f}); memory {grown}")
    if not float(row["error"]) <= row["allowed"]:
        say(f"  wrong: error {float(row['error']):.1e}, allowed {row['allowed']:.1e}")


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"
