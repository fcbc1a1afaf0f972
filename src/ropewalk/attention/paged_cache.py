"""A cache of keys and values in blocks, for requests that come and go: block tables, prefix sharing, shift.

A row takes a block when its tokens need one, so memory goes by the tokens that are there. Keys are kept rotated, as in
`KVCache`. Rows with the same beginning may hold the same blocks: who is about to write to such a block, or to move the
keys in it, takes a copy first.

Everything but keys and values is planned on the host, in plain Python and tensors of the CPU: which block is whose,
lengths and positions. Nothing waits for a GPU as long as what `step` is given is on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.attention import cache_checks, paged_checks, paged_flex, paged_shift
from ropewalk.attention.cache_step import Progress, one_of_each
from ropewalk.attention.paged_rows import Plan, Row, Rows
from ropewalk.attention.paged_step import PagedStep, Scratch
from ropewalk.attention.slots import EMPTY
from ropewalk.rope import Rope

_NAME = "PagedKVCache"


class PagedKVCache:
    """Keys and values of many requests in blocks of a fixed number of tokens, for all layers of one kind.

    Each request is a row, which `admit` begins and `free` ends while others go on. In each forward pass, `step` says
    which rows take part, where their new tokens are and what they see; every layer takes its part of it:

        row = cache.admit()
        step = cache.step(tokens.shape[1], rows=[row])
        rotation = step.rotation(rope)
        for i, layer in enumerate(layers):
            x = layer(x, rotation, cache=step.layer(i))

    For inference: no gradients pass through it. Where layers differ (Gemma: some with a window), use one cache for each
    kind.

    Args:
        num_layers: layers that share it, each with keys and values of its own.
        num_kv_heads: heads of keys and values.
        head_dim: channels of a head.
        blocks: how many there are for all rows together.
        block_size: tokens in a block.
        layout: in memory: "NHD", the tokens of a block before the heads, or "HND". `keys` and `values` have the same
            axes with both.
        window: a token sees itself and the window − 1 before it; a block that no later token can see is given back.
            Attention sinks need a `KVCache`.
        flex: whether layers attend by FlexAttention over the blocks where they lie, under torch.compile. Eager layers
            gather the blocks of their rows, and so do all without it. Needs "NHD".
        dtype: of keys and values: that of the model, or of autocast where the model runs under it.
        device: where they are.

    Attributes:
        keys, values: of each layer, `[blocks, block_size, num_kv_heads, head_dim]`.

    Raises:
        RopeError: a number is impossible, or flex comes with "HND".

    Memory:
        2 · num_layers · blocks · block_size · num_kv_heads · head_dim numbers; up to twice what a layer gathers.

    Source:
        PagedAttention (Kwon et al., https://arxiv.org/abs/2309.06180).

    Example:
        >>> cache = PagedKVCache(num_layers=1, num_kv_heads=1, head_dim=4, blocks=8, block_size=2)
        >>> first, second = cache.admit(), cache.admit()
        >>> step = cache.step(3, attention_mask=torch.tensor([[1, 1, 1], [1, 0, 0]]))
        >>> step.block_table
        tensor([[0, 1],
                [2, 2]], dtype=torch.int32)
        >>> step.slot_mapping
        tensor([ 0,  1,  2,  4, -1, -1])
        >>> k = v = torch.ones(2, 3, 1, 4)
        >>> _ = step.layer(0).append(k, v)
        >>> cache.length
        tensor([3, 1])
        >>> cache.free(first)
        >>> cache.free_blocks
        7
    """

    sinks = 0  # as `KVCache.sinks`, which a step asks for

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        blocks: int,
        block_size: int = 16,
        layout: str = "NHD",
        window: int | None = None,
        flex: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        num_layers = _checks.integer(_NAME, "num_layers", num_layers, at_least=1)
        num_kv_heads = _checks.integer(_NAME, "num_kv_heads", num_kv_heads, at_least=1)
        head_dim = _checks.integer(_NAME, "head_dim", head_dim, at_least=1, at_most=_checks.MAX_HEAD_DIM)
        # Block numbers are int32 in the tables of attention kernels.
        blocks = _checks.integer(_NAME, "blocks", blocks, at_least=1, at_most=2**31 - 1)
        block_size = _checks.length(_NAME, "block_size", block_size)
        _checks.choice(_NAME, "layout", layout, ("NHD", "HND"))
        cache_checks.dtype(_NAME, dtype)
        inner = (block_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, block_size)
        shape = (blocks, *inner, head_dim)
        pools = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * num_layers)]
        pools = pools if layout == "NHD" else [pool.transpose(1, 2) for pool in pools]
        self._begin(_NAME, pools[:num_layers], pools[num_layers:], window, flex)

    @classmethod
    def from_pools(
        cls, k_cache: Sequence[Tensor], v_cache: Sequence[Tensor], *, window: int | None = None, flex: bool = False
    ) -> PagedKVCache:
        """A cache in memory that somebody else has allocated, such as an engine. What it holds is overwritten.

        Args:
            k_cache, v_cache: of each layer, `[blocks, block_size, num_kv_heads, head_dim]`, float16, bfloat16, float32
                or float64, with any strides but that of the channels, which is 1. Keys and values may be parts of one
                tensor; a pool with heads before tokens (HND) is transposed by the caller.
            window, flex: as in `PagedKVCache`.

        Raises:
            RopeError: the pools are no such tensors or differ in more than their strides; window is no such number.
        """
        who = f"{_NAME}.from_pools"
        paged_checks.pools(who, k_cache, v_cache)
        cache = cls.__new__(cls)
        cache._begin(who, list(k_cache), list(v_cache), window, flex)
        return cache

    def _begin(self, who: str, keys: list[Tensor], values: list[Tensor], window: int | None, flex: bool) -> None:
        self.keys, self.values, self.num_layers = keys, values, len(keys)
        self.window = None if window is None else _checks.length(who, "window", window)
        self.flex = paged_flex.checked(who, flex, [*keys, *values])
        self.block_size = keys[0].shape[1]
        self._rows = Rows([*keys, *values], self.window)
        self._gathered_keys, self._gathered_values = Scratch(), Scratch()

    @property
    def rows(self) -> list[int]:
        """The rows that are there, in the order in which they began: those that are meant where none are named."""
        return list(self._rows.by_number)

    @property
    def length(self) -> Tensor:
        """Tokens in each of `rows` that all layers have stored, int64 `[rows]`, on the CPU."""
        return torch.tensor([row.length for row in self._rows.settled()], dtype=torch.int64)

    @property
    def position(self) -> Tensor:
        """Position of the next token of each of `rows`, int64 `[rows]`, on the CPU.

        As length, unless moved by `shift`, or by `at` or `positions` of a step.
        """
        return torch.tensor([row.position for row in self._rows.settled()], dtype=torch.int64)

    @property
    def free_blocks(self) -> int:
        """Blocks that no row holds, and that no step has taken whose forward pass is still to come."""
        self._rows.settle()
        return self._rows.blocks.free

    def admit(self) -> int:
        """Begin an empty row, and return its number, which no other row ever gets. It takes blocks with its tokens."""
        return self._rows.add(Row())

    def fork(self, row: int, length: int | None = None) -> int:
        """Begin a row with the tokens of another one, and return its number. Nothing is copied yet.

        Both rows hold the same blocks. Where the last of them is not full, whoever writes to it first takes a copy.

        Args:
            row: the other one, which goes on as it was.
            length: tokens that the new row begins with; all of the other one when None. The next position is that of
                the other row, or, with a length, the largest of these tokens' positions + 1.

        Raises:
            RopeError: there is no such row, or it has fewer tokens; length comes with a window, which has let go of
                older keys; the step before stopped between layers (see `rollback`).
        """
        who = f"{_NAME}.fork"
        (other,) = self._rows.of(self._rows.chosen(who, [row]))
        self._rows.finished(who)
        blocks, kept, position = list(other.blocks), other.length, other.position
        if length is not None:
            paged_checks.no_window(who, "length", self.window, "Fork the whole row.")
            kept = _checks.integer(who, "length", length, at_least=0, at_most=other.length)
            blocks = blocks[: self._rows.spanned(kept)]
            position = max(self._rows.places(other)[:kept].tolist(), default=-1) + 1
        self._rows.drop()
        self._rows.blocks.hold(blocks)
        return self._rows.add(Row(blocks, other.skipped, kept, position))

    def free(self, rows: int | Sequence[int] | Tensor) -> None:
        """End rows: their blocks are free but for those that others hold, and their numbers are not used again.

        Args:
            rows: one number; or several, a sequence of ints or an integer tensor `[n]`.

        Raises:
            RopeError: there is no such row; the step before stopped between layers (see `rollback`).
        """
        chosen = self._rows.chosen(f"{_NAME}.free", rows)
        self._rows.finished(f"{_NAME}.free")
        self._rows.drop()
        for number in chosen:
            self._rows.blocks.release(self._rows.by_number.pop(number).blocks)

    def reset(self, rows: Sequence[int] | Tensor | None = None) -> None:
        """Forget every token of the given rows, whose blocks are free but for those that others hold.

        The rows stay, and their next token is at 0.

        Args:
            rows: row numbers, a sequence of ints or an integer tensor `[n]`; all rows when None.

        Raises:
            RopeError: there is no such row; some rows are to be kept, and the step before stopped between layers (see
                `rollback`).
        """
        who = f"{_NAME}.reset"
        chosen = self._rows.chosen(who, rows)
        if rows is not None:
            self._rows.finished(who)
        self._rows.settle()
        self._rows.drop()
        for number in chosen:
            self._rows.blocks.release(self._rows.by_number[number].blocks)
            self._rows.by_number[number] = Row()

    def step(
        self,
        seq: int,
        *,
        rows: Sequence[int] | Tensor | None = None,
        attention_mask: Tensor | None = None,
        at: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> PagedStep:
        """Plan a forward pass of `seq` new tokens for each of some rows: where they are, and what they see.

        Each layer has to append its keys and values once, the last layer last. Only then the cache counts the tokens,
        and the blocks that this step takes become the rows' own: a step whose forward pass raised before any layer
        stored something may just be dropped.

        Args:
            seq: new tokens in each row, padding included, at least 1.
            rows: the rows that take part, in the order of the batch: a sequence of ints or an integer tensor `[batch]`;
                all of `rows` when None. The others stay as they are.
            attention_mask, positions: as in `KVCache.step`.
            at: as in `KVCache.step`; not with a window, which has given back what would be seen again.

        Raises:
            RopeError: a row is not there, a shape or dtype does not fit, or at comes with a window; in the step before,
                some layers appended and others did not (see `rollback`); there are not enough free blocks, on any
                device. Nothing has changed then.
        """
        who = f"{_NAME}.step"
        numbers = self._rows.chosen(who, rows)
        if not numbers:
            raise _checks.error(who, "there must be a row", "none", "Call cache.admit() for each request.")
        before, batch, host = (
            self._rows.finished(who),
            self._rows.of(numbers),
            torch.zeros(len(numbers), dtype=torch.int64),
        )
        attention_mask, given = (x.cpu() if isinstance(x, Tensor) else x for x in (attention_mask, positions))
        real = cache_checks.real(seq, attention_mask, host, who)
        given = None if given is None else cache_checks.positions(given, real, 0, who)
        lengths, starts = [row.length for row in batch], [row.position for row in batch]
        if at is not None:
            cure = "To go back, use a cache without one. To begin another text in a row, call reset(rows=...)."
            paged_checks.no_window(who, "at", self.window, cure)
            cache_checks.number_for_each_row(who, "at", at, host)
            starts = at.tolist()
            lengths = [self._rows.length_before(row, start) for row, start in zip(batch, starts, strict=True)]
        added: list[int] = real.sum(1).tolist()
        planned, taken, replaced = self._rows.extended(who, batch, lengths, added)
        after = (real.cumsum(1) - 1).clamp(min=0)  # each new token after the first one of this step
        order = torch.tensor(lengths)[:, None] + after
        if given is None:
            given = torch.tensor(starts)[:, None] + after
            following = [start + count for start, count in zip(starts, added, strict=True)]
        else:
            largest = one_of_each(given).masked_fill(~real, -EMPTY).amax(1).tolist()
            following = [most + 1 if n else start for most, n, start in zip(largest, added, starts, strict=True)]
        for row, plan, start, position in zip(batch, planned, starts, following, strict=True):
            row.position, plan.position = start, position
        moved_on = before is not None and before.progress.moves_on and before.numbers == numbers
        progress = Progress(
            self.num_layers,
            overwrites=False,
            moves_on=attention_mask is None,
            earlier=before.progress.rotations if before and moved_on and at is None and positions is None else (),
        )
        self._rows.plan = Plan(numbers, progress, planned, taken, replaced)
        step = PagedStep(self, numbers, planned, positions=given, order=order, real=real, progress=progress)
        self._rows.key_positions.view(-1).index_put_((step.host_slots[real],), one_of_each(given)[real])
        return step

    def shift(
        self,
        rope: Rope | Sequence[Rope | None],
        delta: int | Tensor,
        *,
        rows: Sequence[int] | Tensor | None = None,
    ) -> None:
        """Move the cached keys of some rows by `delta` positions, and their next tokens too.

        Rotation only: the attention factor, which the keys have, is not applied again. Each call rounds the keys once.
        Blocks that a row shares with one that does not move, or not as far, are copied first.

        Args:
            rope: as in `KVCache.shift`.
            delta: how far, in tokens, negative is back: an int, or for each row an int64 tensor `[rows]`.
            rows: which rows, as in `step`; all when None.

        Raises:
            RopeError: an argument is something else, or there are not enough free blocks for the copies; the step
                before stopped between layers (see `rollback`). Nothing has changed then.
        """
        who = f"{_NAME}.shift"
        batch = self._rows.of(self._rows.chosen(who, rows))
        self._rows.finished(who)
        ropes = cache_checks.ropes(rope, self.num_layers, self.keys[0].shape[-1], who)
        if isinstance(delta, Tensor):
            cache_checks.number_for_each_row(who, "delta", delta, torch.zeros(len(batch)))
            by: list[int] = delta.tolist()
        else:
            by = [_checks.integer(who, "delta", delta, at_least=-(2**31), at_most=2**31)] * len(batch)
        paged_shift.shift(self._rows, batch, by, self.keys, ropes, alike=not isinstance(delta, Tensor))

    def rollback(self) -> None:
        """Drop a step whose forward pass stopped between layers: the cache is as it was before that step.

        Needed after an exception when some layers have appended and others have not. Otherwise it changes nothing but
        that a step which is still open can no longer be used, and gives back the blocks that it has taken. Tokens
        forgotten through `at` stay forgotten.
        """
        self._rows.settle()
        self._rows.drop()
