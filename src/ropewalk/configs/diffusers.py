"""Transformers of diffusers, which denoise images and video: the rope of a config that says its `_class_name`.

They rotate a block of channels for each axis, pairs interleaved, each block with a progression of its own.

Source: models/transformers of diffusers 0.42.1, whose position classes were run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ropewalk._checks import MAX_HEAD_DIM, integer, nearest, shown
from ropewalk.axes import Axes
from ropewalk.configs import strays
from ropewalk.configs.fields import Fields
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.rope import Rope

_THW = ("time", "height", "width")
_IRC = ("image", "row", "column")
_IDS = "integers: the ids that the pipeline makes, txt_ids and then img_ids, a row for each axis"
_GRID = "integers: frame, row and column of each patch, from 0; text is not rotated"


@dataclass(frozen=True)
class Denoiser:
    """How a class of diffusers rotates.

    Args:
        axis_names: what the rows of positions are.
        positions: what they hold, in words.
        channels: channels of each axis where a config does not say them, or from the size of a head.
        key: key of the channels of each axis; "" where the size of a head says them.
        head: key of the size of a head, and that of its class; or the keys of the width of the model and of its number
            of heads, and those of its class.
        base: that of its class, and its key where it has one.
        layers: keys of numbers of layers, which are added, and those of its class.
        switch: key without which nothing rotates; "" where there is none.
        known: other keys about rotation, which say positions.
    """

    axis_names: tuple[str, ...]
    positions: str
    channels: tuple[int, ...] | Callable[[int], tuple[int, ...]]
    key: str
    head: Mapping[str, int]
    base: tuple[float, str]
    layers: Mapping[str, int]
    switch: str = ""
    known: tuple[str, ...] = ()


def _wan(head_dim: int) -> tuple[int, ...]:
    """Two channels of six for height and width each, made even; the rest for the time."""
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


def _cogvideox(head_dim: int) -> tuple[int, ...]:
    """A quarter for the time, three eighths for height and width each."""
    return head_dim // 4, head_dim // 8 * 3, head_dim // 8 * 3


_HEAD = {"attention_head_dim": 128}
_BOTH = {"num_layers": 19, "num_single_layers": 38}
_FLUX = Denoiser(_IRC, _IDS, (16, 56, 56), "axes_dims_rope", _HEAD, (10_000.0, ""), _BOTH)
_BRIA = Denoiser(
    _IRC, _IDS, (16, 56, 56), "axes_dims_rope", _HEAD, (10_000.0, "rope_theta"), _BOTH, known=("time_theta",)
)


def _of_wan(layers: int, *known: str) -> Denoiser:
    known = ("rope_max_seq_len", *known)
    return Denoiser(_THW, _GRID, _wan, "", _HEAD, (10_000.0, ""), {"num_layers": layers}, known=known)


def _of_hunyuan(layers: Mapping[str, int], channels: tuple[int, ...] = (16, 56, 56)) -> Denoiser:
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
        "integers: frame from 0, row and column counted from the middle of the image, negative before it; text goes on "
        "after the larger half side, the same in every row",
        (16, 56, 56),
        "axes_dims_rope",
        _HEAD,
        (10_000.0, ""),
        {"num_layers": 60},
        known=("use_layer3d_rope",),
    ),
    "WanTransformer3DModel": _of_wan(40),
    "WanVACETransformer3DModel": _of_wan(40),
    "WanAnimateTransformer3DModel": _of_wan(40),
    "ChronoEditTransformer3DModel": _of_wan(40, "rope_temporal_skip_len"),
    "SkyReelsV2Transformer3DModel": _of_wan(32),
    "HunyuanVideoTransformer3DModel": _of_hunyuan(_HUNYUAN),
    "HunyuanVideoFramepackTransformer3DModel": _of_hunyuan(_HUNYUAN),
    "HunyuanVideo15Transformer3DModel": _of_hunyuan({"num_layers": 54}),
    "HunyuanImageTransformer2DModel": _of_hunyuan(_HUNYUAN, (64, 64)),
    "CogVideoXTransformer3DModel": Denoiser(
        _THW,
        "frame, row and column of each patch, scaled to the sample size that it was trained on: floats; text is not "
        "rotated",
        _cogvideox,
        "",
        {"attention_head_dim": 64},
        (10_000.0, ""),
        {"num_layers": 30},
        switch="use_rotary_positional_embeddings",
    ),
    "Lumina2Transformer2DModel": Denoiser(
        _THW,
        "integers: text counts on in the first row, 0 in the others; an image has the length of the text there, and "
        "its row and column",
        (32, 32, 32),
        "axes_dim_rope",
        {"hidden_size": 2304, "num_attention_heads": 24},
        (10_000.0, ""),
        {"num_layers": 26},
    ),
    "ZImageTransformer2DModel": Denoiser(
        _THW,
        "integers: text counts from 1 in the first row, 0 in the others; an image comes after it, with its row and "
        "column",
        (32, 48, 48),
        "axes_dims",
        {"dim": 3840, "n_heads": 30},
        (256.0, "rope_theta"),
        {"n_layers": 30},
    ),
}
"""_class_name → row."""

_PER_HEAD = (
    "Its frequencies run over the whole width of the model, so that each head has others, and a Rope has the "
    "same for all: hand its tables, head by head, to Rotation(..., per_head=True)."
)
_REFUSED = {
    "MochiTransformer3DModel": "Its frequencies are learned and stand in the checkpoint, not in the config: put its "
    "pos_frequencies into LearnedRope.projected(...).inv_freq, as docs/learned.md shows.",
    "LTXVideoTransformer3DModel": _PER_HEAD,
    "LTX2VideoTransformer3DModel": _PER_HEAD,
}


def is_denoiser(values: Mapping[str, Any]) -> bool:
    """Whether a config is one of diffusers."""
    return isinstance(values.get("_class_name"), str) and "model_type" not in values


def read(values: Mapping[str, Any], source: str) -> ModelRopes:
    """The ropes of a transformer of diffusers; see `from_config` for errors."""
    fields = Fields(values, source)
    name = fields.get("_class_name")
    row = CLASSES.get(name)
    if row is None:
        must = "it must be a transformer that ropewalk knows"
        raise fields.error("_class_name", must, shown(name), _REFUSED.get(name) or _hint(name, values))
    origins = {"pairing": f"_class_name {name} (diffusers 0.42.1)", "positions": row.positions}
    layers = sum(fields.layers((key,)) if fields.has(key) else default for key, default in row.layers.items())
    origins["layers"] = " + ".join(row.layers)
    if row.switch and not fields.boolean(row.switch, False):
        origins["rope"] = f"{row.switch} is not true, so nothing rotates"
        return ModelRopes((None,) * layers, name, source, origins=origins)
    head_dim, of_head = _head(fields, row)
    channels = _channels(fields, row, head_dim)
    if sum(channels) != head_dim:
        must = f"the channels of the axes must add up to the {head_dim} of a head, {of_head}"
        got = f"{list(channels)}{'' if fields.has(row.key) else ' of its class'}, which add up to {sum(channels)}"
        raise fields.error(
            row.key or of_head, must, got, "Are both from the same model? Its own code needs them equal."
        )
    origins["head_dim"] = of_head
    origins["axes"] = row.key or of_head
    base, key = row.base
    origins["base"] = f"implied by {name}"
    if key and fields.has(key):
        base, origins["base"] = fields.base(key, fields.get(key), None), key
    warnings = strays.refuse(fields, {}, (*row.known, row.key))
    with fields.named():
        rope = Rope(head_dim, base, "interleaved", axes=Axes.axial(channels))
    return ModelRopes(
        (rope,) * layers, name, source, axis_names=row.axis_names, origins=origins, warnings=tuple(warnings)
    )


def _hint(name: str, values: Mapping[str, Any]) -> str:
    """What to pass in place of a pipeline; or the class whose name was misspelt: another number is another model."""
    if name.endswith("Pipeline") or "transformer" in values:
        return "It is a pipeline: pass the folder of its transformer, transformer/ beside model_index.json."
    ours = _stem(name)
    likely = [k for k in CLASSES if _digits(_stem(k)) == _digits(ours) and nearest(ours, [_stem(k)], likeness=0.85)]
    return f"Its own code says how it rotates; build a Rope by hand.{nearest(name, likely)}"


def _stem(name: str) -> str:
    """flux of FluxTransformer2DModel."""
    return re.sub(r"trans\w*$", "", name.lower())


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))


def _head(fields: Fields, row: Denoiser) -> tuple[int, str]:
    """Channels of a head, and the keys that say them."""
    sizes = {key: fields.size(key) if fields.has(key) else own for key, own in row.head.items()}
    if len(sizes) == 1:
        ((key, size),) = sizes.items()
        return integer(fields.source, key, size, at_least=2, at_most=MAX_HEAD_DIM), key
    width, heads = sizes
    if sizes[width] % sizes[heads]:
        must, cure = f"it must be a multiple of {heads}={sizes[heads]}", "Are both from the same model?"
        raise fields.error(width, must, str(sizes[width]), cure)
    return sizes[width] // sizes[heads], f"{width} / {heads}"


def _channels(fields: Fields, row: Denoiser, head_dim: int) -> tuple[int, ...]:
    """Channels of each axis."""
    if not isinstance(row.channels, tuple):
        return row.channels(head_dim)
    stated = fields.get(row.key)
    if stated is None:
        return row.channels
    if not isinstance(stated, list | tuple) or len(stated) != len(row.axis_names):
        must = f"it must be a list of {len(row.axis_names)} numbers of channels: {', '.join(row.axis_names)}"
        raise fields.error(row.key, must, shown(stated), "Is it the list of another model?")
    return tuple(
        integer(fields.source, f"{row.key}[{i}]", value, at_least=2, at_most=MAX_HEAD_DIM)
        for i, value in enumerate(stated)
    )
