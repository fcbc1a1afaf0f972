"""Normalize and rotate q and k, and write k and v to a cache: the part of a decode step that precedes attention.

One kernel does all of this if `rotation.qk_norm.run_fused` supports the call. Otherwise separate calls give the same
bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk._layout import AXES, Layout
from ropewalk.kernels.visible import StoreArguments
from ropewalk.positions.sizes import can_read
from ropewalk.rotation import writable
from ropewalk.rotation.api import Rotation
from ropewalk.rotation.qk_norm import QKNorm, run_fused

_WHO = "rotate_and_store"
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The largest number of each dtype of 8 bits."""


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return heads `[..., head_dim]` in 8 bits, and the scale of each, float32 `[...]`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scales = (wide.abs().amax(-1, keepdim=True) / LARGEST[dtype]).clamp(min=2.0**-100).float()
    scaled = wide / scales
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), scales[..., 0]


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
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """Normalize and rotate q and k, write k and v to their slots of a cache, and return q.

    This function is for servers with their own cache. The layers of a `KVCache` do the same without it. The result is
    bitwise equal to separate calls: `norm(q, k)`, `rotation(q, k)`, and a copy to each slot.

    Args:
        q, k, v: queries, keys and values of the new tokens, `[batch, seq, heads, head_dim]` with the axes in the order
            of `layout`; float16, bfloat16, float32 or float64. v has as many heads as k, and any number of channels.
            Any strides are allowed, such as those of slices of a fused projection. The tensors are not modified.
        rotation: the rotation of the new tokens.
        k_cache, v_cache: `[blocks, block_size, kv_heads, head_dim]` in the dtype of q, or int8 or float8_e4m3fn with
            scales, with any strides. If heads come before tokens, `[blocks, kv_heads, block_size, head_dim]`, pass
            `transpose(1, 2)`. In a cache without pages, each sequence of the batch is one block. All may be parts of
            one tensor, but may not share elements with each other or with q, k and v, which is not checked under
            torch.compile.
        slot_mapping: the slot of each token, block · block_size + offset in the block, or −1 to store nothing, as in
            vLLM. int64 `[batch, seq]`, or `[tokens]` in layout "thd". No two tokens may share a slot (not checked).
        norm: norm of q and k, applied before rotation. None disables it.
        k_scales, v_scales: for caches in 8 bits, where the scale of each token and head is written, float32 `[blocks,
            block_size, kv_heads]`: max|x| / 127 for int8, and max|x| / 448 for float8_e4m3fn.

    Returns:
        q after norm and rotation: a new tensor of the same shape and dtype.

    Raises:
        RopeError: a shape, dtype or device does not match, an input requires gradients, a cache cannot be written in
            place (see `Rotation.apply_`) or shares elements, or, on the CPU outside of torch.compile, a slot is outside
            of the cache. Nothing has been written then. On other devices, slots are not read back for checks, and a
            token with a slot outside of the cache is not stored.
    """
    if norm is not None and not isinstance(norm, QKNorm):
        fix = "Create it with QKNorm(q_weight, k_weight, eps=...)."
        raise _checks.error(_WHO, "norm must be a QKNorm or None", _checks.shown(norm), fix)
    given = {"q": q, "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping}
    scales = {name: x for name, x in (("k_scales", k_scales), ("v_scales", v_scales)) if x is not None}
    on_cpu = all(isinstance(x, Tensor) and x.is_cpu for x in (q, v))
    if not on_cpu:
        _check(given, scales, norm, layout)
    store = StoreArguments(v, k_cache, v_cache, slot_mapping, k_scales, v_scales)
    rotated: Tensor | None = run_fused(rotation, q, k, layout=layout, norm=norm, store=store)
    if rotated is None:
        if on_cpu:  # the compiled kernel does these checks itself, so they run only if it was not used
            _check(given, scales, norm, layout)
        if not isinstance(rotation, Rotation):
            got = _checks.shown(rotation)
            raise _checks.error(_WHO, "rotation must be a Rotation", got, "Compute it with rope.at(positions).")
        rotated, k = rotation(q, k, layout=layout) if norm is None else norm.rotate(rotation, q, k, layout=layout)
        new, caches = [_tokens_first(x, layout) for x in (k, v)], [k_cache, v_cache]
        if scales:
            new = [part for x in new for part in quantize(x, k_cache.dtype)]
            caches = [k_cache, scales["k_scales"], v_cache, scales["v_scales"]]
        _write(new, caches, slot_mapping.flatten())
    return rotated


def _write(new: list[Tensor], caches: list[Tensor], slots: Tensor) -> None:
    """Write new rows to their slots in plain PyTorch. No shape depends on a value, and nothing is read back.

    The indexed write needs a slot for every token. In place of each token without a slot, a token that has one is
    written to its own slot a second time. If no token has a slot, the first slot is overwritten with its own content.
    """
    blocks, block_size = caches[0].shape[:2]
    if not slots.numel():
        return
    kept = (slots >= 0) & (slots < blocks * block_size)
    source = torch.where(kept, torch.arange(len(slots), device=slots.device), kept.int().argmax())
    slot = torch.where(kept.any(), slots[source], 0)
    index = (slot // block_size, slot % block_size)
    for x, cache in zip(new, caches, strict=True):
        cache.index_put_(index, torch.where(kept.any(), x[source], cache[index]))


def _tokens_first(x: Tensor, layout: Layout) -> Tensor:
    """Reshape x from `layout` to `[batch · seq, heads, head_dim]`."""
    batch, tokens, heads, _ = AXES[layout]
    if batch is None:
        return x.movedim((tokens, heads), (0, 1))
    return x.movedim((batch, tokens, heads), (0, 1, 2)).flatten(0, 1)


def _check(given: dict[str, Tensor], scales: dict[str, Tensor], norm: QKNorm | None, layout: Layout) -> None:
    """Raise unless k and v match the caches and their scales, and slot_mapping matches the tokens."""
    _checks.choice(_WHO, "layout", layout, AXES)
    batch, tokens, heads, count = AXES[layout]
    for name, x in {**given, **scales}.items():
        if not isinstance(x, Tensor):
            raise _checks.error(_WHO, f"{name} must be a tensor", _checks.shown(x), f"Pass a torch.Tensor as {name}.")
    q, k, v, *caches, slots = given.values()
    for name, x in (("k", k), ("v", v)):
        if x.ndim != count:
            must = f"{name} in layout {layout!r} must have {count} axes"
            fix = "Pass its layout, such as layout='thd' for [tokens, heads, head_dim]."
            raise _checks.error(_WHO, must, _checks.describe(x), fix)
    if v.shape[:-1] != k.shape[:-1]:
        must, got = "v must have the batch, tokens and heads of k", f"{_checks.describe(v)}"
        raise _checks.error(_WHO, must, got, f"Only the last axis may differ from k, of shape {tuple(k.shape)}.")
    blocks, kept = caches[0].shape[:2], caches[0].dtype if scales else q.dtype
    for name, cache, x in (("k_cache", caches[0], k), ("v_cache", caches[1], v)):
        inner = (x.shape[heads], x.shape[-1])
        if cache.ndim != 4 or cache.shape[:2] != blocks or cache.shape[2:] != inner or 0 in blocks:
            must = f"{name} must have shape [blocks, block_size, {inner[0]}, {inner[1]}], with the blocks of k_cache"
            fix = f"Pass a view, such as {name}.transpose(1, 2) of blocks with the heads before the tokens."
            raise _checks.error(_WHO, must, _checks.describe(cache), fix)
        if x.dtype != q.dtype or cache.dtype != kept or cache.device != q.device or x.device != q.device:
            must = f"k, v, k_cache and v_cache must be {q.dtype} on {q.device}, as q is"
            must += f", and the caches {kept}" if scales else ""
            got = f"{x.dtype} on {x.device}, and {name} {cache.dtype} on {cache.device}"
            fix = "Pass k_scales and v_scales for int8 or float8_e4m3fn, or else caches in the dtype and device of q."
            raise _checks.error(_WHO, must, got, fix)
    if scales:
        shape = (*blocks, k.shape[heads])
        fits = all(x.shape == shape and x.dtype == torch.float32 and x.device == q.device for x in scales.values())
        if len(scales) < 2 or kept not in (torch.int8, torch.float8_e4m3fn) or not fits:
            must = (
                f"k_scales and v_scales must be float32 {list(shape)} on {q.device}, and caches int8 or float8_e4m3fn"
            )
            got = f"caches of {kept} and " + ", ".join(f"{name} {_checks.describe(x)}" for name, x in scales.items())
            raise _checks.error(_WHO, must, got, "Keep a scale for each token and head, or pass none of the two.")
    shape = (k.shape[tokens],) if batch is None else (k.shape[batch], k.shape[tokens])
    if slots.dtype != torch.int64 or slots.shape != shape or slots.device != q.device:
        must = f"slot_mapping must be int64 of shape {tuple(shape)} on {q.device}, a slot for each token"
        raise _checks.error(_WHO, must, _checks.describe(slots), "Use -1 for tokens that are not stored.")
    caches += scales.values()
    inputs = (q, k, v, *caches, *(() if norm is None else (norm.q_weight, norm.k_weight)))
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        fix = "Run under torch.no_grad() or torch.inference_mode()."
        raise _checks.error(_WHO, "gradients cannot pass through a cache", "tensors that require one", fix)
    writable.check_memory(_WHO, *inputs, slots)
    if not torch.compiler.is_compiling():
        _check_caches(caches, (q, k, v))
    if can_read(slots) and slots.numel():
        low, high = int(slots.min()), int(slots.max())
        if low < -1 or high >= blocks[0] * blocks[1]:
            must = f"each slot must be -1 or from 0 to {blocks[0] * blocks[1] - 1}, blocks · block_size - 1"
            raise _checks.error(_WHO, must, str(low if low < -1 else high), "Pass the slot mapping of this cache.")


def _check_caches(caches: list[Tensor], inputs: tuple[Tensor, ...]) -> None:
    """Raise unless the caches can be written in place, and share no element with each other or with the inputs."""
    for cache in caches:
        writable.check_elements(_WHO, cache, "Allocate the caches with torch.zeros, outside of inference mode.")
    pairs = [(x, cache) for i, cache in enumerate(caches) for x in (*inputs, *caches[:i])]
    if any(writable.share_elements(x, cache) for x, cache in pairs):
        must = "k_cache and v_cache must not share elements with each other or with q, k and v"
        fix = "Pass separate tensors, or parts of one tensor that do not overlap."
        raise _checks.error(_WHO, must, "tensors that overlap in memory", fix)
