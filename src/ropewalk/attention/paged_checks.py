"""What a `PagedKVCache` is given: do the pools fit each other, are the rows there, are there blocks enough?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.attention import cache_checks
from ropewalk.rotation.writable import share_elements


def pools(who: str, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Raise unless these are pools of as many layers, all of one shape, dtype and device."""
    for name, given in (("k_cache", keys), ("v_cache", values)):
        if not isinstance(given, list | tuple) or not given or not all(isinstance(pool, Tensor) for pool in given):
            must = f"{name} must be a list of tensors, one for each layer"
            raise _checks.error(who, must, _checks.described(given), "Pass [pool] for one layer.")
    if len(keys) != len(values):
        must, got = "k_cache and v_cache must have as many layers", f"{len(keys)} and {len(values)}"
        raise _checks.error(who, must, got, "Pass one pool of each for each layer.")
    pools = [*keys, *values]
    for i, pool in enumerate(pools):
        if any(share_elements(pool, other) for other in pools[:i]):
            fix = "Pass pools of their own; keys and values may be parts of one tensor that do not overlap."
            raise _checks.error(who, "no two pools may have an element in common", "pools that do", fix)
    first = keys[0]
    for name, given in (("k_cache", keys), ("v_cache", values)):
        for pool in given:
            if pool.ndim != 4 or 0 in pool.shape:
                raise _checks.error(
                    who,
                    f"a pool of {name} must have shape [blocks, block_size, kv_heads, head_dim], none of them 0",
                    f"{tuple(pool.shape)}",
                    "Pass a view: pool.transpose(1, 2) of a pool with the heads before the tokens of a block (HND).",
                )
            if (pool.shape, pool.dtype, pool.device) != (first.shape, first.dtype, first.device):
                raise _checks.error(
                    who,
                    f"all pools must be alike: {first.dtype} of shape {tuple(first.shape)} on {first.device}",
                    f"{_checks.described(pool)} on {pool.device} in {name}",
                    "Use one cache for each kind of layer.",
                )
            strides = [stride for stride, size in zip(pool.stride()[:3], pool.shape[:3], strict=True) if size > 1]
            if pool.stride(3) != 1 or min(strides, default=1) < 1 or pool.requires_grad:
                raise _checks.error(
                    who,
                    f"a pool of {name} must have channels next to each other, places of its own for each block, token "
                    "and head, and no gradient",
                    f"strides {pool.stride()}" + (" and requires_grad=True" if pool.requires_grad else ""),
                    "Pass a view of memory that was allocated for it.",
                )
    cache_checks.dtype(who, first.dtype)


def rows(who: str, given: int | Sequence[int] | Tensor | None, there: Mapping[int, object], next_row: int) -> list[int]:
    """The row numbers that are meant: all that are there when None.

    Args:
        who: who speaks in the message.
        given: what the caller passed.
        there: the rows that are admitted.
        next_row: the number of the next row: all below it have been given out.
    """
    if given is None:
        return list(there)
    if isinstance(given, Tensor):
        listed = given.tolist() if given.ndim == 1 and given.dtype in (torch.int32, torch.int64) else None
    else:
        listed = [given] if isinstance(given, int) else list(given) if isinstance(given, list | tuple | range) else None
    must, fix = "rows must be different numbers that admit or fork has given", "Pass e.g. [cache.admit()]."
    if listed is None:
        raise _checks.error(who, must, _checks.described(given), fix)
    for row in listed:
        _checks.integer(who, "each of rows", row, at_least=0)
        if row not in there:
            got = f"row {row}, which was freed" if row < next_row else f"row {row}"
            raise _checks.error(who, must, got, f"These are there: {_checks.shown(list(there))}.")
    if len(set(listed)) < len(listed):
        raise _checks.error(who, must, _checks.shown(listed), "Name each row once.")
    return [int(row) for row in listed]


def enough(who: str, wanted: int, free: int) -> None:
    """Raise if more blocks are wanted than are free."""
    if wanted > free:
        raise _checks.error(
            who,
            f"{wanted} free blocks are needed",
            f"{free}",
            "Free or reset rows that have ended, send fewer tokens, or build the cache with more blocks.",
        )


def no_window(who: str, name: str, window: int | None, cure: str) -> None:
    """Raise in a cache that has let go of older keys."""
    if window is not None:
        must = f"{name} must be None in a cache with a window, which has let go of older keys"
        raise _checks.error(who, must, "a number", cure)
