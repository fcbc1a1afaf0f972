"""The plan of one forward pass: the slots of the new tokens, and the keys that they attend to.

It decides what a window, sinks, padding, masks and several new tokens mean for the keys that are seen, how they are
read, and whether a step can be undone; `ring.py` computes slots:

| cache | new tokens | they attend to | `visible`, for the kernel over the slots | `mask` |
|---|---|---|---|---|
| capacity | any number | slots from 0, after the write | with any window of the layer | slot ≤ order |
| window, sinks | up to `MOST_TOKENS` | all slots, after the write | with any window of the layer | by order |
| window, sinks | more | all slots before the write, then the new keys | none | by order |

A shorter window of a layer hides the sinks. Sinks that are seen have another distance, so their scores belong to
another rotation of the queries (`find_sinks`).
`LayerCache.attend` asks the store for its kernel over the keys of `visible`, or else attends over those of `dense`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.attention.few_tokens import MOST_TOKENS
from ropewalk.attention.mask_tensors import select
from ropewalk.attention.pairs import EMPTY, Pairs
from ropewalk.attention.two_pass import TwoPass
from ropewalk.cache.ring import Ring
from ropewalk.cache.store import Store
from ropewalk.cache.tokens import NewTokens, read_range
from ropewalk.kernels.visible import VisibleKeys
from ropewalk.rotation.api import Rotation


class Plan:
    """The slots of the new tokens of a step, and the keys that they attend to.

    Args:
        ring: the slots of the cache.
        row: row numbers, int64 `[batch, 1]`.
        new: places of the new tokens.
        real: False for padding, bool `[batch, seq]`. None means no padding.
        length: number of tokens in each row before this step, int64 `[batch]`.

    Attributes:
        slots: row and slot of each new token, for `Store.write`.
        flat_slots: row · slots of a row + slot of each token, int64 `[batch, seq]`, for `Store.rotate_and_write`.
        concatenates: whether the new keys are concatenated to the cached ones for attention, which they overwrite.
        can_be_undone: whether no key is overwritten that the cache needs if layers have stored, but others fail.
        evicts_nothing: whether all tokens, the new ones included, are known to fit in the slots.
        lengths: the smallest and largest number of tokens in the slots that are read. None if reading them is not free.
        keys: number of keys of the mask.
        filled: the keys that some token attends to, a slice of those of the mask.
        causal: whether the mask is known to be a plain causal mask over `filled`.
        kept: the pairs of each window, and the mask, which all layers use.
    """

    def __init__(self, ring: Ring, row: Tensor, new: NewTokens, real: Tensor | None, length: Tensor) -> None:
        seq = new.order.shape[1]
        self.ring, self.order, self._length = ring, new.order, new.length
        self._padding = None if real is None else ~real
        slot = ring.assign(new.order, real, new.length)
        self.slots, self.flat_slots = (row, slot), torch.add(slot, row, alpha=ring.count + 1)
        # With a window, many tokens would overwrite keys that the earliest of them still need, so their keys are
        # concatenated to the cached ones for attention.
        self.concatenates = ring.evicts and seq > MOST_TOKENS
        self.can_be_undone = not self.concatenates
        self.lengths = lengths = read_range(length if self.concatenates else new.length)
        longest = None if lengths is None else lengths[1] + (seq if self.concatenates else 0)
        self.evicts_nothing = longest is not None and longest <= ring.sinks + (ring.window or ring.ring)
        self._key_order: Tensor | None = None  # computed on first use, which saves time in a decode step
        if self.concatenates:
            is_first = lengths is not None and lengths[1] == 0
            self.filled = slice(ring.count if is_first else None, None)
            causal = is_first and self.evicts_nothing
            self._key_order = torch.cat([ring.order(length), self.without_padding(new.order)], dim=1)
        else:
            self.filled = slice(0, ring.count if lengths is None else min(ring.count, max(lengths[1], 1)))
            causal = lengths is not None and lengths[0] == lengths[1] and seq in (1, lengths[1])
            causal = causal and (self.evicts_nothing or not ring.evicts)
        self.causal = causal and real is None
        self.keys = ring.count + (seq if self.concatenates else 0)
        self.kept: dict[int | str | None, Any] = {}

    def without_padding(self, numbers: Tensor) -> Tensor:
        """Return numbers of the new tokens, `[batch, seq]`, with `EMPTY` for padding."""
        return numbers if self._padding is None else numbers.masked_fill(self._padding, EMPTY)

    @property
    def key_order(self) -> Tensor:
        """Order of each key, int64 `[batch, keys]`."""
        return self.ring.order(self._length) if self._key_order is None else self._key_order

    def place_keys(self, cached: Tensor, new: Tensor) -> Tensor:
        """Return a number of each key, `[batch, keys]`, such as its position.

        Args:
            cached: the numbers of the slots before this step, `[batch, slots of a row]`.
            new: those of the new tokens, `[batch, seq]`.
        """
        if self.concatenates:
            return torch.cat([cached[:, : self.ring.count], self.without_padding(new)], dim=1)
        return cached.scatter(1, self.slots[1], new)[:, : self.ring.count]

    def find_sinks(self) -> tuple[Tensor, Tensor] | None:
        """Return what the scores of sinks need, or None if there are none.

        Returns:
            How far each query moves back when positions are counted inside the cache, int64 `[batch, seq]`; and which
            keys are sinks, bool `[batch or 1, keys]`.
        """
        ring = self.ring
        if not ring.sinks or self.evicts_nothing:  # no query moves back
            return None
        excess = (self.order - (ring.sinks + (ring.window or 0) - 1)).clamp(min=0)
        slot = torch.arange(self.keys, device=self.order.device)[None]
        is_sink = slot < ring.sinks if self._key_order is None else self._key_order < ring.sinks
        return excess, is_sink

    def check_window(self, window: int | None) -> int | None:
        """Return the window of a layer or, for None, of the cache. Raise if it is no number, or the cache has less."""
        if window is None:
            return self.ring.window
        window = window if torch.compiler.is_compiling() else _checks.length("KVCache", "window", window)
        if self.ring.window is None or window <= self.ring.window:
            return window
        raise _checks.error(
            "KVCache",
            f"the window of a cache must not be shorter than that of the layer, {window}",
            f"window={self.ring.window}",
            "Build a separate cache for the layers with this window.",
        )

    def within(self, window: int) -> Tensor | None:
        """Return the mask of a layer's window, as `CacheStep.within`."""
        if self.check_window(window) == self.ring.window or (not self.ring.evicts and window >= self.ring.count):
            return None
        return ((self.order[:, :, None] - self.key_order[:, None, :]) < window)[:, None]

    @property
    def reads_all(self) -> bool:
        """Whether attention reads all keys, not those of `filled`: a compiled layer has one graph for any number."""
        return torch.compiler.is_compiling()

    def visible(
        self, window: int | None, rotation: Rotation | TwoPass | None, mask: Tensor | None
    ) -> VisibleKeys | None:
        """Describe the keys in the slots to a kernel that reads them there, or return None if it cannot express them.

        Args:
            window: number of tokens that each token attends to. None means no limit.
            rotation: rotation of the layer. Of those in two passes, a kernel knows the one for the sinks of the cache.
            mask: the user's mask, which no kernel takes.
        """
        sinks = self.ring.sinks
        extended = rotation is not None and rotation.passes == 2 and (not sinks or rotation.sinks != sinks)
        if mask is not None or extended:
            return None
        count = self.ring.count if torch.compiler.is_compiling() else self.filled.stop  # as `reads_all`
        if not self.ring.evicts:
            return VisibleKeys(self.order, count, window=window)
        if self.concatenates:
            return None
        sinks = sinks if window == self.ring.window else 0
        return VisibleKeys(self.order, self.ring.count, window=window, sinks=sinks, ring=self.ring.ring)

    def mask(self) -> Tensor:
        """Return the mask of all keys, bool `[batch, 1, seq, keys]`."""
        mask: Tensor = self.kept["mask"] if "mask" in self.kept else self._pairs(None, slice(None)).mask()
        if not self.reads_all:  # a compiled layer must not keep tensors
            self.kept["mask"] = mask
        return mask

    def dense(
        self, store: Store, concatenated: tuple[Tensor, Tensor] | None, window: int | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Pairs | None]:
        """Return keys and values of a layer after its write, and which of them each token attends to.

        Args:
            store: the store of the layer.
            concatenated: the result of `concatenate` before the write.
            window: number of tokens that each token attends to. None means as many as in the cache.
            mask: the user's mask, for all keys.

        Returns:
            Keys, values, the user's mask for these keys, and the pairs, in which None stands for plain causality.
        """
        keys, values = concatenated or store.read(self.ring.count if self.reads_all else self.filled.stop)
        if not self.ring.evicts and window is not None and window >= self.filled.stop:
            window = None  # it hides nothing
        if self.reads_all:
            return keys, values, mask, self._pairs(window, slice(None))
        if mask is None and self.causal and (window is None or window == self.ring.window):
            return keys, values, None, None
        if window not in self.kept:
            self.kept[window] = self._pairs(window, self.filled)
        mask = mask if mask is None else select(mask, slice(None), self.filled)
        return keys, values, mask, self.kept[window]

    def _pairs(self, window: int | None, keys: slice) -> Pairs:
        """Return which of some keys each token attends to, with the window of a layer. None is that of the cache."""
        ring, sinks = self.ring, self.ring.sinks
        if ring.evicts:
            key_order = self.key_order
            sinks = sinks if window is None or window == ring.window else 0
            window = ring.window if window is None else window
        else:  # token n is in slot n
            key_order = torch.arange(ring.count if keys.stop is None else keys.stop, device=self.order.device)[None]
        return Pairs(self.order, key_order[:, keys], window=window, sinks=sinks, padding=self._padding)

    def concatenate(self, store: Store, k: Tensor, v: Tensor, *, every: bool) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer before its write, all or those of `filled`, with the new ones."""
        if self._padding is not None:  # NaN in padding would pass through the mask
            k, v = (x.masked_fill(self._padding[:, :, None, None], 0) for x in (k, v))
        if not every and self.filled.start is not None:  # nothing was cached before
            return k, v
        keys, values = store.read(self.ring.count)
        return torch.cat([keys, k], dim=1), torch.cat([values, v], dim=1)
