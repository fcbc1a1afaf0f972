"""A key-value cache of fixed size, with ragged rows, a sliding window, attention sinks and shift.

Keys are cached after rotation, at the position of their token. Later changes of positions are applied as a
second rotation, which is exact because the angles of rotations add:

- `shift` rotates the cached keys by `Rope.shift`.
- Sinks keep their rotation. The query is rotated a second time, to its position counted inside the cache. This gives
  the same distances as moving the sinks forward, without rounding them once for each token.
- Self-Extend rotates keys to the positions of their groups when they are used.

The order of tokens (`slots`) decides what each token attends to. Positions only decide rotation.

No shape depends on a value, and nothing is read back from the device, so one compiled forward pass serves every token.
On the CPU, outside of torch.compile, lengths are read, and attention skips the slots that no row has filled.

`step` only plans. The cache counts the new tokens once the last layer has stored them, so a forward pass that raises
leaves the cache unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.attention import cache_checks
from ropewalk.attention.cache_step import CacheStep, Progress, largest_position
from ropewalk.attention.slots import EMPTY, Slots, clear, clear_slots
from ropewalk.rope.rope import Rope
from ropewalk.rotation.api import Rotation


class KVCache:
    """Keys and values of the tokens so far, for layers with equal num_kv_heads and head_dim.

    In each forward pass, `step` plans the positions and the mask of the new tokens, and every layer gets its part:

        step = cache.step(tokens.shape[1])
        rotation = step.rotation(rope)
        for i, layer in enumerate(layers):
            x = layer(x, rotation, cache=step.layer(i))

    No gradients pass through the cache. If only some layers have a window (Gemma), give them a separate cache.

    The positions of cached and of new tokens are in ±2³¹. `step` and `shift` raise an error for others, if reading them
    is free: on the CPU outside torch.compile, and in a `PagedKVCache` always.

    Args:
        num_layers: number of layers of the model. Each has its own keys and values.
        batch: number of rows, which are independent sequences. Each has its own length.
        num_kv_heads: heads of keys and values.
        head_dim: channels of a head.
        capacity: maximum number of tokens in each row. All of them are kept.
        window: sliding window, instead of capacity. Each token attends to itself and the previous window − 1 tokens;
            older tokens are evicted.
        sinks: with window, tokens at the start of a row that are never evicted and always attended to, as in
            StreamingLLM (Xiao et al., https://arxiv.org/abs/2309.17453). See `CacheStep.rotation`.
        dtype: dtype of keys and values. Pass the dtype of the model, or of autocast if it is active.
        device: device of keys and values.

    Attributes:
        length: tokens in each row that all layers have stored, int64 `[batch]`.
        position: position of the next token of each row, int64 `[batch]`. It equals length unless `shift`, or `at`
            or `positions` of `step`, has changed it.
        keys, values: lists with one tensor for each layer, `[batch, slots + 1, num_kv_heads, head_dim]`.

    Raises:
        RopeError: a number is out of range, or not exactly one of capacity and window is given.

    Memory:
        2 · num_layers · batch · (capacity + 1) · num_kv_heads · head_dim numbers. With a window, sinks + window
        replaces capacity. The extra slot receives the tokens that are not kept.

    Example:
        >>> cache = KVCache(num_layers=1, batch=2, num_kv_heads=1, head_dim=4, capacity=8)
        >>> step = cache.step(3, attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]))
        >>> step.positions
        tensor([[0, 1, 2],
                [0, 1, 1]])
        >>> k = v = torch.ones(2, 3, 1, 4)
        >>> _ = step.layer(0).append(k, v)
        >>> cache.length
        tensor([3, 2])
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        capacity: int | None = None,
        window: int | None = None,
        sinks: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        who = "KVCache"
        self.num_layers = _checks.integer(who, "num_layers", num_layers, at_least=1, at_most=cache_checks.MAX_LAYERS)
        batch = _checks.integer(who, "batch", batch, at_least=1)
        num_kv_heads = _checks.integer(who, "num_kv_heads", num_kv_heads, at_least=1)
        head_dim = _checks.integer(who, "head_dim", head_dim, at_least=1, at_most=_checks.MAX_HEAD_DIM)
        self.sinks = _checks.integer(who, "sinks", sinks, at_least=0)
        cache_checks.check_size(who, capacity, window, self.sinks)
        cache_checks.check_dtype(who, dtype)
        self.capacity = None if capacity is None else _checks.length(who, "capacity", capacity)
        self.window = None if window is None else _checks.length(who, "window", window)
        self._slots = Slots(self.capacity, self.window, self.sinks)
        shape = (batch, self._slots.count + 1, num_kv_heads, head_dim)  # the last slot receives discarded tokens
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(self.num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(self.num_layers)]
        self.length = torch.zeros(batch, dtype=torch.int64, device=device)
        self.position = torch.zeros(batch, dtype=torch.int64, device=device)
        self._key_positions = torch.full(shape[:2], EMPTY, dtype=torch.int64, device=device)
        self._pending: Progress | None = None  # of the newest step; None if it was planned under torch.compile

    def step(
        self,
        seq: int,
        *,
        attention_mask: Tensor | None = None,
        at: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> CacheStep:
        """Plan a forward pass of `seq` new tokens for each row: their positions, slots and attention mask.

        Each layer must append its keys and values once, the last layer last. The cache counts the tokens only then. If
        the forward pass raises before any layer has stored something, the step can simply be discarded.

        Args:
            seq: new tokens in each row, padding included, at least 1.
            attention_mask: True or non-zero for real tokens, bool or integer `[batch, seq]`, with padding anywhere.
                Padding is not stored, and its outputs are undefined. None means that all tokens are real.
            at: position at which each row continues, int64 `[batch]`. None continues after the last token. The first
                cached token at or after this position and all tokens appended after it are dropped immediately. Use it
                after a rejected draft in speculative decoding. It needs a cache with capacity, because a window has
                evicted keys that would become visible again.
            positions: positions of the new tokens: int64 `[batch, seq]`, `[seq]` for all rows, or `[axes, batch, seq]`
                for a rope with `axes`. They are integers in any order, and several tokens may have the same one
                (patches of an image). None means consecutive positions from `at` or `KVCache.position`, the same on
                every axis. Positions only decide rotation; masks, windows and slots follow the order of tokens.
                Afterwards `KVCache.position` is 1 + the largest position of a real token on any axis. Positions are not
                supported with sinks, because distances to sinks are counted in tokens. Always pass three dimensions for
                several axes: `[axes, seq]` is read as `[batch, seq]` if batch equals the number of axes. For float
                positions call `Rope.at` instead of `CacheStep.rotation`.

        Raises:
            RopeError: a shape or dtype does not match, or a position is out of range; at is combined with a window, or
                positions with sinks; only some layers appended in the previous step (see `rollback`); or the cache is
                full. A full cache is detected only on the CPU outside torch.compile, because reading lengths would
                synchronize other devices. Where it is not detected, tokens beyond capacity are not kept and their
                outputs are wrong; check `(cache.length > cache.capacity).any()`.
        """
        previous = self._check_finished("KVCache.step")
        real = cache_checks.real_tokens(seq, attention_mask, self.length)
        at_positions = None if positions is None else cache_checks.new_positions(positions, real, self.sinks)
        index_in_step = (real.cumsum(1) - 1).clamp(min=0)  # index of each real token among those of this step
        added = real.sum(1)
        if at is not None:
            self._truncate(at, added)
        order, total = self.length[:, None] + index_in_step, self.length + added
        # A single token only overwrites a key that it does not attend to. Several tokens would overwrite keys that the
        # earliest of them still need, so with a window their keys are concatenated to the cached ones for attention.
        concatenates = self._slots.evicts and seq > 1
        lengths = cache_checks.read_range(self.length if concatenates else total)
        cache_checks.check_capacity(self.capacity, lengths)
        if at_positions is None:
            at_positions, following = self.position[:, None] + index_in_step, self.position + added
            place = at_positions
        else:
            place = largest_position(at_positions)
            largest = place.masked_fill(~real, -EMPTY).amax(1)
            following = torch.where(added > 0, largest + 1, self.position)
        slot = self._slots.assign(order, real, total)
        count, key_order = self._slots.count, None
        if concatenates:
            key_order = torch.cat([self._slots.order(self.length), order.masked_fill(~real, EMPTY)], dim=1)
            key_positions = torch.cat([self._key_positions[:, :count], place.masked_fill(~real, EMPTY)], dim=1)
        else:
            key_positions = self._key_positions.scatter(1, slot, place)[:, :count]
        advanced = previous is not None and previous.advances and at is None and positions is None
        progress = Progress(
            self.num_layers,
            overwrites=concatenates,
            advances=attention_mask is None or (cache_checks.read_range(added) or (0, 0))[0] > 0,
            stale=previous.rotations if previous is not None and advanced else (),
            slots=slot,
        )
        self._drop_step()
        self._pending = None if torch.compiler.is_compiling() else progress
        return CacheStep(
            self,
            positions=at_positions,
            order=order,
            key_positions=key_positions,
            key_order=key_order,  # None: computed on first use, which saves time in a decode step
            padding=None if attention_mask is None else ~real,
            causal=attention_mask is None and self._slots.is_causal(seq, lengths, concatenates=concatenates),
            filled=self._slots.filled(lengths, concatenates=concatenates),
            slot=slot,
            concatenates=concatenates,
            state_after=(total, following),
            progress=progress,
        )

    def shift(self, rope: Rope | Sequence[Rope | None], delta: int | Tensor) -> None:
        """Move every cached key, and the position of the next token, by `delta` positions. No key is recomputed.

        The keys are only rotated: their attention factor is not applied again. Each call rounds them once.

        Args:
            rope: the rope that rotated the keys; or a list with one for each layer, None for a layer that does not
                rotate. With `axes`, keys move by delta along each axis.
            delta: distance in tokens, negative to move back: an int, or an int64 tensor `[batch]` with one for each
                row. With `SelfExtend` pass a multiple of its group; otherwise tokens would change groups.

        Raises:
            RopeError: an argument has a wrong type, shape or value, or only some layers have appended (see `rollback`).
        """
        self._check_finished("KVCache.shift")
        ropes = cache_checks.rope_of_each_layer(rope, self.num_layers, self.keys[0].shape[-1])
        if isinstance(delta, Tensor):
            cache_checks.check_per_row("KVCache.shift", "delta", delta, self.length)
            each = delta[:, None].expand(-1, self._slots.count + 1)
        else:
            _checks.integer("KVCache.shift", "delta", delta, at_least=-(2**31), at_most=2**31)
        is_empty = self._key_positions == EMPTY
        moved = self._key_positions + (delta[:, None] if isinstance(delta, Tensor) else delta)
        cache_checks.check_positions("KVCache.shift", self.position + delta)
        cache_checks.check_positions("KVCache.shift", moved.masked_fill(is_empty, 0))
        precise = torch.float64 if self.keys[0].dtype == torch.float64 else torch.float32
        rotations: dict[Rope, Rotation] = {}
        for layer_rope in ropes:  # compute all rotations before any key changes
            if layer_rope is not None and layer_rope not in rotations:
                axes = None if layer_rope.axes is None else layer_rope.axes.count
                if isinstance(delta, Tensor):
                    shift_by: int | tuple[int, ...] | Tensor = each if axes is None else each.expand(axes, -1, -1)
                else:
                    shift_by = delta if axes is None else (delta,) * axes
                rotations[layer_rope] = layer_rope.shift(shift_by, device=self.keys[0].device, dtype=precise)
        self._drop_step()
        for keys, layer_rope in zip(self.keys, ropes, strict=True):
            if layer_rope is not None:
                rotations[layer_rope].apply_(keys, layout="bshd")
        self._key_positions.copy_(moved.masked_fill_(is_empty, EMPTY))
        self.position.add_(delta)

    def reset(self, rows: Tensor | Sequence[int] | None = None) -> None:
        """Drop all tokens of the given rows, which then start a new text at position 0. No memory is freed.

        Args:
            rows: row numbers, a sequence of ints or an int32 or int64 tensor `[n]`; or a bool tensor `[batch]`, True
                for the rows to clear. None clears all rows.

        Raises:
            RopeError: rows has a wrong type or shape, or a row number is out of range (for tensors, detected only on
                the CPU outside torch.compile); or rows is not None and only some layers appended in the previous step
                (see `rollback`).
        """
        if rows is None:
            chosen = torch.ones_like(self.length, dtype=torch.bool)
        else:
            chosen = cache_checks.row_mask(rows, self.length)
            self._check_finished("KVCache.reset")
        # Without a pending step, as under torch.compile, it is unknown which slots were written: clear them all.
        stopped = self._pending is None or not self._pending.complete
        end = torch.full_like(self.length, self._slots.count) if stopped else self.length
        clear([*self.keys, *self.values], self.length.new_zeros(()).expand_as(chosen), end * chosen)
        self._drop_step()
        self.length.masked_fill_(chosen, 0)
        self.position.masked_fill_(chosen, 0)
        self._key_positions.masked_fill_(chosen[:, None], EMPTY)

    def reorder(self, rows: Tensor) -> None:
        """Replace the tokens of row i by those of row `rows[i]`, for all rows at once.

        Call it in beam search after the surviving beams have been selected. A row number may occur several times.

        Args:
            rows: int64 `[batch]`, row numbers on the device of the cache.

        Raises:
            RopeError: rows has a wrong type or shape, or a row number is out of range (detected only on the CPU outside
                torch.compile); or only some layers appended in the previous step (see `rollback`).
        """
        self._check_finished("KVCache.reorder")
        cache_checks.check_source_rows(rows, self.length)
        filled = self._slots.filled(cache_checks.read_range(self.length), concatenates=False)
        self._drop_step()
        for tensor in (*self.keys, *self.values):
            tensor[:, filled] = tensor[:, filled].index_select(0, rows)
        for tensor in (self._key_positions, self.length, self.position):
            tensor.copy_(tensor.index_select(0, rows))

    def rollback(self) -> None:
        """Discard a step whose forward pass stopped between layers, and restore the cache to its state before the step.

        Call it after an exception if some layers have appended and others have not. In other cases it only invalidates
        a step that is still open. Tokens dropped through `at` are not restored.

        Raises:
            RopeError: the cache has a window, the step had several tokens, and some but not all layers have appended.
                Those layers have overwritten keys of older tokens.
        """
        pending = self._pending
        if pending is not None and pending.overwrites and 0 < pending.stored_count() < self.num_layers:
            raise _checks.error(
                "KVCache.rollback",
                "with a window, a step of several tokens cannot be undone once a layer has stored it",
                f"one that {pending.stored_count()} of {self.num_layers} layers have stored",
                "Call reset(), and process the text again from its beginning.",
            )
        self._drop_step()

    def _check_finished(self, who: str) -> Progress | None:
        """Return the progress of the newest step, or None if no layer has stored tokens. Raise if only some have.

        Under torch.compile the result is None: reading the state would compile the forward pass once for each state.
        """
        if torch.compiler.is_compiling() or self._pending is None:
            return None
        self._pending.check_complete(who)
        return self._pending if self._pending.stored_count() else None

    def _drop_step(self) -> None:
        """Mark the newest step as outdated, and clear what its layers have stored, unless all of them have."""
        pending = self._pending
        if not torch.compiler.is_compiling() and pending is not None:
            pending.outdated = True
            if pending.slots is not None and not (pending.complete or pending.overwrites):
                clear_slots([*self.keys, *self.values], pending.slots)
        self._pending = None

    def _truncate(self, at: Tensor, added: Tensor) -> None:
        """Drop the first token at position `at` or later and all tokens stored after it, if the added tokens fit."""
        if self.window is not None:
            raise _checks.error(
                "KVCache.step",
                "at must be None in a cache with a window, which has evicted older keys",
                "positions",
                "To go back, use a cache with capacity. To start a new text in a row, call reset(rows=...).",
            )
        cache_checks.check_per_row("KVCache.step", "at", at, self.length)
        cache_checks.check_positions("KVCache.step", at)
        count = self._slots.count
        slot = torch.arange(count, device=self.length.device)
        # By order: drop the first token at or after `at`, and every token appended after it at any position.
        first = torch.where(self._key_positions[:, :count] >= at[:, None], slot, EMPTY).amin(1)
        length = torch.minimum(self.length, first)
        cache_checks.check_capacity(self.capacity, cache_checks.read_range(length + added))
        if cache_checks.read_range(length) is not None:  # on other devices this would read the whole cache
            clear([*self.keys, *self.values], length, self.length)
        self.length.copy_(length)
        self.position.copy_(at)
        self._key_positions[:, :count].masked_fill_(slot >= length[:, None], EMPTY)
