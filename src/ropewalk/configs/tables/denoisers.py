"""Transformer classes of diffusers: `CLASSES` maps a _class_name to its row, a `Denoiser`.

Source: models/transformers of diffusers 0.42.1, whose position classes were run.
"""

from __future__ import annotations

from collections.abc import Mapping

from ropewalk.configs.denoiser import Denoiser, cogvideox_channels, wan_channels

_THW = ("time", "height", "width")
_IRC = ("image", "row", "column")
_IDS = "integers: the ids that the pipeline computes, txt_ids and then img_ids, one row for each axis"
_GRID = "integers: frame, row and column of each patch, from 0; text is not rotated"
_HEAD = {"attention_head_dim": 128}
_BOTH = {"num_layers": 19, "num_single_layers": 38}
_FLUX = Denoiser(_IRC, _IDS, (16, 56, 56), "axes_dims_rope", _HEAD, (10_000.0, ""), _BOTH)
_BRIA = Denoiser(
    _IRC, _IDS, (16, 56, 56), "axes_dims_rope", _HEAD, (10_000.0, "rope_theta"), _BOTH, position_keys=("time_theta",)
)


def _wan_row(layers: int, *position_keys: str) -> Denoiser:
    keys = ("rope_max_seq_len", *position_keys)
    return Denoiser(_THW, _GRID, wan_channels, "", _HEAD, (10_000.0, ""), {"num_layers": layers}, position_keys=keys)


def _hunyuan_row(layers: Mapping[str, int], channels: tuple[int, ...] = (16, 56, 56)) -> Denoiser:
    names = _THW[-len(channels) :]
    return Denoiser(names, _GRID, channels, "rope_axes_dim", _HEAD, (256.0, "rope_theta"), layers)


_HUNYUAN = {"num_layers": 20, "num_single_layers": 40}

CLASSES: dict[str, Denoiser] = {
    "FluxTransformer2DModel": _FLUX,
    "ChromaTransformer2DModel": _FLUX,
    "LongCatImageTransformer2DModel": _FLUX,
    "OvisImageTransformer2DModel": Denoiser(
        _IRC,
        _IDS,
        (16, 56, 56),
        "axes_dims_rope",
        _HEAD,
        (10_000.0, ""),
        {"num_layers": 6, "num_single_layers": 27},
    ),
    "BriaTransformer2DModel": _BRIA,
    "BriaFiboTransformer2DModel": _BRIA,
    "Krea2Transformer2DModel": Denoiser(
        _IRC, _IDS, (32, 48, 48), "axes_dims_rope", _HEAD, (1000.0, "rope_theta"), {"num_layers": 28}
    ),
    "Flux2Transformer2DModel": Denoiser(
        ("time", "height", "width", "text"),
        _IDS,
        (32, 32, 32, 32),
        "axes_dims_rope",
        _HEAD,
        (2000.0, "rope_theta"),
        {"num_layers": 8, "num_single_layers": 48},
    ),
    "QwenImageTransformer2DModel": Denoiser(
        _THW,
        "integers: frame from 0, row and column relative to the middle of the image; text continues after half of the "
        "longer side, with the same position in every row",
        (16, 56, 56),
        "axes_dims_rope",
        _HEAD,
        (10_000.0, ""),
        {"num_layers": 60},
        position_keys=("use_layer3d_rope",),
    ),
    "WanTransformer3DModel": _wan_row(40),
    "WanVACETransformer3DModel": _wan_row(40),
    "WanAnimateTransformer3DModel": _wan_row(40),
    "ChronoEditTransformer3DModel": _wan_row(40, "rope_temporal_skip_len"),
    "SkyReelsV2Transformer3DModel": _wan_row(32),
    "HunyuanVideoTransformer3DModel": _hunyuan_row(_HUNYUAN),
    "HunyuanVideoFramepackTransformer3DModel": _hunyuan_row(_HUNYUAN),
    "HunyuanVideo15Transformer3DModel": _hunyuan_row({"num_layers": 54}),
    "HunyuanImageTransformer2DModel": _hunyuan_row(_HUNYUAN, (64, 64)),
    "CogVideoXTransformer3DModel": Denoiser(
        _THW,
        "floats: frame, row and column of each patch, scaled to the sample size of training; text is not rotated",
        cogvideox_channels,
        "",
        {"attention_head_dim": 64},
        (10_000.0, ""),
        {"num_layers": 30},
        switch="use_rotary_positional_embeddings",
    ),
    "Lumina2Transformer2DModel": Denoiser(
        _THW,
        "integers: text counts up in the first row and is 0 in the others; an image has the length of the text in the "
        "first row, and its row and column in the others",
        (32, 32, 32),
        "axes_dim_rope",
        {"hidden_size": 2304, "num_attention_heads": 24},
        (10_000.0, ""),
        {"num_layers": 26},
    ),
    "ZImageTransformer2DModel": Denoiser(
        _THW,
        "integers: text counts from 1 in the first row and is 0 in the others; an image continues after it in the "
        "first row, and has its row and column in the others",
        (32, 48, 48),
        "axes_dims",
        {"dim": 3840, "n_heads": 30},
        (256.0, "rope_theta"),
        {"n_layers": 30},
    ),
}
"""Maps a _class_name to its row."""

_PER_HEAD = (
    "Its frequencies differ between heads, since they run over the whole width of the model. A Rope has the same "
    "ones for all heads: pass its tables, head by head, to Rotation(..., per_head=True)."
)
REFUSED = {
    "MochiTransformer3DModel": "Its frequencies are learned and are in the checkpoint, not in the config: copy its "
    "pos_frequencies into LearnedRope.projected(...).inv_freq, as docs/learned.md shows.",
    "LTXVideoTransformer3DModel": _PER_HEAD,
    "LTX2VideoTransformer3DModel": _PER_HEAD,
}
"""Maps a _class_name to the reason why no `Rope` describes the class."""
