"""Functions that complete the ropes of transformer classes of diffusers, where blocks of channels are not all.

Each is passed the config and the rope of the blocks, and returns the rope and further arguments of `ModelRopes`.
Source: models/transformers of diffusers 0.42.1, by the name of the class.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ropewalk._checks import MAX_HEAD_DIM, integer, number, shown
from ropewalk._layout import Pairing
from ropewalk.configs.denoiser import wan_channels
from ropewalk.configs.reader import Fields
from ropewalk.rope.axes import Axes
from ropewalk.rope.rope import Rope
from ropewalk.schemes import LongRoPE, PerPair, default

_Completed = tuple[Rope, dict[str, Any]]
_MAX_SCALE = 1e6  # far beyond any model; the bound keeps frequencies finite


def allegro(fields: Fields, rope: Rope) -> _Completed:
    """Split the rope into one for each axis: the pairs of each third of the head are in half order within the third."""
    third = rope.head_dim // 3
    of_axes = [
        Rope(
            rope.head_dim,
            rope.base,
            "half",
            rotary_dim=third,
            rotary_offset=a * third,
            axes=Axes((a,) * (third // 2), lengths=(third // 2,) * 3),
        )
        for a in range(3)
    ]
    fields.warnings.append("each rope rotates a third of the head: apply those of extra_ropes (height, width) as well.")
    return of_axes[0], {"extra_ropes": {"height": of_axes[1], "width": of_axes[2]}}


def cosmos(fields: Fields, rope: Rope) -> _Completed:
    """Apply NTK with the scale of each axis (CosmosRotaryPosEmbed)."""
    scales = fields.get("rope_scale")
    scales = (2.0, 1.0, 1.0) if scales is None else scales
    if not isinstance(scales, list | tuple) or len(scales) != 3:
        must = "must be a list of 3 numbers: the scales of time, height and width"
        raise fields.error("rope_scale", must, shown(scales), "Check that it is the list of this model.")
    if all(type(scale) in (int, float) and scale == 1 for scale in scales):
        return rope, {}
    inv_freq: list[float] = []
    for i, (scale, channels) in enumerate(zip(scales, wan_channels(rope.head_dim), strict=True)):
        value = number(fields.source, f"rope_scale[{i}]", scale, at_least=1 / _MAX_SCALE, at_most=_MAX_SCALE)
        base = rope.base * value ** (channels / max(channels - 2, 1))
        inv_freq += default.inv_freq(base, channels)
    fields.origins["scaling"] = "rope_scale: NTK with the scale of each axis, written as divisors of one progression"
    axis = () if rope.axes is None else rope.axes.axis
    return _with_frequencies(rope.base, "half", axis, inv_freq), {}


def helios(fields: Fields, rope: Rope) -> _Completed:
    """Warn about tokens that get means of cos and sin (center_down_sample_3d)."""
    fields.warnings.append(
        "tokens of the middle and long history get means of cos and sin, which is not a rotation: average the tables."
    )
    return rope, {}


def text(fields: Fields, rope: Rope) -> _Completed:
    """Add the rope of the text tokens, which have one position (Kandinsky5RoPE1D)."""
    return rope, {"extra_ropes": {"text": Rope(rope.head_dim, rope.base, "interleaved")}}


def text_and_audio(fields: Fields, rope: Rope) -> _Completed:
    """Add the ropes of text and audio, which have one position (Kandinsky6RoPE1D)."""
    channels = fields.get("axes_dims_a")
    width = rope.head_dim
    if channels is not None:
        if not isinstance(channels, list | tuple) or not channels or not all(type(c) is int for c in channels):
            raise fields.error(
                "axes_dims_a", "must be a list of numbers of channels", shown(channels), "Check the list."
            )
        width = sum(channels)
    value = fields.get("audio_freqs_scaling")
    factor = (
        1.0 if value is None else number(fields.source, "audio_freqs_scaling", value, above=0.0, at_most=_MAX_SCALE)
    )
    audio = Rope(width, rope.base, "interleaved")
    if factor != 1.0:
        audio = dataclasses.replace(audio, scaling=PerPair((1 / factor,) * (audio.rotary_dim // 2)))
    if fields.boolean("ca_rope", False):
        fields.origins["cross attention"] = "ca_rope: q and k of audio and video are rotated there as well"
    _, further = text(fields, rope)
    return rope, {"extra_ropes": {**further["extra_ropes"], "audio": audio}}


def camera(fields: Fields, rope: Rope) -> _Completed:
    """Add the rope of the camera branch, which has the first frequencies of each axis (_slice_rope_for_cam)."""
    half = rope.head_dim // 2
    of_pair = [(a, i) for a, channels in enumerate(wan_channels(half)) for i in range(channels // 2)]
    axis, index = zip(*of_pair, strict=True) if of_pair else ((), ())
    lengths = tuple(channels // 2 for channels in wan_channels(rope.head_dim))
    axes = Axes(axis, index, lengths)
    fields.origins["camera"] = (
        "the second half of each head in the camera branch, which also rotates the values, and rotates the output back"
    )
    branch = Rope(
        rope.head_dim, rope.base, rope.pairing, rotary_dim=2 * axes.pairs, rotary_offset=rope.head_dim - half, axes=axes
    )
    return rope, {"extra_ropes": {"camera": branch}}


def longrope(fields: Fields, rope: Rope) -> _Completed:
    """Apply LongRoPE (OmniGenSuScaledRotaryEmbedding)."""
    trained = fields.length("original_max_position_embeddings") or 4096
    longest = fields.length("max_position_embeddings") or 131_072
    factors = [fields.get(f"rope_scaling.{name}") for name in ("short_factor", "long_factor")]
    if None in factors:
        must, fix = "must have short_factor and long_factor", "Pass the config.json of the model."
        raise fields.error("rope_scaling", must, shown(fields.get("rope_scaling")), fix)
    scheme = LongRoPE(factors[0], factors[1], trained, factor=max(1.0, longest / trained))
    fields.origins["scaling"] = "rope_scaling"
    further = {"trained_length": trained, "max_position_embeddings": longest}
    return dataclasses.replace(rope, scaling=scheme), further


def ltx(fields: Fields, rope: Rope) -> _Completed:
    """Let one progression run over the channels of all heads (LTXVideoRotaryPosEmbed)."""
    heads = _size(fields, "num_attention_heads", 32)
    return _across_heads(fields, heads * rope.head_dim, 3, rope.base, "interleaved"), {"heads": heads}


def ltx2(fields: Fields, rope: Rope) -> _Completed:
    """Let one progression run over the channels of all heads (LTX2AudioVideoRotaryPosEmbed), and add those of audio."""
    kind = fields.get("rope_type")
    pairings: dict[Any, Pairing] = {None: "interleaved", "interleaved": "interleaved", "split": "half"}
    if not isinstance(kind, str | None) or kind not in pairings:
        raise fields.error("rope_type", "must be interleaved or split", shown(kind), "Check the config.")
    pairing, fix = pairings[kind], "Check that both belong to the same model."
    heads, of_audio = (_size(fields, key, 32) for key in ("num_attention_heads", "audio_num_attention_heads"))
    if heads != of_audio:
        raise fields.error("audio_num_attention_heads", f"must equal num_attention_heads={heads}", str(of_audio), fix)
    both = _size(fields, "audio_cross_attention_dim", 2048)
    if both % (2 * heads):
        raise fields.error("audio_cross_attention_dim", f"must be a multiple of 2 · {heads} heads", str(both), fix)
    audio = _across_heads(fields, heads * _size(fields, "audio_attention_head_dim", 64), 1, rope.base, pairing)
    cross = _across_heads(fields, both, 1, rope.base, pairing)
    fields.origins["audio_video"] = "the cross attention of audio and video, whose only axis is time"
    video = _across_heads(fields, heads * rope.head_dim, 3, rope.base, pairing)
    fields.origins["pairing"] = "rope_type"
    return video, {"heads": heads, "extra_ropes": {"audio": audio, "audio_video": cross}}


def _size(fields: Fields, key: str, default_size: int) -> int:
    return fields.size(key) if fields.has(key) else default_size


def _across_heads(fields: Fields, width: int, axes: int, base: float, pairing: Pairing) -> Rope:
    """Return the rope of LTX: frequencies from π/2 to base · π/2, each for every axis, after pairs without rotation."""
    integer(fields.source, "the number of channels of all heads", width, at_least=2, at_most=MAX_HEAD_DIM)
    fields.warn("the heads rotate differently: split the tables of the rope, as docs/coming-from/diffusers.md shows.")
    steps = width // (2 * axes)
    still = width // 2 - steps * axes
    inv_freq = [math.pi / 2 * base ** (i / max(steps - 1, 1)) for i in range(steps) for _ in range(axes)]
    axis = [(pair - still) % axes for pair in range(width // 2)]
    fields.origins["head_dim"] = "num_attention_heads · attention_head_dim"
    fields.origins["scaling"] = "powers of the base times π/2, written as divisors of one progression"
    return _with_frequencies(base, pairing, axis if axes > 1 else None, [0.0] * still + inv_freq)


def _with_frequencies(base: float, pairing: Pairing, axis: Sequence[int] | None, inv_freq: Sequence[float]) -> Rope:
    """Return a rope with given frequencies, in radians per position, as divisors of those of one progression."""
    width = 2 * len(inv_freq)
    factors = tuple(w / f if f else math.inf for w, f in zip(default.inv_freq(base, width), inv_freq, strict=True))
    axes = None if axis is None else Axes(tuple(axis))
    return Rope(width, base, pairing, scaling=PerPair(factors), axes=axes)
