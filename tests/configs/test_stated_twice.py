"""Configs that state a rope parameter twice: the value that transformers takes, and a warning with the other one.

stated_twice.json has what transformers computed for each of its model types and each way to state a parameter twice.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ropewalk import Rope, RopeError, from_config
from ropewalk.configs.tables.default_bases import DEFAULT_BASES
from ropewalk.configs.tables.wrappers import WRAPPERS

GOLDEN = Path(__file__).parents[1] / "golden"
ROWS = {row["model_type"]: row for row in json.loads((GOLDEN / "stated_twice.json").read_text())["rows"]}
DEFAULTS = {
    row["model_type"]: row["config"]
    for row in json.loads((GOLDEN / "class_defaults.json").read_text())["rows"]
    if "variant" not in row
}
STATED = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")

# Cases that are refused, although transformers builds its module: what the message must contain.
REFUSED = (
    ("bailing_hybrid", "max_position_embeddings must be given for rope_type 'dynamic'"),
    ("diffusion_gemma_text gemma4_text gemma4_unified_text lfm3", "partial_rotary_factor must be 1"),
    ("glm4v_text glm4v_moe_text glm_image_text", "mrope_section must add up to the 16 pairs"),  # they are for 32
    ("glm4v_text glm_image_text", "mrope_section must add up to the 64 pairs"),
    ("hunyuan_vl_text", "mrope_section must be given"),
    ("gpt_neox gpt_neox_japanese", "rotary_emb_base must be given"),
    ("gpt_neox gpt_neox_japanese", "'rope_theta' is about rotation"),
    ("moonshine", "rotary_dim must be even"),  # 9, which transformers rounds up
    ("neomme qwen4_exp_text", "'rotary_dim' is about rotation"),  # only comments of their classes have this key
)
# The module of Mistral 4 has the whole head of 128 channels unless there is a scaling, and its attention rotates 64.
MODULE_ONLY = {"mistral4": ("base lost, default", "scaling removed", "fraction also", "two fractions")}

SCALING = {"rope_type": "linear", "factor": 4.0}


def refused(model_type: str, message: str) -> bool:
    return any(model_type in types.split() and text in message for types, text in REFUSED)


def config_of(model_type: str, keys: dict[str, Any]) -> dict[str, Any]:
    default = {key: value for key, value in DEFAULTS[model_type].items() if key not in STATED}
    return {**default, "model_type": model_type, **keys}


def numbers(rope: Rope) -> list[float]:
    """As in stated_twice.json: rotary_dim, the second, middle and last frequency, and the attention factor."""
    static = rope.at_length(1)
    inv_freq = np.sort(static.inv_freq)[::-1]
    last = len(inv_freq) - 1
    chosen = (inv_freq[min(1, last)], inv_freq[last // 2], inv_freq[last])
    return [2 * len(inv_freq), *map(float, chosen), static.attention_factor]


@pytest.mark.parametrize("model_type", ROWS)
def test_what_transformers_takes(model_type: str) -> None:
    wrong = []
    for case, recorded in ROWS[model_type]["cases"].items():
        runs = not isinstance(recorded["frequencies"], str)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = from_config(config_of(model_type, recorded["keys"]))
        except RopeError as e:
            if runs and not refused(model_type, str(e)):
                wrong.append((case, str(e)))
            continue
        if not runs or case.startswith(MODULE_ONLY.get(model_type, ())):
            continue
        theirs = list(recorded["frequencies"].values())
        for rope in {rope for rope in found.layers if rope is not None}:
            ours = numbers(rope)
            if not any(np.allclose(ours, each, rtol=1e-6, atol=0) for each in theirs):
                wrong.append((case, (ours, theirs)))
    assert not wrong


def test_default_bases() -> None:
    kinds = {"global": "full_attention", "local": "sliding_attention"}
    own = {"bailing_hybrid", "deepseek_v4"}  # a field of the class has the base
    for name, row in ROWS.items():
        base = row["default_base"]
        bases = {kinds.get(kind, kind): each for kind, each in base.items()} if isinstance(base, dict) else {"": base}
        for kind, each in bases.items():
            found = DEFAULT_BASES.get(f"{name}.{kind}", DEFAULT_BASES.get(name, 10_000.0))
            assert name in own or found == each, name
    assert {name.split(".")[0] for name in DEFAULT_BASES} <= set(ROWS)


@pytest.mark.parametrize(
    ("keys", "base", "said"),
    [
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}, "rope_scaling": SCALING},
            1e4,
            "rope_parameters.rope_theta (500000.0) has no effect in transformers, which reads rope_scaling in",
        ),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
                "rope_scaling": SCALING,
                "rope_theta": 5e5,
            },
            5e5,
            "rope_parameters.rope_type ('default') has no effect in transformers, which reads rope_scaling",
        ),
        (
            {"rope_parameters": {**SCALING, "rope_theta": 1e6}, "rope_theta": 5e5},
            1e6,
            "rope_theta (500000.0) has no effect in transformers, which reads rope_parameters.rope_theta (1000000.0).",
        ),
        ({"rope_parameters": {**SCALING, "rope_theta": 1e6}, "rope_scaling": None, "rope_theta": 1e6}, 1e6, ""),
    ],
)
def test_the_warning_has_both_values(keys: dict[str, Any], base: float, said: str) -> None:
    config = config_of("llama", keys)
    if not said:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert from_config(config).rope.base == base
        return
    with pytest.warns(UserWarning, match=re.escape(said)):
        ropes = from_config(config)
    assert (ropes.rope.base, ropes.rope.scaling is not None) == (base, True)
    for version in (4, 5):
        with warnings.catch_warnings():  # what is written says it once
            warnings.simplefilter("error")
            assert from_config(ropes.to_hf_config(version=version)).rope == ropes.rope


def test_code_that_is_not_in_transformers() -> None:
    config = {"model_type": "internlm2", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    with pytest.raises(RopeError, match=r"must agree with .* does not know which of them") as raised:
        from_config({**config, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}})
    assert "ignore" not in str(raised.value)


BESIDE = {"rope_theta": 654_321.0, "rope_scaling": {**SCALING, "rope_theta": 654_321.0}}


def test_models_that_contain_a_text_model() -> None:
    """The text model reads its own object, and not the keys beside it."""
    from transformers import CONFIG_MAPPING, logging

    logging.set_verbosity_error()
    compared = []
    for name in sorted(set(WRAPPERS) & set(CONFIG_MAPPING)):
        try:
            config = CONFIG_MAPPING[name]()
            config = json.loads(json.dumps(config.to_dict(), default=str))
        except Exception:  # a class without defaults, or without a package that its parts need
            continue
        parts = [key for key in ("text_config", "llm_config") if "rope_theta" in str(config.get(key))]
        for key in parts:
            parameters = config[key].get("rope_parameters")
            if not parameters or any(isinstance(value, dict) for value in parameters.values()):
                continue
            config[key]["rope_parameters"] = {**parameters, "rope_theta": 123_456.0}
            beside = {**config, "model_type": name, **BESIDE}
            try:
                ropes = from_config(beside)
            except RopeError:  # a default config that is not complete
                continue
            theirs = CONFIG_MAPPING[name].from_dict(beside).get_text_config(decoder=True).rope_parameters
            found = {(rope.base, getattr(rope.scaling, "factor", None)) for rope in ropes.layers if rope is not None}
            assert (theirs["rope_theta"], theirs.get("factor")) in found, name
            assert {base for base, _ in found} == {123_456.0}, name
            compared.append(name)
    assert len(compared) >= 40


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen2_5_vl"])
def test_a_scaling_beside_the_text_model(model_type: str) -> None:
    """As model cards give it for text models. transformers loads no such file if the scaling is YaRN."""
    from transformers import CONFIG_MAPPING

    config = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    said = "is not read, and transformers may reject a file with it. Move it into text_config."
    assert not [warning for warning in from_config(config).warnings if said in warning]
    for key in ("rope_scaling", "rope_parameters"):
        assert f"{key} beside text_config {said}" in from_config({**config, key: yarn}).warnings
        with pytest.raises(AttributeError, match="max_position_embeddings"):
            CONFIG_MAPPING[model_type].from_dict({**config, key: yarn})
