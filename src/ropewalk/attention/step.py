"""One forward pass with a cache: what the steps of both caches share, and the cache of each layer."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ropewalk import _checks
from ropewalk.attention.attend import attend, not_a_rotation, rotate, rotate_and_attend
from ropewalk.attention.few_tokens import MAX_TOKENS
from ropewalk.attention.mask_tensors import check_mask, restrict
from ropewalk.attention.store import Store
from ropewalk.attention.tokens import check_latent
from ropewalk.attention.two_pass import TwoPass
from ropewalk.kernels.visible import VisibleKeys
from ropewalk.rope.rope import Rope
from ropewalk.rotation.api import Rotation
from ropewalk.rotation.qk_norm import QKNorm
from ropewalk.rotation.writable import check_memory

_FIX = (
    "Build the cache for this model and batch, and call step with the length of these tokens. If the heads are sharded "
    "(HeadwiseParallel), num_kv_heads of the cache is the number of key heads of this rank."
)


def on_axes(rope: Rope, positions: Tensor) -> Tensor:
    """Return the positions for `rope.at`. Positions without axes (text) are repeated on every axis of the rope."""
    return positions if rope.axes is None or positions.ndim > 2 else positions.expand(rope.axes.count, -1, -1)


class Step(ABC):
    """What `CacheStep` and `PagedStep` have in common: the state of one forward pass, and the check of its rotation.

    A step refers to stores and tensors of its cache and not to the cache, so no reference cycle keeps memory alive.

    Args:
        stores: the store of each layer.
        heads: num_kv_heads and head_dim of the cache.
        latent: the argument `latent` of the cache.
        window: number of tokens that each token attends to. None means no limit.
        positions, order: as in `CacheStep`.
        flat_slots: block · block_size + slot of each token, int64 `[batch, seq]`; −1 for a token that is not stored.
        causal: as in `CacheStep`.
        filled: the keys that some token attends to, a slice of those of `mask`.
        keys: number of keys of `mask`.
        key_positions: as in `CacheStep`. None computes them on first use.
        concatenates: whether the new keys are concatenated to the cached ones for attention, which they overwrite.
        advances: whether every row is longer after this pass than before it.
        previous: the step before this one, if the positions of every row have advanced since then.
    """

    _who: ClassVar[str]  # of the cache, in errors
    _sinks = 0

    def __init__(
        self,
        stores: Sequence[Store],
        heads: tuple[int, int],
        latent: int | None,
        window: int | None,
        *,
        positions: Tensor,
        order: Tensor,
        flat_slots: Tensor,
        causal: bool,
        filled: slice,
        keys: int,
        key_positions: Tensor | None = None,
        concatenates: bool,
        advances: bool,
        previous: Step | None,
    ) -> None:
        self.positions, self.order, self.causal = positions, order, causal
        self._stores, self._heads, self._latent, self._window = stores, heads, latent, window
        self._flat_slots, self._filled, self._keys = flat_slots, filled, keys
        self._key_positions = key_positions
        self._concatenates, self._advances = concatenates, advances
        # Whether each layer has begun to store. Each has a list, so code compiled for one layer serves every layer.
        self._stored = [[False] for _ in stores]
        self._outdated = self._complete = False  # complete: the last layer is done, and the cache counts the tokens
        # References to cos of the rotations of this pass and of the previous one, which has other positions.
        self._rotations: list[weakref.ref[Tensor]] = []
        self._stale = [] if previous is None else previous._rotations
        self._prepared: tuple[Any, Any] = (None, None)  # the last rotation, checked
        self._masks: dict[bool, Tensor] = {}

    def __getstate__(self) -> dict[str, object]:
        # Weak references and block masks cannot be pickled, and the copy of a cache has no open step that needs them.
        state: dict[str, object] = self.__dict__ | {"_rotations": [], "_stale": [], "_prepared": (None, None)}
        return state | {"_masks": {}}

    @property
    @abstractmethod
    def key_order(self) -> Tensor: ...

    @property
    def key_positions(self) -> Tensor:
        if self._key_positions is not None:
            return self._key_positions
        if self._outdated:
            raise _checks.error(
                type(self).__name__,
                "key_positions must be read while the step is the newest of its cache",
                "an outdated one",
                "Read them before the next call that changes the cache.",
            )
        found = self._find_key_positions()
        if not torch.compiler.is_compiling():  # storing them in one layer would recompile the next layer
            self._key_positions = found
        return found

    @property
    def mask(self) -> Tensor:
        """Attention mask, bool `[batch, 1, seq, keys]`: True where a token attends to a key.

        Padding attends to every key.
        """
        return self._get_mask(every=True)

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
        if self._check_window(window) == self._window:
            return None
        return ((self.order[:, :, None] - self.key_order[:, None, :]) < window)[:, None]

    def _check_window(self, window: int) -> int:
        """Return the window of a layer. Raise if it is no number of tokens, or the cache has a shorter one."""
        window = window if torch.compiler.is_compiling() else _checks.length(self._who, "window", window)
        if self._window is None or window <= self._window:
            return window
        raise _checks.error(
            self._who,
            f"the window of a cache must not be shorter than that of the layer, {window}",
            f"window={self._window}",
            "Build a separate cache for the layers with this window.",
        )

    def _mask_within(self, window: int | None, mask: Tensor | None) -> Tensor | None:
        """Combine the user's mask with those of the step and of the layer's window, for the keys of `filled`.

        None stands for a plain causal mask. A compiled layer has one graph for any number of cached tokens, so its mask
        is for all keys.
        """
        within = None if window is None else self.within(window)
        mask = mask if within is None else restrict(mask, within)
        if torch.compiler.is_compiling():
            return restrict(mask, self.mask)
        if mask is not None:
            return restrict(mask, self.mask)[..., self._filled]
        return None if self.causal else self._get_mask(every=False)

    @abstractmethod
    def _visible_keys(self, window: int | None) -> VisibleKeys | None:
        """Describe the keys in the cache to a kernel that reads them there, or return None if it cannot express them.

        Args:
            window: number of tokens that each token attends to. None means no limit.
        """

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
        positions = self.positions if rope.axes is None else on_axes(rope, self.positions)
        near = rope.at(positions, dtype=dtype)
        return self._with_sinks(near, rope, dtype) if self._sinks else near

    def layer(self, index: int) -> LayerCache:
        """Return the cache of layer `index`, counted from 0, to pass to `RotaryAttention`.

        Raises:
            RopeError: index is out of range.
        """
        last = len(self._stores) - 1
        return LayerCache(
            self, _checks.integer(f"{type(self).__name__}.layer", "index", index, at_least=0, at_most=last)
        )

    def _with_sinks(self, near: Rotation, rope: Rope, dtype: torch.dtype | None) -> TwoPass:
        # How far each query moves back when positions are counted inside the cache.
        excess = (self.order - (self._sinks + (self._window or 0) - 1)).clamp(min=0)
        far_queries = rope.at(on_axes(rope, self.positions - excess), dtype=dtype)
        is_sink, in_front = self._find_sinks()
        return TwoPass(near, far_queries, None, is_sink[:, None, None], in_front)

    @abstractmethod
    def _find_sinks(self) -> tuple[Tensor, int]:
        """Return which keys are sinks, bool `[batch or 1, keys]`, and their number if they are the first keys."""

    @abstractmethod
    def _find_key_positions(self) -> Tensor: ...

    def _get_mask(self, *, every: bool) -> Tensor:
        """Return the mask for all keys, or for those of `filled`."""
        if torch.compiler.is_compiling():
            return self._build_mask(every=every)
        if every not in self._masks:
            self._masks[every] = self._build_mask(every=every)
        return self._masks[every]

    @abstractmethod
    def _build_mask(self, *, every: bool) -> Tensor: ...

    @abstractmethod
    def _write(self, store: Store, k: Tensor, v: Tensor) -> None:
        """Store the new keys and values of a layer."""

    @abstractmethod
    def _read(self, store: Store, *, every: bool) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer: all of them, or only those of `filled`, in memory that is reused."""

    def _write_and_read(self, store: Store, k: Tensor, v: Tensor, *, every: bool) -> tuple[Tensor, Tensor]:
        self._write(store, k, v)
        return self._read(store, every=every)

    def _finish(self) -> None:
        """Count the tokens, because the last layer is done."""
        self._complete = True

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

    def _check_may_append(self, stored: bool, is_last: bool) -> None:
        """Raise if a layer has appended, the step is outdated, or another layer must append before this one."""
        if stored:
            raise _checks.error(
                self._who,
                "each layer must append once in a step",
                "a second call",
                "Pass step.layer(i) with another i to each layer, and call cache.step(seq) for each forward pass.",
            )
        if self._outdated:
            raise _checks.error(
                self._who,
                "a step must be the newest of its cache, without a shift, reset or rollback after it",
                "an outdated one",
                "Call step = cache.step(seq) for each forward pass, and use it before anything else changes the cache.",
            )
        if is_last and (count := self._count_stored()) != len(self._stored) - 1:
            raise _checks.error(
                self._who,
                f"all {len(self._stored)} layers must append, the last one last",
                f"the last one after {count} others",
                "Build the cache with the model's number of layers, and pass step.layer(i) to the i-th.",
            )

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
            raise not_a_rotation(self._who, rotation)
        near = rotation if rotation.passes == 1 else rotation.near
        if self._latent is not None:
            check_latent(self._who, "rotation", near.rotary_offset, self._latent)
        if near.tokens != self.order.shape:
            raise _checks.error(
                self._who,
                "with a cache, rotation must be computed for the positions of the step, [batch, seq] = "
                f"{list(self.order.shape)}",
                f"one for tokens of shape {near.tokens}",
                "Use step.rotation(rope) or rope.at(step.positions).",
            )
        prepared = rotation
        if rotation.passes == 2:
            keys = self._keys
            if rotation.far.shape[-1] != keys:
                raise _checks.error(
                    self._who,
                    f"with a cache, a rotation in two passes must be computed for all {keys} keys",
                    f"one for {rotation.far.shape[-1]}",
                    "Use SelfExtend.at(step.positions, step.key_positions).",
                )
            prepared = rotation if compiling else rotation.select_keys(self._filled)
        if compiling:
            return prepared
        for reference in self._stale:
            if reference() is near.cos:
                raise _checks.error(
                    self._who,
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

    takes_norm = True

    def __init__(self, step: Step, index: int) -> None:
        self.step = step
        self._store, self._stored = step._stores[index], step._stored[index]
        self._is_last = index == len(step._stores) - 1

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

        On the CPU and on a GPU, one kernel attends for up to 8 new tokens of each row if mask is None. It reads the
        keys and values where they are, each once.

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
        step, compiling = self.step, torch.compiler.is_compiling()
        (batch, seq), (kv_heads, head_dim) = step.order.shape, step._heads
        fits = q.ndim == 4 and (*q.shape[:2], q.shape[3]) == (batch, seq, head_dim)
        if not fits or not q.shape[2] or q.shape[2] % kv_heads:
            must = f"q must have shape ({batch}, {seq}, heads, {head_dim}), with a multiple of {kv_heads} heads"
            raise _checks.error(step._who, must, f"{tuple(q.shape)}", _FIX)
        if step._latent is not None and (scale is None or norm is not None):
            must = "scale must be given, and norm None, in a cache with latent rows"
            fix = "Pass (qk_nope_head_dim + qk_rope_head_dim)**-0.5 as scale, and normalize the latent before."
            raise _checks.error(step._who, must, f"scale={scale} and norm={_checks.shown(norm)}", fix)
        if v is None or step._latent is not None:
            v = self._values(k, v)
        if rotation is not None:
            rotation = step._prepare(rotation)
        if mask is not None:
            if not isinstance(mask, Tensor):
                must, got = "with a cache, mask must be a tensor or None", type(mask).__name__
                raise _checks.error(step._who, must, got, "Pass a dense mask, for the keys of step.key_positions.")
            check_mask(step._who, mask, q, step._keys)
        if scale is None:
            scale = head_dim**-0.5
        elif type(scale) is not float and not compiling:
            scale = _checks.number(step._who, "scale", scale)
        window = step._window if window is None else step._check_window(window)
        self._check_new(k, v, q)
        one_pass, attended = rotation is None or rotation.passes == 1, None
        if step._concatenates:

            def append(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                self._stored[0] = True  # before it is so, because in a ring the new keys overwrite others
                return self._same_width(step._write_and_read(self._store, k, v, every=compiling))

            mask = step._mask_within(window, mask)
            attended = rotate_and_attend(q, k, v, rotation=rotation, mask=mask, scale=scale, append=append, norm=norm)
        else:
            keys = None
            # A graph for a dynamic number of tokens must not depend on it.
            if mask is None and isinstance(seq, int) and seq <= MAX_TOKENS:
                keys = step._visible_keys(window)
            q = self._rotate_and_write(q, k, v, rotation=rotation, norm=norm)
            if keys is not None and (rotation is None or rotation.passes == 1 or rotation.sinks):
                near, far = (q, None) if one_pass else q.chunk(2, dim=1)
                attended = self._store.attend(near, far, keys, scale=scale)
            if attended is None:
                by = attend if rotation is None or rotation.passes == 1 else rotation.attend
                kept = self._same_width(step._read(self._store, every=compiling))
                attended = by(q, *kept, mask=step._mask_within(window, mask), scale=scale)
        if self._is_last:
            step._finish()
        return attended if step._latent is None else attended[..., : step._latent]

    def _rotate_and_write(
        self, q: Tensor, k: Tensor, v: Tensor, *, rotation: Rotation | TwoPass | None, norm: QKNorm | None
    ) -> Tensor:
        """Normalize and rotate q and k, store k and v, and return q, rotated twice if rotation is a `TwoPass`."""
        rotated = None
        if rotation is not None and rotation.passes == 1:
            rotated = self._store.rotate_and_write(self.step._flat_slots, q, k, v, rotation=rotation, norm=norm)
        if rotated is None:
            rotated, k = rotate(q, k, rotation, norm)
            self.step._write(self._store, k, v)
        self._stored[0] = True
        return rotated

    def _values(self, k: Tensor, v: Tensor | None) -> Tensor:
        """Return the values of the new tokens: v, or the first channels of k in a cache with latent rows."""
        latent = self.step._latent
        if (v is None) != (latent is not None):
            must = (
                "v must be given"
                if latent is None
                else f"v must be None: the values are the first {latent} channels of k"
            )
            raise _checks.error(self.step._who, must, "None" if v is None else _checks.describe(v), _FIX)
        return k[..., :latent] if v is None else v

    def append(self, k: Tensor, v: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the new tokens, once, and return the keys and values to attend over.

        Use it with your own attention; `attend` calls it as well. The last layer must append last: the cache then
        counts the tokens.

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
        kept: tuple[Tensor, Tensor] = self._append(self.step._write_and_read, k, v, every=True)
        return kept

    def write(self, k: Tensor, v: Tensor | None = None) -> None:
        """Store the keys and values of the new tokens as `append` does, for a kernel of your own that reads the cache.

        Args:
            k: keys, already rotated, `[batch, seq, kv_heads, head_dim]`.
            v: values of the same shape. Omit them in a cache with `latent`.

        Raises:
            RopeError: as `append`. Nothing is stored then.
        """
        self._append(self.step._write, k, v)

    def _append(self, write: Callable[..., Any], k: Tensor, v: Tensor | None, **options: bool) -> Any:
        v = self._values(k, v)
        self._check_new(k, v)
        self._stored[0] = True  # before it is so, as in `attend`
        kept = write(self._store, k, v, **options)
        if self._is_last:
            self.step._finish()
        return kept

    def _same_width(self, kept: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values of equal width: PyTorch's fused attention on a CPU supports no other."""
        return kept if self.step._latent is None else (kept[0], kept[0])

    def _check_new(self, k: Tensor, v: Tensor, q: Tensor | None = None) -> None:
        """Raise unless k, v and q, whose shape has been checked, match this step, and this layer may store them."""
        step, dtype, device = self.step, self._store.dtype, self.step.order.device
        shape = (*step.order.shape, *step._heads)
        given = [("k", k, shape), ("v", v, (*shape[:3], step._latent or shape[3]))]
        for name, new, expected in given if q is None else [*given, ("q", q, q.shape)]:
            if new.shape != expected or new.dtype != dtype or new.device != device:
                fix = _FIX
                if new.shape == expected and new.device == device:
                    fix = f"Build the cache with dtype={new.dtype}, if q, k and v all have it here (see autocast)."
                must = f"{name} must have shape {expected} in {dtype} on {device}"
                raise _checks.error(step._who, must, f"{tuple(new.shape)} in {new.dtype} on {new.device}", fix)
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise _checks.error(
                step._who,
                "gradients cannot pass through a cache",
                "keys or values that require one",
                "Run under torch.no_grad() or torch.inference_mode().",
            )
        check_memory(step._who, k, v, *(() if q is None else (q,)))
        step._check_may_append(self._stored[0], self._is_last)
