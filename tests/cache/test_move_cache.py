"""`KVCache.move`: the keys of a row are those that the oracle rotates to the new positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cache_model import HEAD_DIM, KV_HEADS, LAYERS, ROPES
from ropewalk import KVCache, Rope, RopeError

ROPE, ROTARY = ROPES["YaRN, partial"]
assert ROPE is not None
assert ROTARY is not None
AXES_OF_ROW = (LAYERS, 2, 7, KV_HEADS, HEAD_DIM)
RAW = torch.randn(AXES_OF_ROW, dtype=torch.float64)
VALUES = torch.randn(AXES_OF_ROW, dtype=torch.float64)


def keys_at(positions: list[list[int]], raw: Tensor = RAW) -> Tensor:
    """Return the keys of both rows [layers, 2, tokens, heads, channels], rotated to these positions."""
    return ROTARY(raw, torch.tensor(positions))


def filled(**options: Any) -> KVCache:
    """Return a cache with 7 tokens in each of two rows, at the positions 0 to 6."""
    cache = KVCache(LAYERS, 2, KV_HEADS, HEAD_DIM, dtype=torch.float64, **(options or {"capacity": 9}))
    keys = keys_at([list(range(7))] * 2)
    step = cache.step(7)
    for i in range(LAYERS):
        step.layer(i).append(keys[i], VALUES[i])
    return cache


def cached(cache: KVCache) -> tuple[Tensor, Tensor]:
    """Return keys and values of all layers, [layers, rows, tokens, heads, channels]."""
    return torch.stack(cache.keys)[:, :, :7].clone(), torch.stack(cache.values)[:, :, :7].clone()


@pytest.mark.parametrize("row", [0, 1])
def test_some_tokens_move(row: int) -> None:
    cache = filled()
    cache.move([ROPE, ROPE], row, torch.tensor([5, 2, 1]), torch.tensor([-40, 1000, 6]))
    places = [list(range(7)), list(range(7))]
    places[row] = [0, 6, 1000, 3, 4, -40, 6]
    next_positions = [7, 7]
    next_positions[row] = 1001
    assert cache.position.tolist() == next_positions
    assert cache.length.tolist() == [7, 7]
    keys, values = cached(cache)
    torch.testing.assert_close(keys, keys_at(places), rtol=0, atol=3e-14)
    assert torch.equal(values, VALUES)
    step = cache.step(1)
    assert step.positions[:, 0].tolist() == next_positions
    seen = step.key_order[row] < 7  # the order of the tokens stays
    assert step.key_positions[row][seen].tolist() == places[row]
    # Tokens at one position move together, here those in the slots 1 and 6, and then back.
    cache.move(ROPE, row, torch.tensor([6, 1000]), torch.tensor([-2, -3]))
    assert cache.position[row] == 5
    cache.move(ROPE, row, torch.tensor([-2]), torch.tensor([6]))
    places[row][2] = -3
    torch.testing.assert_close(cached(cache)[0], keys_at(places), rtol=0, atol=3e-14)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ([1, 7], [1, 2], "old must be distinct positions of cached tokens, got position 7 of no token"),
        ([1, 1], [1, 2], "got position 1 twice"),
        ([1, 2], [1], r"of one length, .*shape \(2,\) and .*shape \(1,\)"),
        ([], [], "at least 1"),
        ([1.0], [2.0], "int64"),
        ([1], [2**31 + 1], r"within ±2\*\*31"),
    ],
)
def test_refusals(old: list[int], new: list[int], message: str) -> None:
    cache = filled()
    before = cached(cache)
    with pytest.raises(RopeError, match=rf"KVCache\.move: .*{message}"):
        cache.move(ROPE, 0, torch.tensor(old), torch.tensor(new))
    assert all(map(torch.equal, cached(cache), before))
    assert cache.position.tolist() == [7, 7]


def test_refusals_of_ropes_and_rows() -> None:
    cache, place = filled(), torch.tensor([1])
    with pytest.raises(RopeError, match="head_dim of the cache"):
        cache.move(Rope(8, 1e4, "half"), 0, place, place)
    with pytest.raises(RopeError, match="row"):
        cache.move(ROPE, 2, place, place)
    with pytest.raises(RopeError, match=r"Cache\.move: move must not be called in a cache with sinks, .* got sinks=1"):
        KVCache(1, 1, 1, 2, window=2, sinks=1).move(Rope(2, 1e4, "half"), 0, place, place)
