"""The fused step on a GPU or in Triton's interpreter gives the same bits as separate norm, rotation and copies."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch

from kernel_cases import LAYOUTS, PAIRINGS, as_bshd, bits, by_reference, same, shape
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
