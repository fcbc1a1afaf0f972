"""The fast path in compiled code: correct results where it applies, and fallback to Python where it must not apply."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from kernel_cases import DTYPES, LAYOUTS, PAIRINGS, bits, by_reference, check, expected, same, shape, unchanged
from ropewalk import Axes, Rope, Rotation
from ropewalk.kernels import backend, cpu
from unusual import OBSERVERS, TENSORS, Subclass, inference

pytestmark = pytest.mark.skipif(not backend.FAST_PATH, reason="no kernels, or not to be used")

BATCH, SEQ, HEADS, KV_HEADS, HEAD_DIM = 2, 5, 3, 1, 24
AXES = Axes.interleaved((4, 2, 2))
SEVERAL = Rope(16, 1e4, "half", axes=AXES)


def tables(*axes: int, dtype: torch.dtype = torch.float32, pairs: int = 8) -> tuple[Tensor, Tensor]:
    angle = torch.randn(*axes, pairs, dtype=torch.float64)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def call(q: Any, k: Any, cos: Any, sin: Any, layout: Any = "bshd", **how: Any) -> Any:
    given = {"head_dim": HEAD_DIM, "rotary_dim": 16, "interleaved": False, "offset": 4, "per_head": False} | how
    in_place = given.pop("in_place", False)
    return cpu.rotate_plain(q, k, cos, sin, layout, *given.values(), in_place)


@pytest.mark.parametrize("with_k", [True, False])
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_by_the_oracle(dtype: torch.dtype, layout: str, pairing: str, with_k: bool, level: str, poisoned: None) -> None:
    shared, of_heads = ((), (SEQ,), (1, SEQ), (BATCH, SEQ)), ((HEADS, SEQ), (1, HEADS, SEQ), (BATCH, HEADS, SEQ))
    for axes, table, strided in itertools.product((*shared, *of_heads), (torch.float32, torch.float64), (0, 7)):
        per_head = axes in of_heads
        if layout == "thd" and len(axes) - per_head == 2:
            continue
        cos, sin = tables(*axes, dtype=table)
        x = [
            torch.randn(*shape(layout, BATCH, SEQ, heads, HEAD_DIM + strided)).to(dtype)[..., :HEAD_DIM]
            for heads in (HEADS, HEADS if per_head else KV_HEADS)
        ][: 1 + with_k]
        before = [t.clone() for t in x]
        how: dict[str, Any] = {"interleaved": pairing == "interleaved", "per_head": per_head}
        made = call(x[0], x[1] if with_k else None, cos, sin, layout, **how)
        new = list(made) if with_k else [made]
        whole = (cos[None], sin[None]) if per_head and len(axes) == 2 else (cos, sin)
        plain = by_reference(x, *whole, layout, pairing, 4, False)
        flushed = level == "avx512_bf16" and dtype == torch.bfloat16
        for t, y, other, old in zip(x, new, plain, before, strict=True):
            assert (y.dtype, y.shape, y.stride()) == (dtype, t.shape, torch.empty_like(t).stride())
            check(y, *expected(t, *whole, layout, pairing, 4, False), layout, (axes, table), flushed)
            assert same(y, other, level)
            assert unchanged(t, old)
        versions = [t._version for t in x]
        assert call(x[0], x[1] if with_k else None, cos, sin, layout, in_place=True, **how) is True
        assert all(torch.equal(bits(t), bits(y)) for t, y in zip(x, new, strict=True))
        assert [t._version for t in x] == [v + 1 for v in versions]


def usual() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.randn(BATCH, SEQ, HEADS, HEAD_DIM), torch.randn(BATCH, SEQ, KV_HEADS, HEAD_DIM), *tables(SEQ)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("case", TENSORS)
def test_uncommon_tensors_are_left_to_python(case: str, in_place: bool) -> None:
    which, change = TENSORS[case]
    given = dict(zip(("q", "k", "cos", "sin"), usual(), strict=True))
    assert call(*given.values(), in_place=in_place) is not None
    other = {**given, which: change(given[which])}
    if case == "tables of two shapes":
        other["sin"] = given["sin"]
    before = {name: x.clone() for name, x in given.items() if name != which}
    assert call(*other.values(), in_place=in_place) is None
    assert all(torch.equal(given[name], x) for name, x in before.items())


@pytest.mark.parametrize(
    "how",
    [
        {"layout": "shbd"},
        {"layout": None},
        {"layout": []},
        {"layout": "thd"},
        {"head_dim": 16},
        {"head_dim": 32},
        {"rotary_dim": 14},
        {"offset": -1},
        {"offset": 9},
    ],
    ids=str,
)
def test_invalid_arguments_are_left_to_python(how: dict[str, Any]) -> None:
    given = usual()
    assert call(*given) is not None
    assert call(*given, **how) is None


def test_a_layout_is_compared_by_its_letters() -> None:
    assert call(*usual(), layout="".join("bshd")) is not None


def test_batched_tables_in_another_layout() -> None:
    q, k, *_ = usual()
    assert call(q, k, *tables(BATCH, SEQ)) is not None
    assert call(q, k, *tables(3, SEQ)) is None
    assert call(q, q, *tables(HEADS, SEQ), per_head=True) is not None
    assert call(q, k, *tables(HEADS, SEQ), per_head=True) is None
    assert call(q, q, *tables(BATCH, SEQ), per_head=True) is None
    assert call(q, q, *tables(3, HEADS, SEQ), per_head=True) is None
    assert call(q, q, *tables(SEQ), per_head=True) is None
    assert call(q[0], k[0], *tables(BATCH, SEQ), "thd") is None


@pytest.mark.parametrize("who", OBSERVERS)
def test_observers_see_every_operator(who: str) -> None:
    given, positions = usual(), torch.arange(3)
    steps = np.array([2**60], dtype=np.int64).tobytes()
    with OBSERVERS[who]():
        assert call(*given) is None
        assert call(*given, in_place=True) is None
        assert cpu.angles_plain(positions, steps, 1.0, torch.float32, b"", 0) is None
    assert call(*given) is not None
    assert cpu.angles_plain(positions, steps, 1.0, torch.float32, b"", 0) is not None


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_transforms_and_tracers_see_every_operator() -> None:
    q, k, cos, sin = usual()
    seen = []

    def step(x: Tensor) -> Tensor:
        seen.append(call(q, k, cos, sin))
        return x

    torch.func.vmap(step)(torch.zeros(2))
    torch.jit.trace(step, torch.zeros(2), check_trace=False)
    assert seen == [None, None]


def test_without_recorded_gradients() -> None:
    q, k, cos, sin = usual()
    q.requires_grad_()
    with torch.no_grad():
        new = call(q, k, cos, sin)
        assert new is not None
        assert not new[0].requires_grad
        assert call(q, k, cos, sin, in_place=True) is True


def test_inference_tensors() -> None:
    q, k, cos, sin = usual()
    made = inference(q)
    assert call(made, k, cos, sin) is not None
    assert call(made, k, cos, sin, in_place=True) is None  # an error, which the Python code raises
    with torch.inference_mode():
        assert call(made, k, cos, sin, in_place=True) is True


def test_shared_memory_is_never_written_twice() -> None:
    """Random slices of one buffer. NumPy determines whether they share an element."""
    draw, taken, shared = random.Random(0), 0, 0
    for _ in range(3000):
        buffer = torch.zeros(400)
        batch, seq = draw.randint(1, 2), draw.randint(1, 3)
        cos, sin = tables(seq, pairs=1)
        token, row = draw.choice([0, 2, 4, 6, 8, 12]), draw.choice([4, 6, 12, 24, 25, 40])
        views = []
        for heads in (draw.randint(1, 3), draw.randint(1, 2)):
            strides = (row, token + draw.choice([0, 0, 0, 2]), draw.choice([2, 3, 4]), draw.choice([1, 1, 1, 2]))
            views.append(buffer.as_strided((batch, seq, heads, 2), strides, draw.randint(0, 30)))
        overlap = np.shares_memory(views[0].numpy(), views[1].numpy())
        done = call(*views, cos, sin, head_dim=2, rotary_dim=2, offset=0, in_place=True)
        taken, shared = taken + (done is True), shared + overlap
        assert not (overlap and done), [(x.shape, x.stride(), x.storage_offset()) for x in views]
    assert taken > 100
    assert shared > 1000


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_of_a_fused_projection_use_the_fast_path(layout: str) -> None:
    heads = HEADS + 2 * KV_HEADS
    fused = torch.randn(shape(layout, BATCH, SEQ, heads, HEAD_DIM))
    q, k, _ = fused.split([HEADS, KV_HEADS, KV_HEADS], dim=layout.index("h"))
    assert call(q, k, *tables(SEQ), layout, in_place=True) is True


def test_each_element_needs_memory_of_its_own() -> None:
    q, k, cos, sin = usual()
    assert call(q[:, :, :1].expand(q.shape), k, cos, sin, in_place=True) is None
    assert call(q[:, :, :1].expand(q.shape), k, cos, sin) is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.int(),
        lambda x: x.int().repeat_interleave(2, -1)[..., ::2],
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
        lambda x: x.mT.contiguous().mT,
        lambda x: x[..., :1].expand(x.shape),
        lambda x: x[:, :1].expand(x.shape),
    ],
)
def test_angles_of_int32_and_of_strided_positions(change: Callable[[Tensor], Tensor]) -> None:
    several = change(torch.randint(-(2**31), 2**31, (3, 2, 5)))
    steps = np.frombuffer(SEVERAL._packed_phase_steps, dtype=np.int64)
    tables = cpu.angles_plain(several, SEVERAL._packed_phase_steps, 1.0, torch.float64, SEVERAL._packed_axis, 3)
    for pair, axis in enumerate(AXES.axis):
        alone = cpu.angles_plain(several[axis], steps[pair : pair + 1].tobytes(), 1.0, torch.float64, b"", 0)
        exact = oracle.cos_sin_of_steps(several[axis].numpy().astype(np.int64).reshape(-1), steps[pair : pair + 1])
        for of_all, table, truth in zip(tables, alone, exact, strict=True):
            assert np.abs(of_all[..., pair].reshape(-1).numpy() - truth[:, 0]).max() <= 4e-16
            assert np.abs(table.reshape(-1).numpy() - truth[:, 0]).max() <= 4e-16


def test_angles_under_another_default_dtype() -> None:
    steps = np.array([2**60], dtype=np.int64).tobytes()
    torch.set_default_dtype(torch.float64)
    try:
        assert [x.dtype for x in cpu.angles_plain(torch.arange(5), steps, 1.0, torch.float32, b"", 0)] == [
            torch.float32
        ] * 2
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "positions",
    [
        torch.arange(5.0),
        torch.arange(5, dtype=torch.int16),
        torch.tensor(3),
        torch.zeros(1, 1, 1, dtype=torch.int64),
        torch.arange(0),
        torch.arange(5).to("meta"),
        torch.arange(5).as_subclass(Subclass),
        [1, 2],
    ],
    ids=str,
)
def test_uncommon_positions_are_left_to_python(positions: Any) -> None:
    steps = np.array([2**60], dtype=np.int64).tobytes()
    assert cpu.angles_plain(positions, steps, 1.0, torch.float32, b"", 0) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.complex64, "float32"], ids=str)
def test_other_table_dtypes_are_left_to_python(dtype: Any) -> None:
    steps = np.array([2**60], dtype=np.int64).tobytes()
    assert cpu.angles_plain(torch.arange(5), steps, 1.0, dtype, b"", 0) is None


@pytest.mark.parametrize(
    ("device", "taken"),
    [(None, True), ("cpu", True), (torch.device("cpu"), True), ("cpu:0", False), (torch.device("cpu", 0), False)],
    ids=repr,
)
def test_a_rope_uses_the_fast_path_with_an_explicit_device(
    device: Any, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers often pass the device explicitly, usually that of the positions."""
    plain, asked = cpu.angles_plain, []

    def angles_plain(*given: Any) -> Any:
        made = plain(*given)
        asked.append(made is not None)
        return made

    rope = Rope(8, 1e4, "half")
    without = rope.at(torch.arange(4))
    monkeypatch.setattr(cpu, "angles_plain", angles_plain)
    assert torch.equal(rope.at(torch.arange(4), device=device).cos, without.cos)
    assert asked == [True] * taken
    assert rope.at(torch.arange(4), device="meta").cos.is_meta
    assert asked == [True] * taken


