"""cos and sin of all positions, compared with exact arithmetic."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import oracle
from ropewalk import Rope, RopeError, YaRN
from ropewalk.angles import exact as angles
from ropewalk.angles import fixed_point, phase_steps
from ropewalk.kernels import backend

BASES = [100.0, 1e4, 5e5, 1e6, 1e8]
LIMIT = 2**31
ON_CPU = 3.1e-8
WITHOUT_FLOAT64 = 1e-7


def bound(positions: torch.Tensor) -> torch.Tensor:
    """Return the documented bound: half an ulp of float32 plus the rounding of the step."""
    return 2.0**-25 + positions.abs().double().unsqueeze(-1) * (2 * math.pi * 2.0**-65) + 1e-15


def random_positions(count: int, seed: int) -> torch.Tensor:
    """Return random positions of every magnitude up to ±2³¹."""
    draw = np.random.default_rng(seed)
    size = np.exp2(draw.uniform(0, 31, count))
    return torch.tensor(np.round(size * draw.choice([-1, 1], count)).clip(-LIMIT, LIMIT - 1).astype(np.int64))


def edges() -> torch.Tensor:
    return torch.tensor([0, 1, -1, 4095, 8191, 131_071, 1_048_575, LIMIT - 1, -LIMIT, 1 - LIMIT])


def worst_positions(step: int, count: int = 40) -> list[int]:
    """Return those of eight million positions whose phase is closest to a multiple of an eighth of a turn.

    There the quadrant changes, and cos or sin is near 0 or 1.
    """
    window = 2**22
    candidates = np.concatenate([np.arange(-LIMIT, -LIMIT + window), np.arange(LIMIT - window, LIMIT)])
    with np.errstate(over="ignore"):
        phase = candidates * np.int64(step)
        from_seam = np.abs((phase << 3) >> 3)  # the lower 61 bits, signed
    return candidates[np.argpartition(from_seam, count)[:count]].tolist()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("rotary_dim", [64, 128])
def test_error_on_cpu(base: float, rotary_dim: int) -> None:
    rope = Rope(rotary_dim, base, "half")
    positions = torch.cat((edges(), random_positions(90, seed=int(base) + rotary_dim)))
    rotation, (cos, sin) = rope.at(positions), oracle.cos_sin(positions.tolist(), rope.inv_freq)
    for table, exact in ((rotation.cos, cos), (rotation.sin, sin)):
        error = (table.double() - torch.from_numpy(exact)).abs()
        assert error.max() <= ON_CPU
        assert (error <= bound(positions)).all()


@pytest.mark.parametrize("base", BASES)
def test_error_at_the_worst_positions(base: float) -> None:
    rope = Rope(16, base, "half")
    for pair, step in enumerate(rope._phase_steps):
        positions = torch.tensor(worst_positions(step))
        cos, sin = oracle.cos_sin(positions.tolist(), rope.inv_freq[pair : pair + 1])
        rotation = rope.at(positions)
        plain = angles.cos_sin_of_phase_float32(positions.unsqueeze(-1) * torch.tensor([step]), 1.0)
        for table, other, exact in ((rotation.cos, plain[0], cos), (rotation.sin, plain[1], sin)):
            truth = torch.from_numpy(exact)
            assert (table[:, pair : pair + 1].double() - truth).abs().max() <= ON_CPU
            assert (other.double() - truth).abs().max() <= WITHOUT_FLOAT64


@pytest.mark.parametrize("base", BASES)
def test_error_without_float64(base: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_NO_FLOAT64", frozenset({"cpu"}))
    rope = Rope(128, base, "half")
    positions = torch.cat((edges(), random_positions(90, seed=int(base))))
    rotation, (cos, sin) = rope.at(positions), oracle.cos_sin(positions.tolist(), rope.inv_freq)
    assert rotation.cos.dtype == torch.float32
    assert (rotation.cos.double() - torch.from_numpy(cos)).abs().max() <= WITHOUT_FLOAT64
    assert (rotation.sin.double() - torch.from_numpy(sin)).abs().max() <= WITHOUT_FLOAT64


def dense_phases() -> torch.Tensor:
    draw = np.random.default_rng(7)
    spread = draw.integers(-(2**63), 2**63 - 1, 2_000_000)
    seams = (np.arange(-4, 4) * 2**61)[:, None] + draw.integers(-(2**12), 2**12, (8, 20_000))
    return torch.tensor(np.concatenate((spread, seams.reshape(-1))))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_polynomial_over_the_whole_turn(compiled: bool, request: pytest.FixtureRequest) -> None:
    """Two million phases compared with float64, which is exact to 1e-15 here."""
    if compiled:
        request.getfixturevalue("compiler")
    phase = dense_phases()
    exact = phase.double() * (2 * math.pi / 2**64)
    function = angles.cos_sin_of_phase_float32
    cos, sin = (torch.compile(function, fullgraph=True) if compiled else function)(phase, 1.0)
    assert (cos.double() - exact.cos()).abs().max() <= WITHOUT_FLOAT64
    assert (sin.double() - exact.sin()).abs().max() <= WITHOUT_FLOAT64


def test_default_dtype_has_no_effect() -> None:
    phase = torch.tensor([2**60, -(2**62)])
    expected = angles.cos_sin_of_phase_float32(phase, 1.3)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            for table, other in zip(angles.cos_sin_of_phase_float32(phase, 1.3), expected, strict=True):
                assert table.dtype == torch.float32
                assert torch.equal(table, other)
    finally:
        torch.set_default_dtype(before)


def test_float64_tables() -> None:
    rope = Rope(64, 5e5, "half")
    positions = torch.cat((edges(), random_positions(40, seed=1)))
    rotation, (cos, sin) = rope.at(positions, dtype=torch.float64), oracle.cos_sin(positions.tolist(), rope.inv_freq)
    allowed = bound(positions) - 2.0**-25
    assert rotation.cos.dtype == torch.float64
    assert ((rotation.cos - torch.from_numpy(cos)).abs() <= allowed).all()
    assert ((rotation.sin - torch.from_numpy(sin)).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float_positions(dtype: torch.dtype) -> None:
    rope = Rope(64, 1e4, "half")
    positions = torch.tensor([0.0, 0.5, -3.25, 1000.125], dtype=dtype)
    angle = positions.double().unsqueeze(-1) * torch.from_numpy(rope.inv_freq)
    rotation = rope.at(positions)
    assert rotation.cos.dtype == torch.float32
    torch.testing.assert_close(rotation.cos.double(), angle.cos(), rtol=0, atol=ON_CPU)
    torch.testing.assert_close(rotation.sin.double(), angle.sin(), rtol=0, atol=ON_CPU)


def test_gradient_reaches_float_positions() -> None:
    rope = Rope(8, 1e4, "half")
    positions = torch.tensor([0.3, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p: rope.at(p, dtype=torch.float64).cos, positions)


class TestShift:
    rope = Rope(8, 1e4, "half", scaling=YaRN(4, 4096))

    def test_has_no_attention_factor(self) -> None:
        rotation = self.rope.shift(-512)
        assert rotation.cos.shape == (4,)
        assert rotation.attention_factor == 1.0
        cos, sin = oracle.cos_sin([-512], self.rope.inv_freq)
        np.testing.assert_allclose(rotation.cos, cos[0], atol=ON_CPU)
        np.testing.assert_allclose(rotation.sin, sin[0], atol=ON_CPU)

    @pytest.mark.parametrize(
        "delta", [3, torch.tensor(3), torch.tensor([3, 3, 3, 3, 3]), torch.full((2, 5), 3, dtype=torch.int32)]
    )
    def test_moves_rotated_keys(self, delta: int | torch.Tensor) -> None:
        keys, positions = torch.randn(2, 5, 1, 8), torch.arange(1_000_000, 1_000_005)
        moved = self.rope.shift(delta)(self.rope.at(positions)(keys, layout="bshd"), layout="bshd")
        torch.testing.assert_close(moved, self.rope.at(positions + 3)(keys, layout="bshd"), rtol=0, atol=2e-6)

    @pytest.mark.parametrize(
        "delta",
        [1.5, True, "3", 2**63, None, torch.tensor([0.5]), torch.zeros(2, 2, 2, dtype=torch.int64)],
    )
    def test_requires_integers(self, delta: object) -> None:
        with pytest.raises(RopeError, match=r"Rope\.shift: delta must be"):
            self.rope.shift(delta)  # type: ignore[arg-type]


class TestRefusals:
    rope = Rope(8, 1e4, "half")

    @pytest.mark.parametrize(
        ("positions", "message"),
        [
            ([0, 1, 2], "positions must be a tensor, got [0, 1, 2]"),
            (np.arange(3), "positions must be a tensor"),
            (torch.arange(3).to(torch.bfloat16), "positions must be int32 or int64 (float32 or float64 for grids)"),
            (torch.arange(3).half(), "got torch.float16"),
            (torch.arange(3).to(torch.uint8), "got torch.uint8"),
            (torch.tensor([True]), "got torch.bool"),
            (torch.tensor(3), "positions must have shape [seq] or [batch, seq], got shape ()"),
            (torch.zeros(3, 1, 5, dtype=torch.int64), "got shape (3, 1, 5). If tokens have several"),
        ],
    )
    def test_positions(self, positions: object, message: str) -> None:
        with pytest.raises(RopeError) as raised:
            self.rope.at(positions)  # type: ignore[arg-type]
        assert message in str(raised.value)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
    def test_table_dtype(self, dtype: torch.dtype) -> None:
        with pytest.raises(RopeError, match=r"dtype must be torch\.float32 or torch\.float64"):
            self.rope.at(torch.arange(3), dtype=dtype)

    @pytest.mark.parametrize(
        ("positions", "dtype"), [(torch.arange(3), torch.float64), (torch.arange(3.0), torch.float32)]
    )
    def test_what_needs_float64(
        self, positions: torch.Tensor, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(backend, "_NO_FLOAT64", frozenset({"cpu"}))
        monkeypatch.setattr(backend, "FAST_PATH", False)
        with pytest.raises(RopeError, match="the device must support float64"):
            self.rope.at(positions, dtype=dtype)


@pytest.fixture
def no_kept_steps() -> Iterator[None]:
    phase_steps._copies.clear()
    yield
    phase_steps._copies.clear()


@pytest.mark.usefixtures("no_kept_steps")
class TestSurroundings:
    """`at` gives the same numbers in every mode and context, and does not affect later calls."""

    rope = Rope(64, 5e5, "half")
    positions = torch.arange(100_000, 100_016)

    def expected(self) -> torch.Tensor:
        cos, _ = oracle.cos_sin(self.positions.tolist(), self.rope.inv_freq)
        return torch.from_numpy(cos)

    def check(self) -> None:
        assert (self.rope.at(self.positions).cos.double() - self.expected()).abs().max() <= ON_CPU

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast(self, dtype: torch.dtype) -> None:
        with torch.autocast("cpu", dtype=dtype):
            self.check()
            rotation = self.rope.at(self.positions.double())
        assert (rotation.cos.double() - self.expected()).abs().max() <= ON_CPU

    def test_matmul_precision(self) -> None:
        before = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("medium")
            self.check()
        finally:
            torch.set_float32_matmul_precision(before)

    def test_fake_tensors_first(self) -> None:
        with FakeTensorMode():
            fake = self.rope.at(torch.arange(16))
            assert fake.cos.shape == (16, 32)
        self.check()

    def test_fake_mode_around_real_positions(self) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            self.rope.at(self.positions)
        self.check()

    def test_real_first_then_fake(self) -> None:
        self.check()
        with FakeTensorMode():
            assert self.rope.at(torch.arange(16)).cos.shape == (16, 32)

    def test_inference_mode_first(self) -> None:
        with torch.inference_mode():
            self.check()
        assert not self.rope.at(self.positions).cos.is_inference()
        q = torch.randn(16, 2, 64, requires_grad=True)
        self.rope.at(self.positions)(q, layout="thd").sum().backward()
        assert q.grad is not None

    def test_vmap_first(self) -> None:
        mapped = torch.func.vmap(lambda p: self.rope.at(p).cos)(self.positions.reshape(4, 4))
        assert (mapped.reshape(16, 32).double() - self.expected()).abs().max() <= ON_CPU
        self.check()

    def test_compiled_first(self) -> None:
        at = torch.compile(lambda p: self.rope.at(p).cos, fullgraph=True, backend="aot_eager")
        assert (at(self.positions).double() - self.expected()).abs().max() <= ON_CPU
        self.check()

    def test_meta(self) -> None:
        rotation = self.rope.at(self.positions, device="meta")
        assert rotation.cos.shape == (16, 32)
        assert rotation.cos.is_meta
        assert self.rope.at(torch.arange(4, device="meta")).sin.is_meta
        self.check()

    def test_steps_are_kept_and_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(phase_steps, "_MAX_COPIES", 2)
        monkeypatch.setattr(backend, "FAST_PATH", False)
        for base in (10.0, 20.0, 30.0):
            Rope(8, base, "half").at(torch.arange(2))
        assert len(phase_steps._copies) == 1
        (kept,) = phase_steps._copies.values()
        Rope(8, 30.0, "half").at(torch.arange(2))
        assert next(iter(phase_steps._copies.values())) is kept


def test_an_attention_factor_above_1_doubles_the_rounding() -> None:
    """The ulp between 1 and 2 is twice that below 1, so the rounding grows by 2 and not by the factor."""
    factor = 1.1902380714238083
    rope = Rope(64, 1e4, "half", scaling=YaRN(8.0, 4096, attention_factor=factor))
    positions = random_positions(200, seed=5)
    expected, _ = oracle.cos_sin(positions.tolist(), rope.inv_freq.tolist())
    error = np.abs(rope.at(positions).cos.double().numpy() - factor * expected)
    assert factor * 2.0**-25 < error.max() <= 2.0**-24 + factor * 2.0**31 * 2 * math.pi * 2.0**-65


def test_step_of_the_float64_frequency_and_not_the_float32_one() -> None:
    rope = Rope(64, 5e5, "half")
    assert rope._phase_steps == tuple(fixed_point.phase_step(float(w)) for w in rope.inv_freq)
    assert rope._phase_steps[1] != fixed_point.phase_step(float(np.float32(rope.inv_freq[1])))


def printed_by(program: str) -> str:
    """Run a program in a fresh process and return its output."""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={**os.environ}, timeout=600
    )
    return ran.stdout


def test_first_use_in_a_fresh_process_under_fake_tensors() -> None:
    printed = printed_by(
        "import torch\n"
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "from ropewalk import Rope\n"
        "rope = Rope(8, 1e4, 'half')\n"
        "with FakeTensorMode():\n"
        "    rope.at(torch.arange(4))\n"
        "print(rope.at(torch.arange(4)).cos[1, 0].item())\n"
    )
    assert float(printed) == pytest.approx(math.cos(1), abs=ON_CPU)
