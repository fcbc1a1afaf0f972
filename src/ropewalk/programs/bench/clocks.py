"""How a call is timed on a CPU and on a GPU."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

Calls = Sequence[Callable[[], Any]]
"""The same call for different inputs, which are taken in turn."""

_SAMPLE = 2e-3  # seconds: calls on a CPU that are shorter are repeated, and their mean is one sample
_MOST_REPEATS = 1000
_MOST_SETS = 64
_HOST = 8  # calls: many fill the queue of the device, and the host waits


class Timed(NamedTuple):
    """sample: takes one sample, seconds of one call. host: seconds until a call on a GPU comes back, None on a CPU."""

    sample: Callable[[], float]
    host: float | None = None


class Clock(Protocol):
    """What `measure.rows` needs of a device."""

    def sets(self, moved: int) -> int:
        """How many sets of inputs are taken in turn, when a call reads and writes so many bytes."""

    def prepare(self, calls: Calls) -> Timed:
        """Everything that comes before the first sample; the calls are made."""


class OnCpu:
    """Calls shorter than 2 ms are repeated, and the mean is one sample."""

    def sets(self, moved: int) -> int:
        """One: what is in the caches is the same for all."""
        return 1

    def prepare(self, calls: Calls) -> Timed:
        (call,) = calls
        once = min(_sample(call, 1) for _ in range(3))
        repeats = min(_MOST_REPEATS, math.ceil(_SAMPLE / once))
        return Timed(lambda: _sample(call, repeats))


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


@dataclass(frozen=True)
class OnGpu:
    """All calls between two events of the device, while the host is far ahead: a kernel that only waits goes first.

    replay: the calls are one CUDA graph, which is replayed.
    """

    replay: bool

    def sets(self, moved: int) -> int:
        """Together three times the second-level cache or more, but for the smallest."""
        cache: int = torch.cuda.get_device_properties().L2_cache_size
        return min(_MOST_SETS, max(4, 1 + 3 * cache // moved))

    def prepare(self, calls: Calls) -> Timed:
        _seconds(calls)
        host = statistics.median(_seconds(calls[:_HOST])[1] for _ in range(5))
        number = len(calls)
        if self.replay:
            calls = [_graph(calls)]
        _seconds(calls)
        return Timed(lambda: _seconds(calls)[0] * len(calls) / number, host)


def _seconds(calls: Calls) -> tuple[float, float]:
    """Seconds of one call: of the device, and of the host meanwhile."""
    event: Any = torch.cuda.Event
    wait: Any = torch.cuda._sleep
    begin, end = event(enable_timing=True), event(enable_timing=True)
    wait(4_000_000 + 400_000 * len(calls))  # cycles: some milliseconds, in which the host runs ahead
    begin.record()
    start = time.perf_counter()
    for call in calls:
        call()
    host = time.perf_counter() - start
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / len(calls), host / len(calls)


def _graph(calls: Calls) -> Callable[[], None]:
    """One replay in the place of all calls. Their results live as long, or the next would be written over them."""
    stream: Any = torch.cuda.Stream
    side = stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]

    def replay(_results: object = kept) -> None:
        graph.replay()

    return replay
