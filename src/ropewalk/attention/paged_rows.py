"""The rows (requests) of a paged cache: their blocks, the changes that a step plans, and copies on write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk.attention import paged_checks
from ropewalk.attention.blocks import Blocks
from ropewalk.attention.cache_step import Progress


class Row(NamedTuple):
    """The cached tokens of one row. A change of the row replaces it.

    Attributes:
        blocks: numbers of the blocks with its tokens, in order. The list is never changed.
        skipped: number of blocks at the start of the row that were freed because they left the window.
        length: number of tokens so far, including those of skipped blocks.
        position: position of the next token.
    """

    blocks: list[int]
    skipped: int = 0
    length: int = 0
    position: int = 0


class Plan(NamedTuple):
    """The changes that the newest step makes once all layers have stored its tokens.

    Attributes:
        progress: state of the forward pass.
        rows: state of the rows of the step after it, by number.
        allocated: blocks allocated for the step, which the plan holds until the tokens are counted.
        replaced: shared blocks that were copied for a row. Each loses a holder once the tokens are counted.
    """

    progress: Progress
    rows: dict[int, Row]
    allocated: list[int]
    replaced: list[int]


class Rows:
    """All rows of a paged cache. Their state is in plain Python and CPU tensors.

    Args:
        pools: keys and values of all layers, `[blocks, block_size, ...]`.
        window: number of tokens that each token attends to. None means no limit.

    Attributes:
        blocks: the allocator of blocks.
        next_number: number of the next row.
        key_positions: position of the token in each slot, int64 `[blocks, block_size]`, including tokens of the newest
            step.
    """

    def __init__(self, pools: list[Tensor], window: int | None) -> None:
        count, self.block_size = pools[0].shape[:2]
        self.window = window
        self.blocks = Blocks(count, self.block_size)
        self.next_number = 0
        self.key_positions = torch.zeros(count, self.block_size, dtype=torch.int64)
        self._pools = [*pools, self.key_positions]
        # The rows, the plan, and whether its tokens have been counted. A change replaces them in one assignment. During
        # the change, `_changing` is True, because the counts of `blocks` may differ. If an exception interrupts it
        # (Ctrl-C, no memory), `settle` counts the blocks again.
        self._state: tuple[dict[int, Row], Plan | None, bool] = ({}, None, False)
        self._changing = False

    @property
    def by_number(self) -> dict[int, Row]:
        """The existing rows, in the order of their creation."""
        return self._state[0]

    @property
    def plan(self) -> Plan | None:
        """Changes of the newest step. None if there is no step or the newest one is outdated."""
        return self._state[1]

    @property
    def open_plan(self) -> Plan | None:
        """The plan, if its tokens have not been counted."""
        _, plan, counted = self._state
        return None if counted else plan

    def replace(self, rows: dict[int, Row], *, released: Iterable[int] = ()) -> None:
        """Replace all rows, and drop the newest step. Each block in `released` loses a holder among the rows."""
        self._changing = True
        self._release_plan()
        self._state = rows, None, False
        self.blocks.release(released)
        self._changing = False

    def drop_step(self) -> None:
        """Mark the newest step as outdated, and free its blocks unless its tokens have been counted."""
        self.replace(self.by_number)

    def add(self, row: Row) -> int:
        """Add a row, which becomes a holder of its blocks, and return its number."""
        number, self.next_number = self.next_number, self.next_number + 1
        self._changing = True
        rows, plan, counted = self._state
        self._state = {**rows, number: row}, plan, counted
        self.blocks.add_holder(row.blocks)
        self._changing = False
        return number

    def move(self, deltas: dict[int, int], copied: list[tuple[int, list[int]]]) -> list[int]:
        """Change the next positions of rows, and give some of them copies of blocks. The newest step is dropped.

        Args:
            deltas: distance by which each row moves, by number.
            copied: blocks to copy, each with the rows that get the copy instead.

        Returns:
            The copies.
        """
        self._changing = True
        self._release_plan()
        copies = self.blocks.allocate(len(copied))
        instead: dict[int, dict[int, int]] = {number: {} for number in deltas}
        for (block, numbers), copy in zip(copied, copies, strict=True):
            self.blocks.add_holder([copy] * (len(numbers) - 1))
            self.blocks.release([block] * len(numbers))
            for number in numbers:
                instead[number][block] = copy
        moved = {}
        for number, delta in deltas.items():
            row, new = self.by_number[number], instead[number]
            blocks = [new.get(block, block) for block in row.blocks]
            moved[number] = row._replace(blocks=blocks, position=row.position + delta)
        self._state = {**self.by_number, **moved}, None, False
        self._changing = False
        self.copy([block for block, _ in copied], copies)
        return copies

    def select(self, who: str, numbers: int | Sequence[int] | Tensor | None) -> list[int]:
        """Check row numbers and return them as a list. None means all rows."""
        return paged_checks.row_numbers(who, numbers, self.by_number, self.next_number)

    def get(self, numbers: Iterable[int]) -> list[Row]:
        """Return the rows with these numbers. The tokens of the newest step must have been counted (`settle`)."""
        return [self.by_number[number] for number in numbers]

    def current(self) -> list[Row]:
        """Return all rows, after counting the tokens that all layers have stored."""
        self.settle()
        return list(self.by_number.values())

    def block_count(self, length: int) -> int:
        """Return the number of blocks that `length` tokens need."""
        return -(-length // self.block_size)

    def cached_positions(self, row: Row) -> Tensor:
        """Return the positions of the cached tokens of a row, without skipped blocks, int64 `[tokens]`."""
        return self.key_positions[row.blocks].flatten()[: row.length - row.skipped * self.block_size]

    def length_before(self, row: Row, at: int) -> int:
        """Return the number of tokens before the first token whose position is `at` or larger."""
        later = (self.cached_positions(row) >= at).nonzero()
        return int(later[0]) if len(later) else row.length

    def available(self) -> int:
        """Return the number of blocks that are free once the newest step is dropped."""
        self.settle()
        plan = self.open_plan
        return self.blocks.free + (0 if plan is None else len(plan.allocated))

    def settle(self) -> None:
        """Count the tokens of the newest step if all layers have stored them.

        The last layer does not do this, because it may be compiled, and the state of the rows is plain Python.
        """
        plan = self.open_plan
        if self._changing:
            held = [row.blocks for row in self.by_number.values()] + ([] if plan is None else [plan.allocated])
            self.blocks.recount(chain.from_iterable(held))
            self._changing = False
        if plan is None or not plan.progress.complete:
            return
        rows, released = {**self.by_number, **plan.rows}, list(plan.replaced)
        if self.window is not None:  # the next token attends to itself and the previous window - 1 tokens
            for number, row in plan.rows.items():
                unseen = max(0, row.length - self.window + 1) // self.block_size - row.skipped
                released += row.blocks[:unseen]
                rows[number] = row._replace(blocks=row.blocks[unseen:], skipped=row.skipped + unseen)
        self._changing = True
        self._state = rows, plan, True
        self.blocks.release(released)
        self._changing = False

    def check_finished(self, who: str) -> Plan | None:
        """Return the plan of the newest step, or None if no layer has stored tokens. Raise if only some have."""
        self.settle()
        _, plan, counted = self._state
        if plan is not None:
            plan.progress.check_complete(who)
        return plan if counted else None

    def extend(
        self,
        who: str,
        numbers: list[int],
        *,
        lengths: list[int],
        starts: list[int],
        added: list[int],
        following: list[int],
        progress: Progress,
    ) -> Plan:
        """Truncate rows immediately, and plan their new tokens. The previous step is dropped.

        Args:
            who: name of the caller in the message.
            numbers: numbers of the rows.
            lengths, starts: number of tokens that each row keeps, and the position at which it continues.
            added: number of new tokens of each row.
            following: position of the next token of each row after the step.
            progress: state of the forward pass.

        Raises:
            RopeError: there are not enough free blocks. Nothing has changed then.
        """
        rows, size = self.get(numbers), self.block_size
        kept = [
            row.blocks if n == row.length else row.blocks[: self.block_count(n) - row.skipped]
            for row, n in zip(rows, lengths, strict=True)
        ]
        dropped = Counter(block for row, blocks in zip(rows, kept, strict=True) for block in row.blocks[len(blocks) :])
        needs: list[tuple[int, bool]] = []  # number of new blocks, and whether the last old one is partial and shared
        needed = 0
        for row, blocks, length, more in zip(rows, kept, lengths, added, strict=True):
            shared = length % size > 0 and self.blocks.holders(blocks[-1]) - dropped[blocks[-1]] > 1
            needs.append((self.block_count(length + more) - row.skipped - len(blocks), shared))
            needed += needs[-1][0] + (shared and more > 0)
        paged_checks.check_free_blocks(who, needed, self.available() + self.blocks.freed_by(dropped))
        truncated, plan, copies = {}, Plan(progress, {}, [], []), []
        written, stale = self.blocks.written, {}  # the slots of each block that tokens use, if more have been written
        self._changing = True
        self._release_plan()
        self.blocks.release(dropped.elements())
        for number, row, blocks, (count, shared), length, start, more, position in zip(
            numbers, rows, kept, needs, lengths, starts, added, following, strict=True
        ):
            if length != row.length or start != row.position:
                truncated[number] = Row(blocks, row.skipped, length, start)
            copied = shared and more > 0
            if count or copied:
                new = self.blocks.allocate(count + copied)
                plan.allocated.extend(new)
                if copied:
                    plan.replaced.append(blocks[-1])
                    copies.append(new[0])
                    blocks = blocks[:-1]
                for block in blocks[-1:]:
                    written[block] = size
                blocks = blocks + new
            plan.rows[number] = Row(blocks, row.skipped, length + more, position)
            if blocks and (copied or not shared):
                used = (length + more - 1) % size + 1
                if written[blocks[-1]] > used:
                    stale[blocks[-1]] = used
                else:
                    written[blocks[-1]] = used
        self._state = {**self.by_number, **truncated}, plan, False
        self._changing = False
        self.copy(plan.replaced, copies)
        if stale:
            self._clear([(block, place) for block, used in stale.items() for place in range(used, written[block])])
            for block, used in stale.items():
                written[block] = used
        return plan

    def copy(self, old: list[int], new: list[int]) -> None:
        """Copy each block in `old` to the block at the same index in `new`, in all pools."""
        self._on_each_pool(old, new, lambda pool, old, new: pool.index_copy_(0, new, pool.index_select(0, old)))

    def _clear(self, slots: list[tuple[int, int]]) -> None:
        """Zero slots, given by block and place, that hold no token of the rows that attention reads.

        A token that was dropped, or a previous row, may have left NaN there. A mask would not help: the attention
        weight of such a key is 0, and 0 · NaN is NaN.
        """
        blocks, places = zip(*slots, strict=True)
        self._on_each_pool(
            blocks, places, lambda pool, block, place: pool.index_put_((block, place), pool.new_zeros(()))
        )

    def _on_each_pool(
        self, first: Sequence[int], second: Sequence[int], change: Callable[[Tensor, Tensor, Tensor], object]
    ) -> None:
        """Call `change` with each pool and both lists as tensors on its device, unless the lists are empty."""
        if not first:
            return
        host = torch.tensor([first, second])
        there = host.to(self._pools[0].device)
        for pool in self._pools:
            change(pool, *(host if pool is self.key_positions else there))

    def _release_plan(self) -> None:
        """Mark the newest step as outdated. Free its blocks unless its tokens have been counted."""
        if self.plan is not None:
            self.plan.progress.outdated = True
            if self.open_plan is not None:
                self.blocks.release(self.plan.allocated)
