"""The rotation kernel, with every instruction set, compared with float64 formulas and bitwise with the reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernel_cases import (
    DTYPES,
    LAYOUTS,
    PAIRINGS,
    SMALLEST_NORMAL,
    as_bshd,
    by_reference,
    check_rotation,
    expected,
    same,
    shape,
    unchanged,
)
from ropewalk._layout import Options
from ropewalk.kernels import cpu

# head_dim, pairs, offset. 513 pairs are more than fit the buffer of converted tables.
SIZES = [
    (2, 1, 0),
    (6, 3, 0),
    (80, 40, 0),
    (96, 48, 0),
    (256, 128, 0),
    (512, 256, 0),
    (6, 1, 4),
    (80, 20, 0),
    (96, 24, 48),
    (256, 39, 7),
    (512, 127, 258),
    (1030, 513, 3),
]


def random_table(*size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(size, dtype=dtype), torch.randn(size, dtype=dtype)


def rotate(level: str, *given: Any, **how: Any) -> list[Tensor]:
    return check_rotation(cpu, *given, **how, level=level)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(level: str, dtype: torch.dtype, pairing: str) -> None:
    torch.manual_seed(0)
    for head_dim, pairs, offset in SIZES:
        q, k = torch.randn(2, 3, 4, head_dim).to(dtype), torch.randn(2, 3, 2, head_dim).to(dtype)
        for table_dtype in (torch.float32, torch.float64):
            cos, sin = random_table(3, pairs, dtype=table_dtype)
            for inverse in (False, True):
                rotate(level, [q, k], cos, sin, "bshd", pairing, offset, inverse)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_and_empty(level: str, layout: str) -> None:
    for batch in (0, 1, 2):
        for seq in (0, 1, 2):
            for heads, kv_heads in ((1, 1), (2, 1), (2, 0), (0, 0)):
                size = (batch, seq) if layout != "thd" else (1, seq)
                q, k = (torch.randn(shape(layout, *size, h, 6)) for h in (heads, kv_heads))
                cos, sin = random_table(seq, 2)
                rotate(level, [q, k], cos, sin, layout, "half", 1)
                rotate(level, [k], cos, sin, layout, "interleaved", 1)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_tokens(level: str, threads: None, layout: str, pairing: str) -> None:
    """Several blocks of tokens for two threads, whose boundary is inside a block and inside a row of the batch."""
    torch.manual_seed(2)
    q, k = (torch.randn(shape(layout, 3, 131, heads, 80)) for heads in (5, 1))
    cos, sin = random_table(*(() if layout == "thd" else (3,)), 131, 40)
    rotate(level, [q, k], cos, sin, layout, pairing)
    rotate(level, [q, k], cos.double(), sin.double(), layout, pairing, inverse=True)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(
    ("head_dim", "pairs", "offset", "layout"),
    [(128, 64, 0, "bshd"), (192, 32, 64, "bhsd"), (128, 32, 3, "bhsd"), (256, 100, 0, "bshd"), (200, 96, 0, "bshd")],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_that_bypass_the_caches(
    level: str, threads: None, dtype: torch.dtype, head_dim: int, pairs: int, offset: int, layout: str, pairing: str
) -> None:
    """Outputs of 16 MiB and more bypass the caches if whole vectors are aligned. The bits must be the same."""
    heads = 12
    seq = (17 << 20) // (heads * head_dim * dtype.itemsize)
    x = torch.randn(shape(layout, 1, seq, heads, head_dim)).to(dtype)
    cos, sin = random_table(seq, pairs)
    (wanted,) = by_reference([x], cos, sin, layout, pairing, offset, False)
    memory = torch.empty(x.numel() + 64, dtype=dtype)
    for start in (0, 1, 8):  # the last two are unaligned by one element, and by half a vector or less
        y = memory[start : start + x.numel()].view(x.shape).fill_(torch.nan)
        cpu.rotate([x], [y], cos, sin, Options(layout, pairing == "interleaved", offset, False))
        assert unchanged(y, wanted)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_adjacent_in_memory(level: str, dtype: torch.dtype, pairing: str) -> None:
    """If tokens are adjacent and channels are not, vectors hold several tokens. The last tokens do not fill one."""
    torch.manual_seed(5)
    x = torch.randn(2, 9, 20, 71).to(dtype).permute(0, 3, 1, 2)
    (y,) = rotate(level, [x], *random_table(2, 71, 10), "bshd", pairing, inverse=True)
    assert y.stride() == x.stride()
    rotate(level, [x], *random_table(71, 7), "bshd", pairing, offset=3)


def views(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return views of shape [2, 5, 3, 80] with every order of strides."""
    draw = torch.randn
    return {
        "dense": draw(2, 5, 3, 80).to(dtype),
        "transposed": draw(2, 3, 5, 80).to(dtype).transpose(1, 2),
        "tokens first": draw(5, 2, 3, 80).to(dtype).transpose(0, 1),
        "channels first": draw(80, 2, 5, 3).to(dtype).permute(1, 2, 3, 0),
        "heads last": draw(2, 5, 80, 3).to(dtype).transpose(-1, -2),
        "every third channel": draw(2, 5, 3, 240).to(dtype)[..., 1::3],
        "part of a head": draw(2, 5, 3, 97).to(dtype)[..., 9:89],
        "part of a fused tensor": draw(2, 5, 7, 80).to(dtype)[:, :, 2:5],
        "every second token": draw(2, 10, 3, 80).to(dtype)[:, 1::2],
        "one head for all": draw(2, 5, 1, 80).to(dtype).expand(-1, -1, 3, -1),
        "one token for all": draw(2, 1, 3, 80).to(dtype).expand(-1, 5, -1, -1),
        "one row for all": draw(5, 3, 80).to(dtype).expand(2, -1, -1, -1),
        "one number for all": draw(1).to(dtype).expand(2, 5, 3, 80),
        "overlapping windows": draw(2, 5, 120).to(dtype).unfold(-1, 80, 20),
    }


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(level: str, dtype: torch.dtype, pairing: str) -> None:
    torch.manual_seed(4)
    cos, sin = random_table(5, 37)
    others = views(dtype)
    for name, x in others.items():
        assert x.shape == (2, 5, 3, 80), name
        rotate(level, [x, others["dense"]], cos, sin, "bshd", pairing, 3)
        rotate(
            level, [x], cos, sin, "bshd", pairing, 3, inverse=True, like=lambda x: torch.empty(x.shape, dtype=x.dtype)
        )
        rotate(level, [others["dense"]], cos, sin, "bshd", pairing, 3, like=lambda x: like_channels_apart(x))


