"""The code that most projects use, written once for the benchmark on every device and for the demo."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Turn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Queries and keys to rotated queries and keys, of the same shapes and dtypes."""


def hugging_face_tables(inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Llama's LlamaRotaryEmbedding: angles in float32, cos and sin of full width.

    Args:
        inv_freq: float32 `[pairs]`, radians per token.
        positions: `[batch, seq]`, in tokens.

    Returns:
        cos and sin, float32 `[batch, seq, 2 · pairs]`; both halves are the same.

    Source: transformers, models/llama/modeling_llama.py.
    """
    angle = (inv_freq[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def hugging_face(cos: Tensor, sin: Tensor) -> Turn:
    """Llama's apply_rotary_pos_emb, for tables of full width that broadcast with q and k.

    Source: transformers, models/llama/modeling_llama.py.
    """

    def rotate_half(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    return lambda q, k: (q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin)


def meta(turn: Tensor) -> Turn:
    """Meta's apply_rotary_emb: pairs as complex numbers, in float32, for cos + i sin that broadcasts with them.

    Source: llama, llama/model.py.
    """

    def one(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)

    return lambda q, k: (one(q), one(k))
