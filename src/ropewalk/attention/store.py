"""How a cache keeps the keys and values of one layer: the protocol `Store`, and `PlainStore`, which keeps tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.attention.few_tokens import attend_cached
from ropewalk.attention.quantized import STORES
from ropewalk.kernels.visible import StoreArguments, VisibleKeys
from ropewalk.rotation import qk_norm
from ropewalk.rotation.api import Rotation
from ropewalk.rotation.qk_norm import QKNorm


class Store(Protocol):
    """The keys and values of one layer, in blocks that each have the same number of slots, one slot for each token.

    The cache decides which token is in which slot, and the store decides how a slot keeps it. In a `KVCache` each row
    is one block, whose last slot receives tokens that are not kept. In a `PagedKVCache` a row has any blocks.

    Pass a class as `KVCache(store=...)` or `PagedKVCache(store=...)`. For each layer the cache calls it with
    `(blocks, block_size, num_kv_heads, head_dim)` and the keywords `dtype`, of the keys and values of the model, and
    `device`. At first every slot must read as finite numbers.

    Slots are addressed by two int64 tensors that broadcast to one shape: the block, and the slot in the block.

    Attributes:
        keys, values: what is kept, in any form; they become an entry of `KVCache.keys` and `KVCache.values`. The first
            two axes are blocks and slots.
        dtype: dtype of the keys and values that are written and read.
    """

    @property
    def keys(self) -> Tensor: ...
    @property
    def values(self) -> Tensor: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def write(self, slots: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
        """Store new tokens. Only the last slot of a block may occur several times.

        Args:
            slots: a slot for each token, of shape `tokens`.
            k, v: rotated keys, and values, `[*tokens, kv_heads, head_dim]` in
                `dtype`.
        """

    def rotate_and_write(
        self, slots: Tensor, q: Tensor, k: Tensor, v: Tensor, *, rotation: Rotation, norm: QKNorm | None
    ) -> Tensor | None:
        """Normalize and rotate q and k, and store k and v, in one kernel.

        Args:
            slots: block · block_size + slot in the block for each token, int64 `[batch, seq]`; −1 to store nothing.
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

    def read(
        self, blocks: Tensor | None, count: int | None, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values, each `[rows, slots, kv_heads, head_dim]` in `dtype`: views or new tensors.

        Args:
            blocks: the blocks of each row, int32 `[rows, blocks of a row]`. None means that each block is a row.
            count: number of slots to return for each row. None means all slots.
            out: two tensors `[blocks, block_size, kv_heads, head_dim]` in `dtype` for the gathered blocks, which may be
                used as memory of the result.
        """

    def rotate(self, rotation: Rotation, blocks: Tensor | None) -> None:
        """Rotate cached keys once more.

        Args:
            rotation: one for slots `[blocks, block_size]`, or one angle for all slots.
            blocks: numbers of the blocks, int64 `[blocks]`. None means all blocks.
        """

    def clear(self, slots: tuple[Tensor | int, Tensor | slice]) -> None:
        """Make these slots read as finite numbers, such as 0. A mask would not hide NaN in them, as 0 · NaN is NaN.

        Args:
            slots: as in `write`; or the number of a block, and a slice of its slots.
        """

    def copy(self, source: Tensor, target: Tensor | None, count: int) -> None:
        """Copy slots of blocks to other blocks, all at once.

        Args:
            source: numbers of blocks, int64 `[blocks]`.
            target: the block that gets the slots of the block at the same index in `source`, int64 `[blocks]`. None
                means block 0, 1, 2 and so on, all of them.
            count: number of slots to copy of each block, from the first.
        """


class PlainStore:
    """Keys and values as two tensors `[blocks, block_size, kv_heads, head_dim]` with any strides.

    Args:
        keys: the memory, which is used as it is.
        values: likewise; or the number of the first channels of `keys` that are the values (MLA).
    """

    def __init__(self, keys: Tensor, values: Tensor | int) -> None:
        self.latent = None if isinstance(values, Tensor) else values
        self.keys, self.dtype = keys, keys.dtype
        self._kept = [keys, values] if isinstance(values, Tensor) else [keys]

    @property
    def values(self) -> Tensor:
        return self._kept[1] if self.latent is None else self.keys[..., : self.latent]

    def write(self, slots: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
        for kept, new in zip(self._kept, (k, v), strict=False):
            kept.index_put_(slots, new)

    def rotate_and_write(
        self, slots: Tensor, q: Tensor, k: Tensor, v: Tensor, *, rotation: Rotation, norm: QKNorm | None
    ) -> Tensor | None:
        if self.latent is None:
            store = StoreArguments(v, self.keys, self._kept[1], slots)
        else:
            store = StoreArguments(None, self.keys, None, slots)
        rotated: Tensor | None = qk_norm.run_fused(rotation, q, k, layout="bshd", norm=norm, store=store)
        return rotated

    def attend(self, q: Tensor, far_q: Tensor | None, visible: VisibleKeys, *, scale: float) -> Tensor | None:
        if self.latent is not None:
            return None
        return attend_cached(q, far_q, self.keys, self._kept[1], visible, scale=scale)

    def read(
        self, blocks: Tensor | None, count: int | None, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        if blocks is None:
            return self.keys[:, :count], self.values[:, :count]
        k_out, v_out = (None, None) if out is None else out
        k = torch.index_select(self.keys, 0, blocks.flatten(), out=k_out).view(len(blocks), -1, *self.keys.shape[2:])
        if self.latent is not None:
            return k[:, :count], k[:, :count, :, : self.latent]
        v = torch.index_select(self.values, 0, blocks.flatten(), out=v_out).view(len(blocks), -1, *k.shape[2:])
        return k[:, :count], v[:, :count]

    def rotate(self, rotation: Rotation, blocks: Tensor | None) -> None:
        if blocks is None:
            rotation.apply_(self.keys, layout="bshd")
            return
        rotated = self.keys.index_select(0, blocks)
        rotation.apply_(rotated, layout="bshd")
        self.keys.index_copy_(0, blocks, rotated)

    def clear(self, slots: tuple[Tensor | int, Tensor | slice]) -> None:
        for kept in self._kept:
            kept[slots] = 0

    def copy(self, source: Tensor, target: Tensor | None, count: int) -> None:
        for some in [kept[:, :count] for kept in self._kept]:
            copied = some.index_select(0, source)
            some.copy_(copied) if target is None else some.index_copy_(0, target, copied)


def create_stores(
    who: str,
    make: Callable[..., Store] | str | None,
    num_layers: int,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device | str | None,
    *,
    heads_first: bool = False,
    latent: int | None = None,
) -> list[Store]:
    """Return a store for each layer.

    Args:
        who: name of the cache in errors.
        make: the argument `store` of the cache: a class, its name in `STORES`, or None for `PlainStore`.
        shape: blocks, block_size, num_kv_heads and head_dim.
        heads_first: whether a `PlainStore` has the heads of a block before its tokens in memory.
        latent: the argument `latent` of the cache.
    """
    if latent is not None:
        _checks.integer(who, "latent", latent, at_least=1, at_most=shape[3])
        if make is not None:
            must, fix = "store must be None with latent rows", "Omit store; such rows have no other store yet."
            raise _checks.error(who, must, _checks.shown(make), fix)
    if make is not None:
        make = STORES.get(make, make) if isinstance(make, str) else make
        if not callable(make):
            must = "store must be 'int8', 'fp8', a class of stores or None"
            raise _checks.error(
                who, must, _checks.shown(make), "Pass a name, or a class that the cache calls for each layer."
            )
        return [make(shape, dtype=dtype, device=device) for _ in range(num_layers)]
    blocks, size, heads, channels = shape
    memory = (blocks, heads, size, channels) if heads_first else shape
    count = num_layers if latent is not None else 2 * num_layers
    pools = [torch.zeros(memory, dtype=dtype, device=device) for _ in range(count)]
    pools = [pool.transpose(1, 2) for pool in pools] if heads_first else pools
    if latent is not None:
        return [PlainStore(rows, latent) for rows in pools]
    return [PlainStore(keys, values) for keys, values in zip(pools[:num_layers], pools[num_layers:], strict=True)]
