"""KVCache: attention in several steps equals attention in one pass, which is written out in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import attention_oracle as written_out
import oracle
from cache_model import (
    EXACT,
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MODEL,
    ROPES,
    cache_of,
    check_rows,
    distances,
    run,
    run_whole_row,
    state,
    unchanged,
)
from ropewalk import DynamicNTK, KVCache, Rope, RopeError, SelfExtend, TwoPass


@given(data=st.data(), batch=st.integers(1, 3), group=st.integers(1, 4), window=st.integers(0, 6))
@settings(max_examples=40)
def test_several_steps_equal_one_pass_with_self_extend(
    data: st.DataObject, batch: int, group: int, window: int
) -> None:
    rope, rotary = ROPES["YaRN, partial"]
    assert rope is not None
    torch.manual_seed(data.draw(st.integers(0, 99)))
    cache = cache_of(batch, capacity=20)
    outputs, inputs, real = [], [], []
    for seq in data.draw(st.lists(st.sampled_from([1, 1, 2, 6]), min_size=1, max_size=3)):
        inputs.append(torch.randn(batch, seq, HIDDEN, dtype=torch.float64))
        real.append(torch.rand(batch, seq) < 0.7)
        outputs.append(run(cache, inputs[-1], SelfExtend(rope, group, window), attention_mask=real[-1]))
    check_rows(
        outputs,
        inputs,
        real,
        rotary,
        lambda row, seq: (written_out.self_extend(range(seq), group, window), written_out.causal(seq)),
    )


def test_explicit_positions_are_copied() -> None:
    """The caller may reuse one buffer for the positions of every step."""
    cache, buffer = KVCache(1, 1, 1, 2, capacity=4), torch.tensor([7, 7])
    step, k = cache.step(2, positions=buffer), torch.ones(1, 2, 1, 2)
    buffer.fill_(0)
    step.layer(0).append(k, k)
    assert step.positions.tolist() == [[7, 7]]
    assert cache.step(1).key_positions.tolist() == [[7, 7, 8, 2**62]]


@pytest.mark.parametrize("delta", [-7, torch.tensor([40, -3])])
def test_shift_rotates_keys_only(delta: int | Tensor) -> None:
    """The attention factor of every key is unchanged, in every layer and also where the shift is 0."""
    rope, rotary = ROPES["YaRN, partial"]
    assert rope is not None
    assert rotary is not None
    cache, k = cache_of(2, capacity=3), torch.randn(2, 3, KV_HEADS, HEAD_DIM, dtype=torch.float64)
    step = cache.step(3)
    rotation = rope.at(step.positions, dtype=torch.float64)
    for index in range(LAYERS):
        step.layer(index).append(rotation(k, layout="bshd"), k)
    cache.shift([rope, None], delta)
    moved = (torch.arange(3) + (delta[:, None] if isinstance(delta, Tensor) else delta)).expand(2, 3).numpy()
    speeds = np.array([float(w) for w in rotary.speeds])
    for index, places in ((0, moved), (1, np.arange(3)[None].repeat(2, 0))):
        wanted = oracle.rotate(
            k.numpy(), places[..., None, None] * speeds, rotary.pairing, rotary.offset, rotary.factor
        )
        np.testing.assert_allclose(cache.keys[index][:, :3].numpy(), wanted, rtol=0, atol=1e-14)
        assert torch.equal(cache.values[index][:, :3], k)
    following = cache.step(1, at=None, attention_mask=torch.zeros(2, 1, dtype=torch.bool))
    assert torch.equal(following.positions[:, 0], torch.as_tensor(moved[:, -1] + 1))
    assert torch.equal(following.key_positions, torch.as_tensor(moved))


def test_rows_are_recycled_in_a_compiled_pass() -> None:
    rope, rotary = ROPES["default"]

    def recycle_and_run(cache: KVCache, x: Tensor, ended: Tensor) -> Tensor:
        cache.reset(ended)
        return run(cache, x, rope)

    cache, x, ended = cache_of(2, window=3), torch.randn(2, 6, HIDDEN, dtype=torch.float64), [[], [0], [], [0, 1]]
    run(cache, x[:, :2], rope)
    compiled = torch.compile(recycle_and_run, fullgraph=True, backend="aot_eager")
    outputs = [
        compiled(cache, x[:, i + 2 : i + 3], torch.tensor([0 in rows, 1 in rows])) for i, rows in enumerate(ended)
    ]
    assert cache.position.tolist() == [1, 1]
    wanted = run_whole_row(x[0, 3:5], rotary, *distances(2, {"window": 3}))
    torch.testing.assert_close(torch.cat(outputs[1:3], dim=1)[0], wanted, **EXACT)


@pytest.mark.parametrize(
    ("rows", "got"),
    [
        ([2], "2"),
        ([-1], "-1"),
        ([True, False], "True"),
        ([0.0], "0.0"),
        (0, "got 0"),
        (torch.tensor([0, 2]), "got rows up to 2"),
        (torch.tensor([-1]), "got rows from -1"),
        (torch.tensor([True]), r"got torch.bool of shape \(1,\)"),
        (torch.tensor([[0]]), r"got torch.int64 of shape \(1, 1\)"),
        (torch.tensor([0.0]), "got torch.float32"),
    ],
)
def test_unknown_rows(rows: Any, got: str) -> None:
    cache = KVCache(1, 2, 1, 2, window=4)
    cache.step(1).layer(0).append(torch.ones(2, 1, 1, 2), torch.ones(2, 1, 1, 2))
    with pytest.raises(RopeError, match=rf"KVCache\.reset: .*rows.*{got}"):
        cache.reset(rows)
    assert cache.length.tolist() == [1, 1]


def test_in_inference_mode() -> None:
    rope, _ = ROPES["YaRN, partial"]
    assert rope is not None
    one, other, x = cache_of(2, window=3, sinks=1), cache_of(2, window=3, sinks=1), torch.randn(2, 5, HIDDEN).double()
    outputs = []
    for cache in (one, other):
        with torch.inference_mode(cache is one):
            run(cache, x[:, :4], rope)
            cache.shift(rope, 9)
            outputs.append(run(cache, x[:, 4:], rope))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("extended", ["no", "Self-Extend", "sinks of a user"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_a_mask_is_combined_with_causality(dtype: torch.dtype, extended: str) -> None:
    """The keys of a mask are those of key_positions. Here, the token at position 1 is hidden from the second step.

    In float32 there is a kernel for few tokens, which knows neither masks nor rotations in two passes but its own.
    """
    rope, rotary = ROPES["default"]
    assert rope is not None
    cache, layer = KVCache(1, 1, KV_HEADS, HEAD_DIM, capacity=6, dtype=dtype), copy.deepcopy(MODEL[0]).to(dtype)
    x = torch.randn(1, 4, HIDDEN).to(dtype)
    for hides in (False, True):
        seen, at = written_out.causal(4), written_out.pairs(torch.arange(4))
        if extended == "Self-Extend":
            at = written_out.self_extend(range(4), 2, 2)
        elif extended != "no":
            at = (at[0].clone(), at[1].clone())
            at[0][:, 0] += 5
        outputs: list[Tensor] = []
        cache.reset()
        for i in (0, 2):
            step = cache.step(2)
            rotation = step.rotation(rope, dtype=dtype)
            if extended == "Self-Extend":
                rotation = SelfExtend(rope, 2, 2).at(step.positions, step.key_positions, dtype=dtype)
            elif extended != "no":
                moved = rope.at(step.positions + 5, dtype=dtype)
                rotation = TwoPass(
                    rope.at(step.positions, dtype=dtype), moved, None, step.key_positions[:, None, None] < 1, 1
                )
            hidden = step.key_positions[:, None, None, :] != 1 if i and hides else None
            with torch.no_grad():
                outputs.append(layer(x[:, i : i + 2], rotation, mask=hidden, cache=step.layer(0)))
        if hides:
            seen[2:, 1] = False
        with torch.no_grad():
            expected = written_out.of_layer(MODEL[0], x.double(), rotary, at, seen=seen)
        exact = EXACT if dtype == torch.float64 else {"rtol": 0, "atol": 2e-6}
        torch.testing.assert_close(torch.cat(outputs, 1).double(), expected, **exact)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("size", [{"capacity": 12}, {"window": 3, "sinks": 2}])
def test_compiles_once_for_all_tokens(size: dict[str, int], given: bool) -> None:
    rope, _ = ROPES["YaRN, partial"]
    x = torch.randn(2, 10, HIDDEN, dtype=torch.float64)
    torch._dynamo.reset()  # Dynamo's limit includes the graphs of `run` that other tests compiled
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    if given:
        size = {name: number for name, number in size.items() if name != "sinks"}
    plain, traced = cache_of(2, **size), cache_of(2, **size)
    for start, stop in ((0, 5), *((i, i + 1) for i in range(5, 10))):
        options = {"positions": torch.randint(-5, 5, (2, stop - start))} if given else {}
        wanted = run(plain, x[:, start:stop], rope, **options)
        torch.testing.assert_close(compiled(traced, x[:, start:stop], rope, **options), wanted, **EXACT)
    assert counter.frame_count == 2  # the prompt and one token


def test_overflow_in_a_compiled_pass() -> None:
    """Compiled code reads nothing back: tokens beyond the capacity are not stored, and `length` exceeds it."""
    rope, _ = ROPES["default"]
    cache, x = cache_of(1, capacity=3), torch.randn(1, 2, HIDDEN, dtype=torch.float64)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    compiled(cache, x, rope)
    kept = cache.keys[0][:, :2].clone()
    compiled(cache, x, rope)
    assert cache.length.tolist() == [4]
    assert torch.equal(cache.keys[0][:, :2], kept)
    compiled(cache, x, rope)  # the new tokens are beyond the last slot
    assert cache.length.tolist() == [6]
    assert torch.equal(cache.keys[0][:, :2], kept)
    with pytest.raises(RopeError, match=r"KVCache\.step: no row may become longer than capacity=3, got 8 tokens"):
        run(cache, x, rope)


def test_a_full_cache_is_unchanged_by_the_error() -> None:
    rope, _ = ROPES["default"]
    cache, x = cache_of(2, capacity=3), torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    ragged = {"attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
    run(cache, x, rope, **ragged)
    with pytest.raises(RopeError, match="capacity=3, got 4 tokens"):
        run(cache, x[:, :1], rope)
    run(cache, x, rope, attention_mask=torch.tensor([[0, 0, 0], [1, 0, 1]]))  # full rows may get padding
    assert cache.length.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("request_", "got"),
    [
        (lambda c: c.step(1, positions=torch.tensor([2**63 - 1])), "9223372036854775807 to 9223372036854775807"),
        (lambda c: c.step(1, positions=torch.tensor([-(2**31) - 1])), "-2147483649 to -2147483649"),
        (lambda c: c.step(1, at=torch.tensor([0, 2**62])), "0 to 4611686018427387904"),
        (lambda c: c.shift(Rope(2, 1e4, "half"), 2**31), "2147483651 to 2147483651"),
        (lambda c: c.shift(Rope(2, 1e4, "half"), torch.tensor([2**63 - 1, 0])), "-9223372036854775806 to 3"),
        (lambda c: c.shift(Rope(2, 1e4, "half"), torch.tensor([0, 2 - 2**31 - 3])), "-2147483649 to 2"),
    ],
)
def test_positions_stay_in_their_range(request_: Callable[[KVCache], object], got: str) -> None:
    cache, k = KVCache(1, 2, 1, 2, capacity=6), torch.ones(2, 3, 1, 2)
    cache.step(3).layer(0).append(k, k)
    before = state(cache)
    with pytest.raises(RopeError, match=rf"every position must stay within ±2\*\*31, got positions from {got}\."):
        request_(cache)
    assert unchanged(cache, before)
    cache.shift(Rope(2, 1e4, "half"), -(2**31))
    cache.step(1, positions=torch.tensor([2**31])).layer(0).append(k[:, :1], k[:, :1])
    assert cache.position.tolist() == [2**31 + 1] * 2


def test_refused_calls_leave_the_cache_unchanged() -> None:
    rope, _ = ROPES["default"]
    cache, x = cache_of(2, capacity=6), torch.randn(2, 6, HIDDEN, dtype=torch.float64)
    run(cache, x, rope)
    before = state(cache)
    with pytest.raises(RopeError, match="capacity=6, got 7 tokens"):
        cache.step(5, at=torch.tensor([2, 2]))
    for ropes, message in (
        (
            [rope, Rope(HEAD_DIM + 2, 1e4, "half")],
            f"the head_dim of the cache, {HEAD_DIM}, got head_dim={HEAD_DIM + 2}",
        ),
        ([rope, Rope(HEAD_DIM, 1e4, "half", scaling=DynamicNTK(2.0, 4))], "the length must be resolved"),
    ):
        with pytest.raises(RopeError, match=message):
            cache.shift(ropes, 3)
    assert unchanged(cache, before)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool])
def test_dtype_must_be_floating_point(dtype: torch.dtype) -> None:
    with pytest.raises(RopeError, match="dtype must be float16, bfloat16, float32 or float64, got torch"):
        KVCache(1, 1, 1, 8, capacity=4, dtype=dtype)


@pytest.mark.parametrize(
    ("numbers", "options", "message"),
    [
        ((0, 1, 1, 8), {"capacity": 4}, "num_layers must be an integer from 1 to 65536"),
        ((2**31, 1, 1, 8), {"capacity": 4}, "num_layers must be an integer from 1 to 65536"),
        ((1, 0, 1, 8), {"capacity": 4}, "batch must be an integer of at least 1"),
        ((1, 1, 0, 8), {"capacity": 4}, "num_kv_heads must be an integer of at least 1"),
        ((1, 1, 1, 0), {"capacity": 4}, "head_dim must be an integer from 1"),
        ((1, 1, 1, 8), {}, "either capacity or window must be given, .* got capacity=None, window=None, sinks=0"),
        ((1, 1, 1, 8), {"capacity": 4, "window": 4}, ".* got capacity=4, window=4, sinks=0"),
        ((1, 1, 1, 8), {"capacity": 4, "sinks": 1}, ".* got capacity=4, window=None, sinks=1"),
        ((1, 1, 1, 8), {"window": 4, "sinks": -1}, "sinks must be an integer of at least 0"),
        ((1, 1, 1, 8), {"capacity": 0}, "capacity must be an integer of at least 1"),
        ((1, 1, 1, 8), {"window": 0}, "window must be an integer of at least 1"),
    ],
)
def test_refuses_numbers(numbers: tuple[int, int, int, int], options: dict[str, int], message: str) -> None:
    with pytest.raises(RopeError, match=f"KVCache: {message}"):
        KVCache(*numbers, **options)


def test_refuses_arguments() -> None:
    cache = KVCache(1, 2, 1, 2, capacity=8)
    with pytest.raises(RopeError, match=r"KVCache.step: seq must be an integer of at least 1, got 0"):
        cache.step(0)
    with pytest.raises(RopeError, match=r"attention_mask must be .* \[2, 3\], got torch.int64 of shape \(2, 2\)"):
        cache.step(3, attention_mask=torch.ones(2, 2).long())
    with pytest.raises(RopeError, match=r"attention_mask must be .* got torch.float32 of shape \(2, 3\)"):
        cache.step(3, attention_mask=torch.ones(2, 3))
    with pytest.raises(RopeError, match=r"attention_mask must be .* got \[1, 1\]"):
        cache.step(1, attention_mask=[1, 1])  # type: ignore[arg-type]
    with pytest.raises(RopeError, match=r"at must be an int64 tensor \[batch\] = \[2\], got 5"):
        cache.step(1, at=5)  # type: ignore[arg-type]
    with pytest.raises(RopeError, match=r"at must be None in a cache with a window.*reset\(rows=\.\.\.\)"):
        KVCache(1, 2, 1, 2, window=8).step(1, at=torch.tensor([0, 0]))
    shape = r"positions must be .* \[axes, batch, seq\], \[batch, seq\] = \[2, 3\] or \[seq\] = \[3\] on cpu, got"
    for wrong, got in (
        (torch.zeros(2).long(), r"torch.int64 of shape \(2,\) on cpu"),
        (torch.zeros(3, 1).long(), r"torch.int64 of shape \(3, 1\)"),
        (torch.zeros(3, dtype=torch.int32), "torch.int32"),
        (torch.zeros(3, dtype=torch.int64, device="meta"), r"torch.int64 of shape \(3,\) on meta"),
        ([0, 1, 2], r"\[0, 1, 2\]"),
    ):
        with pytest.raises(RopeError, match=rf"KVCache\.step: {shape} {got}"):
            cache.step(3, positions=wrong)  # type: ignore[arg-type]
    message = r"positions must be None in a cache with sinks, .* Build the cache with sinks=0, or without a window\."
    with pytest.raises(RopeError, match=message):
        KVCache(1, 2, 1, 2, window=8, sinks=1).step(1, positions=torch.tensor([0]))
    rope = Rope(2, 1e4, "half")
    with pytest.raises(RopeError, match=r"delta must be an int64 tensor \[batch\] = \[2\], got .* shape \(3,\)"):
        cache.shift(rope, torch.tensor([1, 2, 3]))
    with pytest.raises(RopeError, match="delta must be an integer from"):
        cache.shift(rope, 1.5)  # type: ignore[arg-type]
    for ropes in ([rope, rope], ["half"], None):
        with pytest.raises(RopeError, match=r"KVCache\.shift: rope must be a Rope, or a list of 1 "):
            cache.shift(ropes, 1)  # type: ignore[arg-type]


class TestReorder:
    """Beam search: each row continues with the tokens of another row."""

    def test_rows_of_other_lengths(self) -> None:
        cache, k = KVCache(1, 2, 1, 2, capacity=4), torch.ones(2, 3, 1, 2)
        cache.step(3, attention_mask=torch.tensor([[1, 1, 1], [0, 0, 1]])).layer(0).append(k, k)
        outdated = cache.step(1)
        cache.reorder(torch.tensor([1, 0]))
        assert cache.length.tolist() == cache.position.tolist() == [1, 3]
        assert cache.step(1).key_positions.tolist() == [[0, 1, 2**62, 2**62], [0, 1, 2, 3]]
        with pytest.raises(RopeError, match="a step must be the newest of its cache"):
            outdated.layer(0).append(k[:, :1], k[:, :1])

    @pytest.mark.parametrize(
        ("rows", "got"),
        [
            ([0, 1], r"\[0, 1\]"),
            (torch.tensor([0]), r"torch.int64 of shape \(1,\)"),
            (torch.tensor([0, 1], dtype=torch.int32), r"torch.int32 of shape \(2,\)"),
            (torch.tensor([0, 2]), "rows up to 2"),
            (torch.tensor([-1, 0]), "rows from -1"),
        ],
    )
    def test_refused(self, rows: Any, got: str) -> None:
        with pytest.raises(RopeError, match=rf"KVCache.reorder: rows must be an int64 tensor \[batch\] .*got {got}\."):
            KVCache(1, 2, 1, 2, capacity=4).reorder(rows)

    def test_refused_between_layers(self) -> None:
        cache, k = KVCache(2, 1, 1, 2, capacity=4), torch.ones(1, 1, 1, 2)
        cache.step(1).layer(0).append(k, k)
        with pytest.raises(RopeError, match=r"KVCache.reorder: every layer must have appended"):
            cache.reorder(torch.tensor([0]))
