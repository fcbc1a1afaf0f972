"""A key-value cache of fixed size, with ragged rows, a sliding window, attention sinks and shift.

A cache consists of positions and slots, which this file keeps, and of a `Store` for each layer, which keeps keys and
values. A token has an order (the index in its row), which decides what it attends to, when it is evicted, and its slot,
where its key and value are; and, independent of that, a position, which decides its rotation.

Keys are cached after rotation, at the position of their token. Later changes of positions are applied as a
second rotation, which is exact because the angles of rotations add:

- `shift` rotates the cached keys by `Rope.shift`.
- Sinks keep their rotation. The query is rotated a second time, to its position counted inside the cache. This gives
  the same distances as moving the sinks forward, without rounding them once for each token.
- Self-Extend rotates keys to the positions of their groups when they are used.

No shape depends on a value, and nothing is read back from the device, so one compiled forward pass serves every token.
On the CPU, outside of torch.compile, lengths are read, and attention skips the slots that no row has filled.

`step` only plans. The cache counts the new tokens once the last layer is done, so a forward pass that raises leaves the
cache unchanged. A change of several tensors, such as `shift`, leaves a mark if an exception (Ctrl-C, no memory) stops
it, and later calls then refuse the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.attention.pairs import EMPTY
from ropewalk.cache import tokens
from ropewalk.cache.plan import Plan
from ropewalk.cache.ring import Ring
from ropewalk.cache.step import CacheStep, Kept
from ropewalk.cache.store import Store, create_stores
from ropewalk.cache.tokens import read_range
from ropewalk.rope.rope import Rope
from ropewalk.rotation import writable


class KVCache:
    """Keys and values of the tokens so far, for layers with equal num_kv_heads and head_dim.

    In each forward pass, `step` plans the positions and the mask of the new tokens, and every layer gets its part:

        step = cache.step(tokens.shape[1])
        rotation = step.rotation(rope)
        for i, layer in enumerate(layers):
            x = layer(x, rotation, cache=step.layer(i))

    No gradients pass through the cache. If only some layers have a window (Gemma), give them a separate cache.

    If an exception, such as Ctrl-C or one for lack of memory, stops a call while it changes cached tokens (`shift`,
    `move`, `reorder`, `reset`, or `step` with `at`), every later call but `reset()` raises a `RopeError`.

    The positions of cached and of new tokens are in ±2³¹. `step` and `shift` raise an error for others, if reading them
    is free: on the CPU outside torch.compile.

    Args:
        num_layers: number of layers of the model. Each has its own keys and values.
        batch: number of rows, which are independent sequences. Each has its own length.
        num_kv_heads: heads of keys and values.
        head_dim: channels of a head.
        capacity: maximum number of tokens in each row. All of them are kept.
        window: sliding window, instead of capacity. Each token attends to itself and the previous window − 1 tokens;
            older tokens are evicted.
        sinks: with window, tokens at the start of a row that are never evicted and always attended to, as in
            StreamingLLM (Xiao et al., https://arxiv.org/abs/2309.17453), but not by a layer with a shorter window. See
            `CacheStep.rotation`.
        dtype: dtype of keys and values. Pass the dtype of the model, or of autocast if it is active.
        device: device of keys and values.
        store: how each layer keeps its keys and values. None keeps them as they are, in `dtype`. "int8" and "fp8" keep
            8 bits for each number and a scale for each head of a token (`ropewalk.cache.quantized.QuantizedStore`
            states the error). Or a class as `ropewalk.cache.store.Store` describes it.
        latent: number of channels, the first ones of head_dim, that are also the values, so only keys are stored. A
            model with multi-head latent attention (DeepSeek, Kimi) has kv_lora_rank, one head, and head_dim
            kv_lora_rank + qk_rope_head_dim, and absorbs the projections of keys and values into q and the output. Its
            rope rotates only the last channels (`rotary_offset=latent`). None keeps values.

    Attributes:
        length: tokens in each row that all layers have stored, int64 `[batch]`.
        position: position of the next token of each row, int64 `[batch]`; float64 after float positions. It equals
            length unless `shift`, or `at` or `positions` of `step`, has changed it.
        keys, values: lists with one tensor for each layer, `[batch, slots + 1, num_kv_heads, head_dim]`, or what
            another store keeps.

    Raises:
        RopeError: a number is out of range, or not exactly one of capacity and window is given.

    Memory:
        2 · num_layers · batch · (capacity + 1) · num_kv_heads · head_dim numbers. With a window, sinks + window + 31
        replaces capacity, so 32 new tokens overwrite no key that they see. The extra slot is for tokens not kept.

    Examples:
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
        store: Callable[..., Store] | str | None = None,
        latent: int | None = None,
    ) -> None:
        who = "KVCache"
        self.num_layers, *heads = tokens.check_shape(who, num_layers, num_kv_heads, head_dim, dtype)
        batch = _checks.integer(who, "batch", batch, at_least=1)
        self.sinks = _checks.integer(who, "sinks", sinks, at_least=0)
        if (capacity is None) == (window is None) or (window is None and sinks):
            raise _checks.error(
                who,
                "either capacity or window must be given, and sinks only with window",
                f"capacity={capacity}, window={window}, sinks={sinks}",
                "Pass capacity to keep every token, or window to evict all but the newest tokens and the sinks.",
            )
        self.capacity = None if capacity is None else _checks.length(who, "capacity", capacity)
        self.window = None if window is None else _checks.length(who, "window", window)
        self._ring = Ring(self.capacity, self.window, self.sinks)
        shape = (batch, self._ring.count + 1)
        self._stores = create_stores(who, store, self.num_layers, (*shape, heads[0], heads[1]), dtype, device, latent)
        self._kept = Kept(self._stores, (heads[0], heads[1]), latent, changing=[])
        self.length = torch.zeros(batch, dtype=torch.int64, device=device)
        self.position = torch.zeros(batch, dtype=torch.int64, device=device)
        self._key_positions = torch.full(shape, EMPTY, dtype=torch.int64, device=device)
        self._row = torch.arange(batch, device=device)[:, None]
        self._pending: CacheStep | None = None  # the newest step; None if it was planned under torch.compile

    @property
    def keys(self) -> list[Tensor]:
        return [store.keys for store in self._stores]

    @property
    def values(self) -> list[Tensor]:
        return [store.values for store in self._stores]

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
            attention_mask: True or 1 for real tokens, False or 0 for padding, bool or integer `[batch, seq]`, with
                padding anywhere. Padding is not stored, and its outputs are undefined. None means that all are real.
            at: position at which each row continues, int64 `[batch]`. None continues after the last token. The first
                cached token at or after this position and all tokens appended after it are dropped immediately. Use it
                after a rejected draft in speculative decoding. It needs a cache with capacity, because a window has
                evicted keys that would become visible again.
            positions: positions of the new tokens: int64, float32 or float64, `[batch, seq]`, `[seq]` for all rows, or
                `[axes, batch, seq]` for a rope with `axes`. They may be in any order, and several tokens may have the
                same one (patches of an image). None means consecutive positions from `at` or `KVCache.position`, the
                same on every axis. Positions only decide rotation; masks, windows and slots follow the order of tokens.
                Afterwards `KVCache.position` is 1 + the largest position of a real token on any axis. Positions are not
                supported with sinks, because distances to sinks are counted in tokens. Always pass three dimensions for
                several axes: `[axes, seq]` is read as `[batch, seq]` if batch equals the number of axes. After float
                positions, those that the cache computes are float64.

        Raises:
            RopeError: a shape or dtype does not match, or a position is out of range; at is combined with a window, or
                positions with sinks; only some layers appended in the previous step (see `rollback`); or the cache is
                full. A full cache is detected only on the CPU outside torch.compile, because reading lengths would
                synchronize other devices. Where it is not detected, tokens beyond capacity are not kept and their
                outputs are wrong; check `(cache.length > cache.capacity).any()`.
        """
        who = "KVCache.step"
        previous = self._check_finished(who)
        real = tokens.real_tokens(who, seq, attention_mask, self.length)
        added = seq if real is None else real.sum(1)
        if positions is not None:
            tokens.check_no_sinks(who, "positions must be None", self.sinks)
        given = tokens.check_given_positions(who, positions, seq, self.length)
        if given is not None and given.is_floating_point() and not self.position.is_floating_point():
            exact = torch.float32 if given.device.type == "mps" else torch.float64  # MPS has no float64
            self.position, self._key_positions = self.position.to(exact), self._key_positions.to(exact)
        if at is not None:
            self._truncate(at, added)
        new = tokens.place_tokens(real, seq, self.length, self.position, given)
        plan = Plan(self._ring, self._row, new, real, self.length)
        if plan.lengths is not None and plan.lengths[1] > (self.capacity or plan.lengths[1]):
            raise self._full(plan.lengths[1])
        advanced = previous is not None and previous._advances and at is None and positions is None
        step = CacheStep(
            self._kept,
            plan,
            new,
            (self._key_positions, self.length, self.position),
            advances=not isinstance(added, Tensor) or (read_range(added) or (0, 0))[0] > 0,
            previous=previous if advanced else None,
        )
        self._drop_step()
        self._pending = None if torch.compiler.is_compiling() else step
        return step

    def shift(self, rope: Rope | Sequence[Rope | None], delta: int | tuple[int, ...] | Tensor) -> None:
        """Move every cached key, and the position of the next token, by `delta` positions. No key is recomputed.

        The keys are only rotated: their attention factor is not applied again. Each call rounds them once.

        Args:
            rope: the rope that rotated the keys; or a list with one for each layer, None for a layer that does not
                rotate.
            delta: distance in tokens, negative to move back: an int, or an int64 tensor `[batch]` with one for each
                row. For a distance on each of several axes, a tuple or an int64 tensor `[axes, batch]`: then the next
                position and `key_positions` move by the largest. With `SelfExtend` pass a multiple of its group;
                otherwise tokens would change groups.

        Raises:
            RopeError: an argument has a wrong type, shape or value, or only some layers have appended (see `rollback`).
        """
        self._check_finished("KVCache.shift")
        ropes = tokens.rope_of_each_layer(
            "KVCache.shift", rope, self.num_layers, self._kept.heads[1], self._kept.latent
        )
        by: int | tuple[int, ...] | Tensor = delta
        most: int | Tensor
        each: int | Tensor
        if isinstance(delta, Tensor):
            most = delta.amax(0) if delta.ndim == 2 and len(delta) else delta
            tokens.check_per_row("KVCache.shift", "delta", most, self.length)
            by = delta[..., None].expand(*delta.shape, self._key_positions.shape[1])
            each = most[:, None]
        else:
            for one in delta if isinstance(delta, tuple) else (delta,):
                _checks.integer("KVCache.shift", "delta", one, at_least=-(2**31), at_most=2**31)
            most = each = max(delta, default=0) if isinstance(delta, tuple) else delta
        moved = torch.where(self._key_positions == EMPTY, EMPTY, self._key_positions + each)
        position = self.position + most
        tokens.check_positions("KVCache.shift", position)
        self._move("KVCache.shift", ropes, by, moved, position, None)

    def move(self, rope: Rope | Sequence[Rope | None], row: int, old: Tensor, new: Tensor) -> None:
        """Move the cached keys of a row that are at the positions `old` to the positions `new`.

        The order of the tokens, which decides what they attend to, stays. The next position of the row becomes 1 + its
        largest position. Keys are rotated as by `shift`. To copy tokens or to reorder them, use `move_keys`.

        Args:
            rope: as in `shift`. With `axes`, keys move by new − old along each axis.
            row: number of the row.
            old, new: distinct positions of cached tokens, and the position that each of them gets, int64 `[n]` with
                n ≥ 1. Tokens at other positions stay.

        Raises:
            RopeError: an argument has a wrong type, shape or value, or, on the CPU outside of torch.compile, no token
                is at a position of `old`; the cache has sinks; or only some layers have appended (see `rollback`).
        """
        who = "KVCache.move"
        self._check_finished(who)
        ropes = tokens.rope_of_each_layer(who, rope, self.num_layers, self._kept.heads[1], self._kept.latent)
        row = _checks.integer(who, "row", row, at_least=0, at_most=len(self.length) - 1)
        tokens.check_no_sinks(who, "move must not be called", self.sinks)
        moved, slots = self._key_positions.clone(), slice(0, self._ring.count)
        held, kept = moved[row, slots], self.window or self._ring.count
        evicted = self._ring.order(self.length)[row] < self.length[row] - kept  # but still in the ring
        places = tokens.moved_positions(who, held.masked_fill(evicted, EMPTY), old, new)
        moved[row, slots] = torch.where(evicted, held, places)
        by = (moved - self._key_positions)[row : row + 1].to(torch.int64)
        position = self.position.clone()
        position[row] = places.masked_fill(places == EMPTY, new.amin().to(places.device)).amax() + 1
        self._move(who, ropes, by, moved, position, torch.tensor([row], device=by.device))

    def _move(
        self,
        who: str,
        ropes: Sequence[Rope | None],
        by: int | tuple[int, ...] | Tensor,
        moved: Tensor,
        position: Tensor,
        rows: Tensor | None,
    ) -> None:
        """Rotate the keys of rows by the distances `by`, None for all rows, and replace all positions."""
        tokens.check_positions(who, moved.masked_fill(moved == EMPTY, 0))
        rotations = tokens.shift_rotations(ropes, by, self._stores[0].dtype, self.length.device)  # before any change
        self._begin(who)
        for store, rotation in zip(self._stores, rotations, strict=True):
            if rotation is not None:
                store.rotate(rotation, rows)
        self._key_positions.copy_(moved)
        self.position.copy_(position)
        self._kept.changing.clear()

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
            chosen = _row_mask(rows, self.length)
            self._check_finished("KVCache.reset")
        # Without a pending step, as under torch.compile, it is unknown which slots were written: clear them all.
        stopped = self._pending is None or not self._pending._is_complete()
        end = torch.full_like(self.length, self._ring.count) if stopped or self._kept.changing else self.length
        self._begin("KVCache.reset")
        self._clear(torch.zeros_like(self.length), end * chosen)
        self.length.masked_fill_(chosen, 0)
        self.position.masked_fill_(chosen, 0)
        self._key_positions.masked_fill_(chosen[:, None], EMPTY)
        self._kept.changing.clear()

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
        batch = self.length.shape[0]
        must = f"rows must be an int64 tensor [batch] = [{batch}] of row numbers from 0 to {batch - 1}"
        fix = "Pass for each row the number of the row whose tokens it takes over, e.g. its parent beam."
        if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.shape != (batch,):
            raise _checks.error("KVCache.reorder", must, _checks.describe(rows), fix)
        _check_row_range("KVCache.reorder", rows, batch, must, fix)
        filled = self._count_filled()
        self._begin("KVCache.reorder")
        for store in self._stores:
            store.reorder(rows, filled)
        for tensor in (self._key_positions, self.length, self.position):
            tensor.copy_(tensor.index_select(0, rows))
        self._kept.changing.clear()

    def rollback(self) -> None:
        """Discard a step whose forward pass stopped between layers, and restore the cache to its state before the step.

        Call it after an exception if some layers have appended and others have not. In other cases it only invalidates
        a step that is still open. Tokens dropped through `at` are not restored.

        Raises:
            RopeError: the cache has a window, the step had over 32 tokens, and a layer has appended, but not all are
                done. Those layers have overwritten keys of older tokens. Or an exception has stopped another call.
        """
        if self._kept.changing:
            raise tokens.interrupted("KVCache.rollback", self._kept.changing)
        pending = self._pending
        stored = 0 if pending is None or pending._complete else pending._count_stored()
        if pending is not None and stored and not pending._plan.can_be_undone:
            raise _checks.error(
                "KVCache.rollback",
                "with a window, a step of many tokens cannot be undone once a layer has stored it",
                f"one that {stored} of {self.num_layers} layers have stored",
                "Call reset(), and process the text again from its beginning.",
            )
        self._drop_step()

    def _check_finished(self, who: str) -> CacheStep | None:
        """Return the newest step, or None if no layer has stored tokens. Raise if only some have.

        Under torch.compile the result is None: reading the state would compile the forward pass once for each state.
        """
        if self._kept.changing:
            raise tokens.interrupted(who, self._kept.changing)
        if torch.compiler.is_compiling() or self._pending is None:
            return None
        return self._pending if self._pending._is_complete(who) else None

    def _begin(self, who: str) -> None:
        """Mark the cache as changing, until `_kept.changing` is cleared at the end, and drop the newest step."""
        writable.check_elements(who, self.length, "Call it under torch.inference_mode(), as when the cache was built.")
        self._kept.changing.append(who)
        self._drop_step()

    def _drop_step(self) -> None:
        """Mark the newest step as outdated, and clear what its layers have stored, unless all of them have."""
        pending = self._pending
        if not torch.compiler.is_compiling() and pending is not None:
            pending._outdated = True
            if pending._plan.can_be_undone and not pending._complete:
                for store in self._stores:
                    store.clear(pending._plan.slots)
        self._pending = None

    def _full(self, length: int) -> _checks.RopeError:
        must = f"no row may become longer than capacity={self.capacity}"
        return _checks.error("KVCache.step", must, f"{length} tokens", "Build a larger cache, or one with a window.")

    def _count_filled(self) -> int:
        """Return the number of slots that some row may have filled."""
        lengths = read_range(self.length)
        return self._ring.count if lengths is None else min(self._ring.count, lengths[1])

    def _truncate(self, at: Tensor, added: int | Tensor) -> None:
        """Drop the first token at position `at` or later and all tokens stored after it, if the added tokens fit."""
        who = "KVCache.step"
        fix = "To go back, use a cache with capacity. To start a new text in a row, call reset(rows=...)."
        if self.window is not None:
            must = "at must be None in a cache with a window, which has evicted older keys"
            raise _checks.error(who, must, "positions", fix)
        tokens.check_per_row(who, "at", at, self.length)
        tokens.check_positions(who, at)
        places = self._key_positions[:, : max(1, self._count_filled())]
        slot = torch.arange(places.shape[1], device=self.length.device)
        # By order: drop the first token at or after `at`, and every token appended after it at any position.
        first = torch.where(places >= at[:, None], slot, EMPTY).amin(1)
        length = torch.minimum(self.length, first)
        lengths = read_range(length + added)
        if lengths is not None and self.capacity is not None and lengths[1] > self.capacity:
            raise self._full(lengths[1])
        self._begin(who)
        if read_range(length) is not None:  # on other devices this would read the whole cache
            self._clear(length, self.length)
        self.length.copy_(length)
        self.position.copy_(at)
        places.masked_fill_(slot >= length[:, None], EMPTY)
        self._kept.changing.clear()

    def _clear(self, begin: Tensor, end: Tensor) -> None:
        """Clear the slots of each row from begin up to end, int64 `[batch]`: a mask would not hide NaN in them."""
        slots: list[tuple[Tensor | int, Tensor | slice]] = []
        if read_range(begin) is None:  # no shape may depend on a value, so the slots that are kept become the extra one
            row, count = torch.arange(len(begin), device=begin.device)[:, None], self._ring.count
            slot = torch.arange(count, device=begin.device)
            slots.append((row, torch.where((slot >= begin[:, None]) & (slot < end[:, None]), slot, count)))
        else:
            ranges = enumerate(zip(begin.tolist(), end.tolist(), strict=True))
            slots.extend((row, slice(first, last)) for row, (first, last) in ranges if first < last)
        for store in self._stores:
            for some in slots:
                store.clear(some)


def _row_mask(rows: Tensor | Sequence[int], length: Tensor) -> Tensor:
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


def _check_row_range(who: str, rows: Tensor, batch: int, must: str, fix: str) -> None:
    """Raise if a row number is out of range. This is checked only on the CPU, outside torch.compile."""
    if len(rows) and (bounds := read_range(rows)) is not None and (bounds[0] < 0 or bounds[1] >= batch):
        raise _checks.error(who, must, f"rows from {bounds[0]}" if bounds[0] < 0 else f"rows up to {bounds[1]}", fix)
