"""The fixes in messages work: each one is applied to the config that caused the message."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from each import each
from ropewalk import ModelRopes, RopeError, from_config
from ropewalk.configs.models import ARCHITECTURES

GOLDEN = Path(__file__).parent.parent / "golden"
DEFAULTS = json.loads((GOLDEN / "class_defaults.json").read_text())["rows"]
RELEASED = {row["file"]: row["config"] for row in json.loads((GOLDEN / "released.json").read_text())["rows"]}


def read(config: dict[str, Any], **how: Any) -> ModelRopes:
    return from_config(config, text_only=True, **how)


def refusal(config: dict[str, Any], **how: Any) -> str:
    with pytest.raises(RopeError) as raised:
        read(config, **how)
    return str(raised.value)


def without_base(config: dict[str, Any], row: Any) -> dict[str, Any]:
    """Return the config without any key that states the base."""
    names = {"rope_theta", *row.base_keys()}

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cut(inner) for key, inner in value.items() if key not in names}
        return value

    return {key: value for key, value in cut(config).items() if value != {}}


def put(config: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """Return a copy with a value under the key "a.b.c"."""
    key, _, rest = path.partition(".")
    return {**config, key: put(dict(config.get(key) or {}), rest, value) if rest else value}


def test_a_base_that_is_missing() -> None:
    """For every model, adding the keys that the messages name, one for each kind of layer, is enough."""
    tried = []

    def check(row: dict[str, Any]) -> None:
        config = without_base(row["config"], ARCHITECTURES[row["model_type"]])
        for _ in range(4):
            try:
                read(config)
                return
            except RopeError as e:
                named = re.search(
                    r"must be given, since it is the base, got none\. Add ([\w.]+), or pass base=", str(e)
                )
                if named is None:
                    return  # something else is missing without the sections
                tried.append(row["model_type"])
                config = put(config, named[1], 12345.0)
        raise AssertionError(f"still refused after {named}")

    known = [row for row in DEFAULTS if row["model_type"] in ARCHITECTURES and "variant" not in row]
    each(((row["model_type"], row) for row in known), check)
    assert len(set(tried)) > 100
    assert {"modernbert", "gemma4_text"} <= set(tried)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize("model_type", ["gptj", "codegen", "moss", "roformer", "chatglm", "telechat"])
def test_no_key_is_suggested_for_itself(model_type: str) -> None:
    row = next(
        (row["config"] for row in DEFAULTS if row["model_type"] == model_type), {**LLAMA, "model_type": model_type}
    )
    sizes = {"num_layers": 1, "n_head": 2, "n_layer": 1, "kv_channels": 64, "multi_query_group_num": 2}
    message = refusal({**row, **(sizes if model_type in ("chatglm", "telechat") else {}), "rope_theta": 1e5})
    assert "Did you mean 'rope_theta'" not in message
    assert "Did you mean 'base'" not in message


def test_a_key_to_ignore_inside_a_section() -> None:
    scaled = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}}
    assert "ignore=('rope_scaling.beta_fast',)" in refusal(scaled)
    assert "Did you mean 'rope_scaling.beta_fast'?" in refusal(scaled, ignore=("beta_fast",))


def test_the_reason_why_a_value_is_refused() -> None:
    assert "Not supported yet: the two positions for each token of ChatGLM-6B (version 1)." in refusal(
        RELEASED["336.json"]
    )


def test_files_of_other_programs() -> None:
    for name in ("299.json", "300.json"):  # ExecuTorch
        assert "if the keys are those of transformers. Other programs use other keys." in refusal(RELEASED[name])
    message = refusal(RELEASED["311.json"])
    (factor,) = re.findall(r"Pass factor=([\d.]+) \(Llama 3\.2 Vision\)", message)
    assert from_config(RELEASED["311.json"], factor=float(factor)).rope.scaling.factor == 8.0  # type: ignore[union-attr]


def test_origins_if_layers_differ() -> None:
    """The origin of a scaling is that of its kind of layer, and no origin is listed twice."""
    layered = {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "layer_types": ["full_attention", "sliding_attention"] * 3,
        "sliding_window": 8,
    }
    sizes = {"head_dim": 16, "num_hidden_layers": 6, "num_attention_heads": 4, "hidden_size": 64}
    for order in (1, -1):
        layers = layered["layer_types"][::order]
        ropes = read({"model_type": "gemma3_text", **layered, **sizes, "layer_types": layers})
        assert ropes.origins["scaling"] == "rope_parameters.full_attention.rope_type"
        assert sorted(ropes.origins["base"].split(" and ")) == [
            "rope_parameters.full_attention.rope_theta",
            "rope_parameters.sliding_attention.rope_theta",
        ]
        assert ropes.origins["rotary_dim"] == "the whole head"
