"""What a `KVCache` is given: does it fit the cache's rows, layers and heads? Values are read on the CPU only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.rope import Rope


def size(who: str, capacity: int | None, window: int | None, sinks: int) -> None:
    """Raise unless either capacity or window is given, and sinks only with window."""
    if (capacity is None) == (window is None) or (window is None and sinks):
        raise _checks.error(
            who,
            "either capacity or window must be given, and sinks only with window",
            f"capacity={capacity}, window={window}, sinks={sinks}",
            "capacity keeps every token; window lets old ones go, all but the sinks.",
        )


def dtype(who: str, given: object) -> None:
    """Raise unless keys and values can have this dtype."""
    if given not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        must = "dtype must be float16, bfloat16, float32 or float64"
        raise _checks.error(who, must, str(given), "Pass that of the model, or of autocast.")


def real(seq: int, attention_mask: Tensor | None, length: Tensor, who: str = "KVCache.step") -> Tensor:
    """bool `[batch, seq]`: which of the new tokens of `KVCache.step` are no padding."""
    shape = (length.shape[0], seq)
    if not isinstance(seq, torch.SymInt):
        _checks.integer(who, "seq", seq, at_least=1)
    if attention_mask is None:
        return torch.ones(shape, dtype=torch.bool, device=length.device)
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != shape or attention_mask.is_floating_point():
        raise _checks.error(
            who,
            f"attention_mask must be a bool or integer tensor [batch, seq] = {list(shape)}",
            _checks.described(attention_mask),
            "Pass which of the new tokens are real, not the additive mask that attention gets.",
        )
    return attention_mask != 0


def positions(given: Tensor, real: Tensor, sinks: int, who: str = "KVCache.step") -> Tensor:
    """int64 `[batch, seq]` or `[axes, batch, seq]`: those that `KVCache.step` is given, in memory of their own."""
    if sinks:
        raise _checks.error(
            who,
            "positions must be None in a cache with sinks, whose distances are counted in tokens",
            _checks.described(given),
            "Build the cache with sinks=0, or with capacity.",
        )
    batch, seq = real.shape
    if isinstance(given, Tensor) and given.is_floating_point():
        raise _checks.error(
            who,
            "positions must be integers, int64",
            _checks.described(given),
            "Leave positions out, since the cache goes by the order of tokens, and pass rope.at(positions), of shape "
            "[axes, batch, seq] or [batch, seq], in place of step.rotation(rope).",
        )
    if (
        not isinstance(given, Tensor)
        or given.dtype != torch.int64
        or (given.shape != (seq,) and (given.ndim not in (2, 3) or given.shape[-2:] != (batch, seq)))
        or given.device != real.device
    ):
        raise _checks.error(
            who,
            "positions must be an int64 tensor [axes, batch, seq], [batch, seq] = "
            f"{[batch, seq]} or [seq] = {[seq]} on {real.device}",
            f"{_checks.described(given)} on {given.device}" if isinstance(given, Tensor) else _checks.described(given),
            "Pass one position for each new token, padding included.",
        )
    return (given if given.ndim == 3 else given.expand(batch, seq)).clone()


def known(lengths: Tensor) -> tuple[int, int] | None:
    """The smallest and the largest of lengths `[batch]`; None where reading waits for a device or breaks a graph."""
    if torch.compiler.is_compiling() or lengths.device.type != "cpu":
        return None
    smallest, largest = torch.aminmax(lengths)
    return int(smallest), int(largest)


def room(capacity: int | None, total: tuple[int, int] | None) -> None:
    """Raise if a row does not fit, where the smallest and largest number of tokens is known."""
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


def number_for_each_row(who: str, name: str, value: Tensor, length: Tensor) -> None:
    """Raise unless value is int64 `[batch]`."""
    if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.shape != length.shape:
        must = f"{name} must be an int64 tensor [batch] = {list(length.shape)}"
        raise _checks.error(who, must, _checks.described(value), "Pass one number for each row.")


def ropes(
    rope: Rope | Sequence[Rope | None], num_layers: int, head_dim: int, who: str = "KVCache.shift"
) -> Sequence[Rope | None]:
    """For each layer, the rope that `KVCache.shift` is given."""
    each = [rope] * num_layers if isinstance(rope, Rope) else rope
    if (
        not isinstance(each, Sequence)
        or len(each) != num_layers
        or not all(one is None or isinstance(one, Rope) for one in each)
    ):
        raise _checks.error(
            who,
            f"rope must be a Rope, or one or None for each of {num_layers} layers",
            _checks.shown(rope),
            "Pass the rope that rotated the keys.",
        )
    for one in each:
        if one is not None and one.head_dim != head_dim:
            raise _checks.error(
                who,
                f"rope must have the heads of the cache, head_dim={head_dim}",
                f"head_dim={one.head_dim}",
                "Pass the rope that rotated the keys.",
            )
    return each


def chosen(rows: Tensor | Sequence[int], length: Tensor) -> Tensor:
    """bool `[batch]`: the rows that `KVCache.reset` is given."""
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
        raise _checks.error(who, must, _checks.described(rows), fix)
    _there(who, rows, batch, must, fix)
    return torch.zeros_like(length, dtype=torch.bool).index_fill_(0, rows.to(length), True)


def sources(rows: Tensor, length: Tensor) -> None:
    """Raise unless rows are those that `KVCache.reorder` takes: int64 `[batch]`."""
    who, batch = "KVCache.reorder", length.shape[0]
    must = f"rows must be an int64 tensor [batch] = [{batch}] of row numbers from 0 to {batch - 1}"
    fix = "Pass for each row the one whose tokens it takes, e.g. the beams that go on."
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.shape != (batch,):
        raise _checks.error(who, must, _checks.described(rows), fix)
    _there(who, rows, batch, must, fix)


def _there(who: str, rows: Tensor, batch: int, must: str, fix: str) -> None:
    """Raise if a row number is outside of the batch; on the CPU only, outside torch.compile."""
    if len(rows) and (among := known(rows)) is not None and (among[0] < 0 or among[1] >= batch):
        raise _checks.error(who, must, f"rows from {among[0]}" if among[0] < 0 else f"rows up to {among[1]}", fix)
