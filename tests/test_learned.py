"""LearnedRope: angles and gradients, compared with mpmath and finite differences; golden values and casts."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import oracle
import processes
from kernel_cases import LAYOUTS, PAIRINGS, record_calls, shape
from ropewalk import Axes, DynamicNTK, LearnedRope, Rope, RopeError, YaRN
from ropewalk.kernels import backend, cpu

GOLDEN = json.loads((Path(__file__).parent / "golden" / "learned.json").read_text())["cases"]
PLACES = torch.tensor([[0, 3, -2, 131_071], [5, 0, 1, -70_000], [1, 1, 2, 40]])  # on three axes
KINDS = {
    "one axis": ((1, 3), (4,)),
    "one axis, per head": ((1, 2, 3), (4,)),
    "one axis, batch": ((1, 3), (2, 4)),
    "two axes": ((2, 3), (2, 4)),
    "two axes, per head": ((2, 2, 3), (2, 4)),
    "three axes, per head, batch": ((3, 2, 3), (3, 2, 4)),
}


def learned(kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> LearnedRope:
    return LearnedRope(torch.randn(KINDS[kind][0], dtype=dtype), **{"pairing": "half", **more})


def places(kind: str) -> Tensor:
    size = KINDS[kind][1]
    rows = PLACES[: size[0]] if len(size) > 1 and "one axis" not in kind else PLACES[0]
    if "batch" not in kind:
        return rows
    return torch.stack((rows, rows.flip(-1)), dim=-2)


def exact(inv_freq: Tensor, positions: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Compute cos and sin of the sum over axes of position · frequency in mpmath, as tables of a Rotation."""
    axes = inv_freq.shape[0]
    speeds = inv_freq.detach().double().numpy().reshape(axes, -1, inv_freq.shape[-1])  # [axes, heads, pairs]
    at = positions.double().numpy().reshape(axes, *positions.shape[-2 if positions.ndim > (axes > 1) + 1 else -1 :])
    angles = np.empty((*at.shape[1:-1], speeds.shape[1], at.shape[-1], speeds.shape[2]), dtype=object)
    with mpmath.workdps(oracle.PRECISION):
        for place in np.ndindex(angles.shape):
            *row, head, token, pair = place
            angles[place] = sum(
                mpmath.mpf(float(at[(axis, *row, token)])) * mpmath.mpf(float(speeds[axis, head, pair]))
                for axis in range(axes)
            )
        tables = [np.vectorize(lambda a, f=f: float(f(a)), otypes=[float])(angles) for f in (mpmath.cos, mpmath.sin)]
    cos, sin = (table if inv_freq.ndim == 3 else table[..., 0, :, :] for table in tables)
    return cos, sin


