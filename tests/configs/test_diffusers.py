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
from ropewalk import Axes, Rope, RopeError, from_config
from ropewalk.configs.tables.denoisers import CLASSES

GOLDEN = Path(__file__).parent.parent / "golden"
ROWS = {row["class_name"]: row for row in json.loads((GOLDEN / "diffusers.json").read_text())["rows"]}


def test_rotated() -> None:
    """The tolerance is the error of a float32 product of position and frequency, although most classes use float64."""

    def check(row: dict[str, Any]) -> None:
        ropes = from_config(row["config"])
        positions = torch.tensor(row["positions"])
        assert len(ropes.axis_names) == len(positions)
        assert ropes.rope.head_dim == row["head_dim"]
        x = torch.from_numpy(oracle.golden_q([1, 1, positions.shape[1], row["head_dim"]]).copy())
        expected = np.array(row["q_rot"], dtype=np.float32).reshape(x.shape)
        bound = math.sqrt(2) * np.array([p * 2.0**-23 + 1e-6 for p in positions.abs().amax(0).tolist()])[:, None]
        assert (np.abs(ropes.rope.at(positions)(x, layout="bhsd").numpy() - expected) <= bound).all()
        assert not np.allclose(x.numpy(), expected, atol=0.1)

    each(ROWS.items(), check)


def test_every_class_was_run() -> None:
    assert set(ROWS) == set(CLASSES)


def test_class_defaults_are_those_of_the_class() -> None:
    """Older files omit values that equal the defaults of the constructor."""

    def check(row: dict[str, Any]) -> None:
        left = {key: value for key, value in row["config"].items() if key in ("_class_name", CLASSES[name(row)].switch)}
        assert from_config(left).layers == from_config(row["config"]).layers

    def name(row: dict[str, Any]) -> str:
        return str(row["class_name"])

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
        ({"_class_name": "LTXVideoTransformer3DModel"}, "run over the whole width of the model. A Rope has the same"),
        ({"_class_name": "LTX2VideoTransformer3DModel"}, "run over the whole width of the model. A Rope has the same"),
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
    says = "pairing, base and text_only require a text model, got a config of diffusers: 'FluxTransformer2DM"
    with pytest.raises(RopeError, match=says):
        from_config(FLUX, **how)


def test_a_misspelt_class_is_recognised() -> None:
    def suggested_class(name: str) -> str:
        with pytest.raises(RopeError, match="_class_name must be a transformer that ropewalk knows") as raised:
            from_config({"_class_name": name})
        return str(raised.value).partition("Did you mean ")[2].strip("'?")

    for name in ("FluxTransformer", "FluxTransfomer2DModel", "fluxTransformer2DModel", "FluxxTransformer2DModel"):
        assert suggested_class(name) == "FluxTransformer2DModel"
    assert suggested_class("HunyuanVideoTransformer2DModel") == "HunyuanVideoTransformer3DModel"
    # Other classes of diffusers 0.42.1, some with names that are similar to a known one.
    others = (
        "BriaFibo2Transformer2DModel CogView4Transformer2DModel CosmosTransformer3DModel EasyAnimateTransformer3DModel "
        "ErnieImageTransformer2DModel Flux3Transformer2DModel GlmImageTransformer2DModel SanaTransformer2DModel "
        "SanaVideoTransformer3DModel Transformer2DModel WanAnimate2Transformer3DModel AutoencoderKL"
    )
    assert {suggested_class(name) for name in others.split()} == {""}


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
