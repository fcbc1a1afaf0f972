"""Which keys each query attends to, and pieces of queries that each attend over the keys that they see.

So neither memory nor time grows with all pairs of query and key, of which a window hides most.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ropewalk.positions.sizes import can_read

PIECE = 256
"""Queries of a piece. With 512, a window of 512 in 4,096 tokens takes 1.1 to 1.4 times as long (PyTorch 2.13, CPU)."""

EMPTY = 2**62
"""Order and position of an empty slot. It is larger than that of every query, so the causal mask hides the slot."""

Keys = slice | Tensor
"""Keys of a piece: a slice, or their numbers, int64 `[n]`."""


class Pairs:
    """Which keys each query attends to: by the order of their tokens, which is their index in the row.

    A query of order n attends to the keys of order m with n − window < m ≤ n + after, and of those with m ≤ n to the
    sinks, m < sinks.

    Args:
        order: order of the queries, int64 `[batch or 1, seq]`.
        key_order: order of the keys, int64 `[batch or 1, keys]`, and `EMPTY` for empty slots.
        window: None means no limit.
        sinks: number of first tokens of a row that no window hides.
        after: number of tokens after a query that it attends to, 0 for causal attention.
        padding: queries that attend to every key, because one without keys may get NaN, bool `[batch, seq]`, or None.
        start: order of the first query of every row, if it is known, and key i has order i. None if it is not.
    """

    def __init__(
        self,
        order: Tensor,
        key_order: Tensor,
        *,
        window: int | None = None,
        sinks: int = 0,
        after: int = 0,
        padding: Tensor | None = None,
        start: int | None = None,
    ) -> None:
        self.order, self.key_order, self.padding, self.start = order, key_order, padding, start
        self.window, self.sinks, self.after = window, sinks, after
        self._only: tuple[slice, Keys, Tensor] | None = None

    @classmethod
    def aligned(cls, seq: int, keys: int, device: torch.device, *, window: int | None = None, after: int = 0) -> Pairs:
        """Return the pairs of a sequence whose last query and last key belong to the same token."""
        key_order = torch.arange(keys, device=device)[None]
        return cls(key_order[:, keys - seq :], key_order, window=window, after=after, start=keys - seq)

    def mask(self, queries: slice = slice(None), keys: Keys = slice(None)) -> Tensor:
        """Return the mask of some queries and keys, bool `[batch or 1, 1, queries, keys]`."""
        order, key_order = self.order[:, queries, None], self.key_order[:, None, keys]
        seen = key_order <= order + self.after
        if self.window is not None:
            near = key_order > order - self.window
            seen = seen & (near | (key_order < self.sinks) if self.sinks else near)
        return (seen if self.padding is None else seen | self.padding[:, queries, None])[:, None]

    def pieces(self) -> Iterable[tuple[slice, Keys, Tensor]]:
        """Return the queries of each piece, the keys that they see, and their mask. Layers share a single one."""
        queries = cut(self.order.shape[1])
        if len(queries) > 1:
            return map(self._piece, queries)
        self._only = self._only or self._piece(queries[0])
        return [self._only]

    def _piece(self, queries: slice) -> tuple[slice, Keys, Tensor]:
        keys = self._keys_of(queries)
        return queries, keys, self.mask(queries, keys)

    def _keys_of(self, queries: slice) -> Keys:
        """Return the keys that some of these queries see, as far as the host knows them without waiting."""
        count = self.key_order.shape[1]
        if self.start is not None:
            first = 0 if self.window is None else max(0, self.start + queries.start - self.window + 1)
            return slice(first, min(count, self.start + queries.stop + self.after))
        if not can_read(self.key_order):
            return slice(None)
        least, most = torch.aminmax(self.order[:, queries])
        seen = self.key_order <= most + self.after
        if self.window is not None:
            seen &= (self.key_order > least - self.window) | (self.key_order < self.sinks)
        numbers = seen.any(0).nonzero()[:, 0]
        if not len(numbers):
            return slice(0, 1)  # only padding, whose result has no meaning
        first, last = int(numbers[0]), int(numbers[-1])
        return slice(first, last + 1) if last - first < 2 * len(numbers) else numbers


def order_in_ring(last: Tensor, slots: int, ring: int) -> Tensor:
    """Return the order of the key in each slot, int64 `[batch, slots]`, and `EMPTY` for empty slots.

    Args:
        last: order of the newest key of each row, int64 `[batch]`.
        slots: slots of a row. The first keys stay in the slots in front of the ring.
        ring: number of last slots, in which later keys overwrite older ones in turn.
    """
    slot, last = torch.arange(slots, device=last.device), last[:, None]
    newest = last - (last - slot) % ring  # that maps to this slot
    in_front, front = slot < slots - ring, slots - ring
    return torch.where(in_front & (slot <= last), slot, torch.where(in_front | (newest < front), EMPTY, newest))


def cut(seq: int) -> list[slice]:
    """Return the queries of each piece."""
    return [slice(begin, min(begin + PIECE, seq)) for begin in range(0, seq, PIECE)]
