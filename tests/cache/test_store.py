"""Layers over other stores: 8 bits, and one from outside of ropewalk, in one class: float16 under float32 queries."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_model import HEAD_DIM, HIDDEN, KV_HEADS, LAYERS, MODEL, ROPES, distances, run_whole_row
from ropewalk import KVCache, QKNorm, Rope, RopeError, Rotation


class HalfKeys:
    def __init__(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: Any) -> None:
        self.keys = torch.zeros(shape, dtype=torch.float16, device=device)
        self.values, self.dtype = torch.zeros(shape, dtype=dtype, device=device), dtype

    def write(self, slots: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
        self.keys[slots], self.values[slots] = k.half(), v

    def rotate_and_write(
        self, slots: Tensor, q: Tensor, k: Tensor, v: Tensor, *, rotation: Rotation, norm: QKNorm | None
    ) -> None:
        return None

    def attend(self, *arguments: object, **keywords: object) -> None:
        return None  # PyTorch attends over what `read` returns

    def read(self, count: int) -> tuple[Tensor, Tensor]:
        return self.keys[:, :count].to(self.dtype), self.values[:, :count]

    def rotate(self, rotation: Rotation, rows: Tensor | None) -> None:
        which = slice(None) if rows is None else rows
        self.keys[which] = rotation(self.keys[which].to(self.dtype), layout="bshd").half()

    def clear(self, slots: Any) -> None:
        self.keys[slots] = self.values[slots] = 0

    def reorder(self, rows: Tensor, count: int) -> None:
        for x in (self.keys, self.values):
            x[:, :count] = x[rows, :count]


# A key is rounded once when it is stored, and once in each of four shifts. Measured, in outputs of size 4: 5e-4 with 11
# bits, 1.1e-2 with int8 and 5.6e-2 with fp8. With the plain store the error is 5e-7.
ROUNDING: dict[Any, float] = {HalfKeys: 1.5e-3, "int8": 3e-2, "fp8": 0.15}

SINGLE = [copy.deepcopy(layer).float() for layer in MODEL]


@torch.no_grad()
def run(cache: Any, x: Tensor, rope: Rope, **options: Any) -> Tensor:
    step = cache.step(x.shape[1], **options)
    rotation, x = step.rotation(rope), x.float()
    for i, layer in enumerate(SINGLE):
        x = x + layer(x, rotation, cache=step.layer(i))
    return x.double()


def cache_of(store: Any = HalfKeys, **size: Any) -> KVCache:
    return KVCache(LAYERS, 2, KV_HEADS, HEAD_DIM, store=store, **size)


@pytest.mark.parametrize(
    "size", [{"capacity": 12}, {"window": 4}, {"window": 3, "sinks": 2}], ids=["whole", "window", "sinks"]
)
@pytest.mark.parametrize("name", ["default", "YaRN, partial"])
@pytest.mark.parametrize("store", list(ROUNDING))
def test_attention_over_another_store(size: dict[str, int], name: str, store: Any) -> None:
    """Prefill, decoding, shifts, a pass that stopped, and a row that starts again."""
    torch.manual_seed(0)
    (rope, rotary), cache, rounding = ROPES[name], cache_of(store, **size), ROUNDING[store]
    assert rope is not None
    assert {keys.dtype for keys in cache.keys} <= {torch.float16, torch.int8, torch.float8_e4m3fn}
    x, outputs = torch.randn(2, 12, HIDDEN, dtype=torch.float64), []
    for start, stop in ((0, 5), (5, 6), (6, 9), (9, 10)):
        outputs.append(run(cache, x[:, start:stop], rope))
        cache.shift(rope, torch.tensor([7, -300]) if start == 5 else 40)
        nan = torch.full((2, 1, KV_HEADS, HEAD_DIM), torch.nan)
        cache.step(1).layer(0).append(nan, nan)
        cache.rollback()
    for row in range(2):
        wanted = run_whole_row(x[row, :10], rotary, *distances(10, size))
        torch.testing.assert_close(torch.cat(outputs, dim=1)[row], wanted, rtol=0, atol=rounding)
    cache.reset([1])
    out = run(cache, x[:, 10:], rope)
    wanted = run_whole_row(x[1, 10:], rotary, *distances(2, size))
    torch.testing.assert_close(out[1], wanted, rtol=0, atol=rounding)


@pytest.mark.parametrize("store", list(ROUNDING))
def test_rows_that_take_over_tokens(store: Any) -> None:
    (rope, rotary), cache = ROPES["default"], cache_of(store, capacity=8)
    assert rope is not None
    x = torch.randn(2, 6, HIDDEN, dtype=torch.float64)
    run(cache, x[:, :5], rope)
    cache.reorder(torch.tensor([1, 1]))
    dropped = run(cache, x[:, :1], rope)  # a draft
    assert dropped.isfinite().all()
    out = run(cache, x[:, 5:], rope, at=torch.tensor([5, 5]))
    for row in range(2):
        wanted = run_whole_row(torch.cat([x[1, :5], x[row, 5:]]), rotary, *distances(6, {}))[-1:]
        torch.testing.assert_close(out[row], wanted, rtol=0, atol=ROUNDING[store])


@pytest.mark.parametrize("store", [HalfKeys, "fp8"])
def test_a_compiled_pass(store: Any) -> None:
    rope, rotary = ROPES["default"]
    assert rope is not None
    cache, x = cache_of(store, capacity=8), torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    torch._dynamo.reset()  # other files compile this pass too, and a function has a limit of graphs
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    out = torch.cat([compiled(cache, x[:, :2], rope), compiled(cache, x[:, 2:], rope)], dim=1)
    for row in range(2):
        wanted = run_whole_row(x[row], rotary, *distances(3, {}))
        torch.testing.assert_close(out[row], wanted, rtol=0, atol=ROUNDING[store])


def test_refusals() -> None:
    with pytest.raises(RopeError, match="KVCache: store must be 'int8', 'fp8', a class of stores or None, got 'int3'"):
        KVCache(1, 1, 1, 8, capacity=4, store="int3")  # type: ignore[arg-type]
