"""The new tokens of a step: check the arguments of `step` and `shift`, and place the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.attention.pairs import EMPTY
from ropewalk.positions import sizes
from ropewalk.rope.rope import Rope
from ropewalk.rotation.api import Rotation
from ropewalk.rotation.writable import check_memory

_MAX_LAYERS = 65_536  # far above any model; it keeps a wrong number from filling the memory


class NewTokens(NamedTuple):
    """The places of the new tokens of each row, and the state of the rows after them.

    Attributes:
        order: index of each token in its row, int64 `[batch, seq]`. Padding has the index of the token before it.
        positions: positions to which the tokens are rotated, int64 or float `[batch, seq]` or `[axes, batch, seq]`.
        place: one position for each token, the largest over the axes, `[batch, seq]`, in the dtype of position.
        length, position: number of tokens and next position of each row after the step, `[batch]`; length is int64.
    """

    order: Tensor
    positions: Tensor
    place: Tensor
    length: Tensor
    position: Tensor


def place_tokens(real: Tensor | None, seq: int, length: Tensor, position: Tensor, given: Tensor | None) -> NewTokens:
    """Place new tokens after those of each row.

    Args:
        real: False for padding, bool `[batch, seq]`. None means no padding.
        seq: new tokens in each row, padding included.
        length, position: number of tokens and next position of each row, int64 `[batch]`.
        given: positions of the tokens, from `check_given_positions`. None means consecutive ones from `position`.
    """
    # The index of each real token among those of this step.
    index = torch.arange(seq, device=length.device) if real is None else (real.cumsum(1) - 1).clamp(min=0)
    added = seq if real is None else real.sum(1)
    order, total = length[:, None] + index, length + added
    if given is None:
        positions = position[:, None] + index
        return NewTokens(order, positions, positions, total, position + added)
    place = (given if given.ndim == 2 else given.amax(0)).to(position.dtype)
    if real is None:
        return NewTokens(order, given, place, total, place.amax(1) + 1)
    largest = place.masked_fill(~real, -EMPTY).amax(1)
    return NewTokens(order, given, place, total, torch.where(real.any(1), largest + 1, position))


def read_range(numbers: Tensor) -> tuple[Any, Any] | None:
    """Return the smallest and the largest number, or None if reading them would synchronize or break a graph.

    Args:
        numbers: numbers of any shape, at least one, such as `[batch]`. If one is nan, so is the result.
    """
    if torch.compiler.is_compiling() or numbers.device.type != "cpu":
        return None
    smallest, largest = torch.aminmax(numbers)
    return smallest.item(), largest.item()


def check_shape(who: str, num_layers: int, num_kv_heads: int, head_dim: int, dtype: object) -> tuple[int, int, int]:
    """Check the numbers of layers, heads and channels, and the dtype of keys and values. Return the numbers."""
    num_layers = _checks.integer(who, "num_layers", num_layers, at_least=1, at_most=_MAX_LAYERS)
    num_kv_heads = _checks.integer(who, "num_kv_heads", num_kv_heads, at_least=1)
    head_dim = _checks.integer(who, "head_dim", head_dim, at_least=1, at_most=_checks.MAX_HEAD_DIM)
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        must = "dtype must be float16, bfloat16, float32 or float64"
        raise _checks.error(who, must, str(dtype), "Pass the dtype of the model, or of autocast.")
    return num_layers, num_kv_heads, head_dim


def check_positions(who: str, positions: Tensor) -> None:
    """Raise if a position is not in ±2³¹, where `read_range` can read it. So sums of positions cannot overflow."""
    bounds = read_range(positions)
    if bounds is not None and not max(-bounds[0], bounds[1]) <= 2**31:  # nan is not either
        got = f"positions from {bounds[0]} to {bounds[1]}"
        raise _checks.error(who, "every position must stay within ±2**31", got, "Pass numbers in this range.")


def interrupted(who: str, changing: list[str]) -> _checks.RopeError:
    """Return the error for a cache that an exception has left half changed. `changing` names the call."""
    must, got = "no change of the cache may have been interrupted", f"{changing[0]}, which an exception has stopped"
    return _checks.error(who, must, got, "Call reset() for all rows, and process their texts again.")


def check_per_row(who: str, name: str, value: Tensor, length: Tensor) -> None:
    """Raise unless value is an int64 tensor of the shape of `length`, `[batch]`."""
    if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.shape != length.shape:
        must = f"{name} must be an int64 tensor [batch] = {list(length.shape)}"
        raise _checks.error(who, must, _checks.describe(value), "Pass one number for each row.")


def moved_positions(who: str, places: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Check `old` and `new` of `move`, and return the new position of each token.

    Args:
        places: positions of the cached tokens, int64 of any shape, `EMPTY` for empty slots.
        old, new: see `KVCache.move`.
    """
    for x in (old, new):
        if not isinstance(x, Tensor) or x.dtype != torch.int64 or x.ndim != 1 or len(x) != len(old) or not len(x):
            must = "old and new must be int64 tensors [n] of one length, at least 1"
            got = f"{_checks.describe(old)} and {_checks.describe(new)}"
            raise _checks.error(who, must, got, "Pass the positions of the tokens that move.")
        check_positions(who, x)
    old, order = old.to(places.device).sort()
    which = torch.searchsorted(old, places).clamp(max=len(old) - 1)
    is_moved = old[which] == places
    if read_range(old) is not None:
        missing, repeated = old[~torch.isin(old, places)].tolist(), old[1:][old[1:] == old[:-1]].tolist()
        if missing or repeated:
            got = f"position {missing[0]} of no token" if missing else f"position {repeated[0]} twice"
            fix = "A position that several tokens share is passed once, and they move together."
            raise _checks.error(who, "old must be distinct positions of cached tokens", got, fix)
    return torch.where(is_moved, new.to(places.device)[order][which], places)


