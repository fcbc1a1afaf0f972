"""Latent rows: absorbed attention over rows `[latent | rotated key]` equals latent attention as written out."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import attention_oracle as written_out
import oracle
from ropewalk import KVCache, QKNorm, Rope, RopeError
from ropewalk.cache.store import LatentStore
from ropewalk.kernels import backend

HEADS, LATENT, NOPE, ROTARY, VALUE = 4, 10, 6, 4, 5
ROPE = Rope(LATENT + ROTARY, 1e4, "interleaved", rotary_dim=ROTARY, rotary_offset=LATENT)
ROTARY_OF_ROPE = written_out.Rotary(oracle.inv_freq(1e4, ROTARY), "interleaved")
SCALE = (NOPE + ROTARY) ** -0.5


def weights(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the projections of the latent to keys `[heads, NOPE, LATENT]` and values `[heads, VALUE, LATENT]`."""
    torch.manual_seed(1)
    return torch.randn(HEADS, NOPE, LATENT).to(dtype), torch.randn(HEADS, VALUE, LATENT).to(dtype)


def unabsorbed(q: Tensor, rows: Tensor, positions: Tensor, window: int) -> Tensor:
    """Return the output of one row in float64: q [seq, heads, NOPE + ROTARY], rows [seq, LATENT + ROTARY]."""
    to_key, to_value = weights(torch.float64)
    latent, rope_key = rows.split([LATENT, ROTARY], -1)
    k = torch.cat(
        [
            torch.einsum("hnl,sl->shn", to_key, latent),
            ROTARY_OF_ROPE(rope_key[:, None], positions).expand(-1, HEADS, -1),
        ],
        -1,
    )
    turned = torch.cat([q[..., :NOPE], ROTARY_OF_ROPE(q[..., NOPE:], positions)], -1)
    v = torch.einsum("hvl,sl->shv", to_value, latent)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    scores = (SCALE * torch.einsum("qhd,khd->hqk", turned, k)).masked_fill(
        (distance < 0) | (distance >= window), -torch.inf
    )
    return torch.einsum("hqk,khv->qhv", scores.softmax(-1), v)


@torch.no_grad()
def run(cache: Any, q: Tensor, rows: Tensor) -> Tensor:
    """Run one forward pass of all layers over the same numbers, and return the output of the last layer."""
    to_key, to_value = weights(q.dtype)
    absorbed = torch.cat([torch.einsum("bshn,hnl->bshl", q[..., :NOPE], to_key), q[..., NOPE:]], -1)
    step = cache.step(q.shape[1])
    rotation = step.rotation(ROPE, dtype=torch.float64 if q.dtype == torch.float64 else None)
    for i in range(2):
        out = step.layer(i).attend(absorbed, rows[:, :, None], rotation=rotation, scale=SCALE)
    return torch.einsum("bshl,hvl->bshv", out, to_value)


def cache_of(**options: Any) -> KVCache:
    return KVCache(2, 2, 1, LATENT + ROTARY, latent=LATENT, **options)


SIZES = [{"capacity": 20}, {"window": 4}]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-12), (torch.float32, 1e-4)], ids=str)
def test_equals_unabsorbed_attention(size: dict[str, int], dtype: torch.dtype, near: float) -> None:
    """Prefill, decoding and shifts. The shifts rotate the last channels only."""
    torch.manual_seed(0)
    cache = cache_of(dtype=dtype, **size)
    q, rows = torch.randn(2, 12, HEADS, NOPE + ROTARY).to(dtype), torch.randn(2, 12, LATENT + ROTARY).to(dtype)
    outputs = []
    for start, stop in ((0, 5), (5, 6), (6, 9), (9, 10), (10, 11), (11, 12)):
        outputs.append(run(cache, q[:, start:stop], rows[:, start:stop]))
        cache.shift(ROPE, torch.tensor([7, -300]) if start == 5 else 40)
    for row in range(2):
        wanted = unabsorbed(q[row].double(), rows[row].double(), torch.arange(12), size.get("window", 99))
        torch.testing.assert_close(torch.cat(outputs, 1)[row].double(), wanted, rtol=0, atol=near)


