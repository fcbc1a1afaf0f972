"""`explain` and `facts`, compared with numbers that are computed here."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

import oracle
from ropewalk import Axes, LongRoPE, ModelRopes, Proportional, Rope, RopeError, YaRN, from_config
from ropewalk.configs import QueryScale
from ropewalk.configs.explain import ranges
from ropewalk.schemes import Linear

LLAMA31 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}


def facts(length: int | None = None) -> dict[str, Any]:
    (group,) = from_config(LLAMA31).facts(length)["ropes"]
    assert group["layers"] == list(range(32))
    return group["rope"]


def test_facts_of_llama_31() -> None:
    explanation = facts()
    exact = np.array(oracle.by_parts(5e5, 128, 8, 1, 4, 8192), float)
    np.testing.assert_allclose(explanation["inv_freq"], exact, rtol=1e-14)
    np.testing.assert_allclose(explanation["wavelength"], 2 * math.pi / exact, rtol=1e-14)
    slowed = np.array(oracle.inv_freq(5e5, 128), float) / exact
    np.testing.assert_allclose(explanation["slowed_by"], slowed, rtol=1e-14)
    assert (
        explanation["full_turns_when_trained"]
        == (2 * math.pi / np.array(oracle.inv_freq(5e5, 128), float) <= 8192).sum()
    )
    assert explanation["full_turns_at_length"] is None
    assert facts(100_000)["full_turns_at_length"] == (2 * math.pi / exact <= 100_000).sum()


def test_facts_are_json() -> None:
    explanation = from_config(LLAMA31).facts(4096)
    assert json.loads(json.dumps(explanation, allow_nan=False)) == explanation


def test_text_of_llama_31() -> None:
    explanation = from_config(LLAMA31).explain()
    for line in (
        "config (model_type llama)",
        "layers 0-31 of 32",
        "llama3: factor 8.0, low_freq_factor 1.0, high_freq_factor 4.0, original_max_position_embeddings 8192",
        "half: channel i rotates with i + 64",
        "channels          0 to 127 of 128 rotate, in 64 pairs",
        "6.28 to 20,473,564 tokens for a full turn",
        # by the formula of Llama 3.1, 29 pairs are not slowed, 6 are slowed by these factors, and 29 by 8
        "pairs 0-28 are not slowed; pairs 29-34 by a factor of 1.207 to 5.257; pairs 35-63 by a factor of 8",
        "8,192 tokens; 35 of 64 pairs complete a turn within it",
        f"{'base':<32}  rope_theta",
        f"{'head_dim':<32}  hidden_size / num_attention_heads",
        f"{'scaling':<32}  rope_scaling.rope_type",
    ):
        assert line in explanation
    assert "warnings" not in explanation
    assert "at length" not in explanation


@pytest.mark.parametrize(
    ("length", "words"),
    [
        (8192, "within the trained length"),
        (60_000, "; after scaling, no pair reaches an angle beyond those of training"),
        (
            80_000,
            "; after scaling, pairs 35-63 reach angles that are new unless training went on with this scaling",
        ),  # these pairs are slowed by 8, so no angle is new up to 65,536 tokens
    ],
)
def test_length(length: int, words: str) -> None:
    assert words in from_config(LLAMA31).explain(length)


def test_length_without_a_trained_length() -> None:
    ropes = ModelRopes(layers=(Rope(8, 1e4, "half"),), model_type="test", source="here")
    assert "at length         100 tokens; 2 of 4 pairs complete a turn within it\n" in ropes.explain(100)


@pytest.mark.parametrize("length", [0, -5, 1.5, True])
def test_length_must_be_one(length: Any) -> None:
    with pytest.raises(RopeError, match="explain: length must be an integer of at least 1"):
        from_config(LLAMA31).explain(length)


def test_layers_that_differ_are_listed_separately() -> None:
    local, far = Rope(8, 1e4, "interleaved"), Rope(16, 1e6, "half", rotary_dim=4, rotary_offset=8, scaling=Linear(8))
    explanation = ModelRopes(layers=(local, far, local, None), model_type="test", source="here").explain()
    for line in (
        "layers 0, 2 of 4",
        "channel 2i rotates with 2i + 1 (GPT-J, Meta's Llama)",
        "layers 1 of 4",
        "channels          8 to 11 of 16 rotate, in 2 pairs",
        "pairs 0-1 by a factor of 8",
        "layers 3 of 4\n  no rotation",
    ):
        assert line in explanation


def test_pairs_that_do_not_rotate_are_not_said_to() -> None:
    rope = Rope(512, 1e6, "half", scaling=Proportional(0.25))
    explanation = ModelRopes(layers=(rope,), model_type="test", source="here").explain()
    assert "channels          0 to 511 of 512 form 256 pairs, of which 64 rotate\n" in explanation


def test_axes_in_words() -> None:
    """Linear scaling slows pairs of each axis, and the frequencies may start again for each axis."""
    axes = Axes.axial((4, 8))
    ropes = ModelRopes((Rope(12, 1e4, "half", scaling=Linear(2), axes=axes),), "test", "here", axis_names=("h", "w"))
    explanation = ropes.facts()
    assert explanation["axis_names"] == ["h", "w"]
    assert explanation["ropes"][0]["rope"]["axes"]["axis"] == [0, 0, 1, 1, 1, 1]
    assert explanation["ropes"][0]["rope"]["slowed_by"] == [2.0] * 6
    assert "axes              2 positions for each token; h: pairs 0-1; w: pairs 2-5\n" in ropes.explain()
    for axes, words in (
        (
            Axes.interleaved((24, 20, 20)),
            "0: every third pair from 0 to 60, and 61-63; 1: every third pair from 1 to 58; 2: every third pair from 2",
        ),
        (Axes.sections((1, 0, 7)), "0: pair 0; 1: no pair; 2: pairs 1-7"),
        (Axes([0, 1, 0, 1, 0, 0]), "0: pairs 0, 2, 4-5; 1: pairs 1, 3"),
        (Axes([0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0]), "0: every 5th pair from 0 to 15; 1: pairs 1-4, 6-9"),
        (Axes.alternating((8, 8)), "0: every second pair from 0 to 6; 1: every second pair from 1 to 7"),
    ):
        said_of = ModelRopes((Rope(2 * axes.pairs, 1e4, "half", axes=axes),), "test", "here").explain()
        assert f"positions for each token; {words}" in said_of


def test_attention_factor_in_words() -> None:
    rope = Rope(8, 1e4, "half", scaling=YaRN(16, 64))
    explanation = ModelRopes(layers=(rope,), model_type="test", source="here").explain()
    assert "1.27726 multiplies cos and sin, so attention scores are multiplied by 1.63139" in explanation


def test_ranges() -> None:
    assert ranges([]) == ""
    assert ranges([5]) == "5"
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_what_the_architecture_does_in_addition() -> None:
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1, "mscale_all_dim": 1}
    sizes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 128, "num_hidden_layers": 2}
    ropes = from_config({"model_type": "deepseek_v32", "rope_theta": 1e4, "rope_scaling": yarn, **sizes})
    explanation = ropes.explain()
    for line in (
        "channels          128 to 191 of 192 rotate, in 32 pairs",
        "a second rope in each layer: indexer",
        "channels          0 to 63 of 128 rotate, in 32 pairs",
        "the softmax scale of the attention is multiplied by 1.87385",
        "pairs are read interleaved and written in half order; scores are the same",
    ):
        assert line in explanation
    facts = ropes.facts()
    assert facts["others"]["indexer"]["pairing"] == "half"
    assert facts["softmax_factor"] == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    assert facts["output_order"] == "half"


def test_query_scales_in_words() -> None:
    def explanation(**scale: Any) -> str:
        rope = Rope(8, 1e4, "half")
        return ModelRopes((rope,), "test", "here", query_scale=QueryScale(**scale)).explain()

    assert "q is multiplied by 0.125\n" in explanation(constant=0.125)
    assert "q and k are multiplied by 0.125\n" in explanation(constant=0.125, scales_keys=True)
    growing = explanation(beta=0.1, original_max_position_embeddings=8192)
    assert "q is multiplied by 1 + 0.1 ln(1 + floor(position / 8192))\n" in growing
    unrotated = explanation(power=0.1, offset=1, original_max_position_embeddings=2048, only_unrotated=True)
    assert "q is multiplied by (1 + (position + 1) / 2048)^0.1 in layers without rotation\n" in unrotated


def test_frequencies_that_depend_on_the_length() -> None:
    scheme = LongRoPE([1.0, 1.5], [2.0, 4.0], 64, factor=4.0)
    ropes = ModelRopes((Rope(4, 1e4, "half", scaling=scheme),), "test", "here", trained_length=64)
    assert "longrope: short_factor 1 … 1.5 (2), long_factor 2 … 4 (2)" in ropes.explain()
    assert "depends on length  these are the frequencies at 64 tokens" in ropes.explain()
    assert "pair 0 by a factor of 2; pair 1 by a factor of 4" in ropes.explain(65)
    json.dumps(ropes.facts(), allow_nan=False)


def test_idle_pairs() -> None:
    ropes = ModelRopes((Rope(8, 1e4, "half", scaling=Proportional(0.5)),), "test", "here", trained_length=700)
    assert "2 of 4 pairs complete a turn within it before scaling" in ropes.explain()
    assert "pairs 0-1 are not slowed; pairs 2-3 do not rotate" in ropes.explain()
    assert ropes.facts()["ropes"][0]["rope"]["wavelength"][2:] == [None, None]
    ropes.explain(1000)


def test_no_pair_rotates() -> None:
    """The factor is so large that every wavelength overflows a float."""
    scaling = {"type": "linear", "factor": 1e308}
    config = {"model_type": "llama", "head_dim": 8, "num_hidden_layers": 1, "rope_theta": 1e4, "rope_scaling": scaling}
    assert "no pair rotates" in from_config(config).explain()


def test_several_axes() -> None:
    rope = Rope(16, 1e4, "half", axes=Axes.axial((4, 12), order=(1, 0)), scaling=Linear(2.0))
    ropes = ModelRopes((rope,), "test", "here")
    assert "axes              2 positions for each token; 0: pairs 2-7; 1: pairs 0-1" in ropes.explain()
    assert "pairs 0-7 by a factor of 2" in ropes.explain()
    explanation = ropes.facts()["ropes"][0]["rope"]["axes"]
    assert json.loads(json.dumps(explanation)) == {
        "count": 2,
        "pattern": "Axes.axial((4, 12), order=(1, 0))",
        "axis": [1, 1, 0, 0, 0, 0, 0, 0],
        "freq_index": [0, 1, 0, 1, 2, 3, 4, 5],
    }
    assert facts()["axes"] is None
    assert "positions for each token" not in from_config(LLAMA31).explain()
