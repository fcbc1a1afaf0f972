"""The definition of correct: the rotation in plain PyTorch, on any device, written to be read.

For a pair of channels (a, b) and the angle t of its token:

    a' = a·cos t − b·sin t
    b' = a·sin t + b·cos t

Source: Su et al. 2021, arXiv:2104.09864, section 3.4.2 (equation 34), for both pairings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk._layout import AXES, Layout, Pairing


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, pairing: Pairing, rotary_offset: int) -> Tensor:
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
    pairs, compute = cos.shape[-1], _compute_dtype(x)
    cos, sin = cos.to(compute), sin.to(compute)
    end = rotary_offset + 2 * pairs
    before, after = x.narrow(-1, 0, rotary_offset), x.narrow(-1, end, x.shape[-1] - end)
    a, b = _pairs_of(x, pairs, pairing, rotary_offset)
    turned_a = (a * cos - b * sin).to(x.dtype)
    turned_b = (a * sin + b * cos).to(x.dtype)
    if pairing == "half":
        return torch.cat((before, turned_a, turned_b, after), dim=-1)
    turned = torch.stack((turned_a, turned_b), dim=-1).reshape(*x.shape[:-1], 2 * pairs)
    return torch.cat((before, turned, after), dim=-1)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, add_one: bool = False) -> Tensor:
    """x / √(mean of x² over the last axis + ε), times the weight: RMSNorm of each head.

    Args:
        x: any shape `[..., head_dim]`, any strides; float16, bfloat16, float32 or float64.
        weight: `[head_dim]`.
        eps: ε, dimensionless.
        add_one: multiply by 1 + weight (Gemma).

    Returns:
        A new tensor, shape and dtype of x.

    Precision:
        The mean and its root in float64, rounded to float32; both products in float32 (float64 for float64 x); one
        rounding to the dtype of x. The squares are added in one order, so that every kernel has the same bits.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4; torch.nn.RMSNorm, which adds in float32.
    """
    compute, head_dim = _compute_dtype(x), x.shape[-1]
    mean = _sum_of_halves(x.to(torch.float64).square()) * (1 / head_dim)
    # Correctly rounded: on the CPU PyTorch's rsqrt is, and its sqrt, which is MKL's, is not; on a GPU the reverse.
    scale = ((mean + eps).rsqrt() if x.is_cpu else (mean + eps).sqrt().reciprocal()).to(compute)
    gain = weight.to(compute)
    return (x.to(compute) * scale * (1 + gain if add_one else gain)).to(x.dtype)


def _sum_of_halves(x: Tensor) -> Tensor:
    """The sum `[..., 1]` over the last axis: as if zeros filled it up to a power of two, half is added to half."""
    count = x.shape[-1]
    half = 1 << (count - 1).bit_length() >> 1
    while half:
        low, high = x[..., :half], x[..., half:]
        rest = half - high.shape[-1]
        x = low + high if rest == 0 else torch.cat((low[..., : half - rest] + high, low[..., half - rest :]), dim=-1)
        half //= 2
    return x


def rotate_in_layout(
    tensors: list[Tensor], cos: Tensor, sin: Tensor, *, layout: Layout, pairing: Pairing, rotary_offset: int, back: bool
) -> list[Tensor]:
    """`rotate` of tensors in a layout; back: by minus.

    Args:
        cos, sin: `[pairs]`, `[seq, pairs]`, `[batch, seq, pairs]`, or per head `[batch, heads, seq, pairs]`.
    """
    cos, sin = _aligned(cos, layout), _aligned(-sin if back else sin, layout)
    return [rotate(x, cos, sin, pairing=pairing, rotary_offset=rotary_offset) for x in tensors]


def table_gradient(
    tensors: list[Tensor],
    grads: list[Tensor],
    pairs: int,
    layout: Layout,
    pairing: Pairing,
    rotary_offset: int,
    per_head: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gradient to cos and sin, summed over tensors and, but for tables per head, over heads.

    With x' = (a cos − b sin, a sin + b cos) and the gradient (g, h) of x': g·a + h·b to cos, h·a − g·b to sin.

    Returns:
        Two tensors `[batch, seq, pairs]`, per head `[batch, heads, seq, pairs]`; float64 for float64 tensors, else
        float32.
    """
    batch, tokens, heads, _ = AXES[layout]
    d_cos = d_sin = torch.zeros((), device=tensors[0].device)
    for x, grad in zip(tensors, grads, strict=True):
        a, b = _pairs_of(x, pairs, pairing, rotary_offset)
        g, h = _pairs_of(grad, pairs, pairing, rotary_offset)
        of_cos, of_sin = g * a + h * b, h * a - g * b
        d_cos = d_cos + (of_cos if per_head else of_cos.sum(heads))
        d_sin = d_sin + (of_sin if per_head else of_sin.sum(heads))
    if per_head:
        d_cos, d_sin = d_cos.movedim((heads, tokens), (-3, -2)), d_sin.movedim((heads, tokens), (-3, -2))
        return (d_cos.unsqueeze(0), d_sin.unsqueeze(0)) if batch is None else (d_cos, d_sin)
    if batch is None:
        return d_cos.unsqueeze(0), d_sin.unsqueeze(0)
    return (d_cos.transpose(0, 1), d_sin.transpose(0, 1)) if tokens < batch else (d_cos, d_sin)


def _pairs_of(x: Tensor, pairs: int, pairing: Pairing, rotary_offset: int) -> tuple[Tensor, Tensor]:
    part = x.narrow(-1, rotary_offset, 2 * pairs).to(_compute_dtype(x))
    a, b = part.chunk(2, dim=-1) if pairing == "half" else (part[..., 0::2], part[..., 1::2])
    return a, b


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _aligned(table: Tensor, layout: Layout) -> Tensor:
    """The table with an axis of size 1 wherever the tensor has one that it does not know, ready to broadcast."""
    if table.ndim == 1:
        return table
    batch, tokens, heads, count = AXES[layout]
    if table.ndim == 4:  # per head
        table = table.squeeze(0) if batch is None else table
        return table.movedim((-3, -2), (heads, tokens))
    if batch:  # where batch is the first axis, or there is none, broadcasting takes tables with it and without
        table = table if table.ndim == 3 else table.unsqueeze(0)
        table = table.transpose(0, 1) if tokens < batch else table
    return table.unsqueeze(heads - count)
