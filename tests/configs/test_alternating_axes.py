"""Models whose axes take turns in an order of their own, compared with vLLM's classes (golden/deployed.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from each import each
from ropewalk import Rope, RopeError, from_config

ROWS = json.loads((Path(__file__).parents[1] / "golden" / "deployed.json").read_text())["rows"]
PANGU = {
    "model_type": "openpangu_vl_text",
    "num_hidden_layers": 2,
    "rope_theta": 64e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12], "mrope_interleaved": True},
    "hidden_size": 256,
    "num_attention_heads": 4,
}
BAILING = {
    "model_type": "bailing_moe_v3_vl",
    "mrope_section": [12, 10, 10],
    "text_config": {
        "model_type": "bailing_hybrid",
        "num_hidden_layers": 3,
        "layer_group_size": 3,
        "rope_theta": 6e5,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
    },
}


def test_openpangu() -> None:
    def check(row: dict[str, Any]) -> None:
        sections = row["params"]["mrope_section"]
        scaling = {**PANGU["rope_scaling"], "mrope_section": sections}
        config = {**PANGU, "head_dim": 2 * sum(sections), "rope_scaling": scaling}
        ropes = from_config({"model_type": "openpangu_vl", "text_config": config})
        assert ropes.axis_names == ("time", "height", "width")[-len(sections) :]
        axes = ropes.rope.axes
        assert axes is not None
        assert list(axes.axis) == row["axis"]
        assert axes.one_progression
        assert (ropes.rope.pairing, ropes.rope.base) == ("half", 64e6)
        written = from_config(config).to_hf_config(version=4)
        assert from_config(written).rope == ropes.rope

    each(((row["id"], row) for row in ROWS if row["id"].startswith("openpangu")), check)


def test_bailing() -> None:
    """The sections are beside the text model, which is a hybrid with latent attention."""

    def check(row: dict[str, Any]) -> None:
        config = {**BAILING, **row["params"]}
        ropes = from_config(config)
        rope = ropes.layers[2]
        assert rope is not None
        assert rope.axes is not None
        assert list(rope.axes.axis) == row["axis"]
        assert ropes.layers == (None, None, rope)
        one = Rope(192, 6e5, "interleaved", rotary_dim=64, rotary_offset=128)
        assert from_config(config, text_only=True).layers[2] == one
        assert rope.inv_freq.tolist() == one.inv_freq.tolist()

    each(((row["id"], row) for row in ROWS if row["id"].startswith("bailing")), check)
    without = {key: value for key, value in BAILING.items() if key != "mrope_section"}
    assert from_config(without).layers == from_config(BAILING).layers


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**PANGU, "rope_scaling": {"mrope_section": [8, 12, 12]}}, "mrope_interleaved must be given beside"),
        ({**PANGU, "rope_scaling": {"mrope_section": [8, 12, 12], "mrope_interleaved": False}}, "must be true"),
        ({**PANGU, "rope_scaling": {"mrope_section": [0, 16, 16], "mrope_interleaved": True}}, "must have .* 32 pairs"),
        ({**PANGU, "rope_scaling": {"mrope_section": [8, 12, 11], "mrope_interleaved": True}}, "must add up to the 32"),
        ({**BAILING, "mrope_section": [12, 10, 9]}, "must add up to the 32 pairs"),
        (
            {**BAILING, "text_config": {**BAILING["text_config"], "rope_scaling": {"mrope_section": [8, 12, 12]}}},
            "must agree with rope_scaling.mrope_section",
        ),
    ],
)
def test_wrong_sections(config: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeError, match=message):
        from_config(config)
