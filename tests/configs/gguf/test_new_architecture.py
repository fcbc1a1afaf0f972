"""An invented architecture is added from outside, and every part of the reader uses its row."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oracle
from gguf_files import write
from ropewalk import ModelRopes, RopeError, from_config
from ropewalk.configs.gguf.keys import ARCHITECTURES
from ropewalk.configs.gguf.row import BASE, BASE_SWA, DIM_SWA, HEAD_SWA, GgufRow, ImpliedBase, Layers
from ropewalk.configs.layers import Every, Kind, LayerFlags

# The first of every three layers has the model's base and scaling. The others have another head size, another base and
# no scaling. A list in the file may assign the layers instead.
ROW = GgufRow(
    "interleaved",
    "the made-up paper",
    layers=Layers(
        {"near": Kind((BASE_SWA,), 100.0, scaled=False, head_dim_key=HEAD_SWA, dim_key=DIM_SWA), "far": Kind((BASE,))},
        LayerFlags("is_near", "near", "far", Every(3, "far", "near", key="madeup_interval", first=True)),
    ),
    implied_base=ImpliedBase(5000.0, "what the made-up paper says", "Is it the first version?"),
    yarn_betas=(32.0, 1.0),
    yarn_warning="made up: mind the ramp.",
)
KEYS: dict[str, Any] = {
    "block_count": 5,
    "context_length": 4096,
    "attention.key_length": 16,
    "attention.key_length_swa": 8,
    "rope.dimension_count": 12,
    "rope.dimension_count_swa": 4,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 512,
    "rope.scaling.yarn_beta_fast": 16.0,
}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(ARCHITECTURES, "madeup", ROW)
    return tmp_path / "model.gguf"


def read(path: Path, **more: Any) -> ModelRopes:
    return from_config(write(path, {**KEYS, **more}, architecture="madeup"))


def test_each_layer_by_the_oracle(path: Path) -> None:
    ropes = read(path)
    assert ropes.layer_kinds == ("far", "near", "near", "far", "near")
    for rope, kind in zip(ropes.layers, ropes.layer_kinds, strict=True):
        assert rope is not None
        assert (rope.pairing, rope.rotary_offset) == ("interleaved", 0)
        if kind == "far":
            assert (rope.head_dim, rope.rotary_dim) == (16, 12)
            assert rope.attention_factor == pytest.approx(0.1 * math.log(8) + 1)
            expected = oracle.yarn(5000.0, 12, 8, 512, fast=16)
        else:
            assert (rope.head_dim, rope.rotary_dim, rope.attention_factor) == (8, 4, 1.0)
            expected = oracle.inv_freq(100.0, 4)
        np.testing.assert_allclose(rope.inv_freq, np.array(expected, float), rtol=1e-13)


def test_the_keys_that_its_row_names(path: Path) -> None:
    kinds = read(path, madeup_interval=2).layer_kinds
    assert kinds == ("far", "near", "far", "near", "far")
    ropes = read(path, is_near=[True, False, True, False, True], **{BASE: 2e4, BASE_SWA: 3e4})
    assert ropes.layer_kinds == ("near", "far", "near", "far", "near")
    assert [rope.base for rope in ropes.layers if rope is not None] == [3e4, 2e4, 3e4, 2e4, 3e4]


def test_explain_names_the_origins(path: Path) -> None:
    explained = " ".join(read(path).explain().split())
    for words in (
        "implied: the first of every 3 is far",
        "implied: what the made-up paper says and implied by madeup: 100 in sliding layers",
        "madeup.attention.key_length and madeup.attention.key_length_swa",
        "madeup.rope.dimension_count and madeup.rope.dimension_count_swa",
        "madeup.rope.scaling.yarn_beta_fast",
        "the file has no madeup.rope.freq_base, for which llama.cpp uses 5000. Is it the first version?",
        "made up: mind the ramp.",
    ):
        assert words in explained


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rope.frq_base": 1e4}, "must be a key that ropewalk knows for madeup"),
        ({"rope.scaling.alpha": 1000.0}, "madeup.rope.scaling.alpha must not be given for madeup"),
        ({"rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier must not be given for madeup"),
        ({"rope.dimension_sections": [2, 2, 2, 0]}, "reads it only for architectures with several axes"),
        ({"attention.key_length_mla": 24}, "Multi-head latent attention"),
        ({"is_near": [True, False]}, "with an entry for each of the 5 layers, got 2 entries"),
    ],
)
def test_stray_keys(path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeError) as raised:
        read(path, **more)
    assert message in str(raised.value)


def test_without_its_row(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ARCHITECTURES, "madeup")
    with pytest.raises(RopeError, match=" must be one that ropewalk knows, got 'madeup'"):
        read(path)


def test_a_refused_architecture_is_a_row(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "madeup", GgufRow(None, refusal="It rotates on a torus"))
    with pytest.raises(RopeError, match="It rotates on a torus"):
        read(path)


@pytest.mark.parametrize(
    ("base_keys", "far", "near"),
    [
        ({"rope.angle_root": 2e4}, 2e4, 2e4),
        ({BASE: 3e4, "rope.angle_root": 2e4}, 2e4, 3e4),
        ({BASE: 3e4, "rope.angle_root": 2e4, "rope.near_root": 4e4}, 2e4, 3e4),
        ({"rope.angle_root": 2e4, "rope.near_root": 4e4}, 2e4, 4e4),
    ],
)
def test_keys_of_bases(base_keys: dict[str, Any], far: float, near: float, path: Path) -> None:
    """The base of a kind is the value of the first of its keys that has one."""
    kinds = {"far": Kind(("rope.angle_root",)), "near": Kind((BASE, "rope.near_root", "rope.angle_root"))}
    ARCHITECTURES["madeup"] = GgufRow("half", layers=Layers(kinds, Every(2, "far", "near")))
    keys = {"block_count": 2, "attention.key_length": 16, **base_keys}
    ropes = from_config(write(path, keys, architecture="madeup"))
    assert [rope.base for rope in ropes.layers if rope is not None] == [near, far]
    assert "madeup.rope.angle_root" in ropes.origins["base"]


def test_a_missing_base_of_a_kind_is_an_error(path: Path) -> None:
    kinds = {"far": Kind(("rope.angle_root", "rope.near_root"))}
    ARCHITECTURES["madeup"] = GgufRow("half", layers=Layers(kinds, "far"))
    keys = {"block_count": 2, "attention.key_length": 16}
    with pytest.raises(
        RopeError, match=r"madeup.rope.angle_root or madeup.rope.near_root must be given, since it is the base"
    ):
        from_config(write(path, keys, architecture="madeup"))
    with pytest.raises(RopeError, match=r"madeup.rope.near_root must be a finite number greater than 1"):
        from_config(write(path, {**keys, "rope.near_root": 0.5}, architecture="madeup"))
