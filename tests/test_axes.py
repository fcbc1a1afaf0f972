"""Ropes for tokens with several positions: the axis of each pair, precision, and equivalence with one axis."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oracle
from ropewalk import NTK, Axes, DynamicNTK, Llama3, Rope, RopeError, RotaryEmbedding, YaRN, schemes
from ropewalk.kernels import backend
from ropewalk.rope.rope import Numerics
from ropewalk.schemes import Linear, PerPair, Proportional

LIMIT = 2**31
GOLDEN = Path(__file__).parent / "golden" / "axes.json"
ROWS: dict[str, dict[str, Any]] = {row["name"]: row for row in json.loads(GOLDEN.read_text())["rows"]}
RECOMPOSED = {f"{row['model']}.{row['cls']}": row for row in json.loads(GOLDEN.read_text())["recomposed"]}

# The expected result of each constructor: the axis and the index of each pair, and the lengths of the progressions.
PATTERNS: dict[str, tuple[Axes, list[int], list[int], list[int]]] = {
    "sections": (Axes.sections((2, 1, 3)), [0, 0, 1, 2, 2, 2], [0, 1, 2, 3, 4, 5], [6, 6, 6]),
    "sections, an idle axis": (Axes.sections((1, 2, 0)), [0, 1, 1], [0, 1, 2], [3, 3, 3]),
    "interleaved": (Axes.interleaved((4, 2, 2)), [0, 1, 2, 0, 1, 2, 0, 0], list(range(8)), [8, 8, 8]),
    "interleaved, clamped": (Axes.interleaved((1, 3, 1)), [0, 1, 2, 0, 1], list(range(5)), [5, 5, 5]),
    "interleaved, two axes": (Axes.interleaved((2, 2)), [0, 1, 0, 1], [0, 1, 2, 3], [4, 4]),
    "time_last": (Axes.time_last((2, 2, 2)), [1, 2, 1, 2, 0, 0], list(range(6)), [6, 6, 6]),
    "axial": (Axes.axial((4, 2, 6)), [0, 0, 1, 2, 2, 2], [0, 1, 0, 0, 1, 2], [2, 1, 3]),
    "axial, width first": (Axes.axial((4, 6), order=(1, 0)), [1, 1, 0, 0, 0], [0, 1, 0, 1, 2], [3, 2]),
    "alternating": (Axes.alternating((4, 4)), [0, 1, 0, 1], [0, 0, 1, 1], [2, 2]),
    "alternating, width first": (Axes.alternating((4, 4), order=(1, 0)), [1, 0, 1, 0], [0, 0, 1, 1], [2, 2]),
    "strided": (Axes.strided((6, 6)), [0, 0, 0, 1, 1, 1], [0, 2, 4, 1, 3, 5], [6, 6]),
    "strided, three": (Axes.strided((4, 4, 4), order=(2, 0, 1)), [2, 2, 0, 0, 1, 1], [0, 3, 1, 4, 2, 5], [6, 6, 6]),
    "lists": (Axes([1, 0, 1], [1, 0, 0], [1, 3]), [1, 0, 1], [1, 0, 0], [1, 3]),
}
OF_64 = {  # of 64 pairs, as models have them
    "Qwen2-VL": Axes.sections((16, 24, 24)),
    "Qwen3-VL": Axes.interleaved((24, 20, 20)),
    "Ernie 4.5 VL": Axes.time_last((20, 22, 22)),
    "FLUX": Axes.axial((16, 56, 56)),
    "Kimi": Axes.alternating((64, 64), order=(1, 0)),
    "Pixtral": Axes.strided((64, 64)),
}
PATTERN = pytest.mark.parametrize("axes", OF_64.values(), ids=OF_64.keys())


def rope(axes: Axes | None, base: float = 1e6, **changes: Any) -> Rope:
    return Rope(128, base, "half", axes=axes, **changes)


def places(axes: Axes, *shape: int, dtype: torch.dtype = torch.int64, limit: int = LIMIT) -> torch.Tensor:
    drawn = torch.randint(-limit, limit, (axes.count, *shape), generator=torch.Generator().manual_seed(1))
    return drawn.to(dtype)


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name: str) -> None:
    axes, axis, index, lengths = PATTERNS[name]
    assert (list(axes.axis), list(axes.freq_index), list(axes.lengths)) == (axis, index, lengths)
    assert (axes.pairs, axes.count) == (len(axis), len(lengths))
    made = Rope(2 * axes.pairs, 1e4, "half", axes=axes)
    exact = [1e4 ** (-i / lengths[a]) for a, i in zip(axis, index, strict=True)]
    np.testing.assert_allclose(made.inv_freq, exact, rtol=1e-14)
    np.testing.assert_allclose(made.wavelength, 2 * np.pi / made.inv_freq, rtol=1e-15)


@pytest.mark.parametrize("name", PATTERNS)
def test_repr_can_be_evaluated(name: str) -> None:
    axes = PATTERNS[name][0]
    again = eval(repr(axes), {"Axes": Axes})
    assert again == axes
    assert repr(again) == repr(axes)
    assert hash(again) == hash(axes)
    assert repr(axes).startswith("Axes((" if name == "lists" else f"Axes.{name.split(',')[0]}(")
    for other in (pickle.loads(pickle.dumps(axes)), copy.deepcopy(axes)):
        assert (other, repr(other)) == (axes, repr(axes))
    lists = dataclasses.replace(axes)
    assert lists == axes
    assert eval(repr(lists), {"Axes": Axes}) == axes


def test_part_of_a_rope() -> None:
    with_axes, other = rope(OF_64["Qwen2-VL"]), rope(OF_64["Qwen3-VL"])
    assert len({rope(None), with_axes, other, rope(Axes.sections([16, 24, 24]))}) == 3
    assert repr(with_axes) == "Rope(head_dim=128, base=1000000.0, pairing='half', axes=Axes.sections((16, 24, 24)))"
    assert pickle.loads(pickle.dumps(with_axes)) == with_axes
    with pytest.raises(dataclasses.FrozenInstanceError):
        with_axes.axes.axis = ()  # type: ignore[misc,union-attr]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Axes([]), "axis must be a list of 1 to 32768 integers, got []"),
        (lambda: Axes("0011"), "axis must be a list"),
        (lambda: Axes([0, -1]), "axis[1] must be an integer from 0 to 63, got -1"),
        (lambda: Axes([0, 1.0]), "axis[1] must be an integer"),
        (lambda: Axes([0, 1], [0]), "freq_index must have one number per pair, got 1 for 2 pairs"),
        (
            lambda: Axes([0, 1], [0, 2]),
            "lengths must contain the axis of each pair, and freq_index must be less than that length, got",
        ),
        (lambda: Axes([0, 1], lengths=[2]), "got axis 1 and freq_index 1 for pair 1, and lengths (2,)"),
        (lambda: Axes([0, 1], lengths=[2, 0]), "lengths[1] must be an integer from 1 to 32768, got 0"),
        (lambda: Axes([0] * 40_000), "axis must be a list of 1 to 32768 integers"),
        (lambda: Axes.sections(64), "sections must be a list of 1 to 64 integers, got 64"),
        (lambda: Axes.sections((0, 0)), "sections must contain at least one pair, got (0, 0)"),
        (lambda: Axes.sections((16, True, 24)), "sections[1] must be an integer from 0 to 32768, got True"),
        (lambda: Axes.interleaved([]), "sections must be a list of 1 to 64 integers, got []"),
        (
            lambda: Axes.time_last((22, 22, 20)),
            "Axes.time_last: sections must be the numbers of pairs of t, h and w, with equal",
        ),
        (lambda: Axes.time_last((8, 12)), "Axes.time_last: sections must be the numbers of pairs of t, h and w"),
        (lambda: Axes.axial((16, 55)), "Axes.axial: channels must be even, two per pair, got (16, 55)"),
        (lambda: Axes.axial((16, 0)), "Axes.axial: channels[1] must be an integer from 2 to 65536, got 0"),
        (lambda: Axes.alternating((16, 8)), "Axes.alternating: channels must be even and equal, two per pair"),
        (lambda: Axes.strided((16, 8)), "Axes.strided: channels must be even and equal"),
        (lambda: Axes.axial((8, 8), order=(0, 0)), "Axes.axial: order must name each of the 2 axes once, from 0, got"),
        (lambda: Axes.axial((8, 8), order=(0,)), "order must name each of the 2 axes once, from 0, got (0,)"),
        (lambda: Axes.strided((8, 8), order=(2, 1)), "Axes.strided: order must name each of the 2 axes once"),
        (
            lambda: rope(Axes.sections((16, 24, 23))),
            "Rope: axes must have rotary_dim // 2 = 64 pairs, got 63 in Axes.sect",
        ),
        (lambda: rope(Axes.sections((16, 24, 24)), rotary_dim=64), "Rope: axes must have rotary_dim // 2 = 32 pairs"),
        (lambda: rope((16, 24, 24)), "Rope: axes must be an Axes or None, got (16, 24, 24)"),  # type: ignore[arg-type]
    ],
)
def test_impossible(make: Callable[[], object], message: str) -> None:
    with pytest.raises(RopeError) as raised:
        make()
    assert message in str(raised.value)
    assert len(str(raised.value)) < 500


class TestExactness:
    """The error bounds of a rope with one axis hold on each of several axes."""

    @PATTERN
    @pytest.mark.parametrize("base", [100.0, 1e4, 1e8])
    def test_against_mpmath(self, axes: Axes, base: float) -> None:
        made = rope(axes, base)
        positions = torch.cat((places(axes, 25), torch.tensor([[0, 1, -1, LIMIT - 1, -LIMIT]] * axes.count)), 1)
        rotation, numpy = made.at(positions), made.tables(positions.numpy())
        for pair, (a, w) in enumerate(zip(axes.axis, made.inv_freq, strict=True)):
            exact = oracle.cos_sin(positions[a].tolist(), [w])
            for table, other, truth in zip((rotation.cos, rotation.sin), numpy, exact, strict=True):
                assert np.abs(table[:, pair].double().numpy() - truth[:, 0]).max() <= 3.1e-8
                assert np.abs(other[:, pair] - truth[:, 0]).max() <= 4e-16 + LIMIT * 2 * np.pi * 2.0**-65

    @PATTERN
    def test_without_float64(self, axes: Axes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend, "_NO_FLOAT64", frozenset({"cpu"}))
        made, positions = rope(axes), places(axes, 20)
        rotation = made.at(positions)
        for pair, (a, w) in enumerate(zip(axes.axis, made.inv_freq, strict=True)):
            cos, sin = oracle.cos_sin(positions[a].tolist(), [w])
            assert np.abs(rotation.cos[:, pair].double().numpy() - cos[:, 0]).max() <= 1e-7
            assert np.abs(rotation.sin[:, pair].double().numpy() - sin[:, 0]).max() <= 1e-7

    def test_fractional_positions(self) -> None:
        axes = Axes.axial((64, 64))
        made, positions = rope(axes, 100.0), torch.linspace(-3, 3, 14, dtype=torch.float64).reshape(2, 7)
        rotation = made.at(positions, dtype=torch.float64)
        angle = positions.numpy()[list(axes.axis)].T * made.inv_freq
        np.testing.assert_allclose(rotation.cos.numpy(), np.cos(angle), rtol=0, atol=1e-15)
        np.testing.assert_allclose(rotation.sin.numpy(), np.sin(angle), rtol=0, atol=1e-15)


class TestTextIsOneAxis:
    """With equal positions on all axes, the bits are those of a rope with one axis and the same frequencies."""

    ONE_PROGRESSION = pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen3-VL", "Ernie 4.5 VL"])

    @ONE_PROGRESSION
    @pytest.mark.parametrize("shape", [(9,), (2, 5), (0,)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("kind", [torch.int32, torch.int64, torch.float32, torch.float64], ids=str)
    def test_bits(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: torch.dtype) -> None:
        axes = OF_64[name]
        text = places(axes, *shape, limit=LIMIT - 1)[0].to(kind)
        several, one = (
            rope(axes).at(text.expand(axes.count, *shape), dtype=dtype),
            rope(None).at(text, dtype=dtype),
        )
        assert several.cos.shape == (*shape, 64)
        assert torch.equal(several.cos, one.cos)
        assert torch.equal(several.sin, one.sin)

    @ONE_PROGRESSION
    @pytest.mark.parametrize("numerics", ["float32", "float32-frequencies"])
    def test_as_deployed(self, name: str, numerics: Any) -> None:
        axes, text = OF_64[name], torch.arange(70)
        several = rope(axes).at(text.expand(axes.count, -1), numerics=numerics)
        one = rope(None).at(text, numerics=numerics)
        assert torch.equal(several.cos, one.cos)
        assert torch.equal(several.sin, one.sin)

    def test_as_deployed_with_a_progression_per_axis(self) -> None:
        rotation = rope(OF_64["FLUX"], 1e4).at(positions := places(OF_64["FLUX"], 5, limit=99), numerics="float32")
        one = Rope(56, 1e4, "half").at(positions[2], numerics="float32")
        assert torch.equal(rotation.cos[..., 36:], one.cos)


@pytest.mark.parametrize(
    ("positions", "shape"),
    [
        (torch.arange(5), "(5,)"),
        (torch.zeros(2, 5, dtype=torch.int64), "(2, 5)"),
        (torch.zeros(4, 2, 5), "(4, 2, 5)"),
        (torch.zeros(2, 3, 5, dtype=torch.int64), "(2, 3, 5)"),
        (torch.zeros(3, 1, 2, 5, dtype=torch.int64), "(3, 1, 2, 5)"),
        (torch.tensor(3), "()"),
    ],
)
def test_positions_of_another_shape(positions: torch.Tensor, shape: str) -> None:
    with pytest.raises(RopeError) as raised:
        rope(OF_64["Qwen2-VL"]).at(positions)
    must = "Rope.at: positions of a rope with axes must have shape [3, seq] or [3, batch, seq], got shape "
    assert str(raised.value).startswith(must + shape)
    with pytest.raises(RopeError, match=r"Rope\.tables: positions of a rope with axes must have shape \[3, \.\.\.\]"):
        rope(OF_64["Qwen2-VL"]).tables(positions.long().numpy() if positions.ndim != 4 else [[1, 2]])


@pytest.mark.parametrize(
    ("shape", "fix"),
    [((7, 3), "The axes must come first: pass positions.T."), ((2, 7, 3), "pass positions.permute(2, 0, 1).")],
)
def test_axes_last_are_refused(shape: tuple[int, ...], fix: str) -> None:
    made, ids = rope(OF_64["Qwen2-VL"]), torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(RopeError) as raised:
        made.at(ids)
    assert str(raised.value).endswith(fix)
    first = ids.T if ids.ndim == 2 else ids.permute(2, 0, 1)
    assert made.at(first).cos.shape == (*shape[:-1], 64)
    with pytest.raises(RopeError, match=r"Pass one row per axis\. For text, all rows are equal: positions\.expand\(3"):
        made.at(torch.arange(7))


def test_one_axis_refuses_several_rows() -> None:
    with pytest.raises(RopeError, match=r"positions must have shape \[seq\] or .* build the Rope with axes"):
        rope(None).at(torch.zeros(3, 2, 5))


class TestShift:
    @PATTERN
    def test_moves_along_each_axis(self, axes: Axes) -> None:
        """Steps are integers, so a shift has exactly the angle between the two positions, bit for bit."""
        made, delta = rope(axes), tuple(int(d) for d in places(axes))
        plain, expected = made.shift(delta), made.at(torch.tensor(delta).unsqueeze(-1))
        assert plain.cos.shape == (64,)
        assert torch.equal(plain.cos, expected.cos[0])
        for tensor in (torch.tensor(delta), torch.tensor(delta, dtype=torch.int32)):
            assert torch.equal(made.shift(tensor).sin, plain.sin)

    def test_shapes(self) -> None:
        made, axes = rope(OF_64["Qwen2-VL"]), OF_64["Qwen2-VL"]
        for shape in ((), (5,), (2, 5)):
            delta = places(axes, *shape)
            assert made.shift(delta).cos.shape == (*shape, 64)
        key = torch.randn(2, 5, 1, 128, dtype=torch.float64)
        start, delta = places(axes, 2, 5, limit=9_000), places(axes, 2, 5, limit=9_000)
        moved = made.shift(delta, dtype=torch.float64)(
            made.at(start, dtype=torch.float64)(key, layout="bshd"), layout="bshd"
        )
        there = made.at(start + delta, dtype=torch.float64)(key, layout="bshd")
        torch.testing.assert_close(moved, there, rtol=0, atol=1e-14)

    @pytest.mark.parametrize("delta", [1, (1, 2), (1, 2, 3, 4), [1, 2, 3], (1, 2, 3.0), (0, 0, 2**63), None])
    def test_no_shift(self, delta: Any) -> None:
        with pytest.raises(RopeError, match=r"Rope\.shift: delta(\[\d\])? (of a rope with 3 axes )?must"):
            rope(OF_64["Qwen2-VL"]).shift(delta)

    @pytest.mark.parametrize(
        "delta", [torch.tensor(1), torch.tensor([1, 2]), torch.zeros(3), torch.ones(3, 1, 1, 1).int()]
    )
    def test_no_tensor_of_shifts(self, delta: torch.Tensor) -> None:
        with pytest.raises(
            RopeError, match=r"Rope\.shift: delta must be a tuple of ints or .* \[3\], \[3, seq\] or \[3, b"
        ):
            rope(OF_64["Qwen2-VL"]).shift(delta)


class TestScaling:
    YARN = YaRN(4.0, 4096)

    @pytest.mark.parametrize(
        "scaling", [YARN, Llama3(8, 1, 4, 8192), Linear(2), PerPair(tuple(range(1, 65))), NTK(4.0)]
    )
    def test_one_progression_is_scaled_as_the_head(self, scaling: schemes.Scheme) -> None:
        axes, whole = OF_64["Qwen3-VL"], rope(None, scaling=scaling)
        made = rope(axes, scaling=scaling)
        assert (made.inv_freq == whole.inv_freq).all()
        assert made.attention_factor == whole.attention_factor
        even = rope(OF_64["Pixtral"], scaling=scaling)
        assert (even.inv_freq == np.concatenate((whole.inv_freq[::2], whole.inv_freq[1::2]))).all()

    @pytest.mark.parametrize("scaling", [Linear(2.0), NTK(4.0)])
    def test_scaling_per_axis(self, scaling: schemes.Scheme) -> None:
        made = rope(OF_64["FLUX"], scaling=scaling)
        blocks = [Rope(size, 1e6, "half", scaling=scaling).inv_freq for size in (16, 56, 56)]
        assert (made.inv_freq == np.concatenate(blocks)).all()

    @pytest.mark.parametrize(
        "scaling",
        [YARN, Llama3(8, 1, 4, 8192), PerPair((2.0,) * 64), Proportional(0.5), DynamicNTK(2.0, 4096)],
        ids=lambda s: type(s).__name__,
    )
    def test_unsupported_scaling(self, scaling: schemes.Scaling) -> None:
        with pytest.raises(RopeError, match=f"got {type(scaling).__name__} with Axes.axial") as raised:
            rope(OF_64["FLUX"], scaling=scaling)
        assert "that applies to the frequencies of each axis" in str(raised.value)

    def test_at_length_keeps_the_axes(self) -> None:
        axes = OF_64["Qwen2-VL"]
        made = rope(axes, scaling=DynamicNTK(2.0, 4096))
        assert not made.is_static
        assert made.at_length(4096) == rope(axes)
        assert made.at_length(8192) == rope(axes, scaling=NTK(3.0))
        with pytest.raises(RopeError, match="at_length"):
            made.at(places(axes, 5))

    def test_the_attention_factor(self) -> None:
        axes, positions = OF_64["Qwen2-VL"], places(OF_64["Qwen2-VL"], 5)
        made = rope(axes, scaling=self.YARN)
        plain = rope(axes, scaling=dataclasses.replace(self.YARN, attention_factor=1.0))
        assert made.attention_factor > 1
        torch.testing.assert_close(made.at(positions).cos, plain.at(positions).cos * made.attention_factor)
        assert torch.equal(made.shift((1, 2, 3)).cos, plain.shift((1, 2, 3)).cos)


@pytest.mark.usefixtures("compiler")
class TestCompiled:
    @PATTERN
    @pytest.mark.parametrize("kind", [torch.int64, torch.float32], ids=str)
    def test_compile(self, axes: Axes, kind: torch.dtype) -> None:
        made, positions = rope(axes), places(axes, 2, 7, limit=5_000).to(kind)
        deployed: Numerics = "float32" if torch.__version__ >= "2.12" else "exact"  # which older versions cannot trace
        torch._dynamo.reset()
        compiled = torch.compile(lambda p: (made.at(p).cos, made.at(p, numerics=deployed).sin), fullgraph=True)
        cos, sin = compiled(positions)
        # Inductor's cosine may differ in the last bit.
        torch.testing.assert_close(cos, made.at(positions).cos, rtol=0, atol=6.1e-8)
        # PyTorch's float32 sine in compiled code is off by 1.1e-7, in eager code by an ulp.
        torch.testing.assert_close(sin, made.at(positions, numerics=deployed).sin, rtol=0, atol=1.8e-7)

    def test_compiled_lengths(self) -> None:
        made = rope(OF_64["Qwen3-VL"])
        torch._dynamo.reset()
        compiled = torch.compile(lambda p: made.at(p).cos, fullgraph=True, dynamic=True)
        for seq in (3, 8, 17):
            positions = places(OF_64["Qwen3-VL"], 2, seq)
            torch.testing.assert_close(compiled(positions), made.at(positions).cos, rtol=0, atol=6.1e-8)

    def test_export(self) -> None:
        made = rope(OF_64["Qwen2-VL"])
        embed, seq = RotaryEmbedding(made, layout="bhsd"), torch.export.Dim("seq", min=2)
        x, positions = torch.randn(2, 3, 7, 128), places(OF_64["Qwen2-VL"], 2, 7)
        program = torch.export.export(embed, (x, x, positions), dynamic_shapes=({2: seq}, {2: seq}, {2: seq})).module()
        x, positions = torch.randn(2, 3, 5, 128), places(OF_64["Qwen2-VL"], 2, 5)
        for exported, eager in zip(program(x, x, positions), embed(x, x, positions), strict=True):
            torch.testing.assert_close(exported, eager, rtol=0, atol=1e-6)

    def test_vmap(self) -> None:
        made, positions = rope(OF_64["FLUX"]), places(OF_64["FLUX"], 4, 6)
        each = torch.vmap(lambda p: made.at(p).cos, in_dims=1)(positions)
        torch.testing.assert_close(each, made.at(positions).cos, rtol=0, atol=6.1e-8)

    def test_gradient_to_fractional_positions(self) -> None:
        made = Rope(12, 100.0, "half", axes=Axes.axial((4, 8)))
        positions = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
        x = torch.randn(5, 2, 12, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda p, x: made.at(p, dtype=torch.float64)(x, layout="thd"), (positions, x))


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_rotated(pairing: Any, layout: Any) -> None:
    """RotaryEmbedding, compared with complex numbers in float64."""
    axes = Axes.interleaved((4, 2, 2))
    made = Rope(24, 1e4, pairing, rotary_dim=16, rotary_offset=4, axes=axes)
    positions, x = places(axes, 2, 5, limit=1_000), torch.randn(2, 5, 3, 24)
    angle = np.take(np.moveaxis(positions.numpy(), 0, -1), axes.axis, axis=-1) * made.inv_freq
    exact = oracle.rotate(x.numpy(), angle[:, :, None], pairing, offset=4)
    order = [("bshd").index(letter) for letter in layout]
    q, k = RotaryEmbedding(made, layout=layout)(x.permute(order), x[:, :, :1].permute(order), positions)
    for y, truth in ((q, exact), (k, exact[:, :, :1])):
        np.testing.assert_allclose(y.permute([order.index(i) for i in range(4)]).numpy(), truth, rtol=0, atol=2e-6)


# name → base, axes, pairing, and other fields of the rope
RECORDED: dict[str, tuple[float, Axes, str, dict[str, Any]]] = {
    "qwen2-vl-72b-instruct-gptq-int4: full_attention": (1e6, Axes.sections((16, 24, 24)), "half", {}),
    "qwen3.5-27b: full_attention": (1e7, Axes.interleaved((11, 11, 10)), "half", {"rotary_dim": 64}),
    "qwen2-vl.vision: vision": (1e4, Axes.axial((40, 40)), "half", {}),
    "qwen3.5.vision: vision": (1e4, Axes.axial((36, 36)), "half", {}),
    "devstral-small-2.vision: vision": (1e4, Axes.strided((32, 32)), "half", {}),
    "default-sam2_video: memory_attention": (1e4, Axes.axial((128, 128)), "interleaved", {}),
    "diffusers: FLUX axes 16,56,56 theta 10000": (1e4, Axes.axial((16, 56, 56)), "interleaved", {}),
    "diffusers: CogVideoX get_3d_rotary_pos_embed 64, grid 3x4x6": (
        1e4,
        Axes.axial((16, 24, 24)),
        "interleaved",
        {},
    ),
    "naver_rope_vit: axial dim 64 end_x 4 end_y 6 theta 100": (100.0, Axes.axial((32, 32)), "interleaved", {}),
    "naver_rope_vit: axial dim 32 end_x 3 end_y 5 theta 100": (100.0, Axes.axial((16, 16)), "interleaved", {}),
    "ggml: vision head 80 sections 20,20": (1e4, Axes.axial((40, 40)), "half", {}),
    "timm: RotaryEmbeddingCat {'dim': 64, 'in_pixels': False, 'feat_shape': [4, 6]} rotate_half=False": (
        1e4,
        Axes.axial((32, 32)),
        "interleaved",
        {},
    ),
    "timm: RotaryEmbeddingCat {'dim': 64, 'in_pixels': False, 'feat_shape': [4, 6]} rotate_half=True": (
        1e4,
        Axes.axial((32, 32)),
        "half",
        {},
    ),
}
SEPARATE = {  # tests of their own below
    "gemma-4.vision: vision",
    "default-dinov3_vit: grid_14x14",
    "tiny-random-dinov3: grid_4x6",
    "ggml: imrope qwen3-vl sections 24,20,20",
    "ggml: imrope qwen3-vl sections 24,20,20, 4th position row = t",
    "timm: RotaryEmbeddingMRope section (8, 12, 12)",
}


class TestRecorded:
    """Comparison with results of other projects' code: `golden/axes.json`."""

    def test_every_row_is_read(self) -> None:
        assert set(ROWS) == set(RECORDED) | SEPARATE

    @pytest.mark.parametrize("name", RECORDED)
    def test_row(self, name: str) -> None:
        base, axes, pairing, changes = RECORDED[name]
        row = ROWS[name]
        made = Rope(row["q_shape"][-1], base, pairing, axes=axes, **changes)  # type: ignore[arg-type]
        if row["pairs"] and row["pairs_header"][-1] == "axis":
            self.check_pairs(made, axes, row)
        self.check(row, made.at(torch.tensor(row["positions"])))

    def check_pairs(self, made: Rope, axes: Axes, row: dict[str, Any]) -> None:
        assert [oracle.channels(made.rotary_dim, made.pairing)[i] for i in range(axes.pairs)] == [
            (pair[0], pair[1]) for pair in row["pairs"]
        ]
        listed = [pair[5] if isinstance(pair[5], int) else pair[5][0] for pair in row["pairs"]]
        assert list(axes.axis) == listed
        if row["pairs_header"][4] == "freq_index":
            recorded = [row["inv_freq"][pair[4]] for pair in row["pairs"]]
        else:
            recorded = [pair[4] for pair in row["pairs"]]  # the angle at position 1
        np.testing.assert_allclose(made.inv_freq, recorded, rtol=1e-6)

    def check(
        self, row: dict[str, Any], *rotations: Any, prefix: int = 0, largest: float | None = None, slack: float = 1.0
    ) -> None:
        x, rotated = self.tensors(row)
        for rotation in rotations:
            x[..., prefix:, :] = rotation(x[..., prefix:, :].contiguous(), layout="bhsd")
        far = [max(abs(p) for p in at) if largest is None else largest for at in zip(*row["positions"], strict=True)]
        bound = slack * 2**0.5 * torch.tensor([0.0] * prefix + [p * 2.0**-23 + 1e-6 for p in far]).unsqueeze(-1)
        error = (x - rotated).abs()
        assert (error <= bound).all(), error.amax((0, 1, 3))

    def tensors(self, row: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        x = oracle.golden_q(row["q_shape"])[:, : row["q_heads"]].copy()
        rotated = np.array(row["q_rot"], dtype=np.float32).reshape(x.shape)
        return torch.from_numpy(x), torch.from_numpy(rotated)

    @pytest.mark.parametrize("name", ["default-dinov3_vit: grid_14x14", "tiny-random-dinov3: grid_4x6"])
    def test_normalised_coordinates(self, name: str) -> None:
        """DINOv3: centres of patches in [−1, 1], times 2π. The first token is not a patch."""
        row = ROWS[name]
        size = torch.tensor(row["grid"], dtype=torch.float64).unsqueeze(-1)
        centres = (torch.tensor(row["positions"]) + 0.5) / size * 2 - 1
        made = Rope(64, 100.0, "half", axes=Axes.axial((32, 32)))
        self.check(row, made.at(2 * torch.pi * centres), prefix=row["prefix"], largest=2 * np.pi)

    def test_blocks_that_rotate_separately(self) -> None:
        """Gemma 4: each half of the head has its own pairs and its own axis, so each half is a rope."""
        row = ROWS["gemma-4.vision: vision"]
        positions = torch.tensor(row["positions"])
        blocks = [Rope(72, 100.0, "half", rotary_dim=36, rotary_offset=offset) for offset in (0, 36)]
        for a, block in enumerate(blocks):
            pairs = [pair for pair in row["pairs"] if pair[5] == a]
            assert oracle.channels(36, "half", 36 * a) == [(pair[0], pair[1]) for pair in pairs]
            np.testing.assert_allclose(block.inv_freq, [row["inv_freq"][pair[4]] for pair in pairs], rtol=1e-6)
        self.check(row, *(block.at(positions[a]) for a, block in enumerate(blocks)))

    def test_another_boundary(self) -> None:
        """llama.cpp's IMROPE: with [24, 20, 20], two pairs take a fourth row of positions; t in transformers."""
        boundary = [i % 3 if i < 3 * (24, 20, 20)[i % 3] else 3 for i in range(64)]
        ours = Axes.interleaved((24, 20, 20))
        assert [i for i in range(64) if ours.axis[i] != boundary[i]] == [61, 62]
        made = Rope(128, 5e6, "half", axes=Axes(boundary))
        given = ROWS["ggml: imrope qwen3-vl sections 24,20,20, 4th position row = t"]
        positions = torch.tensor(given["positions"])
        assert torch.equal(positions[3], positions[0])
        self.check(given, made.at(positions), slack=4.0)  # its frequencies come from a recurrence
        # If the fourth row contains t, both rules agree. llama.cpp fills it with 0, so they differ there.
        self.check(given, Rope(128, 5e6, "half", axes=ours).at(positions[:3]), slack=4.0)
        without = ROWS["ggml: imrope qwen3-vl sections 24,20,20"]
        positions = torch.cat((positions[:3], torch.zeros_like(positions[:1])))
        self.check(without, made.at(positions), slack=4.0)
        x, rotated = self.tensors(without)
        assert (Rope(128, 5e6, "half", axes=ours).at(positions[:3])(x, layout="bhsd") - rotated).abs().max() > 1e-4

    def test_sections_longer_than_the_cycles(self) -> None:
        """timm with t = 0: h and w have 11 and 10 of 32 pairs, although their sections are 12."""
        row, axes = ROWS["timm: RotaryEmbeddingMRope section (8, 12, 12)"], Axes.interleaved((8, 12, 12))
        assert [axes.axis.count(a) for a in range(3)] == [11, 11, 10]
        assert [pair[0] for pair in row["pairs"]] == [i for i in range(32) if axes.axis[i] > 0]
        grid = torch.tensor(row["positions"])
        made = Rope(64, 1e4, "half", axes=axes)
        self.check(row, made.at(torch.cat((torch.zeros_like(grid[:1]), grid))))


# The result of `recomposition_frequencies` of transformers 5.23 for labelled numbers, and the equivalent Axes.
SAME = {
    "qwen2_vl.Qwen2VLRotaryEmbedding": Axes.sections((16, 24, 24)),
    "qwen3_vl.Qwen3VLTextRotaryEmbedding": Axes.interleaved((24, 20, 20)),
    "cosmos3_edge.Cosmos3EdgeTextRotaryEmbedding": Axes.interleaved((24, 20, 20)),
    "neomme.NeoMMERotaryEmbedding": Axes.interleaved((16, 16)),
    "glm4v.Glm4vTextRotaryEmbedding": Axes.sections((8, 12, 12)),
    "glm_image.GlmImageTextRotaryEmbedding": Axes.sections((8, 12, 12)),
    "ernie4_5_vl_moe.Ernie4_5_VLMoeTextRotaryEmbedding": Axes.time_last((20, 22, 22)),
    "qwen2_vl.Qwen2VLVisionRotaryEmbedding": Axes.axial((40, 40)),
    "glm4v.Glm4vVisionRotaryEmbedding": Axes.axial((32, 32)),
    "minimax_m3_vl.MiniMaxM3VLVisionRotaryEmbedding": Axes.axial((26, 26, 26)),
    "step3p7.Step3p7VisionRotaryEmbedding": Axes.axial((36, 36), order=(1, 0)),
    "inkling2.Inkling2VisionRotaryEmbedding": Axes.axial((36, 36), order=(1, 0)),
    "kimi_k25.Kimi_K25VisionRotaryEmbedding": Axes.alternating((36, 36), order=(1, 0)),
    "pixtral.PixtralVisionRotaryEmbedding": Axes.strided((32, 32)),
}


@pytest.mark.parametrize("name", SAME)
def test_recomposed(name: str) -> None:
    axes, row = SAME[name], RECOMPOSED[name]
    assert list(axes.axis) == row["axis"]
    assert list(axes.freq_index) == row["freq_index"]


def test_what_is_not_a_rotation() -> None:
    """In Hunyuan of transformers 5.23, the two channels of a pair use different axes, which no Rope can describe."""
    assert {name for name, row in RECOMPOSED.items() if not row["rotation"]} == set(RECOMPOSED) - set(SAME)
    assert set(RECOMPOSED) - set(SAME) == {"hunyuan_vl.HunYuanVLRotaryEmbedding"}
