"""Each scheme, compared with its formula in mpmath. Released models are in tests/test_golden.py."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
from ropewalk import Llama3, RopeError, YaRN
from ropewalk.schemes import SCHEMES, Linear, Scheme


def assert_frequencies(scheme: Scheme, base: float, rotary_dim: int, expected: list[Any]) -> None:
    np.testing.assert_allclose(scheme.inv_freq(base, rotary_dim), np.array(expected, float), rtol=1e-14)


@given(st.floats(1, 1e4), st.floats(100, 1e8), st.integers(1, 96))
def test_linear(factor: float, base: float, pairs: int) -> None:
    assert_frequencies(Linear(factor), base, 2 * pairs, oracle.linear(base, 2 * pairs, factor))


@pytest.mark.parametrize("base", [1e4, 5e5, 1e6])
@pytest.mark.parametrize(("factor", "low", "high", "length"), [(8, 1, 4, 8192), (32, 1, 4, 8192), (16, 1, 1, 8192)])
def test_llama3_is_ntk_by_parts(base: float, factor: float, low: float, high: float, length: int) -> None:
    scheme = Llama3(factor, low, high, length)
    assert_frequencies(scheme, base, 128, oracle.by_parts(base, 128, factor, low, high, length))
    assert scheme.compute_attention_factor() == 1.0


def test_llama3_with_a_pair_exactly_on_the_edge() -> None:
    """A pair that completes exactly one turn is divided by the factor, without a division by zero."""
    length = 8192
    w = 2 * math.pi / length
    turns = length * w / (2 * math.pi)
    assert turns == 1.0
    assert Llama3(16, 1, 1, length)._scale_frequency(w) == w / 16


YARN = [
    (1e4, 128, YaRN(16, 4096)),
    (1e6, 128, YaRN(4, 32_768)),
    (150_000, 64, YaRN(32, 4096, truncate=False)),
    (50_000, 64, YaRN(32, 4096, beta_fast=1, beta_slow=1)),
    (50_000, 64, YaRN(32, 4096, beta_fast=1, beta_slow=1, truncate=False)),  # no ramp, but a step
    (1e4, 128, YaRN(10, 2048, beta_fast=24.5, beta_slow=2)),
    (1e4, 8, YaRN(4, 64)),  # low below 0
    (100, 8, YaRN(4, 200_000)),  # high beyond rotary_dim - 1
    (1e8, 128, YaRN(48, 8192)),
]


@pytest.mark.parametrize(("base", "rotary_dim", "scheme"), YARN)
def test_yarn(base: float, rotary_dim: int, scheme: YaRN) -> None:
    expected = oracle.yarn(
        base,
        rotary_dim,
        scheme.factor,
        scheme.original_max_position_embeddings,
        scheme.beta_fast,
        scheme.beta_slow,
        scheme.truncate,
    )
    assert_frequencies(scheme, base, rotary_dim, expected)


@pytest.mark.parametrize(
    ("given_", "factor"),
    [
        # transformers 5.23 run with factor 32.
        ({}, 1.34657),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        ({"mscale": 1.0}, 1.34657),
        ({"mscale": 1.0, "mscale_all_dim": 0}, 1.34657),
        ({"mscale_all_dim": 1.0}, 1.34657),
        ({"attention_factor": 1.0}, 1.0),
        ({"attention_factor": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5}, 0.5),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, 1.34657 / 1.173287),
    ],
)
def test_yarn_attention_factor(given_: dict[str, float], factor: float) -> None:
    assert YaRN(32, 4096, **given_).compute_attention_factor() == pytest.approx(factor, abs=5e-6)


@pytest.mark.parametrize(
    ("scheme", "changes", "message"),
    [
        (Linear, {"factor": 0.5}, "Linear: factor must be a finite number of at least 1, got 0.5"),
        (Linear, {"factor": math.nan}, "factor must be a finite number"),
        (Linear, {"factor": True}, "factor must be a finite number"),
        (Llama3, {"factor": 0}, "Llama3: factor must be"),
        (Llama3, {"low_freq_factor": 0}, "low_freq_factor must be a finite number greater than 0"),
        (
            Llama3,
            {"low_freq_factor": 5},
            "high_freq_factor must be a finite number of at least 5, got 4. It must not be",
        ),
        (Llama3, {"original_max_position_embeddings": 0}, "original_max_position_embeddings must be an integer"),
        (Llama3, {"original_max_position_embeddings": 8192.5}, "original_max_position_embeddings must be an integer"),
        (YaRN, {"factor": -4}, "YaRN: factor must be"),
        (
            YaRN,
            {"beta_slow": 33},
            "beta_fast must be a finite number of at least 33 and at most 1e+06, got 32.0. It must not be less",
        ),
        (YaRN, {"beta_slow": 0}, "beta_slow must be a finite number of at least 1e-06"),
        (YaRN, {"beta_fast": 1e300}, "beta_fast must be a finite number of at least 1 and at most 1e+06"),
        (
            YaRN,
            {"original_max_position_embeddings": 10**400},
            "original_max_position_embeddings must be a number of tokens, got more than 2**53",
        ),
        (YaRN, {"truncate": 0}, "truncate must be True or False, got 0"),
        (YaRN, {"truncate": "false"}, "truncate must be True or False"),
        (YaRN, {"attention_factor": 0}, "attention_factor must be a finite number greater than 0"),
        (YaRN, {"mscale": -1}, "mscale must be a finite number of at least 0"),
        (YaRN, {"mscale_all_dim": math.inf}, "mscale_all_dim must be a finite number"),
        (YaRN, {"original_max_position_embeddings": "4096"}, "original_max_position_embeddings must be an integer"),
    ],
)
def test_impossible_values(scheme: type[Scheme], changes: dict[str, Any], message: str) -> None:
    fine = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
    names = {f.name for f in dataclasses.fields(scheme)}  # type: ignore[arg-type]
    with pytest.raises(RopeError) as raised:
        scheme(**{k: v for k, v in {**fine, **changes}.items() if k in names})
    assert message in str(raised.value)


def test_schemes_are_values() -> None:
    assert YaRN(16, 4096) == YaRN(16.0, 4096, beta_fast=32) != YaRN(16, 4096, truncate=False)
    assert hash(Linear(2)) == hash(Linear(2.0))
    assert repr(Linear(2)) == "Linear(factor=2.0)"


def test_every_scheme_is_found_by_its_rope_type() -> None:
    names = "dynamic linear llama3 longrope proportional telechat3-yarn yarn"
    assert {name: scheme.rope_type for name, scheme in SCHEMES.items()} == {n: n for n in names.split()}
