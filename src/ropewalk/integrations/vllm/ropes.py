"""Build the `Rope` of a rotary layer of vLLM from its attributes, and compare it with the layer's table.

The attributes are those of the classes in `vllm/model_executor/layers/rotary_embedding/` of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk import formats, schemes
from ropewalk._checks import error
from ropewalk.rope.axes import Axes
from ropewalk.rope.rope import Rope

WHO = "ropewalk in vLLM"
_KEEPS = "The layer keeps vLLM's rotation."


def rope_of(name: str, layer: Any, length: int) -> Rope:
    """Build the static rope of a layer, in its current pairing.

    Args:
        name: the name of vLLM's class.
        layer: an object of that class. Only its attributes are read.
        length: the longest sequence of the engine (`max_model_len`), in tokens. Frequencies that depend on the length
            are computed for this length.

    Raises:
        RopeError: no `Rope` describes the class, or one of its values.
    """
    build = SCHEMES.get(name)
    if build is None:
        must = f"the layer must be one of {', '.join(SCHEMES)}"
        raise error(WHO, must, name, _KEEPS)
    base, scaling = build(layer)
    rope = Rope(
        head_dim=layer.head_size,
        base=base,
        pairing="half" if getattr(layer, "is_neox_style", True) else "interleaved",
        rotary_dim=layer.rotary_dim,
        scaling=scaling,
        axes=_axes(layer),
    )
    return rope.at_length(length)


def difference(rope: Rope, table: Tensor) -> str:
    """Describe how vLLM's table differs from a rope. Return "" if they agree.

    Args:
        rope: a static rope.
        table: the table before it is rounded to the model's dtype, float32 `[positions, rotary_dim]`, cos and then sin.
    """
    if table.is_meta or table.shape[0] < 2 or table.shape[1] != rope.rotary_dim:
        return (
            f"a table {tuple(table.shape)} on {table.device}, without {rope.rotary_dim} numbers for positions 0 and 1"
        )
    cos, sin = table[:2].to("cpu", torch.float64).chunk(2, dim=-1)
    return formats.difference(rope, torch.atan2(sin[1], cos[1]), float(cos[0, 0]))


def _axes(layer: Any) -> Axes | None:
    """Return the axes of M-RoPE: interleaved as in `apply_interleaved_rope` of vLLM's mrope.py, or in sections."""
    sections = getattr(layer, "mrope_section", None)
    if sections is None:
        return None
    return Axes.interleaved(sections) if layer.mrope_interleaved else Axes.sections(sections)


def _single(values: list[float]) -> float:
    """Return the only scaling factor of a layer."""
    if len(values) != 1:
        got = f"{len(values)} (one for each adapter)"
        raise error(WHO, "a layer must have one scaling factor", got, _KEEPS)
    return values[0]


def _ntk(layer: Any) -> tuple[float, schemes.Scaling]:
    if layer.mixed_b is not None:
        raise error(WHO, "mixed_b of NTK must be None", str(layer.mixed_b), _KEEPS)
    stretch: float = layer.scaling_factor ** (2 / layer.rotary_dim)
    return layer.base * layer.scaling_factor, schemes.Linear(stretch)


def _yarn(layer: Any) -> tuple[float, schemes.Scaling]:
    scaling = schemes.YaRN(
        factor=layer.scaling_factor,
        original_max_position_embeddings=getattr(layer, "max_position_asked_for", layer.max_position_embeddings),
        beta_fast=layer.beta_fast,
        beta_slow=layer.beta_slow,
        truncate=getattr(layer, "truncate", True),
        attention_factor=layer.mscale,
    )
    return layer.base, scaling


def _longrope(layer: Any) -> tuple[float, schemes.Scaling]:
    scaling = schemes.LongRoPE(
        tuple(layer.short_factor),
        tuple(layer.long_factor),
        layer.original_max_position_embeddings,
        short_mscale=layer.short_mscale,
        long_mscale=layer.long_mscale,
    )
    return layer.base, scaling


# The name of a class of vLLM → a function that reads base and scaling from a layer of this class.
SCHEMES: dict[str, Callable[[Any], tuple[float, schemes.Scaling | None]]] = {
    "RotaryEmbedding": lambda layer: (layer.base, None),
    "LinearScalingRotaryEmbedding": lambda layer: (layer.base, schemes.Linear(_single(layer.scaling_factors))),
    "NTKScalingRotaryEmbedding": _ntk,
    "DynamicNTKScalingRotaryEmbedding": lambda layer: (
        layer.base,
        schemes.DynamicNTK(layer.scaling_factor, layer.max_trained_positions),
    ),
    "DynamicNTKAlphaRotaryEmbedding": lambda layer: (layer.base, schemes.NTK(layer.scaling_alpha)),
    "Llama3RotaryEmbedding": lambda layer: (
        layer.base,
        schemes.Llama3(layer.scaling_factor, layer.low_freq_factor, layer.high_freq_factor, layer.orig_max_position),
    ),
    "YaRNScalingRotaryEmbedding": _yarn,
    "DeepseekScalingRotaryEmbedding": _yarn,
    "Gemma4RotaryEmbedding": lambda layer: (
        layer.base,
        schemes.Proportional(2 * layer.rope_angles / layer.head_size),
    ),
    "Phi3LongRoPEScaledRotaryEmbedding": _longrope,
    "MRotaryEmbedding": lambda layer: (layer.base, None) if layer.scaling_factor is None else _yarn(layer),
}
