"""What every contender is given, and what must come back: the rotation written out by hand in float64.

Nothing here is computed by ropewalk, so ropewalk is a contender like the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

BASE, HEAD_DIM, Q_HEADS, KV_HEADS = 500_000.0, 128, 32, 8  # Llama 3 without scaling
LONGEST = 100_000  # tokens: one that is decoded stands before that
FAR = 1_048_576  # the last position of the case that asks for cos and sin far away
Layout = Literal["bshd", "bhsd"]
Passes = Literal["forward", "forward + backward", "backward"]
"""What is timed. "backward" is the backward pass alone, whose forward pass has run."""
Does = Literal["half", "interleaved", "copy", "negate", "tables"]
"""What comes of q and k: turned with a pairing, as they were, with the other sign; or only cos and sin."""
Inputs = tuple[Tensor, ...]
"""q and k, with a backward pass also the incoming gradients of both."""

_CHUNK = 512  # tokens checked at a time: float64 takes memory


@dataclass(frozen=True)
class Case:
    """Queries and keys of one size, where they stand, and what is timed.

    q and its gradient: `[batch, tokens, 32, 128]`, k and its gradient: `[batch, tokens, 8, 128]`, in layout "bshd";
    heads before tokens in "bhsd". first: position of the first token; at 0 nothing turns, and a single token would
    prove nothing. decode: each row of the batch stands at a position of its own, drawn from 0 to LONGEST.
    """

    tokens: int
    dtype: torch.dtype
    layout: Layout = "bshd"
    passes: Passes = "forward"
    batch: int = 1
    first: int = 100
    decode: bool = False
    device: str = "cpu"

    def inputs(self, seed: int = 0) -> Inputs:
        """Normal numbers, the same for the same seed."""
        generator = torch.Generator(self.device).manual_seed(seed)

        def normal(heads: int) -> Tensor:
            axes = (self.tokens, heads) if self.layout == "bshd" else (heads, self.tokens)
            keys: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": self.device}
            return torch.randn(self.batch, *axes, HEAD_DIM, **keys).to(self.dtype)

        heads = (Q_HEADS, KV_HEADS) if self.passes == "forward" else (Q_HEADS, KV_HEADS, Q_HEADS, KV_HEADS)
        return tuple(normal(n) for n in heads)

    @cached_property
    def positions(self) -> Tensor:
        """int64 `[tokens]`; decoding, `[batch, tokens]`."""
        if self.decode:
            generator = torch.Generator(self.device).manual_seed(0)
            shape = (self.batch, self.tokens)
            return torch.randint(0, LONGEST, shape, generator=generator, device=self.device)
        return torch.arange(self.first, self.first + self.tokens, device=self.device)

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor]:
        """cos and sin: float32, the shape of positions and then `[64]`, exact but for that rounding."""
        return tables(self.positions)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def is_far(self) -> bool:
        """Up to position FAR."""
        return self.first + self.tokens > FAR

    @property
    def title(self) -> str:
        """Size, dtype and what is timed, in words."""
        rows = f"{self.batch} x " if self.batch > 1 else ""
        tokens = f"{self.tokens:,} token{'s' if self.tokens > 1 else ''}"
        return f"{rows}{tokens}, {self.dtype_name}, {'decoding' if self.decode else self.passes}"

    @property
    def bytes_moved(self) -> int:
        """q and k, or their gradients, read once and written once, twice that with both; tables are not counted."""
        elements = self.batch * self.tokens * (Q_HEADS + KV_HEADS) * HEAD_DIM
        return (4 if self.passes == "forward + backward" else 2) * elements * self.dtype.itemsize

    def beside_heads(self, table: Tensor) -> Tensor:
        """`[tokens, n]` or `[batch, tokens, n]`, as it broadcasts with q and k."""
        return table.unsqueeze(-2 if self.layout == "bshd" else -3)

    def tolerance(self, does: Does, *, own_angles: bool) -> float:
        """Largest error allowed, relative to the length of a pair; of tables, absolute.

        4 eps: 2⁻²¹ in float32, 2⁻⁵ in bfloat16. The usual code rounds cos and sin, two products and a sum, which makes
        at most 2.7 eps. Who computes angles in float32 may be wrong by 2⁻²² radians more for each position.
        """
        rounding = 2.0**-24 if does == "tables" else 4 * torch.finfo(self.dtype).eps
        return rounding + (int(self.positions.max()) + 1) * 2.0**-22 * own_angles

    def error(self, does: Does, inputs: Inputs, results: Sequence[Tensor]) -> float:
        """Largest error of the results: of q and k, with a backward pass also of their gradients; NaN if there is one.

        Source: q and k are turned by position · base^(−2i/head_dim), gradients back by as much.
        """
        if does == "tables":
            exact = exact_angle(self.positions)
            gaps = [t.double() - e for t, e in zip(results, (exact.cos(), exact.sin()), strict=True)]
            return torch.stack(gaps).abs().max().item()
        ways = (1, 1, -1, -1)[: len(inputs)]
        worst = [
            gap
            for x, result, way in zip(inputs, results, ways, strict=True)
            for gap in self._gaps(does, x, result, way)
        ]
        return torch.stack(worst).max().item()  # of torch, since it does not lose NaN

    def _gaps(self, does: Does, x: Tensor, result: Tensor, way: int) -> Iterator[Tensor]:
        if result.shape != x.shape or result.dtype != x.dtype:
            yield torch.tensor(torch.inf, dtype=torch.float64, device=self.device)
            return
        pairing = does if does in ("half", "interleaved") else "half"
        for start in range(0, self.tokens, _CHUNK):
            length = min(_CHUNK, self.tokens - start)
            before, after = (t.narrow(self.layout.index("s"), start, length) for t in (x, result))
            if does == pairing:
                angle = way * self.beside_heads(exact_angle(self.positions[..., start : start + length]))
                yield rotation_error(before, after, torch.polar(torch.ones_like(angle), angle), pairing)
            else:
                yield _gap(_pairs(after, pairing), (1 if does == "copy" else -1) * _pairs(before, pairing))


def exact_angle(positions: Tensor) -> Tensor:
    """position · base^(−2i/head_dim), radians: float64, the shape of positions and then `[64]`, on their device."""
    inv_freq = BASE ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64, device=positions.device) / HEAD_DIM)
    return positions.double().unsqueeze(-1) * inv_freq


def tables(positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the exact angle, float32."""
    angle = exact_angle(positions)
    return angle.cos().float(), angle.sin().float()


def rotation_error(before: Tensor, after: Tensor, turn: Tensor, pairing: str) -> Tensor:
    """Largest error of a pair of after, relative to its length: a scalar in float64, NaN if there is one.

    before, after: `[…, 2 · pairs]`. turn: complex128 of length 1 that broadcasts with `[…, pairs]`. pairing: "half" or
    "interleaved".
    """
    return _gap(_pairs(after, pairing), _pairs(before, pairing) * turn)


def _gap(found: Tensor, wanted: Tensor) -> Tensor:
    """Of pairs; one of length 0, which must stay so, is divided by a tiny number instead."""
    return ((found - wanted).abs() / wanted.abs().clamp_min(1e-30)).max()


def _pairs(x: Tensor, pairing: str) -> Tensor:
    """`[…, 2n]` as complex128 `[…, n]`: channels i and i + n, or 2i and 2i + 1."""
    x = x.detach().double()
    first, second = x.chunk(2, dim=-1) if pairing == "half" else (x[..., 0::2], x[..., 1::2])
    return torch.complex(first, second)