def check_no_sinks(who: str, must: str, sinks: int) -> None:
    """Raise if a cache with sinks is given positions."""
    if sinks:
        must = f"{must} in a cache with sinks, whose distances are counted in tokens"
        raise _checks.error(who, must, f"sinks={sinks}", "Build the cache with sinks=0, or without a window.")


def real_tokens(who: str, seq: int, attention_mask: Tensor | None, length: Tensor) -> Tensor | None:
    """Check `seq` and `attention_mask` of `step`. Return which tokens are not padding, bool `[batch, seq]`, or None."""
    if not isinstance(seq, torch.SymInt):
        _checks.integer(who, "seq", seq, at_least=1)
    if attention_mask is None:
        return None
    shape = (length.shape[0], seq)
    sizes.check_mask(who, attention_mask, f"[batch, seq] = {list(shape)}", shape)
    check_memory(who, attention_mask)
    return sizes.real_tokens(who, attention_mask)


def check_given_positions(who: str, value: Tensor | None, seq: int, length: Tensor) -> Tensor | None:
    """Check the positions of `step` and return a copy, `[batch, seq]` or `[axes, batch, seq]`."""
    if value is None:
        return None
    batch = length.shape[0]
    if (
        not isinstance(value, Tensor)
        or value.dtype not in (torch.int64, torch.float32, torch.float64)
        or (value.shape != (seq,) and (value.ndim not in (2, 3) or value.shape[-2:] != (batch, seq)))
        or value.device != length.device
    ):
        raise _checks.error(
            who,
            "positions must be an int64, float32 or float64 tensor [axes, batch, seq], [batch, seq] = "
            f"{[batch, seq]} or [seq] = {[seq]} on {length.device}",
            f"{_checks.describe(value)} on {value.device}" if isinstance(value, Tensor) else _checks.describe(value),
            "Pass one position for each new token, padding included.",
        )
    check_positions(who, value)
    return (value if value.ndim == 3 else value.expand(batch, seq)).clone()


def rope_of_each_layer(
    who: str, rope: Rope | Sequence[Rope | None], num_layers: int, head_dim: int, latent: int | None
) -> Sequence[Rope | None]:
    """Check the `rope` argument of `shift` and return the rope that has rotated the keys of each layer."""
    each = [rope] * num_layers if isinstance(rope, Rope) else rope
    fix = "Pass the rope that rotated the keys."
    if (
        not isinstance(each, Sequence)
        or len(each) != num_layers
        or not all(layer_rope is None or isinstance(layer_rope, Rope) for layer_rope in each)
    ):
        must = f"rope must be a Rope, or a list of {num_layers} (one Rope or None for each layer)"
        raise _checks.error(who, must, _checks.shown(rope), fix)
    for layer_rope in each:
        if layer_rope is not None and layer_rope.head_dim != head_dim:
            must, got = f"rope must have the head_dim of the cache, {head_dim}", f"head_dim={layer_rope.head_dim}"
            raise _checks.error(who, must, got, fix)
        if layer_rope is not None:
            check_latent(who, "rope", layer_rope.rotary_offset, latent)
    return each


def check_latent(who: str, name: str, rotary_offset: int, latent: int | None) -> None:
    """Raise if a rope or rotation rotates channels that are also values."""
    if latent is not None and rotary_offset < latent:
        must, got = f"{name} must not rotate the first {latent} channels, the latent", f"rotary_offset={rotary_offset}"
        raise _checks.error(who, must, got, f"Build Rope(head_dim, ..., rotary_dim=..., rotary_offset={latent}).")


def shift_rotations(
    ropes: Sequence[Rope | None], delta: int | tuple[int, ...] | Tensor, dtype: torch.dtype, device: torch.device
) -> list[Rotation | None]:
    """Return the rotation that moves the keys of each layer by delta.

    Args:
        ropes: the rope of each layer, None if it does not rotate.
        delta: distance in tokens, an int or int64 `[rows, slots]`, the same on every axis of a rope; or one for each
            axis, a tuple or `[axes, rows, slots]`.
        dtype, device: of the keys.
    """
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    made: dict[Rope, Rotation] = {}
    for rope in ropes:
        if rope is not None and rope not in made:
            by: int | tuple[int, ...] | Tensor = delta
            if rope.axes is not None and isinstance(delta, int):
                by = (delta,) * rope.axes.count
            elif rope.axes is not None and isinstance(delta, Tensor) and delta.ndim == 2:
                by = delta.expand(rope.axes.count, -1, -1)
            made[rope] = rope.shift(by, device=device, dtype=precise)
    return [None if rope is None else made[rope] for rope in ropes]
