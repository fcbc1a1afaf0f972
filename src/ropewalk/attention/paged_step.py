"""One forward pass with a PagedKVCache: the tables for attention kernels, and the cache of each layer."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ropewalk import _checks
from ropewalk.attention import paged_flex
from ropewalk.attention.attend import rotate_and_attend
from ropewalk.attention.cache_step import CacheStep, Progress
from ropewalk.attention.layer_cache import LayerCache
from ropewalk.attention.paged_rows import Row, Rows
from ropewalk.attention.slots import EMPTY
from ropewalk.attention.two_pass import TwoPass
from ropewalk.rotation.api import Rotation
from ropewalk.rotation.qk_norm import QKNorm


class Pools(Protocol):
    """The attributes of a cache that a step reads."""

    num_layers: int
    keys: list[Tensor]
    values: list[Tensor]
    sinks: int
    window: int | None
    flex: bool
    _gathered_keys: Scratch
    _gathered_values: Scratch
    _rows: Rows


class Scratch:
    """Memory for the gathered keys or values of one layer, reused by the next layer and the next step.

    The system maps new memory of this size page by page, which takes 7 times as long as gathering the blocks (measured
    for 8 rows of 1,024 keys in float32).
    """

    def __init__(self) -> None:
        self._blocks: Tensor | None = None

    def get(self, pool: Tensor, count: int) -> Tensor:
        """Return memory for `count` blocks of a pool, `[count, block_size, kv_heads, head_dim]`."""
        kept = self._blocks
        if kept is None or len(kept) < count:
            more = count if kept is None else max(count, 2 * len(kept))
            with torch.inference_mode(False):  # an inference tensor could not be written in normal mode
                kept = self._blocks = torch.empty(more, *pool.shape[1:], dtype=pool.dtype, device=pool.device)
        return kept[:count]

    def __reduce__(self) -> tuple[type[Scratch], tuple[()]]:
        return Scratch, ()  # copies and pickles of a cache omit the content


class PagedStep(CacheStep):
    """One forward pass with a `PagedKVCache`, created by `PagedKVCache.step` for `RotaryAttention` or another kernel.

    To use a paged attention kernel, pass it `cache.keys[i]`, `cache.values[i]` and the tables below. Store the new keys
    and values with `PagedLayer.write`, or let the kernel store them at `slot_mapping` and call `mark_written`. All
    tables include the tokens of this step. Tables that only some kernels need are built on first use.

    Attributes:
        rows: numbers of the rows, in the order of the batch.
        positions, order, key_positions, key_order, mask: as in `CacheStep`. The keys are those of whole blocks, and
            every row has as many keys as the row with the most blocks in this step. Shapes thus change rarely, which
            saves recompilation.
        slot_mapping: slot of each new token, block · block_size + offset in the block, and −1 for padding: int64
            `[batch · seq]`, row by row.
        block_table: blocks of each row, int32 `[batch, blocks of the longest row]`, padded with the last block of the
            row. With a window, it omits blocks that no token of this step attends to.
        seq_lens: number of tokens that each row has in the blocks of `block_table`, int32 `[batch]`.
        block_mask: mask for FlexAttention over the flattened blocks of the pool. None in a cache without `flex`.
    """

    _who = "PagedKVCache"

    def __init__(
        self,
        cache: Pools,
        numbers: list[int],
        planned: list[Row],
        *,
        positions: Tensor,
        order: Tensor,
        real: Tensor,
        progress: Progress,
    ) -> None:
        keys = cache.keys[0]
        device, size = keys.device, keys.shape[1]
        self.rows = list(numbers)
        self._paged_cache, self._cache, self._progress = cache, cast(Any, cache), progress
        self._valid_rotation = None
        skipped = [row.skipped * size for row in planned]
        self._token_counts = [row.length - before for row, before in zip(planned, skipped, strict=True)]
        self._blocks = [row.blocks for row in planned]
        most = max(1, *map(len, self._blocks))
        # Padded with a block of the same row, so that no block of another row is read.
        table = torch.tensor([blocks + (blocks[-1:] or [0]) * (most - len(blocks)) for blocks in self._blocks])
        empty = [number for number, blocks in enumerate(self._blocks) if not blocks]
        self._empty = torch.tensor(empty, device=device) if empty else None
        place = order - torch.tensor(skipped)[:, None]
        block = table.gather(1, (place // size).clamp(max=most - 1))
        self.host_slots, self.host_table = torch.where(real, block * size + place % size, -1), table
        self._added: list[int] = real.sum(1).tolist()
        # The slots of the tokens without padding, as block and offset, in which a layer stores them.
        stored = self.host_slots[real]
        self._real_tokens = None if real.all() else real.flatten().nonzero()[:, 0].to(device)
        self._block_numbers, self._offsets_in_block = (stored // size).to(device), (stored % size).to(device)
        self.positions, self.order = positions.to(device), order.to(device)
        self.slot_mapping = self.host_slots.flatten().to(device)
        self.block_table, self.seq_lens = table.int().to(device), _on_device(self._token_counts, device)
        self._key_index = torch.arange(most * size, device=device)  # index of each key in the blocks of its row
        self._real, self._skipped = real.to(device), torch.tensor(skipped)[:, None].to(device)
        self.block_mask: BlockMask | None = None
        if cache.flex:
            self.block_mask = paged_flex.block_mask(
                self._blocks, keys, order=self.order, real=self._real, skipped=self._skipped, window=cache.window
            )
        # Without padding, rows of equal length need only a causal mask, unless the window is shorter.
        longest = max(1, *self._token_counts)
        self._filled, self._concatenates = slice(0, longest), False
        self.causal = bool(real.all()) and min(self._token_counts) == longest and longest <= (cache.window or longest)
        self._mask: Tensor | None = None
        self._key_places: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """Attention mask as in `CacheStep`, bool `[batch, 1, seq, keys]`, computed on first use."""
        if torch.compiler.is_compiling():  # storing the mask in one layer would recompile the next layer
            return self._build_mask()
        if self._mask is None:
            self._mask = self._build_mask()
        return self._mask

    def _build_mask(self) -> Tensor:
        distance = self.order[:, :, None] - self.key_order[:, None, :]
        visible = distance >= 0
        if self._paged_cache.window is not None:
            visible = visible & (distance < self._paged_cache.window)
        return (visible | ~self._real[:, :, None])[:, None]

    @property
    def key_order(self) -> Tensor:
        """Indices of all keys in their rows, int64 `[batch, keys]`, and 2⁶² for empty slots."""
        return torch.where(self._key_index < self.seq_lens[:, None], self._skipped + self._key_index, EMPTY)

    @property
    def key_positions(self) -> Tensor:  # type: ignore[override]
        """Positions of all keys as in `CacheStep`, int64 `[batch, keys]`. Read it before the cache changes.

        Raises:
            RopeError: on first use, if the step is no longer the newest of its cache.
        """
        if self._key_places is None:
            if self._progress.outdated:
                raise _checks.error(
                    "PagedStep",
                    "key_positions must be read while the step is the newest of its cache",
                    "an outdated one",
                    "Read them before the next call that changes the cache.",
                )
            places = self._paged_cache._rows.key_positions[self.host_table].flatten(1)
            self._key_places = torch.where(self.key_order == EMPTY, EMPTY, places.to(self.order.device))
        return self._key_places

    @property
    def kv_indptr(self) -> Tensor:
        """Index of the first block of each row in `kv_indices`, then the number of all blocks: int32 `[batch + 1]`.

        The name is FlashInfer's.
        """
        return _on_device([0, *accumulate(len(blocks) for blocks in self._blocks)], self.order.device)

    @property
    def kv_indices(self) -> Tensor:
        """Numbers of the blocks of all rows, row by row, int32 `[blocks of all rows]`. The name is FlashInfer's."""
        return _on_device([block for blocks in self._blocks for block in blocks], self.order.device)

    @property
    def kv_last_page_len(self) -> Tensor:
        """Number of tokens in the last block of each row, int32 `[batch]`. The name is FlashInfer's."""
        size = self._paged_cache.keys[0].shape[1]
        return _on_device([(count - 1) % size + 1 if count else 0 for count in self._token_counts], self.order.device)

    @property
    def qo_indptr(self) -> Tensor:
        """Index of each row's first new token, then the number of new tokens, without padding: int32 `[batch + 1]`.

        The name is FlashInfer's; vLLM calls it `query_start_loc`, and FlashAttention `cu_seqlens_q`. To get the queries
        without padding, use `q.flatten(0, 1)[step.slot_mapping >= 0]`.
        """
        return _on_device([0, *accumulate(self._added)], self.order.device)

    def layer(self, index: int) -> PagedLayer:
        """Return the cache of layer `index`, counted from 0, to pass to `RotaryAttention`.

        Raises:
            RopeError: index is out of range.
        """
        last = self._paged_cache.num_layers - 1
        return PagedLayer(self, _checks.integer("PagedStep.layer", "index", index, at_least=0, at_most=last))

    def mark_written(self) -> None:
        """Record that another kernel has stored the keys and values of all layers.

        Raises:
            RopeError: the step is not the newest of its cache, or a layer has already appended.
        """
        if self._progress.stored_count():
            raise _checks.error(
                "PagedStep.mark_written",
                "no layer may have appended in this step",
                f"{self._progress.stored_count()} layers that have",
                "Either append in every layer, or call mark_written() once after your kernel has stored all layers.",
            )
        for index in range(self._paged_cache.num_layers):
            layer = self.layer(index)
            layer._check_may_append()
            layer._progress.stored = True


