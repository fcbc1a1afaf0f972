"""Map tokens to the slots of a cache, and slots to the tokens that they hold.

The functions of this module depend only on the order of a token: its index in its row, from 0. A token also has a
position, which decides its rotation but does not affect masks. Several tokens may have the same position, and
`KVCache.shift` changes positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk.attention import cache_checks

EMPTY = 2**62
"""Order and position of an empty slot. It is larger than that of every query, so the causal mask hides the slot."""


class Slots:
    """The slots of a row, which are the same in every row and layer.

    The first tokens of a row stay in the sink slots. The others fill the remaining slots, the ring, in their order.
    With a window, the ring wraps around, and each new token evicts the oldest one. With a capacity, tokens that do not
    fit are discarded.

    Args:
        capacity: number of slots in a cache that keeps every token. None with a window.
        window: number of slots in the ring of a cache with a window. None with a capacity.
        sinks: with window, number of slots in front of the ring.

    Attributes:
        ring: number of slots in the ring.
        count: number of slots for tokens. One extra slot, with index count, receives discarded tokens.
    """

    def __init__(self, capacity: int | None, window: int | None, sinks: int) -> None:
        self.sinks = sinks
        self.evicts = window is not None
        self.ring = capacity or window or 0
        self.count = sinks + self.ring

    def assign(self, order: Tensor, real: Tensor, total: Tensor) -> Tensor:
        """Return the slot of each new token, int64 `[batch, seq]`.

        Discarded tokens get the slot `count`. The slots of the other tokens are distinct.

        Args:
            order: order of the new tokens, int64 `[batch, seq]`.
            real: False for padding, bool `[batch, seq]`.
            total: number of tokens in each row, including the new ones, int64 `[batch]`.
        """
        if not self.evicts:
            return torch.where(real & (order < self.count), order, self.count)
        kept = real & ((order < self.sinks) | (order >= total[:, None] - self.ring))
        slot = torch.where(order < self.sinks, order, self.sinks + (order - self.sinks) % self.ring)
        return torch.where(kept, slot, self.count)

    def order(self, length: Tensor) -> Tensor:
        """Return the order of the token in each slot, int64 `[batch, count]`, and `EMPTY` for empty slots.

        Args:
            length: number of tokens in each row, int64 `[batch]`.
        """
        slot, last = torch.arange(self.count, device=length.device), length[:, None] - 1
        if not self.evicts:
            return torch.where(slot <= last, slot, EMPTY)
        in_ring = last - (last - slot) % self.ring  # the newest token that maps to this slot
        in_ring = torch.where(in_ring >= self.sinks, in_ring, EMPTY)
        if not self.sinks:
            return in_ring
        return torch.where(slot < self.sinks, torch.where(slot <= last, slot, EMPTY), in_ring)

    def filled(self, lengths: tuple[int, int] | None, *, concatenates: bool) -> slice:
        """Return a slice that contains every key visible to some row, or all keys if the lengths are unknown.

        Args:
            lengths: smallest and largest number of tokens in a row, or None if unknown. The new tokens are included,
                unless `concatenates` is True.
            concatenates: whether the new keys are concatenated to all slots. The slice then has either all cached keys
                or none.
        """
        if lengths is None or (concatenates and lengths[1] > 0):
            return slice(None)
        return slice(self.count, None) if concatenates else slice(min(self.count, max(lengths[1], 1)))

    def is_causal(self, seq: int, lengths: tuple[int, int] | None, *, concatenates: bool) -> bool:
        """Return whether the mask is a plain causal mask over the filled slots, provided that no new token is padding.

        That is so for a single new token if all rows have equal lengths, and for the first tokens of all rows.

        Args:
            seq: number of new tokens in each row.
            lengths, concatenates: as in `filled`.
        """
        if lengths is None or lengths[0] != lengths[1]:
            return False
        return lengths[1] == 0 and seq <= self.ring if concatenates else seq in (1, lengths[1])


def clear_slots(tensors: Sequence[Tensor], slots: Tensor) -> None:
    """Fill some slots of each row with zeros, for the same reason as `clear`.

    Args:
        tensors: as for `clear`.
        slots: int64 `[batch, seq]`.
    """
    row = torch.arange(slots.shape[0], device=slots.device)[:, None]
    for tensor in tensors:
        tensor.index_put_((row, slots), tensor.new_zeros(()))


def clear(tensors: Sequence[Tensor], begin: Tensor, end: Tensor) -> None:
    """Fill the dropped slots of each row, from begin up to end, with zeros.

    A mask would not hide NaN in these slots, because 0 · NaN is NaN.

    Args:
        tensors: keys and values of all layers, `[batch, slots, kv_heads, head_dim]`.
        begin, end: range of slots in each row, int64 `[batch]`.
    """
    if cache_checks.read_range(begin) is None:
        slot = torch.arange(tensors[0].shape[1], device=begin.device)
        dropped = (slot >= begin[:, None]) & (slot < end[:, None])
        for tensor in tensors:
            tensor.masked_fill_(dropped[:, :, None, None], 0)
        return
    for row, (first, last) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        for tensor in tensors if first < last else ():
            tensor[row, first:last].zero_()