def like_channels_apart(x: Tensor) -> Tensor:
    return torch.empty(*x.shape, 2, dtype=x.dtype)[..., 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_tables_of_any_strides(level: str, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    x = torch.randn(2, 5, 3, 80).to(dtype)
    for table_dtype in (torch.float32, torch.float64):
        plain = torch.randn(2, 5, 40, dtype=table_dtype)
        tables = {
            "transposed": torch.randn(40, 5, dtype=table_dtype).T,
            "every second pair": torch.randn(5, 80, dtype=table_dtype)[:, ::2],
            "one for all tokens": torch.randn(1, 40, dtype=table_dtype).expand(5, 40),
            "one for all pairs": torch.randn(5, 1, dtype=table_dtype).expand(5, 40),
            "one for all rows": torch.randn(5, 40, dtype=table_dtype).expand(2, 5, 40),
            "rows last": torch.randn(5, 40, 2, dtype=table_dtype).permute(2, 0, 1),
            "every second token": torch.randn(2, 10, 40, dtype=table_dtype)[:, ::2],
        }
        for table in tables.values():
            other = plain if table.ndim == 3 else plain[0]
            rotate(level, [x], table, other, "bshd", "half")
            rotate(level, [x], other, table, "bshd", "interleaved")
            rotate(level, [x], table, table, "bshd", "interleaved", inverse=True)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_infinities_and_nan(level: str, dtype: torch.dtype, pairing: str) -> None:
    """Special numbers with special tables, in all combinations, give the formula's result, including signs of 0."""
    odd = torch.tensor([0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan])
    tables = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.6, math.inf, math.nan])
    a, b = (x.reshape(-1) for x in torch.meshgrid(odd, odd, indexing="ij"))
    cos, sin = (x.reshape(-1, 1).expand(-1, 49).contiguous() for x in torch.meshgrid(tables, tables, indexing="ij"))
    x = torch.cat((a, b)) if pairing == "half" else torch.stack((a, b), dim=-1).reshape(-1)
    dense = x.to(dtype).expand(49, 2, 98).contiguous()
    for x in (dense, dense.repeat_interleave(2, dim=-1)[..., ::2]):
        for inverse in (False, True):
            y = torch.full_like(x, 9.0)
            cpu.rotate([x], [y], cos, sin, Options("thd", pairing == "interleaved", 0, inverse))
            assert same(y, by_reference([x], cos, sin, "thd", pairing, 0, inverse)[0], level)
            exact, _ = expected(x, cos, sin, "thd", pairing, 0, inverse)
            unit = torch.finfo(dtype).eps
            np.testing.assert_allclose(as_bshd(y, "thd"), exact, rtol=unit, atol=1e-6, equal_nan=True)
            zero = exact == 0
            assert (np.signbit(as_bshd(y, "thd")) == np.signbit(exact))[zero].all()


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestInPlace:
    def test_on_slices_of_a_fused_tensor(self, level: str, dtype: torch.dtype, layout: str, pairing: str) -> None:
        """Rotate query and key heads of a fused tensor. Value heads and memory around the heads must not change."""
        torch.manual_seed(7)
        heads, (cos, sin) = layout.index("h"), random_table(5, 21)
        for wide, step in ((80, 1), (97, 1), (170, 2)):  # contiguous heads; parts of wider ones; channels apart
            whole = torch.randn(shape(layout, 2, 5, 7, wide)).to(dtype)
            fused = whole[..., : 80 * step : step]
            before = whole.clone()
            q, k = fused.narrow(heads, 0, 4), fused.narrow(heads, 4, 1)
            wanted = rotate(level, [q, k], cos, sin, layout, pairing, 5)
            cpu.rotate([q, k], [q, k], cos, sin, Options(layout, pairing == "interleaved", 5, False))
            assert torch.equal(q, wanted[0])
            assert torch.equal(k, wanted[1])
            q.copy_(before[..., : 80 * step : step].narrow(heads, 0, 4))
            k.copy_(before[..., : 80 * step : step].narrow(heads, 4, 1))
            assert unchanged(whole, before)


