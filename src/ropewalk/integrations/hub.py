"""The function and the layers of the kernel for Hugging Face's hub, which tools/hub_kernel.py makes from this file.

A layer replaces a function of transformers with the same parameters. Its `forward` is called with that function as
`self`, so it has no state.
"""

from __future__ import annotations

from torch import Tensor, nn

from ropewalk._checks import choice, describe, error
from ropewalk._layout import Layout, Pairing
from ropewalk.formats import Width
from ropewalk.integrations.tables import rotate, rotation_of

_WHO = "apply_rotary_pos_emb"


def apply_rotary_pos_emb(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
    *,
    pairing: Pairing = "half",
    width: Width | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k into new tensors by cos and sin, which a rotary module of transformers returns.

    Args:
        q: `[batch, heads, seq, head_dim]` or `[batch, seq, heads, head_dim]`, as `unsqueeze_dim` says, or `[seq, heads,
            head_dim]`; float16, bfloat16, float32 or float64; any strides. Not changed.
        k: as q, but its number of heads may differ. None rotates only q.
        cos, sin: `[batch, seq, columns]`, with a row for each token of each sequence, `[1, seq, columns]` or `[seq,
            columns]`. Any of the dtypes of q. If they have fewer columns than a head has channels, the other channels
            are copied, except as `width` states.
        unsqueeze_dim: where an axis for the heads must be inserted into cos and sin.
        pairing: "half" if channels i and i + columns / 2 form a pair, "interleaved" if channels 2i and 2i + 1 do.
        width: "halves" if both halves of a row of cos are equal, "each" if each value is repeated next to itself, or
            "half" if cos has one column for each pair. None means "half" if cos has half as many columns as q has
            channels, and otherwise "halves".

    Returns:
        The rotated q and k, with the shapes and dtypes of q and k. If k is None, it stays None.

    Raises:
        RopeError: a shape or dtype does not fit, or pairing or width is unknown.

    Precision:
        Arithmetic in float32 (float64 for float64 tensors), then one rounding to the dtype of the tensor.
    """
    choice(_WHO, "pairing", pairing, ("half", "interleaved"))
    columns, channels, axes = cos.shape[-1], q.shape[-1], cos.ndim
    if width is None:
        width = "half" if 2 * columns == channels else "halves"
    choice(_WHO, "width", width, ("halves", "each", "half"))
    rotated = columns if width != "half" else 2 * columns
    if rotated % 2 or rotated > channels or (k is not None and rotated > k.shape[-1]):
        must = f"cos must have an even number of columns, and rotate at most the {channels} channels of a head"
        raise error(_WHO, must, describe(cos), "Check the tables and width.")
    axis = unsqueeze_dim if unsqueeze_dim >= 0 else unsqueeze_dim + axes + 1
    if axes not in (2, 3) or axis not in (axes - 2, axes - 1):
        must = "cos and unsqueeze_dim must be [seq, columns] and 0 or 1, or [batch, seq, columns] and 1 or 2"
        raise error(_WHO, must, f"{describe(cos)} and {unsqueeze_dim}", "Pass cos as the rotary module returns it.")
    layout: Layout = "bhsd" if axis == axes - 2 else "bshd" if q.ndim == 4 else "thd"
    results = rotate(rotation_of(cos, sin, width, pairing), [q] if k is None else [q, k], layout, pairing)
    return results[0], None if k is None else results[1]


def _layer(name: str, about: str, *, pairing: Pairing = "half", width: Width | None = None) -> type[nn.Module]:
    """Return a layer with the parameters of transformers' functions for text, and with this name and docstring."""

    def forward(
        self: object, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor | None]:
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim, pairing=pairing, width=width)

    forward.__qualname__ = f"{name}.forward"
    members = {"__doc__": about, "__module__": __name__, "forward": forward}
    return type(name, (nn.Module,), {**members, "can_torch_compile": True, "has_backward": True})


RotaryPosEmb = _layer(
    "RotaryPosEmb",
    "Pairs i and i + half, whole heads: the functions of transformers that have the name `rotary_pos_emb` for kernels. "
    "cos and sin have a column for each channel (Llama), or for each pair (GPT-OSS).",
)
RotaryPosEmbPartial = _layer(
    "RotaryPosEmbPartial",
    "Pairs i and i + half, in the first channels of a head, one for each column of cos and sin (GPT-NeoX, GLM-4.5).",
    width="halves",
)
RotaryPosEmbInterleaved = _layer(
    "RotaryPosEmbInterleaved",
    "Pairs 2i and 2i + 1, in the first channels, with each value of cos and sin twice in a row (Cohere, GLM-4V).",
    pairing="interleaved",
    width="each",
)
RotaryPosEmbInterleavedHalves = _layer(
    "RotaryPosEmbInterleavedHalves",
    "Pairs 2i and 2i + 1, in the first channels, with two equal halves of cos and sin (GLM-4, ERNIE 4.5, Helium).",
    pairing="interleaved",
    width="halves",
)


class RotaryPosEmbVision(nn.Module):
    """Pairs i and i + half, for vision towers: q and k are `[seq, heads, head_dim]`, cos and sin `[seq, columns]`."""

    can_torch_compile = True
    has_backward = True

    def forward(self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        return apply_rotary_pos_emb(q, k, cos, sin, -2, width="halves")
