"""A cache as kernels see it: the keys that attention reads, and where a step writes new ones."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class VisibleKeys(NamedTuple):
    """Where the keys of each row are in a cache, and which of them its new tokens attend to.

    Key i of a row is in slot i of its block, or with `blocks`, in slot i % block_size of block `blocks[row, i //
    block_size]`. A new token of order n attends to the keys i ≤ n, with a window only to those with n - i < window, and
    to the sinks among them.

    Attributes:
        order: order of the new tokens, int64 `[batch, seq]`.
        keys: number of keys of a row.
        blocks: blocks of each row, int32 `[batch, blocks of a row]`. None if row i has block i.
        counts: number of keys that each row has, int64 `[batch]`. None means `keys`.
        window: number of tokens that each token attends to, itself included. None means no limit.
        sinks: number of first keys that no window hides, and to which another rotation of the queries may belong.
        ring: if positive, a row has `keys` slots and any number of keys, without `blocks`: the last `ring` slots are
            overwritten in turn, so key i ≥ keys - ring is in slot keys - ring + (i - keys + ring) % ring. The window is
            at most ring - new tokens + 1.
        key_scales, value_scales: factor of each head of keys and of values that have 8 bits, float32 `[blocks,
            block_size, kv_heads]`. None for other keys and values.
    """

    order: Tensor
    keys: int
    blocks: Tensor | None = None
    counts: Tensor | None = None
    window: int | None = None
    sinks: int = 0
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    ring: int = 0


class StoreArguments(NamedTuple):
    """Values, and where a fused step writes keys and values.

    Attributes:
        v: values of the new tokens, of any number of channels. None for latent rows, of which only the keys are
            written.
        k_cache, v_cache: `[blocks, block_size, kv_heads, head_dim]` in the dtype of k and v, or int8 or float8_e4m3fn
            with scales. `v_cache` is None if v is.
        slots: for each token block · block_size + slot in the block, or −1 to write nothing, int64.
        k_scales, v_scales: where the scale of each head is written if the caches have 8 bits, float32 `[blocks,
            block_size, kv_heads]`; numbers and scales are those of `rotation.store.quantize`, bit for bit. None
            for other caches.
    """

    v: Tensor | None
    k_cache: Tensor
    v_cache: Tensor | None
    slots: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
