"""Rope.tables: cos and sin in NumPy, compared with exact arithmetic and bitwise with rope.at."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

import oracle
from ropewalk import DynamicNTK, Llama3, Rope, RopeError, YaRN
from ropewalk.angles import exact as angles
from ropewalk.schemes import Linear, PerPair, Scheme

LIMIT = 2**31
EDGES = [0, 1, -1, 4095, 8191, 131_071, 1_048_575, LIMIT - 1, -LIMIT, 1 - LIMIT]
SCHEMES = [None, Linear(4), Llama3(8, 1, 4, 8192), YaRN(16, 4096)]


def places(count: int, seed: int) -> np.ndarray:
    """Return positions of every magnitude up to ±2³¹."""
    draw = np.random.default_rng(seed)
    size = np.exp2(draw.uniform(0, 31, count))
    return np.concatenate((EDGES, np.round(size * draw.choice([-1, 1], count)).clip(-LIMIT, LIMIT - 1))).astype(
        np.int64
    )


def same(x: np.ndarray, y: torch.Tensor) -> bool:
    """Return whether two arrays have the same bits. -0 differs from 0."""
    return x.shape == y.shape and bool((x.view(np.int64) == y.numpy().view(np.int64)).all())


@pytest.mark.parametrize("scaling", SCHEMES, ids=repr)
@pytest.mark.parametrize("base", [100.0, 5e5, 1e8])
def test_is_exact(base: float, scaling: Scheme | None) -> None:
    rope, positions = Rope(64, base, "half", scaling=scaling), places(60, seed=int(base))
    exact = oracle.cos_sin(positions.tolist(), rope.inv_freq)
    # The rounding of the step, half a unit per position, plus a few roundings of float64.
    allowed = (abs(positions)[:, None] * (2 * math.pi * 2.0**-65) + 4e-16) * rope.attention_factor
    for table, truth in zip(rope.tables(positions), exact, strict=True):
        assert table.dtype == np.float64
        assert (abs(table - truth * rope.attention_factor) <= allowed).all()


@pytest.mark.parametrize("scaling", SCHEMES, ids=repr)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 128), (80, 32), (6, 2), (512, 510)])
@pytest.mark.usefixtures("used")
def test_equals_the_kernel_bit_for_bit(head_dim: int, rotary_dim: int, scaling: Scheme | None) -> None:
    rope = Rope(head_dim, 5e5, "half", rotary_dim=rotary_dim, scaling=scaling)
    positions = np.concatenate((np.arange(-2000, 5000), places(5000, seed=head_dim)))
    rotation = rope.at(torch.from_numpy(positions), dtype=torch.float64)
    cos, sin = rope.tables(positions)
    assert same(cos, rotation.cos)
    assert same(sin, rotation.sin)


@pytest.mark.usefixtures("used")
def test_beyond_the_range_it_wraps_around_as_the_kernel_does() -> None:
    rope, positions = Rope(64, 1e4, "half"), np.array([2**63 - 1, -(2**63), 2**40 + 1])
    rotation = rope.at(torch.from_numpy(positions), dtype=torch.float64)
    for table, other in zip(rope.tables(positions), (rotation.cos, rotation.sin), strict=True):
        assert same(table, other)


@pytest.mark.parametrize("scaling", SCHEMES, ids=repr)
def test_the_reference_differs_in_the_last_bits_only(scaling: Scheme | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its angle, up to π, is rounded three times by up to 2⁻⁵³ of it (phase, unit, product): 1.05e-15.

    The rest is the rounding of the cosines and of their products with the factor: four times 1.1e-16.
    """
    monkeypatch.setattr(angles.backend, "kernel_for", lambda *tensors: None)
    rope, positions = Rope(128, 5e5, "half", scaling=scaling), places(5000, seed=3)
    rotation = rope.at(torch.from_numpy(positions), dtype=torch.float64)
    for table, other in zip(rope.tables(positions), (rotation.cos, rotation.sin), strict=True):
        assert abs(table - other.numpy()).max() <= 1.5e-15 * rope.attention_factor