@pytest.mark.skipif(not backend.FAST_PATH, reason="no compiled kernel")
def test_one_call_rotates_and_writes_and_another_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatentStore, "write", None)
    monkeypatch.setattr("ropewalk.cache.step.attend", None)
    cache, rows = cache_of(capacity=20), torch.randn(2, 3, LATENT + ROTARY)
    run(cache, torch.randn(2, 2, HEADS, NOPE + ROTARY), rows[:, :2])
    run(cache, torch.randn(2, 1, HEADS, NOPE + ROTARY), rows[:, 2:])
    kept, _ = cache._stores[1].read(3)
    for row in range(2):
        wanted = torch.cat(
            [rows[row, :, :LATENT], ROTARY_OF_ROPE(rows[row, :, None, LATENT:].double(), torch.arange(3))[:, 0]], -1
        )
        assert torch.equal(kept[row, :, 0, :LATENT], rows[row, :, :LATENT])
        torch.testing.assert_close(kept[row, :, 0].double(), wanted, rtol=0, atol=1e-6)


def test_one_tensor_for_each_layer() -> None:
    cache = cache_of(capacity=6)
    for again in (cache, copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        run(again, torch.randn(2, 3, HEADS, NOPE + ROTARY), torch.randn(2, 3, LATENT + ROTARY))
        for store in again._stores:
            assert store.values.data_ptr() == store.keys.data_ptr()
            assert store.values.shape == (*store.keys.shape[:3], LATENT)


def test_rows_take_over_tokens() -> None:
    """A copy of rows must not copy the latent twice, which is in the keys and in the values."""
    torch.manual_seed(0)
    q, rows = (torch.randn(2, 5, *shape, dtype=torch.float64) for shape in ((HEADS, NOPE + ROTARY), (LATENT + ROTARY,)))
    cache = cache_of(capacity=8, dtype=torch.float64)
    run(cache, q[:, :4], rows[:, :4])
    cache.reorder(torch.tensor([1, 0]))
    out = run(cache, q[:, 4:], rows[:, 4:])
    for row, other in enumerate([1, 0]):
        mixed = [torch.cat([x[other, :4], x[row, 4:]]) for x in (q, rows)]
        torch.testing.assert_close(out[row], unabsorbed(*mixed, torch.arange(5), 99)[-1:], rtol=0, atol=1e-12)


def test_refusals() -> None:
    cache, row = cache_of(capacity=9), torch.randn(2, 1, 1, LATENT + ROTARY)
    layer, q = cache.step(1).layer(0), torch.randn(2, 1, HEADS, LATENT + ROTARY)
    norm = QKNorm(torch.ones(14), torch.ones(14), eps=1e-6)
    with pytest.raises(RopeError, match="v must be None: the values are the first 10 channels of k"):
        layer.append(row, row)
    with pytest.raises(RopeError, match="KVCache: v must be given, got None"):
        KVCache(1, 2, 1, 14, capacity=9).step(1).layer(0).append(row)
    with pytest.raises(RopeError, match="scale must be given, and norm None, in a cache with latent rows"):
        layer.attend(q, row)
    with pytest.raises(RopeError, match="scale must be given, and norm None, in a cache with latent rows"):
        layer.attend(q, row, scale=1.0, norm=norm)
    whole = Rope(14, 1e4, "half")
    with pytest.raises(
        RopeError, match="rotation must not rotate the first 10 channels, the latent, got rotary_offset=0"
    ):
        layer.attend(q, row, scale=1.0, rotation=whole.at(torch.zeros(2, 1, dtype=torch.int64)))
    with pytest.raises(RopeError, match=r"KVCache\.shift: rope must not rotate the first 10 channels"):
        cache.shift(whole, 3)
    with pytest.raises(RopeError, match="store must be None with latent rows, got 'int8'"):
        KVCache(1, 1, 1, 14, capacity=4, latent=10, store="int8")
    with pytest.raises(RopeError, match="latent must be an integer from 1 to 14, got 15"):
        KVCache(1, 1, 1, 14, capacity=4, latent=15)
