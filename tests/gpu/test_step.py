"""The fused step on a GPU or in Triton's interpreter gives the same bits as separate norm, rotation and copies."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_cases import EIGHT_BITS
from kernel_cases import LAYOUTS, PAIRINGS, as_bshd, bits, by_reference, same, same_in_8_bits, shape
from ropewalk._layout import Options
from ropewalk.kernels import gpu
from ropewalk.kernels.visible import StoreArguments
from ropewalk.rotation import reference

pytestmark = pytest.mark.usefixtures("device")

# The interpreter truncates bfloat16; a GPU rounds it.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.float16, torch.float32, torch.float64, *([] if INTERPRETED else [torch.bfloat16])]
BATCH, SEQ, HEADS, KV_HEADS, EPS = 2, 3, 3, 2, 1e-5
BLOCKS, BLOCK = 3, 4


def check(
    dtype: torch.dtype,
    pairing: str,
    sizes: tuple[int, int, int],
    layout: Any = "bshd",
    *,
    add_one: bool | None = None,
    of_weights: torch.dtype | None = None,
    stores: str = "",
    strided: int = 1,
    seq: int = SEQ,
) -> None:
    """Compare the step with separate calls. add_one=None: no norm. stores: layout of the cache, or "" for none."""
    head_dim, pairs, offset = sizes
    q, k, v = (
        torch.randn(shape(layout, BATCH, seq, heads, strided * head_dim)).to(dtype)[..., ::strided]
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    norm = None
    if add_one is not None:
        norm = (*(torch.randn(head_dim).to(of_weights or dtype) for _ in range(2)), EPS, add_one)
    cos, sin = torch.randn(seq, pairs), torch.randn(seq, pairs)
    normed = [q, k]
    if norm is not None:
        normed = [
            reference.rms_norm(x, weight, eps=EPS, add_one=bool(add_one))
            for x, weight in zip((q, k), norm[:2], strict=True)
        ]
    exact = by_reference(normed, cos, sin, layout, pairing, offset, False)
    p, how = torch.full_like(q, math.nan), (cos, sin, Options(layout, pairing == "interleaved", offset), norm)
    if not stores:
        r = torch.full_like(k, math.nan)
        gpu.step((q, k), (p, r), *how, None)  # type: ignore[arg-type]
        assert same(r, exact[1], "")
    else:
        axes = {"NHD": (BLOCK, KV_HEADS), "HND": (KV_HEADS, BLOCK)}[stores]
        caches = [torch.full((BLOCKS, *axes, head_dim), 7.0).to(dtype) for _ in range(2)]
        views = [x if stores == "NHD" else x.transpose(1, 2) for x in caches]
        count = seq if layout == "thd" else BATCH * seq
        slots = torch.tensor([9, -1, 0, 4, BLOCKS * BLOCK, 11][:count])
        wanted = [x.clone() for x in views]
        for x, other in zip((exact[1], v), wanted, strict=True):
            tokens = torch.tensor(as_bshd(x, layout)).to(dtype).flatten(0, 1)
            for n, slot in enumerate(slots.tolist()):
                if 0 <= slot < BLOCKS * BLOCK:
                    other[slot // BLOCK, slot % BLOCK] = tokens[n]
        slots = slots if layout == "thd" else slots.view(BATCH, seq)
        gpu.step((q, k), (p, views[0]), *how, StoreArguments(v, *views, slots))  # type: ignore[arg-type]
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(views, wanted, strict=True))
    assert same(p, exact[0], "")


SIZES = [(2, 1, 0), (6, 3, 0), (24, 8, 4), (80, 40, 0), (96, 20, 8), (128, 64, 0), (192, 32, 128)]


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(dtype: torch.dtype, pairing: str) -> None:
    torch.manual_seed(0)
    every = SIZES[DTYPES.index(dtype) % 2 :: 2] if INTERPRETED else SIZES  # where a call takes a second
    for i, sizes in enumerate(every):
        check(dtype, pairing, sizes, add_one=i % 2 == 0, stores=("", "NHD", "HND")[i % 3])
        check(dtype, pairing, sizes, add_one=(None, True)[i % 2], of_weights=torch.float32, stores=("NHD", "")[i % 2])


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_strides(layout: str, pairing: str) -> None:
    torch.manual_seed(1)
    for stores in ("", "NHD", "HND"):
        check(torch.float32, pairing, (24, 8, 3), layout, add_one=False, stores=stores)
        check(torch.float16, pairing, (24, 12, 0), layout, add_one=True, stores=stores, strided=2)
        check(torch.float16, pairing, (24, 8, 3), layout, stores=stores, strided=3)
    check(torch.float32, pairing, (64, 32, 0), layout, add_one=False, seq=41)


def quantized_by(k: Tensor, v: Tensor, how: tuple[Any, ...], kept: torch.dtype, slots: list[int]) -> list[Tensor]:
    """Store k and v `[1, seq, heads, dim]` in 8 bits. Return numbers and scales of both, `[slots, heads, ...]`."""
    caches = [torch.full((BLOCKS, BLOCK, x.shape[2], x.shape[3]), 7.0).to(kept) for x in (k, v)]
    scales = [torch.full((BLOCKS, k.shape[2], BLOCK), 7.0).transpose(1, 2) for _ in caches]
    store = StoreArguments(v, *caches, torch.tensor([slots]), *scales)
    q = torch.full_like(k, 2.0)
    gpu.step((q, k), (torch.empty_like(q), caches[0]), *how, store)  # type: ignore[arg-type]
    return [x.flatten(0, 1) for pair in zip(caches, scales, strict=True) for x in pair]


@pytest.mark.parametrize("kept", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_8_bits(dtype: torch.dtype, kept: torch.dtype) -> None:
    """k is rounded to its dtype after the rotation, and then k and v are quantized. Each head has its scale."""
    torch.manual_seed(0)
    slots = [4, -1, 0, 1, 5, BLOCKS * BLOCK, 2]
    some = torch.tensor([i for i, slot in enumerate(slots) if slot in range(BLOCKS * BLOCK)])
    others = torch.tensor([slot for slot in range(BLOCKS * BLOCK) if slot not in slots])
    for i, (head_dim, pairs, offset) in enumerate(SIZES):
        sizes = torch.randn(1, len(slots), KV_HEADS, 1).mul(4).exp2()
        k, v = ((torch.randn(1, len(slots), KV_HEADS, n) * sizes).to(dtype) for n in (head_dim, head_dim + i % 2))
        for x in (k, v):  # a head of 0, of tiny numbers, and two that are not finite
            x[0, 0, 0], x[0, 2, 0] = 0, 1e-36
            x[0, 3, 0, -1], x[0, 4, 1, 1] = math.inf, -math.nan
        norm = None if i % 2 else (torch.randn(head_dim), torch.randn(head_dim), EPS, False)
        cos, sin, interleaved = torch.randn(len(slots), pairs), torch.randn(len(slots), pairs), bool(i % 3)
        normed = k if norm is None else reference.rms_norm(k, norm[1], eps=EPS)
        pairing = "interleaved" if interleaved else "half"
        with np.errstate(invalid="ignore"):
            made = quantized_by(k, v, (cos, sin, Options("bshd", interleaved, offset), norm), kept, slots)
        exact = by_reference([normed], cos, sin, "bshd", pairing, offset, False)[0]
        for numbers, scales, x in zip(made[::2], made[1::2], (exact, v), strict=True):
            place = torch.tensor(slots)[some]
            assert same_in_8_bits(*(y.cpu() for y in (numbers[place], scales[place], x[0, some]))), (head_dim, i)
            assert (numbers[others].float() == 7).all()
            assert (scales[others] == 7).all()


@pytest.mark.parametrize("kept", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_rounding_to_8_bits(dtype: torch.dtype, kept: torch.dtype) -> None:
    """Every number of the dtype, those halfway between two, and their neighbours; then numbers whose scale is not 1."""
    numbers = torch.arange(256, dtype=torch.uint8).view(kept).to(dtype)
    numbers = numbers[numbers.isfinite() & (numbers != -128)].sort().values
    halfway = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat((numbers, halfway, *(halfway.nextafter(torch.full_like(halfway, to)) for to in (-999.0, 999.0))))
    x = torch.cat((x, x.new_full((-len(x) % 64,), 0.0))).view(1, 1, -1, 64)
    x[..., 0] = numbers.max()
    x = torch.cat((x, x * 0.7, x / 3), 2)
    cos, sin = torch.ones(1, 32), torch.zeros(1, 32)
    made = quantized_by(x, x, (cos, sin, Options("bshd", False, 0), None), kept, [3])
    for i in (0, 2):
        assert same_in_8_bits(*(y.cpu() for y in (made[i][3], made[i + 1][3], x[0, 0])))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latent_rows(dtype: torch.dtype) -> None:
    """The last channels are rotated, and nothing but k is written."""
    torch.manual_seed(0)
    q, rows, cos, sin = torch.randn(2, 3, 4, 40), torch.randn(2, 3, 1, 40), torch.randn(3, 4), torch.randn(3, 4)
    q, rows, slots = q.to(dtype), rows.to(dtype), torch.tensor([[4, -1, 0], [1, 5, 2]])
    cache, p = torch.full((BLOCKS, BLOCK, 1, 40), 7.0).to(dtype), torch.full_like(q, math.nan)
    store = StoreArguments(None, cache, None, slots)
    gpu.step((q, rows), (p, cache), cos, sin, Options("bshd", True, 32), None, store)
    wanted = by_reference([q, rows], cos, sin, "bshd", "interleaved", 32, False)
    assert same(p, wanted[0], "")
    expected = torch.full((BLOCKS * BLOCK, 1, 40), 7.0).to(dtype)
    expected[slots[slots >= 0]] = wanted[1].flatten(0, 1)[slots.flatten() >= 0]
    assert same(cache.flatten(0, 1), expected, "")


def test_bfloat16() -> None:
    """Truncated or rounded, the result is near the definition: within two units of the norm and of the rotation."""
    torch.manual_seed(2)
    q, k = (torch.randn(BATCH, SEQ, heads, 64).to(torch.bfloat16) for heads in (HEADS, KV_HEADS))
    cos, sin = torch.randn(SEQ, 32), torch.randn(SEQ, 32)
    weights = [torch.randn(64).to(torch.bfloat16) for _ in range(2)]
    normed = [reference.rms_norm(x, w, eps=EPS) for x, w in zip((q, k), weights, strict=True)]
    outputs = torch.empty_like(q), torch.empty_like(k)
    gpu.step((q, k), outputs, cos, sin, Options("bshd", False, 0), (*weights, EPS, False), None)  # type: ignore[arg-type]
    for y, other in zip(outputs, by_reference(normed, cos, sin, "bshd", "half", 0, False), strict=True):
        assert (y.float() - other.float()).abs().max() <= 4 * 2.0**-8 * other.float().abs().max()


def test_odd_values() -> None:
    """Inputs whose squares overflow or underflow in float32, and 0."""
    for value in (0.0, 3e38, 1e-30):
        q = torch.full((1, 1, 1, 4), value)
        outputs, weight = (torch.empty_like(q), torch.empty_like(q)), torch.ones(4)
        gpu.step(
            (q, q),
            outputs,
            torch.ones(1, 2),
            torch.zeros(1, 2),
            Options("bshd", False, 0),
            (weight, weight, 1e-70, False),
            None,
        )
        assert same(outputs[0], reference.rms_norm(q, weight, eps=1e-70), "")


def test_nothing_to_do() -> None:
    q = torch.empty(2, 0, 4, 8)
    gpu.step((q, q), (q, q), torch.ones(0, 4), torch.ones(0, 4), Options("bshd", False, 0), None, None)
