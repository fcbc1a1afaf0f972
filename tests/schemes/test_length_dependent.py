"""Dynamic NTK and LongRoPE: an error without a length, and the formula with one."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from ropewalk import NTK, DynamicNTK, LongRoPE, Proportional, Rope, RopeError, RotaryEmbedding
from ropewalk.schemes import PerPair

SHORT, LONG = [1.0, 1.5, 2.0, 2.5], [1.0, 4.0, 9.5, 32.0]


def longrope(**changes: Any) -> LongRoPE:
    return LongRoPE(
        **{
            "short_factor": SHORT,
            "long_factor": LONG,
            "original_max_position_embeddings": 4096,
            "factor": 32.0,
            **changes,
        }
    )


UNRESOLVED = [Rope(8, 1e4, "half", scaling=DynamicNTK(2.0, 4096)), Rope(8, 1e4, "half", scaling=longrope())]


@pytest.mark.parametrize("rope", UNRESOLVED, ids=repr)
class TestUnresolved:
    @pytest.mark.parametrize(
        "use",
        [
            lambda rope: rope.inv_freq,
            lambda rope: rope.wavelength,
            lambda rope: rope.attention_factor,
            lambda rope: rope.at(torch.arange(3)),
            lambda rope: rope.shift(3),
            lambda rope: RotaryEmbedding(rope, layout="thd")(torch.ones(3, 1, 8), None, torch.arange(3)),
        ],
    )
    def test_the_message_names_the_fix(self, rope: Rope, use: Any) -> None:
        with pytest.raises(RopeError, match=r"Call rope\.at_length\(n\) once"):
            use(rope)

    def test_it_is_an_ordinary_value(self, rope: Rope) -> None:
        assert not rope.is_static
        assert pickle.loads(pickle.dumps(rope)) == rope
        assert len({rope, rope.at_length(100), rope.at_length(100)}) == 2

    def test_a_resolved_rope_stays_resolved(self, rope: Rope) -> None:
        static = rope.at_length(8192)
        assert static.is_static
        assert static.at_length(10**6) is static
        assert rope.at_length(8192) == static  # and the first rope is unchanged


@given(st.floats(1, 64), st.integers(1, 2**20), st.sampled_from([1e4, 5e5]), st.integers(2, 64))
def test_dynamic_ntk(factor: float, n: int, base: float, pairs: int) -> None:
    trained = 4096
    rope = Rope(2 * pairs, base, "half", scaling=DynamicNTK(factor, trained)).at_length(n)
    alpha = factor * max(n, trained) / trained - (factor - 1)
    np.testing.assert_allclose(rope.inv_freq, np.array(oracle.ntk(base, 2 * pairs, alpha), float), rtol=1e-12)
    assert rope.attention_factor == 1.0


def test_dynamic_ntk_starts_after_the_trained_length() -> None:
    rope = Rope(8, 1e4, "half", scaling=DynamicNTK(2.0, 4096))
    assert rope.at_length(4096) == Rope(8, 1e4, "half")
    assert rope.at_length(4097).inv_freq[1] < rope.at_length(4096).inv_freq[1]


def test_dynamic_with_factor_one_still_scales() -> None:
    assert Rope(8, 1e4, "half", scaling=DynamicNTK(1.0, 4096)).at_length(8192).scaling == NTK(2.0)


@given(st.floats(1, 1e4), st.sampled_from([100.0, 1e4, 1e6]), st.integers(2, 64))
def test_ntk(alpha: float, base: float, pairs: int) -> None:
    computed = NTK(alpha).inv_freq(base, 2 * pairs)
    np.testing.assert_allclose(computed, np.array(oracle.ntk(base, 2 * pairs, alpha), float), rtol=1e-12)
    assert computed[0] == 1.0
    assert computed[-1] == pytest.approx(base ** (-(2 * pairs - 2) / (2 * pairs)) / alpha)


def test_ntk_of_a_single_pair() -> None:
    with pytest.raises(RopeError, match="NTK: rotary_dim must be at least 4"):
        Rope(2, 1e4, "half", scaling=NTK(2.0))


@pytest.mark.parametrize(("n", "factors"), [(1, SHORT), (4096, SHORT), (4097, LONG), (10**6, LONG)])
def test_longrope_switches_after_the_trained_length(n: int, factors: list[float]) -> None:
    rope = Rope(8, 1e4, "half", scaling=longrope()).at_length(n)
    np.testing.assert_allclose(rope.inv_freq, np.array(oracle.inv_freq(1e4, 8), float) / factors, rtol=1e-14)
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert rope.attention_factor == pytest.approx(1.190238, abs=1e-6)  # Phi-3


@pytest.mark.parametrize(
    ("changes", "short", "long"),
    [
        ({"factor": 1.0}, 1.0, 1.0),
        ({"attention_factor": 1.5}, 1.5, 1.5),
        ({"factor": None, "attention_factor": 1.5}, 1.5, 1.5),
        ({"short_mscale": 1.1, "long_mscale": 1.3}, 1.1, 1.3),
        ({"short_mscale": 1.1, "long_mscale": 1.3, "attention_factor": 1.5}, 1.1, 1.3),
    ],
)
def test_longrope_attention_factor(changes: dict[str, Any], short: float, long: float) -> None:
    rope = Rope(8, 1e4, "half", scaling=longrope(**changes))
    assert rope.at_length(4096).attention_factor == short
    assert rope.at_length(4097).attention_factor == long


@pytest.mark.parametrize("share", [0.25, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_proportional(share: float, factor: float) -> None:
    rope = Rope(64, 1e6, "half", scaling=Proportional(share, factor))
    np.testing.assert_allclose(rope.inv_freq, np.array(oracle.proportional(1e6, 64, share, factor), float), rtol=1e-14)
    assert (rope.wavelength == np.inf).sum() == 32 - int(share * 32)
    q = torch.randn(1, 2, 64)
    rotated = rope.at(torch.tensor([1000]))(q, layout="thd")
    idle = torch.from_numpy(rope.inv_freq == 0)
    assert torch.equal(rotated[..., :32][..., idle], q[..., :32][..., idle])
    assert torch.equal(rotated[..., 32:][..., idle], q[..., 32:][..., idle])


def test_proportional_is_not_partial() -> None:
    partial = Rope(64, 1e6, "half", rotary_dim=16)
    assert Rope(64, 1e6, "half", scaling=Proportional(0.25)).inv_freq[1] != partial.inv_freq[1]


def test_per_pair() -> None:
    rope = Rope(8, 1e4, "half", scaling=PerPair([1, 2, 4, math.inf], attention_factor=1.2))
    np.testing.assert_allclose(rope.inv_freq, [1.0, 0.05, 0.0025, 0.0])
    assert rope.attention_factor == 1.2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DynamicNTK(0.5, 4096), "DynamicNTK: factor must be a finite number of at least 1"),
        (lambda: DynamicNTK(2, 0), "max_position_embeddings must be an integer of at least 1"),
        (lambda: NTK(0), "NTK: alpha must be a finite number of at least 1, got 0"),
        (lambda: longrope(short_factor=1.0), "short_factor must be a list of numbers, one for each pair, got 1.0"),
        (lambda: longrope(long_factor=[]), "long_factor must be a list of numbers"),
        (lambda: longrope(long_factor=[1.0] * 10**6), "long_factor must be a list of numbers"),
        (
            lambda: longrope(long_factor=[1, 2, "3", 4]),
            "long_factor[2] must be a finite number greater than 0, got '3'",
        ),
        (lambda: longrope(short_factor=[1, 0, 1, 1]), "short_factor[1] must be a finite number greater than 0, got 0"),
        (lambda: longrope(short_factor=[1, math.inf, 1, 1]), "short_factor[1] must be a finite number"),
        (lambda: longrope(original_max_position_embeddings=1), "original_max_position_embeddings must be an integer"),
        (lambda: longrope(factor=0.9), "LongRoPE: factor must be a finite number of at least 1"),
        (lambda: longrope(factor=None), "factor, attention_factor or both mscales must be given"),
        (lambda: longrope(attention_factor=-1), "attention_factor must be a finite number greater than 0"),
        (lambda: longrope(long_mscale=1.2), "short_mscale and long_mscale must be given together, got None and 1.2"),
        (lambda: Rope(16, 1e4, "half", scaling=longrope()), "LongRoPE: short_factor must have 8 numbers, one for each"),
        (lambda: Rope(8, 1e4, "half", scaling=longrope(long_factor=[1.0])), "long_factor must have 4 numbers"),
        (lambda: Proportional(0), "partial_rotary_factor must be a finite number greater than 0"),
        (lambda: Proportional(1.5), "partial_rotary_factor must be at most 1, got 1.5"),
        (lambda: Proportional(0.5, factor=0), "factor must be a finite number of at least 1"),
        (lambda: Rope(8, 1e4, "half", scaling=Proportional(0.1)), "at least one pair of rotary_dim=8 must rotate"),
        (lambda: PerPair([1, -2]), "PerPair: factors[1] must be a finite number greater than 0"),
        (lambda: Rope(8, 1e4, "half", scaling=PerPair([1.0])), "PerPair: factors must have 4 numbers"),
        (lambda: PerPair([1.0], attention_factor=0), "attention_factor must be a finite number greater than 0"),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(RopeError) as raised:
        make()
    assert message in str(raised.value)
    assert len(str(raised.value)) < 400


def test_lists_become_tuples() -> None:
    assert longrope().short_factor == tuple(SHORT)
    assert hash(longrope()) == hash(longrope(short_factor=tuple(SHORT)))


GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "lengths.json").read_text())


@pytest.mark.parametrize("row", [pytest.param(r, id=f"{r['model']} {r['length']}") for r in GOLDEN["rows"]])
def test_released_models(row: dict[str, Any]) -> None:
    """transformers 5.23 at the lengths where its frequencies change.

    Its float32 arithmetic alone is 3.0e-7 from the exact frequency of Phi-3.5's pair 38.
    """
    given_ = dict(row["rope_parameters"])
    scheme = {"dynamic": DynamicNTK, "longrope": LongRoPE}[given_.pop("rope_type")]
    base = given_.pop("rope_theta")
    rope = Rope(row["rotary_dim"], base, "half", scaling=scheme(**given_)).at_length(row["length"])
    np.testing.assert_allclose(rope.inv_freq, row["inv_freq"], rtol=3.1e-7)
    assert rope.attention_factor == pytest.approx(row["attention_scaling"], rel=1e-7)
