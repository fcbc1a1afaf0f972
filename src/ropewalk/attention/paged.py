"""A paged key-value cache for requests that start and end independently: block tables, prefix sharing, shift.

Each request is a row of the cache. A row allocates a block when its tokens need one, so the number of blocks in use
grows with the number of tokens. Keys are cached after rotation, as in `KVCache`. Rows with a common prefix may share
blocks. A row copies a shared block before writing to it or shifting its keys (copy on write).

Block tables, lengths and positions are planned on the host, in NumPy arrays. Nothing synchronizes with a GPU if the
arguments of `step` are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ropewalk import _checks
from ropewalk.attention import tokens
from ropewalk.attention.blocks import Array, Plan, Rows, Table
from ropewalk.attention.step import Step
from ropewalk.attention.store import PlainStore, Store, create_stores
from ropewalk.attention.tokens import EMPTY, NewTokens
from ropewalk.kernels.visible import VisibleKeys
from ropewalk.rope.rope import Rope
from ropewalk.rotation.writable import overlaps_itself, share_elements

_NAME = "PagedKVCache"
_QUERIES = 128  # new tokens in a block of FlexAttention


class Scratch:
    """Memory for the gathered keys and values of one layer, reused by the next layer and the next step.

    The system maps new memory of this size page by page, which takes 7 times as long as gathering the blocks (measured
    for 8 rows of 1,024 keys in float32).

    Args:
        block: shape of a block, `(block_size, num_kv_heads, head_dim)`.
        dtype, device: of the keys and values.
    """

    def __init__(self, block: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._options = block, dtype, device
        self._kept: tuple[Tensor, Tensor] | None = None

    def get(self, count: int) -> tuple[Tensor, Tensor]:
        """Return memory for `count` blocks of keys and of values, each `[count, block_size, kv_heads, head_dim]`."""
        if self._kept is None or len(self._kept[0]) < count:
            block, dtype, device = self._options
            shape = (count if self._kept is None else max(count, 2 * len(self._kept[0])), *block)
            with torch.inference_mode(False):  # an inference tensor could not be written in normal mode
                keys = torch.empty(shape, dtype=dtype, device=device)
                self._kept = keys, torch.empty_like(keys)
        return self._kept[0][:count], self._kept[1][:count]

    def __reduce__(self) -> tuple[type[Scratch], tuple[object, ...]]:
        return Scratch, self._options  # copies and pickles of a cache omit the content


class PagedStep(Step):
    """One forward pass with a `PagedKVCache`, created by `PagedKVCache.step` for `RotaryAttention` or another kernel.

    To use a paged attention kernel, pass it `cache.keys[i]`, `cache.values[i]` and the tables below. Store the new keys
    and values with `LayerCache.write`, or let the kernel store them at `slot_mapping` and call `mark_written`. All
    tables include the tokens of this step. Tables that only some kernels need are built on first use.

    Attributes:
        rows: numbers of the rows, in the order of the batch.
        positions, order, key_positions, key_order, mask: as in `CacheStep`. The keys are those of whole blocks, and
            every row has as many keys as the row with the most blocks in this step. Shapes thus change rarely, which
            saves recompilation.
        slot_mapping: slot of each new token, block · block_size + offset in the block, and −1 for padding: int64
            `[batch · seq]`, row by row.
        block_table: blocks of each row, int32 `[batch, blocks of the longest row]`, padded with the last block of the
            row. With a window, it omits blocks that no token of this step attends to; those of sinks come first. Do not
            change it: on a CPU, its memory is that of the cache.
        block_mask: mask for FlexAttention over the flattened blocks of the pool. None in a cache without `flex`.
    """

    _who = _NAME

    def __init__(
        self,
        cache: PagedKVCache,
        plan: Plan,
        new: NewTokens,
        real: Tensor | None,
        *,
        advances: bool,
        previous: Step | None,
    ) -> None:
        device, size, window, table = cache._device, cache.block_size, cache.window, plan.table
        skipped, most = table.skipped * size, table.blocks.shape[1]
        counts = cache._rows.in_blocks(table)
        self._sinks, self._front = cache.sinks, cache._rows.front * size
        shortest, longest = max(1, int(counts.min())), max(1, int(counts.max()))
        index, place = np.divmod(new.order.numpy() - skipped[:, None], size)
        slots = place + np.take_along_axis(table.blocks, np.minimum(index, most - 1), 1) * np.int64(size)
        positions, is_real = cache._rows.key_positions, ... if real is None else real.numpy()
        positions.reshape(-1)[slots[is_real]] = new.place.numpy()[is_real]
        if real is not None:
            slots = np.where(real.numpy(), slots, -1)
        self.slot_mapping = torch.from_numpy(slots).flatten().to(device)
        super().__init__(
            cache._stores,
            cache._heads,
            cache._latent,
            window,
            positions=new.positions.to(device),
            order=new.order.to(device),
            flat_slots=self.slot_mapping.view(new.order.shape),
            # Without padding, rows of equal length need only a causal mask, unless the window is shorter.
            causal=real is None and shortest == longest <= (window or longest),
            filled=slice(0, longest),
            keys=most * size,
            concatenates=False,
            advances=advances,
            previous=previous,
        )
        self.rows, self.block_table = list(plan.numbers), torch.from_numpy(table.blocks).to(device)
        self._counts, self._skipped = torch.from_numpy(counts).to(device), torch.from_numpy(skipped).to(device)
        self._real = self._real_tokens = self._empty = None
        if real is not None:
            empty = np.flatnonzero(table.counts == 0)
            self._empty = torch.from_numpy(empty).to(device) if len(empty) else None
            self._real, self._real_tokens = real.to(device), real.flatten().nonzero()[:, 0].to(device)
        self._scratch, self._table, self._positions_of_slots = cache._scratch, table, positions
        if cache.flex:
            self.block_mask = self._build_block_mask(cache.keys[0].shape[0])

    @property
    def key_order(self) -> Tensor:
        index = torch.arange(self._keys, device=self.order.device)  # index of each key in the blocks of its row
        order = index + self._skipped[:, None] * (index >= self._front)
        return torch.where(index < self._counts[:, None], order, EMPTY)

    @property
    def seq_lens(self) -> Tensor:
        """Number of tokens that each row has in the blocks of `block_table`, int32 `[batch]`."""
        return self._counts.int()

    @property
    def kv_indptr(self) -> Tensor:
        """Index of the first block of each row in `kv_indices`, then the number of all blocks: int32 `[batch + 1]`.

        The name is FlashInfer's.
        """
        return _on_device(np.append(0, self._table.counts.cumsum()), self.order.device)

    @property
    def kv_indices(self) -> Tensor:
        """Numbers of the blocks of all rows, row by row, int32 `[blocks of all rows]`. The name is FlashInfer's."""
        return _on_device(self._table.held(), self.order.device)

    @property
    def kv_last_page_len(self) -> Tensor:
        """Number of tokens in the last block of each row, int32 `[batch]`. The name is FlashInfer's."""
        size = self._positions_of_slots.shape[1]
        return torch.where(self._counts > 0, (self._counts - 1) % size + 1, 0).int()

    @property
    def qo_indptr(self) -> Tensor:
        """Index of each row's first new token, then the number of new tokens, without padding: int32 `[batch + 1]`.

        The name is FlashInfer's; vLLM calls it `query_start_loc`, and FlashAttention `cu_seqlens_q`. To get the queries
        without padding, use `q.flatten(0, 1)[step.slot_mapping >= 0]`.
        """
        return torch.nn.functional.pad((self._flat_slots >= 0).sum(1).cumsum(0), (1, 0)).int()

    def mark_written(self) -> None:
        """Record that another kernel has stored the keys and values of all layers.

        Raises:
            RopeError: the step is not the newest of its cache, or a layer has already appended.
        """
        if stored := self._count_stored():
            raise _checks.error(
                "PagedStep.mark_written",
                "no layer may have appended in this step",
                f"{stored} layers that have",
                "Either append in every layer, or call mark_written() once after your kernel has stored all layers.",
            )
        self._check_may_append(stored=False, is_last=False)
        for flag in self._stored:
            flag[0] = True
        self._complete = True

    def _find_key_positions(self) -> Tensor:
        places = torch.from_numpy(self._positions_of_slots[self._table.blocks]).flatten(1).to(self.order.device)
        return torch.where(self.key_order == EMPTY, EMPTY, places)

    def _build_mask(self, *, every: bool) -> Tensor:
        key_order = self.key_order[:, None, slice(None) if every else self._filled]
        distance = self.order[:, :, None] - key_order
        visible = distance >= 0
        if self._window is not None:
            visible = visible & ((distance < self._window) | (key_order < self._sinks))
        return (visible if self._real is None else visible | ~self._real[:, :, None])[:, None]

    def _build_block_mask(self, blocks: int) -> BlockMask:
        """Build the mask for FlexAttention between the new tokens and all tokens of the pool."""
        (batch, seq), device, size = self.order.shape, self.order.device, self._positions_of_slots.shape[1]
        table, most, tiles = self._table, self._table.blocks.shape[1], -(-seq // _QUERIES)
        block_numbers = torch.zeros(batch, blocks, dtype=torch.int32)  # FlexAttention requires the width of the pool
        block_numbers[:, :most] = torch.from_numpy(table.blocks)
        row, column = table.is_held().nonzero()
        numbers = np.full((batch, blocks), -1)  # index of a block in its row, from 0
        numbers[row, table.held()] = column
        number, first, order = torch.from_numpy(numbers).to(device), self._skipped, self.order
        real = torch.ones_like(order, dtype=torch.bool) if self._real is None else self._real
        window = self._window

        def attends(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            block = number[row, key // size]
            distance = order[row, query] - (first[row] + block * size + key % size)
            in_window = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            return (block >= 0) & (in_window | ~real[row, query])

        return BlockMask.from_kv_blocks(
            _on_device(table.counts, device)[:, None, None].expand(-1, 1, tiles),
            block_numbers[:, None, None].expand(-1, 1, tiles, -1).to(device),
            BLOCK_SIZE=(_QUERIES, size),
            mask_mod=attends,
            seq_lengths=(seq, blocks * size),
            compute_q_blocks=False,
        )

    def _find_sinks(self) -> tuple[Tensor, int]:
        return self.key_order < self._sinks, self._sinks

    def _visible_keys(self, window: int | None) -> VisibleKeys | None:
        if self._sinks and window != self._window:  # a layer with a window of its own has no sinks
            return None
        # In a compiled layer `_keys` may be the size of a mask that the graph does not use, and then it is undefined.
        keys = self.block_table.shape[1] * self._positions_of_slots.shape[1]
        return VisibleKeys(
            self.order,
            keys,
            blocks=self.block_table,
            first=self._skipped,
            counts=self._counts,
            window=window,
            sinks=self._sinks,
        )

    def _write(self, store: Store, k: Tensor, v: Tensor) -> None:
        slots, k, v, size = self.slot_mapping, k.flatten(0, 1), v.flatten(0, 1), self._positions_of_slots.shape[1]
        if self._real_tokens is not None:
            slots, k, v = (x.index_select(0, self._real_tokens) for x in (slots, k, v))
        store.write((slots // size, slots % size), k, v)

    def _read(self, store: Store, *, every: bool) -> tuple[Tensor, Tensor]:
        # Slots without a token have finite values if the keys of their row are finite.
        count, out = (None, None) if every else (self._filled.stop, self._scratch.get(self.block_table.numel()))
        keys, values = store.read(self.block_table, count, out)
        if self._empty is not None:
            keys, values = keys.index_fill(0, self._empty, 0), values.index_fill(0, self._empty, 0)
        return keys, values


def _on_device(numbers: Array, device: torch.device) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int32)).to(device)


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
            token can attend to it.
        sinks: with window, tokens at the start of a row that every token attends to, as in `KVCache`. Their blocks are
            not freed. There is no `flex`.
        flex: whether compiled layers attend with FlexAttention directly over the blocks. Eager layers, and all layers
            if flex is False, first gather the blocks of the rows. flex requires the layout "NHD".
        dtype: dtype of keys and values. Pass the dtype of the model, or of autocast if it is active.
        device: device of keys and values.
        store, latent: as in `KVCache`. Another store than the plain one has neither `flex` nor a memory layout, and
            latent rows no `flex`.

    Attributes:
        keys, values: lists with one tensor for each layer, `[blocks, block_size, num_kv_heads, head_dim]`, or what
            another store keeps.

    Raises:
        RopeError: a number is out of range, or flex is combined with "HND" or with another store.

    Memory:
        2 · num_layers · blocks · block_size · num_kv_heads · head_dim numbers, plus up to twice the size of the keys
        and values that one layer gathers.

    Source:
        PagedAttention (Kwon et al., https://arxiv.org/abs/2309.06180).

    Examples:
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
        sinks: int = 0,
        flex: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        store: Callable[..., Store] | str | None = None,
        latent: int | None = None,
    ) -> None:
        num_layers, *heads = tokens.check_shape(_NAME, num_layers, num_kv_heads, head_dim, dtype)
        # Block numbers are int32 in the tables of attention kernels.
        blocks = _checks.integer(_NAME, "blocks", blocks, at_least=1, at_most=2**31 - 1)
        block_size = _checks.length(_NAME, "block_size", block_size)
        _checks.choice(_NAME, "layout", layout, ("NHD", "HND"))
        if store is not None and (flex or layout == "HND"):
            must, fix = "layout must be 'NHD' and flex False with another store", "Omit store, or layout and flex."
            raise _checks.error(_NAME, must, f"layout={layout!r} and flex={flex}", fix)
        if latent is not None and flex:
            raise _checks.error(_NAME, "flex must be False with latent rows", f"flex={flex}", "Omit flex.")
        sinks = _checks.integer(_NAME, "sinks", sinks, at_least=0)
        if sinks and (window is None or flex):
            must, fix = "sinks must be 0 without a window, and with flex", "Pass sinks with window, and omit flex."
            raise _checks.error(_NAME, must, f"sinks={sinks}, window={window}, flex={flex}", fix)
        shape, first = (blocks, block_size, heads[0], heads[1]), layout == "HND"
        stores = create_stores(_NAME, store, num_layers, shape, dtype, device, heads_first=first, latent=latent)
        self._initialize(_NAME, stores, shape, window, flex, latent, sinks=sinks)

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
        _check_pools(who, k_cache, v_cache)
        cache = cls.__new__(cls)
        blocks, size, heads, channels = k_cache[0].shape
        stores = [PlainStore(keys, values) for keys, values in zip(k_cache, v_cache, strict=True)]
        cache._initialize(who, stores, (blocks, size, heads, channels), window, flex)
        return cache

    def _initialize(
        self,
        who: str,
        stores: Sequence[Store],
        shape: tuple[int, int, int, int],
        window: int | None,
        flex: bool,
        latent: int | None = None,
        *,
        sinks: int = 0,
    ) -> None:
        self.sinks = sinks
        self._latent = latent
        self._stores, self.num_layers = stores, len(stores)
        self.window = None if window is None else _checks.length(who, "window", window)
        self.flex = _checks.boolean(who, "flex", flex)
        for pool in (*self.keys, *self.values) if flex else ():
            if pool.shape[0] > 1 and pool.stride(0) != pool.stride(1) * pool.shape[1]:
                raise _checks.error(
                    who,
                    "with flex, the tokens of all blocks must be evenly spaced in memory",
                    f"strides {pool.stride()} for blocks of {pool.shape[1]} tokens",
                    "Use separate tensors for each layer with tokens before heads (NHD), or pass flex=False.",
                )
        blocks, self.block_size, *heads = shape
        self._heads, self._device = (heads[0], heads[1]), stores[0].keys.device
        self._kept_keys = (self.num_layers, heads[1], latent)
        self._rows = Rows(stores, blocks, self.block_size, self.window, sinks)
        self._scratch = Scratch((self.block_size, *self._heads), stores[0].dtype, self._device)

    @property
    def keys(self) -> list[Tensor]:
        return [store.keys for store in self._stores]

    @property
    def values(self) -> list[Tensor]:
        return [store.values for store in self._stores]

    @property
    def rows(self) -> list[int]:
        """Numbers of the current rows, in the order of their creation. Methods use all of them for rows=None."""
        return list(self._rows.index)

    @property
    def length(self) -> Tensor:
        """Number of tokens that all layers have stored, for each row in `rows`, int64 `[rows]`, on the CPU."""
        self._rows.settle()
        return torch.from_numpy(self._rows.table.length.copy())

    @property
    def position(self) -> Tensor:
        """Position of the next token, for each row in `rows`, int64 `[rows]`, on the CPU.

        It equals length unless `shift`, or `at` or `positions` of `step`, has changed it.
        """
        self._rows.settle()
        return torch.from_numpy(self._rows.table.position.copy())

    @property
    def free_blocks(self) -> int:
        """Number of blocks that neither a row nor a planned step holds."""
        self._rows.settle()
        return self._rows.blocks.free

    def admit(self) -> int:
        """Start an empty row and return its number. Numbers are never reused. `step` allocates the blocks."""
        return self._rows.add(Table.empty(1))

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
        (number,), _ = self._rows.select(who, [row])
        self._rows.check_finished(who)
        index, table = self._rows.index, self._rows.table
        chosen = np.array([index[number]])
        other = table.select(chosen)
        other = other._replace(limit=other.length)  # the last block must be copied before a row writes to it
        table = table.put(chosen, other)
        if length is not None:
            tokens.check_no_window(who, "length", self.window, "a number", "Fork the whole row.")
            kept = _checks.integer(who, "length", length, at_least=0, at_most=int(other.length[0]))
            places = self._rows.positions_of(other)[:, :kept]
            position = places.max(1) + 1 if kept else np.zeros_like(other.position)
            other = self._rows.truncated(other, np.array([kept]), position)
        self._rows.replace(index, table)
        return self._rows.add(other)

    def reorder(self, parents: Sequence[int] | Tensor, *, rows: Sequence[int] | Tensor | None = None) -> None:
        """Replace the tokens of each row by those of its parent, for all rows at once. Nothing is copied yet.

        Call it in beam search after the surviving beams have been selected. Rows share blocks as after `fork`.

        Args:
            parents: for each row in `rows` the number of the row whose tokens it takes over, ints or an integer tensor
                `[rows]`. A number may occur several times, and need not be in `rows`.
            rows: row numbers, as in `step`. None means all rows.

        Raises:
            RopeError: there is no such row, or there is not one parent for each row; or only some layers appended in
                the previous step (see `rollback`).
        """
        who = f"{_NAME}.reorder"
        numbers, chosen = self._rows.select(who, rows)
        listed = parents.tolist() if isinstance(parents, Tensor) and parents.ndim == 1 else parents
        if not isinstance(listed, list | tuple) or len(listed) != len(numbers):
            must, fix = f"parents must be {len(numbers)} row numbers, one for each row", "Pass e.g. cache.rows."
            raise _checks.error(who, must, _checks.describe(parents), fix)
        for parent in listed:
            self._rows.select(who, [parent])
        self._rows.check_finished(who)
        index, table = self._rows.index, self._rows.table
        table = table._replace(limit=table.length)  # shared last blocks must be copied before a row writes to them
        taken, released = table.select(np.array([index[row] for row in listed], np.int64)), table.select(chosen).held()
        self._rows.replace(index, table.put(chosen, taken), taken=taken.held(), released=released)

    def free(self, rows: int | Sequence[int] | Tensor) -> None:
        """End rows and free their blocks, except for those shared with other rows. Row numbers are not reused.

        Args:
            rows: a row number, a sequence of them, or an integer tensor `[n]`.

        Raises:
            RopeError: there is no such row; or only some layers appended in the previous step (see `rollback`).
        """
        numbers, chosen = self._rows.select(f"{_NAME}.free", rows)
        self._rows.check_finished(f"{_NAME}.free")
        self._rows.remove(numbers, chosen)

    def reset(self, rows: Sequence[int] | Tensor | None = None) -> None:
        """Drop all tokens of the given rows and free their blocks, except for those shared with other rows.

        Args:
            rows: numbers of the rows, which restart at position 0: ints or an integer tensor `[n]`. None means all.

        Raises:
            RopeError: there is no such row; or rows is not None and only some layers appended in the previous step (see
                `rollback`).
        """
        who = f"{_NAME}.reset"
        numbers, chosen = self._rows.select(who, rows)
        if rows is not None:
            self._rows.check_finished(who)
        self._rows.settle()
        table = self._rows.table
        released = table.select(chosen).held()
        self._rows.replace(self._rows.index, table.put(chosen, Table.empty(len(numbers))), released=released)
        self._rows.moving.clear()

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
            RopeError: there is no such row, or no row at all; a shape, dtype or position does not match, at is combined
                with a window, or positions with sinks; only some layers appended in the previous step (see `rollback`);
                or there are not enough free blocks. Nothing has changed then. All of these are detected on every
                device.
        """
        who = f"{_NAME}.step"
        numbers, chosen = self._rows.select(who, rows)
        if not numbers:
            raise _checks.error(who, "the cache must have a row", "none", "Call cache.admit() for each request.")
        previous = self._rows.check_finished(who)
        before = kept = self._rows.table.select(chosen)
        attention_mask, at, positions = (
            x.cpu() if isinstance(x, Tensor) else x for x in (attention_mask, at, positions)
        )
        length = torch.from_numpy(before.length)
        real = tokens.real_tokens(who, seq, attention_mask, length)
        if real is not None and real.all():
            real = None
        if positions is not None:
            tokens.check_no_sinks(who, "positions must be None", self.sinks)
        given = tokens.check_given_positions(who, positions, seq, length)
        if at is not None:
            fix = "To go back, use a cache without a window. To start a new text in a row, call reset(rows=...)."
            tokens.check_no_window(who, "at", self.window, "a tensor", fix)
            tokens.check_per_row(who, "at", at, length)
            tokens.check_positions(who, at)
            kept = self._rows.truncated_at(before, at.numpy())
        new = tokens.place_tokens(real, seq, torch.from_numpy(kept.length), torch.from_numpy(kept.position), given)
        plan = self._rows.extend(who, numbers, chosen, before, kept, new)
        last = previous.step if previous is not None and previous.numbers == numbers else None
        if last is not None and not (last._advances and at is None and positions is None):
            last = None
        step = PagedStep(self, plan, new, real, advances=attention_mask is None, previous=last)
        self._rows.attach(step)
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
        _, chosen = self._rows.select(who, rows)
        self._rows.check_finished(who)
        ropes = tokens.rope_of_each_layer(who, rope, *self._kept_keys)
        held = self._rows.table.select(chosen)
        if isinstance(delta, Tensor):
            tokens.check_per_row(who, "delta", delta, torch.from_numpy(held.length))
            by = delta.cpu().numpy()
        else:
            by = np.full_like(held.length, _checks.integer(who, "delta", delta, at_least=-(2**31), at_most=2**31))
        self._move(
            who, chosen, held, by[:, None], held.position + by, ropes, None if isinstance(delta, Tensor) else delta
        )

    def move(self, rope: Rope | Sequence[Rope | None], row: int, old: Tensor, new: Tensor) -> None:
        """Move the cached keys of a row that are at the positions `old` to the positions `new`, as `KVCache.move` does.

        A block that is shared with other rows is copied first. Read `KVCache.move` for the arguments.

        Raises:
            RopeError: an argument has a wrong type, shape or value; no token is at a position of `old`; the cache has
                sinks; there are not enough free blocks for the copies; or only some layers appended in the previous
                step (see `rollback`). Nothing has changed then.
        """
        who = f"{_NAME}.move"
        tokens.check_no_sinks(who, "move must not be called", self.sinks)
        _, chosen = self._rows.select(who, [row])
        self._rows.check_finished(who)
        ropes = tokens.rope_of_each_layer(who, rope, *self._kept_keys)
        held = self._rows.table.select(chosen)
        places = self._rows.positions_of(held)
        is_token = np.arange(places.shape[1]) < self._rows.in_blocks(held)[:, None]
        places = np.where(is_token, places, EMPTY)
        old, new = (x.cpu() if isinstance(x, Tensor) else x for x in (old, new))
        moved = tokens.moved_positions(who, torch.from_numpy(places), old, new).numpy()
        position = np.where(is_token, moved, new.numpy().min()).max(1) + 1
        self._move(who, chosen, held, moved - places, position, ropes, None)

    def _move(
        self,
        who: str,
        chosen: Array | None,
        held: Table,
        by: Array,
        position: Array,
        ropes: Sequence[Rope | None],
        delta: int | None,
    ) -> None:
        """Move the keys of rows. See `Rows.plan_moves` for `by` and `position`; delta is the distance of all slots."""
        places = self._rows.positions_of(held) + by
        is_token = np.arange(places.shape[1]) < self._rows.in_blocks(held)[:, None]
        tokens.check_positions(who, torch.from_numpy(np.append(places[is_token], position)))
        moves = self._rows.plan_moves(who, held, by, position)
        distances = torch.from_numpy(moves.deltas) if delta is None else delta
        rotations = tokens.shift_rotations(ropes, distances, self._stores[0].dtype, self._device)  # before any change
        self._rows.moving.append(who)
        blocks = torch.from_numpy(self._rows.move(chosen, moves)).long().to(self._device)
        for store, rotation in zip(self._stores, rotations, strict=True):
            if rotation is not None:
                store.rotate(rotation, blocks)
        self._rows.moving.clear()

    def rollback(self) -> None:
        """Discard a step whose forward pass stopped between layers, and restore the cache to its state before the step.

        Call it after an exception if some layers have appended and others have not. In other cases it only invalidates
        a step that is still open and frees the blocks that the step has allocated. Tokens dropped through `at` are not
        restored.
        """
        if self._rows.moving:
            raise tokens.interrupted(f"{_NAME}.rollback", self._rows.moving)
        self._rows.settle()
        self._rows.drop_step()


def _check_pools(who: str, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Raise unless keys and values have a pool for each layer, all with one shape, dtype and device."""
    for name, layers in (("k_cache", keys), ("v_cache", values)):
        if not isinstance(layers, list | tuple) or not layers or not all(isinstance(pool, Tensor) for pool in layers):
            must = f"{name} must be a list of tensors, one for each layer"
            raise _checks.error(who, must, _checks.describe(layers), "Pass [pool] for one layer.")
    if len(keys) != len(values):
        must, got = "k_cache and v_cache must have the same number of layers", f"{len(keys)} and {len(values)}"
        raise _checks.error(who, must, got, "Pass one key pool and one value pool for each layer.")
    pools = [*keys, *values]
    for i, pool in enumerate(pools):
        if any(share_elements(pool, other) for other in pools[:i]):
            fix = "Pass separate tensors, or parts of one tensor that do not overlap."
            raise _checks.error(who, "pools must not share elements", "pools that overlap", fix)
    first = keys[0]
    for name, layers in (("k_cache", keys), ("v_cache", values)):
        for pool in layers:
            if pool.ndim != 4 or 0 in pool.shape:
                raise _checks.error(
                    who,
                    f"a pool of {name} must have shape [blocks, block_size, kv_heads, head_dim], none of them 0",
                    f"{tuple(pool.shape)}",
                    "Pass a view: pool.transpose(1, 2) of a pool with the heads before the tokens of a block (HND).",
                )
            if (pool.shape, pool.dtype, pool.device) != (first.shape, first.dtype, first.device):
                raise _checks.error(
                    who,
                    f"all pools must be {first.dtype} of shape {tuple(first.shape)} on {first.device}",
                    f"{_checks.describe(pool)} on {pool.device} in {name}",
                    "Use one cache for each kind of layer.",
                )
            if pool.stride(3) != 1 or overlaps_itself(pool) or pool.requires_grad:
                raise _checks.error(
                    who,
                    f"a pool of {name} must have contiguous channels, no overlapping elements, and no gradient",
                    f"strides {pool.stride()}" + (" and requires_grad=True" if pool.requires_grad else ""),
                    "Pass a view of allocated memory that is not expanded and does not require gradients.",
                )
    tokens.check_dtype(who, first.dtype)
