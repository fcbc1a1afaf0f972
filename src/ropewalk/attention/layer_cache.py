"""One layer in a forward pass with a KVCache: store keys and values, and attend over them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ropewalk import _checks
from ropewalk.attention.attend import attend, rotate_and_attend
from ropewalk.attention.mask_tensors import check_mask, restrict
from ropewalk.attention.two_pass import TwoPass
from ropewalk.rotation import qk_norm
from ropewalk.rotation.api import Rotation
from ropewalk.rotation.qk_norm import QKNorm

_FIX = (
    "Build the cache for this model and batch, and call step with the length of these tokens. If the heads are sharded "
    "(HeadwiseParallel), num_kv_heads of the cache is the number of key heads of this rank."
)


class Step(Protocol):
    """The interface of a step that its layers use. `CacheStep` implements it."""

    order: Tensor
    causal: bool
    _cache: Any
    _slot: Tensor
    _row: Tensor
    _flat_slot: Tensor
    _concatenates: bool
    _padding: Tensor | None
    _filled: slice
    _progress: Any

    @property
    def key_positions(self) -> Tensor: ...
    @property
    def mask(self) -> Tensor: ...

    def _check_rotation(self, rotation: Rotation | TwoPass) -> None: ...
    def within(self, window: int) -> Tensor | None: ...
    def _commit(self) -> None: ...


class LayerCache:
    """One layer's keys and values in one forward pass, created by `CacheStep.layer` for `RotaryAttention`.

    Attributes:
        step: the `CacheStep` of this forward pass.
    """

    takes_norm = True  # `attend` has the argument `norm`, which other caches need not have
    _who = "KVCache"

    def __init__(self, step: Step, index: int) -> None:
        self.step = step
        self._keys, self._values = step._cache.keys[index], step._cache.values[index]
        self._progress = step._progress.layers[index]
        self._is_last = index == step._cache.num_layers - 1

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rotation: Rotation | TwoPass | None = None,
        mask: Tensor | BlockMask | None = None,
        scale: float | None = None,
        norm: QKNorm | None = None,
    ) -> Tensor:
        """Rotate q and k, store k and v, and attend over all keys that are visible to the new tokens.

        Args:
            q: queries of the new tokens, `[batch, seq, heads, head_dim]`; kv_heads divides heads.
            k, v: keys and values of the new tokens, `[batch, seq, kv_heads, head_dim]`.
            rotation: `step.rotation(rope)`, `rope.at(step.positions)`, or
                `SelfExtend.at(step.positions, step.key_positions)`. None leaves q and k unchanged. Pass None if they
                are already rotated or the layer does not rotate.
            mask: tensor `[batch, heads, seq, keys]`, each axis of full size or 1, for the keys of `step.key_positions`:
                bool (True: the query attends to the key) or additive in the dtype of q. It is combined with
                `step.mask`. None means `step.mask` alone.
            scale: factor of the scores. None means head_dim^(−1/2).
            norm: norm of q and k, applied before rotation. None disables it.

        Returns:
            `[batch, seq, heads, head_dim]`.

        Raises:
            RopeError: as `append`; or q, rotation or mask does not match this step. Nothing has been stored then.
        """
        self._check_query(q, rotation)
        if mask is not None:
            if not isinstance(mask, Tensor):
                must, got = "with a cache, mask must be a tensor or None", type(mask).__name__
                raise _checks.error(self._who, must, got, "Pass a dense mask, for the keys of step.key_positions.")
            check_mask(self._who, mask, q, self.step.key_positions.shape[1])
        step, visible, filled = self.step, None, slice(None)
        if not torch.compiler.is_compiling():  # a compiled layer has one graph for any number of cached tokens
            filled = step._filled
            rotation = rotation.select_keys(filled) if isinstance(rotation, TwoPass) else rotation
        if mask is not None or isinstance(rotation, TwoPass) or torch.compiler.is_compiling() or not step.causal:
            visible = restrict(mask, step.mask)[..., filled]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if isinstance(rotation, Rotation) and not step._concatenates:
            self._check_new(k, v)
            self._check_may_append()
            store = qk_norm.Store(v, self._keys, self._values, self._slots())
            rotated = qk_norm.run_fused(rotation, q, k, layout="bshd", norm=norm, store=store)
            if rotated is not None:
                self._mark_stored()
                return attend(rotated, *self._cached(filled), mask=visible, scale=scale)
        return rotate_and_attend(
            q,
            k,
            v,
            rotation=rotation,
            mask=visible,
            scale=scale,
            append=lambda k, v: self._append(k, v, filled),
            norm=norm,
        )

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the new tokens, once, and return the keys and values to attend over.

        Use it with your own attention; `attend` calls it as well. The last layer must append last: the cache then
        counts the tokens.

        Args:
            k: keys, already rotated, `[batch, seq, kv_heads, head_dim]`.
            v: values of the same shape.

        Returns:
            Keys and values `[batch, keys, kv_heads, head_dim]`, in the order of `CacheStep.key_positions`, with
            empty slots, which `CacheStep.mask` hides: views of the cache, or new tensors.

        Raises:
            RopeError: shape, dtype or device differs from that of the cache and this step; k or v requires gradients;
                this layer has already appended; the step is not the newest of its cache; or this is the last layer and
                another one has not appended. Nothing has been stored then.
        """
        return self._append(k, v, slice(None))

    def _append(self, k: Tensor, v: Tensor, filled: slice) -> tuple[Tensor, Tensor]:
        """Store keys and values as `append` does, but return only those in the slice `filled`."""
        self._check_new(k, v)
        self._check_may_append()
        kept = self._cached(filled)
        if self.step._concatenates and self.step._padding is not None:  # NaN in padding would pass through the mask
            k, v = (x.masked_fill(self.step._padding[:, :, None, None], 0) for x in (k, v))
        if self.step._concatenates and filled.start is None:
            kept = torch.cat([kept[0], k], dim=1), torch.cat([kept[1], v], dim=1)
        elif self.step._concatenates:  # nothing was cached before
            kept = k, v
        self._keys.index_put_((self.step._row, self.step._slot), k)
        self._values.index_put_((self.step._row, self.step._slot), v)
        self._mark_stored()
        return kept

    def _slots(self) -> Tensor:
        """Return the slots of the new tokens for the fused kernel, as indices over all rows, int64 `[batch, seq]`."""
        return self.step._flat_slot

    def _cached(self, filled: slice) -> tuple[Tensor, Tensor]:
        """Return keys and values of the slots in `filled`, without the last slot, which holds discarded tokens."""
        return self._keys[:, :-1][:, filled], self._values[:, :-1][:, filled]

    def _mark_stored(self) -> None:
        """Record that this layer has stored its keys and values."""
        self._progress.stored = True
        if self._is_last:
            self.step._commit()

    def _check_query(self, q: Tensor, rotation: Rotation | TwoPass | None) -> None:
        """Raise unless q and rotation match the tokens of this step."""
        (batch, seq), (kv_heads, head_dim) = self.step.order.shape, self._keys.shape[2:]
        if q.ndim != 4 or (*q.shape[:2], q.shape[3]) != (batch, seq, head_dim) or q.shape[2] % kv_heads:
            raise _checks.error(
                self._who,
                f"q must have shape ({batch}, {seq}, heads, {head_dim}), with a multiple of {kv_heads} heads",
                f"{tuple(q.shape)}",
                _FIX,
            )
        if rotation is not None:
            self.step._check_rotation(rotation)

    def _check_new(self, k: Tensor, v: Tensor) -> None:
        """Raise unless k and v match the tokens of this step."""
        expected = (*self.step.order.shape, *self._keys.shape[2:])
        for name, new in (("k", k), ("v", v)):
            if new.shape != expected or new.dtype != self._keys.dtype or new.device != self._keys.device:
                fix = _FIX
                if new.shape == expected and new.device == self._keys.device:
                    fix = f"Build the cache with dtype={new.dtype}, the dtype of the model's keys here (see autocast)."
                raise _checks.error(
                    self._who,
                    f"{name} must have shape {expected} in {self._keys.dtype} on {self._keys.device}",
                    f"{tuple(new.shape)} in {new.dtype} on {new.device}",
                    fix,
                )
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise _checks.error(
                self._who,
                "gradients cannot pass through a cache",
                "keys or values that require one",
                "Run under torch.no_grad() or torch.inference_mode().",
            )

    def _check_may_append(self) -> None:
        """Raise if this layer has appended, the step is outdated, or another layer must append before this one."""
        progress = self.step._progress
        if self._progress.stored:
            raise _checks.error(
                self._who,
                "each layer must append once in a step",
                "a second call",
                "Pass step.layer(i) with another i to each layer, and call cache.step(seq) for each forward pass.",
            )
        if progress.outdated:
            raise _checks.error(
                self._who,
                "a step must be the newest of its cache, without a shift, reset or rollback after it",
                "an outdated one",
                "Call step = cache.step(seq) for each forward pass, and use it before anything else changes the cache.",
            )
        if self._is_last and progress.stored_count() != len(progress.layers) - 1:
            raise _checks.error(
                self._who,
                f"all {len(progress.layers)} layers must append, the last one last",
                f"the last one after {progress.stored_count()} others",
                "Build the cache with the model's number of layers, and pass step.layer(i) to the i-th.",
            )