class PagedLayer(LayerCache):
    """One layer's keys and values in one forward pass with a `PagedKVCache`, created by `PagedStep.layer`.

    It is a `LayerCache` that gathers the keys and values of the rows from their blocks.

    Attributes:
        step: the `PagedStep` of this forward pass.
    """

    _who = "PagedKVCache"
    step: PagedStep

    def write(self, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of the new tokens, once. Use it if your own kernel attends over the blocks.

        Args:
            k: keys, already rotated, `[batch, seq, kv_heads, head_dim]`.
            v: values of the same shape.

        Raises:
            RopeError: as `LayerCache.append`. Nothing is stored then.
        """
        self._check_new(k, v)
        self._check_may_append()
        step = self.step
        for pool, new in ((self._keys, k), (self._values, v)):
            new = new.flatten(0, 1)
            new = new if step._real_tokens is None else new.index_select(0, step._real_tokens)
            pool.index_put_((step._block_numbers, step._offsets_in_block), new)
        self._mark_stored()

    def _mark_stored(self) -> None:
        self._progress.stored = True

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rotation: Rotation | TwoPass | None = None,
        mask: Tensor | BlockMask | None = None,
        scale: float | None = None,
        norm: QKNorm | None = None,
    ) -> Tensor:
        """Rotate q and k, store k and v, and attend over all keys that are visible to the new tokens.

        In a cache with `flex`, under torch.compile, FlexAttention reads the blocks directly if mask is None and
        rotation is not a `TwoPass`. Otherwise keys and values are gathered from the blocks first.

        Args:
            q, k, v, rotation, mask, scale, norm: as in `LayerCache.attend`.

        Returns:
            `[batch, seq, heads, head_dim]`.

        Raises:
            RopeError: as `LayerCache.attend`.
        """
        blocks = self.step.block_mask
        if blocks is None or mask is not None or isinstance(rotation, TwoPass) or not torch.compiler.is_compiling():
            return super().attend(q, k, v, rotation=rotation, mask=mask, scale=scale, norm=norm)
        self._check_query(q, rotation)
        scale = self._keys.shape[-1] ** -0.5 if scale is None else scale
        return rotate_and_attend(
            q, k, v, rotation=rotation, mask=blocks, scale=scale, append=self._append_in_place, norm=norm
        )

    def _append_in_place(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.write(k, v)
        return paged_flex.flatten_blocks(self._keys), paged_flex.flatten_blocks(self._values)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values as `LayerCache.append` does. Return new tensors, in the order of `key_positions`."""
        self.write(k, v)
        return self._gather(self._keys), self._gather(self._values)

    def _append(self, k: Tensor, v: Tensor, filled: slice) -> tuple[Tensor, Tensor]:
        self.write(k, v)
        return self._cached(filled)

    def _slots(self) -> Tensor:
        return self.step.slot_mapping.view(self.step.order.shape)

    def _cached(self, filled: slice) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():  # compiled code manages its own memory
            return self._gather(self._keys)[:, filled], self._gather(self._values)[:, filled]
        pages, count = self.step._paged_cache, self.step.block_table.numel()
        keys = self._gather(self._keys, pages._gathered_keys.get(self._keys, count))
        return keys[:, filled], self._gather(self._values, pages._gathered_values.get(self._values, count))[:, filled]

    def _gather(self, pool: Tensor, out: Tensor | None = None) -> Tensor:
        """Gather the blocks of each row from a pool, `[batch, keys, kv_heads, head_dim]`.

        Slots without a token have finite values if the keys of their row are finite.
        """
        step, table = self.step, self.step.block_table
        kept = torch.index_select(pool, 0, table.flatten(), out=out).view(len(table), -1, *pool.shape[2:])
        return kept if step._empty is None else kept.index_fill_(0, step._empty, 0)


def _on_device(numbers: list[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32).to(device)
