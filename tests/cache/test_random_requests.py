"""KVCache: after random requests, each row has the keys and values of a plain list of tokens."""

from __future__ import annotations

from typing import Any

import pytest

from cache_model import RowRequests

SIZES: list[dict[str, Any]] = [
    {**size, "store": store}
    for store in (None, "int8", "fp8")
    for size in ({"capacity": 20}, {"window": 5}, {"window": 1}, {"window": 4, "sinks": 2})
]


def run(seed: int, size: dict[str, Any], count: int) -> RowRequests:
    requests = RowRequests(seed, **size)
    for _ in range(count):
        requests.request()
    return requests


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_random_requests(size: dict[str, Any]) -> None:
    run(0, size, 25)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_hundreds_of_random_requests(size: dict[str, Any]) -> None:
    served = run(99, size, 400).served
    assert served["step"] > 150
    assert served["stopped"] > 10
    assert served["move"] > 20 or "sinks" in size
    assert served["truncate"] > 10 or "window" in size
