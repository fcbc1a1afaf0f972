"""Check the results of contenders, then time them alternately, so that a busy moment affects all of them."""

from __future__ import annotations

import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ropewalk.tools.bench.case import Case, Inputs
from ropewalk.tools.bench.clocks import Clock, Timed
from ropewalk.tools.bench.contenders import FLOOR, Contender
from ropewalk.tools.bench.memory import page_faults


def rows(
    case: Case, contenders: Sequence[Contender], clock: Clock, *, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Measure each contender that supports this case, in the given order.

    Args:
        case: the inputs and passes.
        contenders: the contenders, unique by name.
        clock: the clock of the device.
        rounds: number of samples of each contender.
        seconds: time limit. When it has passed and three rounds are complete, no further round begins.

    Returns:
        One row for JSON for each contender. Its state is "timed", "wrong", "failed" or "not installed". Times are in
        seconds for one call. A row timed on a CPU has faults: the least and the largest number of page faults of one
        call in a sample.
    """
    supported = [contender for contender in contenders if contender.backward or case.passes == "forward"]
    if any(contender.compiled for contender in supported):
        torch.compiler.reset()  # compile each case with constant sizes, without reaching the recompile limit
    sets = [case.inputs(seed) for seed in range(clock.sets(case.bytes_moved))]
    results, samplers = [], {}
    for contender in supported:
        row, timed = _check(contender, case, sets, clock)
        results.append(row)
        if timed is not None:
            samplers[contender.name] = partial(_sample_or_fail, row, timed)
            row.update({} if timed.host is None else {"host": timed.host})
    samples = sample_alternately(samplers, rounds, seconds)
    valid = {row["contender"]: samples[row["contender"]] for row in results if row["state"] == "timed"}
    floor = statistics.median(valid[FLOOR]) if FLOOR in valid else None
    for row in results:
        if row["state"] == "timed":
            found = summary(valid[row["contender"]])
            moved = case.bytes_moved if row["does"] != "tables" else None
            row.update(found, gb_per_s=None if moved is None else moved / found["median"] / 1e9)
            row["times_copy"] = None if floor is None else found["median"] / floor
    return results


def _sample_or_fail(row: dict[str, Any], timed: Timed) -> float:
    """Take a sample, and widen the range of page faults of one call, faults, in the row.

    If it raises, for example because memory runs out, mark the row as failed and return NaN.
    """
    if row["state"] == "timed":
        before = page_faults()
        try:
            seconds = timed.sample()
            if timed.calls is not None:
                each = round((page_faults() - before) / timed.calls)
                least, most = row.get("faults", (each, each))
                row["faults"] = [min(least, each), max(most, each)]
            return seconds
        except Exception as e:
            row.update(_describe_failure(e))
    return math.nan


def _describe_failure(e: Exception) -> dict[str, Any]:
    return {"state": "failed", "reason": f"{type(e).__name__}: {e}".split("\n")[0][:200]}


def _check(
    contender: Contender, case: Case, sets: Sequence[Inputs], clock: Clock
) -> tuple[dict[str, Any], Timed | None]:
    """Check the result for the first inputs. Return the row without times, and the call if the result is correct."""
    row: dict[str, Any] = {
        "tokens": case.tokens,
        "dtype": case.dtype_name,
        "backward": case.passes != "forward",
        "contender": contender.name,
        "does": contender.does,
    }
    allowed = case.tolerance(contender.does, own_angles=contender.own_angles)
    try:
        with warnings.catch_warnings(action="ignore"):  # from peers and from compilation
            bind = contender.make(case)
            call = bind(sets[0])
            error = case.error(contender.does, sets[0], call.tensors(call.run()))
            row.update(error=to_json_number(error), allowed=allowed)
            if not error <= allowed:
                return {**row, "state": "wrong"}, None
            timed = clock.prepare([call.run, *(bind(inputs).run for inputs in sets[1:])])
    except ModuleNotFoundError as e:
        return {**row, "state": "not installed", "reason": f"no module {e.name}"}, None
    except Exception as e:  # an error of a peer becomes a line of the table
        return row | _describe_failure(e), None
    return {**row, "state": "timed"}, timed


def sample_alternately(
    samplers: Mapping[str, Callable[[], float]], rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Take one sample of each contender in every round.

    Args:
        samplers: a dict from the name of each contender to its `Timed.sample`.
        rounds, seconds: as in `rows`.

    Returns:
        A dict from the name of each contender to its samples, one for each round, in seconds for one call.
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


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Summarize samples: rounds (how many), their median, and the 10th and 90th percentile (p10, p90)."""
    samples = sorted(samples)
    tenth = (len(samples) - 1) // 10
    return {
        "rounds": len(samples),
        "median": statistics.median(samples),
        "p10": samples[tenth],
        "p90": samples[-1 - tenth],
    }


def to_json_number(error: float) -> float | str:
    """Convert NaN and infinity, which JSON lacks, to strings that `float` parses."""
    return error if math.isfinite(error) else str(error)
