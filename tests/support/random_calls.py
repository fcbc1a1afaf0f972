"""Random inputs of rotations and of fused steps."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import oracle
from kernel_cases import DTYPES, LAYOUTS, PAIRINGS, as_bshd, broadcast, check, expected, shape, unchanged
from ropewalk import QKNorm, Rotation

Draw = random.Random
MARGIN = 64
EPS = 1e-5


class Guarded:
    """A tensor with any strides inside a buffer whose other elements must not change."""

    def __init__(self, draw: Draw, size: tuple[int, ...], dtype: torch.dtype) -> None:
        order = draw.sample(range(len(size)), len(size)) if draw.random() < 0.3 else list(range(len(size)))
        steps = [draw.choice((1, 1, 1, 2, 3)) for _ in size]
        padded = [size[axis] * steps[axis] for axis in order]
        self.whole = torch.randn(2 * MARGIN + int(np.prod(padded))).to(dtype)
        self.before = self.whole.clone()
        inner = self.whole[MARGIN : -MARGIN or None].view(padded)
        self.x = inner.permute([order.index(axis) for axis in range(len(size))])
        for axis, step in enumerate(steps):
            self.x = self.x.narrow(axis, 0, max(0, step * (size[axis] - 1) + 1) if size[axis] else 0)
            self.x = self.x[(slice(None),) * axis + (slice(None, None, step),)]

    def only_x_changed(self) -> bool:
        now, x = self.whole.clone(), self.x
        now.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(
            self.before.as_strided(x.shape, x.stride(), x.storage_offset())
        )
        return unchanged(now, self.before)


def tables(
    draw: Draw, batch: int, seq: int, pairs: int, layout: str, heads: int | None = None
) -> tuple[Tensor, Tensor]:
    axes: list[tuple[int, ...]] = [(pairs,), (seq, pairs), (1, seq, pairs), (batch, seq, pairs)]
    if heads is not None:
        axes = [(heads, seq, pairs), (heads, seq, pairs), (1, heads, seq, pairs), (batch, heads, seq, pairs)]
    size = draw.choice(axes[:2] if layout == "thd" else axes)
    dtype = draw.choice((torch.float32, torch.float64))
    cos, sin = (torch.randn((*size[:-1], 2 * size[-1]), dtype=dtype)[..., :: draw.choice((1, 2))] for _ in range(2))
    return cos[..., :pairs], sin[..., :pairs]


def fit(draw: Draw) -> tuple[Rotation, list[Guarded], str]:
    """Return a rotation, one or two tensors that match it, and their layout. Some have as many rows as heads."""
    layout, pairing = draw.choice(LAYOUTS), draw.choice(PAIRINGS)
    batch, seq, pairs = draw.choice((1, 2, 3)), draw.choice((0, 1, 1, 2, 7)), draw.choice((1, 2, 3, 4, 8, 17, 32))
    offset, rest = draw.choice((0, 0, 1, 5)), draw.choice((0, 0, 1, 6))
    heads = draw.choice((1, 2, 3, 5)) if draw.random() < 0.3 else None  # each with its own table
    cos, sin = tables(draw, batch, seq, pairs, layout, heads)
    head_dim = offset + 2 * pairs + rest
    rotation = Rotation(cos, sin, pairing=pairing, head_dim=head_dim, rotary_offset=offset, per_head=heads is not None)
    dtypes = [draw.choice(DTYPES)] * 2 if draw.random() < 0.8 else draw.sample(DTYPES, 2)
    guarded = [
        Guarded(draw, shape(layout, batch, seq, heads or draw.choice((0, 1, 2, 5)), head_dim), dtype)
        for dtype in dtypes[: draw.choice((1, 2))]
    ]
    return rotation, guarded, layout


def in_memory(t: Tensor) -> Tensor:
    """Return a copy in memory: NumPy supports neither zero tensors nor the negative bit of PyTorch."""
    return torch.zeros(t.shape, dtype=t.dtype) if t._is_zerotensor() else t.resolve_neg()


def exact(rotation: Rotation, x: Tensor, layout: str, inverse: bool = False) -> tuple[np.ndarray, np.ndarray]:
    cos, sin = in_memory(rotation.cos.detach()), in_memory(rotation.sin.detach())
    if rotation.per_head and cos.ndim == 3:
        cos, sin = cos[None], sin[None]
    return expected(x, cos, sin, layout, rotation.pairing, rotation.rotary_offset, inverse)


@dataclass
class Heads:
    """Queries and keys, a rotation, a norm, and the sizes from which they were drawn."""

    layout: Any
    batch: int
    seq: int
    q: Tensor
    k: Tensor
    turn: Rotation
    norm: QKNorm | None

    @classmethod
    def drawn(cls, draw: Draw, dtypes: list[torch.dtype], *, normed: bool) -> Heads:
        layout, dtype = draw.choice(LAYOUTS), draw.choice(dtypes)
        kv_heads, seq, pairs = draw.choice((1, 2, 3)), draw.choice((1, 1, 2, 5)), draw.choice((1, 2, 4, 8, 16))
        per_head = draw.random() < 0.4
        batch = 1 if layout == "thd" else draw.choice((1, 2, 3, kv_heads))
        heads = kv_heads if per_head else kv_heads * draw.choice((1, 2, 4))
        offset = draw.choice((0, 0, 3))
        head_dim = 2 * pairs + offset + draw.choice((0, 0, 2))
        size: tuple[int, ...] = (seq, pairs)
        size = (kv_heads, *size) if per_head else size
        size = (batch, *size) if layout != "thd" and draw.random() < 0.4 else size
        angle = torch.randn(size, dtype=torch.float64)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        turn = Rotation(
            *(t.to(wide) for t in (angle.cos(), angle.sin())),
            pairing=draw.choice(PAIRINGS),
            head_dim=head_dim,
            rotary_offset=offset,
            per_head=per_head,
        )
        q, k = (Guarded(draw, shape(layout, batch, seq, n, head_dim), dtype).x for n in (heads, kv_heads))
        weights = [torch.randn(head_dim).to(draw.choice((dtype, wide))) for _ in range(2)]
        weights = weights if weights[0].dtype == weights[1].dtype else [w.to(wide) for w in weights]
        norm = QKNorm(*weights, EPS, draw.random() < 0.3) if normed else None
        return cls(layout, batch, seq, q, k, turn, norm)

    def exact(self, x: Tensor, which: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return x normalized and rounded as the norm rounds it, then rotated, and Σ|terms|: [batch, seq, heads, …]."""
        normed = self.normed(x, which)
        return normed, *oracle.rotate_by_tables(normed, *self.tables(), self.turn.pairing, self.turn.rotary_offset)

    def tables(self, inverse: bool = False) -> tuple[np.ndarray, np.ndarray]:
        tables = [t.detach() for t in (self.turn.cos, self.turn.sin)]
        tables = [t[None] if self.turn.per_head and t.ndim == 3 else t for t in tables]
        cos, sin = (broadcast(t) for t in tables)
        return cos, -sin if inverse else sin

    def normed(self, x: Tensor, which: int) -> np.ndarray:
        rows = as_bshd(x, self.layout)
        if self.norm is None:
            return rows
        weight = (self.norm.q_weight, self.norm.k_weight)[which].detach().double().numpy()
        wide = oracle.rms_norm(rows, weight, EPS, self.norm.add_one).astype(np.float64)
        return torch.tensor(wide).to(x.dtype).double().numpy()

    def check(self, y: Tensor, x: Tensor, which: int) -> None:
        """Check that y is x, normalized and rotated."""
        _, want, size = self.exact(x, which)
        if self.norm is None:
            check(y, want, size, self.layout, self.turn, flushed=y.dtype == torch.bfloat16)
            return
        # The norm may round the other way, which affects both products. The roundings of the rotation are added.
        out = torch.finfo(y.dtype)
        allowed = 4 * out.eps * size + 2 * out.eps * abs(want) + out.smallest_normal
        allowed = np.where(size == 0, 4 * out.eps * abs(want) + out.smallest_normal, allowed)
        assert (abs(as_bshd(y, self.layout) - want) <= allowed).all(), self.turn


def pools(draw: Draw, blocks: int, size: int, heads: int, channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return caches for keys and values [blocks, size, heads, channels]: two tensors, or parts of one."""
    way = draw.randrange(6)
    if way == 0:
        k, v = torch.randn(2, blocks, size, heads, channels).to(dtype)
    elif way == 1:
        k, v = torch.randn(blocks, 2, size, heads, channels).to(dtype).unbind(1)
    elif way == 2:
        k, v = torch.randn(blocks, size, heads, 2 * channels).to(dtype).split(channels, -1)
    elif way == 3:
        k, v = (x.transpose(1, 2) for x in torch.randn(blocks, heads, size, 2 * channels).to(dtype).split(channels, -1))
    elif way == 4:
        k, v = torch.randn(blocks, size, heads, channels, 2).to(dtype).unbind(-1)
    else:
        k, v = (torch.randn(blocks, size, heads, channels).to(dtype) for _ in range(2))
    return k, v
