"""The kernel for cos and sin, with every instruction set, compared with exact integers and mpmath."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from each import each
from ropewalk import Axes, Rope, RopeError
from ropewalk.kernels import cpu

pytestmark = pytest.mark.usefixtures("poisoned")

ERROR = {
    torch.float32: 3.1e-8,  # half an ulp of numbers up to 1
    # Half an ulp, plus the roundings of t and of the polynomial's last sums. Measured: 1.1e-16.
    torch.float64: 2e-16,
}
LIMIT, WRAP = 2**31, 2**63


def tables(positions: list[int], steps: list[int], factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos, sin = cpu.angles(torch.tensor(positions), torch.tensor(steps), factor, dtype)
    assert cos.dtype == sin.dtype == dtype
    assert cos.shape == sin.shape == (len(positions), len(steps))
    return cos, sin


@functools.cache
def cases() -> tuple[list[int], list[int], np.ndarray, np.ndarray]:
    """Return positions and steps of every magnitude. 41 pairs are several vectors and a remainder."""
    draw = np.random.default_rng(0)
    positions = [
        0,
        1,
        -1,
        2,
        LIMIT - 1,
        LIMIT,
        -LIMIT,
        1 - LIMIT,
        WRAP - 1,
        -WRAP,
        1 - WRAP,
        WRAP // 3,
        2**32,
        -(2**61),
    ]
    positions += [int(p) for p in draw.integers(-LIMIT, LIMIT, 20)] + [int(p) for p in draw.integers(-WRAP, WRAP, 20)]
    steps = [0, 1, -1, WRAP - 1, -WRAP, 2**61, -(2**61), 2**62, 2**62 + 1, 3 * 2**60, 2**61 - 1, 2**61 + 1]
    steps += [int(s) for s in draw.integers(-WRAP, WRAP, 29)]
    return positions, steps, *oracle.cos_sin_of_steps(positions, steps)


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.25, 1.1386294361119891])
def test_error(level: str, factor: float, dtype: torch.dtype) -> None:
    positions, steps, *exact = cases()
    # float32 numbers above 1 have a larger ulp.
    allowed = ERROR[dtype] * (factor if factor <= 1 else 2)
    for table, truth in zip(tables(positions, steps, factor, dtype), exact, strict=True):
        assert np.abs(table.double().numpy() - truth * factor).max() <= allowed


def test_numbers_of_pairs(level: str) -> None:
    positions, steps, *exact = cases()

    def check(pairs: int) -> None:
        for dtype in ERROR:
            for table, truth in zip(tables(positions[:9], steps[-pairs:], 1.0, dtype), exact, strict=True):
                assert np.abs(table.double().numpy() - truth[:9, -pairs:]).max() <= ERROR[dtype]

    each(((f"{pairs} pairs", pairs) for pairs in range(1, 42)), check)


@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_whole_turn(level: str, dtype: torch.dtype) -> None:
    """Half a million phases, also at changes of the quadrant, compared with float64, whose angles are rounded."""
    draw = np.random.default_rng(1)
    spread = draw.integers(-WRAP, WRAP, 400_000)
    seams = (np.arange(-4, 4) * 2**61)[:, None] + draw.integers(-(2**12), 2**12, (8, 10_000))
    phases = torch.tensor(np.concatenate((spread, seams.reshape(-1))))
    angle, one = phases.double() * (2 * math.pi / 2**64), torch.ones(1, dtype=torch.int64)
    allowed = ERROR[dtype] if dtype == torch.float32 else 8e-16
    for given in ((one, phases), (phases, one)):  # phases as steps, which are processed in vectors, and as positions
        cos, sin = cpu.angles(*given, 1.0, dtype)
        assert (cos.reshape(-1).double() - angle.cos()).abs().max() <= allowed
        assert (sin.reshape(-1).double() - angle.sin()).abs().max() <= allowed


def test_positions_of_any_form(level: str) -> None:
    rope = Rope(10, 1e4, "half")
    plain = torch.randint(-LIMIT, LIMIT, (3, 7), generator=torch.Generator().manual_seed(0))
    cos, sin = (a.reshape(3, 7, 5) for a in oracle.cos_sin(plain.reshape(-1).tolist(), rope.inv_freq))
    forms = {
        "batch": (plain, slice(None)),
        "int32": (plain.to(torch.int32), slice(None)),
        "transposed": (plain.T.contiguous().T, slice(None)),
        "every second": (plain.repeat_interleave(2, -1)[:, ::2], slice(None)),
        "one row": (plain[1], 1),
        "one row for all": (plain[:1].expand(3, 7), [0, 0, 0]),
        "int32, a column": (plain.to(torch.int32)[:, 2], (slice(None), 2)),
        "none": (plain[:, :0], (slice(None), slice(0))),
        "no row": (plain[:0], slice(0)),
    }
    for name, (positions, rows) in forms.items():
        for dtype, error in ERROR.items():
            # float64: the step is rounded too, to 2⁻⁶⁵ turns.
            allowed = error if dtype == torch.float32 else error + LIMIT * 2 * math.pi * 2.0**-65
            rotation = rope.at(positions, dtype=dtype)
            assert rotation.cos.shape == rotation.sin.shape == (*positions.shape, 5), name
            assert not (rotation.cos.double() - torch.from_numpy(cos[rows])).abs().gt(allowed).any(), name
            assert not (rotation.sin.double() - torch.from_numpy(sin[rows])).abs().gt(allowed).any(), name
            assert rotation.cos.isfinite().all()


def test_threads_make_no_difference(level: str, threads: None) -> None:
    positions, steps = torch.arange(5_001) * 7_919 - 3, torch.tensor(cases()[1])
    made = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        made.append(torch.stack(cpu.angles(positions, steps, 1.0, torch.float32)))
    exact = oracle.cos_sin_of_steps(positions[::250].tolist(), steps.tolist())
    for table, truth in zip(made[1][:, ::250], exact, strict=True):
        assert np.abs(table.double().numpy() - truth).max() <= ERROR[torch.float32]
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


def several(axes: int, pairs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return positions of every magnitude for each axis, the axis of each pair, and steps."""
    draw = torch.Generator().manual_seed(axes * 1000 + pairs)
    positions = torch.randint(-LIMIT, LIMIT, (axes, 5, 3), generator=draw)
    positions[:, 0] = torch.tensor([WRAP - 1, -WRAP, 1 - LIMIT])
    axis = torch.randint(0, axes, (pairs,), generator=draw)
    return positions, axis, torch.randint(-WRAP, WRAP - 1, (pairs,), generator=draw)


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("axes", [1, 2, 3, 7])
def test_several_axes(level: str, axes: int, dtype: torch.dtype) -> None:
    """Each pair has the same bits as with only its own axis, and equals the exact value."""

    def check(pairs: int) -> None:
        positions, axis, steps = several(axes, pairs)
        made = cpu.angles(positions, steps, 1.25, dtype, axis)
        for a in range(axes):
            alone = cpu.angles(positions[a], steps, 1.25, dtype)
            for table, one in zip(made, alone, strict=True):
                assert table.shape == (5, 3, pairs)
                assert torch.equal(table[..., axis == a], one[..., axis == a])
        pair = pairs - 1
        exact = oracle.cos_sin_of_steps(positions[axis[pair]].reshape(-1).tolist(), [int(steps[pair])])
        for table, truth in zip(made, exact, strict=True):
            error = table[..., pair].reshape(-1).double().numpy() - 1.25 * truth[:, 0]
            assert np.abs(error).max() <= 2 * ERROR[dtype]

    # Whole vectors, a remainder, and more pairs than the kernel gathers at a time.
    each(((f"{pairs} pairs", pairs) for pairs in (1, 2, 3, 7, 8, 9, 16, 41, 64, 511, 512, 513, 1027)), check)


