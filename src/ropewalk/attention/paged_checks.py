"""Check the arguments of `PagedKVCache`: matching pools, existing rows, enough free blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.attention import cache_checks
from ropewalk.rotation.writable import share_elements


def check_pools(who: str, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Raise unless keys and values have a pool for each layer, all with one shape, dtype and device."""
    for name, layers in (("k_cache", keys), ("v_cache", values)):
        if not isinstance(layers, list | tuple) or not layers or not all(isinstance(pool, Tensor) for pool in layers):
            must = f"{name} must be a list of tensors, one for each layer"
            raise _checks.error(who, must, _checks.describe(layers), "Pass [pool] for one layer.")
    if len(keys) != len(values):
        must, got = "k_cache and v_cache must have the same number of layers", f"{len(keys)} and {len(values)}"
        raise _checks.error(who, must, got, "Pass one key pool and one value pool for each layer.")
    pools = [*keys, *values]
    for i, pool in enumerate(pools):
        if any(share_elements(pool, other) for other in pools[:i]):
            fix = "Pass separate tensors, or parts of one tensor that do not overlap."
            raise _checks.error(who, "pools must not share elements", "pools that overlap", fix)
    first = keys[0]
    for name, layers in (("k_cache", keys), ("v_cache", values)):
        for pool in layers:
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
                    f"all pools must be {first.dtype} of shape {tuple(first.shape)} on {first.device}",
                    f"{_checks.describe(pool)} on {pool.device} in {name}",
                    "Use one cache for each kind of layer.",
                )
            strides = [stride for stride, size in zip(pool.stride()[:3], pool.shape[:3], strict=True) if size > 1]
            if pool.stride(3) != 1 or min(strides, default=1) < 1 or pool.requires_grad:
                raise _checks.error(
                    who,
                    f"a pool of {name} must have contiguous channels, no overlapping elements, and no gradient",
                    f"strides {pool.stride()}" + (" and requires_grad=True" if pool.requires_grad else ""),
                    "Pass a view of allocated memory that is not expanded and does not require gradients.",
                )
    cache_checks.check_dtype(who, first.dtype)


def row_numbers(
    who: str, value: int | Sequence[int] | Tensor | None, existing: Mapping[int, object], next_row: int
) -> list[int]:
    """Check row numbers and return them as a list. None means all existing rows.

    Args:
        who: name of the caller in the message.
        value: the row numbers that were passed to the caller.
        existing: the existing rows by number.
        next_row: number of the next row to be created. A smaller number that no longer exists belongs to a freed row.
    """
    if value is None:
        return list(existing)
    if isinstance(value, Tensor):
        listed = value.tolist() if value.ndim == 1 and value.dtype in (torch.int32, torch.int64) else None
    else:
        listed = [value] if isinstance(value, int) else list(value) if isinstance(value, list | tuple | range) else None
    must, fix = "rows must be distinct numbers returned by admit or fork", "Pass e.g. [cache.admit()]."
    if listed is None:
        raise _checks.error(who, must, _checks.describe(value), fix)
    for row in listed:
        _checks.integer(who, "each of rows", row, at_least=0)
        if row not in existing:
            got = f"row {row}, which was freed" if row < next_row else f"row {row}"
            raise _checks.error(who, must, got, f"The existing rows are {_checks.shown(list(existing))}.")
    if len(set(listed)) < len(listed):
        raise _checks.error(who, must, _checks.shown(listed), "Pass each row once.")
    return [int(row) for row in listed]


def check_free_blocks(who: str, needed: int, free: int) -> None:
    """Raise if more blocks are needed than are free."""
    if needed > free:
        raise _checks.error(
            who,
            f"{needed} free blocks are needed",
            f"{free}",
            "Free or reset rows that have ended, send fewer tokens, or build the cache with more blocks.",
        )


def check_no_window(who: str, name: str, window: int | None, fix: str) -> None:
    """Raise if the cache has a window, because it may have evicted older keys."""
    if window is not None:
        must = f"{name} must be None in a cache with a window, which has evicted older keys"
        raise _checks.error(who, must, "a number", fix)
