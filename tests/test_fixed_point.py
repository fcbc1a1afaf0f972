"""Steps: frequencies as 64-bit fractions of a turn."""

from __future__ import annotations

import math

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
from ropewalk.angles import fixed_point
from ropewalk.angles.fixed_point import phase_step


def exact_step(inv_freq: float) -> int:
    with mpmath.workdps(80):
        turns = int(mpmath.nint(mpmath.mpf(inv_freq) / (2 * mpmath.pi) * mpmath.mpf(2) ** 64)) % 2**64
    return turns - 2**64 if turns >= 2**63 else turns


def test_constant_is_one_over_two_pi() -> None:
    with mpmath.workprec(400):
        assert int(mpmath.floor(mpmath.mpf(2) ** 256 / (2 * mpmath.pi))) == fixed_point._INVERSE_TWO_PI


@pytest.mark.parametrize("base", [100.0, 1e4, 5e5, 1e6, 1e8])
@pytest.mark.parametrize("rotary_dim", [2, 64, 128, 256])
def test_steps_of_real_frequencies(base: float, rotary_dim: int) -> None:
    for w in oracle.inv_freq(base, rotary_dim):
        assert phase_step(float(w)) == exact_step(float(w))


@given(st.floats(min_value=1e-12, max_value=1e3))
def test_any_frequency(inv_freq: float) -> None:
    assert phase_step(inv_freq) == exact_step(inv_freq)


def test_a_pair_with_frequency_0_does_not_rotate() -> None:
    assert phase_step(0.0) == 0


def test_whole_turns_vanish() -> None:
    assert abs(phase_step(2 * math.pi)) < 2**12  # float64(2π) is off by 2.4e-16, 720 units of 2⁻⁶⁴ turns
    assert phase_step(math.pi) % 2**64 == pytest.approx(2**63, abs=2**12)
