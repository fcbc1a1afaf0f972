"""The inputs of the benchmark, and the check of results against a rotation that is computed here in float64.

The check uses no code of ropewalk, so ropewalk is checked like the other contenders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

BASE, HEAD_DIM, Q_HEADS, KV_HEADS = 500_000.0, 128, 32, 8  # Llama 3 without scaling
LONGEST = 100_000  # upper bound of the positions of decoded tokens
FAR = 1_048_576  # the last position of the case that measures cos and sin at large positions
Passes = Literal["forward", "forward + backward", "backward"]
"""What is timed. "backward" is the backward pass alone, after an untimed forward pass."""
Effect = Literal["half", "interleaved", "copy", "negate", "tables"]
"""The effect on q and k: rotated with a pairing, copied, or negated. "tables" computes only cos and sin."""
Inputs = tuple[Tensor, ...]
"""q and k. With a backward pass, also the incoming gradients of both."""

_CHUNK = 512  # tokens checked at a time, to limit the memory of float64 tensors


@dataclass(frozen=True)
class Case:
    """A case of the benchmark: the size, dtype and positions of q and k, and what is timed.

    q and its gradient are `[batch, tokens, 32, 128]`, k and its gradient `[batch, tokens, 8, 128]`.

    Args:
        tokens, batch: the number of tokens in each row, and the number of rows.
        dtype, device: those of q and k.
        passes: the passes that are timed.
        first: the position of the first token. It is not 0 by default, because a token at position 0 is not rotated.
        decode: whether each token has a random position below LONGEST, as in decoding. `first` then has no effect.
    """

    tokens: int
    dtype: torch.dtype
    passes: Passes = "forward"
    batch: int = 1
    first: int = 100
    decode: bool = False
    device: str = "cpu"

    def inputs(self, seed: int = 0) -> Inputs:
        """Draw normally distributed q and k, and gradients for a backward pass. Equal seeds give equal inputs."""
        generator = torch.Generator(self.device).manual_seed(seed)

        def normal(heads: int) -> Tensor:
            keys: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": self.device}
            return torch.randn(self.batch, self.tokens, heads, HEAD_DIM, **keys).to(self.dtype)

        heads = (Q_HEADS, KV_HEADS) if self.passes == "forward" else (Q_HEADS, KV_HEADS, Q_HEADS, KV_HEADS)
        return tuple(normal(n) for n in heads)

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token: int64 `[tokens]`, or `[batch, tokens]` for decoding."""
        if self.decode:
            generator = torch.Generator(self.device).manual_seed(0)
            shape = (self.batch, self.tokens)
            return torch.randint(0, LONGEST, shape, generator=generator, device=self.device)
        return torch.arange(self.first, self.first + self.tokens, device=self.device)

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Exact cos and sin at the positions, rounded to float32, `[*positions.shape, 64]`."""
        return tables(self.positions)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def is_far(self) -> bool:
        """Whether the last position is at least FAR. For such a case, only cos and sin are measured."""
        return self.first + self.tokens > FAR

    @property
    def title(self) -> str:
        """The size, the dtype, and the passes or "decoding", as text."""
        rows = f"{self.batch} x " if self.batch > 1 else ""
        tokens = f"{self.tokens:,} token{'s' if self.tokens > 1 else ''}"
        return f"{rows}{tokens}, {self.dtype_name}, {'decoding' if self.decode else self.passes}"

    @property
    def bytes_moved(self) -> int:
        """The number of bytes if each timed pass reads and writes q and k once. Tables are not counted."""
        elements = self.batch * self.tokens * (Q_HEADS + KV_HEADS) * HEAD_DIM
        return (4 if self.passes == "forward + backward" else 2) * elements * self.dtype.itemsize

    @property
    def q_bytes(self) -> int:
        """The number of bytes of q."""
        return self.batch * self.tokens * Q_HEADS * HEAD_DIM * self.dtype.itemsize

    def add_head_axis(self, table: Tensor) -> Tensor:
        """Add an axis for the heads of q and k to a table `[tokens, n]` or `[batch, tokens, n]`."""
        return table.unsqueeze(-2)

    def tolerance(self, does: Effect, *, own_angles: bool) -> float:
        """Return the largest allowed error, relative to the length of a pair. For tables it is absolute, 2⁻²⁴.

        For rotated tensors it is 4 eps: 2⁻²¹ in float32 and 2⁻⁵ in bfloat16. The code of most projects rounds cos and
        sin, two products and a sum, which costs at most 2.7 eps. For contenders that compute angles in float32
        (`own_angles`), the limit is larger by 2⁻²² times the number of positions from 0 to the largest.
        """
        rounding = 2.0**-24 if does == "tables" else 4 * torch.finfo(self.dtype).eps
        return rounding + (int(self.positions.max()) + 1) * 2.0**-22 * own_angles

    def error(self, does: Effect, inputs: Inputs, results: Sequence[Tensor]) -> float:
        """Return the largest error of rotated q and k and, with a backward pass, of their gradients.

        A rotation must rotate q and k by position · base^(−2i/head_dim), and gradients by the negative angle. The error
        is NaN if a result has NaN, and infinite if a rotated tensor has a wrong shape or dtype.

        Args:
            does: the effect that the results should have.
            inputs: q and k, and with a backward pass the incoming gradients.
            results: the results for the inputs in the same order, or cos and sin if `does` is "tables".
        """
        if does == "tables":
            exact = exact_angle(self.positions)
            gaps = [t.double() - e for t, e in zip(results, (exact.cos(), exact.sin()), strict=True)]
            return torch.stack(gaps).abs().max().item()
        signs = (1, 1, -1, -1)[: len(inputs)]
        gaps = [
            gap
            for x, result, sign in zip(inputs, results, signs, strict=True)
            for gap in self._gaps(does, x, result, sign)
        ]
        return torch.stack(gaps).max().item()  # torch's max propagates NaN, Python's does not

    def _gaps(self, does: Effect, x: Tensor, result: Tensor, sign: int) -> Iterator[Tensor]:
        """Yield the error of each chunk of tokens. `sign` is the sign of the angle."""
        if result.shape != x.shape or result.dtype != x.dtype:
            yield torch.tensor(torch.inf, dtype=torch.float64, device=self.device)
            return
        pairing = does if does in ("half", "interleaved") else "half"
        for start in range(0, self.tokens, _CHUNK):
            length = min(_CHUNK, self.tokens - start)
            before, after = (t.narrow(1, start, length) for t in (x, result))
            if does == pairing:
                angle = sign * self.add_head_axis(exact_angle(self.positions[..., start : start + length]))
                yield rotation_error(before, after, torch.polar(torch.ones_like(angle), angle), pairing)
            else:
                yield _gap(_pairs(after, pairing), (1 if does == "copy" else -1) * _pairs(before, pairing))


def exact_angle(positions: Tensor) -> Tensor:
    """Compute position · base^(−2i/head_dim) in radians, float64 `[*positions.shape, 64]`."""
    inv_freq = BASE ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64, device=positions.device) / HEAD_DIM)
    return positions.double().unsqueeze(-1) * inv_freq


def tables(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the exact angle, float32 `[*positions.shape, 64]`."""
    angle = exact_angle(positions)
    return angle.cos().float(), angle.sin().float()


def rotation_error(before: Tensor, after: Tensor, factor: Tensor, pairing: str) -> Tensor:
    """Compute the largest error of a rotated pair, relative to its length.

    Args:
        before, after: the tensor before and after the rotation, `[…, 2 · pairs]`.
        factor: exact cos + i sin, complex128, broadcastable to `[…, pairs]`.
        pairing: "half" or "interleaved".

    Returns:
        A float64 scalar, which is NaN if `after` has NaN.
    """
    return _gap(_pairs(after, pairing), _pairs(before, pairing) * factor)


def _gap(result: Tensor, exact: Tensor) -> Tensor:
    """Compute the largest relative error of complex pairs. For an exact pair of length 0, the divisor is 1e-30."""
    return ((result - exact).abs() / exact.abs().clamp_min(1e-30)).max()


def _pairs(x: Tensor, pairing: str) -> Tensor:
    """View `[…, 2n]` as complex128 `[…, n]`, pairing channels i and i + n, or 2i and 2i + 1."""
    x = x.detach().double()
    first, second = x.chunk(2, dim=-1) if pairing == "half" else (x[..., 0::2], x[..., 1::2])
    return torch.complex(first, second)
