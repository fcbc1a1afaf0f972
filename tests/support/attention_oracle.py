"""The reference for attention: written out in float64, with a separate rotation for each pair of query and key.

Imports nothing of ropewalk. PyTorch only provides autograd for the formulas below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import oracle

DOUBLE = torch.float64


@dataclass(frozen=True)
class Rotary:
    """Rotates the heads of a tensor: radians per position for each pair, and the channels of each pair."""

    speeds: Sequence[float]
    pairing: str
    offset: int = 0
    factor: float = 1.0

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [..., heads, head_dim] to positions [...], by multiplying complex numbers."""
        angles = self.angles(positions)[..., None, :]
        first, second = zip(*oracle.channels(2 * len(self.speeds), self.pairing, self.offset), strict=True)
        z = torch.complex(x[..., list(first)], x[..., list(second)]) * self.factor * torch.exp(1j * angles)
        rotated = x.clone()
        rotated[..., list(first)] = z.real
        rotated[..., list(second)] = z.imag
        return rotated

    def angles(self, positions: Tensor) -> Tensor:
        """Return the angles in radians, [..., pairs]."""
        return positions.to(DOUBLE)[..., None] * torch.tensor([float(w) for w in self.speeds], dtype=DOUBLE)


def attention(
    x: Tensor,
    weights: Mapping[str, Tensor],
    *,
    heads: int,
    kv_heads: int,
    rotary: Rotary | None,
    at: tuple[Tensor, Tensor],
    seen: Tensor,
    softmax_factor: float = 1.0,
    eps: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute attention of x [batch, seq, hidden], with weights that have Llama's names.

    at: the positions of query i and of key j for the pair (i, j), each [seq, seq] or [batch, seq, seq].
    seen: bool [..., seq, seq], True where a query attends to a key.
    bias: added to the scores, broadcast to [batch, heads, seq, seq].
    """
    weights = {name: value.to(DOUBLE) for name, value in weights.items()}
    batch, seq, _ = x.shape

    def project(x: Tensor, name: str) -> Tensor:
        projected = torch.einsum("...i,oi->...o", x, weights[f"{name}_proj.weight"])
        return projected + weights.get(f"{name}_proj.bias", torch.zeros((), dtype=DOUBLE))

    def norm(x: Tensor, name: str) -> Tensor:
        if eps is None:
            return x
        return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}_norm.weight"]

    q = norm(project(x.to(DOUBLE), "q").reshape(batch, seq, heads, -1), "q")
    k = norm(project(x.to(DOUBLE), "k").reshape(batch, seq, kv_heads, -1), "k")
    v = project(x.to(DOUBLE), "v").reshape(batch, seq, kv_heads, -1)
    serves = [head // (heads // kv_heads) for head in range(heads)]
    k, v = k[:, :, serves], v[:, :, serves]
    head_dim = q.shape[-1]

    of_query, of_key = (p.expand(batch, seq, seq) for p in at)
    q_pairs = q[:, :, None].expand(batch, seq, seq, heads, head_dim)
    k_pairs = k[:, None].expand(batch, seq, seq, heads, head_dim)
    if rotary is not None:
        q_pairs, k_pairs = rotary(q_pairs, of_query), rotary(k_pairs, of_key)
    scores = (q_pairs * k_pairs).sum(-1).permute(0, 3, 1, 2) * softmax_factor / head_dim**0.5
    if bias is not None:
        scores = scores + bias.to(DOUBLE)
    scores = scores.masked_fill(~seen, -torch.inf)
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    shares = exponentials / exponentials.sum(-1, keepdim=True)
    out = torch.zeros(batch, seq, heads, head_dim, dtype=DOUBLE)
    for j in range(seq):
        out = out + shares[..., j].permute(0, 2, 1)[..., None] * v[:, None, j]
    return project(out.reshape(batch, seq, -1), "o")


def of_layer(
    layer: Any,
    x: Tensor,
    rotary: Rotary | None,
    at: tuple[Tensor, Tensor] | None = None,
    *,
    seen: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute the attention of a `RotaryAttention`, by default causal and at the positions 0, 1, 2, …"""
    return attention(
        x,
        dict(layer.named_parameters()),
        heads=layer.num_heads,
        kv_heads=layer.num_kv_heads,
        rotary=rotary,
        at=pairs(torch.arange(x.shape[1])) if at is None else at,
        seen=causal(x.shape[1]) if seen is None else seen,
        softmax_factor=layer.softmax_factor,
        eps=getattr(layer.q_norm, "eps", None),
        bias=bias,
    )


def pairs(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the position of query i and of key j for each pair, given positions [..., seq]."""
    seq = positions.shape[-1]
    shape = (*positions.shape, seq)
    return positions[..., :, None].expand(shape), positions[..., None, :].expand(shape)


def causal(seq: int) -> Tensor:
    return torch.tensor([[j <= i for j in range(seq)] for i in range(seq)])


def self_extend(positions: Sequence[int], group: int, window: int) -> tuple[Tensor, Tensor]:
    """Return the positions that Self-Extend (2401.01325) assigns to each pair, computed in a loop over the pairs."""
    of_query, of_key = [], []
    for m in positions:
        rows = [(m, n) if m - n < window else (m // group + window - window // group, n // group) for n in positions]
        of_query.append([a for a, _ in rows])
        of_key.append([b for _, b in rows])
    return torch.tensor(of_query), torch.tensor(of_key)


def streaming(seq: int, window: int, sinks: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return positions and mask of StreamingLLM, by simulating the content of its cache after each token i."""
    of_query, of_key = (torch.zeros(seq, seq, dtype=torch.int64) for _ in range(2))
    seen = torch.zeros(seq, seq, dtype=torch.bool)
    held: list[int] = []
    for i in range(seq):
        held.append(i)
        if len(held) > sinks + window:
            del held[sinks]
        for place, j in enumerate(held):
            of_query[i, j], of_key[i, j], seen[i, j] = len(held) - 1, place, True
    return (of_query, of_key), seen
