"""`from_config` with Hugging Face configs: the ropes that it returns, and all its errors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ropewalk import Llama3, ModelRopes, Rope, RopeError, YaRN, from_config
from ropewalk.schemes import Linear

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


def config(**changes: Any) -> dict[str, Any]:
    """Return the config of a small Llama with 2 layers. A value of ... removes the key."""
    values = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "max_position_embeddings": 4096,
        "rope_theta": 500000.0,
        **changes,
    }
    return {key: value for key, value in values.items() if value is not ...}


def v4(rope_type: str = "rope_type", **scaling: Any) -> dict[str, Any]:
    name = scaling.pop("name")
    return config(rope_scaling={rope_type: name, **scaling})


def v5(name: str, **scaling: Any) -> dict[str, Any]:
    return config(rope_theta=..., rope_parameters={"rope_type": name, "rope_theta": 500000.0, **scaling})


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "olmo2"])
def test_llama_like(model_type: str) -> None:
    ropes = from_config(config(model_type=model_type, head_dim=16))
    assert ropes.rope == Rope(16, 500000.0, "half")
    assert ropes.layers == (ropes.rope, ropes.rope)


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2", "seed_oss"])
def test_a_required_head_dim_is_never_guessed(model_type: str) -> None:
    with pytest.raises(
        RopeError, match=r"head_dim must be given, got none\. Add it: in .* it is not hidden_size / num_att"
    ):
        from_config(config(model_type=model_type))


@pytest.mark.parametrize(
    "values",
    [
        config(),
        config(rope_scaling=None, rope_parameters=None),
        config(rope_scaling={}),
        config(rope_scaling={"rope_type": "default"}),
        v5("default"),
        config(rope_theta=..., rope_parameters={"rope_theta": 500000.0}),
        config(rope_parameters={"rope_theta": 500000, "rope_type": "default"}),  # two keys with the same value
        config(partial_rotary_factor=1.0),
        config(rope_interleaved=False),  # SmolLM2
        config(head_dim=None),
        config(original_max_position_embeddings=4096),  # the scheme does not read this length
    ],
)
def test_no_scaling(values: dict[str, Any]) -> None:
    assert from_config(values).rope == Rope(16, 500000.0, "half")


@pytest.mark.parametrize(
    ("name", "given_", "scheme"),
    [
        ("linear", {"factor": 4}, Linear(4.0)),
        ("llama3", LLAMA3, Llama3(**LLAMA3)),
        ("yarn", YARN, YaRN(**YARN)),
        ("yarn", {**YARN, "truncate": False, "beta_fast": 24, "beta_slow": 2}, YaRN(**YARN, truncate=False, beta_fast=24, beta_slow=2)),
        ("yarn", {**YARN, "attention_factor": 1.5, "mscale": None}, YaRN(**YARN, attention_factor=1.5)),
        ("yarn", {**YARN, "mscale": 1, "mscale_all_dim": 0.5}, YaRN(**YARN, mscale=1, mscale_all_dim=0.5)),
    ],
)  # fmt: skip
def test_schemes_in_both_schemas(name: str, given_: dict[str, Any], scheme: Any) -> None:
    wanted = Rope(16, 500000.0, "half", scaling=scheme)
    assert from_config(v4("rope_type", name=name, **given_)).rope == wanted
    assert from_config(v4("type", name=name, **given_)).rope == wanted
    assert from_config(v5(name, **given_)).rope == wanted
    both = v4("type", name=name, **given_)
    both["rope_scaling"]["rope_type"] = name
    both["rope_parameters"] = dict(both["rope_scaling"])
    assert from_config(both).rope == wanted


@pytest.mark.parametrize(
    ("scaling", "trained"),
    [
        (None, 4096),
        ({"type": "yarn", **YARN}, 32768),
        ({"type": "llama3", **LLAMA3}, 8192),
        ({"type": "linear", "factor": 4.0}, None),
        ({"type": "dynamic", "factor": 4.0}, 4096),
    ],
)
def test_trained_length(scaling: dict[str, Any] | None, trained: int | None) -> None:
    assert from_config(config(rope_scaling=scaling)).trained_length == trained


def test_a_stated_head_dim_precedes_the_quotient() -> None:
    ropes = from_config(
        config(head_dim=128, hidden_size=5120, num_attention_heads=32)
    )  # Mistral NeMo: 5120 / 32 is 160
    assert ropes.rope.head_dim == 128
    assert ropes.origins["head_dim"] == "head_dim"
    assert from_config(config()).origins["head_dim"] == "hidden_size / num_attention_heads"


def test_head_dim_alone_is_enough() -> None:
    assert from_config(config(head_dim=32, hidden_size=..., num_attention_heads=...)).rope.head_dim == 32


def test_base_of_the_first_llamas() -> None:
    """Files of Llama 2, Vicuna and Yarn-Llama state no base. It is 10000, and a warning says so."""
    ropes = from_config(config(rope_theta=..., rope_scaling={"type": "linear", "factor": 4.0}))
    assert ropes.rope.base == 10_000.0
    assert "implied by model_type llama" in ropes.origins["base"]
    assert any("has no rope_theta" in warning for warning in ropes.warnings)


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_a_missing_base_is_never_guessed(model_type: str) -> None:
    with pytest.raises(
        RopeError, match=r"rope_theta must be given, since it is the base, got none\. Add rope_theta, or pass base="
    ):
        from_config(config(model_type=model_type, head_dim=16, rope_theta=...))
    ropes = from_config(config(model_type=model_type, head_dim=16, rope_theta=...), base=1e6)
    assert ropes.rope.base == 1e6
    assert ropes.origins["base"] == "passed by the caller"


def test_a_base_lost_from_rope_parameters() -> None:
    """transformers 5 always writes rope_theta there, so another program must have removed it."""
    with pytest.raises(RopeError, match="rope_theta must be given, since it is the base"):
        from_config(config(rope_theta=..., rope_parameters={"rope_type": "default"}))


def test_an_unknown_architecture_with_the_required_arguments() -> None:
    values = config(model_type="my_model", partial_rotary_factor=0.5)
    ropes = from_config(values, pairing="interleaved")
    assert ropes.rope == Rope(16, 500000.0, "interleaved", rotary_dim=8)
    assert ropes.origins["pairing"] == "passed by the caller"
    with pytest.raises(RopeError, match=r"partial_rotary_factor must be at most 1, got 1\.5"):
        from_config({**values, "partial_rotary_factor": 1.5}, pairing="half")


def test_the_same_pairing_may_be_passed() -> None:
    assert from_config(config(), pairing="half") == from_config(config())


@pytest.mark.parametrize(
    ("changes", "kwargs", "message"),
    [
        # the architecture
        ({"model_type": "my_gpt"}, {}, "model_type must be one that ropewalk knows, got 'my_gpt'"),
        ({"model_type": "gpt_neo"}, {}, "gpt_neo has no rotary positions: it has learned absolute positions."),
        ({"model_type": "lama"}, {}, "Did you mean 'llama'?"),
        ({"model_type": "my_gpt"}, {}, "pass pairing='half' or pairing='interleaved'."),
        ({"model_type": ...}, {}, "model_type must be a string, got None"),
        ({"model_type": ["llama"]}, {}, "model_type must be a string, got ['llama']"),
        ({"model_type": ..., "peft_type": "LORA", "base_model_name_or_path": "a/b"}, {}, "its base model, 'a/b'. Read"),
        ({}, {"pairing": "neox"}, "from_config: pairing must be one of 'half', 'interleaved', got 'neox'"),
        ({}, {"pairing": "interleaved"}, "model_type llama requires the pairing 'half'"),
        ({"rope_interleaved": True}, {}, "rope_interleaved must agree with the pairing 'half'"),
        ({"rope_interleaved": 0}, {}, "rope_interleaved must agree"),
        # sizes
        ({"hidden_size": ...}, {}, "hidden_size must be an integer of at least 1, got None. It is required if head_dim"),
        ({"num_attention_heads": 0}, {}, "num_attention_heads must be an integer of at least 1, got 0"),
        ({"num_attention_heads": True}, {}, "num_attention_heads must be an integer"),
        ({"hidden_size": 66}, {}, "hidden_size must be a multiple of num_attention_heads=4"),
        ({"hidden_size": 60}, {}, "rotary_dim must be even"),
        ({"head_dim": 16.0}, {}, "head_dim must be an integer"),
        ({"head_dim": 10**9}, {}, "head_dim must be an integer from 2 to 65536"),
        ({"head_dim": -128}, {}, "head_dim must be an integer from 2 to 65536, got -128"),
        ({"num_hidden_layers": ...}, {}, "num_hidden_layers must be an integer from 1 to 10000, got None"),
        ({"num_hidden_layers": 10**12}, {}, "num_hidden_layers must be an integer from 1 to 10000"),
        ({"max_position_embeddings": "4096"}, {}, "max_position_embeddings must be an integer of at least 1, got '4096'"),
        # the base
        ({"rope_theta": "500000"}, {}, "rope_theta must be a finite number greater than 1, got '500000'"),
        ({"rope_theta": True}, {}, "rope_theta must be a finite number"),
        ({"rope_theta": None}, {}, "rope_theta must be given, since it is the base, got null. Add rope_theta, or pass base"),
        ({"rope_theta": -10000}, {}, "rope_theta must be a finite number greater than 1, got -10000"),
        ({"rope_theta": math.nan}, {}, "rope_theta must be a finite number"),
        ({"rope_theta": 10**400}, {}, "rope_theta must be a finite number"),
        ({"rope_theta": [10000]}, {}, "rope_theta must be a finite number"),
        ({}, {"base": 1e6}, "rope_theta is 500000, and base must agree with it, got base=1e+06"),
        ({}, {"base": "1e6"}, "from_config: base must be a finite number"),
        # schemes
        ({"rope_scaling": "linear"}, {}, "rope_scaling must be an object or null, got 'linear'"),
        ({"rope_parameters": [1]}, {}, "rope_parameters must be an object or null"),
        ({"rope_scaling": {"rope_type": "liner", "factor": 2}}, {}, "rope_scaling.rope_type must be one of default, dynamic, linear, llama3, longrope, proportional, yarn, telechat3-yarn, got 'liner'. ropewalk knows no other scheme. Did you mean 'linear'?"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2}}, {}, "rope_scaling.rope_type must be one of"),
        ({"rope_scaling": {"rope_type": 3}}, {}, "rope_scaling.rope_type must be one of"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, {}, "rope_scaling.rope_type must be one of"),
        ({"rope_scaling": {"factor": 2}}, {}, "rope_scaling.factor must be a key that rope_type 'default' reads, got 2. It would have no effect. Check whether rope_type is missing."),
        ({"rope_scaling": {"type": "linear"}}, {}, "factor must be given for rope_type 'linear', got none"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}, "max_position_embeddings": None}, {}, "original_max_position_embeddings must be given"),
        ({"rope_scaling": {"type": "yarn", **YARN, "attn_factor": 2}}, {}, "rope_scaling.attn_factor must be a key that rope_type 'yarn' reads, got 2. It would have no effect. Some engine reads it: see `ropewalk diff`."),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 32}}, {}, "rope_scaling.beta_fast must be a key that rope_type 'linear' reads"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, {}, "rope_scaling: Linear: factor must be a finite number of at least 1, got 0.5"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, {}, "Linear: factor must be a finite number"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 8}}, {}, "Llama3: high_freq_factor must be a finite number of at least 8"),
        ({"rope_scaling": {"type": "yarn", **YARN, "beta_fast": 0.5}}, {}, "Check that the two are not swapped"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, {}, "rope_parameters.full_attention must not be an object for this model_type"),
        ({"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor must be 1, since llama rotates the whole head, got 0.5"),
        ({"partial_rotary_factor": "half"}, {}, "partial_rotary_factor must be a finite number"),
        # unread keys
        ({"attention_factor": 1.2}, {}, "'attention_factor' is about rotation and must be a key that this model_type reads"),
        ({"beta_fast": 32}, {}, "'beta_fast' is about rotation"),
        ({"use_dynamic_ntk": True}, {}, "'use_dynamic_ntk' is about rotation"),
        ({"headdim": 64}, {}, "Did you mean 'head_dim'?"),
        ({"rope_thetta": 1e6}, {}, "'rope_thetta' is about rotation and must be a key that this model_type reads"),
        ({"rope_thetta": 1e6}, {}, "Did you mean 'rope_theta'?"),
        ({"rope_scalling": {"type": "linear"}}, {}, "Did you mean 'rope_scaling'?"),
        ({"ropescaling": {"type": "linear"}}, {}, "Did you mean 'rope_scaling'?"),
        ({"scaling_rope": {"type": "linear"}}, {}, "is about rotation"),
        ({"rotary_pct": 0.25}, {}, "'rotary_pct' is about rotation and must be a key that this model_type reads"),
        ({"no_rope_layers": [1, 0]}, {}, "'no_rope_layers'"),
    ],
)  # fmt: skip
def test_refusals(changes: dict[str, Any], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeError) as raised:
        from_config(config(**changes), **kwargs)
    assert message in str(raised.value)
    assert str(raised.value).startswith(("config: ", "config", "from_config: "))


@pytest.mark.parametrize("key", ["property", "theta_wave_europe_x", "bos_token_id"])
def test_keys_that_resemble_rope_keys_are_accepted(key: str) -> None:
    if "theta" in key:
        with pytest.raises(RopeError):
            from_config(config(**{key: 1}))
    else:
        assert from_config(config(**{key: 1})).rope.base == 500000.0


def test_messages_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(rope_scaling={"type": "linear", "factor": 0})))
    with pytest.raises(RopeError) as raised:
        from_config(path)
    assert str(raised.value).startswith(f"{path}: rope_scaling: Linear: factor must be")


def test_the_config_is_not_changed() -> None:
    values = v4("type", name="yarn", **YARN)
    before = json.dumps(values)
    from_config(values)
    assert json.dumps(values) == before


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"extrapolation_factor": 1.0}, "rope_scaling.extrapolation_factor has no effect: it is 1, as without it."),
        ({"attn_factor": 1.0}, "rope_scaling.attn_factor has no effect: it is 1, as without it."),
        ({"finetuned": True}, "rope_scaling.finetuned has no effect: it records that the weights were fine-tuned."),
        ({"mscale": 1.0}, "have an effect only together"),
        ({"mscale_all_dim": 1.0}, "have an effect only together"),
        ({"mscale": 0.7, "mscale_all_dim": 0.7}, "equal, so the attention factor is 1"),
        (
            {"mscale": 0.7, "mscale_all_dim": 0.7, "attention_factor": 1.2},
            "so mscale and mscale_all_dim do not affect cos and sin",
        ),
        (
            {"factor": 16.0},
            "max_position_embeddings is 4096, which is neither original_max_position_embeddings (32768) nor",
        ),
    ],
)
def test_warnings(changes: dict[str, Any], warning: str) -> None:
    ropes = from_config(v4("type", name="yarn", **{**YARN, **changes}))
    assert any(warning in line for line in ropes.warnings), ropes.warnings
    assert warning in ropes.explain()


def test_llama_3_that_has_lost_its_scaling() -> None:
    """meta-llama's files of 3.1 to 3.3 have base 500,000, 131,072 positions and llama3, and Llama 3's 8,192 positions."""
    lost = "if the model is Llama 3.1 to 3.3, its file has lost rope_scaling, which it needs."
    stated = {"rope_theta": 500_000.0, "max_position_embeddings": 131_072}
    assert from_config(config(**stated)).warnings == (lost,)
    llama3 = {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    for changes in (llama3, {"max_position_embeddings": 8192}, {"rope_theta": 1e6}, {"model_type": "mistral"}):
        assert from_config(config(**{**stated, **changes})).warnings == ()


@pytest.mark.parametrize("longest", [32768, 131072, None])
def test_no_warning_within_the_trained_length(longest: int | None) -> None:
    values = v4("type", name="yarn", **YARN)
    assert from_config({**values, "max_position_embeddings": longest}).warnings == ()
    assert from_config(config()).warnings == ()


def test_layers_that_differ_have_no_single_rope() -> None:
    first, second = Rope(16, 1e4, "half"), Rope(16, 1e6, "half")
    ropes = ModelRopes(layers=(first, second, first, None), model_type="test", source="here")
    with pytest.raises(RopeError) as raised:
        _ = ropes.rope
    assert str(raised.value) == (
        f"here: rope must be the same in all layers, got layers 0, 2: {first}; layers 1: {second}; layers 3: None. "
        "Use .layers[i]."
    )
    with pytest.raises(RopeError, match="layers 0-1: None"):
        _ = ModelRopes(layers=(None, None), model_type="test", source="here").rope
