"""One decode step of a layer before its attention: norm q and k, rotate them, write k and v to a cache.

One call of a kernel where `rotation.qk_norm.run` finds one; elsewhere the separate calls, which give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk._layout import AXES, Layout
from ropewalk.rotation.api import Rotation
from ropewalk.rotation.qk_norm import QKNorm, Store, run

_WHO = "rotate_and_store"


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotation: Rotation,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    norm: QKNorm | None = None,
    layout: Layout = "bshd",
) -> Tensor:
    """Norm q and k, rotate both, write k and v to their slots of a cache, and return q.

    For servers whose cache is not a `KVCache`, which does this by itself. The result is that of the separate calls, bit
    for bit: `norm(q, k)`, `rotation(q, k)`, and a copy to each slot.

    Args:
        q, k, v: of the new tokens, `[batch, seq, heads, head_dim]` in the order that `layout` says; v has the heads of
            k, and any number of channels. float16, bfloat16, float32 or float64; any strides, such as those of slices
            of one fused projection. Not changed.
        rotation: of these tokens.
        k_cache, v_cache: `[blocks, block_size, kv_heads, head_dim]` in the dtype of q, any strides: what is stored
            heads first, `[blocks, kv_heads, block_size, head_dim]`, is `transpose(1, 2)` of it. A contiguous cache is
            one block for each row.
        slot_mapping: int64, one for each token, `[batch, seq]` or, in layout "thd", `[tokens]`: block · block_size +
            place in the block. −1: not stored (vLLM's meaning). No two tokens may have one slot.
        norm: of q and k before rotation, or None where there is no norm.

    Returns:
        q, normed and rotated: a new tensor of its shape and dtype.

    Raises:
        RopeError: a shape, dtype or device does not fit, or a gradient is wanted; on the CPU outside of torch.compile,
            a slot outside of the cache. Nothing is written then. On GPUs nothing is read back to check: a token with
            such a slot is not stored.
    """
    if norm is not None and not isinstance(norm, QKNorm):
        cure = "Make it with QKNorm(q_weight, k_weight, eps=...)."
        raise _checks.error(_WHO, "norm must be a QKNorm or None", _checks.shown(norm), cure)
    store = Store(v, k_cache, v_cache, slot_mapping)
    on_cpu = all(isinstance(x, Tensor) and x.is_cpu for x in (q, v))
    if not on_cpu:
        _check(q, k, store, norm, layout)
    rotated: Tensor | None = run(rotation, q, k, layout=layout, norm=norm, store=store)
    if rotated is None:
        if on_cpu:  # where compiled code has checked already that all is well, if it is
            _check(q, k, store, norm, layout)
        if not isinstance(rotation, Rotation):
            came = _checks.shown(rotation)
            raise _checks.error(_WHO, "rotation must be a Rotation", came, "Make it with rope.at(positions).")
        rotated, k = rotation(q, k, layout=layout) if norm is None else norm.rotate(rotation, q, k, layout=layout)
        _write(k, store, layout)
    return rotated


def _write(k: Tensor, store: Store, layout: Layout) -> None:
    """k and v to their slots: what is correct. No shape depends on a value, and nothing is read back from the device.

    A token without a slot is written as a copy of one that has a slot, to the same slot; where no token has one, the
    first slot is written as it is.
    """
    slots, block_size = store.slots.flatten(), store.k_cache.shape[1]
    if not slots.numel():
        return
    kept = (slots >= 0) & (slots < store.k_cache.shape[0] * block_size)
    source = torch.where(kept, torch.arange(len(slots), device=slots.device), kept.int().argmax())
    slot = torch.where(kept.any(), slots[source], 0)
    place = (slot // block_size, slot % block_size)
    for x, cache in ((k, store.k_cache), (store.v, store.v_cache)):
        cache.index_put_(place, torch.where(kept.any(), _tokens_first(x, layout)[source], cache[place]))


def _tokens_first(x: Tensor, layout: Layout) -> Tensor:
    """`[batch · seq, heads, head_dim]`."""
    batch, tokens, heads, _ = AXES[layout]
    if batch is None:
        return x.movedim((tokens, heads), (0, 1))
    return x.movedim((batch, tokens, heads), (0, 1, 2)).flatten(0, 1)


def _check(q: Tensor, k: Tensor, store: Store, norm: QKNorm | None, layout: Layout) -> None:
    """Raise unless k and v fit the caches, and slots the tokens."""
    _checks.choice(_WHO, "layout", layout, AXES)
    batch, tokens, heads, count = AXES[layout]
    for name, x in (("q", q), ("k", k), *zip(("v", "k_cache", "v_cache", "slot_mapping"), store, strict=True)):
        if not isinstance(x, Tensor):
            raise _checks.error(_WHO, f"{name} must be a tensor", _checks.shown(x), "Pass what the docstring says.")
    for name, x in (("k", k), ("v", store.v)):
        if x.ndim != count:
            must = f"{name} in layout {layout!r} must have {count} axes"
            raise _checks.error(_WHO, must, _checks.described(x), "Pass the layout that it has.")
    if store.v.shape[:-1] != k.shape[:-1]:
        must, came = "v must have the batch, tokens and heads of k", f"{_checks.described(store.v)}"
        raise _checks.error(_WHO, must, came, f"k has shape {tuple(k.shape)}.")
    blocks = store.k_cache.shape[:2]
    for name, cache, x in (("k_cache", store.k_cache, k), ("v_cache", store.v_cache, store.v)):
        wanted = (x.shape[heads], x.shape[-1])
        if cache.ndim != 4 or cache.shape[:2] != blocks or cache.shape[2:] != wanted or 0 in blocks:
            must = f"{name} must have shape [blocks, block_size, {wanted[0]}, {wanted[1]}], k_cache and v_cache alike"
            raise _checks.error(_WHO, must, _checks.described(cache), "Pass a view of this shape, of any strides.")
        if x.dtype != q.dtype or cache.dtype != q.dtype or cache.device != q.device or x.device != q.device:
            must = f"k, v, k_cache and v_cache must be {q.dtype} on {q.device}, as q is"
            came = f"{x.dtype} on {x.device}, and {name} {cache.dtype} on {cache.device}"
            raise _checks.error(_WHO, must, came, "Build the cache in the dtype in which the model makes keys.")
    shape = (k.shape[tokens],) if batch is None else (k.shape[batch], k.shape[tokens])
    slots = store.slots
    if slots.dtype != torch.int64 or slots.shape != shape or slots.device != q.device:
        must = f"slot_mapping must be int64 of shape {tuple(shape)} on {q.device}, a slot for each token"
        raise _checks.error(_WHO, must, _checks.described(slots), "-1 is for tokens that are not stored.")
    given = (q, k, store.v, store.k_cache, store.v_cache, *(() if norm is None else (norm.q_weight, norm.k_weight)))
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        cure = "Run under torch.no_grad() or torch.inference_mode()."
        raise _checks.error(_WHO, "gradients cannot pass through a cache", "tensors that require one", cure)
    known = slots.is_cpu and type(slots) is Tensor and slots.numel() > 0 and not torch.compiler.is_compiling()
    if known and not torch._C._are_functorch_transforms_active():
        low, high = int(slots.min()), int(slots.max())
        if low < -1 or high >= blocks[0] * blocks[1]:
            must = f"each slot must be -1 or from 0 to {blocks[0] * blocks[1] - 1}, blocks · block_size - 1"
            raise _checks.error(_WHO, must, str(low if low < -1 else high), "Is this the slot mapping of this cache?")
