"""Test the frequencies of each method at each length against the papers."""

from __future__ import annotations

import math

import numpy as np
import pytest

import oracle
import ropewalk
from ropewalk.tools.lab import methods

BASE, DIM, TRAINED = 10_000.0, 32, 256
ROPE = ropewalk.Rope(head_dim=DIM, base=BASE, pairing="half")
NAMED = {method.name: method for method in methods.METHODS}
TUNED = {method.name: method for method in methods.TUNES}
LENGTHS = (128, 256, 257, 512, 1024, 2048)


def frequencies(name: str, n: int) -> list:
    """Compute the frequencies by the papers' formulas, in mpmath."""
    kind, dynamic = name.removesuffix(" dynamic"), name.endswith(" dynamic")
    factor = n / TRAINED if dynamic else 4.0
    if kind == "none" or (dynamic and n <= TRAINED):
        return oracle.inv_freq(BASE, DIM)
    return {
        "PI": lambda: oracle.linear(BASE, DIM, factor),
        "NTK": lambda: oracle.ntk(BASE, DIM, factor),
        "by parts": lambda: oracle.yarn(BASE, DIM, factor, TRAINED),
        "Llama 3": lambda: oracle.by_parts(BASE, DIM, factor, 1, 4, TRAINED),
        "YaRN": lambda: oracle.yarn(BASE, DIM, factor, TRAINED),
    }[kind]()


def attention_factor(name: str, n: int) -> float:
    if name == "YaRN":
        return 0.1 * math.log(4) + 1
    return 0.1 * math.log(n / TRAINED) + 1 if name == "YaRN dynamic" and n > TRAINED else 1.0


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", [name for name in NAMED if name != "Self-Extend"])
def test_frequencies(name, n):
    rope = NAMED[name].plan(ROPE, TRAINED, n)
    wanted = np.array([float(w) for w in frequencies(name, n)])
    # A few roundings of float64 on the way to each frequency.
    np.testing.assert_allclose(rope.inv_freq, wanted, rtol=1e-14)
    assert rope.attention_factor == pytest.approx(attention_factor(name, n), rel=1e-15)


@pytest.mark.parametrize("name", [*(name for name in NAMED if "dynamic" in name), "Self-Extend", "none"])
@pytest.mark.parametrize("n", [1, 128, 256])
def test_dynamic_methods_do_not_change_the_trained_range(name, n):
    assert NAMED[name].plan(ROPE, TRAINED, n) == ROPE


@pytest.mark.parametrize("n", [257, 300, 512, 1024, 2048])
def test_self_extend_has_the_smallest_group_without_an_untrained_distance(n):
    plan = NAMED["Self-Extend"].plan(ROPE, TRAINED, n)
    assert (plan.rope, plan.window) == (ROPE, 64)

    def farthest(group):
        """Return the largest distance by the paper. Beyond the window: floor(m/G) − floor(n/G) + w − floor(w/G)."""
        pairs = [(m, k) for m in range(n) for k in (0, max(0, m - 64), max(0, m - 65))]
        return max(m - k if m - k < 64 else m // group - k // group + 64 - 64 // group for m, k in pairs)

    assert farthest(plan.group) < TRAINED <= farthest(plan.group - 1)


def test_fine_tunes():
    assert list(TUNED) == ["none", "PI", "NTK", "YaRN", "larger base"]
    for name in ("none", "PI", "NTK", "YaRN"):
        assert TUNED[name] is NAMED[name]
    rope = TUNED["larger base"].plan(ROPE, TRAINED, 1024)
    wanted = [500_000.0 ** (-2 * i / DIM) for i in range(DIM // 2)]
    np.testing.assert_allclose(rope.inv_freq, wanted, rtol=1e-14)


def test_each_method_is_described():
    """The description states the factor, and all names differ."""
    assert len({method.name for method in (*methods.METHODS, *methods.TUNES)}) == 11
    for method in methods.METHODS:
        assert ("factor n / trained" in method.what) == (method.name in ("PI dynamic", "YaRN dynamic"))
        assert ("4" in method.what) == (method.name in ("PI", "NTK", "by parts", "Llama 3", "YaRN", "Self-Extend"))
