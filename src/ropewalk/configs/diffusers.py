"""Read configs of diffusers' transformers, which denoise images and video. The key `_class_name` names the class.

Their heads have one block of channels for each axis of the positions. The pairs are interleaved, and each block has its
own progression of frequencies.

Source: models/transformers of diffusers 0.42.1, whose position classes were run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ropewalk._checks import MAX_HEAD_DIM, integer, nearest, shown
from ropewalk.configs import unread_keys
from ropewalk.configs.fields import Fields
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.rope.axes import Axes
from ropewalk.rope.rope import Rope

_THW = ("time", "height", "width")
_IRC = ("image", "row", "column")
_IDS = "integers: the ids that the pipeline computes, txt_ids and then img_ids, one row for each axis"
_GRID = "integers: frame, row and column of each patch, from 0; text is not rotated"


@dataclass(frozen=True)
class Denoiser:
    """The facts that a transformer class of diffusers implies about rotation.

    Args:
        axis_names: the names of the axes of the positions.
        positions: what the positions on these axes are, in words.
        channels: the number of channels of each axis for configs that do not state it, or a function that computes
            these numbers from head_dim.
        key: config key of the number of channels of each axis; "" if head_dim determines it.
        head: maps config keys to the defaults of the class. There is one key, that of head_dim, or there are two: that
            of the width of the model and that of the number of heads.
        base: the default base of the class, and the config key of the base; "" if there is no such key.
        layers: maps config keys to the defaults of the class. The number of layers is the sum of their values.
        switch: config key that enables the rotation. Nothing rotates unless its value is true. "" if there is none.
        position_keys: other keys about rotation, which change only the positions and not the rope.
    """

    axis_names: tuple[str, ...]
    positions: str
    channels: tuple[int, ...] | Callable[[int], tuple[int, ...]]
    key: str
    head: Mapping[str, int]
    base: tuple[float, str]
    layers: Mapping[str, int]
    switch: str = ""
    position_keys: tuple[str, ...] = ()


def _wan(head_dim: int) -> tuple[int, ...]:
    """Return the numbers of channels of time, height and width.

    Height and width each have a third of the head, rounded down to an even number. Time has the other channels.
    """
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


def _cogvideox(head_dim: int) -> tuple[int, ...]:
    """Return the numbers of channels of time (a quarter), height (three eighths) and width (three eighths)."""
    return head_dim // 4, head_dim // 8 * 3, head_dim // 8 * 3


_HEAD = {"attention_head_dim": 128}
_BOTH = {"num_layers": 19, "num_single_layers": 38}
_FLUX = Denoiser(_IRC, _IDS, (16, 56, 56), "axes_dims_rope", _HEAD, (10_000.0, ""), _BOTH)
_BRIA = Denoiser(
    _IRC, _IDS, (16, 56, 56), "axes_dims_rope", _HEAD, (10_000.0, "rope_theta"), _BOTH, position_keys=("time_theta",)
)


def _wan_row(layers: int, *position_keys: str) -> Denoiser:
    keys = ("rope_max_seq_len", *position_keys)
    return Denoiser(_THW, _GRID, _wan, "", _HEAD, (10_000.0, ""), {"num_layers": layers}, position_keys=keys)


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
        _cogvideox,
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
_REFUSED = {
    "MochiTransformer3DModel": "Its frequencies are learned and are in the checkpoint, not in the config: copy its "
    "pos_frequencies into LearnedRope.projected(...).inv_freq, as docs/learned.md shows.",
    "LTXVideoTransformer3DModel": _PER_HEAD,
    "LTX2VideoTransformer3DModel": _PER_HEAD,
}


def is_denoiser(values: Mapping[str, Any]) -> bool:
    """Whether the config is that of a diffusers model."""
    return isinstance(values.get("_class_name"), str) and "model_type" not in values


def read(values: Mapping[str, Any], source: str) -> ModelRopes:
    """Read the ropes of a diffusers transformer. See `from_config` for errors."""
    fields = Fields(values, source)
    name = fields.get("_class_name")
    row = CLASSES.get(name)
    if row is None:
        must = "must be a transformer that ropewalk knows"
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
        must = f"must add up to the {head_dim} channels of a head ({of_head})"
        default = "" if fields.has(row.key) else " (the default of the class)"
        got = f"{list(channels)}{default}, which adds up to {sum(channels)}"
        raise fields.error(row.key or of_head, must, got, "Check that both belong to the same model.")
    origins["head_dim"] = of_head
    origins["axes"] = row.key or of_head
    base, key = row.base
    origins["base"] = f"implied by {name}"
    if key and fields.has(key):
        base, origins["base"] = fields.check_base(key, fields.get(key)), key
    warnings = unread_keys.refuse(fields, {}, (*row.position_keys, row.key))
    with fields.prefix_errors():
        rope = Rope(head_dim, base, "interleaved", axes=Axes.axial(channels))
    return ModelRopes(
        (rope,) * layers, name, source, axis_names=row.axis_names, origins=origins, warnings=tuple(warnings)
    )


def _hint(name: str, values: Mapping[str, Any]) -> str:
    """Return a fix for the error about an unknown class.

    The fix names what to pass instead of a pipeline, or a known class with a similar name.
    """
    if name.endswith("Pipeline") or "transformer" in values:
        return "It is a pipeline: pass the folder of its transformer, transformer/ next to model_index.json."
    stem = _stem(name)
    likely = [k for k in CLASSES if _digits(_stem(k)) == _digits(stem) and nearest(stem, [_stem(k)], likeness=0.85)]
    return f"Build a Rope by hand: the model's own code defines how it rotates.{nearest(name, likely)}"


def _stem(name: str) -> str:
    """Return the name of a class in lower case and without its suffix, e.g. "flux" for FluxTransformer2DModel."""
    return re.sub(r"trans\w*$", "", name.lower())


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))


def _head(fields: Fields, row: Denoiser) -> tuple[int, str]:
    """Return head_dim, and a text that names the keys that it came from."""
    sizes = {key: fields.size(key) if fields.has(key) else default for key, default in row.head.items()}
    if len(sizes) == 1:
        ((key, size),) = sizes.items()
        return integer(fields.source, key, size, at_least=2, at_most=MAX_HEAD_DIM), key
    width, heads = sizes
    if sizes[width] % sizes[heads]:
        must, fix = f"must be a multiple of {heads}={sizes[heads]}", "Check that both belong to the same model."
        raise fields.error(width, must, str(sizes[width]), fix)
    return sizes[width] // sizes[heads], f"{width} / {heads}"


def _channels(fields: Fields, row: Denoiser, head_dim: int) -> tuple[int, ...]:
    """Return the number of channels of each axis."""
    if not isinstance(row.channels, tuple):
        return row.channels(head_dim)
    numbers = fields.get(row.key)
    if numbers is None:
        return row.channels
    if not isinstance(numbers, list | tuple) or len(numbers) != len(row.axis_names):
        must = f"must be a list of {len(row.axis_names)} numbers of channels: {', '.join(row.axis_names)}"
        raise fields.error(row.key, must, shown(numbers), "Check that it is the list of this model.")
    return tuple(
        integer(fields.source, f"{row.key}[{i}]", value, at_least=2, at_most=MAX_HEAD_DIM)
        for i, value in enumerate(numbers)
    )
