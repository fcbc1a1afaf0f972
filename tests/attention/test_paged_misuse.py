"""Invalid calls of a PagedKVCache raise and change nothing."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_model import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, MODEL, is_interrupted, run, stopped
from paged_model import blocks_of
from ropewalk import Axes, PagedKVCache, Rope, RopeError, SelfExtend

ROPE = Rope(HEAD_DIM, 1e4, "half")


def paged(rows: int = 2, **options: Any) -> PagedKVCache:
    options = {"blocks": 8, "block_size": 4, "dtype": torch.float64} | options
    cache = PagedKVCache(LAYERS, KV_HEADS, HEAD_DIM, **options)
    for _ in range(rows):
        cache.admit()
    return cache


def new(rows: int, seq: int) -> Tensor:
    return torch.randn(rows, seq, HIDDEN, dtype=torch.float64)


def state(cache: PagedKVCache) -> list[Any]:
    length = cache.length.tolist()
    pools = [pool.tolist() for pool in cache.keys + cache.values]
    return [length, cache.position.tolist(), cache.free_blocks, blocks_of(cache), pools]


def pool(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(*shape or (2, 4, 1, 6), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, "num_layers must be an integer from 1 to 65536, got 0"),
        ({"num_kv_heads": 1.5}, "num_kv_heads must be an integer of at least 1"),
        ({"head_dim": 0}, "head_dim must be an integer from 1"),
        ({"blocks": 0}, "blocks must be an integer from 1 to 2147483647, got 0"),
        ({"blocks": 2**31}, "blocks must be an integer from 1 to 2147483647"),
        ({"block_size": 0}, "block_size must be an integer of at least 1"),
        ({"layout": "nhd"}, "layout must be one of 'NHD', 'HND', got 'nhd'"),
        ({"window": 0}, "window must be an integer of at least 1"),
        ({"sinks": 2}, "sinks must be 0 without a window, and with flex, got sinks=2, window=None, flex=False"),
        ({"sinks": 2, "window": 4, "flex": True}, "sinks must be 0 without a window, and with flex"),
        ({"sinks": -1, "window": 4}, "sinks must be an integer of at least 0"),
        ({"dtype": torch.int8}, "dtype must be float16, bfloat16, float32 or float64, got torch.int8"),
        ({"dtype": "float32"}, "dtype must be float16, bfloat16, float32 or float64, got float32"),
    ],
)
def test_impossible_caches(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeError, match=f"^PagedKVCache: {message}"):
        PagedKVCache(**{"num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "blocks": 2} | options)


@pytest.mark.parametrize(
    ("k_cache", "v_cache", "message"),
    [
        (pool(), [pool()], r"k_cache must be a list of tensors, one for each layer, got torch.float32 of shape"),
        ([pool()], [], "v_cache must be a list of tensors"),
        ([pool()], [None], "v_cache must be a list of tensors"),
        ([pool()] * 2, [pool()], "k_cache and v_cache must have the same number of layers, got 2 and 1"),
        ([pool(2, 4, 6)], [pool()], r"a pool of k_cache must have shape \[blocks, block_size, kv_heads, head_dim\]"),
        ([pool(2, 0, 1, 6)], [pool()], r"none of them 0, got \(2, 0, 1, 6\)"),
        (
            [pool()],
            [pool(2, 4, 1, 4)],
            r"all pools must be torch.float32 of .* got torch.float32 of shape \(2, 4, 1, 4\)",
        ),
        ([pool()], [pool(dtype=torch.float64)], "all pools must be torch.float32 of shape"),
        ([pool()], [pool(device="meta")], "all pools must be torch.float32 of shape .* on meta in v_cache"),
        ([pool(2, 4, 1, 12)[..., ::2]], [pool()], "a pool of k_cache must have contiguous channels"),
        ([pool()], [pool(1, 4, 1, 6).expand(2, -1, -1, -1)], r"no overlapping elements.* got strides \(0, 6, 6, 1\)"),
        ([torch.zeros(4000).as_strided((4, 4, 2, 8), (8, 16, 8, 1))], [pool(4, 4, 2, 8)], "no overlapping elements"),
        ([pool(requires_grad=True)], [pool()], "and no gradient, got strides .* and requires_grad=True"),
        ([pool(dtype=torch.int8)], [pool(dtype=torch.int8)], "dtype must be float16"),
    ],
)
def test_impossible_pools(k_cache: Any, v_cache: Any, message: str) -> None:
    with pytest.raises(RopeError, match=rf"^PagedKVCache\.from_pools: (.*, )?(.* \[.*, )?{message}"):
        PagedKVCache.from_pools(k_cache, v_cache)


def test_a_window_of_pools() -> None:
    with pytest.raises(RopeError, match="window must be an integer of at least 1, got 0"):
        PagedKVCache.from_pools([pool()], [pool()], window=0)


REQUESTS: list[tuple[str, Callable[[PagedKVCache], object], str]] = [
    ("step", lambda c: c.step(0), "seq must be an integer of at least 1, got 0"),
    ("step", lambda c: c.step(1, rows=[]), "the cache must have a row, got none"),
    ("step", lambda c: c.step(1, rows=[0, 0]), r"rows must be distinct numbers .* got \[0, 0\]"),
    ("step", lambda c: c.step(1, rows=[7]), r"rows must be .*, got row 7\. The existing rows are \[0, 1\]"),
    ("step", lambda c: c.step(1, rows=[-1]), "each of rows must be an integer of at least 0, got -1"),
    ("step", lambda c: c.step(1, rows=[True]), "each of rows must be an integer of at least 0, got True"),
    ("step", lambda c: c.step(1, rows=torch.zeros(2)), "rows must be distinct numbers .* got torch.float32"),
    ("step", lambda c: c.step(1, rows={0: 1}), r"rows must be distinct numbers .* got \{0: 1\}"),
    ("step", lambda c: c.step(1, attention_mask=torch.ones(2, 2) > 0), "attention_mask must be a bool or integer"),
    ("step", lambda c: c.step(1, attention_mask=[[1], [1]]), "attention_mask must be a bool or integer"),
    ("step", lambda c: c.step(1, rows=[0], attention_mask=torch.ones(2, 1) > 0), r".*\[batch, seq\] = \[1, 1\]"),
    ("step", lambda c: c.step(1, positions=torch.zeros(3)), "positions must be integers, int64, got torch.float32"),
    ("step", lambda c: c.step(1, positions=torch.zeros(3, dtype=torch.int64)), "positions must be an int64 tensor"),
    ("step", lambda c: c.step(1, positions=[0]), r"positions must be an int64 tensor .* got \[0\]"),
    (
        "step",
        lambda c: c.step(1, at=torch.zeros(3, dtype=torch.int64)),
        r"at must be an int64 tensor \[batch\] = \[2\]",
    ),
    ("step", lambda c: c.step(1, at=3), "at must be an int64 tensor"),
    ("step", lambda c: c.step(1, at=torch.tensor([0, 2**31 + 1])), r"every position must stay within ±2\*\*31, got"),
    ("step", lambda c: c.step(1, positions=torch.tensor([2**63 - 1])), r"every position must stay within ±2\*\*31"),
    (
        "step",
        lambda c: c.step(1, positions=torch.tensor([-(2**63)])),
        r"every position .* from -9223372036854775808 to -9",
    ),
    (
        "shift",
        lambda c: c.shift(ROPE, 2**31),
        r"every position must stay within ±2\*\*31, got positions from 2147483648",
    ),
    ("shift", lambda c: c.shift(ROPE, torch.tensor([0, 2**63 - 1])), r"every position must stay within ±2\*\*31"),
    ("shift", lambda c: c.shift(ROPE, torch.tensor([0, -(2**63)])), r"every position must stay within ±2\*\*31"),
    ("step", lambda c: c.step(40), "the number of free blocks must be at least 20, got 4. Free or reset rows"),
    ("step", lambda c: c.step(40, at=torch.tensor([2, 2])), "the number of free blocks must be at least 20, got 6"),
    ("free", lambda c: c.free(7), "rows must be .*, got row 7"),
    ("free", lambda c: c.free([0, 7]), "rows must be .*, got row 7"),
    ("free", lambda c: c.free("0"), "rows must be distinct numbers .* got '0'"),
    ("reset", lambda c: c.reset([0, 7]), "rows must be .*, got row 7"),
    ("reset", lambda c: c.reset(torch.ones(2) > 0), "rows must be distinct numbers .* got torch.bool"),
    ("fork", lambda c: c.fork(7), "rows must be .*, got row 7"),
    ("fork", lambda c: c.fork(0, 7), "length must be an integer from 0 to 6, got 7"),
    ("fork", lambda c: c.fork(0, -1), "length must be an integer from 0 to 6, got -1"),
    ("reorder", lambda c: c.reorder([0]), r"parents must be 2 row numbers, one for each row, got \[0\]"),
    ("reorder", lambda c: c.reorder(torch.zeros(2, 1)), "parents must be 2 row numbers"),
    ("reorder", lambda c: c.reorder([0, 7]), "rows must be .*, got row 7"),
    ("reorder", lambda c: c.reorder([0, [1]]), "rows must be|each of rows must be"),
    ("reorder", lambda c: c.reorder([0], rows=[7]), "rows must be .*, got row 7"),
    ("shift", lambda c: c.shift(ROPE, 0.5), "delta must be an integer from"),
    ("shift", lambda c: c.shift(ROPE, torch.ones(3, dtype=torch.int64)), r"delta must be an int64 tensor \[batch\]"),
    ("shift", lambda c: c.shift(ROPE, torch.ones(2)), "delta must be an int64 tensor"),
    ("shift", lambda c: c.shift([ROPE], 1), "rope must be a Rope, or a list of 2 "),
    ("shift", lambda c: c.shift(Rope(8, 1e4, "half"), 1), "rope must have the head_dim of the cache, 6"),
    ("shift", lambda c: c.shift(ROPE, 1, rows=[7]), "rows must be .*, got row 7"),
]


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_impossible_requests(number: int) -> None:
    verb, request, message = REQUESTS[number]
    cache = paged()
    run(cache, new(2, 6), ROPE)
    before = state(cache)
    with pytest.raises(RopeError, match=rf"^PagedKVCache\.{verb}: {message}"):
        request(cache)
    assert state(cache) == before


def test_numbers_of_freed_rows_are_not_reused() -> None:
    cache = paged()
    cache.free(1)
    with pytest.raises(RopeError, match=r"got row 1, which was freed. The existing rows are \[0\]"):
        cache.step(1, rows=[1])
    assert cache.admit() == 2
    assert cache.rows == [0, 2]


def test_no_row_yet() -> None:
    with pytest.raises(RopeError, match=r"the cache must have a row, got none. Call cache.admit\(\)"):
        paged(0).step(1)


def test_tokens_that_a_window_has_evicted() -> None:
    cache = paged(window=4)
    with pytest.raises(RopeError, match=r"PagedKVCache\.step: at must be None in a cache with a window"):
        cache.step(1, at=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(RopeError, match=r"PagedKVCache\.fork: length must be None in a cache with a window"):
        cache.fork(0, 0)


def test_no_block_for_a_copy() -> None:
    cache = paged(1, blocks=2)
    run(cache, new(1, 6), ROPE)
    cache.fork(0)
    before = state(cache)
    with pytest.raises(RopeError, match=r"PagedKVCache\.shift: the number of free blocks must be at least 2, got 0"):
        cache.shift(ROPE, 1, rows=[0])
    with pytest.raises(RopeError, match=r"PagedKVCache\.step: the number of free blocks must be at least 1, got 0"):
        cache.step(1, rows=[0])
    assert state(cache) == before
    run(cache, new(1, 2), ROPE, rows=[cache.fork(0, 0)], attention_mask=torch.tensor([[0, 0]]))
    cache.free(1)
    run(cache, new(1, 2), ROPE, rows=[0])


class TestLayers:
    def test_invalid_arguments_store_nothing(self) -> None:
        cache = paged()
        step = cache.step(3)
        before, layer = state(cache), step.layer(0)
        q, k = (torch.randn(2, 3, heads, HEAD_DIM, dtype=torch.float64) for heads in (HEADS, KV_HEADS))
        wrong: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
            (r"q must have shape \(2, 3, heads, 6\), with a multiple of 2 heads", (q[:1], k, k), {}),
            (r"k must have shape \(2, 3, 2, 6\) in torch.float64", (q, k[:, :2], k), {}),
            ("v must have shape", (q, k, k.float()), {}),
            ("rotation must be a Rotation", (q, k, k), {"rotation": ROPE}),
            ("with a cache, rotation must be computed for", (q, k, k), {"rotation": ROPE.at(torch.arange(3))}),
            (
                r"mask must be broadcastable to \[batch, heads, seq, keys\] = \[2, 4, 3, 4\]",
                (q, k, k),
                {"mask": q[:1, :1, :, :2] > 0},
            ),
            (
                "with a cache, a rotation in two passes must be computed for all 4 keys",
                (q, k, k),
                {"rotation": SelfExtend(ROPE, 2, 2).at(step.positions, torch.zeros(2, 3, dtype=torch.int64))},
            ),
            ("gradients cannot pass through a cache", (q, k.clone().requires_grad_(), k), {}),
        ]
        for message, given, options in wrong:
            with pytest.raises(RopeError, match=f"^PagedKVCache: {message}"):
                layer.attend(*given, **options)
        assert state(cache) == before
        with pytest.raises(RopeError, match=r"PagedStep\.layer: index must be an integer from 0 to 1, got 2"):
            step.layer(2)

    def test_layers_append_once_and_in_order(self) -> None:
        cache, k = paged(), torch.zeros(2, 1, KV_HEADS, HEAD_DIM, dtype=torch.float64)
        step = cache.step(1)
        with pytest.raises(RopeError, match="PagedKVCache: all 2 layers must append, the last one last"):
            step.layer(1).append(k, k)
        step.layer(0).append(k, k)
        with pytest.raises(RopeError, match="PagedKVCache: each layer must append once in a step"):
            step.layer(0).write(k, k)
        with pytest.raises(
            RopeError, match=r"PagedStep\.mark_written: no layer may have appended in this step, got 1 layers that have"
        ):
            step.mark_written()

    @pytest.mark.parametrize(
        "other",
        [
            lambda c: c.step(1),
            lambda c: c.reset(),
            lambda c: c.reset([0]),
            lambda c: c.free([0]),
            lambda c: c.fork(0),
            lambda c: c.shift(ROPE, 3),
            lambda c: c.rollback(),
        ],
    )
    def test_an_outdated_step(self, other: Callable[[PagedKVCache], object]) -> None:
        cache, k = paged(), torch.zeros(2, 1, KV_HEADS, HEAD_DIM, dtype=torch.float64)
        step = cache.step(1)
        other(cache)
        before = state(cache)
        for use in (lambda: step.layer(0).append(k, k), lambda: step.mark_written()):
            with pytest.raises(RopeError, match="PagedKVCache: a step must be the newest of its cache"):
                use()
        with pytest.raises(RopeError, match="PagedStep: key_positions must be read while the step is the newest"):
            _ = step.key_positions
        assert state(cache) == before

    def test_another_row_outdates_nothing(self) -> None:
        cache = paged()
        step = cache.step(1)
        cache.admit()
        k = torch.zeros(2, 1, KV_HEADS, HEAD_DIM, dtype=torch.float64)
        for i in range(LAYERS):
            step.layer(i).append(k, k)
        assert cache.length.tolist() == [1, 1, 0]

    def test_the_rotation_of_the_previous_step(self) -> None:
        cache, x = paged(), new(2, 1)
        step = cache.step(1)
        rotation = step.rotation(ROPE, dtype=torch.float64)
        with torch.no_grad():
            for i in range(LAYERS):
                MODEL[i](x, rotation, cache=step.layer(i))
            with pytest.raises(RopeError, match="PagedKVCache: with a cache, each step needs its own rotation"):
                MODEL[0](x, rotation, cache=cache.step(1).layer(0))
            # Another selection of rows may use the same rotation.
            MODEL[0](
                x[:1],
                rotation := ROPE.at(torch.ones(1, 1), dtype=torch.float64),
                cache=cache.step(1, rows=[0]).layer(0),
            )
            cache.rollback()
            MODEL[0](x[:1], rotation, cache=cache.step(1, rows=[1]).layer(0))

    def test_a_rope_of_another_number_of_axes(self) -> None:
        step = paged().step(2, positions=torch.zeros(3, 2, 2, dtype=torch.int64))
        with pytest.raises(RopeError, match=r"must have shape \[2, seq\] or \[2, batch, seq\]"):
            step.rotation(Rope(HEAD_DIM, 1e2, "half", axes=Axes.sections((1, 2))))


class TestAPassThatStopped:
    def test_must_be_rolled_back(self) -> None:
        cache = paged()
        run(cache, new(2, 3), ROPE)
        before = state(cache)[:-1]
        stopped(cache, new(2, 3), 1)
        for request in (
            lambda: cache.step(1),
            lambda: cache.free(0),
            lambda: cache.fork(0),
            lambda: cache.reset([0]),
            lambda: cache.shift(ROPE, 1),
        ):
            with pytest.raises(
                RopeError, match=r"every layer must have appended in the previous step, got 1 of 2 layers"
            ):
                request()
        cache.rollback()
        assert state(cache)[:-1] == before

    def test_may_be_reset(self) -> None:
        cache = paged()
        stopped(cache, new(2, 3), 1)
        cache.reset()
        assert cache.length.tolist() == [0, 0]
        assert cache.free_blocks == 8

    def test_before_the_first_layer_is_dropped(self) -> None:
        """The next step gets the blocks of a dropped step, without a call of rollback."""
        cache = paged()
        stopped(cache, new(2, 16), 0)
        assert cache.free_blocks == 0
        run(cache, new(2, 16), ROPE)
        assert cache.length.tolist() == [16, 16]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    "action",
    [
        lambda c: c.step(3),
        lambda c: c.step(3, at=torch.tensor([3, 4, 8, 5])),
        lambda c: c.shift(ROPE, torch.tensor([1, 2, 0, 1])),
        lambda c: c.fork(1),
        lambda c: c.free([0, 1]),
        lambda c: c.reset([0, 1]),
        lambda c: c.reorder([1, 1, 3, 0]),
    ],
    ids=["step", "step with at", "shift", "fork", "free", "reset", "reorder"],
)
def test_an_exception_at_any_instruction_loses_no_block(
    action: Callable[[PagedKVCache], object], window: int | None
) -> None:
    """Whatever it interrupts, all blocks can be freed afterwards, and no token of a row that goes on is lost."""
    if window and action.__code__.co_consts[-1] == ("at",):
        return  # not supported
    for after in itertools.count(1, 29):
        cache = paged(3, blocks=32, block_size=2, window=window)
        run(cache, new(3, 5), ROPE)
        cache.fork(0)
        cache.step(4)
        run(cache, new(2, 3), ROPE, rows=[1, 2])  # whose tokens have not been counted yet
        if not is_interrupted(lambda: action(cache), after):  # noqa: B023
            break
        try:
            cache.rollback()
        except RopeError:  # the call has moved some keys, see test_interrupted.py
            cache.reset()
        assert all(length in (0, 3, 4, 5, 8) for length in cache.length.tolist())
        cache.step(2)
        cache.reset()
        cache.free(cache.rows)
        assert cache.free_blocks == 32, after
    assert after > 300


def test_copies_and_pickles() -> None:
    cache = paged()
    run(cache, new(2, 3), ROPE)
    cache.fork(1)
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    x = new(3, 2)
    others = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), torch.load(file, weights_only=False)]
    wanted = run(cache, x, ROPE)
    for other in others:
        assert torch.equal(run(other, x, ROPE), wanted)
        assert state(other) == state(cache)


def test_pools_that_share_elements() -> None:
    pool = torch.zeros(4, 2, KV_HEADS, 3 * HEAD_DIM)
    first, second = pool[..., :HEAD_DIM], pool[..., HEAD_DIM // 2 : HEAD_DIM // 2 + HEAD_DIM]
    for keys, values in (([first], [first]), ([first], [second]), ([first, first], [pool[..., -HEAD_DIM:]] * 2)):
        with pytest.raises(RopeError, match="pools must not share elements, got pools that overlap"):
            PagedKVCache.from_pools(keys, values)
    PagedKVCache.from_pools([first], [pool[..., HEAD_DIM : 2 * HEAD_DIM]])
