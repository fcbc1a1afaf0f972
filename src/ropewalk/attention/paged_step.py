"""One forward pass with a PagedKVCache: what it says to layers and to attention kernels, and what each layer stores."""

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
from ropewalk.attention.paged_rows import Planned, Rows
from ropewalk.attention.slots import EMPTY
from ropewalk.attention.two_pass import TwoPass
from ropewalk.rotation.api import Rotation
from ropewalk.rotation.qk_norm import QKNorm


class Pools(Protocol):
    """What a step needs of its cache."""

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
    """Memory for what is gathered in one layer, used again in the next one and in the next step.

    New memory of that size comes from the system page by page, which takes 7 times as long as the copy (measured for 8
    rows of 1,024 keys in float32).
    """

    def __init__(self) -> None:
        self._blocks: Tensor | None = None

    def like(self, pool: Tensor, count: int) -> Tensor:
        """Room for so many blocks of a pool, `[count, block_size, kv_heads, head_dim]`."""
        kept = self._blocks
        if kept is None or len(kept) < count:
            more = count if kept is None else max(count, 2 * len(kept))
            with torch.inference_mode(False):  # or it could not be written to outside of it
                kept = self._blocks = torch.empty(more, *pool.shape[1:], dtype=pool.dtype, device=pool.device)
        return kept[:count]

    def __reduce__(self) -> tuple[type[Scratch], tuple[()]]:
        return Scratch, ()  # copies and pickles of a cache do without what is in it


