"""Check the arguments of `KVCache` against its rows, layers and heads. Only values of CPU tensors are read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.rope.rope import Rope


def check_size(who: str, capacity: int | None, window: int | None, sinks: int) -> None:
    """Raise unless exactly one of capacity and window is given. Raise also if sinks are given without window."""
    if (capacity is None) == (window is None) or (window is None and sinks):
        raise _checks.error(
            who,
            "either capacity or window must be given, and sinks only with window",
            f"capacity={capacity}, window={window}, sinks={sinks}",
            "Pass capacity to keep every token, or window to evict all but the newest tokens and the sinks.",
        )


MAX_LAYERS = 65_536
"""Far above any model. It keeps a wrong number from filling the memory."""


def check_positions(who: str, positions: Tensor) -> None:
    """Raise if a position is not in ±2³¹, where `read_range` can read it. So sums of positions cannot overflow."""
    bounds = read_range(positions)
    if bounds is not None and max(-bounds[0], bounds[1]) > 2**31:
        got = f"positions from {bounds[0]} to {bounds[1]}"
        raise _checks.error(who, "every position must stay within ±2**31", got, "Pass numbers in this range.")


def check_dtype(who: str, value: object) -> None:
    """Raise unless a cache can store keys and values in this dtype."""
    if value not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        must = "dtype must be float16, bfloat16, float32 or float64"
        raise _checks.error(who, must, str(value), "Pass the dtype of the model, or of autocast.")


def real_tokens(seq: int, attention_mask: Tensor | None, length: Tensor, who: str = "KVCache.step") -> Tensor:
    """Check `seq` and `attention_mask` of `KVCache.step`. Return which tokens are not padding, bool `[batch, seq]`."""
    shape = (length.shape[0], seq)
    if not isinstance(seq, torch.SymInt):
        _checks.integer(who, "seq", seq, at_least=1)
    if attention_mask is None:
        return torch.ones(shape, dtype=torch.bool, device=length.device)
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != shape or attention_mask.is_floating_point():
        raise _checks.error(
            who,
            f"attention_mask must be a bool or integer tensor [batch, seq] = {list(shape)}",
            _checks.describe(attention_mask),
            "Pass 1 for real tokens and 0 for padding, not the additive mask of attention.",
        )
    return attention_mask != 0


def new_positions(value: Tensor, real: Tensor, sinks: int, who: str = "KVCache.step") -> Tensor:
    """Check the positions of `KVCache.step` and return a copy, int64 `[batch, seq]` or `[axes, batch, seq]`."""
    if sinks:
        raise _checks.error(
            who,
            "positions must be None in a cache with sinks, whose distances are counted in tokens",
            _checks.describe(value),
            "Build the cache with sinks=0, or with capacity.",
        )
    batch, seq = real.shape
    if isinstance(value, Tensor) and value.is_floating_point():
        raise _checks.error(
            who,
            "positions must be integers, int64",
            _checks.describe(value),
            "Omit positions, because the cache only needs the order of tokens. Compute rope.at(positions), of shape "
            "[axes, batch, seq] or [batch, seq], instead of step.rotation(rope).",
        )
    if (
        not isinstance(value, Tensor)
        or value.dtype != torch.int64
        or (value.shape != (seq,) and (value.ndim not in (2, 3) or value.shape[-2:] != (batch, seq)))
        or value.device != real.device
    ):
        raise _checks.error(
            who,
            "positions must be an int64 tensor [axes, batch, seq], [batch, seq] = "
            f"{[batch, seq]} or [seq] = {[seq]} on {real.device}",
            f"{_checks.describe(value)} on {value.device}" if isinstance(value, Tensor) else _checks.describe(value),
            "Pass one position for each new token, padding included.",
        )
    check_positions(who, value)
    return (value if value.ndim == 3 else value.expand(batch, seq)).clone()


def read_range(lengths: Tensor) -> tuple[int, int] | None:
    """Return the smallest and the largest length, or None if reading them would synchronize or break a graph.

    Args:
        lengths: integers of any shape, at least one, such as `[batch]`.
    """
    if torch.compiler.is_compiling() or lengths.device.type != "cpu":
        return None
    smallest, largest = torch.aminmax(lengths)
    return int(smallest), int(largest)


def check_capacity(capacity: int | None, total: tuple[int, int] | None) -> None:
    """Raise if the longest row exceeds the capacity.

    Args:
        capacity: None in a cache with a window.
        total: the lengths of the shortest and the longest row, or None if they are unknown.
    """
    if capacity is None or total is None:
        return
    longest = total[1]
    if longest > capacity:
        raise _checks.error(
            "KVCache.step",
            f"no row may become longer than capacity={capacity}",
            f"{longest} tokens",
            "Build a larger cache, or one with a window.",
        )


def check_per_row(who: str, name: str, value: Tensor, length: Tensor) -> None:
    """Raise unless value is an int64 tensor of the shape of `length`, `[batch]`."""
    if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.shape != length.shape:
        must = f"{name} must be an int64 tensor [batch] = {list(length.shape)}"
        raise _checks.error(who, must, _checks.describe(value), "Pass one number for each row.")


def rope_of_each_layer(
    rope: Rope | Sequence[Rope | None], num_layers: int, head_dim: int, who: str = "KVCache.shift"
) -> Sequence[Rope | None]:
    """Check the `rope` argument of `KVCache.shift` and return the rope of each layer."""
    each = [rope] * num_layers if isinstance(rope, Rope) else rope
    if (
        not isinstance(each, Sequence)
        or len(each) != num_layers
        or not all(layer_rope is None or isinstance(layer_rope, Rope) for layer_rope in each)
    ):
        raise _checks.error(
            who,
            f"rope must be a Rope, or a list of {num_layers} (one Rope or None for each layer)",
            _checks.shown(rope),
            "Pass the rope that rotated the keys.",
        )
    for layer_rope in each:
        if layer_rope is not None and layer_rope.head_dim != head_dim:
            raise _checks.error(
                who,
                f"rope must have the head_dim of the cache, {head_dim}",
                f"head_dim={layer_rope.head_dim}",
                "Pass the rope that rotated the keys.",
            )
    return each


def row_mask(rows: Tensor | Sequence[int], length: Tensor) -> Tensor:
    """Check the `rows` argument of `KVCache.reset` and return it as a mask, bool `[batch]`."""
    who, batch = "KVCache.reset", length.shape[0]
    must = f"rows must be row numbers from 0 to {batch - 1}, or a bool tensor [batch] = [{batch}]"
    fix = "Pass e.g. [0], or cache.length == 7."
    if isinstance(rows, list | tuple | range):
        for row in rows:
            _checks.integer(who, "each of rows", row, at_least=0, at_most=batch - 1)
        rows = torch.tensor(rows, dtype=torch.int64, device=length.device)
    if not isinstance(rows, Tensor):
        raise _checks.error(who, must, _checks.shown(rows), fix)
    if rows.dtype == torch.bool and rows.shape == (batch,):
        return rows.to(length.device)
    if rows.dtype not in (torch.int32, torch.int64) or rows.ndim != 1:
        raise _checks.error(who, must, _checks.describe(rows), fix)
    _check_row_range(who, rows, batch, must, fix)
    return torch.zeros_like(length, dtype=torch.bool).index_fill_(0, rows.to(length), True)


def check_source_rows(rows: Tensor, length: Tensor) -> None:
    """Raise unless rows is valid for `KVCache.reorder`: int64 `[batch]`, each a row number."""
    who, batch = "KVCache.reorder", length.shape[0]
    must = f"rows must be an int64 tensor [batch] = [{batch}] of row numbers from 0 to {batch - 1}"
    fix = "Pass for each row the number of the row whose tokens it takes over, e.g. its parent beam."
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.shape != (batch,):
        raise _checks.error(who, must, _checks.describe(rows), fix)
    _check_row_range(who, rows, batch, must, fix)


def _check_row_range(who: str, rows: Tensor, batch: int, must: str, fix: str) -> None:
    """Raise if a row number is out of range. This is checked only on the CPU, outside torch.compile."""
    if len(rows) and (bounds := read_range(rows)) is not None and (bounds[0] < 0 or bounds[1] >= batch):
        raise _checks.error(who, must, f"rows from {bounds[0]}" if bounds[0] < 0 else f"rows up to {bounds[1]}", fix)
