"""The rotation: every variant, compared with complex numbers in float64."""

from __future__ import annotations

import copy
import itertools
import operator
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import oracle
from each import each
from ropewalk import Rope, RopeError, Rotation, YaRN
from ropewalk.rotation.api import FIELDS

LAYOUTS = ["bshd", "bhsd", "sbhd", "thd"]
PAIRINGS = ["half", "interleaved"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BATCH, SEQ, HEADS, KV_HEADS = 2, 5, 4, 1


def shape(layout: str, heads: int, head_dim: int) -> tuple[int, ...]:
    size = {"b": BATCH, "s": SEQ, "t": SEQ, "h": heads, "d": head_dim}
    return tuple(size[axis] for axis in layout)


def expected(rope: Rope, x: torch.Tensor, positions: torch.Tensor, layout: str) -> np.ndarray:
    """Rotate x by exact angles; positions [seq] or [batch, seq]."""
    angles = oracle.reduced(positions.reshape(-1).tolist(), rope.inv_freq).reshape(*positions.shape, -1)
    letters = "".join("s" if axis == "t" else axis for axis in layout)
    order = [letters.index(axis) for axis in "bshd" if axis in letters]
    moved = x.double().numpy().transpose(order)  # [batch,] seq, heads, head_dim
    angles = angles[..., None, :]
    rotated = oracle.rotate(
        moved, np.broadcast_to(angles, moved.shape[:-1] + angles.shape[-1:]), rope.pairing, rope.rotary_offset,
        rope.attention_factor,
    )  # fmt: skip
    return rotated.transpose(np.argsort(order))


def rounding(dtype: torch.dtype) -> float:
    """Return the bound for one rounding of a float32 result of size up to 8, and the rounding of the tables."""
    return 8 * torch.finfo(dtype).eps / 2 + (2e-6 if dtype != torch.float64 else 3e-7)


ROPES = {
    "whole": {"head_dim": 16},
    "partial": {"head_dim": 16, "rotary_dim": 6},
    "slice": {"head_dim": 16, "rotary_dim": 6, "rotary_offset": 4},
    "last": {"head_dim": 16, "rotary_offset": 10},
    "scaled": {"head_dim": 16, "scaling": YaRN(16, 64)},
}


@pytest.mark.parametrize(
    ("layout", "batched"), [(layout, batched) for layout in LAYOUTS for batched in (False, True)][:-1]
)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_variant(layout: str, batched: bool, pairing: str, dtype: torch.dtype) -> None:
    each(((which, which) for which in ROPES), lambda which: check_variant(layout, batched, pairing, which, dtype))


def check_variant(layout: str, batched: bool, pairing: str, which: str, dtype: torch.dtype) -> None:
    rope = Rope(base=1e4, pairing=pairing, **ROPES[which])
    positions = torch.tensor([[3, 0, 7, 100_000, -2], [1, 1, 2, 3, 131_071]])
    positions = positions if batched else positions[0]
    q = torch.randn(shape(layout, HEADS, 16)).to(dtype)
    k = torch.randn(shape(layout, KV_HEADS, 16)).to(dtype)
    before = q.clone(), k.clone()
    rotated = rope.at(positions)(q, k, layout=layout)
    for x, y in zip((q, k), rotated, strict=True):
        assert y.dtype == dtype
        assert y.shape == x.shape
        np.testing.assert_allclose(y.double(), expected(rope, x, positions, layout), rtol=0, atol=rounding(dtype))
        start, end = rope.rotary_offset, rope.rotary_offset + rope.rotary_dim
        assert torch.equal(y[..., :start], x[..., :start])
        assert torch.equal(y[..., end:], x[..., end:])
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


def test_one_rounding_only() -> None:
    """For bfloat16, the result is the float32 result, rounded once."""
    rope, positions = Rope(64, 1e4, "half"), torch.arange(50)
    q = torch.randn(50, 3, 64).bfloat16()
    rotation = rope.at(positions)
    assert torch.equal(rotation(q, layout="thd"), rotation(q.float(), layout="thd").bfloat16())


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_float64_tensors_use_float64_tables_to_the_full(pairing: str) -> None:
    rope, positions = Rope(64, 1e4, pairing), torch.arange(50)
    q = torch.randn(50, 3, 64, dtype=torch.float64)
    y = rope.at(positions, dtype=torch.float64)(q, layout="thd")
    np.testing.assert_allclose(y, expected(rope, q, positions, "thd"), rtol=0, atol=1e-14)


@pytest.mark.parametrize("size", [(0, SEQ, 2, 8), (BATCH, SEQ, 0, 8)])
def test_empty(size: tuple[int, ...]) -> None:
    assert Rope(8, 1e4, "half").at(torch.arange(SEQ))(torch.empty(size), layout="bshd").shape == size
    assert Rope(8, 1e4, "half").at(torch.arange(0))(torch.empty(1, 0, 2, 8), layout="bshd").numel() == 0


@pytest.mark.parametrize("in_place", [False, True])
def test_q_and_k_that_cannot_share_a_call(in_place: bool) -> None:
    """q and k differ in dtype, or in the batch size, which tables [seq] do not determine."""
    rope, positions = Rope(16, 1e4, "half"), torch.arange(SEQ)
    q = torch.randn(shape("bshd", HEADS, 16))
    for k in (torch.randn(shape("bshd", KV_HEADS, 16)).double(), torch.randn(BATCH + 1, SEQ, KV_HEADS, 16)):
        tensors = q.clone(), k.clone()
        rotation = rope.at(positions)
        rotated = tensors if in_place else rotation(*tensors, layout="bshd")
        if in_place:
            rotation.apply_(*tensors, layout="bshd")
        for x, y in zip((q, k), rotated, strict=True):
            assert y.dtype == x.dtype
            np.testing.assert_allclose(y.double(), expected(rope, x, positions, "bshd"), rtol=0, atol=rounding(q.dtype))


def test_in_place_changes_nothing_when_k_does_not_fit() -> None:
    rotation = Rope(8, 1e4, "half").at(torch.arange(SEQ))
    q = torch.randn(1, SEQ, 2, 8)
    before = q.clone()
    with pytest.raises(RopeError, match="k in layout 'bshd' must have 5 tokens"):
        rotation.apply_(q, torch.randn(1, SEQ + 1, 2, 8), layout="bshd")
    assert torch.equal(q, before)


def random_view(draw: random.Random, axes: int, steps: list[int]) -> torch.Tensor:
    """Return a view of random sizes and strides, often nested ones, with 4 channels at the end."""
    sizes = [draw.randint(1, 4) for _ in range(axes - 1)] + [4]
    strides, reach = [], 0
    for size in sizes:
        strides.append(reach + draw.choice(steps) if draw.random() < 0.6 else draw.randint(0, 14))
        reach += (size - 1) * strides[-1]
    order = draw.sample(range(axes - 1), axes - 1)
    sizes, strides = ([x[i] for i in order] + x[-1:] for x in (sizes, strides))
    return torch.randn(reach + 4).as_strided(sizes, strides, 3)


def test_in_place_refuses_memory_that_overlaps_and_no_other() -> None:
    """Random views. Whether elements share memory follows from all their addresses."""
    draw, rope, found = random.Random(0), Rope(4, 1e4, "half"), [0, 0]
    for _ in range(1500):
        x = random_view(draw, 4, [1, 1, 2, 5])
        at = [sum(map(operator.mul, i, x.stride())) for i in itertools.product(*map(range, x.shape))]
        shares, rotation = len(set(at)) < len(at), rope.at(torch.arange(x.shape[1]))
        wanted = expected(rope, x, torch.arange(x.shape[1]), "bshd")
        found[shares] += 1
        if shares:
            with pytest.raises(RopeError, match="each element must have memory of its own"):
                rotation.apply_(x, layout="bshd")
        else:
            rotation.apply_(x, layout="bshd")
            np.testing.assert_allclose(x, wanted, rtol=0, atol=2e-6)
    assert min(found) > 300
    # Too many elements to compare their addresses, but their strides are nested; and some that are not.
    large = torch.zeros(2**21 + 2**19)
    rope.at(torch.arange(2**19)).apply_(large.as_strided((1, 2**19, 1, 4), (1, 5, 1, 1)), layout="bshd")
    with pytest.raises(RopeError, match="each element must have memory of its own"):
        rope.at(torch.arange(2**19)).apply_(large.as_strided((1, 2**19, 1, 4), (1, 3, 1, 1)), layout="bshd")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_only_dense_tensors() -> None:
    rotation = Rope(8, 1e4, "half").at(torch.arange(SEQ))
    q = torch.randn(1, SEQ, 2, 8)
    for x, kind in ((q.to_sparse(), "torch.sparse_coo"), (torch.nested.nested_tensor([q[0]]), "a nested tensor")):
        with pytest.raises(RopeError, match=f"q must be a dense tensor, got {kind}"):
            rotation(x, layout="bshd")


class TestInverse:
    @pytest.mark.parametrize("factor", [None, 0.5])
    @pytest.mark.parametrize("pairing", PAIRINGS)
    def test_undoes(self, pairing: str, factor: float | None) -> None:
        rope = Rope(64, 1e4, pairing, scaling=YaRN(16, 64, attention_factor=factor))
        q, rotation = torch.randn(50, 2, 64), rope.at(torch.arange(50) * 1000)
        back = rotation.inverse()(rotation(q, layout="thd"), layout="thd")
        torch.testing.assert_close(back, q, rtol=0, atol=1.5e-6)

    def test_of_the_inverse_is_the_rotation(self) -> None:
        rotation = Rope(64, 1e4, "half", scaling=YaRN(16, 64)).at(torch.arange(50))
        twice = rotation.inverse().inverse()
        torch.testing.assert_close(twice.cos, rotation.cos)
        torch.testing.assert_close(twice.sin, rotation.sin)
        assert twice.attention_factor == pytest.approx(rotation.attention_factor)

    def test_is_exactly_the_opposite_positions_without_a_factor(self) -> None:
        rope = Rope(64, 1e4, "half")
        inverse, opposite = rope.at(torch.arange(50)).inverse(), rope.at(-torch.arange(50))
        assert torch.equal(inverse.cos, opposite.cos)
        assert torch.equal(inverse.sin, opposite.sin)


class TestRows:
    rope = Rope(8, 1e4, "half", scaling=YaRN(4, 64))
    table = rope.at(torch.arange(100))

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize("size", [(7,), (2, 7), (0,)])
    def test_are_the_positions(self, dtype: torch.dtype, size: tuple[int, ...]) -> None:
        rows = torch.randint(0, 100, size, dtype=dtype)
        picked, made = self.table[rows], self.rope.at(rows)
        assert torch.equal(picked.cos, made.cos)
        assert torch.equal(picked.sin, made.sin)
        assert picked.attention_factor == made.attention_factor

    def test_slice(self) -> None:
        assert torch.equal(self.table[3:9].cos, self.rope.at(torch.arange(3, 9)).cos)

    @pytest.mark.parametrize("row", [-1, 100])
    def test_outside_the_table(self, row: int) -> None:
        with pytest.raises(RopeError, match="every row must be from 0 to 99"):
            self.table[torch.tensor([0, row])]

    @pytest.mark.parametrize(
        "rows", [3, [1, 2], torch.tensor(3), torch.tensor([1.0]), torch.tensor([True]), torch.zeros(1, 1, 1).long()]
    )
    def test_must_be_integers_of_one_or_two_axes(self, rows: Any) -> None:
        with pytest.raises(RopeError, match=r"Rotation\[rows\]: rows must be an int32 or int64 tensor"):
            self.table[rows]

    def test_come_from_a_table(self) -> None:
        with pytest.raises(RopeError, match=r"the table must be one for positions \[seq\]"):
            self.rope.at(torch.zeros(2, 3, dtype=torch.int64))[torch.tensor([0])]


class TestValue:
    """A Rotation is an immutable value and a pytree that can be copied and moved."""

    rotation = Rope(8, 1e4, "interleaved", rotary_dim=6, rotary_offset=2, scaling=YaRN(4, 64)).at(torch.arange(3))

    def check_twin(self, twin: Rotation) -> None:
        assert type(twin) is Rotation
        for name in FIELDS:
            mine, theirs = getattr(self.rotation, name), getattr(twin, name)
            assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs

    def test_immutable(self) -> None:
        with pytest.raises(AttributeError, match="Rotation is immutable"):
            self.rotation.cos = torch.zeros(3, 3)
        with pytest.raises(AttributeError):
            del self.rotation.cos
        with pytest.raises(AttributeError):
            self.rotation.other = 1  # type: ignore[attr-defined]

    def test_pickle_and_copy(self) -> None:
        for twin in (pickle.loads(pickle.dumps(self.rotation)), copy.copy(self.rotation), copy.deepcopy(self.rotation)):
            self.check_twin(twin)

    def test_pytree(self) -> None:
        leaves, tree = pytree.tree_flatten_with_path(self.rotation)
        assert [pytree.keystr(path) for path, _ in leaves] == [".cos", ".sin"]
        self.check_twin(pytree.tree_unflatten([leaf for _, leaf in leaves], tree))
        self.check_twin(pytree.tree_map(torch.clone, self.rotation))
        assert pytree.treespec_loads(pytree.treespec_dumps(tree)) == tree

    def test_to_moves_and_never_casts(self) -> None:
        moved = self.rotation.to("meta")
        assert moved.cos.is_meta
        assert moved.sin.is_meta
        self.check_twin(self.rotation.to("cpu"))
        for dtype in (torch.bfloat16, torch.float64):
            with pytest.raises(RopeError, match=r"Rotation\.to: only the device can be changed"):
                self.rotation.to(dtype)  # type: ignore[arg-type]

    def test_is_loaded_without_trusting_the_file(self, tmp_path: Path) -> None:
        torch.save(self.rotation, tmp_path / "rotation.pt")
        self.check_twin(torch.load(tmp_path / "rotation.pt", weights_only=True))

    def test_repr(self) -> None:
        assert repr(Rope(8, 1e4, "half").at(torch.arange(3))) == (
            "Rotation(tokens=(3,), pairs=4, pairing='half', dtype=torch.float32, device='cpu')"
        )
        assert "head_dim=8, rotary_offset=2, attention_factor=1.13" in repr(self.rotation)
        assert repr(pytree.tree_map(lambda _: None, self.rotation)) == "Rotation(cos=None, sin=None)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cos": [1.0]}, "cos and sin must be tensors, got [1.0]"),
        ({"sin": None}, "cos and sin must be tensors, got None"),
        ({"cos": torch.ones(3, 4).bfloat16()}, "cos and sin must both be float32 or float64, got torch.bfloat16 and"),
        ({"sin": torch.ones(3, 4).half()}, "mixed precision of FSDP or DeepSpeed"),
        ({"sin": torch.ones(3, 4).double()}, "must both be float32 or float64"),
        ({"cos": torch.ones(3, 8)}, "must have the same shape [seq, pairs]"),
        ({"cos": torch.ones(()), "sin": torch.ones(())}, "must have the same shape"),
        ({"cos": torch.ones(1, 1, 3, 4), "sin": torch.ones(1, 1, 3, 4)}, "must have the same shape"),
        ({"cos": torch.ones(3, 0), "sin": torch.ones(3, 0)}, "must have the same shape"),
        ({"cos": torch.ones(3, 4, device="meta")}, "cos and sin must be on the same device, got meta and cpu"),
        ({"pairing": "neox"}, "pairing must be one of 'half', 'interleaved', got 'neox'"),
        ({"head_dim": 6}, "head_dim must be an integer from 8 to 65536, got 6"),
        ({"head_dim": 10, "rotary_offset": 4}, "head_dim must be an integer from 12 to 65536, got 10"),
        ({"head_dim": 8.0}, "head_dim must be an integer"),
        ({"rotary_offset": -2}, "rotary_offset must be an integer from 0 to 65536, got -2"),
        ({"rotary_offset": "2"}, "rotary_offset must be an integer"),
        ({"head_dim": 10**5000}, "head_dim must be an integer from 8 to 65536, got <an integer of 16610 bits>"),
        ({"attention_factor": 0}, "attention_factor must be a finite number of at least 1.0842e-19 and at most 9.2"),
        ({"attention_factor": 1e300}, "attention_factor must be a finite number"),
        ({"attention_factor": 1e-300}, "attention_factor must be a finite number"),
        ({"attention_factor": float("nan")}, "attention_factor must be a finite number"),
    ],
)
def test_tables_of_the_user_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeError) as raised:
        Rotation(**{"cos": torch.ones(3, 4), "sin": torch.zeros(3, 4), "pairing": "half", **changes})
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("q", "layout", "message"),
    [
        (torch.randn(2, 5, 3, 8), "bsdh", "layout must be one of 'bshd', 'bhsd', 'sbhd', 'thd', got 'bsdh'"),
        (torch.randn(2, 5, 3, 8), None, "layout must be one of"),
        (torch.randn(5, 3, 8), "bshd", "q in layout 'bshd' must have 4 axes, got shape (5, 3, 8)"),
        (torch.randn(2, 5, 3, 8), "thd", "q in layout 'thd' must have 3 axes"),
        (torch.randn(2, 5, 3, 16), "bshd", "q must have head_dim=8 as its last axis, got shape (2, 5, 3, 16)"),
        (torch.randn(2, 3, 5, 8), "bshd", "q in layout 'bshd' must have 5 tokens, one for each position, got 3"),
        (torch.randn(2, 5, 3, 8), "bhsd", "must have 5 tokens, one for each position, got 3"),
        (torch.randn(2, 1, 3, 8), "bshd", "must have 5 tokens, one for each position, got 1"),
        (torch.ones(2, 5, 3, 8, dtype=torch.int64), "bshd", "q must be float16, bfloat16, float32 or float64"),
        (torch.ones(2, 5, 3, 8, dtype=torch.complex64), "bshd", "got torch.complex64"),
        (np.ones((2, 5, 3, 8)), "bshd", "q must be a tensor"),
        (torch.empty(2, 5, 3, 8, device="meta"), "bshd", "q must be on cpu, where cos and sin are, got meta"),
    ],
)
def test_tensors_that_do_not_fit(q: Any, layout: Any, message: str) -> None:
    with pytest.raises(RopeError) as raised:
        Rope(8, 1e4, "half").at(torch.arange(5))(q, layout=layout)
    assert str(raised.value).startswith("Rotation: ")
    assert message in str(raised.value)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_batch_of_the_positions(layout: str) -> None:
    rotation = Rope(8, 1e4, "half").at(torch.zeros(3, SEQ, dtype=torch.int64))
    with pytest.raises(RopeError, match="must have batch size 3, as the positions have, got 2"):
        rotation(torch.randn(shape(layout, HEADS, 8)), layout=layout)


def test_thd_requires_positions_without_batch() -> None:
    rotation = Rope(8, 1e4, "half").at(torch.zeros(1, SEQ, dtype=torch.int64))
    with pytest.raises(RopeError, match="layout 'thd' has no batch axis"):
        rotation(torch.randn(SEQ, 2, 8), layout="thd")


def test_one_angle_for_all_tokens() -> None:
    rope = Rope(8, 1e4, "half")
    for layout in LAYOUTS:
        q = torch.randn(shape(layout, HEADS, 8))
        everywhere = rope.at(torch.full((SEQ,), 42))(q, layout=layout)
        assert torch.equal(rope.shift(42)(q, layout=layout), everywhere)


def test_autocast_changes_nothing() -> None:
    rotation, q = Rope(8, 1e4, "half").at(torch.arange(SEQ)), torch.randn(1, SEQ, 2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = rotation(q, layout="bshd")
    assert inside.dtype == torch.float32
    assert torch.equal(inside, rotation(q, layout="bshd"))
