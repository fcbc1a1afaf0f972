"""Test the compiled module without torch and NumPy, against `fractions` and `math`.

    python module_alone.py _cpu.abi3.so

It needs only the standard library, so it also runs in an emulator and in a Python for which there is no torch.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from array import array
from fractions import Fraction
from types import ModuleType

TOKENS, HEADS, PAIRS = 5, 3, 21  # no multiple of a vector


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_cpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def address(numbers: array[int] | array[float]) -> int:
    return numbers.buffer_info()[0]


def check_angles(module: ModuleType) -> tuple[array[float], array[float]]:
    """Check angles. A step is a 64-bit fraction of a turn, so position · step modulo 2⁶⁴ is the exact angle."""
    positions = array("q", [0, 1, 77, 131_071, 2**40])
    steps = array("q", [(3**i * 2**20 + 12_345) % 2**63 for i in range(PAIRS)])
    cos, sin = (array("d", bytes(8 * TOKENS * PAIRS)) for _ in range(2))
    module.angles(address(positions), TOKENS, 0, 1, address(steps), PAIRS, 1.0, 1, address(cos), address(sin), 1)
    for row, position in enumerate(positions):
        for i, step in enumerate(steps):
            turn = Fraction(position * step % 2**64, 2**64)
            angle = 2 * math.pi * float(turn - round(turn))
            # float64 angles of half a turn at most, and polynomials that are good to 2⁻⁵².
            assert abs(cos[row * PAIRS + i] - math.cos(angle)) < 1e-15, (position, step)
            assert abs(sin[row * PAIRS + i] - math.sin(angle)) < 1e-15, (position, step)
    return cos, sin


def check_rotation(
    module: ModuleType, cos: array[float], sin: array[float], interleaved: bool, conjugate: bool
) -> None:
    """Check a rotation of float64 [tokens, heads, channels], with two products and a sum for each number."""
    size = TOKENS * HEADS * 2 * PAIRS
    x = array("d", [(7 * i % 11 - 5) / 4 for i in range(size)])
    y = array("d", bytes(8 * size))
    shape, strides = (1, TOKENS, HEADS, 2 * PAIRS), (size, HEADS * 2 * PAIRS, 2 * PAIRS, 1)
    tensors = (address(x), address(y), shape, strides, strides)
    table = (TOKENS, PAIRS), (PAIRS, 1), (PAIRS, 1)
    module.rotate(tensors, address(cos), address(sin), *table, 1, 1, (0, 1, 2, 4), interleaved, 0, conjugate, 1)
    for token in range(TOKENS):
        for head in range(HEADS):
            for i in range(PAIRS):
                first = (token * HEADS + head) * 2 * PAIRS
                at_a, at_b = (first + 2 * i, first + 2 * i + 1) if interleaved else (first + i, first + PAIRS + i)
                c, s = cos[token * PAIRS + i], sin[token * PAIRS + i] * (-1 if conjugate else 1)
                assert y[at_a] == x[at_a] * c - x[at_b] * s, (token, head, i)
                assert y[at_b] == x[at_a] * s + x[at_b] * c, (token, head, i)


def main(path: str) -> None:
    module = load(path)
    for level in module.levels():
        module.use_level(level)
        cos, sin = check_angles(module)
        for interleaved in (False, True):
            for conjugate in (False, True):
                check_rotation(module, cos, sin, interleaved, conjugate)
    print(f"right: {', '.join(module.levels())}")


if __name__ == "__main__":
    main(sys.argv[1])
