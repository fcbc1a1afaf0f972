"""Compare the ropes of diffusers transformers with the output of their position classes (golden/diffusers.json)."""

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
from ropewalk import Axes, ModelRopes, Rope, RopeError, Rotation, from_config
from ropewalk.configs.tables.denoisers import CLASSES

GOLDEN = Path(__file__).parent.parent / "golden"
ROWS = {row["class_name"]: row for row in json.loads((GOLDEN / "diffusers.json").read_text())["rows"]}

GOLDEN_INPUTS = {"q": oracle.golden_q, "k": oracle.golden_k}
OF_BLOCKS = {"AllegroTransformer3DModel": ("height", "width")}
"""Classes whose ropes are applied one after another."""


def test_rotated() -> None:
    """The tolerance is the error of a float32 product of position and frequency, although most classes use float64.

    Positions that are not integers are rounded to float32 as well.
    """

    def check(row: dict[str, Any]) -> None:
        ropes = from_config(row["config"])
        assert len(ropes.axis_names) == (len(row["q_positions"]) if isinstance(row["q_positions"][0], list) else 0)
        compare(ropes, ropes.rope, row)
        assert set(ropes.extra_ropes) == {*row.get("others", {}), *OF_BLOCKS.get(row["class_name"], ())}
        for name, other in row.get("others", {}).items():
            compare(ropes, ropes.extra_ropes[name], other)

    def compare(ropes: ModelRopes, rope: Rope, row: dict[str, Any]) -> None:
        assert (ropes.heads or 1) == row["heads"]
        assert rope.head_dim == row["heads"] * row["head_dim"]
        for name in ("q", "k"):
            positions = torch.tensor(row[f"{name}_positions"])
            static = rope if rope.is_static else rope.at_length(int(positions.max()) + 1)
            x = torch.from_numpy(GOLDEN_INPUTS[name]([1, row["heads"], positions.shape[-1], row["head_dim"]]).copy())
            tables = static.at(positions.double() if positions.is_floating_point() else positions)
            rotated = x
            for block in (tables, *(ropes.extra_ropes[n].at(positions) for n in OF_BLOCKS.get(ropes.model_type, ()))):
                rotated = of_heads(block, row["heads"])(rotated, layout="bhsd")
            chosen = sorted({0, row["heads"] - 1})
            expected = np.array(row[f"{name}_rot"], dtype=np.float32).reshape(x[:, chosen].shape)
            scale = np.abs(static.inv_freq).max()
            bound = [scale * p * 2.0**-23 * (1 if positions.dtype == torch.int64 else 2) + 1e-6
                     for p in positions.double().reshape(-1, positions.shape[-1]).abs().amax(0).tolist()]  # fmt: skip
            bound = math.sqrt(2) * static.attention_factor * np.array(bound)[:, None]
            assert (np.abs(rotated[:, chosen].numpy() - expected) <= bound).all(), name
            assert not np.allclose(x[:, chosen].numpy(), expected, atol=0.1)

    def of_heads(rotation: Rotation, heads: int) -> Rotation:
        if heads == 1:
            return rotation
        tables = (table.unflatten(-1, (heads, -1)).transpose(0, 1) for table in (rotation.cos, rotation.sin))
        return Rotation(*tables, pairing=rotation.pairing, per_head=True)

    each(ROWS.items(), check)


def test_every_class_was_run() -> None:
    assert set(ROWS) == set(CLASSES)


def test_class_defaults_are_those_of_the_class() -> None:
    """Older files omit values that equal the defaults of the constructor."""

    def check(row: dict[str, Any]) -> None:
        left = {key: row["config"][key] for key in ("_class_name", *row["given"])}
        assert from_config(left).layers == from_config(row["config"]).layers

    each(ROWS.items(), check)


FLUX = {"_class_name": "FluxTransformer2DModel", "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56],
        "num_layers": 2, "num_single_layers": 3, "guidance_embeds": True}  # fmt: skip

