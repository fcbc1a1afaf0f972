"""Random inputs of rotations, of fused steps and of caches."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import oracle
from cache_model import EXACT, HIDDEN, LAYERS, ROPES, cache_of, distances, run, run_whole_row, stopped
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


@dataclass
class Text:
    """The tokens of one row so far: inputs, outputs when they were computed, and positions after all shifts."""

    x: list[Tensor] = field(default_factory=list)
    out: list[Tensor] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    next: int = 0

    def first(self, count: int) -> Text:
        return Text(self.x[:count], self.out[:count], self.positions[:count], self.next)

    def check(self, rotary: Any, size: dict[str, int]) -> None:
        """Compare all outputs with one pass over the row."""
        if self.x:
            places = None if "sinks" in size else torch.tensor(self.positions)
            wanted = run_whole_row(torch.stack(self.x), rotary, *distances(len(self.x), size, places))
            torch.testing.assert_close(torch.stack(self.out), wanted, **EXACT)


ROWS: dict[str, Callable[[list[int], int], Any]] = {
    "list": lambda rows, batch: rows,
    "tuple": lambda rows, batch: tuple(rows),
    "int64": lambda rows, batch: torch.tensor(rows, dtype=torch.int64),
    "int32": lambda rows, batch: torch.tensor(rows, dtype=torch.int32),
    "bool": lambda rows, batch: torch.tensor([row in rows for row in range(batch)]),
}
"""The ways to name some rows of a batch."""


class Episode:
    """A `KVCache` and the texts of its rows, changed by random requests. The outputs are compared with one pass."""

    def __init__(self, draw: Draw, size: dict[str, int]) -> None:
        self.draw, self.size = draw, size
        self.rope, self.rotary = ROPES[draw.choice(sorted(ROPES))]
        batch = draw.randint(1, 3)
        self.cache = cache_of(batch, **size)
        self.texts = [Text() for _ in range(batch)]

    def run(self, count: int) -> None:
        for _ in range(count):
            self.draw.choice([self.step] * 5 + [self.stop, self.reset, self.reorder, self.shift])()
            assert self.cache.length.tolist() == [len(text.x) for text in self.texts]
            assert self.cache.position.tolist() == [text.next for text in self.texts]
        for text in self.texts:
            text.check(self.rotary, self.size)

    def fits(self, seq: int) -> bool:
        return max(len(text.x) for text in self.texts) + seq <= 24

    def step(self) -> None:
        """Run some tokens: with padding, at explicit positions, or after dropping the last ones."""
        options, rows, seq = dict[str, Any](), len(self.texts), self.draw.choice((1, 1, 1, 2, 3, 7))
        if not self.fits(seq):
            return
        if not self.size.get("window") and self.draw.random() < 0.2:
            options["at"] = self.drop()
        real = torch.ones(rows, seq, dtype=torch.bool)
        if self.draw.random() < 0.4:
            options["attention_mask"] = real = torch.rand(rows, seq) < 0.6
        starts = torch.tensor([[text.next] for text in self.texts])
        places = starts + (real.cumsum(1) - 1).clamp(min=0)
        if "sinks" not in self.size and self.draw.random() < 0.2:
            options["positions"] = torch.randint(-9, 9, self.draw.choice(((rows, seq), (seq,))))
            places = options["positions"].expand(rows, seq)
        x = torch.randn(rows, seq, HIDDEN, dtype=torch.float64)
        padding = self.draw.choice((0.0, torch.nan))  # which a mask would not hide, as 0 · NaN is NaN
        x = x.masked_fill(~real[..., None], padding)
        out = run(self.cache, x, self.rope, **options)
        assert out.isfinite().all() or padding != 0
        for i, text in enumerate(self.texts):
            new = [j for j in range(seq) if real[i, j]]
            text.x += [x[i, j] for j in new]
            text.out += [out[i, j] for j in new]
            text.positions += [int(places[i, j]) for j in new]
            text.next = int(places[i, new].max()) + 1 if new else text.next

    def drop(self) -> Tensor:
        """Drop the last tokens of each row, and return the positions at which the rows go on."""
        for row, text in enumerate(self.texts):
            text.check(self.rotary, self.size)
            at = text.next - self.draw.randint(-1, 4)
            later = [i for i, position in enumerate(text.positions) if position >= at]
            self.texts[row] = text.first(min(later, default=len(text.x)))
            self.texts[row].next = at
        return torch.tensor([text.next for text in self.texts])

    def stop(self) -> None:
        """Run tokens of NaN that only some layers store, and roll back. Nothing of them may remain."""
        seq = 1 if "window" in self.size else self.draw.choice((1, 4))
        if self.rope is not None and self.fits(seq):
            nan = torch.full((len(self.texts), seq, HIDDEN), torch.nan, dtype=torch.float64)
            after = self.draw.randint(0, LAYERS)
            stopped(self.cache, nan, after)
            if after:
                self.cache.rollback()

    def shift(self) -> None:
        by = [self.draw.randint(-300, 300) for _ in self.texts]
        alike = self.draw.random() < 0.5
        for text, delta in zip(self.texts, by[:1] * len(by) if alike else by, strict=True):
            text.check(self.rotary, self.size)
            text.positions, text.next = [p + delta for p in text.positions], text.next + delta
        self.cache.shift(self.rope or [None] * LAYERS, by[0] if alike else torch.tensor(by))

    def reset(self) -> None:
        rows = self.draw.sample(range(len(self.texts)), self.draw.randint(0, len(self.texts)))
        for row in rows:
            self.texts[row].check(self.rotary, self.size)
            self.texts[row] = Text()
        self.cache.reset(ROWS[self.draw.choice(sorted(ROWS))](rows, len(self.texts)))

    def reorder(self) -> None:
        rows = [self.draw.randrange(len(self.texts)) for _ in self.texts]
        for text in self.texts:
            text.check(self.rotary, self.size)
        self.cache.reorder(torch.tensor(rows))
        self.texts = [self.texts[row].first(len(self.texts[row].x)) for row in rows]
