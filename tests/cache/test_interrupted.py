"""Ctrl-C while a call changes a cache: it has the tokens from before or after the call, or refuses all but `reset`."""

from __future__ import annotations

import copy
import itertools
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cache_model import ROPES, InterruptionError, RowRequests, is_interrupted
from ropewalk import RopeError

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"capacity": 60},
    "fp8": {"capacity": 60, "store": "fp8"},
    "latent": {"capacity": 60, "latent": 2},
    "window": {"window": 5},
    "sinks": {"window": 4, "sinks": 2},
}
WAYS = ("shift", "move", "reorder", "reset", "truncate", "step")
CASES = [
    (kind, way)
    for kind, way in itertools.product(KINDS, WAYS)
    if not (way == "move" and kind == "sinks") and not (way == "truncate" and "window" in KINDS[kind])
]


def filled(kind: str, seed: int) -> RowRequests:
    """Return a cache after some forward passes."""
    rows = RowRequests(seed, **KINDS[kind])
    for _ in range(4):
        rows.step()
    return rows


def call(requests: RowRequests, way: str, **options: Any) -> None:
    torch.manual_seed(0)
    getattr(requests, way)(**options)


def states(kind: str, way: str, seed: int) -> list[RowRequests]:
    """Return a cache before the call, after it and, if it drops tokens first, between the two."""
    before = filled(kind, seed)
    after = copy.deepcopy(before)
    call(after, way)
    if way != "truncate":
        return [before, after]
    between = copy.deepcopy(before)
    call(between, way, layers=0)
    return [before, after, between]


def has_tokens_of(requests: RowRequests, wanted: RowRequests) -> bool:
    """Return whether the cache has the expected tokens of `wanted`, each at its position in every layer."""
    requests.tokens, requests.following = wanted.tokens, wanted.following
    try:
        requests.check_everything()
    except AssertionError:
        return False
    step = requests.cache.step(1)
    for row, (order, places) in enumerate(zip(step.key_order.tolist(), step.key_positions.tolist(), strict=True)):
        place_of = dict(zip(order, places, strict=True))
        if any(place_of[n] != requests.tokens[row][n].position for n in requests.visible(row)):
            return False
    return True


def refusal_of(action: Callable[[], object]) -> str:
    """Return the message of the RopeError that an action raises, or nothing."""
    try:
        action()
    except RopeError as e:
        return str(e)
    return ""


def is_refused(requests: RowRequests) -> bool:
    """Return whether the cache refuses all calls but a reset, after which it must work."""
    cache: Any = requests.cache
    one, (rope, _) = torch.ones(1, dtype=torch.int64), ROPES["default"]
    message = refusal_of(lambda: cache.step(1))
    if "call rollback() first" in message:  # which a ring of several tokens cannot do
        if not (message := refusal_of(cache.rollback)):
            return False
        assert "with a window, a step of several tokens cannot be undone" in message
    elif message:
        assert "no change of the cache may have been interrupted" in message
        assert refusal_of(cache.rollback)
    else:
        return False
    assert refusal_of(lambda: cache.step(1))
    assert refusal_of(lambda: cache.shift(rope, 3))
    assert refusal_of(lambda: cache.move(rope, 0, one, one))
    assert refusal_of(lambda: cache.reset([0]))
    assert refusal_of(lambda: cache.reorder(torch.tensor([0, 0, 0])))
    cache.reset()
    requests.tokens, requests.following = [[], [], []], [0, 0, 0]
    requests.check_everything()
    call(requests, "step")
    requests.check_everything()
    return True


def outcome(requests: RowRequests, possible: list[RowRequests]) -> str:
    """Return what an interrupted call has left."""
    if is_refused(requests):
        return "refused"
    return next(
        (name for name, x in zip(("before", "after", "between"), possible, strict=False) if has_tokens_of(requests, x)),
        "WRONG",
    )


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_at_any_instruction(kind: str, way: str) -> None:
    """At every 61st instruction of attention and cache."""
    possible, found = states(kind, way, 5), Counter[str]()
    for at in itertools.count(1, 61):
        requests = copy.deepcopy(possible[0])
        if not is_interrupted(lambda: call(requests, way), at):  # noqa: B023
            break
        found[outcome(requests, possible)] += 1
    assert found["before"]
    assert not found["WRONG"], found


def is_signalled(action: Callable[[], object], after: float) -> bool:
    """Run an action, and interrupt it after some seconds by a real signal."""
    armed = [True]

    def handle(*_: object) -> None:
        if armed:
            armed.clear()
            raise InterruptionError

    old = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, after)
        action()
        armed.clear()
    except BaseException:  # NumPy may replace that of the handler by one of its own
        if armed:
            raise
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    return False


def interrupt(count: int, ways: tuple[str, ...] = WAYS) -> Counter[tuple[str, str]]:
    """Interrupt calls by real signals at random moments, and count what this leaves, by the name of the call."""
    found = Counter[tuple[str, str]]()
    for seed, (kind, way) in enumerate(itertools.cycle([case for case in CASES if case[1] in ways])):
        if found.total() >= count:
            break
        possible = states(kind, way, seed)
        requests, timed = copy.deepcopy(possible[0]), copy.deepcopy(possible[0])
        begin = time.perf_counter()
        call(timed, way)
        if is_signalled(lambda: call(requests, way), (time.perf_counter() - begin) * timed.draw.uniform(0.02, 1)):  # noqa: B023
            found[way, outcome(requests, possible)] += 1
    return found


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no such signals")
def test_by_real_signals() -> None:
    found = interrupt(60)
    assert not [key for key in found if key[1] == "WRONG"], found
