"""Time calls on a CPU and on a GPU."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

Calls = Sequence[Callable[[], Any]]
"""The same call for several sets of inputs, called one after another."""

_SAMPLE = 2e-3  # seconds: shorter calls on a CPU are repeated, and their mean is one sample
_MAX_REPEATS = 1000
_MAX_SETS = 64
_HOST_CALLS = 8  # with many more calls, the queue of the device is full and the host waits


class Timed(NamedTuple):
    """A prepared call.

    Args:
        sample: a function that returns the seconds of one call.
        calls: the number of calls that `sample` makes on a CPU. None on a GPU.
        host: the seconds that the host needs for a call, which returns before the GPU has finished. None on a CPU.
    """

    sample: Callable[[], float]
    calls: int | None = None
    host: float | None = None


class Clock(Protocol):
    """The methods with which `measure.rows` times calls on a device."""

    def sets(self, moved: int) -> int:
        """Return the number of sets of inputs for calls that read and write `moved` bytes."""

    def prepare(self, calls: Calls) -> Timed:
        """Warm up the calls, and prepare them for timing."""


class OnCpu:
    """A clock for the CPU. A call shorter than 2 ms is repeated, and one sample is the mean time of the repetitions."""

    def sets(self, moved: int) -> int:
        """Return 1: on a CPU, all contenders share one set of inputs, which may stay in the caches."""
        return 1

    def prepare(self, calls: Calls) -> Timed:
        (call,) = calls
        once = min(_sample(call, 1) for _ in range(3))
        repeats = min(_MAX_REPEATS, math.ceil(_SAMPLE / once))
        return Timed(lambda: _sample(call, repeats), calls=repeats + 1)


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


@dataclass(frozen=True)
class OnGpu:
    """A clock for the GPU: it times all calls between two events of the device.

    A waiting kernel is launched first, so that the host runs ahead and launch overhead is hidden.

    Args:
        replay: whether to capture the calls in one CUDA graph, and time its replay.
    """

    replay: bool

    def sets(self, moved: int) -> int:
        """Return the number of sets that together exceed three times the L2 cache, at least 4 and at most 64."""
        cache: int = torch.cuda.get_device_properties().L2_cache_size
        return min(_MAX_SETS, max(4, 1 + 3 * cache // moved))

    def prepare(self, calls: Calls) -> Timed:
        _seconds(calls)
        host = statistics.median(_seconds(calls[:_HOST_CALLS])[1] for _ in range(5))
        number = len(calls)
        if self.replay:
            calls = [_graph(calls)]
        _seconds(calls)
        return Timed(lambda: _seconds(calls)[0] * len(calls) / number, host=host)


def _seconds(calls: Calls) -> tuple[float, float]:
    """Measure the mean seconds of one call on the device and on the host."""
    event: Any = torch.cuda.Event
    wait: Any = torch.cuda._sleep
    begin, end = event(enable_timing=True), event(enable_timing=True)
    wait(4_000_000 + 400_000 * len(calls))  # cycles: a few milliseconds, during which the host runs ahead
    begin.record()
    start = time.perf_counter()
    for call in calls:
        call()
    host = time.perf_counter() - start
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / len(calls), host / len(calls)


def _graph(calls: Calls) -> Callable[[], None]:
    """Capture all calls in a CUDA graph and return its replay, which keeps their results alive.

    If the results were freed, later allocations in the graph's memory could overwrite them.
    """
    stream: Any = torch.cuda.Stream
    side = stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]

    def replay(_results: object = results) -> None:
        graph.replay()

    return replay
