"""Extreme numbers in every scheme give finite frequencies or a RopeError."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ropewalk import Rope, RopeError, from_config
from ropewalk.schemes import (
    NTK,
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    PerPair,
    Proportional,
    RIFLEx,
    Scheme,
    TeleChat3,
    YaRN,
)

EXTREMES = (5e-324, 1e-320, 1e-308, 1e-300, 0.5, 1.0, 2.0, 1e100, 1e300, 1e308, 1.7976931348623157e308)
BASES = (1.0000000000000002, 1e4, 1.7e308)
LENGTHS = (1, 2, 4096, 2**53)
DIM = 16

SCHEMES: dict[str, Callable[[float, float, int], Scheme]] = {
    "linear": lambda a, b, n: Linear(a),
    "ntk": lambda a, b, n: NTK(a),
    "proportional": lambda a, b, n: Proportional(1.0, a),
    "per pair": lambda a, b, n: PerPair([a, *[b] * (DIM // 2 - 1)], attention_factor=b),  # type: ignore[arg-type]
    "dynamic": lambda a, b, n: DynamicNTK(a, n),
    "longrope": lambda a, b, n: LongRoPE((a,) * (DIM // 2), (b,) * (DIM // 2), n, factor=max(a, 1.0)),
    "llama3": lambda a, b, n: Llama3(a, b, max(a, b), n),
    "yarn": lambda a, b, n: YaRN(a, n, mscale=a, mscale_all_dim=b),
    "riflex": lambda a, b, n: RIFLEx(3, n, turns=a),
    "telechat3": lambda a, b, n: TeleChat3(a, n),
    "yarn: ramp": lambda a, b, n: YaRN(4.0, n, beta_fast=a, beta_slow=b),
}


def check(rope: Rope) -> None:
    for resolved in [rope] if rope.is_static else [rope.at_length(n) for n in (1, 5000, 2**53)]:
        assert all(math.isfinite(w) and w >= 0 for w in resolved.inv_freq)
        assert 2.0**-63 <= resolved.attention_factor <= 2.0**63  # so that float32 tables and their inverse are finite
        assert len(resolved.wavelength) == DIM // 2


def outcomes(uses: Iterator[Callable[[], None]]) -> set[str]:
    found = set()
    for use in uses:
        try:
            use()
            found.add("value")
        except RopeError:
            found.add("refused")
    return found


@pytest.mark.parametrize("name", SCHEMES)
def test_schemes(name: str) -> None:
    def use(base: float, a: float, b: float, n: int) -> None:
        check(Rope(DIM, base, "half", scaling=SCHEMES[name](a, b, n)))

    cases = itertools.product(BASES, EXTREMES, (5e-324, 1.0, 2.0, 1e308), LENGTHS)
    assert outcomes((lambda c=c: use(*c)) for c in cases) == {"value", "refused"}


CONFIGS: dict[str, Callable[[float], dict[str, Any]]] = {
    "linear": lambda a: {"factor": a},
    "dynamic": lambda a: {"factor": a},
    "dynamic: alpha": lambda a: {"alpha": a},
    "llama3": lambda a: {"factor": a, "low_freq_factor": 1, "high_freq_factor": 4,
                         "original_max_position_embeddings": 64},
    "longrope: short": lambda a: {"short_factor": [a] * 8, "long_factor": [1] * 8, "factor": 1.0,
                                  "original_max_position_embeddings": 64},
    "longrope: long": lambda a: {"short_factor": [1] * 8, "long_factor": [a] * 8, "factor": 2.0,
                                 "original_max_position_embeddings": 64},
    "yarn": lambda a: {"factor": a, "original_max_position_embeddings": 64},
    "yarn: mscale": lambda a: {"factor": 1e308, "mscale": a, "mscale_all_dim": 1,
                               "original_max_position_embeddings": 64},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name: str) -> None:
    def use(base: float, a: float) -> None:
        scaling = {"rope_type": name.split(":")[0], **CONFIGS[name](a)}
        config = {"model_type": "llama", "head_dim": DIM, "num_hidden_layers": 1, "max_position_embeddings": 4096}
        ropes = from_config({**config, "rope_theta": base, "rope_scaling": scaling})
        for length in (None, 1, 2**53):
            json.dumps(ropes.facts(length), allow_nan=False)
            ropes.explain(length)

    assert outcomes((lambda c=c: use(*c)) for c in itertools.product(BASES, EXTREMES)) == {"value", "refused"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rope(8, 1e4, "half", scaling=NTK(1e308)), r"NTK: base · alpha\^\(8/6\) must be a finite float64, got"),
        (lambda: Rope(8, 1e308, "half", scaling=NTK(1e4)), r"NTK: base · alpha\^\(8/6\) must be a finite float64, got"),
        (lambda: DynamicNTK(1e308, 1).at_length(2**53), "DynamicNTK: factor times the length must be finite, got"),
        (lambda: PerPair([1e-320]), r"PerPair: factors\[0\] must be at least 1e-300, .* got 1e-320"),
        (lambda: LongRoPE([1e-320], [1.0], 64, factor=2), r"LongRoPE: short_factor\[0\] must be at least 1e-300"),
        (lambda: YaRN(1e308, 64, mscale=1e308, mscale_all_dim=1.0), "YaRN: the attention factor must be finite and"),
        (lambda: YaRN(1e308, 64, mscale=1.0, mscale_all_dim=1e308), "YaRN: the attention factor must be finite and"),
    ],
)
def test_messages(make: Callable[[], object], message: str) -> None:
    with pytest.raises(RopeError, match=message):
        make()
