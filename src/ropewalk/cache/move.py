"""Move cached keys to other positions in the memory of any engine: into other slots, or in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.cache import tokens
from ropewalk.positions.sizes import can_read
from ropewalk.rope.rope import Rope
from ropewalk.rotation import writable
from ropewalk.rotation.api import Rotation
from ropewalk.rotation.store import LARGEST, quantize

_WHO = "move_keys"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_AT_ONCE = 2**19
"""Numbers of 8 bits that are rotated at once on the CPU, so that their float32 forms stay in its caches."""


@torch.no_grad()
def move_keys(
    keys: Tensor | Sequence[Tensor],
    slots_from: Tensor,
    slots_to: Tensor,
    rope: Rope,
    old: Tensor,
    new: Tensor,
    *,
    scales: Tensor | Sequence[Tensor] | None = None,
    values: Tensor | Sequence[Tensor] = (),
) -> None:
    """Copy cached tokens to other slots, and rotate their keys from their old positions to new ones.

    The rotation is the exact one by new − old and leaves the attention factor alone. All tokens are read before one is
    written, so slots may be exchanged. Pass all layers with this rope at once, which computes the angles once.

    Args:
        keys: rotated keys, `[blocks, block_size, kv_heads, head_dim]` or `[slots, kv_heads, head_dim]` with any
            strides; or a list of such tensors, one for each layer, with one shape and dtype. float16, bfloat16, float32
            or float64; or int8, float8_e4m3fn or float8_e5m2 with `scales`. Tensors must not share elements. For rows
            `[latent | rotated key]` of DeepSeek, pass `rows.unsqueeze(-2)`.
        slots_from, slots_to: the slot from which and to which each token is copied, block · block_size + offset in the
            block, int64 `[tokens]`. The same tensor twice moves tokens in place. −1 in one of them skips the token. No
            two tokens may share a slot in `slots_to`.
        rope: the static rope that rotated the keys, with the head_dim of the pool. For rows of DeepSeek:
            `dataclasses.replace(rope, head_dim=576, rotary_dim=64, rotary_offset=512)`.
        old, new: position of each token before and afterwards, int32 or int64 in ±2³¹: `[tokens]`, or `[axes, tokens]`
            for a rope with `axes`. For such a rope, `[tokens]` are the positions of text.
        scales: for keys in 8 bits, the factor of each token and head, float32 in the shape of the keys without the last
            axis; moved tokens get new ones. Or factors that stay, `[]` or `[kv_heads]`: then numbers beyond the range
            of the dtype become its largest. A list if keys are one.
        values: tensors with the slots of the keys, such as values, whose rows are copied as they are: any dtype and any
            channels, `[blocks, block_size, ...]` or `[slots, ...]`.

    Raises:
        RopeError: a shape, dtype or device does not match, the rope is not static, a tensor cannot be written in place,
            or, on the CPU outside of torch.compile, a slot or a position is out of range or two tokens share a slot.
            Nothing has been written then. On other devices, slots are not read back, and a token with a slot outside of
            the pool is skipped.
        BaseException: any other, such as KeyboardInterrupt or one for lack of memory, may come between two tensors.
            They are moved one after the other, first `keys` with their `scales` and then `values`, and a note of the
            exception (`__notes__`) says at which of them it came.

    Precision:
        One rounding to the dtype of the keys. Each further move of the same keys adds one.
    """
    pools, copied = _as_list(keys), _as_list(values)
    factors = None if scales is None else _as_list(scales)
    _check_pools(pools, copied, factors, rope)
    device, dtype, shape = pools[0].device, pools[0].dtype, pools[0].shape[:-2]
    _check_tokens((slots_from, slots_to), (old, new), rope, device, shape.numel())
    moves = (slots_from >= 0) & (slots_to >= 0) & (slots_from < shape.numel()) & (slots_to < shape.numel())
    if not moves.numel() or (can_read(moves) and not moves.any()):
        return
    # No shape may depend on a value, so a token that is skipped becomes a copy of one that moves. If none moves, the
    # first slot gets its own content.
    some, index = moves.any(), torch.arange(len(moves), device=device)
    index = torch.where(moves, index, moves.int().argmax())
    first, last = (torch.where(some, slots[index], 0) for slots in (slots_from, slots_to))
    source, target = _split(first, shape), _split(last, shape)
    delta = torch.where(some, new.long() - old.long(), 0)[..., index]
    if rope.axes is not None and delta.ndim == 1:
        delta = delta.expand(rope.axes.count, -1)
    rotation = rope.shift(delta, device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    moved, i = None, 0
    try:
        for i, pool in enumerate([*pools, *copied]):
            moved = _read(pool, first, source, moved)
            if i < len(pools) and factors is None:
                rotation.apply_(moved, layout="thd")
            elif i < len(pools) and factors is not None:
                factor = factors[i][source] if factors[i].ndim > 1 else factors[i]
                _rotate_quantized(moved, factor, rotation)
                if factors[i].ndim > 1:
                    factors[i].index_put_(target, factor)
            pool.index_put_(target, moved)
    except BaseException as e:
        at = f"keys[{i}]" if i < len(pools) else f"values[{i - len(pools)}]"
        e.add_note(
            f"move_keys: this stopped it at {at}, which may have been moved. Tensors before it were, later ones not."
        )
        raise


def _read(pool: Tensor, slots: Tensor, index: tuple[Tensor, ...], memory: Tensor | None) -> Tensor:
    """Return the rows of slots, in the memory of other rows if it fits: fresh memory takes longer than the copy."""
    if len(index) > 1:
        if pool.stride(0) != pool.shape[1] * pool.stride(1):
            return pool[index]
        pool = pool.flatten(0, 1)
    fits = memory is not None and memory.shape[1:] == pool.shape[1:] and memory.dtype == pool.dtype
    return torch.index_select(pool, 0, slots, out=memory if fits else None)


def _rotate_quantized(keys: Tensor, factors: Tensor, rotation: Rotation) -> None:
    """Rotate keys `[tokens, kv_heads, head_dim]` in 8 bits in float32, in place.

    Args:
        keys: the keys.
        factors: `[tokens, kv_heads]`, which become those of the rotated keys; or `[kv_heads]` or `[]`, which stay.
        rotation: the rotation of the tokens.
    """
    count, dtype = len(keys), keys.dtype
    at_once = max(1, _AT_ONCE // keys[0].numel()) if keys.is_cpu and not torch.compiler.is_compiling() else count
    for begin in range(0, count, at_once):
        part = slice(begin, begin + at_once)
        factor = factors if factors.ndim < 2 else factors[part]
        rotated = keys[part].float().mul_(factor[..., None])
        rotation[part].apply_(rotated, layout="thd")
        if factors.ndim < 2:
            scaled = rotated.div_(factor[..., None]).clamp_(-LARGEST[dtype], LARGEST[dtype])
            keys[part] = scaled if dtype.is_floating_point else scaled.round_()
        else:
            keys[part], factors[part] = quantize(rotated, dtype)


def _as_list(value: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def _split(slots: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    """Return the index of slots in a pool whose first axes have this shape, `[slots]` or `[blocks, block_size]`."""
    return (slots,) if len(shape) == 1 else (slots // shape[1], slots % shape[1])


def _check_pools(pools: list[Tensor], copied: list[Tensor], factors: list[Tensor] | None, rope: Rope) -> None:
    everything = [*pools, *copied, *(factors or ())]
    if not pools or not all(isinstance(x, Tensor) for x in everything) or not isinstance(rope, Rope):
        must, got = "keys, values and scales must be tensors, or lists of them, and rope a Rope", "something else"
        raise _checks.error(_WHO, must, got, "Pass the keys of at least one layer, and the rope that rotated them.")
    first = pools[0]
    if first.ndim not in (3, 4) or 0 in first.shape or first.shape[-1] != rope.head_dim:
        raise _checks.error(
            _WHO,
            "keys must be [blocks, block_size, kv_heads, head_dim] or [slots, kv_heads, head_dim], with the head_dim "
            f"of rope, {rope.head_dim}",
            _checks.describe(first),
            "Pass a view of the pool. For rows without heads, pass rows.unsqueeze(-2) and dataclasses.replace(rope, "
            "head_dim=..., rotary_dim=rope.rotary_dim, rotary_offset=...), where the rotated channels lie in a row.",
        )
    if first.dtype not in (_FLOATS if factors is None else LARGEST):
        raise _checks.error(
            _WHO,
            "keys must be float16, bfloat16, float32 or float64, or with scales int8, float8_e4m3fn or float8_e5m2",
            f"{first.dtype} {'without' if factors is None else 'with'} scales",
            "For bytes that hold numbers in 8 bits, pass keys.view(torch.float8_e4m3fn) and their scales.",
        )
    slots, heads = first.shape[:-2], first.shape[-2]
    scales_fit = factors is None or (
        len(factors) == len(pools)
        and all(x.shape in ((*slots, heads), (heads,), ()) and x.dtype == torch.float32 for x in factors)
    )
    if (
        not scales_fit
        or any((x.shape, x.dtype) != (first.shape, first.dtype) for x in pools)
        or any(x.shape[: len(slots)] != slots for x in copied)
        or any(x.device != first.device for x in everything)
    ):
        raise _checks.error(
            _WHO,
            "all keys must have one shape and dtype, values must begin with their axes of slots, and scales must be "
            f"float32 {[*slots, heads]}, [{heads}] or [] for each layer, all on one device",
            ", ".join(f"{_checks.describe(x)} on {x.device}" for x in everything[:4]),
            "Call move_keys once for each kind of layer.",
        )
    for x in everything:
        writable.check_elements(_WHO, x, "Pass the memory of the pool, or a view of it.")
        if x.requires_grad:
            fix = "Pass x.detach()."
            raise _checks.error(_WHO, "gradients cannot pass through a cache", "tensors that require one", fix)


def _check_tokens(
    slots: tuple[Tensor, Tensor], positions: tuple[Tensor, Tensor], rope: Rope, device: torch.device, count: int
) -> None:
    both, shape = (*slots, *positions), getattr(slots[0], "shape", torch.Size())
    integers, shapes = (torch.int32, torch.int64), [shape, () if rope.axes is None else (rope.axes.count, *shape)]
    if (
        not all(isinstance(x, Tensor) and x.dtype in integers and x.device == device for x in both)
        or any(x.dtype != torch.int64 or x.shape != shape or x.ndim != 1 for x in slots)
        or any(x.shape not in shapes or x.shape != positions[0].shape for x in positions)
    ):
        rows = "[tokens]" if rope.axes is None else f"[tokens] or [{rope.axes.count}, tokens]"
        raise _checks.error(
            _WHO,
            f"slots_from and slots_to must be int64 [tokens], and old and new integers {rows}, all on {device}",
            ", ".join(_checks.describe(x) for x in both),
            "Pass a slot and a position for each token.",
        )
    if not all(map(can_read, both)) or not slots[0].numel():
        return
    for x in positions:
        tokens.check_positions(_WHO, x)
    low, high = min(int(x.min()) for x in slots), max(int(x.max()) for x in slots)
    if low < -1 or high >= count:
        must = f"each slot must be -1 or from 0 to {count - 1}, the slots of the pool"
        fix = "Compute block * block_size + offset, for tokens that have a block: -1 in a table is no block."
        raise _checks.error(_WHO, must, str(low if low < -1 else high), fix)
    written = slots[1][(slots[0] >= 0) & (slots[1] >= 0)]
    if len(torch.unique(written)) < len(written):
        fix = "Pass -1 for tokens that are not moved."
        raise _checks.error(_WHO, "no two tokens may share a slot of slots_to", "a slot that occurs twice", fix)
