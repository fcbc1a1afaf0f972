"""The definition of correct: the rotation in plain PyTorch, on any device, written to be read.

For a pair of channels (a, b) and the angle t of its token:

    a' = a·cos t − b·sin t
    b' = a·sin t + b·cos t

Source: Su et al. 2021, arXiv:2104.09864, section 3.4.2 (equation 34), for both pairings.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, pairing: str, rotary_offset: int) -> Tensor:
    """Turn each pair of channels of x.

    Args:
        x: any shape `[..., head_dim]`, any strides; float16, bfloat16, float32 or float64.
        cos, sin: broadcastable against `x[..., :pairs]`; float32 or float64.
        pairing: "half" or "interleaved".
        rotary_offset: the first rotated channel; 2 · pairs channels turn, the others are copied.

    Returns:
        A new tensor, shape and dtype of x.

    Precision:
        products and sum in float32, float64 for float64 x; one rounding to the dtype of x.
    """
    width = 2 * cos.shape[-1]
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = cos.to(compute), sin.to(compute)
    before, part, after = torch.split(x, [rotary_offset, width, x.shape[-1] - rotary_offset - width], dim=-1)
    if pairing == "half":
        a, b = part.chunk(2, dim=-1)
    else:
        a, b = part[..., 0::2], part[..., 1::2]
    a, b = a.to(compute), b.to(compute)
    turned_a = (a * cos - b * sin).to(x.dtype)
    turned_b = (a * sin + b * cos).to(x.dtype)
    if pairing == "half":
        return torch.cat((before, turned_a, turned_b, after), dim=-1)
    turned = torch.stack((turned_a, turned_b), dim=-1).reshape(part.shape)
    return torch.cat((before, turned, after), dim=-1)
