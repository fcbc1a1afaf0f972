"""One forward pass with a KVCache: the positions of the new tokens, and the keys to which they attend."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.attention.attend import check_rotation
from ropewalk.attention.layer_cache import LayerCache
from ropewalk.attention.slots import Slots
from ropewalk.attention.two_pass import TwoPass
from ropewalk.rope.rope import Rope
from ropewalk.rotation.api import Rotation


class Store(Protocol):
    """The attributes of a cache that a step reads."""

    num_layers: int
    keys: list[Tensor]
    values: list[Tensor]
    length: Tensor
    position: Tensor
    window: int | None
    sinks: int
    _key_positions: Tensor
    _slots: Slots


class LayerProgress:
    """A record of whether one layer has stored its keys and values."""

    __slots__ = ("stored",)

    def __init__(self) -> None:
        self.stored = False


class Progress:
    """The state of one forward pass, in plain Python except for `slots`. Nothing here is read from a device.

    The cache and the step share this object. It refers to neither, so no reference cycle keeps their memory alive. Each
    layer has its own `LayerProgress`, so code that was compiled for one layer serves every layer.

    Args:
        num_layers: layers of the cache.
        overwrites: whether storing overwrites keys that were visible before this pass.
        advances: whether every row is longer after this pass than before it.
        stale: weak references to cos of the rotations of the previous pass, if every row has advanced since then. These
            rotations must not be used again, because they have the positions of other tokens.
        slots: slots in which a `KVCache` stores the tokens, int64 `[batch, seq]`.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        overwrites: bool,
        advances: bool,
        stale: Sequence[weakref.ref[Tensor]],
        slots: Tensor | None = None,
    ) -> None:
        self.layers = [LayerProgress() for _ in range(num_layers)]
        self.overwrites = overwrites
        self.advances = advances
        self.outdated = False
        self.stale = stale
        self.slots = slots
        self.rotations: list[weakref.ref[Tensor]] = []

    @property
    def complete(self) -> bool:
        """Whether all layers have stored their keys and values. The last layer stores after all others."""
        return self.layers[-1].stored

    def stored_count(self) -> int:
        """Return the number of layers that have stored their keys and values."""
        return sum(layer.stored for layer in self.layers)

    def check_complete(self, who: str) -> None:
        """Raise if only some of the layers have stored their keys and values."""
        stored = self.stored_count()
        if 0 < stored < len(self.layers):
            raise _checks.error(
                who,
                "every layer must have appended in the previous step",
                f"{stored} of {len(self.layers)} layers",
                "Pass step.layer(i) to every layer, num_layers in all. After an exception, call rollback() first.",
            )

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"stale": (), "rotations": []}  # weak references cannot be pickled


def largest_position(positions: Tensor) -> Tensor:
    """Return one position for each token, `[batch, seq]`: the largest over the axes."""
    return positions if positions.ndim == 2 else positions.amax(0)


def _on_axes(rope: Rope, positions: Tensor) -> Tensor:
    """Return the positions for `rope.at`. Positions without axes (text) are repeated on every axis of the rope."""
    return positions if rope.axes is None or positions.ndim > 2 else positions.expand(rope.axes.count, -1, -1)