def test_nothing_is_written_outside_the_output(level: str) -> None:
    for dtype in DTYPES:
        for pairs in range(1, 70):
            for pairing in PAIRINGS:
                whole = torch.full((2, 3, 2 * pairs + 6), 7.0, dtype=dtype)
                x, (cos, sin) = torch.randn(2, 3, 2 * pairs).to(dtype), random_table(2, pairs)
                cpu.rotate([x], [whole[..., 3:-3]], cos, sin, Options("thd", pairing == "interleaved", 0, False))
                assert (whole[..., :3] == 7).all()
                assert (whole[..., -3:] == 7).all()
                assert same(whole[..., 3:-3], by_reference([x], cos, sin, "thd", pairing, 0, False)[0], level)


class TestRounding:
    """float16 and bfloat16 are rounded to nearest, ties to even."""

    HALVES = (torch.float16, torch.bfloat16)

    def ways(self, a: Tensor, b: Tensor) -> list[tuple[Tensor, Tensor, str]]:
        """Yield pairs (a, b) as tensors [1, n, 2·pairs]: whole blocks, without the last pair, strided channels."""
        made = []
        for pairs in (64, 31, 1):
            rows = len(a) // pairs
            x, y = (z[: rows * pairs].reshape(rows, 1, pairs) for z in (a, b))
            half, interleaved = torch.cat((x, y), -1), torch.stack((x, y), -1).reshape(rows, 1, 2 * pairs)
            made += [(half, x, "half"), (interleaved, x, "interleaved")]
            if pairs == 31:
                made += [
                    (z.repeat_interleave(2, -1)[..., ::2], x, p)
                    for z, p in ((half, "half"), (interleaved, "interleaved"))
                ]
        return made  # fmt: skip

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> tuple[Tensor, Tensor]:
        y = torch.full_like(x, math.nan)
        cpu.rotate([x], [y], cos, sin, Options("thd", pairing == "interleaved", 0, False))
        pairs = x.shape[-1] // 2
        return (y[..., :pairs], y[..., pairs:]) if pairing == "half" else (y[..., 0::2], y[..., 1::2])

    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    def test_every_number_passes_unchanged(self, level: str, dtype: torch.dtype) -> None:
        every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        zero = torch.full_like(every, -0.0)  # 1 · x ∓ 0 · (−0) keeps the sign of x
        for first in (True, False):
            for x, part, pairing in self.ways(*((every, -zero) if first else (zero, every))):
                numbers = part if first else every[: part.numel()].reshape(part.shape)
                one = torch.ones(len(x), part.shape[-1])
                y = self.rotate(x, one, 0 * one, pairing)[0 if first else 1]
                assert torch.equal(y.isnan(), numbers.isnan())
                assert same(y, numbers, level)
                if level != "avx512_bf16":
                    assert unchanged(y[~y.isnan()], numbers[~numbers.isnan()])

    def hard(self, dtype: torch.dtype) -> Tensor:
        """Return float32 numbers that are hard to round: numbers of a dtype, midpoints, neighbours, random ones."""
        every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        low = every[every.isfinite()].float().sort().values
        middle = ((low[1:].double() + low[:-1].double()) / 2).float()
        seams = torch.cat((low, middle, torch.tensor([torch.finfo(dtype).max * (1 + torch.finfo(dtype).eps / 4)])))
        up, down = (torch.nextafter(seams, torch.tensor(end)) for end in (math.inf, -math.inf))
        any_bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0))
        return torch.cat((seams, up, down, any_bits.to(torch.int32).view(torch.float32)))

    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    def test_equals_the_rounding_of_torch(self, level: str, dtype: torch.dtype) -> None:
        """The tables contain the numbers: (1, −0) rotated by (v, −0) is v; by (0, v) it is v in the other channel."""
        hard = self.hard(dtype)
        one, zero = torch.ones_like(hard).to(dtype), torch.full_like(hard, -0.0).to(dtype)
        for x, part, pairing in self.ways(one, zero):
            numbers = hard[: part.numel()].reshape(len(x), -1)
            still = torch.zeros_like(numbers)
            wanted = numbers.to(dtype).reshape(part.shape)
            for tables, place in (((numbers, -still), 0), ((still, numbers), 1)):
                y = self.rotate(x, *tables, pairing)[place]
                assert same(y, wanted, level)
                if level != "avx512_bf16" or dtype == torch.float16:
                    assert unchanged(y[~wanted.isnan()], wanted[~wanted.isnan()])

    def test_avx512_bf16_with_subnormal_numbers(self, level: str) -> None:
        """The instruction flushes subnormal float32 numbers to 0 with the same sign. Nothing else differs."""
        if level != "avx512_bf16":
            pytest.skip("the other instruction sets keep them")
        numbers = self.hard(torch.bfloat16)
        numbers = numbers[: len(numbers) // 64 * 64].reshape(-1, 64)
        one = torch.ones(len(numbers), 1, 64)
        x = torch.cat((one, -0.0 * one), -1).bfloat16()
        y = self.rotate(x, numbers, torch.full_like(numbers, -0.0), "half")[0].squeeze(1)
        small = numbers.abs() < SMALLEST_NORMAL
        assert small.sum() > 500
        wanted = torch.where(small, torch.copysign(torch.zeros(()), numbers), numbers).bfloat16()
        assert unchanged(y[~wanted.isnan()], wanted[~wanted.isnan()])
