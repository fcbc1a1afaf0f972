"""Compare vision towers with recorded runs of their own code (golden/vision_towers.json), and find them in configs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oracle
from each import each
from ropewalk import Axes, Rope, RopeError, from_config
from ropewalk.configs.model_ropes import VisionRopes
from ropewalk.configs.models import ARCHITECTURES
from ropewalk.configs.tables.towers import TOWER_OF_MODEL, TOWERS
from ropewalk.configs.tables.wrappers import WRAPPERS
from ropewalk.positions import grid

GOLDEN = Path(__file__).parent.parent / "golden"
ROWS = {
    row["model_type"]: row
    for name in ("vision_towers", "remote_towers")
    for row in json.loads((GOLDEN / f"{name}.json").read_text())["rows"]
}


def tower(config: Any, **how: Any) -> VisionRopes:
    found = from_config(config, **how).vision
    assert found is not None
    return found


def check_rotated(vision: VisionRopes, row: dict[str, Any]) -> None:
    """Compare with the recorded rotation, within the error of a float32 product of position and frequency."""
    positions = torch.tensor(row["positions"])
    assert len(vision.axis_names) == len(positions)
    x = torch.from_numpy(oracle.golden_q([1, 1, positions.shape[1], row["head_dim"]]).copy())
    expected = np.array(row["q_rot"], dtype=np.float32).reshape(x.shape)
    for rope in vision.ropes:
        assert rope.head_dim == row["head_dim"]
        x = rope.at(positions)(x, layout="bhsd")
    bound = math.sqrt(2) * np.array([p * 2.0**-23 + 1e-6 for p in positions.abs().amax(0).tolist()])[:, None]
    assert (np.abs(x.numpy() - expected) <= bound).all()
    assert not np.allclose(oracle.golden_q(list(x.shape)), expected, atol=0.1)


def test_rotated() -> None:
    each(ROWS.items(), lambda row: check_rotated(tower(row["config"]), row))


def test_every_tower_was_run() -> None:
    assert set(ROWS) == set(TOWERS) - {"mlcd"}  # this row equals that of mlcd_vision_model
    assert not set(TOWERS) & (set(ARCHITECTURES) | set(WRAPPERS))
    assert set(TOWER_OF_MODEL.values()) <= set(TOWERS)


def test_a_nested_tower_may_omit_the_defaults_of_its_class() -> None:
    """transformers writes only values that differ from the defaults of a class into a nested config."""

    def check(row: dict[str, Any]) -> None:
        name = row["model_type"]
        whole = {**TEXT, "vision_config": {"model_type": name}}
        assert tower(whole).ropes == tower(row["config"]).ropes

    each(ROWS.items(), check)


TEXT = {"model_type": "llama", "head_dim": 8, "num_hidden_layers": 2, "rope_theta": 5e5}
QWEN2_VL = {
    "model_type": "qwen2_vl", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
    "vision_config": {"depth": 32, "embed_dim": 1280, "num_heads": 16, "hidden_size": 3584},
}  # fmt: skip
AXIAL_80 = Rope(80, 1e4, "half", axes=Axes.axial((40, 40)))


class TestWholeConfigs:
    def test_a_tower_next_to_a_text_model(self) -> None:
        ropes = from_config(QWEN2_VL)
        assert ropes.rope == Rope(16, 1e6, "half", axes=Axes.sections((4, 2, 2)))
        assert ropes.vision is not None
        assert ropes.vision.ropes == (AXIAL_80,)
        assert ropes.vision.axis_names == ("height", "width")
        assert ropes.vision.model_type == "qwen2_vl_vision"
        assert ropes.vision.source == "config: vision_config"
        assert "from 0; patches are in the order of the blocks that are merged" in ropes.vision.positions
        assert from_config(QWEN2_VL, text_only=True).vision is None
        assert from_config(TEXT).vision is None

    @pytest.mark.parametrize("name", ["qwen2_vl", "", None])
    def test_a_tower_with_the_model_type_of_the_whole_model(self, name: str | None) -> None:
        inner = {**QWEN2_VL["vision_config"], "model_type": name}  # type: ignore[dict-item]
        assert tower({**QWEN2_VL, "vision_config": inner}).ropes == (AXIAL_80,)

    def test_towers_that_are_not_described(self) -> None:
        for inner in ({"model_type": "clip_vision_model", "hidden_size": 8}, {"depth": 3}, None):
            ropes = from_config({"model_type": "llava", "text_config": TEXT, "vision_config": inner})
            assert ropes.vision is None
            assert not any("tower" in warning for warning in ropes.warnings)

    def test_a_tower_with_a_rope_that_is_not_described(self) -> None:
        for name in ("my_tower", None):
            inner = {"model_type": name, "hidden_size": 8, "rope_theta": 1e4, "rope_scaling": None}
            whole = {"model_type": "llava", "text_config": TEXT, "vision_config": inner}
            ropes = from_config(whole)
            assert ropes.vision is None
            assert (
                f"vision_config: ropewalk does not know the tower {name!r}, so its rope_theta was not read."
                in ropes.warnings
            )
            assert not any("rope_theta was not" in warning for warning in from_config(whole, text_only=True).warnings)

    @pytest.mark.parametrize("inner", [[1], "none", 3, True])
    def test_a_tower_that_is_not_an_object(self, inner: object) -> None:
        whole = {"model_type": "llava", "text_config": TEXT, "vision_config": inner}
        with pytest.raises(RopeError, match=r"vision_config must be an object or null, got .*text_only=True to omit"):
            from_config(whole)
        assert from_config(whole, text_only=True).rope.base == 5e5

    def test_a_deeply_nested_tower(self) -> None:
        text = {**QWEN2_VL, "model_type": "qwen2_5_omni_text"}
        thinker = {"model_type": "qwen2_5_omni_thinker", "text_config": text, "vision_config": {"num_heads": 28}}
        ropes = from_config({"model_type": "qwen2_5_omni", "thinker_config": thinker})
        assert ropes.rope.axes == Axes.sections((4, 2, 2))
        assert ropes.vision is not None
        assert ropes.vision.ropes == (Rope(128, 1e4, "half", axes=Axes.axial((64, 64))),)
        assert ropes.vision.source == "config: thinker_config: vision_config"
        backbone = {"model_type": "sam3_vision_model", "backbone_config": {"model_type": "sam3_vit_model"}}
        assert tower({**TEXT, "vision_config": backbone}).ropes[0].head_dim == 64
        clip = {"model_type": "clip_text_model"}
        sam3 = from_config({"model_type": "sam3", "vision_config": backbone, "text_config": clip})
        assert sam3.vision is not None
        assert sam3.vision.ropes == tower(backbone).ropes == (Rope(64, 1e4, "interleaved", axes=Axes.axial((32, 32))),)
        assert sam3.layers == ()
        for name in ("sam3_tracker", "sam3_lite_text"):
            assert from_config({"model_type": name, "vision_config": backbone}).vision == sam3.vision
        dinov3 = {**ROWS["dinov3_vit"]["config"], "model_type": "dinov3_vit"}
        check_rotated(tower({"model_type": "chmv2", "backbone_config": dinov3}), ROWS["dinov3_vit"])

    def test_kimi(self) -> None:
        """The published files of Kimi have other keys."""
        inner = {"vt_hidden_size": 1152, "vt_num_attention_heads": 16}
        whole = {"model_type": "kimi_k25", "text_config": TEXT, "vision_config": inner}
        assert tower(whole).ropes == (Rope(72, 1e4, "half", axes=Axes.alternating((36, 36), order=(1, 0))),)

    def test_a_flat_file(self) -> None:
        whole = {**TEXT, "model_type": "llava", "vision_config": {"model_type": "pixtral", "head_dim": 64}}
        assert tower(whole).ropes == (Rope(64, 1e4, "half", axes=Axes.strided((32, 32))),)


def test_gemma_4_has_a_rope_for_each_half() -> None:
    first, second = tower({"model_type": "gemma4_vision", "head_dim": 72}).ropes
    assert [(rope.rotary_dim, rope.rotary_offset, rope.base) for rope in (first, second)] == [
        (36, 0, 1e2),
        (36, 36, 1e2),
    ]
    assert first.axes == Axes([0] * 18, lengths=[18, 18])
    assert second.axes == Axes([1] * 18, lengths=[18, 18])
    assert [repr(one.axes) for one in (first, second)] == ["Axes.sections((18, 0))", "Axes.sections((0, 18))"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e3}},
            "rope_parameters.rope_theta must agree with rope_theta=10000",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be 'axial' for pixtral, got 'yarn'"),
        ({"rope_parameters": {"factor": 4.0}}, "must be a key that pixtral reads, got 4.0"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object or null"),
        ({"rope_theta": 0.5}, "rope_theta must be a finite number greater than 1"),
        ({"head_dim": 0}, "head_dim must be an integer from 2 to 65536"),
        ({"head_dim": None, "hidden_size": None}, "hidden_size must be an integer"),
        ({"head_dim": 66}, "channels must be even"),
        ({"rope_flavour": "vanilla"}, "'rope_flavour' is about rotation and must be a key that this model_type reads"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    config = {"model_type": "pixtral", "head_dim": 64, "hidden_size": 1024, "num_attention_heads": 16, **changes}
    with pytest.raises(RopeError) as raised:
        from_config(config)
    assert message in str(raised.value)
    if "hidden_size" in changes:
        return  # in a nested tower, a missing key means the default of the class
    whole = {"model_type": "llava", "text_config": TEXT, "vision_config": config}
    with pytest.raises(RopeError) as raised:
        from_config(whole)
    assert str(raised.value).startswith("config: vision_config")
    assert from_config(whole, text_only=True).rope.base == 5e5


def test_a_tower_alone() -> None:
    config = ROWS["pixtral"]["config"]
    ropes = from_config(config)
    assert ropes.layers == ()
    with pytest.raises(RopeError, match=r"rope needs a text model, got only a vision tower. Use \.vision"):
        _ = ropes.rope
    with pytest.raises(RopeError, match=r"must be those of a text model, got pixtral, a vision tower"):
        ropes.to_hf_config(version=5)
    for how in ({"pairing": "half"}, {"base": 1e4}, {"text_only": True}):
        with pytest.raises(RopeError, match=f"{min(how)} requires a text model, got pixtral, a vision tower"):
            from_config(config, **how)  # type: ignore[arg-type]


def test_explain() -> None:
    ropes = from_config(QWEN2_VL)
    said = ropes.facts()
    json.dumps(said, allow_nan=False)
    assert said["vision"]["axis_names"] == ["height", "width"]
    assert said["vision"]["positions"].startswith("integers: row and column of each patch")
    (rope,) = said["vision"]["ropes"]
    assert rope["axes"]["axis"] == [0] * 20 + [1] * 20
    np.testing.assert_allclose(rope["inv_freq"], [1e4 ** (-i / 20) for i in range(20)] * 2, rtol=1e-14)
    text = ropes.explain(5000)
    for line in (
        "vision tower (model_type qwen2_vl_vision; config: vision_config)",
        "  positions         integers: row and column of each patch in the grid of patches, from 0; patches are in",
        "  axes              2 positions for each token; height: pairs 0-19; width: pairs 20-39",
        "  wavelengths       height: 6.28 to 39,644; width: 6.28 to 39,644 positions for a full turn",
    ):
        assert line in text
    assert "at length" not in text.partition("vision tower")[2]
    assert from_config(TEXT).facts()["vision"] is None
    assert from_config(ROWS["pixtral"]["config"]).explain().count("vision tower, rope") == 0
    alone = from_config({"model_type": "gemma4_vision", "head_dim": 72}).explain()
    assert alone.count("\n  channels ") == 2
    first, second = alone.split("vision tower, rope ")[1:]
    assert first.startswith("1 of 2, which are applied one after another\n  scheme ")
    assert "channels          0 to 35 of 72 rotate" in first
    assert second.startswith("2 of 2, which are applied one after another\n  scheme ")
    assert "channels          36 to 71 of 72 rotate" in second
    assert "\nwhere each value came from" not in alone
    assert alone.partition("where each value of the vision tower came from\n")[2].splitlines() == [
        "  pairing, axes  implied by model_type gemma4_vision (transformers 5.24 models/gemma4)",
        "  head_dim       head_dim",
        "  base           implied by model_type gemma4_vision",
    ]


def test_where_each_value_came_from() -> None:
    def origins(config: dict[str, Any]) -> dict[str, str]:
        said = tower(config).origins
        assert set(said) == {"pairing, axes", "head_dim", "base"}
        return {key: said[key] for key in ("head_dim", "base")}

    of_class = "(1280, the default of the class)"
    assert origins(QWEN2_VL) == {"head_dim": "embed_dim / num_heads", "base": "implied by model_type qwen2_vl_vision"}
    assert origins({**TEXT, "vision_config": {"model_type": "qwen2_vl_vision"}})["head_dim"] == (
        f"embed_dim {of_class} / num_heads (16, the default of the class)"
    )
    one = {**TEXT, "vision_config": {"model_type": "qwen2_vl_vision", "num_heads": 20}}
    assert origins(one)["head_dim"] == f"embed_dim {of_class} / num_heads"
    assert origins({"model_type": "gemma4_vision"})["head_dim"] == "64, the default of the class of gemma4_vision"
    pixtral = {"model_type": "pixtral", "head_dim": 64, "rope_parameters": {"rope_theta": 1e3}}
    assert origins(pixtral) == {"head_dim": "head_dim", "base": "rope_parameters.rope_theta"}
    memory = {"memory_attention_hidden_size": 256, "memory_attention_num_attention_heads": 1}
    halved = {"model_type": "sam2_video", **memory, "memory_attention_downsample_rate": 2}
    assert origins(halved)["head_dim"] == " / ".join([*memory, "memory_attention_downsample_rate"])
    said = from_config(QWEN2_VL).explain()
    assert said.index("\nwhere each value came from") < said.index("\nwhere each value of the vision tower came from")
    assert json.loads(json.dumps(from_config(QWEN2_VL).facts()))["vision"]["origins"] == tower(QWEN2_VL).origins


def test_refused_models_with_several_parts() -> None:
    for name, reason in (
        ("sam3_video", r"config\['detector_config'\] for the vision tower, or config\['tracker_config'\] for"),
        (
            "efficientloftr",
            r"before they are split into heads.* Rope\(256, 10000\.0, \"interleaved\", axes=Axes\.alternating",
        ),
    ):
        for how in ({}, {"pairing": "half"}):
            with pytest.raises(RopeError, match=reason):
                from_config({"model_type": name, "hidden_size": 256, "num_attention_heads": 8}, **how)  # type: ignore[arg-type]


def test_the_rope_that_the_error_for_efficientloftr_names() -> None:
    """Compare with the model's own code, at positions below 8."""
    pytest.importorskip("transformers", "5.23")
    from transformers import EfficientLoFTRConfig
    from transformers.models.efficientloftr import modeling_efficientloftr as theirs

    config = EfficientLoFTRConfig()
    cos, sin = theirs.EfficientLoFTRRotaryEmbedding(config)(torch.zeros(1, 256, 20, 28))
    q = torch.from_numpy(oracle.golden_q([1, 35, 1, 256]).copy())
    expected, _ = theirs.apply_rotary_pos_emb(q, q, cos.flatten(1, 2), sin.flatten(1, 2), unsqueeze_dim=2)
    rope = Rope(256, 1e4, "interleaved", axes=Axes.alternating((128, 128)))
    ours = rope.at(grid(5, 7, start=1))(q, layout="bshd")
    torch.testing.assert_close(ours, expected, rtol=0, atol=math.sqrt(2) * (7 * 2.0**-23 + 1e-6))


