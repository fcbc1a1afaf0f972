"""Caches that keep keys before rotation, with rotate="on_read", against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attention_oracle as written_out
import oracle
from cache_model import EXACT, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, ROPES, cache_of, distances, run, run_whole_row
from ropewalk import KVCache, PagedKVCache, Rope, RopeError, RotaryAttention, SelfExtend

ROPE, ROTARY = ROPES["YaRN, partial"]
assert ROPE is not None


def of_size(size: dict[str, Any], dtype: torch.dtype = torch.float64, batch: int = 2) -> Any:
    if "blocks" not in size:
        return cache_of(batch, rotate="on_read", **size)
    cache = PagedKVCache(LAYERS, KV_HEADS, HEAD_DIM, dtype=dtype, rotate="on_read", **size)
    for _ in range(batch):
        cache.admit()
    return cache


PAGES = {"blocks": 20, "block_size": 3}
SIZES: list[dict[str, Any]] = [
    {"capacity": 12},
    {"window": 4},
    {"window": 3, "sinks": 2},
    PAGES,
    {**PAGES, "window": 4},
    {**PAGES, "layout": "HND"},
    {**PAGES, "window": 3, "sinks": 2},
    {**PAGES, "window": 2, "sinks": 4},
]


def check_steps(of_tokens: Any, size: dict[str, Any], name: str) -> None:
    """Prefill, decoding, several new tokens, and shifts."""
    torch.manual_seed(0)
    (rope, rotary), cache = ROPES[name], of_size(size)
    x, outputs = torch.randn(2, 10, HIDDEN, dtype=torch.float64), []
    for start, stop in ((0, 5), (5, 6), (6, 9), (9, 10)):
        outputs.append(of_tokens(cache, x[:, start:stop], rope))
        cache.shift(None, torch.tensor([7, -300]) if start == 5 else 40)
    for row in range(2):
        wanted = run_whole_row(x[row], rotary, *distances(10, size))
        torch.testing.assert_close(torch.cat(outputs, dim=1)[row], wanted, **EXACT)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", list(ROPES))
def test_attention(size: dict[str, Any], name: str) -> None:
    check_steps(run, size, name)


@pytest.mark.parametrize("size", SIZES[:3], ids=str)
def test_a_compiled_pass(size: dict[str, Any]) -> None:
    torch._dynamo.reset()  # other files compile this pass too, and a function has a limit of graphs
    check_steps(torch.compile(run, fullgraph=True, backend="aot_eager"), size, "default")


@pytest.mark.parametrize("size", SIZES[:5], ids=str)
@pytest.mark.parametrize("store", [None, "int8", "fp8"])
def test_a_hundred_moves_leave_the_keys_as_they_are(size: dict[str, Any], store: str | None) -> None:
    torch.manual_seed(0)
    cache, x = of_size({**size, "store": store}), torch.randn(2, 8, HIDDEN, dtype=torch.float64)
    run(cache, x, ROPE)
    before = [kept.clone() for layer in cache._stores for kept in vars(layer).values() if isinstance(kept, Tensor)]
    old = torch.arange(5, 8)  # in each of these caches
    for _ in range(50):
        cache.shift(None, 40_000)
        if "sinks" not in size:
            cache.move(None, 0, old + 40_000, old + 7)
            cache.move(None, 0, old + 7, old + 40_000)
        cache.shift(None, torch.tensor([-40_000, -40_000]))
    after = [kept for layer in cache._stores for kept in vars(layer).values() if isinstance(kept, Tensor)]
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(before, after, strict=True))
    assert cache.step(1).positions.tolist() == [[8], [8]]


@pytest.mark.parametrize("size", [SIZES[0], PAGES], ids=str)
def test_moved_tokens_are_read_at_their_new_positions(size: dict[str, Any]) -> None:
    torch.manual_seed(0)
    cache, x = of_size(size, batch=1), torch.randn(1, 6, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        step = cache.step(5)
        layer = RotaryAttention(HIDDEN, HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, qk_norm=1e-6).double()
        for i in range(LAYERS):
            layer(x[:, :5], step.rotation(ROPE, dtype=torch.float64), cache=step.layer(i))
        cache.move(None, 0, torch.tensor([1, 3]), torch.tensor([900, -2]))
        step = cache.step(1, positions=torch.tensor([[6]]))
        for i in range(LAYERS):
            out = layer(x[:, 5:], step.rotation(ROPE, dtype=torch.float64), cache=step.layer(i))
    places = torch.tensor([0, 900, 2, -2, 4, 6])
    weights = dict(layer.named_parameters())
    sizes: Any = {"heads": HEADS, "kv_heads": KV_HEADS, "eps": 1e-6}
    wanted = written_out.attention(
        x, weights, **sizes, rotary=ROTARY, at=written_out.pairs(places), seen=written_out.causal(6)
    )
    torch.testing.assert_close(out[0, -1], wanted[0, -1], **EXACT)


@pytest.mark.parametrize("moves", [0, 100])
@pytest.mark.parametrize("store", ["int8", "fp8"])
def test_the_error_of_a_score(store: str, moves: int) -> None:
    """The error of a key is at most that of each number, and turns within its pair, however often the key moves."""
    torch.manual_seed(0)
    rope, double = Rope(64, 1e4, "half"), torch.float64
    rotary = written_out.Rotary(oracle.inv_freq(1e4, 64), "half")
    cache = KVCache(1, 1, 1, 64, capacity=65, dtype=double, store=store, rotate="on_read")
    k = torch.randn(1, 64, 1, 64, dtype=double)
    cache.step(64).layer(0).append(k, k)
    for _ in range(moves):
        cache.shift(None, int(torch.randint(-9000, 9000, ())))
    step, q = cache.step(1), torch.randn(1, 64, dtype=double)
    rotation: Any = step.rotation(rope, dtype=double)
    read, _ = step.layer(0).append(k[:, :1], k[:, :1])
    found = torch.einsum("hd,khd->k", q, rotation.keys(read, layout="bshd")[0, :64])
    wanted = torch.einsum("hd,khd->k", q, rotary(k[0], step.key_positions[0, :64]))
    largest = k.abs().amax(-1)[0, :, 0]
    pairs = q.view(2, 32).norm(dim=0).sum()
    bound = 2**0.5 * pairs * largest / 254 if store == "int8" else 2**0.5 * pairs * largest / 16
    assert ((found - wanted).abs() <= bound * (1 + 1e-6)).all()


def test_refusals() -> None:
    with pytest.raises(RopeError, match="KVCache: rotate must be one of 'on_write', 'on_read', got 'read'"):
        KVCache(1, 1, 1, 8, capacity=4, rotate="read")
    with pytest.raises(RopeError, match="PagedKVCache: flex must be False with rotate='on_read'"):
        PagedKVCache(1, 1, 8, blocks=2, flex=True, rotate="on_read")
    cache = of_size({"capacity": 9})
    q, k = torch.randn(2, 1, HEADS, HEAD_DIM).double(), torch.randn(2, 1, KV_HEADS, HEAD_DIM).double()
    step = cache.step(1)
    default, _ = ROPES["default"]
    assert default is not None
    for rotation in (default.at(step.positions), SelfExtend(default, 2, 2).at(step.positions, step.key_positions)):
        with pytest.raises(
            RopeError, match=r"KVCache: with rotate='on_read', .* got a \w+\. Use step.rotation\(rope\)"
        ):
            step.layer(0).attend(q, k, k, rotation=rotation)
    plain = cache_of(2, capacity=9).step(1)
    with pytest.raises(
        RopeError, match="with rotate='on_write', rotation must rotate the new tokens alone, got a OnRead"
    ):
        plain.layer(0).attend(q, k, k, rotation=step.rotation(default))
    rotation = step.rotation(default)
    run(cache, torch.randn(2, 4, HIDDEN).double(), default)
    with pytest.raises(RopeError, match="rotation must be computed for the 5 keys of the step, got one for 1"):
        cache.step(1).layer(0).attend(q, k, k, rotation=rotation)
    for one in (cache, of_size(PAGES)):
        for call in (
            lambda one=one: one.shift(default, 3),
            lambda one=one: one.move(default, 0, *torch.ones(2, 1).long()),
        ):
            with pytest.raises(
                RopeError, match="rope must be None with rotate='on_read', where no cached key is rotated"
            ):
                call()
        with pytest.raises(RopeError, match="keeps one position for each key, positions must not have axes"):
            one.step(1, positions=torch.ones(3, 2, 1, dtype=torch.int64))
    for delta in ((1, 2), torch.ones(2, 2, dtype=torch.int64)):
        with pytest.raises(RopeError, match="keeps one position for each key, delta must not have axes"):
            cache.shift(None, delta)
