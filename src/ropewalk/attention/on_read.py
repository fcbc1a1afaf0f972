"""Rotation of keys when attention reads them, for a cache that keeps them before rotation."""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ropewalk._layout import Layout
from ropewalk.attention.attend import attend
from ropewalk.attention.two_pass import TwoPass
from ropewalk.rotation.api import Rotation


class OnRead(TwoPass):
    """The rotations of a step of a cache with `rotate="on_read"`: of the new queries, and of all keys.

    Both passes are over the keys: the first rotates them, the second scores them. `step.rotation(rope)` creates it.

    Args:
        queries: rotates the new queries.
        keys: rotates the keys that attention reads, the new ones included, at their present positions.
    """

    __slots__ = ("keys", "queries")

    def __init__(self, queries: Rotation | TwoPass, keys: Rotation) -> None:
        self.queries, self.keys, self.sinks = queries, keys, 0
        self.near = queries if queries.passes == 1 else queries.near

    def __call__(self, q: Tensor, k: Tensor, *, layout: Layout) -> tuple[Tensor, Tensor]:
        """Rotate the new queries, and return the new keys as they are."""
        return self.queries(q, layout=layout) if self.queries.passes == 1 else self.queries(q, k, layout=layout)[0], k

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | BlockMask | None,
        scale: float,
        causal: bool = True,
        dropout: float = 0.0,
    ) -> Tensor:
        """Rotate the keys k, which are not rotated yet, and attend over them. The other arguments as in `attend`."""
        k = self.keys(k, layout="bshd")
        by = attend if self.queries.passes == 1 else self.queries.attend
        return by(q, k, v, mask=mask, scale=scale, causal=causal, dropout=dropout)