@pytest.mark.parametrize(
    "positions",
    [
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(2, 5, dtype=torch.int64),
        torch.zeros(4, 5, dtype=torch.int64),
        torch.zeros(3, 1, 2, 5, dtype=torch.int64),
        torch.zeros(3, 0, dtype=torch.int64),
        torch.zeros(3, 5),
        torch.zeros(3, 5, dtype=torch.int64).to("meta"),
    ],
    ids=lambda x: f"{tuple(x.shape)} {x.dtype}",
)
def test_uncommon_positions_of_several_axes_are_left_to_python(positions: Tensor) -> None:
    assert cpu.angles_plain(positions, SEVERAL._packed_phase_steps, 1.0, torch.float32, SEVERAL._packed_axis, 3) is None


@pytest.mark.parametrize("axis", [[0] * 7, [0] * 9, [0] * 7 + [3], [-1] + [0] * 7, []])
def test_invalid_axes_are_left_to_python(axis: list[int]) -> None:
    packed = np.array(axis, dtype=np.int64).tobytes()
    positions = torch.zeros(3, 5, dtype=torch.int64)
    assert cpu.angles_plain(positions, SEVERAL._packed_phase_steps, 1.0, torch.float32, packed, 3) is None


def called_in_ropewalk(call: Callable[[], object]) -> list[str]:
    """Return the names of the functions of ropewalk that a call runs."""
    called = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "ropewalk" in frame.f_code.co_filename:
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return called


@pytest.mark.parametrize(
    "axes", [(), (SEQ,), (1, SEQ), (BATCH, SEQ), (HEADS, SEQ), (1, HEADS, SEQ), (BATCH, HEADS, SEQ)], ids=str
)
def test_functions_that_a_call_runs(axes: tuple[int, ...]) -> None:
    """A call runs two functions of ropewalk for every accepted shape of tables, and at most 12 with gradients."""
    rotation = Rotation(*tables(*axes), pairing="half", head_dim=HEAD_DIM, per_head=HEADS in axes)
    q, k = torch.randn(BATCH, SEQ, HEADS, HEAD_DIM), torch.randn(BATCH, SEQ, HEADS, HEAD_DIM)
    assert called_in_ropewalk(lambda: rotation(q, k, layout="bshd")) == ["__call__", "_fast_path"]
    assert called_in_ropewalk(lambda: rotation.apply_(q, k, layout="bshd")) == ["apply_", "_fast_path"]
    q.requires_grad_()
    k.requires_grad_()
    rotation(q, k, layout="bshd")  # which asks once whether the kernels are available
    assert len(called_in_ropewalk(lambda: rotation(q, k, layout="bshd"))) <= 12
