"""Names of layouts, pairings and numerics, the axes of each layout, and the options of a rotation.

The letters of a layout are its axes: b batch, s or t tokens, h heads, d head_dim. d is always last, and t is used
without b. To add a layout, add its name to `Layout`. This module imports neither torch nor NumPy.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Layout = Literal["bshd", "bhsd", "sbhd", "thd"]
Pairing = Literal["half", "interleaved"]
Numerics = Literal["exact", "float32", "float32-frequencies"]

Axes = tuple[int | None, int, int, int]
"""The indices of the batch axis (None without batch), the token axis and the head axis, and the number of axes.

This is a plain tuple because every call unpacks it, and unpacking a subclass takes longer."""


def axes_of(layout: str) -> Axes:
    """Return the indices of the batch, token and head axes of a layout, and the number of its axes."""
    tokens = layout.index("s" if "s" in layout else "t")
    return layout.index("b") if "b" in layout else None, tokens, layout.index("h"), len(layout)


AXES: dict[Layout, Axes] = {layout: axes_of(layout) for layout in get_args(Layout)}


def channels(rotary_dim: int, to: Pairing) -> list[int]:
    """Return the order in which the rotated channels of a head convert it from the other pairing to `to`.

    Channel c of the converted head is channel `result[c]` of the original.
    """
    half = rotary_dim // 2
    by_pairs = [c for pair in range(half) for c in (pair, half + pair)]
    return by_pairs if to == "interleaved" else [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2)]


class Options(NamedTuple):
    """How tensors are rotated by given cos and sin.

    Attributes:
        layout: order of the axes of the tensors.
        interleaved: whether channels 2i and 2i + 1 form a pair. If not, channels i and i + pairs do.
        offset: the first rotated channel.
        inverse: whether to rotate by minus the angle. The attention factor in cos and sin still multiplies: this is
            the transpose of the rotation, and not its inverse.
    """

    layout: Layout
    interleaved: bool
    offset: int
    inverse: bool = False


SYNONYMS: dict[str, str] = {
    **dict.fromkeys(("neox", "gpt-neox", "rotate-half"), "half"),
    **dict.fromkeys(("gptj", "gpt-j", "meta", "adjacent", "pairs", "even/odd"), "interleaved"),
    **dict.fromkeys(("bhld", "bhnd", "bhtd", "bnsd"), "bhsd"),
    **dict.fromkeys(("blhd", "bnhd", "bthd", "bsnd"), "bshd"),
    "tnd": "thd",
    **dict.fromkeys(("gpt4all", "jan", "koboldcpp", "llama-server", "llamafile", "lm-studio", "lmstudio"), "llama.cpp"),
    **dict.fromkeys(("axolotl", "hf", "llama-factory", "llamafactory", "ms-swift", "trl", "unsloth"), "transformers"),
    **dict.fromkeys(("exllamav2", "ktransformers", "mlx-vlm", "nano-vllm", "sglang-jax", "transformers.js"), ""),
}
"""Other names of pairings and layouts, and programs with an engine's code, to suggest; "" for other code."""
