"""A cache of keys and values in memory of a fixed size: ragged rows, sliding window, attention sinks, shift.

Keys are cached turned, at the position that their token has. Nothing is turned again while tokens are appended, and
everything that changes positions afterwards is a rotation on top, exact because rotations add:

- `shift` moves cached keys by `Rope.shift`.
- Sinks stay where they are, and the query is turned a second time, to where it stands if positions are counted inside
  the cache. The distance is the one that turning the sinks forward would give, without a rounding for each token.
- Self-Extend moves keys into their groups at use.

No shape depends on a value, and nothing is read back from the device, so one compiled forward pass serves every token.

`step` only plans. The cache counts the new tokens when the last layer has stored them, so a forward pass that raises
leaves the cache as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.attention.cache_step import CacheStep as CacheStep
from ropewalk.attention.cache_step import LayerCache as LayerCache
from ropewalk.attention.cache_step import Progress
from ropewalk.rope import Rope
from ropewalk.rotation.api import Rotation

_EMPTY = 2**62  # the position of a slot without a key: after every query, so causality hides it


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
        position: position of the next token of each row, int64 `[batch]`. As length, unless moved by `shift` or `at`.
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
        if (capacity is None) == (window is None) or (window is None and self.sinks):
            raise _checks.error(
                who,
                "either capacity or window must be given, and sinks only with window",
                f"capacity={capacity}, window={window}, sinks={sinks}",
                "capacity keeps every token; window lets old ones go, all but the sinks.",
            )
        if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            must = "dtype must be float16, bfloat16, float32 or float64"
            raise _checks.error(who, must, str(dtype), "Pass that of the model, or of autocast.")
        self.capacity = None if capacity is None else _checks.length(who, "capacity", capacity)
        self.window = None if window is None else _checks.length(who, "window", window)
        self._ring = self.capacity or self.window or 0  # slots after the sinks, used in turn
        self._slots = self.sinks + self._ring
        shape = (batch, self._slots + 1, num_kv_heads, head_dim)  # the last slot takes what is not kept
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(self.num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(self.num_layers)]
        self.length = torch.zeros(batch, dtype=torch.int64, device=device)
        self.position = torch.zeros(batch, dtype=torch.int64, device=device)
        self._key_positions = torch.full(shape[:2], _EMPTY, dtype=torch.int64, device=device)
        self._pending: Progress | None = None  # the newest step's, where it was not made under torch.compile

    def step(self, seq: int, *, attention_mask: Tensor | None = None, at: Tensor | None = None) -> CacheStep:
        """Plan a forward pass of `seq` new tokens for each row: where they are, and what they see.

        Each layer has to append its keys and values once, the last layer last. Only then the cache counts the tokens: a
        step whose forward pass raised before any layer stored something may just be dropped.

        Args:
            seq: new tokens in each row, padding included, at least 1.
            attention_mask: True or non-zero for real tokens; bool or integer `[batch, seq]`, padding anywhere. Padding
                is not kept, and what comes out for it means nothing. None: all tokens are real.
            at: position of the first new token of each row, int64 `[batch]`; right after the last when None. Cached
                tokens at or after it are forgotten at once, as after a rejected draft in speculative decoding. Only
                with capacity: a window has let go of what would be seen again.

        Raises:
            RopeError: a shape or dtype does not fit; at with a window; in the step before, some layers appended and
                others did not (see `rollback`); the cache is full. That is found only on the CPU
                outside torch.compile. Elsewhere nothing waits for the device: tokens beyond capacity are not kept,
                what comes out for them is wrong, and `(cache.length > cache.capacity).any()` tells.
        """
        before = self._finished("KVCache.step")
        real = self._real(seq, attention_mask)
        order = (real.cumsum(1) - 1).clamp(min=0)
        added = real.sum(1)
        if at is not None:
            self._forget(at, added)
        number = self.length[:, None] + order  # of each token, from 0 at the start of its row
        positions = self.position[:, None] + order
        total = self.length + added
        if self.capacity is not None:
            self._check_room(total)
            kept = real & (number < self.capacity)
        else:
            kept = real & ((number < self.sinks) | (number >= total[:, None] - self._ring))
        slot = torch.where(number < self.sinks, number, self.sinks + (number - self.sinks) % self._ring)
        slot = torch.where(kept, slot, self._slots)
        # One token overwrites only what it does not see. More would overwrite what the first of them see: with a
        # window, they are attended beside what was cached before, and written afterwards.
        beside = self.window is not None and seq > 1
        if beside:
            new = positions.masked_fill(~real, _EMPTY)
            key_positions = torch.cat([self._key_positions[:, : self._slots], new], dim=1)
        else:
            key_positions = self._key_positions.scatter(1, slot, positions)[:, : self._slots]
        is_sink = excess = None
        if self.sinks:
            is_sink = torch.arange(self._slots, device=number.device).expand(number.shape[0], -1) < self.sinks
            is_sink = torch.cat([is_sink, number < self.sinks], dim=1) if beside else is_sink
            # How much farther back a query stands when positions are counted inside the cache.
            excess = (number - (self._slots - 1)).clamp(min=0)
        distance = positions[:, :, None] - key_positions[:, None, :]
        mask = distance >= 0
        if self.window is not None:
            in_window = distance < self.window
            mask = mask & (in_window if is_sink is None else in_window | is_sink[:, None])
        mask = mask | ~real[:, :, None]  # padding sees everything, lest nothing at all: nan would spread
        earlier = before.rotations if before is not None and before.moves_on and at is None else ()
        progress = Progress(self.num_layers, overwrites=beside, moves_on=attention_mask is None, earlier=earlier)
        self._drop()
        self._pending = None if torch.compiler.is_compiling() else progress
        return CacheStep(self, positions, key_positions, mask[:, None], slot, beside, excess, is_sink, added, progress)

    def shift(self, rope: Rope | Sequence[Rope | None], delta: int | Tensor) -> None:
        """Move every cached key by `delta` positions, and the next token too, without recomputing anything.

        Rotation only: the attention factor, which the keys have, is not applied again. Each call rounds the keys once.

        Args:
            rope: how the keys were turned; or one for each layer, None where the layer does not rotate.
            delta: how far, in tokens, negative is back: an int, or for each row an int64 tensor `[batch]`. With
                `SelfExtend`, whose groups begin at fixed positions, a multiple of its group, or other tokens share one.

        Raises:
            RopeError: rope or delta is something else.
        """
        self._finished("KVCache.shift")
        ropes = [rope] * self.num_layers if isinstance(rope, Rope) else rope
        if (
            not isinstance(ropes, Sequence)
            or len(ropes) != self.num_layers
            or not all(r is None or isinstance(r, Rope) for r in ropes)
        ):
            raise _checks.error(
                "KVCache.shift",
                f"rope must be a Rope, or one or None for each of {self.num_layers} layers",
                _checks.shown(rope),
                "Pass the rope that turned the keys.",
            )
        if isinstance(delta, Tensor):
            self._check_rows("KVCache.shift", "delta", delta)
            each = delta[:, None].expand(-1, self._slots + 1)
        else:
            _checks.integer("KVCache.shift", "delta", delta, at_least=-(2**31), at_most=2**31)
        precise = torch.float64 if self.keys[0].dtype == torch.float64 else torch.float32
        by = each if isinstance(delta, Tensor) else delta
        rotations: dict[Rope, Rotation] = {}
        for one in ropes:  # all of them before any key is touched
            if one is None or one in rotations:
                continue
            if one.head_dim != self.keys[0].shape[-1]:
                raise _checks.error(
                    "KVCache.shift",
                    f"rope must have the heads of the cache, head_dim={self.keys[0].shape[-1]}",
                    f"head_dim={one.head_dim}",
                    "Pass the rope that turned the keys.",
                )
            rotations[one] = one.shift(by, device=self.keys[0].device, dtype=precise)
        self._drop()
        for keys, one in zip(self.keys, ropes, strict=True):
            if one is not None:
                rotations[one].apply_(keys, layout="bshd")
        moved = self._key_positions + (delta[:, None] if isinstance(delta, Tensor) else delta)
        self._key_positions.copy_(torch.where(self._key_positions == _EMPTY, _EMPTY, moved))
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
            chosen = self._chosen(rows)
            self._finished("KVCache.reset")
        self._drop()
        self.length.masked_fill_(chosen, 0)
        self.position.masked_fill_(chosen, 0)
        self._key_positions.masked_fill_(chosen[:, None], _EMPTY)

    def rollback(self) -> None:
        """Drop a step whose forward pass stopped between layers: the cache is as it was before that step.

        Needed after an exception when some layers have appended and others have not. Otherwise it changes nothing but
        that a step which is still open can no longer be used. Tokens forgotten through `at` stay forgotten.

        Raises:
            RopeError: the step was one of several tokens in a cache with a window, where the layers that have appended
                have overwritten keys of older tokens.
        """
        pending = self._pending
        if pending is not None and pending.overwrites and 0 < pending.stored() < self.num_layers:
            raise _checks.error(
                "KVCache.rollback",
                "with a window, a step of several tokens cannot be undone once a layer has stored it",
                f"one that {pending.stored()} of {self.num_layers} layers have stored",
                "Call reset(), and run the text again from its beginning.",
            )
        self._drop()

    def _finished(self, who: str) -> Progress | None:
        """The newest step, where all layers have stored it, or None where none has; raise if it stopped in between.

        Under torch.compile nothing is known of it: reading it would compile the forward pass once for each state.
        """
        if torch.compiler.is_compiling() or self._pending is None:
            return None
        stored = self._pending.stored()
        if 0 < stored < self.num_layers:
            raise _checks.error(
                who,
                "every layer must have appended in the step before",
                f"{stored} of {self.num_layers} layers",
                "Pass step.layer(i) to every layer, num_layers in all. After an exception, call rollback() first.",
            )
        return self._pending if stored else None

    def _drop(self) -> None:
        """From now on the newest step is outdated."""
        if not torch.compiler.is_compiling() and self._pending is not None:
            self._pending.outdated = True
        self._pending = None

    def _real(self, seq: int, attention_mask: Tensor | None) -> Tensor:
        shape = (self.length.shape[0], seq)
        if not isinstance(seq, torch.SymInt):
            _checks.integer("KVCache.step", "seq", seq, at_least=1)
        if attention_mask is None:
            return torch.ones(shape, dtype=torch.bool, device=self.length.device)
        if (
            not isinstance(attention_mask, Tensor)
            or attention_mask.shape != shape
            or attention_mask.is_floating_point()
        ):
            raise _checks.error(
                "KVCache.step",
                f"attention_mask must be a bool or integer tensor [batch, seq] = {list(shape)}",
                _checks.described(attention_mask),
                "Pass which of the new tokens are real, not the additive mask that attention gets.",
            )
        return attention_mask != 0

    def _forget(self, at: Tensor, added: Tensor) -> None:
        """Drop cached tokens at or after `at`, where the next ones go; unless there is no room for those."""
        if self.window is not None:
            raise _checks.error(
                "KVCache.step",
                "at must be None in a cache with a window, which has let go of older keys",
                "positions",
                "To go back, use a cache with capacity. To begin another text in a row, call reset(rows=...).",
            )
        self._check_rows("KVCache.step", "at", at)
        dropped = (self._key_positions[:, : self._slots] >= at[:, None]) & (
            self._key_positions[:, : self._slots] != _EMPTY
        )
        self._check_room(self.length - dropped.sum(1) + added)
        self._key_positions[:, : self._slots].masked_fill_(dropped, _EMPTY)
        self.length.sub_(dropped.sum(1))
        self.position.copy_(at)

    def _chosen(self, rows: Tensor | Sequence[int]) -> Tensor:
        """bool `[batch]`: the rows that `reset` is given."""
        who, batch = "KVCache.reset", self.length.shape[0]
        must = f"rows must be row numbers from 0 to {batch - 1}, or a bool tensor [batch] = [{batch}]"
        fix = "Pass e.g. [0], or cache.length == 7."
        if isinstance(rows, list | tuple):
            for row in rows:
                _checks.integer(who, "each of rows", row, at_least=0, at_most=batch - 1)
            rows = torch.tensor(rows, dtype=torch.int64, device=self.length.device)
        if not isinstance(rows, Tensor):
            raise _checks.error(who, must, _checks.shown(rows), fix)
        if rows.dtype == torch.bool and rows.shape == (batch,):
            return rows.to(self.length.device)
        if rows.dtype not in (torch.int32, torch.int64) or rows.ndim != 1:
            raise _checks.error(who, must, _checks.described(rows), fix)
        if rows.is_cpu and not torch.compiler.is_compiling() and len(rows):
            first, last = int(rows.min()), int(rows.max())
            if first < 0 or last >= batch:
                raise _checks.error(who, must, f"rows from {first}" if first < 0 else f"rows up to {last}", fix)
        return torch.zeros_like(self.length, dtype=torch.bool).index_fill_(0, rows.to(self.length), True)

    def _check_rows(self, who: str, name: str, value: Tensor) -> None:
        if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.shape != self.length.shape:
            must = f"{name} must be an int64 tensor [batch] = {list(self.length.shape)}"
            raise _checks.error(who, must, _checks.described(value), "Pass one number for each row.")

    def _check_room(self, total: Tensor) -> None:
        if torch.compiler.is_compiling() or total.device.type != "cpu":
            return
        longest = int(total.max())
        if self.capacity is not None and longest > self.capacity:
            raise _checks.error(
                "KVCache.step",
                f"no row may become longer than capacity={self.capacity}",
                f"{longest} tokens",
                "Build a larger cache, or one with a window.",
            )