class CacheStep:
    """One forward pass with a cache, created by `KVCache.step`: positions of the new tokens, and the attention mask.

    The cache counts these tokens once its last layer has appended them. If the forward pass raises before that, the
    cache keeps its previous tokens; see `KVCache.rollback`.

    Attributes:
        positions: positions of the new tokens, to which they are rotated: int64 `[batch, seq]`, or `[axes, batch, seq]`
            if such positions were passed. Padding has the position that was passed for it, or that of the token before
            it. Padding in front of the first token has the position of that token.
        order: indices of the new tokens in their rows, from 0, int64 `[batch, seq]`. Padding has the index of the token
            before it, or of the first token.
        key_positions: positions of all keys, int64 `[batch, keys]`, in the order of the cache's slots, and 2⁶² for
            empty slots. For a token with a position on each of several axes, it is the largest of them.
        causal: True if the mask is known to be a plain causal mask over the filled slots.
    """

    _who = "KVCache"

    def __init__(
        self,
        cache: Store,
        *,
        positions: Tensor,
        order: Tensor,
        key_positions: Tensor,
        key_order: Tensor | None,
        padding: Tensor | None,
        causal: bool,
        filled: slice,
        slot: Tensor,
        concatenates: bool,
        state_after: tuple[Tensor, Tensor],
        progress: Progress,
    ) -> None:
        self.positions, self.order, self.key_positions, self.causal = positions, order, key_positions, causal
        self._padding, self._filled = padding, filled
        self._mask: Tensor | None = None
        self._largest_positions = largest_position(positions)
        self._key_order = key_order
        self._cache, self._slot, self._concatenates, self._progress = cache, slot, concatenates, progress
        self._state_after = state_after  # length and position of the cache after this step
        self._valid_rotation: Rotation | TwoPass | None = None  # the last one that passed _check_rotation
        self._row = torch.arange(slot.shape[0], device=slot.device)[:, None]
        self._flat_slot = self._row * cache.keys[0].shape[1] + slot  # index into the flattened [batch · slots]

    @property
    def key_order(self) -> Tensor:
        """Indices of all keys in their rows, int64 `[batch, keys]`, and 2⁶² for empty slots.

        Compare it with `order` to build a mask by the order of tokens.
        """
        return self._cache._slots.order(self._state_after[0]) if self._key_order is None else self._key_order

    @property
    def mask(self) -> Tensor:
        """Attention mask, bool `[batch, 1, seq, keys]`: True where a token attends to a key.

        Padding attends to every key.
        """
        if self._mask is None:
            slots, order = self._cache._slots, self.order[:, :, None]
            if self._key_order is None:  # token n is in slot n, or a single new token attends to the whole ring
                mask = torch.arange(slots.count, device=order.device) <= order
            else:
                distance = order - self._key_order[:, None, :]
                in_window = distance < slots.ring
                if slots.sinks:
                    in_window = in_window | (self._key_order < slots.sinks)[:, None]
                mask = (distance >= 0) & in_window
            if self._padding is not None:
                mask = mask | self._padding[:, :, None]  # a fully masked row would produce NaN
            mask = mask[:, None]
            if torch.compiler.is_compiling():
                return mask
            self._mask = mask
        return self._mask

    def within(self, window: int) -> Tensor | None:
        """Return the mask of a layer's window, bool `[batch, 1, seq, keys]`, to combine with the causal `mask`.

        The mask is False for keys that are `window` or more tokens before the query. It is for a layer with a window in
        a cache that keeps more tokens. If the window of the cache equals that of the layer, the result is None, because
        `mask` suffices.

        Args:
            window: number of tokens that each token attends to, itself included.

        Raises:
            RopeError: the cache has a shorter window.
        """
        cache_window = self._cache.window
        if cache_window is not None and cache_window < window:
            raise _checks.error(
                "KVCache",
                f"the window of a cache must not be shorter than that of the layer, {window}",
                f"window={cache_window}",
                "Build a separate cache for the layers with this window.",
            )
        if window == cache_window:
            return None
        return ((self.order[:, :, None] - self.key_order[:, None, :]) < window)[:, None]

    def rotation(self, rope: Rope, *, dtype: torch.dtype | None = None) -> Rotation | TwoPass:
        """Compute `rope.at(positions)`. In a cache with sinks, distances to the sinks are counted inside the cache.

        The distance from the n-th token of a row (n from 0) to a sink at position j is min(n, sinks + window − 1) − j,
        as in StreamingLLM, so no distance exceeds the number of slots. For true distances use `rope.at(positions)`.

        If rope has several axes and the positions of the step have none, the positions are those of text: the same on
        every axis.

        Raises:
            RopeError: rope is not a Rope, or the number of its axes differs from that of the positions; or the step is
                no longer the newest of its cache.
        """
        if not isinstance(rope, Rope):
            fix = "For a LearnedRope call learned(step.positions), for SelfExtend its at(positions, key_positions)."
            raise _checks.error("CacheStep.rotation", "rope must be a Rope", _checks.shown(rope), fix)
        if not torch.compiler.is_compiling() and self._progress.outdated:
            raise _checks.error(
                "CacheStep.rotation",
                "a step must be the newest of its cache",
                "an outdated one",
                "Call it on the step of this forward pass.",
            )
        near = rope.at(_on_axes(rope, self.positions), dtype=dtype)
        sinks = self._cache.sinks
        if not sinks:
            return near
        # How far each query moves back when positions are counted inside the cache.
        excess = (self.order - (self._cache._slots.count - 1)).clamp(min=0)
        far_queries = rope.at(_on_axes(rope, self.positions - excess), dtype=dtype)
        slot = torch.arange(self.key_positions.shape[1], device=excess.device)[None]
        is_sink = slot < sinks if self._key_order is None else self._key_order < sinks
        return TwoPass(near, far_queries, None, is_sink[:, None, None])

    def layer(self, index: int) -> LayerCache:
        """Return the cache of layer `index`, counted from 0, to pass to `RotaryAttention`.

        Raises:
            RopeError: index is out of range.
        """
        last = self._cache.num_layers - 1
        return LayerCache(self, _checks.integer("CacheStep.layer", "index", index, at_least=0, at_most=last))

    def _check_rotation(self, rotation: Rotation | TwoPass) -> None:
        """Raise if rotation cannot belong to these tokens. No tensor is read for this.

        A rotation must have been computed for positions `[batch, seq]`, and a `TwoPass` for all keys as well. A
        rotation of the previous step is wrong if every row has advanced since then.
        """
        who = self._who
        compiling = torch.compiler.is_compiling()
        if not compiling and rotation is self._valid_rotation:  # usually all layers share one rotation
            return
        check_rotation(who, rotation)
        near = rotation.near if isinstance(rotation, TwoPass) else rotation
        cos = near.cos
        if near.tokens != self.order.shape:
            raise _checks.error(
                who,
                "with a cache, rotation must be computed for the positions of the step, [batch, seq] = "
                f"{list(self.order.shape)}",
                f"one for tokens of shape {near.tokens}",
                "Use step.rotation(rope) or rope.at(step.positions).",
            )
        if isinstance(rotation, TwoPass) and rotation.far.shape[-1] != self.key_positions.shape[1]:
            raise _checks.error(
                who,
                f"with a cache, a rotation in two passes must be computed for all {self.key_positions.shape[1]} keys",
                f"one for {rotation.far.shape[-1]}",
                "Use SelfExtend.at(step.positions, step.key_positions).",
            )
        if compiling:
            return
        if any(reference() is cos for reference in self._progress.stale):
            raise _checks.error(
                who,
                "with a cache, each step needs its own rotation, because its tokens have new positions",
                "the rotation of the previous step",
                "Compute it after cache.step(seq), with step.rotation(rope).",
            )
        self._progress.rotations.append(weakref.ref(cos))
        self._valid_rotation = rotation

    def _commit(self) -> None:
        """Count the new tokens, after every layer has stored them."""
        self._cache._key_positions.scatter_(1, self._slot, self._largest_positions)
        length, position = self._state_after
        self._cache.length.copy_(length)
        self._cache.position.copy_(position)
