"""Compare every GPU kernel, on a GPU or in Triton's interpreter, with float64 and bit for bit with the reference.

The shapes are small, because the interpreter takes a millisecond for each program.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from kernel_cases import (
    DTYPES,
    LAYOUTS,
    PAIRINGS,
    by_reference,
    check_rotation,
    check_table_gradient,
    same,
    shape,
    unchanged,
)
from ropewalk._layout import Options
from ropewalk.kernels import gpu, gpu_plans

pytestmark = pytest.mark.usefixtures("device")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LIMIT, WRAP = 2**31, 2**63
ERROR = {torch.float32: 3.1e-8, torch.float64: 2e-16}  # half an ulp, plus the roundings of the last sums


def tables(*size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(size, dtype=dtype), torch.randn(size, dtype=dtype)


def rotate(tensors: list[Tensor], *given: Any, **how: Any) -> list[Tensor]:
    truncated = INTERPRETED and tensors[0].dtype == torch.bfloat16
    return check_rotation(gpu, tensors, *given, **how, truncated=truncated)


class TestRotate:
    @pytest.mark.parametrize("pairing", PAIRINGS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_sizes(self, dtype: torch.dtype, pairing: str) -> None:
        """Head sizes, numbers of pairs and offsets, with alternating directions and dtypes of the tables."""
        torch.manual_seed(0)
        sizes = ((2, 1, 0), (6, 3, 0), (80, 40, 0), (96, 48, 0), (128, 64, 0), (6, 1, 4), (96, 24, 48), (192, 32, 128),
                 (256, 39, 7), (1030, 513, 3))  # fmt: skip
        sizes = sizes[DTYPES.index(dtype) % 2 :: 2] if INTERPRETED else sizes
        for i, (head_dim, pairs, offset) in enumerate(sizes):
            q, k = torch.randn(2, 3, 5, head_dim).to(dtype), torch.randn(2, 3, 2, head_dim).to(dtype)
            for j, table_dtype in enumerate((torch.float32, torch.float64)):
                cos, sin = tables(3, pairs, dtype=table_dtype)
                rotate([q, k], cos, sin, "bshd", pairing, offset, inverse=(i + j) % 2 == 1)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layouts_and_tables(self, layout: str) -> None:
        torch.manual_seed(1)
        sizes = ((39,), (5, 39), (1, 5, 39), (3, 5, 39))[: 2 if layout == "thd" else 4]
        for i, (size, dtype) in enumerate(zip(sizes, DTYPES, strict=False)):
            q, k = (torch.randn(shape(layout, 3, 5, heads, 92)).to(dtype) for heads in (11, 1))
            rotate([q, k], *tables(*size), layout, PAIRINGS[i // 2], 6, inverse=i % 2 == 1)
            rotate([k], *tables(*size), layout, PAIRINGS[1 - i // 2], 6, inverse=i % 2 == 0)

    @pytest.mark.parametrize(("layout", "pairing"), list(zip(LAYOUTS, 2 * PAIRINGS, strict=True)))
    def test_many_tiles(self, layout: str, pairing: str) -> None:
        """Several tiles along tokens and heads, where the last tile is not full."""
        torch.manual_seed(2)
        q, k = (torch.randn(shape(layout, 2, 19, heads, 128)) for heads in (37, 3))
        plan, _ = gpu_plans.rotation_launch([q, k], [q, k], *tables(19, 64), Options(layout, False, 0, False))
        assert plan.programs > 40
        assert 37 % plan.numbers["Q_BLOCK_H"]
        assert 19 % plan.numbers["K_BLOCK_T"]
        rotate([q, k], *tables(*(() if layout == "thd" else (2,)), 19, 64), layout, pairing)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_small_and_empty(self, layout: str) -> None:
        for batch, seq, heads, kv_heads in (
            *((0, 2, 2, 1), (1, 0, 2, 1), (2, 2, 0, 1), (2, 2, 2, 0), (0, 0, 0, 0)),
            *((1, 1, 1, 1), (2, 1, 2, 1), (1, 2, 1, 1)),
        ):
            size = (1 if layout == "thd" else batch, seq)
            q, k = (torch.randn(shape(layout, *size, h, 6)) for h in (heads, kv_heads))
            rotate([q, k], *tables(seq, 2), layout, "half", 1)
            rotate([k], *tables(seq, 2), layout, "interleaved", 1)

    @pytest.mark.parametrize(("dtype", "pairing"), [(torch.float16, "half"), (torch.float32, "interleaved")], ids=str)
    def test_strides(self, dtype: torch.dtype, pairing: str) -> None:
        torch.manual_seed(4)
        draw, (cos, sin) = torch.randn, tables(5, 36)
        dense = draw(2, 5, 3, 80).to(dtype)
        views = {
            "transposed": draw(2, 3, 5, 80).to(dtype).transpose(1, 2),
            "tokens first": draw(5, 2, 3, 80).to(dtype).transpose(0, 1),
            "channels first": draw(80, 2, 5, 3).to(dtype).permute(1, 2, 3, 0),
            "every third channel": draw(2, 5, 3, 240).to(dtype)[..., 1::3],
            "part of a head": draw(2, 5, 3, 97).to(dtype)[..., 9:89],
            "part of a fused tensor": draw(2, 5, 7, 80).to(dtype)[:, :, 2:5],
            "every second token": draw(2, 10, 3, 80).to(dtype)[:, 1::2],
            "one head for all": draw(2, 5, 1, 80).to(dtype).expand(-1, -1, 3, -1),
            "one token for all": draw(2, 1, 3, 80).to(dtype).expand(-1, 5, -1, -1),
            "one number for all": draw(1).to(dtype).expand(2, 5, 3, 80),
            "overlapping windows": draw(2, 5, 120).to(dtype).unfold(-1, 80, 20),
        }
        for name, x in views.items():
            assert x.shape == (2, 5, 3, 80), name
            rotate([x, dense], cos, sin, "bshd", pairing, 4)
            rotate([x], cos, sin, "bshd", pairing, 4, inverse=True, like=lambda x: torch.empty(x.shape, dtype=x.dtype))
        rotate([dense], cos, sin, "bshd", pairing, 4, like=lambda x: torch.empty(*x.shape, 2, dtype=x.dtype)[..., 1])
        # Aligned and unaligned strides together: the unit of the strides must divide all of them.
        rotate([dense, views["part of a head"]], cos, sin, "bshd", pairing, 4)
        rotate([dense], cos, sin, "bshd", pairing, 4, like=lambda x: torch.empty(2, 5, 3, 97, dtype=x.dtype)[..., :80])

    def test_strides_of_many_gigabytes(self) -> None:
        """The third token or row is 2³¹ elements after the first, so its offset overflows 32 bits."""
        memory = torch.empty(2**31 + 2**20, dtype=torch.float16)
        for size, strides in (((1, 3, 1, 8), (0, 2**30 + 1, 8, 1)), ((3, 1, 1, 8), (2**30 + 1, 8, 8, 1))):
            x = memory.as_strided(size, strides)
            x.copy_(torch.randn(size))
            rotate([x], *tables(size[1], 4), "bshd", "half", like=lambda x: torch.empty(x.shape, dtype=x.dtype))
            cos, sin = tables(size[1], 4)
            wanted = by_reference([x], cos, sin, "bshd", "half", 0, False)[0]
            gpu.rotate([x], [x], cos, sin, Options("bshd", False, 0, False))
            assert unchanged(x, wanted)

    def test_tables_of_any_strides(self) -> None:
        torch.manual_seed(5)
        x = torch.randn(2, 5, 3, 80)
        for table_dtype in (torch.float32, torch.float64):
            plain = torch.randn(2, 5, 40, dtype=table_dtype)
            for table in (
                torch.randn(40, 5, dtype=table_dtype).T,
                torch.randn(5, 80, dtype=table_dtype)[:, ::2],
                torch.randn(1, 40, dtype=table_dtype).expand(5, 40),
                torch.randn(5, 1, dtype=table_dtype).expand(5, 40),
                torch.randn(5, 40, dtype=table_dtype).expand(2, 5, 40),
                torch.randn(5, 40, 2, dtype=table_dtype).permute(2, 0, 1),
                torch.randn(5, 41, dtype=table_dtype)[:, 1:],
            ):
                other = plain if table.ndim == 3 else plain[0]
                rotate([x], table, other, "bshd", "half")
                rotate([x], other, table, "bshd", "interleaved", inverse=True)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_in_place(self, dtype: torch.dtype) -> None:
        """Rotate query and key heads of one tensor in place. Value heads and surrounding memory must not change."""
        torch.manual_seed(6)
        # contiguous heads; parts of wider ones; channels apart
        sizes = ((80, 1), (97, 1), (170, 2), (80, 1))
        for layout, pairing, (wide, step) in zip(LAYOUTS, 2 * PAIRINGS, sizes, strict=True):
            heads, (cos, sin) = layout.index("h"), tables(5, 21)
            whole = torch.randn(shape(layout, 2, 5, 7, wide)).to(dtype)
            fused = whole[..., : 80 * step : step]
            before = whole.clone()
            q, k = fused.narrow(heads, 0, 4), fused.narrow(heads, 4, 1)
            wanted = rotate([q, k], cos, sin, layout, pairing, 5)
            gpu.rotate([q, k], [q, k], cos, sin, Options(layout, pairing == "interleaved", 5, False))
            assert unchanged(q, wanted[0])
            assert unchanged(k, wanted[1])
            q.copy_(before[..., : 80 * step : step].narrow(heads, 0, 4))
            k.copy_(before[..., : 80 * step : step].narrow(heads, 4, 1))
            assert unchanged(whole, before)

    @pytest.mark.parametrize("pairing", PAIRINGS)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
    @pytest.mark.filterwarnings(
        "ignore:(invalid value|overflow):RuntimeWarning"
    )  # of NumPy, which the interpreter uses
    def test_zeros_infinities_and_nan(self, dtype: torch.dtype, pairing: str) -> None:
        odd = torch.tensor([0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan])
        a, b = (x.reshape(-1) for x in torch.meshgrid(odd, odd, indexing="ij"))
        cos, sin = (
            x.reshape(-1, 1).expand(-1, 49).contiguous() for x in torch.meshgrid(odd[:6], odd[:6], indexing="ij")
        )
        x = torch.cat((a, b)) if pairing == "half" else torch.stack((a, b), dim=-1).reshape(-1)
        x = x.to(dtype).expand(36, 1, 98).contiguous()
        for inverse in (False, True):
            y = torch.full_like(x, 9.0)
            gpu.rotate([x], [y], cos, sin, Options("thd", pairing == "interleaved", 0, inverse))
            assert same(y, by_reference([x], cos, sin, "thd", pairing, 0, inverse)[0], "")


class TestAngles:
    @pytest.mark.parametrize("dtype", ERROR, ids=str)
    @pytest.mark.parametrize("factor", [1.0, 0.25, 1.1386294361119891])
    def test_error(self, factor: float, dtype: torch.dtype) -> None:
        draw = np.random.default_rng(0)
        positions = [0, 1, -1, 1_048_576, LIMIT - 1, -LIMIT, WRAP - 1, -WRAP, WRAP // 3, -(2**61)]
        positions += [int(p) for p in draw.integers(-LIMIT, LIMIT, 20)]
        steps = [0, 1, -1, WRAP - 1, -WRAP, 2**61, -(2**61), 2**62, 2**62 + 1, 3 * 2**60, 2**61 - 1, 2**61 + 1]
        steps += [int(s) for s in draw.integers(-WRAP, WRAP, 29)]
        exact = oracle.cos_sin_of_steps(positions, steps)
        allowed = ERROR[dtype] * (factor if factor <= 1 else 2)  # numbers above 1 have a larger ulp
        made = gpu.angles(torch.tensor(positions), torch.tensor(steps), factor, dtype)
        for table, truth in zip(made, exact, strict=True):
            assert table.dtype == dtype
            assert np.abs(table.double().cpu().numpy() - truth * factor).max() <= allowed

    @pytest.mark.parametrize("dtype", ERROR, ids=str)
    def test_whole_turn(self, dtype: torch.dtype) -> None:
        """Phases over the whole turn and at changes of the quadrant, compared with float64 and its rounded angles."""
        draw = np.random.default_rng(1)
        seams = (np.arange(-4, 4) * 2**61)[:, None] + draw.integers(-(2**12), 2**12, (8, 500))
        phases = torch.tensor(np.concatenate((draw.integers(-WRAP, WRAP, 40_000), seams.reshape(-1))))
        angle = phases.double() * (2 * math.pi / 2**64)
        cos, sin = gpu.angles(phases, torch.ones(1, dtype=torch.int64), 1.0, dtype)
        allowed = ERROR[dtype] if dtype == torch.float32 else 8e-16
        assert (cos[:, 0].double() - angle.cos()).abs().max() <= allowed
        assert (sin[:, 0].double() - angle.sin()).abs().max() <= allowed

    @pytest.mark.parametrize("pairs", [1, 2, 3, 40, 64, 513])
    def test_positions_of_any_form(self, pairs: int) -> None:
        plain = torch.randint(-LIMIT, LIMIT, (3, 7))
        steps = torch.randint(-WRAP, WRAP - 1, (pairs,))
        exact = [
            torch.tensor(table).reshape(3, 7, pairs)
            for table in oracle.cos_sin_of_steps(plain.flatten().tolist(), steps.tolist())
        ]
        forms = {
            "batch": (plain, slice(None)),
            "int32": (plain.to(torch.int32), slice(None)),
            "transposed": (plain.T.contiguous().T, slice(None)),
            "one row for all": (plain[:1].expand(3, 7), [0, 0, 0]),
            "int32, a column": (plain.to(torch.int32)[:, 2], (slice(None), 2)),
            "none": (plain[:, :0], (slice(None), slice(0))),
            "one": (plain[1, 1], (1, 1)),
        }
        for name, (positions, rows) in forms.items():
            for table, truth in zip(gpu.angles(positions, steps, 1.0, torch.float32), exact, strict=True):
                assert table.shape == (*positions.shape, pairs), name
                assert not (table.double() - truth[rows]).abs().gt(3.1e-8).any(), name

    @pytest.mark.parametrize("dtype", ERROR, ids=str)
    @pytest.mark.parametrize("pairs", [1, 3, 40, 64, 513])
    def test_several_axes(self, pairs: int, dtype: torch.dtype) -> None:
        """Each pair has the same bits as with only its own axis."""
        positions = torch.randint(-LIMIT, LIMIT, (3, 5, 7))
        axis, steps = torch.randint(0, 3, (pairs,)), torch.randint(-WRAP, WRAP - 1, (pairs,))
        forms = {
            "batch": positions,
            "int32": positions.to(torch.int32),
            "transposed": positions.permute(2, 1, 0).contiguous().permute(2, 1, 0),
            "one token": positions[:, 0, :1],
            "none": positions[:, :0],
        }
        for name, form in forms.items():
            made = gpu.angles(form, steps, 1.25, dtype, axis)
            for a in range(3):
                for table, alone in zip(made, gpu.angles(form[a], steps, 1.25, dtype), strict=True):
                    assert table.shape == (*form.shape[1:], pairs), name
                    assert torch.equal(table[..., axis == a], alone[..., axis == a]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestTableGradient:
    def test_sizes(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        sizes = ((6, 3, 0), (80, 40, 0), (96, 17, 31), (128, 64, 0))
        for layout, pairing, (head_dim, pairs, offset) in zip(LAYOUTS, 2 * PAIRINGS, sizes, strict=True):
            shapes = [shape(layout, 2, 5, heads, head_dim) for heads in (37, 1)]
            tensors, grads = ([torch.randn(size).to(dtype) for size in shapes] for _ in range(2))
            check_table_gradient(gpu, tensors, grads, pairs, layout, pairing, offset)
            check_table_gradient(gpu, tensors[1:], grads[1:], pairs, layout, pairing, offset)

    @pytest.mark.parametrize("pairing", PAIRINGS)
    def test_strides_and_empty(self, dtype: torch.dtype, pairing: str) -> None:
        torch.manual_seed(1)
        dense, apart = torch.randn(2, 5, 3, 80).to(dtype), torch.randn(2, 5, 3, 160).to(dtype)[..., ::2]
        one = torch.ones((), dtype=dtype).expand(2, 5, 3, 80)  # the gradient of .sum()
        for x, grad in ((dense, one), (apart, dense), (dense, apart)):
            check_table_gradient(gpu, [x, dense], [grad, one], 29, "bshd", pairing, 7)
        for batch, seq, heads in ((2, 5, 0), (1, 0, 3), (0, 5, 3)):
            x = torch.randn(batch, seq, heads, 8).to(dtype)
            check_table_gradient(gpu, [x], [x + 1], 3, "bshd", pairing, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
class TestTablesPerHead:
    def test_rotate(self, layout: str) -> None:
        torch.manual_seed(0)
        for i, (dtype, pairing) in enumerate(zip(DTYPES, 2 * PAIRINGS, strict=True)):
            q, k = (torch.randn(shape(layout, 2, 3, 3, 92)).to(dtype) for _ in range(2))
            for batch in (1, 2)[: 1 if layout == "thd" else 2]:
                per_head = tables(batch, 3, 3, 39, dtype=(torch.float32, torch.float64)[i // 2])
                rotate([q, k], *per_head, layout, pairing, 6, inverse=batch == 2)
                rotate([k], *per_head, layout, pairing, 6)

    def test_tiles_and_strides(self, layout: str) -> None:
        """Several tiles along tokens and heads, the last one not full; permuted tables, and one table for all heads."""
        torch.manual_seed(1)
        pairing = PAIRINGS[LAYOUTS.index(layout) % 2]
        q = torch.randn(shape(layout, 1, 19, 37, 128))
        rotate([q], *tables(1, 37, 19, 64), layout, pairing)
        x = torch.randn(shape(layout, 1, 3, 2, 6))
        rotate([x], *(table.transpose(1, 2) for table in tables(1, 3, 2, 3)), layout, pairing)
        rotate([x], *(table[..., ::2] for table in tables(1, 2, 3, 4)), layout, pairing, 1)
        rotate([x], *(table.expand(1, 2, 3, 2) for table in tables(1, 1, 3, 2)), layout, pairing, 1)
        for seq, heads in ((0, 2), (3, 0), (1, 1)):
            rotate([torch.randn(shape(layout, 1, seq, heads, 6))], *tables(1, heads, seq, 2), layout, pairing, 1)

    def test_gradient(self, layout: str) -> None:
        torch.manual_seed(2)
        for dtype, pairing, heads in zip(DTYPES, 2 * PAIRINGS, (7, 3, 37, 1), strict=True):
            tensors, grads = (
                [torch.randn(shape(layout, 2, 5, heads, 80)).to(dtype) for _ in range(2)] for _ in range(2)
            )
            for count in (1, 2):
                given = tensors[:count], grads[:count]
                check_table_gradient(gpu, *given, 29, layout, pairing, 7, per_head=True)
