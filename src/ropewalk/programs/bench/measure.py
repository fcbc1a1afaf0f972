"""First the check, then the time: all contenders in turn within each round, so that a busy moment hits them alike."""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ropewalk.programs.bench.case import Case, Inputs, Layout
from ropewalk.programs.bench.clocks import Clock, Timed
from ropewalk.programs.bench.contenders import FLOOR, Contender, rope


def rows(
    case: Case, contenders: Sequence[Contender], clock: Clock, *, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """One row for each contender that can do this case, in the order given.

    Args:
        rounds: how many samples of each contender.
        seconds: no round begins after so long, once there are three.

    Returns:
        Rows for JSON. state is "timed", "wrong", "failed" or "not installed"; times are in seconds for one call.
    """
    able = [one for one in contenders if one.backward or case.passes == "forward"]
    if any(one.compiled for one in able):
        torch.compiler.reset()  # each case anew: sizes are constants, and none counts against the recompile limit
    sets = [case.inputs(seed) for seed in range(clock.sets(case.bytes_moved))]
    found, samplers = [], {}
    for contender in able:
        row, timed = _checked(contender, case, sets, clock)
        found.append(row)
        if timed is not None:
            samplers[contender.name] = partial(_sample_or_fail, row, timed.sample)
            row.update({} if timed.host is None else {"host": timed.host})
    samples = in_turn(samplers, rounds, seconds)
    in_time = {row["contender"]: samples[row["contender"]] for row in found if row["state"] == "timed"}
    floor = statistics.median(in_time[FLOOR]) if FLOOR in in_time else None
    for row in found:
        if row["state"] == "timed":
            row.update(_times(in_time[row["contender"]], floor, case.bytes_moved if row["does"] != "tables" else None))
    return found


def _sample_or_fail(row: dict[str, Any], sample: Callable[[], float]) -> float:
    """A sample; NaN once it has failed, for want of memory for example, which the row then says."""
    if row["state"] == "timed":
        try:
            return sample()
        except Exception as e:
            row.update(_failed(e))
    return math.nan


def _failed(e: Exception) -> dict[str, Any]:
    return {"state": "failed", "reason": f"{type(e).__name__}: {e}".split("\n")[0][:200]}


def _checked(
    contender: Contender, case: Case, sets: Sequence[Inputs], clock: Clock
) -> tuple[dict[str, Any], Timed | None]:
    """The row without times, and how to time it if the result for the first inputs is right."""
    row: dict[str, Any] = {
        "tokens": case.tokens,
        "dtype": case.dtype_name,
        "layout": case.layout,
        "backward": case.passes != "forward",
        "contender": contender.name,
        "does": contender.does,
    }
    allowed = case.tolerance(contender.does, own_angles=contender.own_angles)
    try:
        with warnings.catch_warnings(action="ignore"):  # of peers and of compilation
            bind = contender.make(case)
            call = bind(sets[0])
            error = case.error(contender.does, sets[0], call.tensors(call.run()))
            row.update(error=_in_json(error), allowed=allowed)
            if not error <= allowed:
                return {**row, "state": "wrong"}, None
            timed = clock.prepare([call.run, *(bind(inputs).run for inputs in sets[1:])])
    except ModuleNotFoundError as e:
        return {**row, "state": "not installed", "reason": f"no module {e.name}"}, None
    except Exception as e:  # whatever a peer raises is a line of the table
        return row | _failed(e), None
    return {**row, "state": "timed"}, timed


def in_turn(samplers: Mapping[str, Callable[[], float]], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Take a sample of each in every round.

    Args:
        samplers: by name, `Timed.sample` of a clock.
        rounds, seconds: as in `rows`.

    Returns:
        Seconds of one call, a sample of each round, by name.
    """
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
    case = Case(chunk, dtype, layout)
    q, k = inputs = case.inputs()
    starts = range(case.first, case.first + max(tokens, 2 * chunk), chunk)
    ours = rope("half")
    times, held = [], []
    turned: tuple[Tensor, ...] = ()
    for first in starts:
        turned = ()
        began = time.perf_counter()
        turned = ours.at(torch.arange(first, first + chunk))(q, k, layout=layout)
        times.append((time.perf_counter() - began) / chunk)
        held.append(_resident_bytes())
    last = Case(chunk, dtype, layout, first=starts[-1])
    some = min(16, len(times) // 2)
    return {
        "tokens": chunk * len(starts),
        "chunk": chunk,
        "dtype": case.dtype_name,
        "layout": layout,
        "first_per_token": statistics.median(times[:some]),
        "last_per_token": statistics.median(times[-some:]),
        "growth_bytes": max(held[some:]) - max(held[:some]) if held[0] else None,
        "error": _in_json(last.error("half", inputs, turned)),
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
