"""One forward pass with a cache: positions, rotation and mask of its new tokens, and the cache of each layer."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ropewalk import _checks
from ropewalk.attention.attend import attend, not_a_rotation, rotate
from ropewalk.attention.mask_tensors import check_mask
from ropewalk.attention.two_pass import TwoPass
from ropewalk.cache.plan import Plan
from ropewalk.cache.store import Store
from ropewalk.cache.tokens import NewTokens, check_latent
from ropewalk.rope.rope import Rope
from ropewalk.rotation.api import Rotation
from ropewalk.rotation.qk_norm import QKNorm
from ropewalk.rotation.writable import check_memory

_WHO = "KVCache"
_FIX = (
    "Build the cache for this model and batch, and call step with the length of these tokens. If the heads are sharded "
    "(HeadwiseParallel), num_kv_heads of the cache is the number of key heads of this rank."
)


def on_axes(rope: Rope, positions: Tensor) -> Tensor:
    """Return the positions for `rope.at`. Positions without axes (text) are repeated on every axis of the rope."""
    return positions if rope.axes is None or positions.ndim > 2 else positions.expand(rope.axes.count, -1, -1)


class Kept(NamedTuple):
    """What a cache shares with its steps, which do not refer to the cache: no reference cycle keeps memory alive.

    Attributes:
        stores: the store of each layer.
        heads: num_kv_heads and head_dim.
        latent: the argument `latent` of the cache.
        changing: the call that is changing tensors, if one is or was interrupted.
    """

    stores: list[Store]
    heads: tuple[int, int]
    latent: int | None
    changing: list[str]


class CacheStep:
    """One forward pass with a cache, created by `KVCache.step`: positions of the new tokens, and the attention mask.

    The cache counts these tokens once its last layer has appended them. If the forward pass raises before that, the
    cache keeps its previous tokens; see `KVCache.rollback`.

    Attributes:
        positions: positions of the new tokens, to which they are rotated: `[batch, seq]`, or `[axes, batch, seq]` if
            such positions were passed; int64 or float. Padding has the position that was passed for it, or that of the
            token before it. Padding in front of the first token has the position of that token.
        order: indices of the new tokens in their rows, from 0, int64 `[batch, seq]`. Padding has the index of the token
            before it, or of the first token.
        key_order: indices of all keys in their rows, int64 `[batch, keys]`, in the order of the cache's slots, and 2⁶²
            for empty slots. Compare it with `order` to build a mask. `mask` also hides tokens behind the window.
        key_positions: positions of the same keys, int64 or float `[batch, keys]`, and 2⁶² for empty slots. For a token
            with a position on each of several axes, it is the largest of them. Read it before the next call that
            changes the cache; the first use of an outdated step raises a `RopeError`.
    """

    def __init__(
        self,
        kept: Kept,
        plan: Plan,
        new: NewTokens,
        state: tuple[Tensor, Tensor, Tensor],
        *,
        advances: bool,
        previous: CacheStep | None,
    ) -> None:
        """Create the step of a cache.

        Args:
            kept, plan, new: what the cache shares, and the plan and the places of the new tokens.
            state: key positions, length and position of the cache, which the last layer changes.
            advances: whether every row is longer after this pass than before it.
            previous: the step before this one, if the positions of every row have advanced since then.
        """
        self.positions, self.order = new.positions, new.order
        self._kept, self._plan, self._new, self._state, self._advances = kept, plan, new, state, advances
        # Whether each layer has begun to store. Each has a list, so code compiled for one layer serves every layer.
        self._stored = [[False] for _ in kept.stores]
        self._outdated = self._complete = False  # complete: the last layer is done, and the cache counts the tokens
        # Computed on first use, unless the last layer overwrites some of them.
        self._key_positions = None if plan.can_be_undone else plan.place_keys(state[0], new.place)
        # References to cos of the rotations of this pass and of the previous one, which has other positions.
        self._rotations: list[weakref.ref[Tensor]] = []
        self._stale = [] if previous is None else previous._rotations
        self._prepared: tuple[Any, Any] = (None, None)  # the last rotation, checked

    def __getstate__(self) -> dict[str, object]:
        # Weak references cannot be pickled, and the copy of a cache has no open step that needs them.
        return self.__dict__ | {"_rotations": [], "_stale": [], "_prepared": (None, None)}

    @property
    def key_order(self) -> Tensor:
        return self._plan.key_order

    @property
    def key_positions(self) -> Tensor:
        if self._key_positions is not None:
            return self._key_positions
        if self._outdated:
            raise _checks.error(
                "CacheStep",
                "key_positions must be read while the step is the newest of its cache",
                "an outdated one",
                "Read them before the next call that changes the cache.",
            )
        found = self._plan.place_keys(self._state[0], self._new.place)
        if not torch.compiler.is_compiling():  # storing them in one layer would recompile the next layer
            self._key_positions = found
        return found

    @property
    def mask(self) -> Tensor:
        """Attention mask, bool `[batch, 1, seq, keys]`: True where a token attends to a key.

        Padding attends to every key.
        """
        return self._plan.mask()

    def within(self, window: int) -> Tensor | None:
        """Return the mask of a layer's window, bool `[batch, 1, seq, keys]`, to combine with the causal `mask`.

        The mask is False for keys that are `window` or more tokens before the query, sinks included. It is for a layer
        with a window in a cache that keeps more tokens. If the window hides no key that the cache keeps, the result is
        None, because `mask` suffices.

        Args:
            window: number of tokens that each token attends to, itself included.

        Raises:
            RopeError: the cache has a shorter window.
        """
        return self._plan.within(window)

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
        if not torch.compiler.is_compiling() and self._outdated:
            raise _checks.error(
                "CacheStep.rotation",
                "a step must be the newest of its cache",
                "an outdated one",
                "Call it on the step of this forward pass.",
            )
        near = rope.at(self.positions if rope.axes is None else on_axes(rope, self.positions), dtype=dtype)
        sinks = self._plan.find_sinks() if self._plan.ring.sinks else None
        if sinks is None:
            return near
        excess, is_sink = sinks
        far_queries = rope.at(on_axes(rope, self.positions - excess), dtype=dtype)
        return TwoPass(near, far_queries, None, is_sink[:, None, None], self._plan.ring.sinks)

    def layer(self, index: int) -> LayerCache:
        """Return the cache of layer `index`, counted from 0, to pass to `RotaryAttention`.

        Raises:
            RopeError: index is out of range.
        """
        last = len(self._stored) - 1
        return LayerCache(self, _checks.integer("CacheStep.layer", "index", index, at_least=0, at_most=last))

    def _finish(self) -> None:
        """Count the tokens, because the last layer is done."""
        (key_positions, length, position), changing = self._state, self._kept.changing
        changing.append("the last layer of a step")
        key_positions.scatter_(1, self._plan.slots[1], self._new.place)
        length.copy_(self._new.length)
        position.copy_(self._new.position)
        self._complete = True
        changing.clear()
        if not torch.compiler.is_compiling():  # the cache keeps the step, but not its large tensors
            self._plan.kept, self._prepared = {}, (None, None)

    def _count_stored(self) -> int:
        """Return the number of layers that have stored their keys and values."""
        count = 0
        for stored in self._stored:
            count += stored[0]
        return count

    def _is_complete(self, who: str | None = None) -> bool:
        """Return whether the last layer is done. Raise for `who` if it is not, but layers have stored tokens."""
        if who is not None and not self._complete and (stored := self._count_stored()):
            raise _checks.error(
                who,
                "every layer must have appended in the previous step",
                f"{stored} of {len(self._stored)} layers" + ", the last of which failed" * self._stored[-1][0],
                "Pass step.layer(i) to every layer, num_layers in all. After an exception, call rollback() first.",
            )
        return self._complete

    def _prepare(self, rotation: Rotation | TwoPass) -> Rotation | TwoPass:
        """Raise if rotation cannot belong to these tokens, and return it for the keys of `filled`. No tensor is read.

        A rotation must have been computed for positions `[batch, seq]`, and a `TwoPass` for all keys as well. A
        rotation of the previous step is wrong if every row has advanced since then.
        """
        compiling = torch.compiler.is_compiling()
        if not compiling and rotation is self._prepared[0]:  # usually all layers share one rotation
            checked: Rotation | TwoPass = self._prepared[1]
            return checked
        if not isinstance(rotation, (Rotation, TwoPass)):
            raise not_a_rotation(_WHO, rotation)
        near = rotation if rotation.passes == 1 else rotation.near
        if self._kept.latent is not None:
            check_latent(_WHO, "rotation", near.rotary_offset, self._kept.latent)
        if near.tokens != self.order.shape:
            raise _checks.error(
                _WHO,
                "with a cache, rotation must be computed for the positions of the step, [batch, seq] = "
                f"{list(self.order.shape)}",
                f"one for tokens of shape {near.tokens}",
                "Use step.rotation(rope) or rope.at(step.positions).",
            )
        prepared = rotation
        if rotation.passes == 2:
            keys = self._plan.keys
            if rotation.keys != keys:
                raise _checks.error(
                    _WHO,
                    f"with a cache, a rotation in two passes must be computed for all {keys} keys",
                    f"one for {rotation.keys}",
                    "Use SelfExtend.at(step.positions, step.key_positions).",
                )
            prepared = rotation if self._plan.reads_all else rotation.select(slice(None), self._plan.filled)
        if compiling:
            return prepared
        for reference in self._stale:
            if reference() is near.cos:
                raise _checks.error(
                    _WHO,
                    "with a cache, each step needs its own rotation, because its tokens have new positions",
                    "the rotation of the previous step",
                    "Compute it after cache.step(seq), with step.rotation(rope).",
                )
        self._rotations.append(weakref.ref(near.cos))
        self._prepared = rotation, prepared
        return prepared


class LayerCache:
    """One layer's keys and values in one forward pass, created by `step.layer(i)` for `RotaryAttention`.

    Attributes:
        step: the `CacheStep` of this forward pass.
    """

    takes_norm = takes_window = True

    def __init__(self, step: CacheStep, index: int) -> None:
        self.step = step
        self._store, self._stored = step._kept.stores[index], step._stored[index]
        self._is_last = index == len(step._stored) - 1

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None = None,
        *,
        rotation: Rotation | TwoPass | None = None,
        mask: Tensor | BlockMask | None = None,
        scale: float | None = None,
        norm: QKNorm | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Rotate q and k, store k and v, and attend over all keys that are visible to the new tokens.

        One kernel attends for few new tokens of each row (`few_tokens.MOST_TOKENS`) if mask is None and the keys are in
        the slots in a way that it can read (`ropewalk.cache.plan` has the table). It reads each key and value once.

        Args:
            q: queries of the new tokens, `[batch, seq, heads, head_dim]`; kv_heads divides heads.
            k, v: keys and values of the new tokens, `[batch, seq, kv_heads, head_dim]`. With `latent`, omit v.
            rotation: `step.rotation(rope)`, `rope.at(step.positions)`, or
                `SelfExtend.at(step.positions, step.key_positions)`. None leaves q and k unchanged. Pass None if they
                are already rotated or the layer does not rotate.
            mask: tensor `[batch, heads, seq, keys]`, each axis of full size or 1, for the keys of `step.key_positions`:
                bool (True: the query attends to the key) or additive in the dtype of q. It is combined with
                `step.mask`. None means `step.mask` alone.
            scale: factor of the scores. None means head_dim^(−1/2). A cache with `latent` requires it.
            norm: norm of q and k, applied before rotation. None disables it, as a cache with `latent` requires.
            window: number of tokens that each token attends to in this layer, itself included. None means as many as in
                the cache.

        Returns:
            `[batch, seq, heads, head_dim]`, or with `latent` `[batch, seq, heads, latent]`.

        Raises:
            RopeError: as `append`; the cache has a shorter window; or another argument does not match this step.
                Nothing has been stored then. After any other exception, such as one for lack of memory, the cache has
                not counted the tokens: call its `rollback`.
        """
        # Check. Nothing is stored before everything that can be refused has been.
        step, plan, compiling = self.step, self.step._plan, torch.compiler.is_compiling()
        (batch, seq), (kv_heads, head_dim), latent = step.order.shape, step._kept.heads, step._kept.latent
        shape = q.shape
        fits = len(shape) == 4 and (shape[0], shape[1], shape[3]) == (batch, seq, head_dim)
        if not fits or not shape[2] or shape[2] % kv_heads:
            must = f"q must have shape ({batch}, {seq}, heads, {head_dim}), with a multiple of {kv_heads} heads"
            raise _checks.error(_WHO, must, f"{tuple(shape)}", _FIX)
        if latent is not None and (scale is None or norm is not None):
            must = "scale must be given, and norm None, in a cache with latent rows"
            fix = "Pass (qk_nope_head_dim + qk_rope_head_dim)**-0.5 as scale, and normalize the latent before."
            raise _checks.error(_WHO, must, f"scale={scale} and norm={_checks.shown(norm)}", fix)
        if v is None or latent is not None:
            v = self._values(k, v)
        if rotation is not None:
            rotation = step._prepare(rotation)
        if mask is not None:
            if not isinstance(mask, Tensor):
                must, got = "with a cache, mask must be a tensor or None", type(mask).__name__
                raise _checks.error(_WHO, must, got, "Pass a dense mask, for the keys of step.key_positions.")
            check_mask(_WHO, mask, q, plan.keys)
        if scale is None:
            scale = head_dim**-0.5
        elif type(scale) is not float and not compiling:
            scale = _checks.number(_WHO, "scale", scale)
        window = plan.check_window(window)
        self._check_new(k, v, q)

        # Write: in one kernel if there is one for this call.
        two_passes = rotation is not None and rotation.passes == 2
        concatenated = rotated = None
        if rotation is not None and rotation.passes == 1 and not plan.concatenates:
            rotated = self._store.rotate_and_write(plan.flat_slots, q, k, v, rotation=rotation, norm=norm)
            self._stored[0] = rotated is not None
        if rotated is None:
            rotated, k = rotate(q, k, rotation, norm)
            concatenated = self._write(k, v, every=plan.reads_all)

        # Attend in one kernel, or else over dense keys.
        attended, visible = None, plan.visible(window, rotation, mask)
        if visible is not None:
            near, far = rotated.chunk(2, dim=1) if two_passes else (rotated, None)
            attended = self._store.attend(near, far, visible, scale=scale)
        if attended is None:
            keys, values, mask, pairs = plan.dense(self._store, concatenated, window, mask)
            attended = attend(rotated, keys, values, rotation=rotation, mask=mask, scale=scale, pairs=pairs)
        if self._is_last:
            step._finish()
        return attended if latent is None else attended[..., :latent]

    def append(self, k: Tensor, v: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the new tokens, once, and return the keys and values to attend over.

        Use it with your own attention, instead of `attend`. The last layer must append last: the cache then counts the
        tokens.

        Args:
            k: keys, already rotated, `[batch, seq, kv_heads, head_dim]`.
            v: values of the same shape. Omit them in a cache with `latent`.

        Returns:
            Keys and values `[batch, keys, kv_heads, head_dim]`, in the order of `step.key_positions`, with empty slots,
            which `step.mask` hides: views of the cache, or new tensors.

        Raises:
            RopeError: shape, dtype or device differs from that of the cache and this step; k or v requires gradients;
                this layer has already appended; the step is not the newest of its cache; or this is the last layer and
                another one has not appended. Nothing has been stored then.
        """
        v = self._values(k, v)
        self._check_new(k, v)
        concatenated = self._write(k, v, every=True)
        if self._is_last:
            self.step._finish()
        keys, values = concatenated or self._store.read(self.step._plan.ring.count)
        return keys, values[..., : self.step._kept.latent]

    def _write(self, k: Tensor, v: Tensor, *, every: bool) -> tuple[Tensor, Tensor] | None:
        """Store rotated keys, and values. Return all keys and values if the new ones overwrite some that are needed."""
        plan = self.step._plan
        concatenated = plan.concatenate(self._store, k, v, every=every) if plan.concatenates else None
        self._stored[0] = True  # before it is so, because in a ring the new keys overwrite others
        self._store.write(plan.slots, k, v)
        return concatenated

    def _values(self, k: Tensor, v: Tensor | None) -> Tensor:
        """Return v, or k in a cache with latent rows, whose first channels are the values."""
        latent = self.step._kept.latent
        if (v is None) == (latent is None):
            must = (
                "v must be given"
                if latent is None
                else f"v must be None: the values are the first {latent} channels of k"
            )
            raise _checks.error(_WHO, must, "None" if v is None else _checks.describe(v), _FIX)
        return k if v is None else v

    def _check_new(self, k: Tensor, v: Tensor, q: Tensor | None = None) -> None:
        """Raise unless k, v and q, whose shape has been checked, match this step, and this layer may store them."""
        step, dtype, device = self.step, self._store.dtype, self.step.order.device
        shape = (*step.order.shape, *step._kept.heads)
        given = [("k", k, shape), ("v", v, shape)]
        for name, new, expected in given if q is None else [*given, ("q", q, q.shape)]:
            if new.shape != expected or new.dtype != dtype or new.device != device:
                fix = _FIX
                if new.shape == expected and new.device == device:
                    fix = f"Build the cache with dtype={new.dtype}, if q, k and v all have it here (see autocast)."
                must = f"{name} must have shape {expected} in {dtype} on {device}"
                raise _checks.error(_WHO, must, f"{tuple(new.shape)} in {new.dtype} on {new.device}", fix)
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise _checks.error(
                _WHO,
                "gradients cannot pass through a cache",
                "keys or values that require one",
                "Run under torch.no_grad() or torch.inference_mode().",
            )
        check_memory(_WHO, k, v, *(() if q is None else (q,)))
        self._check_turn()

    def _check_turn(self) -> None:
        """Raise if this layer has appended, the step is outdated, or another layer must append before this one."""
        step = self.step
        if self._stored[0]:
            raise _checks.error(
                _WHO,
                "each layer must append once in a step",
                "a second call",
                "Pass step.layer(i) with another i to each layer, and call cache.step(seq) for each forward pass.",
            )
        if step._outdated:
            raise _checks.error(
                _WHO,
                "a step must be the newest of its cache, without a shift, reset or rollback after it",
                "an outdated one",
                "Call step = cache.step(seq) for each forward pass, and use it before anything else changes the cache.",
            )
        if self._is_last and (count := step._count_stored()) != len(step._stored) - 1:
            raise _checks.error(
                _WHO,
                f"all {len(step._stored)} layers must append, the last one last",
                f"the last one after {count} others",
                "Build the cache with the model's number of layers, and pass step.layer(i) to the i-th.",
            )
