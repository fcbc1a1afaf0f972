"""First the check, then the time: all contenders in turn within each round, so that a busy moment hits them alike."""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ropewalk.programs.bench.case import Case, Layout
from ropewalk.programs.bench.contenders import Call, Contender, rope

FLOOR = "copy_"
_SAMPLE = 2e-3  # seconds: calls shorter than this are repeated, and their mean is one sample
_MOST_REPEATS = 1000


def rows(case: Case, contenders: Sequence[Contender], *, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """One row for each contender that can do this case, in the order given.

    Args:
        rounds: how many samples of each contender.
        seconds: no round begins after so long, once there are three.

    Returns:
        Rows for JSON. state is "timed", "wrong", "failed" or "not installed"; times are in seconds for one call.
    """
    able = [one for one in contenders if one.backward or case.grad_q is None]
    found, calls = [], {}
    for contender in able:
        row, call = _checked(contender, case)
        found.append(row)
        if row["state"] == "timed" and call is not None:
            calls[contender.name] = call.run
    samples = in_turn(calls, rounds, seconds)
    floor = statistics.median(samples[FLOOR]) if FLOOR in samples else None
    for row in found:
        if row["state"] == "timed":
            row.update(_times(samples[row["contender"]], floor, case.bytes_moved if row["does"] != "tables" else None))
    return found


def _checked(contender: Contender, case: Case) -> tuple[dict[str, Any], Call | None]:
    """The row without times, and what to time if the result is right."""
    row: dict[str, Any] = {
        "tokens": case.tokens,
        "dtype": case.dtype_name,
        "layout": case.layout,
        "backward": case.grad_q is not None,
        "contender": contender.name,
        "does": contender.does,
    }
    try:
        with warnings.catch_warnings(action="ignore"):  # of peers and of compilation
            call = contender.make(case)
            error = case.error(contender.does, call.tensors(call.run()))
    except ModuleNotFoundError as e:
        return {**row, "state": "not installed", "reason": f"no module {e.name}"}, None
    except Exception as e:  # whatever a peer raises is a line of the table
        return {**row, "state": "failed", "reason": f"{type(e).__name__}: {e}".split("\n")[0][:200]}, None
    allowed = case.tolerance(contender.does, own_angles=contender.own_angles)
    row.update(error=_in_json(error), allowed=allowed)
    return {**row, "state": "timed" if error <= allowed else "wrong"}, call


def in_turn(calls: Mapping[str, Callable[[], object]], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Time calls, each once in every round.

    Args:
        calls: by name. A call shorter than 2 ms is repeated, and the mean is one sample.
        rounds, seconds: as in `rows`.

    Returns:
        Seconds of one call, a sample of each round, by name.
    """
    repeats = {name: _repeats(call) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        started = time.perf_counter()
        for done in range(rounds):
            if done >= 3 and time.perf_counter() - started > seconds:
                break
            for name, call in calls.items():
                samples[name].append(_sample(call, repeats[name]))
    finally:
        gc.enable()
    return samples


def _repeats(call: Callable[[], object]) -> int:
    once = min(_sample(call, 1) for _ in range(3))
    return min(_MOST_REPEATS, math.ceil(_SAMPLE / once))


def _sample(call: Callable[[], object], repeats: int) -> float:
    """Mean seconds of one call, after one that is not timed: caches and threads are then this contender's own.

    The result before is dropped before each call, so a new result is new memory. Where a call is not repeated, giving
    memory back is not in the time.
    """
    call()
    kept: list[object] = []
    start = time.perf_counter()
    for _ in range(repeats):
        kept.clear()
        kept.append(call())
    return (time.perf_counter() - start) / repeats


def _times(samples: list[float], floor: float | None, moved: int | None) -> dict[str, Any]:
    samples = sorted(samples)
    median = statistics.median(samples)
    return {
        "rounds": len(samples),
        "median": median,
        "p10": samples[(len(samples) - 1) // 10],
        "p90": samples[-1 - (len(samples) - 1) // 10],
        "gb_per_s": None if moved is None else moved / median / 1e9,
        "times_copy": None if floor is None else median / floor,
    }


def stream(dtype: torch.dtype, layout: Layout, *, tokens: int, chunk: int) -> dict[str, Any]:
    """A long sequence in chunks, two at least: the angles of each chunk, then q and k turned into new tensors.

    Returns:
        A row for JSON: seconds per token of the first and of the last chunks (medians of 16, fewer if there are few);
        growth_bytes, how much more memory the process held after these first chunks than within them, None where the
        system does not say; error and allowed, of the last chunk.
    """
    case = Case.make(chunk, dtype, layout, backward=False)
    starts = range(case.first, case.first + max(tokens, 2 * chunk), chunk)
    ours = rope("half")
    times, held = [], []
    turned: tuple[Tensor, ...] = ()
    for first in starts:
        turned = ()
        began = time.perf_counter()
        turned = ours.at(torch.arange(first, first + chunk))(case.q, case.k, layout=layout)
        times.append((time.perf_counter() - began) / chunk)
        held.append(_resident_bytes())
    last = Case.make(chunk, dtype, layout, backward=False, first=starts[-1])
    some = min(16, len(times) // 2)
    return {
        "tokens": chunk * len(starts),
        "chunk": chunk,
        "dtype": case.dtype_name,
        "layout": layout,
        "first_per_token": statistics.median(times[:some]),
        "last_per_token": statistics.median(times[-some:]),
        "growth_bytes": max(held[some:]) - max(held[:some]) if held[0] else None,
        "error": _in_json(last.error("half", turned)),
        "allowed": last.tolerance("half", own_angles=False),
    }


def _in_json(error: float) -> float | str:
    """JSON has neither NaN nor infinity: they become words, which `float` reads."""
    return error if math.isfinite(error) else str(error)


def _resident_bytes() -> int:
    """What this process holds in memory; 0 where there is no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
