"""The reference rotation in plain PyTorch, which defines what is correct. It runs on every device.

For a pair of channels (a, b) and the angle t of its token:

    a' = a·cos t − b·sin t
    b' = a·sin t + b·cos t

Source: Su et al. 2021, arXiv:2104.09864, section 3.4.2 (equation 34), for both pairings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk._layout import AXES, Layout, Options


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, offset: int) -> Tensor:
    """Rotate each pair of channels of x.

    Args:
        x: any shape `[..., head_dim]`, any strides; float16, bfloat16, float32 or float64.
        cos, sin: broadcastable against `x[..., :pairs]`; float32 or float64.
        interleaved: whether channels 2i and 2i + 1 form a pair. If not, channels i and i + pairs do.
        offset: the first of the 2 · pairs rotated channels. The other channels are copied.

    Returns:
        A new tensor, shape and dtype of x.

    Precision:
        Products and sums in float32 (float64 for float64 x), then one rounding to the dtype of x.
    """
    pairs, compute = cos.shape[-1], _compute_dtype(x)
    cos, sin = cos.to(compute), sin.to(compute)
    end = offset + 2 * pairs
    before, after = x.narrow(-1, 0, offset), x.narrow(-1, end, x.shape[-1] - end)
    a, b = _pairs_of(x, pairs, interleaved, offset)
    rotated_a = (a * cos - b * sin).to(x.dtype)
    rotated_b = (a * sin + b * cos).to(x.dtype)
    if not interleaved:
        return torch.cat((before, rotated_a, rotated_b, after), dim=-1)
    rotated = torch.stack((rotated_a, rotated_b), dim=-1).reshape(*x.shape[:-1], 2 * pairs)
    return torch.cat((before, rotated, after), dim=-1)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, add_one: bool = False) -> Tensor:
    """Return the RMSNorm of each head: x / √(mean of x² over the last axis + ε), times the weight.

    Args:
        x: any shape `[..., head_dim]`, any strides; float16, bfloat16, float32 or float64.
        weight: `[head_dim]`.
        eps: ε, dimensionless.
        add_one: whether to multiply by 1 + weight instead, as Gemma does.

    Returns:
        A new tensor, shape and dtype of x.

    Precision:
        The mean and its root are computed in float64 and rounded to float32. Both products are in float32 (float64 for
        float64 x), followed by one rounding to the dtype of x. The squares are added in a fixed order, so that every
        kernel returns the same bits.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4. torch.nn.RMSNorm adds the squares in float32 instead.
    """
    compute, head_dim = _compute_dtype(x), x.shape[-1]
    mean = _sum_of_halves(x.to(torch.float64).square()) * (1 / head_dim)
    # The root must be correctly rounded. On the CPU that holds for PyTorch's rsqrt but not for its sqrt (MKL's); on a
    # GPU it holds for sqrt but not for rsqrt.
    scale = ((mean + eps).rsqrt() if x.is_cpu else (mean + eps).sqrt().reciprocal()).to(compute)
    gain = weight.to(compute)
    return (x.to(compute) * scale * (1 + gain if add_one else gain)).to(x.dtype)


def _sum_of_halves(x: Tensor) -> Tensor:
    """Return the sum `[..., 1]` over the last axis, by adding its second half to the first until one element is left.

    The elements are added in the same order as if the axis were padded with zeros to a power of two.
    """
    count = x.shape[-1]
    half = 1 << (count - 1).bit_length() >> 1
    while half:
        low, high = x[..., :half], x[..., half:]
        rest = half - high.shape[-1]
        x = low + high if rest == 0 else torch.cat((low[..., : half - rest] + high, low[..., half - rest :]), dim=-1)
        half //= 2
    return x


def rotate_in_layout(tensors: list[Tensor], cos: Tensor, sin: Tensor, options: Options) -> list[Tensor]:
    """Rotate q, or q and k, in any layout.

    Args:
        tensors: q, or q and k, in the layout of `options`.
        cos, sin: `[pairs]`, `[seq, pairs]`, `[batch, seq, pairs]`, or per head `[batch, heads, seq, pairs]`.
    """
    layout, interleaved, offset, inverse = options
    cos, sin = _align_table(cos, layout), _align_table(-sin if inverse else sin, layout)
    return [rotate(x, cos, sin, interleaved=interleaved, offset=offset) for x in tensors]


def table_gradient(
    tensors: list[Tensor],
    grads: list[Tensor],
    pairs: int,
    options: Options,
    per_head: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of cos and sin, summed over the tensors and over heads that share a table.

    With x' = (a cos − b sin, a sin + b cos) and (g, h) the gradient of x', the gradient of cos is g·a + h·b and the
    gradient of sin is h·a − g·b.

    Returns:
        Two tensors `[batch, seq, pairs]`, per head `[batch, heads, seq, pairs]`; float64 for float64 tensors, else
        float32.
    """
    layout, interleaved, offset, _ = options
    batch, tokens, heads, _ = AXES[layout]
    d_cos = d_sin = torch.zeros((), device=tensors[0].device)
    for x, grad in zip(tensors, grads, strict=True):
        a, b = _pairs_of(x, pairs, interleaved, offset)
        g, h = _pairs_of(grad, pairs, interleaved, offset)
        to_cos, to_sin = g * a + h * b, h * a - g * b
        d_cos = d_cos + (to_cos if per_head else to_cos.sum(heads))
        d_sin = d_sin + (to_sin if per_head else to_sin.sum(heads))
    if per_head:
        d_cos, d_sin = d_cos.movedim((heads, tokens), (-3, -2)), d_sin.movedim((heads, tokens), (-3, -2))
        return (d_cos.unsqueeze(0), d_sin.unsqueeze(0)) if batch is None else (d_cos, d_sin)
    if batch is None:
        return d_cos.unsqueeze(0), d_sin.unsqueeze(0)
    return (d_cos.transpose(0, 1), d_sin.transpose(0, 1)) if tokens < batch else (d_cos, d_sin)


def _pairs_of(x: Tensor, pairs: int, interleaved: bool, offset: int) -> tuple[Tensor, Tensor]:
    part = x.narrow(-1, offset, 2 * pairs).to(_compute_dtype(x))
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, dim=-1)
    return a, b


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _align_table(table: Tensor, layout: Layout) -> Tensor:
    """Return the table with an axis of size 1 for each axis that only the tensor has, so that the two broadcast."""
    if table.ndim == 1:
        return table
    batch, tokens, heads, count = AXES[layout]
    if table.ndim == 4:  # per head
        table = table.squeeze(0) if batch is None else table
        return table.movedim((-3, -2), (heads, tokens))
    if batch:  # where batch is the first axis or absent, tables broadcast without this step
        table = table if table.ndim == 3 else table.unsqueeze(0)
        table = table.transpose(0, 1) if tokens < batch else table
    return table.unsqueeze(heads - count)
