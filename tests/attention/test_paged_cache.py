"""PagedKVCache: after random requests, each row equals a plain list of tokens, and no block is lost."""

from __future__ import annotations

from typing import Any

import pytest

from paged_model import Requests

SIZES: list[dict[str, Any]] = [
    {"blocks": 12, "block_size": 4},
    {"blocks": 40, "block_size": 1},
    {"blocks": 6, "block_size": 16, "layout": "HND"},
    {"blocks": 16, "block_size": 3, "window": 5},
    {"blocks": 12, "block_size": 4, "window": 1},
    {"blocks": 12, "block_size": 4, "store": "int8"},
    {"blocks": 16, "block_size": 3, "window": 5, "store": "fp8"},
    {"blocks": 20, "block_size": 3, "window": 5, "sinks": 2},
    {"blocks": 16, "block_size": 4, "window": 2, "sinks": 4, "store": "int8"},
    {"blocks": 24, "block_size": 2, "window": 1, "sinks": 5},
]


def run(seed: int, size: dict[str, Any], count: int) -> Requests:
    """Send this number of random requests to a cache, and free all of its rows."""
    requests = Requests(seed, **size)
    for _ in range(count):
        requests.request()
    requests.end()
    return requests


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_random_requests(size: dict[str, Any]) -> None:
    for seed in range(3):
        run(seed, size, 30)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_thousands_of_random_requests(size: dict[str, Any]) -> None:
    requests = run(99, size, 700)
    assert requests.served > 200
    assert requests.refused > 5 or "window" in size