@pytest.mark.parametrize("kind", KINDS)
class TestAngles:
    def test_against_mpmath(self, kind: str) -> None:
        torch.manual_seed(0)
        rope, positions = learned(kind), places(kind)
        rotation = rope(positions)
        assert rotation.per_head == ("per head" in kind)
        assert rotation.tokens == (positions.shape if "one axis" in kind else positions.shape[1:])
        for table, truth in zip((rotation.cos, rotation.sin), exact(rope.inv_freq, positions), strict=True):
            assert table.dtype == torch.float32
            assert table.shape == truth.shape
            # Half an ulp of float32; angles up to 4e5 in float64, with the roundings of two sums.
            assert np.abs(table.detach().double().numpy() - truth).max() <= 2.0**-25 + 4e5 * 2.0**-51
        wide = rope(positions, dtype=torch.float64)
        assert wide.cos.dtype == torch.float64
        assert np.abs(wide.sin.detach().numpy() - exact(rope.inv_freq, positions)[1]).max() <= 4e5 * 2.0**-51

    def test_dtypes_of_positions_and_autocast(self, kind: str) -> None:
        rope, positions = learned(kind), places(kind)
        wanted = rope(positions)
        for dtype in (torch.int32, torch.float32, torch.float64):
            assert torch.equal(rope(positions.to(dtype)).cos, wanted.cos)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(rope(positions).cos, wanted.cos)

    def test_compiled(self, kind: str) -> None:
        torch._dynamo.reset()
        rope, positions = learned(kind), places(kind)
        q = torch.randn(2, 4, 2, 6)
        rotate_pair = torch.compile(lambda q: rope(positions)(q, layout="bshd"), fullgraph=True, backend="aot_eager")(q)
        torch.testing.assert_close(rotate_pair, rope(positions)(q, layout="bshd"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pairing", PAIRINGS)
class TestGradients:
    def test_gradcheck(self, kind: str, pairing: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Gradients to the frequencies, through cos and sin, by the CPU kernel if it is available."""
        torch.manual_seed(1)
        calls = record_calls(cpu, monkeypatch)
        positions = places(kind) % 7
        inv_freq = torch.randn(KINDS[kind][0], dtype=torch.float64, requires_grad=True)
        layouts = LAYOUTS[: 3 if "batch" in kind else 4]
        for layout in layouts[PAIRINGS.index(pairing) :: 2]:
            q, k = (torch.randn(shape(layout, 2, 4, 2, 8), dtype=torch.float64, requires_grad=True) for _ in range(2))
            rope = LearnedRope(inv_freq, pairing=pairing, head_dim=8, rotary_offset=1)

            def rotate_pair(q: Tensor, k: Tensor, inv_freq: Tensor, rope: Any = rope, layout: Any = layout) -> Tensor:
                rotation = torch.func.functional_call(rope, {"inv_freq": inv_freq}, positions, {"dtype": torch.float64})
                return torch.cat([y.flatten() for y in rotation(q, k, layout=layout)])

            assert gradcheck(rotate_pair, (q, k, inv_freq))
        assert gradgradcheck(rotate_pair, (q, k, inv_freq))
        if backend.FAST_PATH:
            assert {"rotate", "table_gradient"} <= set(calls)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["id"])
class TestGolden:
    def inv_freq(self, case: dict[str, Any]) -> Tensor:
        heads, pairs = case["params"]["heads"], case["params"]["head_dim"] // 2
        return torch.tensor(case["inv_freq"]).view(-1, heads, pairs)

    def test_rotates_alike(self, case: dict[str, Any]) -> None:
        positions, params = torch.tensor(case["positions"]), case["params"]
        rotation = LearnedRope(self.inv_freq(case), pairing="interleaved")(positions)
        bound = math.sqrt(2) * (positions.abs().sum(0) * 2.0**-23 + 1e-6)  # see golden/README.md
        size = (1, params["heads"], positions.shape[1], params["head_dim"])
        for name, make, kept in (("q", oracle.golden_q, 2), ("k", oracle.golden_k, 1)):
            rotate_pair = rotation(torch.from_numpy(make(size)), layout="bhsd")[:, -kept:]
            recorded = torch.tensor(case[f"{name}_rot"]).view(rotate_pair.shape)
            assert ((rotate_pair - recorded).abs() <= bound.unsqueeze(-1)).all()

    def test_starts_alike(self, case: dict[str, Any]) -> None:
        params, golden = case["params"], self.inv_freq(case)
        if "Mochi" in case["id"]:
            mine = LearnedRope.projected(params["head_dim"], params["heads"], pairing="interleaved").inv_freq
            assert mine.shape == golden.shape
            assert not mine.any()
            return
        mine = LearnedRope.mixed(
            params["head_dim"], params["heads"], pairing="interleaved", base=params["base"]
        ).inv_freq

        def from_the_first(inv_freq: Tensor) -> Tensor:
            """Return x and y as complex numbers, rotated so that the first pair of each head points along x."""
            plane = torch.complex(*inv_freq.detach().double())
            return plane * (plane[:, :1].conj() / plane[:, :1].abs())

        assert mine.dtype == torch.float32
        # Speeds are 1 at most; float32 has 24 bits, and the peer rounds power, angle, cosine and product.
        torch.testing.assert_close(from_the_first(mine), from_the_first(golden), rtol=0, atol=6 * 2.0**-24)


class TestBeginnings:
    def test_directions_are_spread_and_repeatable(self) -> None:
        one, two = (
            LearnedRope.mixed(8, 4000, pairing="half", generator=torch.Generator().manual_seed(seed)) for seed in (3, 3)
        )
        assert torch.equal(one.inv_freq, two.inv_freq)
        x, y = one.inv_freq[:, :, 0].double()
        torch.testing.assert_close(x.square() + y.square(), torch.ones(4000, dtype=torch.float64))
        quarters = torch.bincount((2 * (x > 0) + (y > 0)).long(), minlength=4)
        # 1,000 of 4,000, with a standard deviation of 27.
        assert (quarters - 1000).abs().max() < 5 * 27

    @pytest.mark.parametrize("heads", [None, 3])
    def test_from_a_rope(self, heads: int | None) -> None:
        rope = Rope(16, 5e5, "interleaved", rotary_dim=8, rotary_offset=4, scaling=YaRN(4, 64))
        positions = torch.tensor([0, 7, 131_071, 2**31])
        mine = LearnedRope.from_rope(rope, heads=heads, dtype=torch.float64)
        assert (mine.axes, mine.heads) == (1, heads)
        q = torch.randn(1, 4, 3, 16, dtype=torch.float64)
        with torch.no_grad():
            rotate_pair = mine(positions, dtype=torch.float64)(q, layout="bshd")
        wanted = rope.at(positions, dtype=torch.float64)(q, layout="bshd")
        # A float64 frequency and product at 2³¹ round by 2³¹ · 2⁻⁵² each, times numbers of size 5 and a factor of 1.2.
        torch.testing.assert_close(rotate_pair, wanted, rtol=0, atol=12 * 2.0**-21)
        torch.testing.assert_close(mine(positions).inverse()(rotate_pair, layout="bshd"), q, rtol=0, atol=1e-5)

    def test_from_a_rope_with_axes(self) -> None:
        """Angles by mpmath: pairs 0 and 1 by the first axis, 2 by the second, 3 by the third."""
        mine = LearnedRope.from_rope(Rope(8, 1e4, "half", axes=Axes.sections((2, 1, 1))), dtype=torch.float64)
        inv_freq = [float(w) for w in oracle.inv_freq(1e4, 8)]
        with torch.no_grad():
            made = mine(PLACES, dtype=torch.float64)
        for pair, axis in enumerate((0, 0, 1, 2)):
            cos, sin = oracle.cos_sin(PLACES[axis].tolist(), inv_freq[pair : pair + 1])
            torch.testing.assert_close(made.cos[:, pair], torch.from_numpy(cos[:, 0]), rtol=0, atol=1e-10)
            torch.testing.assert_close(made.sin[:, pair], torch.from_numpy(sin[:, 0]), rtol=0, atol=1e-10)

    def test_nothing_rotates_at_zero(self) -> None:
        mine, q = LearnedRope.projected(8, 2, pairing="interleaved"), torch.randn(5, 2, 8)
        rotate_pair = mine(torch.randn(3, 5))(q, layout="thd")
        assert torch.equal(rotate_pair, q)
        (rotate_pair * torch.randn_like(q)).sum().backward()
        assert mine.inv_freq.grad.abs().min() > 0  # gradients are not 0, so training can start


class TestCasts:
    WAYS: ClassVar[dict[str, Callable[[nn.Module], nn.Module]]] = {
        "half": lambda m: m.half(),
        "bfloat16": lambda m: m.bfloat16(),
        "to dtype": lambda m: m.to(torch.float16),
        "to dtype and device": lambda m: m.to("cpu", torch.bfloat16),
        "type": lambda m: m.type(torch.bfloat16),
        "inside a model": lambda m: nn.Sequential(m).to(torch.bfloat16)[0],
        "deepcopy": copy.deepcopy,
        "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    }

    @pytest.mark.parametrize("way", WAYS)
    def test_frequencies_stay(self, way: str) -> None:
        rope = learned("two axes, per head")
        wanted = rope.inv_freq.detach().clone()
        rope.inv_freq.grad = torch.randn_like(wanted)
        after = self.WAYS[way](rope)
        assert after.inv_freq.dtype == torch.float32
        assert isinstance(after.inv_freq, nn.Parameter)
        assert torch.equal(after.inv_freq, wanted)
        assert after.inv_freq.grad is None or after.inv_freq.grad.dtype == torch.float32

    def test_what_can_be_asked_for(self) -> None:
        rope = learned("two axes")
        assert rope.double().inv_freq.dtype == torch.float64
        assert rope.float().inv_freq.dtype == torch.float32
        assert rope.to("meta").inv_freq.is_meta
        assert rope.to_empty(device="cpu").inv_freq.shape == (2, 3)

    def test_a_forced_cast_is_an_error(self) -> None:
        rope = learned("two axes")
        rope.load_state_dict({"inv_freq": rope.inv_freq.detach().bfloat16()}, assign=True)
        with pytest.raises(
            RopeError, match=r"inv_freq must be float32 or float64, got torch\.bfloat16\. Something cast and rounded it"
        ):
            rope(PLACES[:2])

    def test_fsdp2_mixed_precision(self, tmp_path: Path) -> None:
        """FSDP casts the parameters that it gathers, which is an error unless the module has its own policy."""
        ((status, output),) = processes.run(Path(__file__).parent / "support" / "learned_fsdp_worker.py", 1, tmp_path)
        assert status == 0, output
        *_, said, after = output.splitlines()
        assert said.startswith("LearnedRope: inv_freq must be float32 or float64, got torch.bfloat16. Something cast")
        assert after == "with a policy of its own: float32"

    def test_state_dict(self) -> None:
        rope, other = learned("two axes, per head"), learned("two axes, per head")
        state = rope.state_dict()
        assert {name: (x.dtype, tuple(x.shape)) for name, x in state.items()} == {
            "inv_freq": (torch.float32, (2, 2, 3))
        }
        other.load_state_dict(state)
        assert torch.equal(other.inv_freq, rope.inv_freq)

    def test_the_frequencies_are_a_copy(self) -> None:
        given = torch.ones(1, 3)
        rope = LearnedRope(given, pairing="half")
        given.zero_()
        assert rope.inv_freq.min() == 1
        assert repr(rope) == "LearnedRope(axes=1, pairs=3, pairing='half')"
        assert "axes=2, heads=2, pairs=3" in repr(learned("two axes, per head"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LearnedRope(torch.ones(3), pairing="half"),
            r"\[axes, pairs\] or \[axes, heads, pairs\], got .*\(3,\)",
        ),
        (lambda: LearnedRope(torch.ones(1, 3).half(), pairing="half"), "inv_freq must be a float32 or float64 tensor"),
        (lambda: LearnedRope([[1.0]], pairing="half"), "inv_freq must be a float32 or float64 tensor"),
        (
            lambda: LearnedRope(torch.ones(2, 0, 3), pairing="half"),
            "must have at least one axis, one head and one pair",
        ),
        (lambda: LearnedRope(torch.ones(1, 3), pairing="neox"), "pairing must be one of"),
        (lambda: LearnedRope(torch.ones(1, 3), pairing="half", head_dim=5), "head_dim must be an integer from 6"),
        (lambda: LearnedRope.from_rope("llama"), "rope must be a Rope"),
        (lambda: LearnedRope.from_rope(Rope(8, 1e4, "half"), heads=0), "heads must be an integer of at least 1"),
        (lambda: LearnedRope.from_rope(Rope(8, 1e4, "half"), dtype=torch.float16), "dtype must be torch.float32"),
        (
            lambda: LearnedRope.from_rope(Rope(8, 1e4, "half", scaling=DynamicNTK(2.0, 64))),
            "the length must be resolved",
        ),
        (lambda: LearnedRope.mixed(6, 2, pairing="half"), "head_dim must be a multiple of 4"),
        (lambda: LearnedRope.mixed(8, 2, pairing="half", base=1.0), "base must be a finite number greater than 1"),
        (lambda: LearnedRope.mixed(8, 0, pairing="half"), "heads must be an integer of at least 1"),
        (lambda: LearnedRope.projected(7, 2, pairing="half"), "head_dim must be even"),
        (lambda: LearnedRope.projected(8, 2, pairing="half", axes=0), "axes must be an integer of at least 1"),
        (lambda: LearnedRope.projected(8, 2.0, pairing="half"), "heads must be an integer of at least 1"),
        (lambda: learned("two axes")([0, 1]), "positions must be an int32, int64, float32 or float64 tensor"),
        (
            lambda: learned("two axes")(PLACES[:2].half()),
            "positions must be an int32, int64, float32 or float64 tensor",
        ),
        (lambda: learned("two axes")(PLACES), r"shape \[2, seq\] or \[2, batch, seq\], got shape \(3, 4\)"),
        (lambda: learned("two axes")(PLACES[0]), r"shape \[2, seq\] or \[2, batch, seq\], got shape \(4,\)"),
        (lambda: learned("one axis")(PLACES[None]), r"shape \[seq\] or \[batch, seq\], got shape \(1, 3, 4\)"),
        (lambda: learned("one axis")(PLACES[0].to("meta")), "positions must be on cpu, where the frequencies are"),
        (lambda: learned("one axis")(PLACES[0], dtype=torch.float16), "dtype must be torch.float32 or torch.float64"),
    ],
)
def test_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(RopeError, match=message):
        make()


class TestResetParameters:
    ROPE = Rope(head_dim=16, base=1e4, pairing="half", axes=Axes.sections((3, 3, 2)))

    def test_of_a_module_made_on_the_meta_device(self) -> None:
        makers: list[Callable[[], LearnedRope]] = [
            lambda: LearnedRope.from_rope(self.ROPE, dtype=torch.float64),
            lambda: LearnedRope.from_rope(self.ROPE, heads=2),
            lambda: LearnedRope.mixed(16, 3, pairing="half", base=20.0),
            lambda: LearnedRope.projected(16, 3, pairing="half"),
        ]
        for maker in makers:
            torch.manual_seed(3)
            wanted = maker()
            with torch.device("meta"):
                made = maker()
            assert made.inv_freq.is_meta
            made.to_empty(device="cpu")
            with torch.no_grad():
                made.inv_freq.fill_(math.nan)
            torch.manual_seed(3)
            copy.deepcopy(pickle.loads(pickle.dumps(made))).reset_parameters()
            torch.manual_seed(3)
            kept = made.inv_freq
            made.reset_parameters()
            assert made.inv_freq is kept
            assert kept.requires_grad
            assert torch.equal(kept, wanted.inv_freq)
            assert list(made.state_dict()) == ["inv_freq"]

    def test_restores_the_frequencies_of_the_rope(self) -> None:
        learned = LearnedRope.from_rope(self.ROPE, dtype=torch.float64)
        with torch.no_grad():
            learned.inv_freq.add_(1.0)
        learned.reset_parameters()
        speeds = [float(w) for w in oracle.inv_freq(1e4, 16)]
        assert learned.inv_freq.sum(0).tolist() == pytest.approx(speeds, rel=1e-15)
        assert torch.equal(learned.inv_freq.argmax(0), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2]))

    def test_of_frequencies_that_were_passed(self) -> None:
        with pytest.raises(
            RopeError, match=r"reset_parameters: the module must be created by from_rope, mixed or projected"
        ):
            learned("one axis").reset_parameters()
