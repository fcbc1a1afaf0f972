"""The stores that keep 8 bits for each number: their errors against float64, and their memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_cases import same_in_8_bits
from ropewalk import KVCache, QKNorm, Rope
from ropewalk.cache.quantized import QuantizedStore
from ropewalk.kernels import backend

NAMES = ("int8", "fp8")


def error_bound(name: str, x: Tensor) -> Tensor:
    """Return the largest error of each number of x `[..., head_dim]` in float64, without the roundings of float32."""
    largest = x.double().abs().amax(-1, keepdim=True)
    if name == "int8":
        return largest / 254
    return torch.maximum(x.double().abs() / 16, largest / 448 / 1024)


def cached(name: str, k: Tensor, v: Tensor) -> Any:
    """Return the store of one layer in which k and v `[batch, seq, heads, head_dim]` are, and what it reads as."""
    batch, seq, *heads = k.shape
    cache = KVCache(1, batch, *heads, capacity=seq, dtype=k.dtype, store=name)
    read = cache.step(seq).layer(0).append(k, v)
    return cache._stores[0], [x[:, :seq] for x in read]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_and_scores_are_within_the_bound(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scales = torch.tensor([1e-4, 1.0, 100.0])[:, None, None]
    k, v = (torch.randn(2, 9, 3, 1, 64).mul(scales[:, 0]).flatten(2, 3).exp2().to(dtype) for _ in range(2))
    k, v = (torch.where(torch.rand(x.shape) < 0.5, -x, x).clamp(-6e4, 6e4) for x in (k, v))
    k[0, 0], k[0, 1, 0, 1:] = 0, 0
    _, (keys, values) = cached(name, k, v)
    unit = torch.finfo(dtype).eps / 2 + 2.0**-22  # `read` rounds to dtype; scale and quotient are rounded to float32
    for x, read in ((k, keys), (v, values)):
        error, bound = (read.double() - x.double()).abs(), error_bound(name, x)
        assert (error <= bound + unit * x.double().abs().amax(-1, keepdim=True) + torch.finfo(dtype).tiny).all()
        assert (error > bound / 4).any()  # the bound is not loose
    q = torch.randn(k.shape, dtype=torch.float64)
    changed = (q * (keys.double() - k.double())).sum(-1).abs()
    slack = unit * (q.abs() * k.double().abs().amax(-1, keepdim=True)).sum(-1) + torch.finfo(dtype).tiny
    assert (changed <= (q.abs() * error_bound(name, k)).sum(-1) + slack).all()


@pytest.mark.parametrize("name", NAMES)
def test_memory(name: str) -> None:
    k = torch.randn(2, 8, 2, 128, dtype=torch.bfloat16)
    store, _ = cached(name, k, k)
    held = sum(x.nbytes for x in (store.keys, store.values, store.key_scales, store.value_scales))
    assert held <= 0.52 * 2 * store.keys.numel() * 2


@pytest.mark.skipif(not backend.FAST_PATH, reason="no compiled kernel")
@pytest.mark.parametrize("name", NAMES)
def test_a_decoded_token_attends_over_8_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key is converted to more bits in memory."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 10, 4, 40), *torch.randn(2, 2, 10, 2, 40)
    cache = KVCache(1, 2, 2, 40, store=name, capacity=10)
    cache.step(9).layer(0).append(k[:, :9], v[:, :9])
    read = copy.deepcopy(cache).step(1).layer(0).append(k[:, 9:], v[:, 9:])
    keys, values = (x[:, :10].double().repeat_interleave(2, 2) for x in read)
    monkeypatch.setattr(QuantizedStore, "read", None)
    with torch.no_grad():
        attended = cache.step(1).layer(0).attend(q[:, 9:], k[:, 9:], v[:, 9:])
    weights = (torch.einsum("bqhd,bkhd->bhqk", q[:, 9:].double(), keys) / 40**0.5).softmax(-1)
    torch.testing.assert_close(attended.double(), torch.einsum("bhqk,bkhd->bqhd", weights, values), rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", ["one call", "separate calls"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_layer_keeps_normalized_and_rotated_keys(
    name: str, dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several padded tokens, then single ones, are rounded to dtype and quantized: the bits are those of the oracle."""
    if way == "separate calls":
        monkeypatch.setattr(backend, "FAST_PATH", False)
    elif backend.FAST_PATH:
        monkeypatch.setattr(QuantizedStore, "write", None)
    torch.manual_seed(0)
    cache = KVCache(1, 2, 2, 24, capacity=9, dtype=dtype, store=name)
    rope = Rope(24, 1e4, "half", rotary_dim=16, rotary_offset=4)
    norm = QKNorm(*(torch.randn(24).to(dtype) for _ in range(2)), eps=1e-6)
    written: list[list[Tensor]] = [[], []]
    for mask in ([[1, 1, 0, 1], [0, 1, 1, 0]], [[1], [1]], [[1], [1]]):
        real = torch.tensor(mask)
        q, k, v = (torch.randn(*real.shape, heads, 24).to(dtype) for heads in (4, 2, 2))
        step = cache.step(real.shape[1], attention_mask=real)
        rotation = step.rotation(rope)
        step.layer(0).attend(q, k, v, rotation=rotation, norm=norm)
        for new, x in zip(written, (rotation(*norm(q, k), layout="bshd")[1], v), strict=True):
            new.append(x.masked_fill(real[..., None, None] == 0, torch.nan))
    assert cache.length.tolist() == [5, 4]
    store: Any = cache._stores[0]
    kept = (store.keys, store.key_scales), (store.values, store.value_scales)
    for (numbers, scales), new in zip(kept, written, strict=True):
        for row, x in enumerate(torch.cat(new, 1)):
            x = x[~x.isnan().any(-1).any(-1)]
            assert same_in_8_bits(numbers[row, : len(x)], scales[row, : len(x)], x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_stays_visible(name: str, wrong: float) -> None:
    k, v = torch.randn(2, 1, 3, 2, 8)
    k[0, 1, 0, 3] = wrong
    store, (keys, values) = cached(name, k, v)
    assert not keys[0, 1, 0, 3].isfinite()
    assert keys[0, [0, 2]].isfinite().all()
    assert values.isfinite().all()
    store.clear((0, slice(1, 2)))
    assert (store.read(3)[0][0, 1] == 0).all()
