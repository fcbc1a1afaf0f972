"""A cache of keys and values in memory of a fixed size: ragged rows, sliding window, attention sinks, shift.

Keys are cached turned, at the position that their token has. Nothing is turned again while tokens are appended, and
everything that changes positions afterwards is a rotation on top, exact because rotations add:

- `shift` moves cached keys by `Rope.shift`.
- Sinks stay where they are, and the query is turned a second time, to where it stands if positions are counted inside
  the cache. The distance is the one that turning the sinks forward would give, without a rounding for each token.
- Self-Extend moves keys into their groups at use.

No shape depends on a value, and nothing is read back from the device, so one compiled forward pass serves every token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.attention import TwoPass
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
        dtype: of keys and values.
        device: where they are.

    Attributes:
        length: tokens so far in each row, int64 `[batch]`.
        position: position of the next token of each row, int64 `[batch]`. As length, unless moved by `shift` or `at`.

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
            raise _checks.error(who, must, str(dtype), "Pass that of the model.")
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

    def step(self, seq: int, *, attention_mask: Tensor | None = None, at: Tensor | None = None) -> CacheStep:
        """Take in `seq` new tokens for each row: where they are, and what they see. Once for each forward pass.

        The cache counts the tokens from here on; each layer then has to append its keys and values once.

        Args:
            seq: new tokens in each row, padding included, at least 1.
            attention_mask: True or non-zero for real tokens; bool or integer `[batch, seq]`, padding anywhere. Padding
                is not kept, and what comes out for it means nothing. None: all tokens are real.
            at: position of the first new token of each row, int64 `[batch]`; right after the last when None. Cached
                tokens at or after it are forgotten, as after a rejected draft in speculative decoding. Only with
                capacity: a window has let go of what would be seen again.

        Raises:
            RopeError: a shape or dtype does not fit; at with a window; the cache is full. That is found only on the CPU
                outside torch.compile. Elsewhere nothing waits for the device: tokens beyond capacity are not kept,
                what comes out for them is wrong, and `(cache.length > cache.capacity).any()` tells.
        """
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
        is_sink = torch.arange(self._slots, device=number.device).expand(number.shape[0], -1) < self.sinks
        if beside:
            new = positions.masked_fill(~real, _EMPTY)
            key_positions = torch.cat([self._key_positions[:, : self._slots], new], dim=1)
            is_sink = torch.cat([is_sink, number < self.sinks], dim=1)
        self._key_positions.scatter_(1, slot, positions)
        if not beside:
            key_positions = self._key_positions[:, : self._slots].clone()
        distance = positions[:, :, None] - key_positions[:, None, :]
        mask = distance >= 0
        if self.window is not None:
            mask = mask & ((distance < self.window) | is_sink[:, None])
        mask = mask | ~real[:, :, None]  # padding sees everything, lest nothing at all: nan would spread
        # How much farther back a query stands when positions are counted inside the cache.
        excess = (number - (self._slots - 1)).clamp(min=0)
        self.length.copy_(total)
        self.position.add_(added)
        return CacheStep(self, positions, key_positions, mask[:, None], slot, beside, excess, is_sink[:, None, None])

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
        for keys, one in zip(self.keys, ropes, strict=True):
            if one is not None:
                rotations[one].apply_(keys, layout="bshd")
        moved = self._key_positions + (delta[:, None] if isinstance(delta, Tensor) else delta)
        self._key_positions.copy_(torch.where(self._key_positions == _EMPTY, _EMPTY, moved))
        self.position.add_(delta)

    def reset(self) -> None:
        """Forget every token. Memory stays."""
        self.length.zero_()
        self.position.zero_()
        self._key_positions.fill_(_EMPTY)

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
                _described(attention_mask),
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
                "Use a cache with capacity to go back.",
            )
        self._check_rows("KVCache.step", "at", at)
        dropped = (self._key_positions[:, : self._slots] >= at[:, None]) & (
            self._key_positions[:, : self._slots] != _EMPTY
        )
        self._check_room(self.length - dropped.sum(1) + added)
        self._key_positions[:, : self._slots].masked_fill_(dropped, _EMPTY)
        self.length.sub_(dropped.sum(1))
        self.position.copy_(at)

    def _check_rows(self, who: str, name: str, value: Tensor) -> None:
        if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.shape != self.length.shape:
            must = f"{name} must be an int64 tensor [batch] = {list(self.length.shape)}"
            raise _checks.error(who, must, _described(value), "Pass one number for each row.")

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


class CacheStep:
    """One forward pass with a cache: where its tokens are and which keys they see. Made by `KVCache.step`.

    Attributes:
        positions: of the new tokens, int64 `[batch, seq]`. Padding has that of the token before it.
        key_positions: of all keys, int64 `[batch, keys]`, in the order of the cache's slots; 2⁶² where there is none.
        mask: bool `[batch, 1, seq, keys]`, True for what is seen. Padding sees everything.
    """

    def __init__(
        self,
        cache: KVCache,
        positions: Tensor,
        key_positions: Tensor,
        mask: Tensor,
        slot: Tensor,
        beside: bool,
        excess: Tensor,
        is_sink: Tensor,
    ) -> None:
        self.positions, self.key_positions, self.mask = positions, key_positions, mask
        self._cache, self._slot, self._beside, self._excess, self._is_sink = cache, slot, beside, excess, is_sink
        self._row = torch.arange(slot.shape[0], device=slot.device)[:, None]

    def rotation(self, rope: Rope, *, dtype: torch.dtype | None = None) -> Rotation | TwoPass:
        """`rope.at(positions)`; in a cache with sinks, with the distance to them counted inside the cache.

        A sink at position j is seen by the n-th token of its row (from 0) at distance min(n, sinks + window − 1) − j,
        as StreamingLLM has it: no distance is ever longer than the cache. For true distances use `rope.at(positions)`.
        """
        near = rope.at(self.positions, dtype=dtype)
        if not self._cache.sinks:
            return near
        return TwoPass(near, rope.at(self.positions - self._excess, dtype=dtype), None, self._is_sink)

    def layer(self, index: int) -> LayerCache:
        """The part of one layer, 0 ≤ index < num_layers: what `RotaryAttention` takes as cache.

        Raises:
            RopeError: there is no such layer.
        """
        last = self._cache.num_layers - 1
        return LayerCache(self, _checks.integer("CacheStep.layer", "index", index, at_least=0, at_most=last))


class LayerCache:
    """One layer's keys and values in one forward pass. Made by `CacheStep.layer`."""

    def __init__(self, step: CacheStep, index: int) -> None:
        self.step = step
        self._keys, self._values = step._cache.keys[index], step._cache.values[index]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of the new tokens, once; all that may be seen comes back.

        Args:
            k: keys, turned, `[batch, seq, kv_heads, head_dim]`.
            v: values of the same shape.

        Returns:
            Keys and values `[batch, keys, kv_heads, head_dim]`, in the order of `CacheStep.key_positions`: views of the
            cache, or new tensors.

        Raises:
            RopeError: shape, dtype or device is not that of the cache and of this step, or a gradient is wanted.
        """
        batch, slots, heads, head_dim = self._keys.shape
        wanted = (batch, self.step.positions.shape[1], heads, head_dim)
        for name, new in (("k", k), ("v", v)):
            if new.shape != wanted or new.dtype != self._keys.dtype or new.device != self._keys.device:
                raise _checks.error(
                    "KVCache",
                    f"{name} must have shape {wanted} in {self._keys.dtype} on {self._keys.device}",
                    f"{tuple(new.shape)} in {new.dtype} on {new.device}",
                    "Build the cache for this model and batch, and call step with the length of these tokens.",
                )
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise _checks.error(
                "KVCache",
                "gradients cannot pass through a cache",
                "keys or values that require one",
                "Run under torch.no_grad() or torch.inference_mode().",
            )
        kept = self._keys[:, : slots - 1], self._values[:, : slots - 1]
        if self.step._beside:
            kept = torch.cat([kept[0], k], dim=1), torch.cat([kept[1], v], dim=1)
        self._keys.index_put_((self.step._row, self.step._slot), k)
        self._values.index_put_((self.step._row, self.step._slot), v)
        return kept


def _described(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else _checks.shown(value)