# name in golden/axes.json → config
RECORDED: dict[str, dict[str, Any]] = {
    "qwen2-vl.vision: vision": {"model_type": "qwen2_vl_vision", "embed_dim": 1280, "num_heads": 16},
    "qwen3.5.vision: vision": {"model_type": "qwen3_5_vision", "hidden_size": 1152, "num_heads": 16},
    "devstral-small-2.vision: vision": {"model_type": "pixtral", "head_dim": 64},
    "gemma-4.vision: vision": {"model_type": "gemma4_vision", "head_dim": 72},
    "default-sam2_video: memory_attention": {
        "model_type": "sam2_video",
        "memory_attention_hidden_size": 256,
        "memory_attention_num_attention_heads": 1,
    },
    "default-dinov3_vit: grid_14x14": {"model_type": "dinov3_vit", "hidden_size": 384, "num_attention_heads": 6},
    "tiny-random-dinov3: grid_4x6": {"model_type": "dinov3_vit", "hidden_size": 192, "num_attention_heads": 3},
}


@pytest.mark.parametrize("name", RECORDED)
def test_released_towers(name: str) -> None:
    """Compare one head of q with golden/axes.json. The first tokens of DINOv3 are not rotated."""
    row = next(row for row in json.loads((GOLDEN / "axes.json").read_text())["rows"] if row["name"] == name)
    positions = torch.tensor(row["positions"])
    if "grid" in row:
        centres = (positions + 0.5) / torch.tensor(row["grid"], dtype=torch.float64).unsqueeze(-1) * 2 - 1
        positions = 2 * math.pi * centres
    prefix = row.get("prefix", 0)
    x = torch.from_numpy(oracle.golden_q(row["q_shape"])[:, : row["q_heads"]].copy())
    expected = np.array(row["q_rot"], dtype=np.float32).reshape(x.shape)
    for rope in tower(RECORDED[name]).ropes:
        x[:, :, prefix:] = rope.at(positions)(x[:, :, prefix:].contiguous(), layout="bhsd")
    far = [0.0] * prefix + positions.abs().amax(0).tolist()
    bound = math.sqrt(2) * np.array([p * 2.0**-23 + 1e-6 for p in far])[:, None]
    assert (np.abs(x.numpy() - expected) <= bound).all()
