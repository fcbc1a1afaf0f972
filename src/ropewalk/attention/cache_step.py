"""One forward pass with a KVCache: where its tokens are and which keys they see."""

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
from ropewalk.rope import Rope
from ropewalk.rotation.api import Rotation


class Store(Protocol):
    """What a step needs of its cache."""

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
    """Whether one layer has stored its keys and values."""

    __slots__ = ("stored",)

    def __init__(self) -> None:
        self.stored = False


class Progress:
    """How far one forward pass has come, in plain Python. Nothing here is read from a device.

    The cache and the step share it. It refers to neither, so no reference cycle keeps their memory alive. Each layer
    has an object of its own, so that a layer compiled by itself is compiled once, and not once for each index.

    Args:
        num_layers: layers of the cache.
        overwrites: whether storing overwrites keys that were visible before this pass.
        moves_on: whether every row is longer after it.
        earlier: cos of rotations that are of other tokens: those of the pass before it, if every row has moved on.
    """

    def __init__(
        self, num_layers: int, *, overwrites: bool, moves_on: bool, earlier: Sequence[weakref.ref[Tensor]]
    ) -> None:
        self.layers = [LayerProgress() for _ in range(num_layers)]
        self.overwrites = overwrites
        self.moves_on = moves_on
        self.outdated = False
        self.earlier = earlier
        self.rotations: list[weakref.ref[Tensor]] = []

    def stored(self) -> int:
        """How many layers have stored their keys and values."""
        return sum(layer.stored for layer in self.layers)

    def check_whole(self, who: str) -> None:
        """Raise if the pass stopped in between: some layers have stored their keys and values, and others have not."""
        stored = self.stored()
        if 0 < stored < len(self.layers):
            raise _checks.error(
                who,
                "every layer must have appended in the step before",
                f"{stored} of {len(self.layers)} layers",
                "Pass step.layer(i) to every layer, num_layers in all. After an exception, call rollback() first.",
            )

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"earlier": (), "rotations": []}  # weak references cannot be pickled


def one_of_each(positions: Tensor) -> Tensor:
    """One position for each token, `[batch, seq]`: the largest, where it has several."""
    return positions if positions.ndim == 2 else positions.amax(0)


def _on_axes(rope: Rope, positions: Tensor) -> Tensor:
    """Positions for `rope.at`: those of text on every axis."""
    return positions if rope.axes is None or positions.ndim > 2 else positions.expand(rope.axes.count, -1, -1)


