"""KVCache: after random requests, each row has the keys and values of a plain list of tokens."""

from __future__ import annotations

from typing import Any

import pytest

from cache_model import RowRequests

SIZES: list[Any] = [
    pytest.param({**size, "store": store}, 3 if store != "int8" else 32, id=f"{size}, {store}")
    for store in (None, "int8", "fp8")
    for size in ({"capacity": 20}, {"window": 5}, {"window": 1}, {"window": 4, "sinks": 2})
]


def run(seed: int, size: dict[str, Any], count: int) -> RowRequests:
    requests = RowRequests(seed, **size)
    for _ in range(count):
        requests.request()
    return requests


@pytest.fixture(autouse=True)
def most_tokens_in_a_ring(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the new tokens up to which a ring has enough slots. A step of 9 tokens has more than 3."""
    for module in ("plan", "ring"):
        monkeypatch.setattr(f"ropewalk.cache.{module}.MOST_TOKENS", most)


@pytest.mark.parametrize(("size", "most"), SIZES)
def test_random_requests(size: dict[str, Any], most: int) -> None:
    run(0, size, 25)


@pytest.mark.parametrize(("size", "most"), SIZES)
def test_hundreds_of_random_requests(size: dict[str, Any], most: int) -> None:
    served = run(99, size, 400).served
    assert served["step"] > 150
    assert served["stopped"] > 10
    assert served["move"] > 20 or "sinks" in size
    assert served["truncate"] > 10 or "window" in size