LUMINA = {"_class_name": "Lumina2Transformer2DModel", "hidden_size": 48, "num_attention_heads": 2}
COGVIDEOX = {"_class_name": "CogVideoXTransformer3DModel", "use_rotary_positional_embeddings": True}


def test_the_size_of_a_head_is_that_of_the_config() -> None:
    ropes = from_config({**LUMINA, "axes_dim_rope": [8, 8, 8]})
    assert ropes.rope == Rope(24, 1e4, "interleaved", axes=Axes.axial((8, 8, 8)))
    assert ropes.origins["head_dim"] == "hidden_size / num_attention_heads"
    assert from_config(FLUX).origins["head_dim"] == "attention_head_dim"


def test_flux() -> None:
    ropes = from_config(FLUX)
    assert ropes.layers == (Rope(128, 1e4, "interleaved", axes=Axes.axial((16, 56, 56))),) * 5
    assert ropes.axis_names == ("image", "row", "column")
    assert ropes.origins["positions"].startswith("integers: the ids that the pipeline computes")
    assert "column: pairs 36-63" in ropes.explain()
    json.dumps(ropes.facts(), allow_nan=False)
    with pytest.raises(RopeError, match="must come from a Hugging Face config"):
        ropes.to_hf_config(version=5)


def test_a_part_of_the_head() -> None:
    """HiDream rotates the first half of each head if axes_dims_rope add up to it."""
    config = {"_class_name": "HiDreamImageTransformer2DModel", "axes_dims_rope": [32, 16, 16]}
    assert from_config(config).rope == Rope(128, 1e4, "interleaved", rotary_dim=64, axes=Axes.axial((32, 16, 16)))


def test_cosmos_without_scales_has_plain_blocks() -> None:
    ropes = from_config({"_class_name": "CosmosTransformer3DModel", "rope_scale": [1.0, 1.0, 1.0]})
    assert "fps is the pipeline's choice, which the config does not state" in ropes.explain()
    assert ropes.rope == Rope(128, 1e4, "half", axes=Axes.axial((44, 42, 42)))


@pytest.mark.parametrize(
    ("name", "said"),
    [  # read in diffusers 0.40: ChronoEditRotaryPosEmbed.forward, the Framepack pipeline, ZImage's _pad_with_ids
        ("ChronoEditTransformer3DModel", "of two frames of latents, the second is at rope_temporal_skip_len - 1"),
        ("HunyuanVideoFramepackTransformer3DModel", "the index that the pipeline gives a frame"),
        ("ZImageTransformer2DModel", "an image continues after the padding"),
    ],
)
def test_positions_that_are_not_those_of_a_plain_grid(name: str, said: str) -> None:
    assert said in from_config({"_class_name": name}).origins["positions"]


def test_sana_wm_without_positions() -> None:
    assert from_config({"_class_name": "SanaWMTransformer3DModel", "use_pe": False}).layers == (None,) * 20


def test_each_wavelength_of_an_axis_with_few_pairs() -> None:
    """Hunyuan videos loop after 201 frames, 50.3 of the latent ones: RIFLEx (arXiv:2502.15894) slows this pair."""
    said = from_config({"_class_name": "HunyuanVideoTransformer3DModel", "_diffusers_version": "0.42.1"}).explain()
    assert "time: 6.283, 12.57, 25.13, 50.27, 100.5, 201.1, 402.1, 804.2; height: 6.28 to 1,320; width: " in said


def test_kandinsky_6_may_rotate_in_cross_attention() -> None:
    config = {"_class_name": "Kandinsky6Transformer3DModel", "ca_rope": True, "axes_dims_a": [16, 24, 24]}
    ropes = from_config(config)
    assert ropes.extra_ropes["audio"] == Rope(64, 1e4, "interleaved")
    assert ropes.origins["cross attention"].startswith("ca_rope")


