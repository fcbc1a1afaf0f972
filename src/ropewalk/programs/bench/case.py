"""What every contender is given, and what must come back: the rotation written out by hand in float64.

Nothing here is computed by ropewalk, so ropewalk is a contender like the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BASE, HEAD_DIM, Q_HEADS, KV_HEADS = 500_000.0, 128, 32, 8  # Llama 3 without scaling
Layout = Literal["bshd", "bhsd"]
Does = Literal["half", "interleaved", "copy", "negate", "tables"]
"""What comes of q and k: turned with a pairing, as they were, with the other sign; or only cos and sin."""

_CHUNK = 512  # tokens checked at a time: float64 takes memory


@dataclass(frozen=True)
class Case:
    """Queries and keys of one size.

    q, grad_q: `[1, tokens, 32, 128]`, and k, grad_k: `[1, tokens, 8, 128]`, in layout "bshd"; heads before tokens in
    "bhsd". grad_q and grad_k are the incoming gradients, None where only the forward pass is measured. cos, sin:
    float32 `[tokens, 64]`, exact but for that rounding. first: position of the first token; at 0 nothing turns, and a
    single token would prove nothing.
    """

    tokens: int
    first: int
    layout: Layout
    q: Tensor
    k: Tensor
    grad_q: Tensor | None
    grad_k: Tensor | None
    cos: Tensor
    sin: Tensor

    @classmethod
    def make(cls, tokens: int, dtype: torch.dtype, layout: Layout, *, backward: bool, first: int = 100) -> Case:
        generator = torch.Generator().manual_seed(0)

        def normal(heads: int) -> Tensor:
            shape = (1, tokens, heads, HEAD_DIM) if layout == "bshd" else (1, heads, tokens, HEAD_DIM)
            return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

        angle = exact_angle(torch.arange(first, first + tokens))
        q, k = normal(Q_HEADS), normal(KV_HEADS)
        grad_q, grad_k = (normal(Q_HEADS), normal(KV_HEADS)) if backward else (None, None)
        return cls(tokens, first, layout, q, k, grad_q, grad_k, angle.cos().float(), angle.sin().float())

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def positions(self) -> Tensor:
        """int64 `[tokens]`."""
        return torch.arange(self.first, self.first + self.tokens)

    @property
    def seq_axis(self) -> int:
        return self.layout.index("s")

    @property
    def bytes_moved(self) -> int:
        """q and k read once and written once, twice that with the backward pass; tables are not counted."""
        once = 2 * (self.q.nbytes + self.k.nbytes)
        return once if self.grad_q is None else 2 * once

    def tolerance(self, does: Does, *, own_angles: bool) -> float:
        """Largest error allowed, relative to the length of a pair; of tables, absolute.

        4 eps: 2⁻²¹ in float32, 2⁻⁵ in bfloat16. The usual code rounds cos and sin, two products and a sum, which makes
        at most 2.7 eps. Who computes angles in float32 may be wrong by 2⁻²² radians more for each position.
        """
        rounding = 2.0**-24 if does == "tables" else 4 * torch.finfo(self.dtype).eps
        return rounding + (self.first + self.tokens) * 2.0**-22 * own_angles

    def error(self, does: Does, results: Sequence[Tensor]) -> float:
        """Largest error of the results: q, k, with a backward pass also their gradients; NaN if there is one."""
        if does == "tables":
            exact = exact_angle(self.positions)
            gaps = [t.double() - e for t, e in zip(results, (exact.cos(), exact.sin()), strict=True)]
            return torch.stack(gaps).abs().max().item()
        given = [(self.q, 1), (self.k, 1)]
        if self.grad_q is not None and self.grad_k is not None:
            given += [(self.grad_q, -1), (self.grad_k, -1)]  # the gradient is turned back
        worst = [
            gap for (x, way), result in zip(given, results, strict=True) for gap in self._gaps(does, x, result, way)
        ]
        return torch.stack(worst).max().item()  # of torch, since it does not lose NaN

    def _gaps(self, does: Does, x: Tensor, result: Tensor, way: int) -> Iterator[Tensor]:
        if result.shape != x.shape or result.dtype != x.dtype:
            yield torch.tensor(torch.inf, dtype=torch.float64)
            return
        pairing = does if does in ("half", "interleaved") else "half"
        for start in range(0, self.tokens, _CHUNK):
            length = min(_CHUNK, self.tokens - start)
            before, after = (t.narrow(self.seq_axis, start, length) for t in (x, result))
            if does == pairing:
                angle = way * exact_angle(self.positions[start : start + length])
                yield rotation_error(before, after, angle.unsqueeze(1) if self.layout == "bshd" else angle, pairing)
            else:
                yield _gap(_pairs(after, pairing), (1 if does == "copy" else -1) * _pairs(before, pairing))


def exact_angle(positions: Tensor) -> Tensor:
    """position · base^(−2i/head_dim), radians: float64, the shape of positions and then `[64]`, on their device."""
    inv_freq = BASE ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64, device=positions.device) / HEAD_DIM)
    return positions.double().unsqueeze(-1) * inv_freq


def rotation_error(before: Tensor, after: Tensor, angle: Tensor, pairing: str) -> Tensor:
    """Largest error of a pair of after, relative to its length: a scalar in float64, NaN if there is one.

    before, after: `[…, 128]`. angle: float64 radians that broadcast with `[…, 64]`. pairing: "half" or "interleaved".
    """
    turn = torch.polar(torch.ones_like(angle), angle)
    return _gap(_pairs(after, pairing), _pairs(before, pairing) * turn)


def _gap(found: Tensor, wanted: Tensor) -> Tensor:
    """Of pairs; one of length 0, which must stay so, is divided by a tiny number instead."""
    return ((found - wanted).abs() / wanted.abs().clamp_min(1e-30)).max()


def _pairs(x: Tensor, pairing: str) -> Tensor:
    """`[…, 128]` as complex128 `[…, 64]`: channels i and i + 64, or 2i and 2i + 1."""
    x = x.detach().double()
    first, second = x.chunk(2, dim=-1) if pairing == "half" else (x[..., 0::2], x[..., 1::2])
    return torch.complex(first, second)