def test_more_rows_than_fit_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    rope, positions = Rope(8, 1e4, "half"), np.arange(11)
    exact = oracle.cos_sin(positions.tolist(), rope.inv_freq)
    for most in (1, 4, 8, 12, 1 << 16):
        monkeypatch.setattr("ropewalk.angles.numpy._MAX_BLOCK", most)
        for table, truth in zip(rope.tables(positions), exact, strict=True):
            np.testing.assert_allclose(table, truth, rtol=0, atol=3e-16)


@pytest.mark.parametrize(
    "positions",
    [
        7,
        np.int32(7),
        np.array(7),
        [7],
        (7, -3),
        [],
        [[7, 8, 9], [0, 1, 2]],
        np.arange(24).reshape(2, 3, 4),
        np.arange(24).reshape(4, 6).T[::2],
        np.zeros((0, 3), np.int64),
        np.array([7], np.uint64),
        torch.arange(3),
    ],
)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint64, np.dtype(">i4"), None])
def test_shapes_and_kinds_of_integers(positions: Any, dtype: Any) -> None:
    if dtype is not None:
        positions = np.asarray(positions).clip(0).astype(dtype)
    rope, whole = Rope(8, 1e4, "half"), np.asarray(positions, dtype=np.int64)
    exact = oracle.cos_sin(whole.reshape(-1).tolist(), rope.inv_freq)
    for table, truth in zip(rope.tables(positions), exact, strict=True):
        assert table.shape == (*whole.shape, 4)
        np.testing.assert_allclose(table, truth.reshape(table.shape), rtol=0, atol=3e-16)


def test_are_new_arrays() -> None:
    rope = Rope(8, 1e4, "half")
    rope.tables(3)[0][:] = 7
    np.testing.assert_allclose(rope.tables(3)[0][0], math.cos(3), rtol=1e-15)


def test_frequencies_of_each_pair() -> None:
    rope = Rope(8, 1e4, "half", scaling=PerPair((1.0, 2.0, 4.0, 8.0)))
    exact = oracle.cos_sin([1_000_003], rope.inv_freq)
    for table, truth in zip(rope.tables([1_000_003]), exact, strict=True):
        np.testing.assert_allclose(table, truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (1.5, "positions must be integers: an int, a list of ints, or an array, got float64 of shape ()."),
        ([0.0, 1.0], "got float64 of shape (2,). For fractional positions use rope.at, or NumPy's cos and sin of"),
        (np.arange(3, dtype=np.float32), "got float32 of shape (3,)"),
        (True, "got bool of shape ()"),
        (np.ones((2, 3), bool), "got bool of shape (2, 3). Pass the position of each token"),
        ("3", "got <U1 of shape ()"),
        (None, "got object of shape ()"),
        ([0, None], "got object of shape (2,)"),
        ([[0, 1], [2]], "got [[0, 1], [2]]. Pass one int, or an array of ints."),
        (torch.arange(3, device="meta"), "got tensor(..., device='meta', size=(3,), dtype=torch.int64)"),
        (2**63, "positions must fit into int64, got larger positions"),
        ([2**70], "got object of shape (1,)"),
        (np.zeros((0,)), "got float64 of shape (0,)"),
        (np.array(["2026-01-01"], "datetime64[D]"), "got datetime64[D] of shape (1,)"),
        (np.array([1 + 0j]), "got complex128 of shape (1,)"),
    ],
)
def test_positions_that_are_not_integers_are_refused(positions: Any, message: str) -> None:
    with pytest.raises(RopeError, match=re.escape(message)) as raised:
        Rope(8, 1e4, "half").tables(positions)
    assert str(raised.value).startswith("Rope.tables: ")


def test_the_fix_for_fractional_positions_works() -> None:
    rope, positions = Rope(8, 1e4, "half", scaling=YaRN(4, 64)), np.array([0.5, 2.25])
    wanted = rope.at(torch.from_numpy(positions), dtype=torch.float64)
    for function, table in ((np.cos, wanted.cos), (np.sin, wanted.sin)):
        mine = function(positions[..., None] * rope.inv_freq) * rope.attention_factor
        np.testing.assert_allclose(mine, table, rtol=0, atol=1e-15)


def test_a_length_is_required() -> None:
    rope = Rope(8, 1e4, "half", scaling=DynamicNTK(2.0, 4096))
    with pytest.raises(RopeError, match="the length must be resolved"):
        rope.tables(3)
    assert rope.at_length(8192).tables(3)[0].shape == (4,)
