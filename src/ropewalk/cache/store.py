"""How a cache keeps the keys and values of one layer: the protocol `Store`, and the stores of ropewalk by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.cache.plain import LatentStore, PlainStore
from ropewalk.cache.quantized import STORES
from ropewalk.kernels.visible import VisibleKeys
from ropewalk.rotation.api import Rotation
from ropewalk.rotation.qk_norm import QKNorm


class Store(Protocol):
    """The keys and values of one layer, in rows that each have the same number of slots, one slot for each token.

    The cache decides which token is in which slot, and the store decides how a slot keeps it. The last slot of a row
    receives tokens that are not kept.

    Pass a class as `KVCache(store=...)`. For each layer the cache calls it with `(batch, slots of a row, num_kv_heads,
    head_dim)` and the keywords `dtype`, of the keys and values of the model, and `device`. At first every slot must
    read as finite numbers.

    `write` addresses slots by two int64 tensors that broadcast to one shape, the row and the slot in the row, and
    `rotate_and_write` by one tensor of row · slots of a row + slot.

    Attributes:
        keys, values: what is kept, in any form; they become an entry of `KVCache.keys` and `KVCache.values`. The first
            two axes are rows and slots.
        dtype: dtype of the keys and values that are written and read.
    """

    @property
    def keys(self) -> Tensor: ...
    @property
    def values(self) -> Tensor: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def write(self, slots: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
        """Store new tokens. Only the last slot of a row may occur several times.

        Args:
            slots: a slot for each token, of shape `tokens`.
            k, v: rotated keys, and values, `[*tokens, kv_heads, head_dim]` in `dtype`.
        """

    def rotate_and_write(
        self, slots: Tensor, q: Tensor, k: Tensor, v: Tensor, *, rotation: Rotation, norm: QKNorm | None
    ) -> Tensor | None:
        """Normalize and rotate q and k, and store k and v, in one kernel.

        Args:
            slots: row · slots of a row + slot for each token, int64 `[batch, seq]`.
            q, k, v: `[batch, seq, heads, head_dim]`, not rotated.
            rotation: rotation of the tokens.
            norm: norm of q and k, applied before rotation. None disables it.

        Returns:
            The rotated q, or None if there is no such kernel for this call. Nothing was stored then, and the cache
            calls `write`.
        """

    def attend(self, q: Tensor, far_q: Tensor | None, visible: VisibleKeys, *, scale: float) -> Tensor | None:
        """Attend over the visible keys in one kernel, as `few_tokens.attend_cached` describes it.

        Returns:
            The result, or None if there is no such kernel for this call. The cache then calls `read`.
        """

    def read(self, count: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of all rows, each `[batch, count, kv_heads, head_dim]` in `dtype`.

        Args:
            count: number of slots of each row to return, from the first.

        Returns:
            Views or new tensors.
        """

    def rotate(self, rotation: Rotation, rows: Tensor | None) -> None:
        """Rotate cached keys once more.

        Args:
            rotation: one for slots `[rows, slots of a row]`, or one angle for all slots.
            rows: row numbers, int64 `[rows]`. None means all rows.
        """

    def clear(self, slots: tuple[Tensor | int, Tensor | slice]) -> None:
        """Make these slots read as finite numbers, such as 0. A mask would not hide NaN in them, as 0 · NaN is NaN.

        Args:
            slots: as in `write`; or the number of a row, and a slice of its slots.
        """

    def reorder(self, rows: Tensor, count: int) -> None:
        """Copy slots of row `rows[i]` to row i, for all rows at once.

        Args:
            rows: row numbers, int64 `[batch]`.
            count: number of slots of each row to copy, from the first.
        """


def create_stores(
    who: str,
    make: Callable[..., Store] | str | None,
    num_layers: int,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device | str | None,
    latent: int | None,
) -> list[Store]:
    """Return a store for each layer.

    Args:
        who: name of the cache in errors.
        make: the argument `store` of the cache: a class, its name in `STORES`, or None for `PlainStore`.
        shape: batch, slots of a row, num_kv_heads and head_dim.
        latent: the argument `latent` of the cache.
    """
    if latent is not None:
        _checks.integer(who, "latent", latent, at_least=1, at_most=shape[3])
        if make is not None:
            must, fix = "store must be None with latent rows", "Omit store; such rows have no other store yet."
            raise _checks.error(who, must, _checks.shown(make), fix)
        make = partial(LatentStore, latent)
    elif make is None:
        make = PlainStore
    elif isinstance(make, str):
        make = STORES.get(make, make)
    if not callable(make):
        must = "store must be 'int8', 'fp8', a class of stores or None"
        fix = "Pass a name, or a class that the cache calls for each layer."
        raise _checks.error(who, must, _checks.shown(make), fix)
    return [make(shape, dtype=dtype, device=device) for _ in range(num_layers)]
