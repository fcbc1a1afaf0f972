"""Rotate q and k by the tables of a model's code. `accelerate` and the kernel for the hub (hub.py) share this."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ropewalk._layout import Layout, Pairing
from ropewalk.formats import Width, narrow
from ropewalk.rotation.api import Rotation, create_unchecked

Order = Literal["same", "half"]
"""Whether each channel is written where it was read, or pairs are read interleaved and written in halves."""


def rotation_of(cos: Tensor, sin: Tensor, width: Width, pairing: Pairing) -> Rotation:
    """Return the Rotation of tables `[..., columns]` of this width. Tables of 16 bits are converted to float32."""
    cos, sin = narrow(cos, width), narrow(sin, width)
    if cos.dtype in (torch.bfloat16, torch.float16):
        cos, sin = cos.float(), sin.float()
    size = 2 * cos.shape[-1]
    return create_unchecked(cos, sin, pairing, size, size, 0, 1.0, False)


def rotate(
    rotation: Rotation,
    tensors: list[Tensor],
    layout: Layout,
    pairing: Pairing,
    *,
    last: bool = False,
    order: Order = "same",
) -> list[Tensor]:
    """Rotate q, or q and k, by the tables of a Rotation.

    Args:
        rotation: only its tables and its attention factor are used.
        tensors: one or two tensors. Their heads may be wider than the tables, and those of k wider than those of q.
        layout: the layout of the tensors.
        pairing: the pairing of the channels.
        last: whether the last channels of a wider head are rotated. If not, the first ones are.
        order: the order of the channels in the results.
    """
    by = [_fit_to_heads(rotation, x.shape[-1], pairing, last) for x in tensors]
    if len(tensors) == 2 and by[0].head_dim == by[1].head_dim:
        rotated: list[Tensor] = list(by[0](tensors[0], tensors[1], layout=layout))
    else:
        rotated = [own(x, layout=layout) for own, x in zip(by, tensors, strict=True)]
    return rotated if order == "same" else [_in_halves(x, own) for x, own in zip(rotated, by, strict=True)]


def _fit_to_heads(rotation: Rotation, head_dim: int, pairing: Pairing, last: bool) -> Rotation:
    """Return a Rotation with the same tables for heads of this size."""
    rotary_dim = rotation.rotary_dim
    if head_dim == rotation.head_dim == rotary_dim and rotation.pairing == pairing:
        return rotation
    offset = head_dim - rotary_dim if last else 0
    return create_unchecked(
        rotation.cos, rotation.sin, pairing, head_dim, rotary_dim, offset, rotation.attention_factor, False
    )


def _in_halves(x: Tensor, rotation: Rotation) -> Tensor:
    """Return x with the first channels of all rotated pairs before the second ones."""
    start, end = rotation.rotary_offset, rotation.rotary_offset + rotation.rotary_dim
    return torch.cat((x[..., :start], x[..., start:end:2], x[..., start + 1 : end : 2], x[..., end:]), dim=-1)
