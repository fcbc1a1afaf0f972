"""The baselines of the benchmarks and the demo: the RoPE code that most projects use."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function from queries and keys to rotated queries and keys of the same shapes and dtypes."""


def hugging_face_tables(inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cos and sin as in LlamaRotaryEmbedding: angles in float32, tables of full width.

    Args:
        inv_freq: float32 `[pairs]`, radians per token.
        positions: `[batch, seq]`, in tokens.

    Returns:
        cos and sin, float32 `[batch, seq, 2 · pairs]`, with two equal halves.

    Source: transformers, models/llama/modeling_llama.py.
    """
    angle = (inv_freq[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def hugging_face(cos: Tensor, sin: Tensor) -> Rotate:
    """Return a function that rotates like Llama's apply_rotary_pos_emb, with cos and sin broadcastable to q and k.

    Source: transformers, models/llama/modeling_llama.py.
    """

    def rotate_half(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    return lambda q, k: (q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin)


def meta(factor: Tensor) -> Rotate:
    """Return a function that rotates like Meta's apply_rotary_emb: complex pairs times cos + i sin, `factor`.

    Source: llama, llama/model.py.
    """

    def rotate(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * factor).flatten(-2).type_as(x)

    return lambda q, k: (rotate(q), rotate(k))