def test_ltx_says_that_its_heads_differ() -> None:
    ropes = from_config({"_class_name": "LTX2VideoTransformer3DModel", "rope_type": "split"})
    assert (ropes.heads, ropes.rope.head_dim, ropes.facts()["heads"]) == (32, 4096, 32)
    text = ropes.explain()
    assert "channel i of a head rotates with i + 64 (" in text
    assert "the channels are those of all 32 heads, of which each in turn has 64 pairs" in text
    assert "another rope: audio_video" in text
    assert "time: every third pair from 2 to 2045; height: every third pair from 0 to 2046;" in text
    assert "slowed" not in text  # its frequencies are far above those of a usual rope
    assert ropes.origins["head_dim"] == "num_attention_heads · attention_head_dim"
    assert "  ! the heads rotate differently: split the tables of the rope" in text
    assert from_config(FLUX).heads is None


@pytest.mark.parametrize(("name", "warning"), [("Allegro", "apply those of extra_ropes"), ("Helios", "not a rotation")])
def test_a_rope_that_is_not_all(name: str, warning: str) -> None:
    (said,) = from_config({"_class_name": f"{name}Transformer3DModel"}).warnings
    assert warning in said


def test_cogvideox_2b_rotates_nothing() -> None:
    ropes = from_config({"_class_name": "CogVideoXTransformer3DModel", "use_rotary_positional_embeddings": False})
    assert ropes.layers == (None,) * 30


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {**FLUX, "axes_dims_rope": [16, 56]},
            "axes_dims_rope must be a list of 3 numbers of channels: image, row",
        ),
        (
            {**FLUX, "axes_dims_rope": [16, 56, 58]},
            "axes_dims_rope must add up to the 128 channels of a head (attention_head_dim), "
            "got [16, 56, 58], which adds up to 130. Check that both belong to the same model.",
        ),
        ({**FLUX, "axes_dims_rope": [16, 56, 40]}, "got [16, 56, 40], which adds up to 112."),
        (
            {**FLUX, "attention_head_dim": 32, "axes_dims_rope": [8, 12, 10]},
            "the 32 channels of a head (attention_head_dim)",
        ),
        (
            {**FLUX, "attention_head_dim": 96, "axes_dims_rope": None},
            "got [16, 56, 56] (the default of the class), which add",
        ),
        ({**FLUX, "axes_dims_rope": None, "attention_head_dim": 1}, "attention_head_dim must be an integer from 2 to"),
        (
            {**LUMINA, "axes_dim_rope": [8, 8, 4]},
            "the 24 channels of a head (hidden_size / num_attention_heads), got [8, 8, 4]",
        ),
        ({**LUMINA, "num_attention_heads": 5}, "hidden_size must be a multiple of num_attention_heads=5, got 48"),
        (
            {"_class_name": "ZImageTransformer2DModel", "axes_dims": [32, 48, 32]},
            "the 128 channels of a head (dim / n_heads)",
        ),
        (
            {"_class_name": "HunyuanVideoTransformer3DModel", "rope_axes_dim": [16, 56, 40]},
            "rope_axes_dim must add up to the 128 channel",
        ),
        (
            {**COGVIDEOX, "attention_head_dim": 68},
            "attention_head_dim must add up to the 68 channels of a head (attention_head_dim), "
            "got [17, 24, 24] (the default of the class), which adds up to 65.",
        ),
        ({**FLUX, "axes_dims_rope": [16, 55, 57]}, "Axes.axial: channels must be even"),
        ({**FLUX, "axes_dims_rope": [16, 56, 0]}, "axes_dims_rope[2] must be an integer from 2 to"),
        ({**FLUX, "rope_theta": 256.0}, "'rope_theta' is about rotation and must be a key that this model_type reads"),
        ({**FLUX, "num_layers": 0}, "num_layers must be an integer"),
        (
            {"_class_name": "MochiTransformer3DModel"},
            "copy its pos_frequencies into LearnedRope.projected(...).inv_freq",
        ),
        ({"_class_name": "ErnieImageTransformer2DModel"}, "different angles, which is not a rotation"),
        ({"_class_name": "ZImageControlNetModel"}, "pass the folder of that transformer"),
        ({"_class_name": "RFD4ProteinaTransformer"}, "It has no rotary positions"),
        ({"_class_name": "HiDreamImageTransformer2DModel"}, "axes_dims_rope must be a list of 3 numbers of channels"),
        (
            {"_class_name": "HiDreamImageTransformer2DModel", "axes_dims_rope": [64, 64, 32]},
            "axes_dims_rope must add up to at most the 128 channels of a head (attention_head_dim), got [64, 64, 32]",
        ),
        ({"_class_name": "MiniMaxH3Transformer3DModel", "rope_freq_dim": 22}, "up to at most the 128 channels"),
        ({"_class_name": "MiniMaxH3Transformer3DModel", "rope_freq_dim": [16]}, "rope_freq_dim must be an integer"),
        (
            {"_class_name": "CosmosTransformer3DModel", "rope_scale": [1.0, 2.0]},
            "rope_scale must be a list of 3 numbers",
        ),
        ({"_class_name": "CosmosTransformer3DModel", "rope_scale": [1.0, 2.0, 0]}, "rope_scale[2] must be"),
        ({"_class_name": "Kandinsky6Transformer3DModel", "axes_dims_a": 64}, "axes_dims_a must be a list of numbers"),
        (
            {"_class_name": "OmniGenTransformer2DModel", "rope_scaling": {"type": "su"}},
            "rope_scaling must have short_factor and long_factor",
        ),
        ({"_class_name": "LTX2VideoTransformer3DModel", "rope_type": "half"}, "rope_type must be interleaved or split"),
        (
            {"_class_name": "LTX2VideoTransformer3DModel", "audio_num_attention_heads": 16},
            "audio_num_attention_heads must equal num_attention_heads=32, got 16",
        ),
        (
            {"_class_name": "LTX2VideoTransformer3DModel", "audio_cross_attention_dim": 2050},
            "audio_cross_attention_dim must be a multiple of 2 · 32 heads, got 2050",
        ),
        (
            {"_class_name": "LTXVideoTransformer3DModel", "num_attention_heads": 2**20},
            "the number of channels of all heads must be an integer from 2 to 65536",
        ),
        ({"_class_name": "FluxPipeline"}, "got 'FluxPipeline'. It is a pipeline: pass the folder of its transformer"),
        ({"_class_name": "Mine", "transformer": ["diffusers", "X"]}, "transformer/ next to model_index.json"),
    ],
)
def test_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeError) as raised:
        from_config(config)
    assert message in str(raised.value)


@pytest.mark.parametrize("how", [{"pairing": "interleaved"}, {"base": 1e4}, {"text_only": True}])
def test_arguments_for_text_models_are_refused(how: dict[str, Any]) -> None:
    says = f"{min(how)} requires a text model, got a config of diffusers: 'FluxTransformer2DM"
    with pytest.raises(RopeError, match=says):
        from_config(FLUX, **how)


def test_another_class() -> None:
    with pytest.raises(RopeError, match="_class_name must be a transformer that ropewalk knows, got 'SanaTransformer2"):
        from_config({"_class_name": "SanaTransformer2DModel"})


def test_the_folder_of_a_pipeline(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(
        json.dumps({"_class_name": "FluxPipeline", "_diffusers_version": "0.42.1"})
    )
    with pytest.raises(
        RopeError, match=r"model_index\.json: _class_name must .* It is a pipeline: pass the folder of its tr"
    ):
        from_config(tmp_path)
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(FLUX))
    assert from_config(tmp_path / "transformer").layers == from_config(FLUX).layers