class PagedStep(CacheStep):
    """One forward pass with a `PagedKVCache`. Made by `PagedKVCache.step`, for `RotaryAttention` or for a kernel.

    A kernel that reads pages gets `cache.keys[i]` and `cache.values[i]`, which `PagedLayer.write` has written or which
    it writes itself by `slot_mapping`, and these tables. They count the tokens of this step, too. Those that only some
    kernels ask for are made when they are read.

    Attributes:
        rows: numbers of the rows, in the order of the batch.
        positions, order, key_positions, key_order, mask: as in `CacheStep`. Keys are those of a row's blocks, whole
            ones, as many as the row of this step that has most: few shapes, so that little is compiled anew.
        slot_mapping: where each new token is stored, block · block_size + place in the block, −1 for padding; int64
            `[batch · seq]`, row after row.
        block_table: the blocks of each row, int32 `[batch, most blocks]`, filled up with its last one. With a window,
            blocks that no token of this step can see are not there.
        seq_lens: tokens in these blocks, int32 `[batch]`.
        block_mask: who sees whom, for FlexAttention over all blocks in a row; None in a cache without `flex`.
    """

    _who = "PagedKVCache"

    def __init__(
        self,
        cache: Pools,
        numbers: list[int],
        planned: list[Planned],
        *,
        positions: Tensor,
        order: Tensor,
        real: Tensor,
        progress: Progress,
    ) -> None:
        keys = cache.keys[0]
        device, size = keys.device, keys.shape[1]
        self.rows = list(numbers)
        self._pages, self._cache, self._progress = cache, cast(Any, cache), progress
        self._checked = None
        skipped = [plan.row.skipped * size for plan in planned]
        self._held = [plan.length - before for plan, before in zip(planned, skipped, strict=True)]
        self._blocks = [plan.blocks for plan in planned]
        most = max(1, *map(len, self._blocks))
        # Filled up with a block of the row's own: what another one has left in its blocks is not even read.
        table = torch.tensor([blocks + (blocks[-1:] or [0]) * (most - len(blocks)) for blocks in self._blocks])
        empty = [number for number, blocks in enumerate(self._blocks) if not blocks]
        self._empty = torch.tensor(empty, device=device) if empty else None
        place = order - torch.tensor(skipped)[:, None]
        block = table.gather(1, (place // size).clamp(max=most - 1))
        self.host_slots, self.host_table = torch.where(real, block * size + place % size, -1), table
        self._added: list[int] = real.sum(1).tolist()
        # What a layer stores: its tokens without padding, and block and place of each.
        stored = self.host_slots[real]
        self._stored = None if real.all() else real.flatten().nonzero()[:, 0].to(device)
        self._block, self._place_in_block = (stored // size).to(device), (stored % size).to(device)
        self.positions, self.order = positions.to(device), order.to(device)
        self.slot_mapping = self.host_slots.flatten().to(device)
        self.block_table, self.seq_lens = table.int().to(device), _on_device(self._held, device)
        self._place = torch.arange(most * size, device=device)  # of a key in the blocks of its row
        self._real, self._skipped = real.to(device), torch.tensor(skipped)[:, None].to(device)
        self.block_mask: BlockMask | None = None
        if cache.flex:
            self.block_mask = paged_flex.block_mask(
                self._blocks, keys, order=self.order, real=self._real, skipped=self._skipped, window=cache.window
            )
        # Without padding, rows of one length see their tokens up to each new one, unless a window ends before.
        most_held = max(1, *self._held)
        self._filled, self._beside = slice(0, most_held), False
        self.causal = bool(real.all()) and min(self._held) == most_held and most_held <= (cache.window or most_held)
        self._mask: Tensor | None = None
        self._key_places: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """bool `[batch, 1, seq, keys]`, True for what is seen, as in `CacheStep`; made when it is first read."""
        if torch.compiler.is_compiling():  # a mask that is kept in one layer would have the next one compiled again
            return self._seen()
        if self._mask is None:
            self._mask = self._seen()
        return self._mask

    def _seen(self) -> Tensor:
        distance = self.order[:, :, None] - self.key_order[:, None, :]
        seen = distance >= 0
        if self._pages.window is not None:
            seen = seen & (distance < self._pages.window)
        return (seen | ~self._real[:, :, None])[:, None]

    @property
    def key_order(self) -> Tensor:
        """Of all keys, int64 `[batch, keys]`: their number in their row, 2⁶² where there is none."""
        return torch.where(self._place < self.seq_lens[:, None], self._skipped + self._place, EMPTY)

    @property
    def key_positions(self) -> Tensor:  # type: ignore[override]
        """Of all keys, int64 `[batch, keys]`, as in `CacheStep`. To be read first while the step is the newest.

        Raises:
            RopeError: it is not the newest any more.
        """
        if self._key_places is None:
            if self._progress.outdated:
                raise _checks.error(
                    "PagedStep",
                    "key_positions must be read while the step is the newest of its cache",
                    "an outdated one",
                    "Read them before anything else changes the cache.",
                )
            places = self._pages._rows.key_positions[self.host_table].flatten(1)
            self._key_places = torch.where(self.key_order == EMPTY, EMPTY, places.to(self.order.device))
        return self._key_places

    @property
    def kv_indptr(self) -> Tensor:
        """Where the blocks of each row begin in `kv_indices`, and their number, int32 `[batch + 1]`, for FlashInfer."""
        return _on_device([0, *accumulate(len(blocks) for blocks in self._blocks)], self.order.device)

    @property
    def kv_indices(self) -> Tensor:
        """The blocks of all rows, row after row, int32 `[blocks of all rows]`, for FlashInfer."""
        return _on_device([block for blocks in self._blocks for block in blocks], self.order.device)

    @property
    def kv_last_page_len(self) -> Tensor:
        """Tokens in the last block of each row, int32 `[batch]`, for FlashInfer."""
        size = self._pages.keys[0].shape[1]
        return _on_device([(held - 1) % size + 1 if held else 0 for held in self._held], self.order.device)

    @property
    def qo_indptr(self) -> Tensor:
        """Where the new tokens of each row begin, without padding, and their number, int32 `[batch + 1]`.

        FlashInfer's name; vLLM and FlashAttention call it `query_start_loc` and `cu_seqlens_q`. The queries without
        padding are `q.flatten(0, 1)[step.slot_mapping >= 0]`.
        """
        return _on_device([0, *accumulate(self._added)], self.order.device)

    def layer(self, index: int) -> PagedLayer:
        """The part of one layer, 0 ≤ index < num_layers: what `RotaryAttention` takes as cache.

        Raises:
            RopeError: there is no such layer.
        """
        last = self._pages.num_layers - 1
        return PagedLayer(self, _checks.integer("PagedStep.layer", "index", index, at_least=0, at_most=last))

    def written(self) -> None:
        """Say that keys and values of all layers are stored, where kernels of others have written them.

        Raises:
            RopeError: the step is not the newest of its cache, or layers have stored something already.
        """
        if self._progress.stored():
            raise _checks.error(
                "PagedStep.written",
                "either all layers or none must append",
                f"{self._progress.stored()} that have",
                "Call it for a step in which nothing is appended.",
            )
        for index in range(self._pages.num_layers):
            layer = self.layer(index)
            layer._check_turn()
            layer._progress.stored = True


class PagedLayer(LayerCache):
    """One layer's keys and values in one forward pass with a `PagedKVCache`. Made by `PagedStep.layer`.

    A `LayerCache` whose `attend` gathers the keys and values of the rows from their blocks.

    Attributes:
        step: the `PagedStep` of this forward pass.
    """

    _who = "PagedKVCache"
    step: PagedStep

    def write(self, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of the new tokens, once, for those who attend over the blocks themselves.

        Args:
            k: keys, already rotated, `[batch, seq, kv_heads, head_dim]`.
            v: values of the same shape.

        Raises:
            RopeError: as `LayerCache.append`. Nothing is stored then.
        """
        self._check_new(k, v)
        self._check_turn()
        step = self.step
        for pool, new in ((self._keys, k), (self._values, v)):
            new = new.flatten(0, 1)
            new = new if step._stored is None else new.index_select(0, step._stored)
            pool.index_put_((step._block, step._place_in_block), new)
        self._count()

    def _count(self) -> None:
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
        """Rotate, store, and attend over all keys that the new tokens may see.

        By FlexAttention over the blocks where they lie, in a cache with `flex`, under torch.compile, where there is no
        mask and the rotation has one pass. Else over keys and values that are gathered from them.

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
        return paged_flex.in_a_row(self._keys), paged_flex.in_a_row(self._values)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As `LayerCache.append`. What it returns are new tensors, in the order of `PagedStep.key_positions`."""
        self.write(k, v)
        return self._gathered(self._keys), self._gathered(self._values)

    def _append(self, k: Tensor, v: Tensor, filled: slice) -> tuple[Tensor, Tensor]:
        self.write(k, v)
        return self._kept(filled)

    def _slots(self) -> Tensor:
        return self.step.slot_mapping.view(self.step.order.shape)

    def _kept(self, filled: slice) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():  # which plans its memory itself
            return self._gathered(self._keys)[:, filled], self._gathered(self._values)[:, filled]
        pages, count = self.step._pages, self.step.block_table.numel()
        keys = self._gathered(self._keys, pages._gathered_keys.like(self._keys, count))
        return keys[:, filled], self._gathered(self._values, pages._gathered_values.like(self._values, count))[
            :, filled
        ]

    def _gathered(self, pool: Tensor, out: Tensor | None = None) -> Tensor:
        """`[batch, keys, kv_heads, head_dim]`; what stands where there is no token is finite if the row's keys are."""
        step, table = self.step, self.step.block_table
        kept = torch.index_select(pool, 0, table.flatten(), out=out).view(len(table), -1, *pool.shape[2:])
        return kept if step._empty is None else kept.index_fill_(0, step._empty, 0)


def _on_device(numbers: list[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32).to(device)