def test_several_axes_of_any_form(level: str) -> None:
    positions, axis, steps = several(3, 10)
    wanted = cpu.angles(positions, steps, 1.0, torch.float32, axis)
    forms = {
        "batch last": positions.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "every second": positions.repeat_interleave(2, -1)[..., ::2],
        "of a larger tensor": torch.cat((positions, positions))[:3],
    }
    for name, form in forms.items():
        for table, other in zip(cpu.angles(form, steps, 1.0, torch.float32, axis), wanted, strict=True):
            assert torch.equal(table, other), name
    small = positions % 1000
    for form in (small.to(torch.int32), small):
        table = cpu.angles(form, steps, 1.0, torch.float32, axis)[0]
        assert torch.equal(table, cpu.angles(small, steps, 1.0, torch.float32, axis)[0])
    one = positions[:1].expand(3, 5, 3)
    table = cpu.angles(one, steps, 1.0, torch.float32, axis)[0]
    assert torch.equal(table, cpu.angles(positions[0], steps, 1.0, torch.float32)[0])
    for shape in ((3, 0), (3, 0, 4), (3, 4, 0)):
        table = cpu.angles(torch.empty(shape, dtype=torch.int64), steps, 1.0, torch.float32, axis)[0]
        assert table.shape == (*shape[1:], 10)


@pytest.mark.parametrize("wrong", [-1, 3, 2**40])
def test_an_unknown_axis(level: str, wrong: int) -> None:
    positions, axis, steps = several(3, 10)
    axis[7] = wrong
    with pytest.raises(RopeError, match="each pair must have one of the axes of positions"):
        cpu.angles(positions, steps, 1.0, torch.float32, axis)


def test_a_rope_with_axes_calls_it_once(calls: list[str]) -> None:
    rope = Rope(16, 1e4, "half", axes=Axes.sections((2, 3, 3)))
    rope.at(torch.zeros(3, 5, dtype=torch.int32))
    rope.shift((1, 2, 3))
    assert calls == ["angles", "angles"]
