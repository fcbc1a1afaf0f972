"""The `Rope` that a rotary layer of vLLM means, from its own numbers, and whether its own table agrees.

The attributes are those of the classes in `vllm/model_executor/layers/rotary_embedding/` of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk import schemes
from ropewalk._checks import RopeError, error
from ropewalk.rope import Rope

WHO = "ropewalk in vLLM"
# Of float32 powers and products. Measured over the 32 models of the recording: at most 3.2e-7.
_RELATIVE = 5e-7


def rope_of(name: str, layer: Any, length: int) -> Rope:
    """The static rope of a layer, in the pairing that it has now.

    Args:
        name: the name of vLLM's class.
        layer: of that class; its attributes are read.
        length: the longest sequence of the engine (`max_model_len`), in tokens, by which frequencies that depend on the
            length are resolved, once.

    Raises:
        RopeError: the class, or a value in it, has no `Rope`.
    """
    build = SCHEMES.get(name)
    if build is None:
        must = f"the layer must be one of {', '.join(SCHEMES)}"
        raise error(WHO, must, name, "It rotates as vLLM does.")
    base, scaling = build(layer)
    rope = Rope(
        head_dim=layer.head_size,
        base=base,
        pairing="half" if getattr(layer, "is_neox_style", True) else "interleaved",
        rotary_dim=layer.rotary_dim,
        scaling=scaling,
    )
    return rope.at_length(length)


def check(rope: Rope, table: Tensor) -> None:
    """Compare a rope with the table that vLLM made, before it is rounded to the model's dtype.

    Args:
        rope: static.
        table: float32 `[positions, rotary_dim]`, cos and then sin.

    Raises:
        RopeError: the attention factor or a frequency differs by more than float32 arithmetic explains.
    """
    if table.is_meta or table.shape[0] < 2 or table.shape[1] != rope.rotary_dim:
        must = f"its table must have numbers for positions 0 and 1, and {rope.rotary_dim} columns"
        got = f"{tuple(table.shape)} on {table.device}"
        raise error(WHO, must, got, "It rotates as vLLM does.")
    cos, sin = table[:2].to("cpu", torch.float64).chunk(2, dim=-1)
    factor, wanted = float(cos[0, 0]), rope.attention_factor
    if abs(factor - wanted) > _RELATIVE * wanted:
        raise _differs(f"an attention factor of {wanted:.9g}", f"{factor:.9g}")
    theirs, ours = torch.atan2(sin[1], cos[1]), torch.from_numpy(rope.inv_freq)
    off = (theirs - ours).abs() > _RELATIVE * ours.abs()
    if bool(off.any()):
        pair = int(off.nonzero()[0])
        raise _differs(f"inv_freq[{pair}] = {float(ours[pair]):.9g}", f"{float(theirs[pair]):.9g}")


def _differs(must: str, got: str) -> RopeError:
    return error(WHO, f"its numbers mean {must}", f"{got} in vLLM's table", "It rotates as vLLM does.")


def _only(values: list[float]) -> float:
    if len(values) != 1:
        got = f"{len(values)} (one for each adapter)"
        raise error(WHO, "a layer must have one scaling factor", got, "It rotates as vLLM does.")
    return values[0]


def _ntk(layer: Any) -> tuple[float, schemes.Scaling]:
    if layer.mixed_b is not None:
        raise error(WHO, "NTK must be fixed", f"mixed_b={layer.mixed_b}", "It rotates as vLLM does.")
    stretch: float = layer.scaling_factor ** (2 / layer.rotary_dim)
    return layer.base * layer.scaling_factor, schemes.Linear(stretch)


def _yarn(layer: Any) -> tuple[float, schemes.Scaling]:
    scaling = schemes.YaRN(
        factor=layer.scaling_factor,
        original_max_position_embeddings=layer.max_position_embeddings,
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


# Name of a class in vLLM → base and scaling of one of its layers.
SCHEMES: dict[str, Callable[[Any], tuple[float, schemes.Scaling | None]]] = {
    "RotaryEmbedding": lambda layer: (layer.base, None),
    "LinearScalingRotaryEmbedding": lambda layer: (layer.base, schemes.Linear(_only(layer.scaling_factors))),
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
}
