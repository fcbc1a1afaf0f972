"""`move` of both caches: the keys of a row are those that the oracle rotates to the new positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cache_model import HEAD_DIM, KV_HEADS, LAYERS, ROPES
from ropewalk import KVCache, PagedKVCache, Rope, RopeError

ROPE, ROTARY = ROPES["YaRN, partial"]
assert ROPE is not None
assert ROTARY is not None
AXES_OF_ROW = (LAYERS, 2, 7, KV_HEADS, HEAD_DIM)
RAW = torch.randn(AXES_OF_ROW, dtype=torch.float64)
VALUES = torch.randn(AXES_OF_ROW, dtype=torch.float64)


def keys_at(positions: list[list[int]], raw: Tensor = RAW) -> Tensor:
    """Return the keys of both rows [layers, 2, tokens, heads, channels], rotated to these positions."""
    return ROTARY(raw, torch.tensor(positions))


def filled(kind: str, **options: Any) -> Any:
    """Return a cache with 7 tokens in each of two rows, at the positions 0 to 6."""
    cache: Any
    if kind == "contiguous":
        size = options or {"capacity": 9}
        cache = KVCache(LAYERS, 2, KV_HEADS, HEAD_DIM, dtype=torch.float64, **size)
    else:
        cache = PagedKVCache(
            LAYERS, KV_HEADS, HEAD_DIM, blocks=12, block_size=3, layout=kind, dtype=torch.float64, **options
        )
        cache.admit()
        cache.admit()
    keys = keys_at([list(range(7))] * 2)
    step = cache.step(7)
    for i in range(LAYERS):
        step.layer(i).write(keys[i], VALUES[i])
    return cache


def cached(cache: Any, rows: list[int]) -> tuple[Tensor, Tensor]:
    """Return keys and values of all layers, [layers, rows, tokens, heads, channels]."""
    if isinstance(cache, KVCache):
        order, which = cache.step(1).key_order[rows].argsort(1)[:, :7], torch.tensor(rows)[:, None]
        pairs = [(k[which, order], v[which, order]) for k, v in zip(cache.keys, cache.values, strict=True)]
    else:
        blocks = cache.step(1, rows=rows).block_table
        pairs = [
            (k[blocks].flatten(1, 2), v[blocks].flatten(1, 2)) for k, v in zip(cache.keys, cache.values, strict=True)
        ]
    keys, values = (torch.stack(x)[:, :, :7] for x in zip(*pairs, strict=True))
    return keys, values


KINDS = ["contiguous", "NHD", "HND"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", [0, 1])
def test_some_tokens_move(kind: str, row: int) -> None:
    cache = filled(kind)
    cache.move([ROPE, ROPE], row, torch.tensor([5, 2, 1]), torch.tensor([-40, 1000, 6]))
    places = [list(range(7)), list(range(7))]
    places[row] = [0, 6, 1000, 3, 4, -40, 6]
    next_positions = [7, 7]
    next_positions[row] = 1001
    assert cache.position.tolist() == next_positions
    assert cache.length.tolist() == [7, 7]
    keys, values = cached(cache, [0, 1])
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
    torch.testing.assert_close(cached(cache, [0, 1])[0], keys_at(places), rtol=0, atol=3e-14)


def test_a_fork_keeps_its_keys() -> None:
    """Only the blocks with keys that move are copied: the second of three."""
    cache = filled("NHD")
    fork = cache.fork(1)
    free = cache.free_blocks
    cache.move(ROPE, 1, torch.tensor([3, 4]), torch.tensor([4, 3]))
    assert cache.free_blocks == free - 1
    keys, _ = cached(cache, [1, fork])
    both = keys_at([[0, 1, 2, 4, 3, 5, 6], [0, 1, 2, 3, 4, 5, 6]], RAW[:, [1, 1]])
    torch.testing.assert_close(keys, both, rtol=0, atol=3e-14)


@pytest.mark.parametrize("kind", ["contiguous", "NHD"])
def test_keys_in_8_bits(kind: str) -> None:
    """The other row keeps its bits. A key is rounded twice, by 1/254 of the largest number of its head."""
    cache = filled(kind, store="int8", **({"capacity": 9} if kind == "contiguous" else {}))
    blocks = None if kind == "contiguous" else cache.step(1).block_table
    before = [store.read(blocks, 7)[0][0].clone() for store in cache._stores]
    cache.move(ROPE, 1, torch.tensor([6, 1]), torch.tensor([0, 500]))
    places = [0, 500, 2, 3, 4, 5, 0]
    for i, wanted in enumerate(keys_at([list(range(7)), places])):
        keys = cache._stores[i].read(blocks, 7)[0]
        assert torch.equal(keys[0], before[i])
        assert (keys[1] - wanted[1]).abs().max() <= (1 + 2**0.5) / 254 * wanted[1].abs().max() * 2**0.5


@pytest.mark.parametrize("kind", ["contiguous", "NHD"])
def test_with_a_window(kind: str) -> None:
    """The cached tokens are at the positions from 3 on, or from that of the first block that is left."""
    cache = filled(kind, window=4)
    cache.move(ROPE, 0, torch.tensor([4, 6]), torch.tensor([60, 40]))
    step = cache.step(1)
    seen = (step.key_order[0] >= 4) & (step.key_order[0] < 7)
    found = dict(zip(step.key_order[0][seen].tolist(), step.key_positions[0][seen].tolist(), strict=True))
    assert {order: found[order] for order in (5, 6)} == {5: 5, 6: 40}
    assert found.get(4, 60) == 60  # the new token of a ring has the slot of one that it does not see
    assert step.positions.tolist() == [[61], [7]]


@pytest.mark.parametrize("kind", ["contiguous", "NHD"])
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
def test_refusals(kind: str, old: list[int], new: list[int], message: str) -> None:
    cache = filled(kind)
    before = cached(cache, [0, 1])
    with pytest.raises(RopeError, match=rf"KVCache\.move: .*{message}"):
        cache.move(ROPE, 0, torch.tensor(old), torch.tensor(new))
    assert all(map(torch.equal, cached(cache, [0, 1]), before))
    assert cache.position.tolist() == [7, 7]


@pytest.mark.parametrize("kind", ["contiguous", "NHD"])
def test_refusals_of_ropes_and_rows(kind: str) -> None:
    cache, place = filled(kind), torch.tensor([1])
    with pytest.raises(RopeError, match="head_dim of the cache"):
        cache.move(Rope(8, 1e4, "half"), 0, place, place)
    with pytest.raises(RopeError, match="row"):
        cache.move(ROPE, 2, place, place)
    for sinks in (KVCache(1, 1, 1, 2, window=2, sinks=1), PagedKVCache(1, 1, 2, blocks=2, window=2, sinks=1)):
        with pytest.raises(
            RopeError, match=r"Cache\.move: move must not be called in a cache with sinks, .* got sinks=1"
        ):
            sinks.move(Rope(2, 1e4, "half"), 0, place, place)
