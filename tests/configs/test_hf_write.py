"""`to_hf_config`: `from_config` reads the same ropes from the written config."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from each import each
from ropewalk import Axes, ModelRopes, Rope, RopeError, from_config
from ropewalk.schemes import PerPair

GOLDEN = Path(__file__).parent.parent / "golden"
CONFIGS = [
    (row.get("name", row.get("model_type")), row["config"])
    for name in ("text_models", "class_defaults")
    for row in json.loads((GOLDEN / f"{name}.json").read_text())["rows"]
]


def same_ropes(first: ModelRopes, second: ModelRopes) -> bool:
    names = (
        "layers",
        "extra_ropes",
        "softmax_factor",
        "query_scale",
        "output_order",
        "max_position_embeddings",
        "axis_names",
    )
    return all(getattr(first, name) == getattr(second, name) for name in names)


def test_version_5() -> None:
    each(CONFIGS, check_version_5)


def check_version_5(config: dict[str, Any]) -> None:
    ropes = from_config(config)
    written = ropes.to_hf_config(version=5)
    json.dumps(written)
    assert "rope_scaling" not in written
    again = from_config(written)
    assert same_ropes(again, ropes)
    assert again.to_hf_config(version=5) == written


def test_version_5_has_the_form_that_transformers_reads() -> None:
    each(CONFIGS, check_form_of_version_5)


def check_form_of_version_5(config: dict[str, Any]) -> None:
    """Check that `rope_parameters` is one object, or has one for each kind of layer, as in files of transformers."""
    theirs = config.get("rope_parameters")
    ropes = from_config(config)
    if not theirs or not any(ropes.layers):
        return
    ours = ropes.to_hf_config(version=5)["rope_parameters"]
    nested = [any(isinstance(value, dict) for value in parameters.values()) for parameters in (theirs, ours)]
    assert nested[0] == nested[1]
    assert not nested[0] or set(ours) <= set(theirs)


def test_version_4() -> None:
    each(CONFIGS, check_version_4)


def check_version_4(config: dict[str, Any]) -> None:
    ropes = from_config(config)
    try:
        written = ropes.to_hf_config(version=4)
    except RopeError as refusal:
        assert "Pass version=5." in str(refusal)  # noqa: PT017
        return
    assert "rope_parameters" not in written
    assert same_ropes(from_config(written), ropes)


def test_from_one_schema_to_the_other() -> None:
    old = {
        "model_type": "llama", "head_dim": 8, "num_hidden_layers": 2, "rope_theta": 5e5, "vocab_size": 7,
        "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "finetuned": True},
    }  # fmt: skip
    ropes = from_config(old)
    new = ropes.to_hf_config(version=5)
    assert new["rope_parameters"]["rope_theta"] == 5e5
    assert new["rope_parameters"]["rope_type"] == "yarn"
    assert new["vocab_size"] == 7
    assert "rope_theta" not in new
    assert from_config(from_config(new).to_hf_config(version=4)).layers == ropes.layers
    assert old["rope_scaling"]["type"] == "yarn"  # the first config is not changed


def test_refusals() -> None:
    ropes = from_config({"model_type": "llama", "head_dim": 8, "num_hidden_layers": 1, "rope_theta": 5e5})
    for version in (3, "5", True, None):
        with pytest.raises(RopeError, match=r"ModelRopes\.to_hf_config: version must be 4 or 5"):
            ropes.to_hf_config(version=version)  # type: ignore[arg-type]
    own = ModelRopes(
        (Rope(4, 1e4, "half", scaling=PerPair([1.0, 2.0])),), "llama", "here", layer_kinds=("all",), config={}
    )
    with pytest.raises(RopeError, match="PerPair: a scheme must have a rope_type to be written"):
        own.to_hf_config(version=5)


@pytest.mark.parametrize("version", [4, 5])
def test_several_axes_are_not_written(version: int) -> None:
    """A config without the sections would describe another model."""
    ropes = from_config({"model_type": "llama", "head_dim": 8, "num_hidden_layers": 1, "rope_theta": 1e4})
    several = dataclasses.replace(ropes, layers=(Rope(8, 1e4, "half", axes=Axes.sections((2, 1, 1))),))
    with pytest.raises(RopeError, match=r"this model_type must have ropes of one axis, got Rope\(.*Axes\.sections"):
        several.to_hf_config(version=version)
