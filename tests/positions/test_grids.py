"""Grids, axes and batches, compared with plain Python loops."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from ropewalk import RopeError
from ropewalk.positions import augment, axis, crop, grid, mesh, padded, with_unrotated

sizes = st.integers(1, 4)


@given(sizes, sizes, st.none() | sizes, st.integers(1, 3), st.data())
def test_grid(rows: int, columns: int, frames: int | None, merge: int, data: st.DataObject) -> None:
    order = data.draw(st.text("hw0" if frames is None else "thw0", min_size=1, max_size=4))
    start = data.draw(st.integers(-9, 9) | st.lists(st.integers(-9, 9), min_size=len(order), max_size=len(order)))
    begin = [start] * len(order) if isinstance(start, int) else start
    made = grid(rows * merge, columns * merge, frames, order=order, merge=merge, start=start)
    tokens = [
        {"t": t, "h": r * merge + y, "w": c * merge + x, "0": 0}
        for t, r, c, y, x in product(range(frames or 1), range(rows), range(columns), range(merge), range(merge))
    ]
    assert made.dtype == torch.int64
    assert made.tolist() == [[token[a] + b for token in tokens] for a, b in zip(order, begin, strict=True)]


def test_order_of_the_axes() -> None:
    assert torch.equal(grid(2, 3), grid(2, 3, order="hw"))
    assert torch.equal(grid(2, 3, 4), grid(2, 3, 4, order="thw"))


@given(
    st.integers(1, 40),
    st.floats(-1e4, 1e4),
    st.floats(-1e4, 1e4),
    st.sampled_from(["starts", "centres", "ends"]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_axis(n: int, low: float, high: float, at: Any, dtype: torch.dtype) -> None:
    made = axis(n, low, high, at=at, dtype=dtype)
    assert made.dtype == dtype
    first = {"starts": Fraction(0), "centres": Fraction(1, 2), "ends": Fraction(0)}[at]
    cells = max(n - 1, 1) if at == "ends" else n
    exact = [Fraction(low) + (first + i) / cells * (Fraction(high) - Fraction(low)) for i in range(n)]
    # Two products, a sum and a division in float64, and the rounding to dtype; each half a unit in the last place.
    size = max(abs(low), abs(high))
    unit = size * 2.0**-53 * 4 + 2.0**-1072 + (2.0**-24 * size + 2.0**-150 if dtype == torch.float32 else 0)
    assert all(abs(Fraction(ours) - wanted) <= unit for ours, wanted in zip(made.tolist(), exact, strict=True))


def test_axis_is_rounded_once() -> None:
    thirds = axis(3, 0, 1, at="starts")
    assert thirds.tolist() == [torch.tensor(i / 3).item() for i in range(3)]
    assert axis(3).tolist()[1] == 0.0
    assert axis(7).flip(0).tolist() == (-axis(7)).tolist()


@given(st.lists(st.lists(st.integers(-5, 5), min_size=1, max_size=3), min_size=1, max_size=4))
def test_mesh(axes: list[list[int]]) -> None:
    made = mesh(*(torch.tensor(one) for one in axes))
    assert made.tolist() == [list(one) for one in zip(*product(*axes), strict=True)]


def test_mesh_of_mixed_dtypes_in_merge_order() -> None:
    made = mesh(torch.tensor([5]), torch.tensor([0.5, 1.5]), torch.tensor([0, 1, 2, 3], dtype=torch.int32), merge=2)
    assert made.dtype == torch.float32
    assert made.tolist() == [[5.0] * 8, [0.5, 0.5, 1.5, 1.5] * 2, [0, 1, 0, 1, 2, 3, 2, 3]]


def test_crop() -> None:
    assert crop(30, 45, 30, 45) == ((0, 0), (30, 45))
    assert crop(60, 20, 30, 45) == ((0, 18), (30, 28))  # (45 - 10) / 2 = 17.5, to even
    assert crop(10, 60, 30, 45) == ((11, 0), (19, 45))  # 7.5, to even: 8; (30 - 8) / 2


def test_with_unrotated() -> None:
    moving = torch.tensor([[1.5, 2.5], [3.5, 4.5]])
    assert with_unrotated(moving, before=2, after=1).tolist() == [[0, 0, 1.5, 2.5, 0], [0, 0, 3.5, 4.5, 0]]
    assert torch.equal(with_unrotated(moving), moving)
    assert with_unrotated(torch.ones(2, 5, 3, dtype=torch.int64), after=1).shape == (2, 5, 4)


def test_padded() -> None:
    one, two = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[7], [8]])
    assert padded([one, two], "left").tolist() == [[[1, 2, 3], [0, 0, 7]], [[4, 5, 6], [0, 0, 8]]]
    assert padded([one, two], "right", length=4).tolist() == [
        [[1, 2, 3, 0], [7, 0, 0, 0]],
        [[4, 5, 6, 0], [8, 0, 0, 0]],
    ]
    assert padded([one[0], two[0]], "right").tolist() == [[1, 2, 3], [7, 0, 0]]


def test_augment_draws_once_for_all_tokens() -> None:
    coordinates = mesh(axis(2, dtype=torch.float64), axis(4, dtype=torch.float64))  # none of them is 0
    seen = set()
    for seed in range(200):
        moved = augment(coordinates, seed, shift=0.25) - coordinates
        assert (moved - moved[:, :1]).abs().max() < 1e-15
        assert moved.abs().max() <= 0.25
        factors = augment(coordinates, seed, jitter=2.0) / coordinates
        assert (factors - factors[:, :1]).abs().max() < 1e-15
        assert factors.min() >= 0.5
        assert factors.max() <= 2.0
        shared = augment(coordinates, seed, rescale=2.0) / coordinates
        assert (shared - shared[0, 0]).abs().max() < 1e-15
        seen |= {round(float(moved[0, 0]), 9), round(float(moved[1, 0]), 9)}
    assert len(seen) == 400


def test_augment_of_a_batch_and_without_steps() -> None:
    coordinates = mesh(axis(3), axis(4))
    batch = torch.stack([coordinates, coordinates], dim=1)
    moved = augment(batch, 3, shift=0.5, jitter=1.5, rescale=2.0)
    assert torch.equal(moved[:, 1], augment(coordinates, 3, shift=0.5, jitter=1.5, rescale=2.0))
    same = augment(coordinates, 3)
    assert torch.equal(same, coordinates)
    assert same.data_ptr() != coordinates.data_ptr()


def test_grid_compiles_to_one_graph_for_all_sizes() -> None:
    counter = CompileCounter()

    def of(image: torch.Tensor) -> torch.Tensor:
        h, w = image.shape
        return mesh(axis(h), axis(w)) + with_unrotated(grid(h, w, start=(h // 2 - h, -1)))

    compiled = torch.compile(of, fullgraph=True, dynamic=True, backend=counter)
    for h, w in ((4, 6), (8, 10), (12, 6)):
        image = torch.empty(h, w)
        assert torch.equal(compiled(image), of(image))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grid(0, 3), "positions.grid: height must be an integer of at least 1, got 0"),
        (lambda: grid(3, 2.0), "width must be an integer of at least 1, got 2.0"),
        (lambda: grid(3, 2, 0), "frames must be an integer of at least 1, got 0"),
        (lambda: grid(2, 3, order="thw"), "order must be a string of the letters 'hw0', got 'thw'. Pass frames for"),
        (lambda: grid(2, 3, 4, order="xy"), "order must be a string of the letters 'thw0', got 'xy'. Use w for x"),
        (lambda: grid(2, 3, order="0xy"), "got '0xy'. Use w for x (the column) and h for y (the row): '0wh'."),
        (lambda: grid(2, 3, order="hv"), "got 'hv'. Pass frames for an axis t."),
        (lambda: grid(2, 3, order=""), "got ''"),
        (
            lambda: grid(2, 3, start=(1, 2, 3)),
            "start must be an integer, or one integer for each axis of 'hw', got (1, 2, 3)",
        ),
        (lambda: grid(2, 3, start=0.5), "got 0.5. Pass 2 integers."),
        (lambda: grid(2, 3, start=(0, 0.5)), "start must be an integer from"),
        (lambda: grid(2, 3, start="ab"), "got 'ab'"),
        (lambda: grid(2, 3, merge=2), "merge must divide height and width, which are (2, 3), got 2"),
        (lambda: grid(2, 4, merge=0), "merge must be an integer of at least 1, got 0"),
        (lambda: axis(0), "positions.axis: n must be an integer of at least 1, got 0"),
        (lambda: axis(3, float("inf")), "low must be a finite number, got inf"),
        (lambda: axis(3, 0, "1"), "high must be a finite number, got '1'"),
        (lambda: axis(3, at="centers"), "at must be one of 'starts', 'centres', 'ends', got 'centers'"),
        (lambda: axis(3, dtype=torch.bfloat16), "dtype must be torch.float32 or torch.float64, got torch.bfloat16"),
        (lambda: mesh(), "positions.mesh: axes must not be empty, got none"),
        (lambda: mesh([0, 1]), "each axis must be a tensor [n] of numbers, got [0, 1]"),
        (lambda: mesh(torch.zeros(2, 2)), "got torch.float32 of shape (2, 2)"),
        (lambda: mesh(torch.zeros(2).bool()), "got torch.bool of shape (2,)"),
        (lambda: mesh(torch.zeros(2), merge=2), "merge must divide height and width, which are (2,), got 2"),
        (lambda: crop(0, 1, 2, 3), "positions.crop: height must be an integer of at least 1, got 0"),
        (lambda: crop(10**400, 1, 2, 3), "positions.crop: height must be a number of tokens, got more than 2**53"),
        (lambda: grid(2**63, 1), "positions.grid: height must be a number of tokens, got more than 2**53"),
        (lambda: with_unrotated(torch.ones(2), before=2**63 - 1), "before must be a number of tokens, got more than 2"),
        (lambda: crop(1, 1, 2, 3.0), "base_width must be an integer of at least 1, got 3.0"),
        (lambda: with_unrotated([1]), "positions.with_unrotated: positions must be a tensor [..., tokens], got [1]"),
        (lambda: with_unrotated(torch.tensor(1)), "got torch.int64 of shape ()"),
        (lambda: with_unrotated(torch.ones(2), before=-1), "before must be an integer of at least 0, got -1"),
        (lambda: with_unrotated(torch.ones(2), after=True), "after must be an integer of at least 0, got True"),
        (lambda: padded([], "left"), "positions.padded: rows must be a non-empty list of tensors, got []"),
        (lambda: padded(torch.ones(2, 2), "left"), "rows must be a non-empty list of tensors"),
        (lambda: padded([torch.ones(2)], "both"), "side must be one of 'left', 'right', got 'both'"),
        (lambda: padded([torch.ones(1, 1, 2)], "left"), "each row must be a tensor [axes, seq] or [seq]"),
        (
            lambda: padded([torch.ones(3, 2), torch.ones(2, 2)], "left"),
            "all rows must match the first, torch.float32 of shape (3, 2)",
        ),
        (lambda: padded([torch.ones(2), torch.ones(2).long()], "left"), "got torch.int64 of shape (2,)"),
        (lambda: padded([torch.ones(2)], "left", length=1), "length must be an integer of at least 2, got 1"),
        (lambda: augment(grid(2, 2), 0), "positions.augment: coordinates must be float32 or float64 [axes, tokens]"),
        (lambda: augment(torch.ones(2), 0), "got torch.float32 of shape (2,)"),
        (lambda: augment(torch.ones(2, 2), None), "generator must be an integer of at least 0, got None"),
        (lambda: augment(torch.ones(2, 2), -1), "Pass a torch.Generator, or an integer as its seed."),
        (lambda: augment(torch.ones(2, 2), 0, shift=-0.1), "shift must be a finite number of at least 0, got -0.1"),
        (lambda: augment(torch.ones(2, 2), 0, jitter=0.5), "jitter must be a finite number of at least 1, got 0.5"),
        (lambda: augment(torch.ones(2, 2), 0, rescale=0), "rescale must be a finite number of at least 1, got 0"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises(RopeError) as raised:
        call()
    assert message in str(raised.value)
