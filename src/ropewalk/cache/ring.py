"""The slots of a row, by the order of its tokens alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk.attention.few_tokens import MOST_TOKENS
from ropewalk.attention.pairs import order_in_ring


class Ring:
    """The slots of a row. They are the same in every row and layer.

    The first tokens of a row stay in the sink slots. The others fill the remaining slots, the ring, in their order.
    With a window, the ring wraps around, and each new token evicts the oldest one. It has `MOST_TOKENS` - 1 slots more
    than the window, so that many new tokens overwrite no key that the first of them sees. With a capacity, tokens that
    do not fit are discarded.

    Args:
        capacity: number of slots in a cache that keeps every token. None with a window.
        window: number of tokens that a token attends to in a cache with a window. None with a capacity.
        sinks: with window, number of slots in front of the ring.

    Attributes:
        evicts: whether there is a window.
        ring: number of slots in the ring.
        count: number of slots for tokens. One extra slot, with index count, receives discarded tokens.
    """

    def __init__(self, capacity: int | None, window: int | None, sinks: int) -> None:
        self.window, self.sinks = window, sinks
        self.evicts = window is not None
        self.ring = (capacity or 0) if window is None else window + MOST_TOKENS - 1
        self.count = sinks + self.ring

    def assign(self, order: Tensor, real: Tensor | None, total: Tensor) -> Tensor:
        """Return the slot of each new token, int64 `[batch, seq]`.

        Discarded tokens get the slot `count`. The slots of the other tokens are distinct.

        Args:
            order: order of the new tokens, int64 `[batch, seq]`.
            real: False for padding, bool `[batch, seq]`. None means no padding.
            total: number of tokens in each row, including the new ones, int64 `[batch]`.
        """
        if self.evicts:
            kept = (order < self.sinks) | (order >= total[:, None] - self.ring)
            slot = torch.where(order < self.sinks, order, self.sinks + (order - self.sinks) % self.ring)
            slot = torch.where(kept, slot, self.count)
        else:
            slot = order.clamp(max=self.count)
        return slot if real is None else torch.where(real, slot, self.count)

    def order(self, length: Tensor) -> Tensor:
        """Return the order of the token in each slot, int64 `[batch, count]`, and `EMPTY` for empty slots.

        Args:
            length: number of tokens in each row, int64 `[batch]`.
        """
        return order_in_ring(length - 1, self.count, self.ring)
