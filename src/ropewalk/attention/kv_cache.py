"""A cache of keys and values in memory of a fixed size: ragged rows, sliding window, attention sinks, shift.

Keys are cached turned, at the position that their token has. Nothing is turned again while tokens are appended, and
everything that changes positions afterwards is a rotation on top, exact because rotations add:

- `shift` moves cached keys by `Rope.shift`.
- Sinks stay where they are, and the query is turned a second time, to where it stands if positions are counted inside
  the cache. The distance is the one that turning the sinks forward would give, without a rounding for each token.
- Self-Extend moves keys into their groups at use.

Who sees whom goes by the order of tokens (`slots`), and rotation by their position: two numbers.

No shape depends on a value, and nothing is read back from the device, so one compiled forward pass serves every token.
On the CPU lengths are read outside of torch.compile, and attention leaves out the slots that no row has filled.

`step` only plans. The cache counts the new tokens when the last layer has stored them, so a forward pass that raises
leaves the cache as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.attention import cache_checks
from ropewalk.attention.cache_step import CacheStep, Progress, one_of_each
from ropewalk.attention.slots import EMPTY, Slots, clear
from ropewalk.rope import Rope
from ropewalk.rotation.api import Rotation


class KVCache:
    """Keys and values of the tokens so far, for all layers of one kind.

    In each forward pass, `step` says where the new tokens are and what they see; every layer takes its part of it:

        step = cache.step(tokens.shape[1])
        rotation = step.rotation(rope)
        for i, layer in enumerate(layers):
            x = layer(x, rotation, cache=step.layer(i))

    For inference: no gradients pass through it. Where layers differ (Gemma: some with a window), use one cache for each
    kind.

    Args:
        num_layers: layers that share it, each with keys and values of its own.
        batch: rows; each has its own length.
        num_kv_heads: heads of keys and values.
        head_dim: channels of a head.
        capacity: tokens in each row, all of which are kept.
        window: instead of capacity: a token sees itself and the window − 1 before it, and older ones are let go.
        sinks: with window: the first tokens of a row, which are kept and seen for ever, as in StreamingLLM (Xiao et
            al., https://arxiv.org/abs/2309.17453). `CacheStep.rotation` counts positions inside the cache.
        dtype: of keys and values: that of the model, or of autocast where the model runs under it.
        device: where they are.

    Attributes:
        length: tokens in each row that all layers have stored, int64 `[batch]`.
        position: position of the next token of each row, int64 `[batch]`. As length, unless moved by `shift`, `at` or
            `positions`.
        keys, values: of each layer, `[batch, slots + 1, num_kv_heads, head_dim]`.

    Raises:
        RopeError: a number is impossible; capacity and window are both given, or neither.

    Memory:
        2 · num_layers · batch · (capacity + 1) · num_kv_heads · head_dim numbers; sinks + window for capacity where
        there is a window. The one slot more takes what is not kept.

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
        self.num_layers = _checks.integer(who, "num_layers", num_layers, at_least=1)
        batch = _checks.integer(who, "batch", batch, at_least=1)
        num_kv_heads = _checks.integer(who, "num_kv_heads", num_kv_heads, at_least=1)
        head_dim = _checks.integer(who, "head_dim", head_dim, at_least=1, at_most=_checks.MAX_HEAD_DIM)
        self.sinks = _checks.integer(who, "sinks", sinks, at_least=0)
        cache_checks.size(who, capacity, window, self.sinks)
        cache_checks.dtype(who, dtype)
        self.capacity = None if capacity is None else _checks.length(who, "capacity", capacity)
        self.window = None if window is None else _checks.length(who, "window", window)
        self._slots = Slots(self.capacity, self.window, self.sinks)
        shape = (batch, self._slots.count + 1, num_kv_heads, head_dim)  # the last slot takes what is not kept
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(self.num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(self.num_layers)]
        self.length = torch.zeros(batch, dtype=torch.int64, device=device)
        self.position = torch.zeros(batch, dtype=torch.int64, device=device)
        self._key_positions = torch.full(shape[:2], EMPTY, dtype=torch.int64, device=device)
        self._pending: Progress | None = None  # the newest step's, where it was not made under torch.compile

    def step(
        self,
        seq: int,
        *,
        attention_mask: Tensor | None = None,
        at: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> CacheStep:
        """Plan a forward pass of `seq` new tokens for each row: where they are, and what they see.

        Each layer has to append its keys and values once, the last layer last. Only then the cache counts the tokens: a
        step whose forward pass raised before any layer stored something may just be dropped.

        Args:
            seq: new tokens in each row, padding included, at least 1.
            attention_mask: True or non-zero for real tokens; bool or integer `[batch, seq]`, padding anywhere. Padding
                is not kept, and what comes out for it means nothing. None: all tokens are real.
            at: where each row goes on, a position, int64 `[batch]`; right after its last token when None. If a cached
                token is at or after it, the first such token and all that came later are forgotten at once, as after a
                rejected draft in speculative decoding. Only with capacity: a window has evicted what would be seen
                again.
            positions: where the new tokens are, int64 `[batch, seq]`, or `[seq]` for all rows, or `[axes, batch, seq]`
                for a rope with `axes`: any integers in ±2³¹, which tokens may share (the patches of an image) and which
                need not grow. None: consecutive, from `at` or `KVCache.position`, and the same on every axis. They
                decide rotation alone. Who sees whom, windows and slots go by the order of tokens. Afterwards
                `KVCache.position` is the largest of those of real tokens + 1, on whatever axis. Not with sinks, whose
                distances are counted in tokens. With as many rows as axes, `[axes, seq]` is taken for `[batch, seq]`:
                pass three dimensions. Floats go to `Rope.at`, in place of `CacheStep.rotation`.

        Raises:
            RopeError: a shape or dtype does not fit; at with a window, or positions with sinks; in the step before,
                some layers appended and others did not (see `rollback`); the cache is full. That is found only on the
                CPU outside torch.compile. Elsewhere nothing waits for the device: tokens beyond capacity are not kept,
                what comes out for them is wrong, and `(cache.length > cache.capacity).any()` tells.
        """
        before = self._finished("KVCache.step")
        real = cache_checks.real(seq, attention_mask, self.length)
        given = None if positions is None else cache_checks.positions(positions, real, self.sinks)
        after = (real.cumsum(1) - 1).clamp(min=0)  # each new token after the first one of this step
        added = real.sum(1)
        if at is not None:
            self._forget(at, added)
        order, total = self.length[:, None] + after, self.length + added
        # One token overwrites only what it does not see. More would overwrite what the first of them see: with a
        # window, they are attended beside what was cached before, and written afterwards.
        beside = self._slots.evicts and seq > 1
        held = cache_checks.known(self.length if beside else total)
        cache_checks.room(self.capacity, held)
        if given is None:
            given, following = self.position[:, None] + after, self.position + added
            place = given
        else:
            place = one_of_each(given)
            largest = place.masked_fill(~real, -EMPTY).amax(1)
            following = torch.where(added > 0, largest + 1, self.position)
        slot = self._slots.of(order, real, total)
        count, key_order = self._slots.count, None
        if beside:
            key_order = torch.cat([self._slots.order(self.length), order.masked_fill(~real, EMPTY)], dim=1)
            key_positions = torch.cat([self._key_positions[:, :count], place.masked_fill(~real, EMPTY)], dim=1)
        else:
            key_positions = self._key_positions.scatter(1, slot, place)[:, :count]
        moved_on = before is not None and before.moves_on and at is None and positions is None
        progress = Progress(
            self.num_layers,
            overwrites=beside,
            moves_on=attention_mask is None or (cache_checks.known(added) or (0, 0))[0] > 0,
            earlier=before.rotations if before is not None and moved_on else (),
        )
        self._drop()
        self._pending = None if torch.compiler.is_compiling() else progress
        return CacheStep(
            self,
            positions=given,
            order=order,
            key_positions=key_positions,
            key_order=key_order,  # None: worked out for those who ask, which spares a decode step the time
            padding=None if attention_mask is None else ~real,
            causal=attention_mask is None and self._slots.causal(seq, held, beside=beside),
            filled=self._slots.filled(held, beside=beside),
            slot=slot,
            beside=beside,
            following=(total, following),
            progress=progress,
        )

    def shift(self, rope: Rope | Sequence[Rope | None], delta: int | Tensor) -> None:
        """Move every cached key by `delta` positions, and the next token too, without recomputing anything.

        Rotation only: the attention factor, which the keys have, is not applied again. Each call rounds the keys once.

        Args:
            rope: how the keys were turned; or one for each layer, None where the layer does not rotate. With `axes`,
                keys move by delta along each of them.
            delta: how far, in tokens, negative is back: an int, or for each row an int64 tensor `[batch]`. With
                `SelfExtend`, whose groups begin at fixed positions, a multiple of its group, or other tokens share one.

        Raises:
            RopeError: rope or delta is something else.
        """
        self._finished("KVCache.shift")
        ropes = cache_checks.ropes(rope, self.num_layers, self.keys[0].shape[-1])
        if isinstance(delta, Tensor):
            cache_checks.number_for_each_row("KVCache.shift", "delta", delta, self.length)
            each = delta[:, None].expand(-1, self._slots.count + 1)
        else:
            _checks.integer("KVCache.shift", "delta", delta, at_least=-(2**31), at_most=2**31)
        precise = torch.float64 if self.keys[0].dtype == torch.float64 else torch.float32
        rotations: dict[Rope, Rotation] = {}
        for one in ropes:  # all of them before any key is touched
            if one is not None and one not in rotations:
                axes = None if one.axes is None else one.axes.count
                if isinstance(delta, Tensor):
                    by: int | tuple[int, ...] | Tensor = each if axes is None else each.expand(axes, -1, -1)
                else:
                    by = delta if axes is None else (delta,) * axes
                rotations[one] = one.shift(by, device=self.keys[0].device, dtype=precise)
        self._drop()
        for keys, one in zip(self.keys, ropes, strict=True):
            if one is not None:
                rotations[one].apply_(keys, layout="bshd")
        moved = self._key_positions + (delta[:, None] if isinstance(delta, Tensor) else delta)
        self._key_positions.copy_(torch.where(self._key_positions == EMPTY, EMPTY, moved))
        self.position.add_(delta)

    def reset(self, rows: Tensor | Sequence[int] | None = None) -> None:
        """Forget every token of the given rows, whose next token is at 0 again; other rows go on. Memory stays.

        This is how a row takes its next text in continuous batching, in both kinds of cache.

        Args:
            rows: row numbers, a sequence of ints or an int32 or int64 tensor `[n]`; or a bool tensor `[batch]`, True
                for the rows to forget. All rows when None.

        Raises:
            RopeError: rows is none of these, or a row is not there (in a tensor found only on the CPU outside
                torch.compile); some rows are to be kept, and the step before stopped between layers (see `rollback`).
        """
        if rows is None:
            chosen = torch.ones_like(self.length, dtype=torch.bool)
        else:
            chosen = cache_checks.chosen(rows, self.length)
            self._finished("KVCache.reset")
        stopped = self._pending is None or 0 < self._pending.stored() < self.num_layers  # nobody knows how far it came
        end = torch.full_like(self.length, self._slots.count) if stopped else self.length
        clear([*self.keys, *self.values], self.length.new_zeros(()).expand_as(chosen), end * chosen)
        self._drop()
        self.length.masked_fill_(chosen, 0)
        self.position.masked_fill_(chosen, 0)
        self._key_positions.masked_fill_(chosen[:, None], EMPTY)

    def reorder(self, rows: Tensor) -> None:
        """Let each row go on from what another one holds: row i takes the tokens of row `rows[i]`.

        For beam search, after it has chosen which beams go on: rows may come several times, and others not at all.

        Args:
            rows: int64 `[batch]`, row numbers on the device of the cache.

        Raises:
            RopeError: rows is something else, or a row is not there (found only on the CPU outside torch.compile); the
                step before stopped between layers (see `rollback`).
        """
        self._finished("KVCache.reorder")
        cache_checks.sources(rows, self.length)
        filled = self._slots.filled(cache_checks.known(self.length), beside=False)
        self._drop()
        for tensor in (*self.keys, *self.values):
            tensor[:, filled] = tensor[:, filled].index_select(0, rows)
        for tensor in (self._key_positions, self.length, self.position):
            tensor.copy_(tensor.index_select(0, rows))

    def rollback(self) -> None:
        """Drop a step whose forward pass stopped between layers: the cache is as it was before that step.

        Needed after an exception when some layers have appended and others have not. Otherwise it changes nothing but
        that a step which is still open can no longer be used. Tokens forgotten through `at` stay forgotten.

        Raises:
            RopeError: the step was one of several tokens in a cache with a window, where the layers that have appended
                have overwritten keys of older tokens.
        """
        pending = self._pending
        stopped = pending is not None and 0 < pending.stored() < self.num_layers
        if pending is not None and pending.overwrites and stopped:
            raise _checks.error(
                "KVCache.rollback",
                "with a window, a step of several tokens cannot be undone once a layer has stored it",
                f"one that {pending.stored()} of {self.num_layers} layers have stored",
                "Call reset(), and run the text again from its beginning.",
            )
        if stopped and self.window is None:
            clear([*self.keys, *self.values], self.length, torch.full_like(self.length, self._slots.count))
        self._drop()

    def _finished(self, who: str) -> Progress | None:
        """The newest step, where all layers have stored it, or None where none has; raise if it stopped in between.

        Under torch.compile nothing is known of it: reading it would compile the forward pass once for each state.
        """
        if torch.compiler.is_compiling() or self._pending is None:
            return None
        self._pending.check_whole(who)
        return self._pending if self._pending.stored() else None

    def _drop(self) -> None:
        """From now on the newest step is outdated."""
        if not torch.compiler.is_compiling() and self._pending is not None:
            self._pending.outdated = True
        self._pending = None

    def _forget(self, at: Tensor, added: Tensor) -> None:
        """Go back to `at`, unless there is no room for the tokens that are added there."""
        if self.window is not None:
            raise _checks.error(
                "KVCache.step",
                "at must be None in a cache with a window, which has let go of older keys",
                "positions",
                "To go back, use a cache with capacity. To begin another text in a row, call reset(rows=...).",
            )
        cache_checks.number_for_each_row("KVCache.step", "at", at, self.length)
        count = self._slots.count
        slot = torch.arange(count, device=self.length.device)
        # By order: the first token at or after `at` goes, and whatever came later goes with it, wherever it is.
        first = torch.where(self._key_positions[:, :count] >= at[:, None], slot, EMPTY).amin(1)
        length = torch.minimum(self.length, first)
        cache_checks.room(self.capacity, cache_checks.known(length + added))
        if cache_checks.known(length) is not None:  # elsewhere it would read the whole cache
            clear([*self.keys, *self.values], length, self.length)
        self.length.copy_(length)
        self.position.copy_(at)
        self._key_positions[:, :count].masked_fill_(slot >= length[:, None], EMPTY)
