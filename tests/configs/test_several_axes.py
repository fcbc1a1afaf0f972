"""The axes of text models with several positions for each token, compared with runs of the models' own code."""

from __future__ import annotations

import importlib
import json
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from each import each
from gguf_files import write
from ropewalk import NTK, Axes, Rope, RopeError, from_config
from ropewalk.configs.models import ARCHITECTURES

GOLDEN = Path(__file__).parent.parent / "golden"
DEFAULTS = json.loads((GOLDEN / "class_defaults.json").read_text())["rows"]
SEVERAL = [(row["model_type"], row) for row in DEFAULTS if ARCHITECTURES[row["model_type"]].axes is not None]


def test_text_only_is_the_same_rope_without_axes() -> None:
    def check(row: dict[str, Any]) -> None:
        ropes, text = from_config(row["config"]), from_config(row["config"], text_only=True)
        assert text.layers == tuple(None if rope is None else replace(rope, axes=None) for rope in ropes.layers)
        assert text.axis_names == ()
        assert text.warnings[0].startswith("text only: ")
        positions = torch.tensor([0, 1, 17, 4095])
        for rope, alone in zip(ropes.layers, text.layers, strict=True):
            if rope is not None and alone is not None and rope.axes is not None:
                rows = positions.expand(rope.axes.count, -1)
                assert torch.equal(rope.at(rows).cos, alone.at(positions).cos)

    each(SEVERAL, check)


def test_every_row_of_several_axes_was_run() -> None:
    described = {name for name, row in ARCHITECTURES.items() if row.axes is not None}
    flat_files = {"qwen2_vl", "qwen2_5_vl"}  # the same models as those with the suffix _text
    of_engines = {name for name in described if not ARCHITECTURES[name].in_transformers}  # test_alternating_axes.py
    assert {name for name, _ in SEVERAL} == described - flat_files - of_engines


def test_hunyuan_has_the_axes_of_its_first_code() -> None:
    """In transformers 5.23, the two channels of a pair use the positions of different axes, which is no rotation."""
    (row,) = (row for name, row in SEVERAL if name == "hunyuan_vl_text")
    ropes = from_config(row["config"])
    recorded = row["layers"]["0"]["axis"]
    assert recorded == [[0, 2]] * 32 + [[1, 3]] * 32
    assert ropes.rope.axes == Axes([0] * 16 + [1] * 16 + [2] * 16 + [3] * 16)
    assert ropes.axis_names == ("sequence", "width", "height", "image")
    assert any("is a rotation for text only" in warning for warning in ropes.warnings)


QWEN2_VL = {
    "model_type": "qwen2_vl", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "rope_theta": 1e6,
}  # fmt: skip
QWEN3_VL = {**QWEN2_VL, "model_type": "qwen3_vl_text", "head_dim": 128}
HUNYUAN = {**QWEN2_VL, "model_type": "hunyuan_vl_text", "head_dim": 16}


