"""The blocks of a paged cache: which rows (requests) hold them, the changes that a step plans, and copies on write.

The state is in NumPy arrays, and no loop in Python runs over rows or blocks, so a step costs by what it changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropewalk import _checks
from ropewalk.attention.step import Step
from ropewalk.attention.store import Store
from ropewalk.attention.tokens import NewTokens, interrupted

Array = NDArray[Any]


class Blocks:
    """A reference-counted pool of block numbers. Each block is either free or held by one or more rows.

    Args:
        count: number of blocks. They are numbered from 0, and all are free at first.

    Attributes:
        holders: number of rows that hold each block, int64 `[count]`.
    """

    def __init__(self, count: int) -> None:
        self.holders = np.zeros(count, np.int64)
        self._free = list(reversed(range(count)))

    @property
    def free(self) -> int:
        """Number of blocks that no row holds."""
        return len(self._free)

    def allocate(self, count: int) -> Array:
        """Allocate `count` blocks with one holder each. The caller must check that enough blocks are free."""
        first = len(self._free) - count
        allocated = np.array(self._free[first:][::-1], np.int32)
        del self._free[first:]
        self.holders[allocated] = 1
        return allocated

    def add_holder(self, blocks: Array) -> None:
        """Add a holder to each block, int32 `[n]`, once for each time that it occurs."""
        np.add.at(self.holders, blocks, 1)

    def release(self, blocks: Array) -> None:
        """Remove a holder from each block, int32 `[n]`. A block without holders becomes free."""
        if len(blocks):
            np.subtract.at(self.holders, blocks, 1)
            released = np.unique(blocks)
            self._free.extend(released[self.holders[released] == 0].tolist())

    def recount(self, held: Array) -> None:
        """Count the holders of all blocks again, given the blocks of all holders, int32 `[n]`."""
        self.holders[:] = 0
        self.add_holder(held)
        self._free = np.flatnonzero(self.holders == 0)[::-1].tolist()


class Table(NamedTuple):
    """The cached tokens of some rows. No array is ever changed in place, so steps and states of the cache share them.

    Attributes:
        blocks: numbers of the blocks with the tokens of each row, in order, int32 `[rows, width]`. After its blocks, a
            row repeats the last one, so that a kernel that reads them reads no block of another row.
        counts: number of blocks of each row, int64 `[rows]`.
        skipped: number of blocks behind those of the sinks that were freed because they left the window, int64
            `[rows]`.
        length: number of tokens so far, including those of skipped blocks, int64 `[rows]`.
        position: position of the next token, int64 `[rows]`.
        written: number of tokens whose slots may hold anything, at least length: NaN of tokens that were dropped may be
            in the slots after the last token. Later slots of the last block are finite in all pools. int64 `[rows]`.
        limit: number of tokens up to which the row needs neither a new block nor a copy of its last one, as far as is
            known, int64 `[rows]`.
    """

    blocks: Array
    counts: Array
    skipped: Array
    length: Array
    position: Array
    written: Array
    limit: Array

    @staticmethod
    def empty(rows: int) -> Table:
        """Return rows without tokens."""
        return Table(np.zeros((rows, 1), np.int32), *np.zeros((6, rows), np.int64))

    def is_held(self) -> Array:
        """Return where `blocks` are blocks of the row and not repeated, bool `[rows, width]`."""
        held: Array = np.arange(self.blocks.shape[1]) < self.counts[:, None]
        return held

    def held(self) -> Array:
        """Return the blocks of all rows, row by row, int32 `[blocks]`."""
        held: Array = self.blocks[self.is_held()]
        return held

    def last(self) -> Array:
        """Return the last block of each row, int32 `[rows]`, and any number for a row without blocks."""
        last: Array = self.blocks[np.arange(len(self.counts)), np.maximum(self.counts - 1, 0)]
        return last

    def filled(self) -> Table:
        """Return the table with the last block of each row repeated after its blocks."""
        return self._replace(blocks=np.where(self.is_held(), self.blocks, self.last()[:, None]))

    def resized(self, width: int) -> Table:
        """Return the table with this width, at least the largest count."""
        missing = width - self.blocks.shape[1]
        if not missing:
            return self
        if missing < 0:
            return self._replace(blocks=np.ascontiguousarray(self.blocks[:, :width]))
        return self._replace(blocks=np.pad(self.blocks, ((0, 0), (0, missing)), "edge"))

    def select(self, chosen: Array | None) -> Table:
        """Return rows by their indices `[n]`. None means all rows."""
        return self if chosen is None else Table(*(x[chosen] for x in self))

    def put(self, chosen: Array | None, rows: Table) -> Table:
        """Return the table with other rows at these indices. None means all rows."""
        if chosen is None:
            return rows
        width = max(self.blocks.shape[1], rows.blocks.shape[1])
        table = Table(*(x.copy() for x in self.resized(width)))
        for x, y in zip(table, rows.resized(width), strict=True):
            x[chosen] = y
        return table

    def append(self, row: Table) -> Table:
        """Return the table with one more row."""
        width = max(self.blocks.shape[1], row.blocks.shape[1])
        return Table(*(np.concatenate(both) for both in zip(self.resized(width), row.resized(width), strict=True)))


class Plan(NamedTuple):
    """The changes that the newest step makes once all layers have stored its tokens.

    Attributes:
        step: the forward pass. None until it has been created.
        numbers: numbers of the rows of the step.
        chosen: their indices in the table of all rows. None means all rows.
        table: state of the rows of the step after it, as wide as its largest count, and at least 1.
        allocated: blocks allocated for the step, which the plan holds until the tokens are counted, int32 `[n]`.
        replaced: shared blocks that were copied for a row. Each loses a holder once the tokens are counted.
    """

    step: Step | None
    numbers: list[int]
    chosen: Array | None
    table: Table
    allocated: Array
    replaced: Array


class Moves(NamedTuple):
    """How `shift` or `move` moves the keys of some rows: each block once for each way to move its keys.

    Attributes:
        blocks, deltas: number of a block, int32 `[moves]`, and the distance of each of its keys, int64
            `[moves, block_size]`.
        copied: whether they move in a copy of the block, because other rows that hold it do not move with it.
        times: number of rows for which they move, int64 `[moves]`.
        moved: state of the rows afterwards, without the copies.
        which: for each block of these rows (`Table.held`) the index of its move, and −1 if it does not move.
    """

    blocks: Array
    deltas: Array
    copied: Array
    times: Array
    moved: Table
    which: Array


class Rows:
    """All rows of a paged cache.

    Args:
        stores: keys and values of each layer.
        count, block_size: number of blocks, and of slots in a block.
        window: number of tokens that each token attends to. None means no limit.
        sinks: with window, tokens at the start of a row to which every token attends.

    Attributes:
        front: number of blocks at the start of a row that are never freed, because sinks are in them.
        blocks: the allocator of blocks.
        next_number: number of the next row.
        key_positions: position of the token in each slot, int64 `[blocks, block_size]`, including tokens of the newest
            step.
    """

    def __init__(self, stores: Sequence[Store], count: int, block_size: int, window: int | None, sinks: int) -> None:
        self.block_size, self.window, self.front = block_size, window, -(-sinks // block_size)
        self.blocks = Blocks(count)
        self.next_number = 0
        self.key_positions = np.zeros((count, self.block_size), np.int64)
        self._stores = stores
        # The index of each row in the table by its number, the table, the plan, and whether its tokens have been
        # counted. A change replaces them in one assignment. During the change, `_changing` is True, because the counts
        # of `blocks` may differ. If an exception interrupts it (Ctrl-C, no memory), `settle` counts the blocks again.
        self._state: tuple[dict[int, int], Table, Plan | None, bool] = ({}, Table.empty(0), None, False)
        self._changing = False
        self.moving: list[str] = []  # the call that is moving keys, if one is or was interrupted

    @property
    def index(self) -> dict[int, int]:
        """The index in the table of each existing row by its number, in the order of their creation."""
        return self._state[0]

    @property
    def table(self) -> Table:
        """The existing rows. The tokens of the newest step must have been counted (`settle`)."""
        return self._state[1]

    @property
    def plan(self) -> Plan | None:
        """Changes of the newest step. None if there is no step or the newest one is outdated."""
        return self._state[2]

    @property
    def open_plan(self) -> Plan | None:
        """The plan, if its tokens have not been counted."""
        _, _, plan, counted = self._state
        return None if counted else plan

    def replace(
        self, index: dict[int, int], table: Table, *, taken: Array | None = None, released: Array | None = None
    ) -> None:
        """Replace all rows, and drop the newest step. Blocks in `taken` gain a holder, those in `released` lose one."""
        self._changing = True
        self._release_plan()
        self._state = index, table, None, False
        if taken is not None:
            self.blocks.add_holder(taken)
        if released is not None:
            self.blocks.release(released)
        self._changing = False

    def drop_step(self) -> None:
        """Mark the newest step as outdated, and free its blocks unless its tokens have been counted."""
        self.replace(self.index, self.table)

    def add(self, row: Table) -> int:
        """Add a row, which becomes a holder of its blocks, and return its number."""
        number, self.next_number = self.next_number, self.next_number + 1
        self._changing = True
        index, table, plan, counted = self._state
        if plan is not None and plan.chosen is None:  # its rows are no longer all rows
            plan = plan._replace(chosen=np.arange(len(index)))
        self._state = {**index, number: len(index)}, table.append(row), plan, counted
        self.blocks.add_holder(row.held())
        self._changing = False
        return number

    def remove(self, numbers: list[int], chosen: Array | None) -> None:
        """Remove rows, and drop the newest step."""
        left = [number for number in self.index if number not in set(numbers)]
        kept = np.array([self.index[number] for number in left], np.int64)
        released = self.table.select(chosen).held()
        index = {number: i for i, number in enumerate(left)}
        self.replace(index, self.table.select(kept), released=released)

    def plan_moves(self, who: str, rows: Table, deltas: Array, position: Array) -> Moves:
        """Group the moves of rows by block and distances.

        A block is copied if it also belongs to a row that moves by other distances or not at all.

        Args:
            deltas: distance of each slot of the rows, int64 `[rows, slots]`, or of all their slots, `[rows, 1]`.
            position: next position of each row afterwards, int64 `[rows]`.

        Raises:
            RopeError: there are not enough free blocks for the copies.
        """
        is_held, holders = rows.is_held(), self.blocks.holders
        of_slots = np.broadcast_to(deltas, (len(deltas), is_held.shape[1] * self.block_size))
        moves = np.insert(of_slots.reshape(*is_held.shape, -1)[is_held], 0, rows.held(), axis=1)
        unique, which, times = np.unique(moves, axis=0, return_inverse=True, return_counts=True)
        blocks, distances = unique[:, 0], unique[:, 1:]
        is_move = distances.any(1)
        which = np.where(is_move, is_move.cumsum() - 1, -1)[which.ravel()]
        blocks, distances, times = blocks[is_move], distances[is_move], times[is_move]
        moving = np.zeros_like(holders)
        np.add.at(moving, blocks, times)
        copied = moving[blocks] < holders[blocks]
        copied[1:] |= blocks[1:] == blocks[:-1]  # only the first distance of a block may move it in place
        self._check_free(who, int(copied.sum()), holders)
        moved = rows._replace(position=position, limit=rows.length)  # rows may share the copies
        return Moves(blocks.astype(np.int32), distances, copied, times, moved, which)

    def move(self, chosen: Array | None, moves: Moves) -> Array:
        """Change the positions of rows and of their tokens. The newest step is dropped.

        Args:
            chosen: indices of the rows. None means all rows.
            moves: from `plan_moves`.

        Returns:
            The block of each move, int32 `[moves]`. Its keys must then be rotated.
        """
        source, rows, is_held = moves.blocks[moves.copied], moves.moved, moves.moved.is_held()
        self._changing = True
        self._release_plan()
        copies, times = self.blocks.allocate(len(source)), moves.times[moves.copied]
        self.blocks.holders[copies] = times
        self.blocks.release(source.repeat(times))
        targets, blocks = moves.blocks.copy(), rows.blocks.copy()
        targets[moves.copied] = copies
        is_held[is_held] = moves.which >= 0
        blocks[is_held] = targets[moves.which[moves.which >= 0]]
        self._state = self.index, self.table.put(chosen, rows._replace(blocks=blocks).filled()), None, False
        self._changing = False
        self._copy(source, copies)
        self.key_positions[targets] += moves.deltas
        return targets

    def select(self, who: str, numbers: int | Sequence[int] | Tensor | None) -> tuple[list[int], Array | None]:
        """Check row numbers. None means all rows.

        Returns:
            The numbers, and the indices of the rows in the table, int64 `[rows]`. None means all rows.
        """
        everything = list(self.index)
        if numbers is None:
            return everything, None
        listed = None
        if isinstance(numbers, Tensor) and numbers.ndim == 1 and numbers.dtype in (torch.int32, torch.int64):
            listed = numbers.tolist()
        elif isinstance(numbers, int):
            listed = [numbers]
        elif isinstance(numbers, list | tuple | range):
            listed = list(numbers)
        must, fix = "rows must be distinct numbers returned by admit or fork", "Pass e.g. [cache.admit()]."
        if listed is None:
            raise _checks.error(who, must, _checks.describe(numbers), fix)
        for row in listed:
            if type(row) is not int or row not in self.index:
                _checks.integer(who, "each of rows", row, at_least=0)
                if row not in self.index:
                    got = f"row {row}, which was freed" if row < self.next_number else f"row {row}"
                    raise _checks.error(who, must, got, f"The existing rows are {_checks.shown(everything)}.")
        if len(set(listed)) < len(listed):
            raise _checks.error(who, must, _checks.shown(listed), "Pass each row once.")
        listed = [int(row) for row in listed]
        if listed == everything:
            return listed, None
        index = self.index
        return listed, np.array([index[row] for row in listed], np.int64)

    def positions_of(self, rows: Table) -> Array:
        """Return the positions of all slots of rows, int64 `[rows, slots]`. See `Table.blocks` for the last ones."""
        return self.key_positions[rows.blocks].reshape(len(rows.blocks), -1)

    def in_blocks(self, rows: Table) -> Array:
        """Return the number of tokens that each row has in its blocks, int64 `[rows]`."""
        counts: Array = rows.length - rows.skipped * self.block_size
        return counts

    def truncated(self, rows: Table, length: Array, position: Array) -> Table:
        """Return rows with their first tokens only, in a cache without a window."""
        count = (length + self.block_size - 1) // self.block_size
        return rows._replace(counts=count, length=length, position=position, limit=length).filled()

    def truncated_at(self, rows: Table, at: Array) -> Table:
        """Return rows with the tokens before the first one at position `at` or later, in a cache without a window."""
        places, length = self.positions_of(rows), rows.length[:, None]
        slot = np.arange(places.shape[1])
        is_later = (places >= at[:, None]) & (slot < length)
        return self.truncated(rows, np.where(is_later, slot, length).min(1), at.copy())

    def available(self) -> int:
        """Return the number of blocks that are free once the newest step is dropped."""
        self.settle()
        plan = self.open_plan
        return self.blocks.free + (0 if plan is None else len(plan.allocated))

    def settle(self) -> None:
        """Count the tokens of the newest step if all layers have stored them.

        The last layer does not do this, because it may be compiled, and the state of the rows is on the host.
        """
        plan, size = self.open_plan, self.block_size
        if self._changing:
            held = self.table.held()
            self.blocks.recount(held if plan is None else np.concatenate([held, plan.allocated]))
            self._changing = False
        if plan is None or plan.step is None or not plan.step._is_complete():
            return
        rows, released = plan.table, plan.replaced
        if self.window is not None:  # the next token attends to itself and the previous window - 1 tokens
            unseen = np.maximum((rows.length - self.window + 1) // size - self.front, 0) - rows.skipped
            if unseen.any():
                width = rows.blocks.shape[1]
                column, by = np.arange(width), unseen[:, None]
                is_behind = column >= self.front
                released = np.concatenate([released, rows.blocks[is_behind & (column < self.front + by)]])
                blocks = np.take_along_axis(rows.blocks, np.minimum(column + is_behind * by, width - 1), 1)
                rows = rows._replace(blocks=blocks, counts=rows.counts - unseen, skipped=rows.skipped + unseen)
        self._changing = True
        self._state = self.index, self.table.put(plan.chosen, rows), plan, True
        self.blocks.release(released)
        self._changing = False

    def check_finished(self, who: str) -> Plan | None:
        """Return the plan of the newest step, or None if no layer has stored tokens. Raise if only some have."""
        if self.moving:
            raise interrupted(who, self.moving)
        self.settle()
        _, _, plan, counted = self._state
        if plan is not None and plan.step is not None:
            plan.step._is_complete(who)
        return plan if counted else None

    def extend(
        self, who: str, numbers: list[int], chosen: Array | None, before: Table, kept: Table, new: NewTokens
    ) -> Plan:
        """Truncate rows immediately, and plan their new tokens. The previous step is dropped.

        Args:
            who: name of the caller in the message.
            numbers, chosen: the rows, from `select`.
            before, kept: their state now, and truncated. The same object if nothing is truncated.
            new: the new tokens.

        Raises:
            RopeError: there are not enough free blocks. Nothing has changed then.
        """
        size, pool, holders = self.block_size, self.blocks, self.blocks.holders
        length, position = new.length.numpy(), new.position.numpy()
        dropped = none = before.blocks[:0, 0]
        if kept is not before:
            dropped = before.blocks[before.is_held() & ~kept.is_held()]
            holders = holders.copy()
            np.subtract.at(holders, dropped, 1)
        written = np.maximum(kept.written, length)  # also if the step is dropped
        rows = kept._replace(length=length, position=position, written=written)
        table = self.table
        if chosen is None:
            table = kept._replace(written=written)
        elif kept is before:
            table = table._replace(written=table.written.copy())
            table.written[chosen] = written
        else:
            table = table.put(chosen, kept._replace(written=written))
        is_changed = (length > kept.limit) | (kept.written > length)
        if not is_changed.any():
            rows = rows.resized(max(1, int(rows.counts.max())))
            self._changing = True
            self._release_plan()
            pool.release(dropped)
            plan = Plan(None, numbers, chosen, rows, none, none)
            self._state = self.index, table, plan, False
            self._changing = False
            return plan
        which = None if is_changed.all() else np.flatnonzero(is_changed)
        old, now = kept.select(which), rows.select(which)
        counts, last = (now.length + size - 1) // size - old.skipped, old.last()
        shared = (old.length % size > 0) & (holders[last] > 1)  # whether the last block is partial and shared
        copied = shared & (now.length > old.length)
        more = counts - old.counts + copied  # new blocks of each row
        needed = int(more.sum())
        self._check_free(who, needed, holders)
        self._changing = True
        self._release_plan()
        pool.release(dropped)
        allocated, copies = pool.allocate(needed), none
        now = now.resized(max(old.blocks.shape[1], int(counts.max())))._replace(counts=counts)
        if needed:
            row, first = np.arange(len(more)).repeat(more), more.cumsum() - more
            blocks = now.blocks.copy()
            blocks[row, np.arange(needed) + (old.counts - copied - first)[row]] = allocated
            now, copies = now._replace(blocks=blocks).filled(), allocated[first[copied]]
        end, is_kept = (counts + old.skipped) * size, shared & ~copied
        dirty = np.where(more > 0, end, np.where(is_kept, now.length, np.minimum(old.written, end)))
        now = now._replace(written=np.where(is_kept, now.written, now.length), limit=np.where(is_kept, now.length, end))
        rows = rows.put(which, now)
        rows = rows.resized(max(1, int(rows.counts.max())))
        plan = Plan(None, numbers, chosen, rows, allocated, last[copied])
        self._state = self.index, table, plan, False
        self._changing = False
        self._copy(last[copied], copies)
        self._clear(now.last(), now.length - end + size, dirty - end + size)
        return plan

    def attach(self, step: Step) -> None:
        """Make `step` the forward pass of the plan that `extend` has made."""
        index, table, plan, counted = self._state
        self._state = index, table, plan and plan._replace(step=step), counted

    def _on_device(self, *numbers: Array) -> list[Tensor]:
        return list(torch.from_numpy(np.stack(numbers).astype(np.int64)).to(self._stores[0].keys.device))

    def _copy(self, source: Array, target: Array) -> None:
        """Copy each block in `source` to the block at the same index in `target`, in all layers."""
        if len(source):
            self.key_positions[target] = self.key_positions[source]
            sources, targets = self._on_device(source, target)
            for store in self._stores:
                store.copy(sources, targets, self.block_size)

    def _clear(self, blocks: Array, begin: Array, end: Array) -> None:
        """Clear slots of blocks from begin up to end, int64 `[blocks]`, which hold no token of the row that reads them.

        A token that was dropped, or a previous row, may have left NaN there. A mask would not help: the attention
        weight of such a key is 0, and 0 · NaN is NaN.
        """
        place = np.arange(self.block_size)
        which, place = ((place >= begin[:, None]) & (place < end[:, None])).nonzero()
        if len(which):
            block, slot = self._on_device(blocks[which], place)
            for store in self._stores:
                store.clear((block, slot))

    def _check_free(self, who: str, needed: int, holders: Array) -> None:
        """Raise unless this number of blocks is free once the newest step is dropped.

        Args:
            holders: number of holders of each block by then, int64 `[blocks]`.
        """
        free = self.available()
        if holders is not self.blocks.holders:
            free += int((holders == 0).sum()) - self.blocks.free
        if needed > free:
            fix = "Free or reset rows that have ended, send fewer tokens, or build the cache with more blocks."
            raise _checks.error(who, f"the number of free blocks must be at least {needed}", f"{free}", fix)

    def _release_plan(self) -> None:
        """Mark the newest step as outdated. Free its blocks unless its tokens have been counted."""
        if self.plan is not None:
            if self.plan.step is not None:
                self.plan.step._outdated = True
            if self.open_plan is not None:
                self.blocks.release(self.plan.allocated)
