"""Convert a frequency to a phase step: the rotation of a pair per position, as an integer in units of 2⁻⁶⁴ turns.

    phase step = round(inv_freq / 2π · 2⁶⁴)
    phase = position · phase step          modulo 2⁶⁴, which is modulo one turn

The wraparound of a 64-bit product *is* the reduction modulo one turn, without any rounding. So
phase(m) − phase(n) = phase(m − n) bit for bit. The only error is the rounding of the phase step: half a unit per
position, or |p|·2π·2⁻⁶⁵ radians at position p.
"""

from __future__ import annotations

# floor(2²⁵⁶ / 2π), which is 1/2π to 254 significant bits. A float64 frequency has 53 bits and a phase step 64.
# tests/test_fixed_point.py compares it with mpmath.
_INVERSE_TWO_PI = 0x28BE60DB9391054A7F09D5F47D4D377036D8A5664F10E4107F9458EAF7AEF158


def phase_step(inv_freq: float) -> int:
    """Return the phase step of a frequency as a signed 64-bit integer.

    That is two's complement, the type that PyTorch multiplies.

    Args:
        inv_freq: radians per position, finite. Its float64 value is taken as exact.

    Returns:
        An integer in [−2⁶³, 2⁶³), congruent to round(inv_freq / 2π · 2⁶⁴) modulo 2⁶⁴.
    """
    numerator, denominator = inv_freq.as_integer_ratio()  # denominator is a power of two
    shift = 192 + denominator.bit_length() - 1
    wrapped = ((numerator * _INVERSE_TWO_PI + (1 << (shift - 1))) >> shift) % (1 << 64)
    return wrapped - (1 << 64) if wrapped >= 1 << 63 else wrapped