class TestSections:
    @pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
    def test_stated(self, section: str) -> None:
        values = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
        ropes = from_config({**QWEN2_VL, section: values})
        assert ropes.rope == Rope(16, 1e6, "half", axes=Axes([0, 0, 0, 0, 1, 1, 2, 2]))
        assert ropes.axis_names == ("time", "height", "width")
        assert ropes.origins["axes"] == f"{section}.mrope_section"

    @pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
    def test_text_model_inside(self, name: str) -> None:
        """transformers 5 writes a nested config. Published files have these keys at the top level."""
        text = {**QWEN2_VL, "model_type": f"{name}_text", "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}
        ropes = from_config({"model_type": name, "text_config": text, "vision_config": {}})
        assert ropes.layers == (Rope(16, 1e6, "half", axes=Axes.sections((4, 2, 2))),) * 2
        assert ropes.source == "config: text_config"
        assert ropes.vision is not None
        assert ropes.vision.model_type == f"{name}_vision"
        both = from_config({**text, "model_type": name, "text_config": {**text, "num_hidden_layers": 3}})
        assert len(both.layers) == 2

    def test_sections_for_each_kind_of_layer(self) -> None:
        parameters = {
            "sliding_attention": {"rope_theta": 5e4, "mrope_section": [4, 2, 2]},
            "full_attention": {"rope_theta": 5e5, "mrope_section": [2, 3, 3]},
        }
        ropes = from_config({
            **QWEN2_VL, "model_type": "cohere_compass_text", "rope_theta": None, "rope_parameters": parameters,
            "layer_types": ["sliding_attention", "full_attention"],
        })  # fmt: skip
        assert ropes.layers == (
            Rope(16, 5e4, "half", axes=Axes([0, 1, 2, 0, 1, 2, 0, 0])),
            Rope(16, 5e5, "half", axes=Axes([0, 1, 2, 0, 1, 2, 0, 1])),
        )
        assert from_config(ropes.to_hf_config(version=5)).layers == ropes.layers

    def test_legacy_name(self) -> None:
        scaling = {"type": "xdrope", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                   "mscale_all_dim": 1.0, "xdrope_section": [2, 2, 2, 2]}  # fmt: skip
        ropes = from_config({**HUNYUAN, "rope_scaling": scaling})
        assert ropes.rope == Rope(16, 1e6, "half", scaling=NTK(1000.0), axes=Axes.sections((2, 2, 2, 2)))
        assert from_config(ropes.to_hf_config(version=5)).layers == ropes.layers
        whole = {
            **HUNYUAN,
            "model_type": "hunyuan_vl",
            "rope_scaling": scaling,
            "vision_config": {"model_type": "clip"},
        }
        assert from_config(whole).layers == ropes.layers
        three = from_config({**HUNYUAN, "rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}})
        assert three.axis_names == ("width", "height", "image")

    def test_ernie_as_published(self) -> None:
        """Its keys are flat. transformers has the script convert_ernie4_5_vl_moe_to_hf.py for it."""
        keys = {"head_dim": 128, "num_hidden_layers": 2, "rope_theta": 5e5, "max_position_embeddings": 131072}
        ropes = from_config({**keys, "model_type": "ernie4_5_moe_vl", "rope_3d": True, "freq_allocation": 20})
        assert ropes.layers == from_config({**keys, "model_type": "ernie4_5_vl_moe_text"}).layers
        with pytest.raises(RopeError, match="rope_3d must be"):
            from_config({**keys, "model_type": "ernie4_5_moe_vl", "rope_3d": False})

    @pytest.mark.parametrize(
        ("config", "scaling", "message"),
        [
            (QWEN2_VL, {"mrope_section": [4, 2, 3]}, "rope_scaling.mrope_section must add up to the 8 "
             "pairs that rotate, got [4, 2, 3], which adds up to 9"),
            (QWEN2_VL, {}, "mrope_section must add up to the 8 pairs that rotate, got [16, 24, 24], "
             "implied by model_type qwen2_vl (transformers 5.24 models/qwen2_vl), which adds up to 64"),
            (QWEN3_VL, {"mrope_section": [24, 20, 21]}, "add up to the 64 pairs that rotate, got [24, 20, 21], which"),
            ({**QWEN3_VL, "head_dim": 64}, {}, "add up to the 32 pairs that rotate, got [24, 20, 20], implied"),
            (QWEN2_VL, {"mrope_section": [4, 4]}, "must be a list of 3 numbers of pairs: time, height, width, got 2"),
            (QWEN2_VL, {"mrope_section": "4"}, "rope_scaling.mrope_section must be a list of 3 numbers of pairs"),
            (QWEN2_VL, {"mrope_section": [4, 2.5, 2]}, "rope_scaling.mrope_section[1] must be an integer"),
            (QWEN2_VL, {"mrope_section": [9, -1, 0]}, "rope_scaling.mrope_section[1] must be an integer from 0 to"),
            (QWEN2_VL, {"mrope_interleaved": True}, "rope_scaling.mrope_interleaved must be false, as in qwen2_vl"),
            (QWEN3_VL, {"mrope_interleaved": False}, "rope_scaling.mrope_interleaved must be true, as in qwen3_vl"),
            (HUNYUAN, {}, "mrope_section must be given in rope_parameters, got none"),
            (HUNYUAN, {"mrope_section": [4, 4]}, " must be a list of 3 to 4 numbers of pairs"),
            (HUNYUAN, {"mrope_section": [2, 2, 2, 2], "xdrope_section": [2, 2, 3, 1]},
             "rope_scaling.xdrope_section must agree with rope_scaling.mrope_section"),
            ({**QWEN3_VL, "model_type": "ernie4_5_vl_moe_text"}, {"mrope_section": [22, 21, 21]}, "h and w"),
        ],
    )  # fmt: skip
    def test_refused(self, config: dict[str, Any], scaling: dict[str, Any], message: str) -> None:
        config = {**config, "rope_scaling": {"rope_type": "default", **scaling}}
        with pytest.raises(RopeError) as raised:
            from_config(config)
        assert message in str(raised.value)
        if "agree" not in message:  # text does not need the sections
            assert from_config(config, text_only=True).rope.axes is None

    @pytest.mark.parametrize(
        ("model_type", "how"),
        [("llama", {}), ("brand_new", {"pairing": "half"}), ("brand_new", {"pairing": "interleaved"})],
    )
    def test_sections_of_a_model_with_one_axis(self, model_type: str, how: dict[str, str]) -> None:
        """Ignoring the sections would read a model with several axes as text, so the message warns of that first."""
        for key, value in (("mrope_section", [4, 2, 2]), ("xdrope_section", [4, 2, 2]), ("mrope_interleaved", True)):
            config = {**QWEN2_VL, "model_type": model_type, "rope_scaling": {"rope_type": "default", key: value}}
            with pytest.raises(RopeError) as raised:
                from_config(config, **how)  # type: ignore[arg-type]
            message = str(raised.value)
            reads = "reads an unknown model_type" if how else "knows this model_type"
            assert f"rope_scaling.{key} must not be given, since ropewalk {reads} with one position" in message
            assert "to several axes: build Rope(..., axes=Axes.sections(...)) by hand" in message
            assert message.endswith(f"For text alone, pass ignore=('rope_scaling.{key}',).")
            assert from_config(config, **how, ignore=(f"rope_scaling.{key}",)).rope.axes is None  # type: ignore[arg-type]

    def test_all_keys_of_sections_are_named_at_once(self) -> None:
        """Qwen3-ASR as it was published: a Qwen 3 for text and audio, whose tokens have one position on all axes."""
        stated = {"interleaved": True, "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
        text = {"model_type": "qwen3", "hidden_size": 2048, "num_attention_heads": 16, "head_dim": 128}
        text |= {"num_hidden_layers": 28, "rope_theta": 1e6, "rope_scaling": stated}
        config = {"model_type": "qwen3_asr", "thinker_config": {"model_type": "qwen3_asr", "text_config": text}}
        with pytest.raises(RopeError) as raised:
            from_config(config)
        every = tuple(f"thinker_config.text_config.rope_scaling.{key}" for key in list(stated)[:3])
        assert str(raised.value).endswith(f"pass ignore={every}.")
        assert from_config(config, ignore=every).rope == Rope(128, 1e6, "half")

    def test_what_writing_refuses(self) -> None:
        config = {**QWEN2_VL, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}
        ropes = from_config(config)
        assert from_config(config, text_only=True).to_hf_config(version=5) == ropes.to_hf_config(version=5)
        other = replace(ropes, layers=(replace(ropes.rope, axes=Axes([2, 0, 1, 0, 0, 0, 0, 0])),) * 2)
        with pytest.raises(RopeError, match="the config of qwen2_vl must be able to express the axes"):
            other.to_hf_config(version=4)


def test_a_size_is_refused_before_anything_of_that_size_is_built(tmp_path: Path) -> None:
    """Without sections in the config, the head size alone decides how many pairs get an axis."""
    huge, sizes = 2**22, {"block_count": 2, "embedding_length": 64, "attention.head_count": 4}
    keys = {**sizes, "rope.freq_base": 1e4, "rope.dimension_sections": [16, 24, 24, 0]}
    no_head = {**QWEN3_VL, "head_dim": None, "hidden_size": 4 * huge}
    sources: dict[str, Any] = {
        "head_dim": {**QWEN3_VL, "head_dim": huge},
        "hidden_size / num_attention_heads": {**no_head, "model_type": "qwen3_vl_moe_text"},
        "qwen2vl.rope.dimension_count": {**keys, "rope.dimension_count": huge},
        "glm4.rope.dimension_count": {**keys, "rope.dimension_count": 1},
        "qwen3vl.embedding_length / qwen3vl.attention.head_count": {**keys, "embedding_length": 4 * huge},
    }

    importlib.import_module("ropewalk.configs.gguf.read")  # loaded on first use, which takes memory as well

    def check(row: tuple[str, dict[str, Any]]) -> None:
        key, source = row
        architecture = key.partition(".")[0] if "." in key else ""
        path = write(tmp_path / f"{len(key)}.gguf", source, architecture=architecture) if architecture else source
        tracemalloc.start()
        try:
            with pytest.raises(RopeError, match=f"{re.escape(key)} must be an integer from 2 to 65536"):
                from_config(path)
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()

    each(((key, (key, source)) for key, source in sources.items()), check)