class CacheStep:
    """One forward pass with a cache: where its tokens are and which keys they see. Made by `KVCache.step`.

    The cache counts these tokens once its last layer has appended them. If the forward pass raises before, the cache
    holds what it held; see `KVCache.rollback`.

    Attributes:
        positions: of the new tokens, to which they are rotated, int64 `[batch, seq]`; or `[axes, batch, seq]`, where
            such were given. Padding has that of the token before it, or what was given for it.
        order: of the new tokens, int64 `[batch, seq]`: their number in their row, from 0. Padding has that of the token
            before it.
        key_positions: of all keys, int64 `[batch, keys]`, in the order of the cache's slots; 2⁶² where there is none.
            Of a token with several axes, the largest.
        causal: whether plain causality over the filled slots is all that mask says, as far as the cache knows.
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
        beside: bool,
        following: tuple[Tensor, Tensor],
        progress: Progress,
    ) -> None:
        self.positions, self.order, self.key_positions, self.causal = positions, order, key_positions, causal
        self._padding, self._filled = padding, filled
        self._mask: Tensor | None = None
        self._place = one_of_each(positions)
        self._key_order = key_order
        self._cache, self._slot, self._beside, self._progress = cache, slot, beside, progress
        self._following = following  # length and position of the cache after this step
        self._checked: Rotation | TwoPass | None = None  # the last one that check_rotation found nothing against
        self._row = torch.arange(slot.shape[0], device=slot.device)[:, None]
        self._flat_slot = self._row * cache.keys[0].shape[1] + slot  # where all rows are one sequence of slots

    @property
    def key_order(self) -> Tensor:
        """Of all keys, int64 `[batch, keys]`: their number in their row, 2⁶² where there is none.

        A mask that goes by the order of tokens compares `order` with it.
        """
        return self._cache._slots.order(self._following[0]) if self._key_order is None else self._key_order

    @property
    def mask(self) -> Tensor:
        """What is seen, bool `[batch, 1, seq, keys]`, True for what is. Padding sees everything."""
        if self._mask is None:
            slots, order = self._cache._slots, self.order[:, :, None]
            if self._key_order is None:  # token n is in slot n, or it is the only one, and sees whatever is in the ring
                mask = torch.arange(slots.count, device=order.device) <= order
            else:
                distance = order - self._key_order[:, None, :]
                in_window = distance < slots.ring
                if slots.sinks:
                    in_window = in_window | (self._key_order < slots.sinks)[:, None]
                mask = (distance >= 0) & in_window
            if self._padding is not None:
                mask = mask | self._padding[:, :, None]  # a row that sees nothing gives nan
            mask = mask[:, None]
            if torch.compiler.is_compiling():
                return mask
            self._mask = mask
        return self._mask

    def within(self, window: int) -> Tensor | None:
        """Which keys are less than window tokens back, bool `[batch, 1, seq, keys]`; None where all that are seen are.

        For a layer with a window in a cache that keeps more.

        Args:
            window: tokens that each token sees, itself included.

        Raises:
            RopeError: the cache has a shorter window.
        """
        held = self._cache.window
        if held is not None and held < window:
            raise _checks.error(
                "KVCache",
                f"the window of a cache must not be shorter than that of the layer, {window}",
                f"window={held}",
                "Build a cache of its own for the layers of this window.",
            )
        if window == held:
            return None
        return ((self.order[:, :, None] - self.key_order[:, None, :]) < window)[:, None]

    def rotation(self, rope: Rope, *, dtype: torch.dtype | None = None) -> Rotation | TwoPass:
        """`rope.at(positions)`; in a cache with sinks, with the distance to them counted inside the cache.

        A sink at position j is seen by the n-th token of its row (from 0) at distance min(n, sinks + window − 1) − j,
        as StreamingLLM has it: no distance is ever longer than the cache. For true distances use `rope.at(positions)`.

        Where rope has several axes and the positions of the step do not, these are text: the same on every axis.

        Raises:
            RopeError: rope is no Rope, or has another number of axes.
        """
        if not isinstance(rope, Rope):
            fix = "Of a LearnedRope use learned(step.positions), of SelfExtend its at(positions, key_positions)."
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
        # How much farther back a query stands when positions are counted inside the cache.
        excess = (self.order - (self._cache._slots.count - 1)).clamp(min=0)
        far_queries = rope.at(_on_axes(rope, self.positions - excess), dtype=dtype)
        slot = torch.arange(self.key_positions.shape[1], device=excess.device)[None]
        is_sink = slot < sinks if self._key_order is None else self._key_order < sinks
        return TwoPass(near, far_queries, None, is_sink[:, None, None])

    def layer(self, index: int) -> LayerCache:
        """The part of one layer, 0 ≤ index < num_layers: what `RotaryAttention` takes as cache.

        Raises:
            RopeError: there is no such layer.
        """
        last = self._cache.num_layers - 1
        return LayerCache(self, _checks.integer("CacheStep.layer", "index", index, at_least=0, at_most=last))

    def _check_rotation(self, rotation: Rotation | TwoPass) -> None:
        """Raise if rotation cannot be that of these tokens, as far as that shows without reading a tensor.

        It must be made for positions `[batch, seq]` and, in two passes, for all keys. One that was used in the step
        before this one cannot be right, since all tokens have moved on.
        """
        who = self._who
        compiling = torch.compiler.is_compiling()
        if not compiling and rotation is self._checked:  # most often all layers have the same
            return
        check_rotation(who, rotation)
        near = rotation.near if isinstance(rotation, TwoPass) else rotation
        cos = near.cos
        if near.tokens != self.order.shape:
            raise _checks.error(
                who,
                "with a cache, rotation must be made for the positions of the step, [batch, seq] = "
                f"{list(self.order.shape)}",
                f"one for tokens of shape {near.tokens}",
                "Make it with step.rotation(rope) or rope.at(step.positions).",
            )
        if isinstance(rotation, TwoPass) and rotation.far.shape[-1] != self.key_positions.shape[1]:
            raise _checks.error(
                who,
                f"with a cache, a rotation in two passes must be made for all {self.key_positions.shape[1]} keys",
                f"one for {rotation.far.shape[-1]}",
                "Make it with SelfExtend.at(step.positions, step.key_positions).",
            )
        if compiling:
            return
        if any(other() is cos for other in self._progress.earlier):
            raise _checks.error(
                who,
                "with a cache, each step needs a rotation of its own, since its tokens are farther on",
                "the rotation of the step before",
                "Make it after cache.step(seq), with step.rotation(rope).",
            )
        self._progress.rotations.append(weakref.ref(cos))
        self._checked = rotation

    def _commit(self) -> None:
        """Count the new tokens: every layer has stored them."""
        self._cache._key_positions.scatter_(1, self._slot, self._place)
        length, position = self._following
        self._cache.length.copy_(length)
        self._cache.position.copy_(position)
