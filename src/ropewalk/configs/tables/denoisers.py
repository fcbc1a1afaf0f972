"""Transformer classes of diffusers: `CLASSES` maps a _class_name to its row, a `Denoiser`.

Source: models/transformers of diffusers 0.42.1, whose position classes were run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ropewalk.configs.denoiser import Denoiser, cogvideox_channels, interleaved, parts, wan_channels
from ropewalk.configs.families import denoisers as more
from ropewalk.rope.axes import Axes

_THW = ("time", "height", "width")
_HW = _THW[1:]
_TIME = ("time",)
_IRC = ("image", "row", "column")
_IDS = "integers: the ids that the pipeline computes, txt_ids and then img_ids, one row for each axis"
_GRID = "integers: frame, row and column of each patch, from 0; text is not rotated"
_FRAMEPACK = (
    "integers: the index that the pipeline gives a frame, and row and column of each patch, from 0; where patches of "
    "the history are merged, cos and sin are their mean; text is not rotated"
)
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


def _axial(
    names: tuple[str, ...], positions: str, channels: tuple[int, ...], base: tuple[float, str], **layers: int
) -> Denoiser:
    return Denoiser(names, positions, channels, "axes_dims_rope", _HEAD, base, layers)


def _joy_row(positions: str) -> Denoiser:
    return Denoiser(
        _THW,
        positions,
        (16, 56, 56),
        "rope_dim_list",
        {"hidden_size": 3072, "num_attention_heads": 24},
        (256.0, "theta"),
        {"num_layers": 20},
        position_keys=("rope_type",),
    )


def _kandinsky_row(
    channels: tuple[int, ...], blocks: str, count: int, scales: str, more: Callable[..., Any] | None
) -> Denoiser:
    positions = f"floats: frame, row and column of each patch, from 0, divided by {scales}"
    return Denoiser(_THW, positions, channels, "axes_dims", {}, (1e4, ""), {blocks: count}, more=more)


def _cosmos_row(layers: Mapping[str, int]) -> Denoiser:
    positions = "integers: frame, row and column of each patch, from 0; text is not rotated. The fps is the pipeline's "
    positions += "choice, which the config does not state: if a pipeline passes it, frames are multiplied by 24 / fps"
    return Denoiser(_THW, positions, wan_channels, "", _HEAD, (1e4, ""), layers, pairing="half", more=more.cosmos)


_QWEN = (
    "integers: frame from 0, row and column relative to the middle of the image; text continues after half of the "
    "longer side, with the same position in every row"
)
_PATCH = "integers: row and column of each patch; text is not rotated"
_CROPPED = "floats: {}row and column of each patch, scaled to the size of training; text is not rotated"
_FRAMES = "integers: the frames of audio from 0; text is not rotated"
_LTX = (
    "floats: 2 · x - 1 for each patch, where x is the second / 20, and the row and column in pixels / 2048{}; text is "
    "not rotated"
)
_LTX2 = Denoiser(
    _THW,
    _LTX.format(" (pos_embed_max_pos, base_height and base_width), at the middle of the patch"),
    parts(1, 1),
    "",
    {"attention_head_dim": 128},
    (1e4, "rope_theta"),
    {"num_layers": 48},
    position_keys=("rope_double_precision",),
    more=more.ltx2,
)
_HUNYUAN = {"num_layers": 20, "num_single_layers": 40}

CLASSES: dict[str, Denoiser] = {
    "FluxTransformer2DModel": _FLUX,
    "ChromaTransformer2DModel": _FLUX,
    "LongCatImageTransformer2DModel": _FLUX,
    "OvisImageTransformer2DModel": replace(_FLUX, layers={"num_layers": 6, "num_single_layers": 27}),
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
        _QWEN,
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
    "ChronoEditTransformer3DModel": replace(
        _wan_row(40, "rope_temporal_skip_len"),
        positions=f"{_GRID}; of two frames of latents, the second is at rope_temporal_skip_len - 1",
    ),
    "SkyReelsV2Transformer3DModel": _wan_row(32),
    "HunyuanVideoTransformer3DModel": _hunyuan_row(_HUNYUAN),
    "HunyuanVideoFramepackTransformer3DModel": replace(_hunyuan_row(_HUNYUAN), positions=_FRAMEPACK),
    "HunyuanVideo15Transformer3DModel": _hunyuan_row({"num_layers": 54}),
    "HunyuanImageTransformer2DModel": _hunyuan_row(_HUNYUAN, (64, 64)),
    "CogVideoXTransformer3DModel": Denoiser(
        _THW,
        _CROPPED.format("frame, "),
        cogvideox_channels,
        "",
        {"attention_head_dim": 64},
        (10_000.0, ""),
        {"num_layers": 30},
        switch=("use_rotary_positional_embeddings", False),
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
        "integers: text, padded to a multiple of 32, counts from 1 in the first row and is 0 in the others; an image "
        "continues after the padding in the first row, and has its row and column in the others",
        (32, 48, 48),
        "axes_dims",
        {"dim": 3840, "n_heads": 30},
        (256.0, "rope_theta"),
        {"n_layers": 30},
    ),
}

CLASSES |= {
    "FluxControlNetModel": _FLUX,
    "Flux3Transformer2DModel": _axial(
        (*_THW, "text"),
        "floats: half of the row and column of each patch in the second and third row; text counts up in the fourth; "
        "the others are 0, but for reference images, which are negative in the fourth",
        (32, 32, 32, 32),
        (1e4, "rope_theta"),
        num_layers=5,
        num_single_layers=28,
    ),
    "BriaFibo2Transformer2DModel": Denoiser(
        _IRC,
        "integers: the gist of the text counts from 1 in the first row and is 0 in the others; an image has "
        "max_num_gist_tokens + 1 in the first row, each further image one more, and its row and column in the others",
        (32, 48, 48),
        "axes_dims",
        {"dim": 3584, "n_heads": 28},
        (256.0, "rope_theta"),
        {"n_layers": 44},
    ),
    "QwenImageControlNetModel": _axial(_THW, _QWEN, (16, 56, 56), (1e4, ""), num_layers=60),
    "QwenImage21Transformer2DModel": _axial(
        _THW,
        "integers: text counts up in all rows; an image has the next number in the first row, and its row and column "
        "relative to its middle in the others; after it, the count goes on by its longer side",
        (16, 56, 56),
        (1e4, ""),
        num_layers=32,
    ),
    "NucleusMoEImageTransformer2DModel": _axial(_THW, _QWEN, (16, 56, 56), (1e4, ""), num_layers=24),
    "HiDreamImageTransformer2DModel": Denoiser(
        _IRC,
        "integers: 0, row and column of each patch; text is 0 in all rows",
        (),
        "axes_dims_rope",
        _HEAD,
        (1e4, ""),
        {"num_layers": 16, "num_single_layers": 32},
        whole=False,
    ),
    "MotifVideoTransformer3DModel": _hunyuan_row({"num_layers": 20, "num_single_layers": 40}),
    "HeliosTransformer3DModel": Denoiser(
        _THW,
        "integers: the index of the frame in the whole video, and row and column of each patch; text is not rotated",
        (44, 42, 42),
        "rope_dim",
        _HEAD,
        (1e4, "rope_theta"),
        {"num_layers": 40},
        more=more.helios,
    ),
    "SanaVideoTransformer3DModel": Denoiser(
        _THW,
        _GRID,
        wan_channels,
        "",
        {"attention_head_dim": 112},
        (1e4, ""),
        {"num_layers": 20},
        position_keys=("rope_max_seq_len",),
    ),
    "SanaWMTransformer3DModel": Denoiser(
        _THW,
        _GRID,
        wan_channels,
        "",
        {"linear_head_dim": 112},
        (1e4, ""),
        {"num_layers": 20},
        switch=("use_pe", True),
        more=more.camera,
    ),
    "WanAnimate2Transformer3DModel": Denoiser(
        _THW,
        "integers: frame, row and column of each patch, from 0; the reference starts at refer_offset_t, refer_offset_h "
        "and refer_offset_w, where -1 is the size of its grid, and its frames are refer_stride apart",
        wan_channels,
        "",
        {"dim": 5120, "num_heads": 40},
        (1e4, ""),
        {"num_layers": 40},
    ),
    "AnyFlowTransformer3DModel": _wan_row(40),
    "AnyFlowFARTransformer3DModel": Denoiser(
        _THW,
        "floats: frame, row and column of each patch, from 0; a patch of a compressed frame has the mean of the rows "
        "and columns that it covers; text is not rotated",
        wan_channels,
        "",
        _HEAD,
        (1e4, ""),
        {"num_layers": 40},
        position_keys=("rope_max_seq_len",),
    ),
    "MiniMaxH3Transformer3DModel": Denoiser(
        _THW,
        "floats: the position_ids that the pipeline computes, one row for each axis",
        (32, 32, 32),
        "rope_freq_dim",
        _HEAD,
        (1e4, "rope_theta"),
        {"num_layers": 50},
        pairing="half",
        whole=False,
        unit=2,
    ),
    "AllegroTransformer3DModel": Denoiser(
        _THW,
        "floats: frame, row and column of each patch, divided by interpolation_scale_t, _h and _w; text is not rotated",
        parts(3, 3),
        "",
        {"attention_head_dim": 96},
        (1e4, ""),
        {"num_layers": 32},
        pairing="half",
        more=more.allegro,
    ),
    "EasyAnimateTransformer3DModel": Denoiser(
        _THW,
        _CROPPED.format("frame, "),
        cogvideox_channels,
        "",
        {"attention_head_dim": 64},
        (1e4, ""),
        {"num_layers": 48},
    ),
    "ConsisIDTransformer3DModel": CLASSES["CogVideoXTransformer3DModel"],
    "CogView4Transformer2DModel": Denoiser(
        _HW,
        "integers: row · rope_axes_dim[0] // rows and column · rope_axes_dim[1] // columns; text is not rotated",
        parts(2, 2),
        "",
        {"attention_head_dim": 40},
        (1e4, ""),
        {"num_layers": 30},
        position_keys=("rope_axes_dim",),
        pairing="half",
    ),
    "GlmImageTransformer2DModel": Denoiser(
        _HW, _PATCH, parts(2, 2), "", {"attention_head_dim": 40}, (1e4, ""), {"num_layers": 30}, pairing="half"
    ),
    "PRXTransformer2DModel": Denoiser(
        _HW, _PATCH, (32, 32), "axes_dim", {"hidden_size": 1792, "num_heads": 28}, (1e4, "theta"), {"depth": 16}
    ),
    "JoyImageEditTransformer3DModel": _joy_row(
        "integers: frame, row and column of each patch, from 0; with rope_type mrope, text goes on in all rows after "
        "the largest of them, and otherwise it is not rotated"
    ),
    "JoyImageEditPlusTransformer3DModel": _joy_row(
        "integers: frame, row and column of each patch; the frames of all images are counted on, and the others start "
        "at 0; text is not rotated"
    ),
    "HunyuanDiT2DModel": Denoiser(
        _HW,
        _CROPPED.format(""),
        parts(2, 2),
        "",
        {"attention_head_dim": 88},
        (1e4, ""),
        {"num_layers": 28},
        axes=lambda channels, _: Axes.axial(channels, order=(1, 0)),  # for positions (row, column)
    ),
    "LuminaNextDiT2DModel": Denoiser(
        _HW,
        "floats: row and column of each patch, divided by the ratio of the image's side to that of training; after "
        "scaling_watershed, the pipeline multiplies the base by this ratio instead; text is not rotated",
        parts(2, 2),
        "",
        {"hidden_size": 2304, "num_attention_heads": 32},
        (1e4, ""),
        {"num_layers": 32},
        axes=lambda channels, _: Axes.alternating(channels),
    ),
    "Kandinsky5Transformer3DModel": _kandinsky_row(
        (16, 24, 24), "num_visual_blocks", 32, "the scale factors of the pipeline", more.text
    ),
    "Kandinsky6Transformer3DModel": _kandinsky_row(
        (32, 48, 48), "num_visual_blocks", 60, "scale_factor", more.text_and_audio
    ),
    "Kandinsky6SRTransformer3DModel": _kandinsky_row((16, 24, 24), "num_visual_blocks", 32, "scale_factor", None),
    "CosmosTransformer3DModel": _cosmos_row({"num_layers": 28}),
    "CosmosControlNetModel": _cosmos_row({"n_controlnet_blocks": 4}),
    "Cosmos3OmniTransformer": Denoiser(
        _THW,
        "integers, or floats with a frame rate: text counts up in all rows; after it and "
        "unified_3d_mrope_temporal_modality_margin, frames count on in the first row, with rows and columns from 0",
        (24, 20, 20),
        "rope_axes_dim",
        {"head_dim": 128},
        (5e6, "rope_theta"),
        {"num_hidden_layers": 36},
        position_keys=("rope_scaling",),
        pairing="half",
        whole=False,
        axes=interleaved,
    ),
    "Ideogram4Transformer2DModel": Denoiser(
        _THW,
        "integers: text counts up in all rows; an image has 65536 in the first row, and 65536 plus its row and column "
        "in the others",
        (24, 20, 20),
        "mrope_section",
        {"attention_head_dim": 256},
        (5e6, "rope_theta"),
        {"num_layers": 34},
        pairing="half",
        whole=False,
        axes=interleaved,
    ),
    "AceStepTransformer1DModel": Denoiser(
        _TIME,
        _FRAMES,
        parts(1, 1),
        "",
        {"head_dim": 128},
        (1e6, "rope_theta"),
        {"num_hidden_layers": 24},
        pairing="half",
    ),
    "StableAudioDiTModel": Denoiser(
        _TIME,
        "integers: 0 is the token of the global condition, and the frames of audio follow; text is not rotated",
        parts(1, 2),
        "",
        {"attention_head_dim": 64},
        (1e4, ""),
        {"num_layers": 24},
        pairing="half",
        whole=False,
    ),
    "StableAudio3DiTModel": Denoiser(
        _TIME,
        "integers: the tokens of memory, then the frames of audio, from 0; text is not rotated",
        parts(1, 2),
        "",
        {"embed_dim": 1536, "num_heads": 24},
        (1e4, ""),
        {"depth": 24},
        pairing="half",
        whole=False,
    ),
    "LongCatAudioDiTTransformer": Denoiser(
        _TIME,
        "integers: the frames of audio from 0, and the tokens of text from 0",
        parts(1, 1),
        "",
        {"dit_dim": 1536, "dit_heads": 24},
        (1e5, ""),
        {"dit_depth": 24},
        pairing="half",
    ),
    "MiniMaxMusic3Transformer1DModel": Denoiser(
        _TIME,
        _FRAMES,
        (32,),
        "rotary_dim",
        {"attention_head_dim": 64},
        (1e4, ""),
        {"num_layers": 36},
        pairing="half",
        whole=False,
        unit=1,
    ),
    "OmniGenTransformer2DModel": Denoiser(
        ("token",),
        "integers: the tokens of text and images from 0",
        parts(1, 1),
        "",
        {"hidden_size": 3072, "num_attention_heads": 32},
        (1e4, "rope_base"),
        {"num_layers": 32},
        pairing="half",
        more=more.longrope,
    ),
    "LTXVideoTransformer3DModel": Denoiser(
        _THW, _LTX.format(""), parts(1, 1), "", {"attention_head_dim": 64}, (1e4, ""), {"num_layers": 28}, more=more.ltx
    ),
    "LTX2VideoTransformer3DModel": _LTX2,
    "SanaWMLTX2RefinerTransformer3DModel": _LTX2,
}
"""Maps a _class_name to its row."""

REFUSED = {
    "MochiTransformer3DModel": "Its frequencies are learned and are in the checkpoint, not in the config: copy its "
    "pos_frequencies into LearnedRope.projected(...).inv_freq, as docs/learned.md shows.",
    "ErnieImageTransformer2DModel": "Its code (transformer_ernie_image.py) gives the two channels of a pair different "
    "angles, which is not a rotation.",
    "RFD4ProteinaTransformer": "It has no rotary positions.",
    "ZImageControlNetModel": "Its rope is that of the ZImageTransformer2DModel that it is used with: pass the folder "
    "of that transformer.",
}
"""Maps a _class_name to the reason why no `Rope` describes the class."""
