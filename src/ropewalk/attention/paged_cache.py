"""A paged key-value cache for requests that start and end independently: block tables, prefix sharing, shift.

Each request is a row of the cache. A row allocates a block when its tokens need one, so the number of blocks in use
grows with the number of tokens. Keys are cached after rotation, as in `KVCache`. Rows with a common prefix may share
blocks. A row copies a shared block before writing to it or shifting its keys (copy on write).

Block tables, lengths and positions are planned on the host, in plain Python and CPU tensors. Nothing synchronizes with
a GPU if the arguments of `step` are on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.attention import cache_checks, paged_checks, paged_flex, paged_shift
from ropewalk.attention.cache_step import Progress, largest_position
from ropewalk.attention.paged_rows import Row, Rows
from ropewalk.attention.paged_step import PagedStep, Scratch
from ropewalk.attention.slots import EMPTY
from ropewalk.rope.rope import Rope

_NAME = "PagedKVCache"


class PagedKVCache:
    """Keys and values of many requests in blocks of a fixed number of tokens, for layers with equal heads and head_dim.

    Each request is a row. `admit` starts a row and `free` ends it, while others continue. In each forward pass, `step`
    selects rows and plans the positions, slots and mask of their new tokens, and every layer gets its part:

        row = cache.admit()
        step = cache.step(tokens.shape[1], rows=[row])
        rotation = step.rotation(rope)
        for i, layer in enumerate(layers):
            x = layer(x, rotation, cache=step.layer(i))

    No gradients pass through the cache. If only some layers have a window (Gemma), give them a separate cache.

    Args:
        num_layers: number of layers of the model. Each has its own keys and values.
        num_kv_heads: heads of keys and values.
        head_dim: channels of a head.
        blocks: number of blocks for all rows together.
        block_size: tokens in a block.
        layout: memory layout of a block: "NHD" (tokens before heads) or "HND". The axes of `keys` and `values`
            are the same in both layouts.
        window: each token attends to itself and the previous window − 1 tokens. A block becomes free when no later
            token can attend to it. Attention sinks need a `KVCache`.
        flex: whether compiled layers attend with FlexAttention directly over the blocks. Eager layers, and all layers
            if flex is False, first gather the blocks of the rows. flex requires the layout "NHD".
        dtype: dtype of keys and values. Pass the dtype of the model, or of autocast if it is active.
        device: device of keys and values.

    Attributes:
        keys, values: lists with one tensor for each layer, `[blocks, block_size, num_kv_heads, head_dim]`.

    Raises:
        RopeError: a number is out of range, or flex is combined with "HND".

    Memory:
        2 · num_layers · blocks · block_size · num_kv_heads · head_dim numbers, plus up to twice the size of the keys
        and values that one layer gathers.

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

    sinks = 0  # a step reads it, as it reads `KVCache.sinks`

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
        num_layers = _checks.integer(_NAME, "num_layers", num_layers, at_least=1, at_most=cache_checks.MAX_LAYERS)
        num_kv_heads = _checks.integer(_NAME, "num_kv_heads", num_kv_heads, at_least=1)
        head_dim = _checks.integer(_NAME, "head_dim", head_dim, at_least=1, at_most=_checks.MAX_HEAD_DIM)
        # Block numbers are int32 in the tables of attention kernels.
        blocks = _checks.integer(_NAME, "blocks", blocks, at_least=1, at_most=2**31 - 1)
        block_size = _checks.length(_NAME, "block_size", block_size)
        _checks.choice(_NAME, "layout", layout, ("NHD", "HND"))
        cache_checks.check_dtype(_NAME, dtype)
        inner = (block_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, block_size)
        shape = (blocks, *inner, head_dim)
        pools = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * num_layers)]
        pools = pools if layout == "NHD" else [pool.transpose(1, 2) for pool in pools]
        self._initialize(_NAME, pools[:num_layers], pools[num_layers:], window, flex)

    @classmethod
    def from_pools(
        cls, k_cache: Sequence[Tensor], v_cache: Sequence[Tensor], *, window: int | None = None, flex: bool = False
    ) -> PagedKVCache:
        """Build a cache in existing memory, such as that of an engine. The content of the memory is overwritten.

        Args:
            k_cache, v_cache: a tensor for each layer, `[blocks, block_size, num_kv_heads, head_dim]`, float16,
                bfloat16, float32 or float64. The stride of the channels is 1, and the other strides are free. Keys and
                values may be parts of one tensor. Transpose a pool with heads before tokens (HND).
            window, flex: as in `PagedKVCache`.

        Raises:
            RopeError: a pool has a wrong type, shape, dtype or stride, the pools overlap or differ in more than their
                strides, or window or flex has a wrong value.
        """
        who = f"{_NAME}.from_pools"
        paged_checks.check_pools(who, k_cache, v_cache)
        cache = cls.__new__(cls)
        cache._initialize(who, list(k_cache), list(v_cache), window, flex)
        return cache

    def _initialize(self, who: str, keys: list[Tensor], values: list[Tensor], window: int | None, flex: bool) -> None:
        self.keys, self.values, self.num_layers = keys, values, len(keys)
        self.window = None if window is None else _checks.length(who, "window", window)
        self.flex = paged_flex.check_flex(who, flex, [*keys, *values])
        self.block_size = keys[0].shape[1]
        self._rows = Rows([*keys, *values], self.window)
        self._gathered_keys, self._gathered_values = Scratch(), Scratch()

    @property
    def rows(self) -> list[int]:
        """Numbers of the current rows, in the order of their creation. Methods use all of them for rows=None."""
        return list(self._rows.by_number)

    @property
    def length(self) -> Tensor:
        """Number of tokens that all layers have stored, for each row in `rows`, int64 `[rows]`, on the CPU."""
        return torch.tensor([row.length for row in self._rows.current()], dtype=torch.int64)

    @property
    def position(self) -> Tensor:
        """Position of the next token, for each row in `rows`, int64 `[rows]`, on the CPU.

        It equals length unless `shift`, or `at` or `positions` of `step`, has changed it.
        """
        return torch.tensor([row.position for row in self._rows.current()], dtype=torch.int64)

    @property
    def free_blocks(self) -> int:
        """Number of blocks that neither a row nor a planned step holds."""
        self._rows.settle()
        return self._rows.blocks.free

    def admit(self) -> int:
        """Start an empty row and return its number. Numbers are never reused. `step` allocates the blocks."""
        return self._rows.add(Row([]))

    def fork(self, row: int, length: int | None = None) -> int:
        """Start a row with the tokens of another row, and return its number. Nothing is copied yet.

        Both rows share the blocks. If the last block is not full, the first row that writes to it copies it.

        Args:
            row: the other row, which remains unchanged.
            length: number of tokens of the other row with which the new row starts. None means all of them, and the
                next position is that of the other row. With a number, it is 1 + the largest position of these tokens.

        Raises:
            RopeError: there is no such row, or it has fewer tokens than length; length is combined with a window, which
                has evicted older keys; or only some layers appended in the previous step (see `rollback`).
        """
        who = f"{_NAME}.fork"
        numbers = self._rows.select(who, [row])
        self._rows.check_finished(who)
        (other,) = self._rows.get(numbers)
        blocks, kept, position = other.blocks, other.length, other.position
        if length is not None:
            paged_checks.check_no_window(who, "length", self.window, "Fork the whole row.")
            kept = _checks.integer(who, "length", length, at_least=0, at_most=other.length)
            blocks = blocks[: self._rows.block_count(kept)]
            position = max(self._rows.cached_positions(other)[:kept].tolist(), default=-1) + 1
        self._rows.drop_step()
        return self._rows.add(Row(blocks, other.skipped, kept, position))

    def free(self, rows: int | Sequence[int] | Tensor) -> None:
        """End rows and free their blocks, except for those shared with other rows. Row numbers are not reused.

        Args:
            rows: a row number, a sequence of them, or an integer tensor `[n]`.

        Raises:
            RopeError: there is no such row; or only some layers appended in the previous step (see `rollback`).
        """
        chosen = self._rows.select(f"{_NAME}.free", rows)
        self._rows.check_finished(f"{_NAME}.free")
        released = [block for row in self._rows.get(chosen) for block in row.blocks]
        rows_left = dict(self._rows.by_number)
        for number in chosen:
            del rows_left[number]
        self._rows.replace(rows_left, released=released)

    def reset(self, rows: Sequence[int] | Tensor | None = None) -> None:
        """Drop all tokens of the given rows and free their blocks, except for those shared with other rows.

        Args:
            rows: numbers of the rows, which restart at position 0: ints or an integer tensor `[n]`. None means all.

        Raises:
            RopeError: there is no such row; or rows is not None and only some layers appended in the previous step (see
                `rollback`).
        """
        who = f"{_NAME}.reset"
        chosen = self._rows.select(who, rows)
        if rows is not None:
            self._rows.check_finished(who)
        self._rows.settle()
        released = [block for row in self._rows.get(chosen) for block in row.blocks]
        self._rows.replace({**self._rows.by_number, **{number: Row([]) for number in chosen}}, released=released)

    def step(
        self,
        seq: int,
        *,
        rows: Sequence[int] | Tensor | None = None,
        attention_mask: Tensor | None = None,
        at: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> PagedStep:
        """Plan a forward pass of `seq` new tokens for each selected row: their positions, slots and attention mask.

        Each layer must append its keys and values once, the last layer last. Only then does the cache count the tokens
        and assign the new blocks to the rows. If the forward pass raises before any layer has stored something, the
        step can simply be discarded.

        Args:
            seq: new tokens in each row, padding included, at least 1.
            rows: row numbers in the order of the batch: a sequence of ints or an integer tensor `[batch]`. None means
                all rows. Other rows are unchanged.
            attention_mask, positions: as in `KVCache.step`.
            at: as in `KVCache.step`. Not supported with a window, which has evicted keys that would become visible.

        Raises:
            RopeError: there is no such row, or no row at all; a shape, dtype or position does not match, or at is
                combined with a window; only some layers appended in the previous step (see `rollback`); or there are
                not enough free blocks. Nothing has changed then. All of these are detected on every device.
        """
        who = f"{_NAME}.step"
        numbers = self._rows.select(who, rows)
        if not numbers:
            raise _checks.error(who, "the cache must have a row", "none", "Call cache.admit() for each request.")
        previous, batch, host = (
            self._rows.check_finished(who),
            self._rows.get(numbers),
            torch.zeros(len(numbers), dtype=torch.int64),
        )
        attention_mask, at, at_positions = (
            x.cpu() if isinstance(x, Tensor) else x for x in (attention_mask, at, positions)
        )
        real = cache_checks.real_tokens(seq, attention_mask, host, who)
        at_positions = None if at_positions is None else cache_checks.new_positions(at_positions, real, 0, who)
        lengths, starts = [row.length for row in batch], [row.position for row in batch]
        if at is not None:
            fix = "To go back, use a cache without a window. To start a new text in a row, call reset(rows=...)."
            paged_checks.check_no_window(who, "at", self.window, fix)
            cache_checks.check_per_row(who, "at", at, host)
            cache_checks.check_positions(who, at)
            starts = at.tolist()
            lengths = [self._rows.length_before(row, start) for row, start in zip(batch, starts, strict=True)]
        added: list[int] = real.sum(1).tolist()
        index_in_step = (real.cumsum(1) - 1).clamp(min=0)  # index of each real token among those of this step
        order = torch.tensor(lengths)[:, None] + index_in_step
        if at_positions is None:
            at_positions = torch.tensor(starts)[:, None] + index_in_step
            following = [start + count for start, count in zip(starts, added, strict=True)]
        else:
            largest = largest_position(at_positions).masked_fill(~real, -EMPTY).amax(1).tolist()
            following = [most + 1 if n else start for most, n, start in zip(largest, added, starts, strict=True)]
        advanced = previous is not None and previous.progress.advances and list(previous.rows) == numbers
        progress = Progress(
            self.num_layers,
            overwrites=False,
            advances=attention_mask is None,
            stale=previous.progress.rotations if previous and advanced and at is None and positions is None else (),
        )
        plan = self._rows.extend(
            who, numbers, lengths=lengths, starts=starts, added=added, following=following, progress=progress
        )
        planned = list(plan.rows.values())
        step = PagedStep(self, numbers, planned, positions=at_positions, order=order, real=real, progress=progress)
        self._rows.key_positions.view(-1).index_put_((step.host_slots[real],), largest_position(at_positions)[real])
        return step

    def shift(
        self,
        rope: Rope | Sequence[Rope | None],
        delta: int | Tensor,
        *,
        rows: Sequence[int] | Tensor | None = None,
    ) -> None:
        """Move the cached keys of some rows, and the positions of their next tokens, by `delta` positions.

        The keys are only rotated: their attention factor is not applied again. Each call rounds them once. A block that
        is shared with a row that does not move, or moves by another distance, is copied first.

        Args:
            rope: as in `KVCache.shift`.
            delta: distance in tokens, negative to move back: an int, or an int64 tensor `[rows]` with one for each row.
            rows: row numbers, as in `step`. None means all rows.

        Raises:
            RopeError: an argument has a wrong type, shape or value; there are not enough free blocks for the copies; or
                only some layers appended in the previous step (see `rollback`). Nothing has changed then.
        """
        who = f"{_NAME}.shift"
        numbers = self._rows.select(who, rows)
        self._rows.check_finished(who)
        ropes = cache_checks.rope_of_each_layer(rope, self.num_layers, self.keys[0].shape[-1], who)
        if isinstance(delta, Tensor):
            cache_checks.check_per_row(who, "delta", delta, torch.zeros(len(numbers)))
            by: list[int] = delta.tolist()
        else:
            by = [_checks.integer(who, "delta", delta, at_least=-(2**31), at_most=2**31)] * len(numbers)
        for row, distance in zip(self._rows.get(numbers), by, strict=True):
            places = torch.cat([self._rows.cached_positions(row), torch.tensor([row.position])])
            cache_checks.check_positions(who, places + distance)
        paged_shift.shift(self._rows, numbers, by, self.keys, ropes, uniform=not isinstance(delta, Tensor))

    def rollback(self) -> None:
        """Discard a step whose forward pass stopped between layers, and restore the cache to its state before the step.

        Call it after an exception if some layers have appended and others have not. In other cases it only invalidates
        a step that is still open and frees the blocks that the step has allocated. Tokens dropped through `at` are not
        restored.
        """
        self._rows.settle()
        self._rows.drop_step()
