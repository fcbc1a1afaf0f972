"""The rows (requests) of a paged cache: their blocks, the changes that the newest step plans, and copies on write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ropewalk.attention import paged_checks
from ropewalk.attention.blocks import Blocks
from ropewalk.attention.cache_step import Progress


@dataclass
class Row:
    """The cached tokens of one row.

    Attributes:
        blocks: numbers of the blocks with its tokens, in order.
        skipped: number of blocks at the start of the row that were freed because they left the window.
        length: number of tokens so far, including those of skipped blocks.
        position: position of the next token.
    """

    blocks: list[int] = field(default_factory=list)
    skipped: int = 0
    length: int = 0
    position: int = 0


@dataclass
class PlannedRow:
    """The state of a row after a forward pass has stored its tokens."""

    row: Row
    blocks: list[int]
    length: int
    position: int


@dataclass
class Plan:
    """The changes that the newest step makes once all layers have stored its tokens.

    Attributes:
        numbers: numbers of the rows of the step.
        progress: state of the forward pass.
        rows: state of these rows after the step.
        allocated: blocks allocated for the step.
        replaced: shared blocks that were copied for a row. Each loses a holder once the tokens are counted.
        counted: whether the tokens have been counted.
    """

    numbers: list[int]
    progress: Progress
    rows: list[PlannedRow]
    allocated: list[int]
    replaced: list[int]
    counted: bool = False


class Rows:
    """All rows of a paged cache. Their state is in plain Python and CPU tensors.

    Args:
        pools: keys and values of all layers, `[blocks, block_size, ...]`.
        window: number of tokens that each token attends to. None means no limit.

    Attributes:
        blocks: the allocator of blocks.
        by_number: existing rows, in the order of their creation.
        next_number: number of the next row.
        key_positions: position of the token in each slot, int64 `[blocks, block_size]`, including tokens of the newest
            step.
        plan: changes of the newest step. None if there is no step or the newest one is outdated.
    """

    def __init__(self, pools: list[Tensor], window: int | None) -> None:
        count, self.block_size = pools[0].shape[:2]
        self.window = window
        self.blocks = Blocks(count)
        self.by_number: dict[int, Row] = {}
        self.next_number = 0
        self.key_positions = torch.zeros(count, self.block_size, dtype=torch.int64)
        self.plan: Plan | None = None
        self._pools = [*pools, self.key_positions]

    def select(self, who: str, numbers: int | Sequence[int] | Tensor | None) -> list[int]:
        """Check row numbers and return them as a list. None means all rows."""
        return paged_checks.row_numbers(who, numbers, self.by_number, self.next_number)

    def get(self, numbers: list[int]) -> list[Row]:
        """Return the rows with these numbers."""
        return [self.by_number[number] for number in numbers]

    def add(self, row: Row) -> int:
        """Add a row and return its number. The caller must already have counted the row as a holder of its blocks."""
        number, self.next_number = self.next_number, self.next_number + 1
        self.by_number[number] = row
        return number

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
        return self.blocks.free + (len(self.plan.allocated) if self.plan is not None and not self.plan.counted else 0)

    def settle(self) -> None:
        """Count the tokens of the newest step if all layers have stored them.

        The last layer does not do this, because it may be compiled, and the state of the rows is plain Python.
        """
        plan = self.plan
        if plan is None or plan.counted or plan.progress.stored_count() < len(plan.progress.layers):
            return
        plan.counted = True
        for planned in plan.rows:
            row = planned.row
            row.blocks, row.length, row.position = planned.blocks, planned.length, planned.position
            if self.window is not None:  # the next token attends to itself and the previous window - 1 tokens
                unseen = max(0, row.length - self.window + 1) // self.block_size - row.skipped
                self.blocks.release(row.blocks[:unseen])
                row.blocks, row.skipped = row.blocks[unseen:], row.skipped + unseen
        self.blocks.release(plan.replaced)

    def check_finished(self, who: str) -> Plan | None:
        """Return the plan of the newest step, or None if no layer has stored tokens. Raise if only some have."""
        self.settle()
        if self.plan is None:
            return None
        self.plan.progress.check_complete(who)
        return self.plan if self.plan.counted else None

    def invalidate_plan(self) -> None:
        """Mark the newest step as outdated, and free its blocks unless its tokens have been counted."""
        if self.plan is not None:
            self.plan.progress.outdated = True
            if not self.plan.counted:
                self.blocks.release(self.plan.allocated)
        self.plan = None

    def extend(
        self, who: str, rows: list[Row], lengths: list[int], added: list[int]
    ) -> tuple[list[PlannedRow], list[int], list[int]]:
        """Truncate rows immediately, and allocate the blocks for their new tokens. The previous step is dropped.

        Args:
            who: name of the caller in the message.
            rows: the rows.
            lengths: number of tokens that each row keeps.
            added: number of new tokens of each row.

        Returns:
            Three lists: the planned state of each row, in which the caller must set the position; the allocated blocks;
            and the shared blocks that were copied.

        Raises:
            RopeError: there are not enough free blocks. Nothing has changed then.
        """
        kept = [row.blocks[: self.block_count(n) - row.skipped] for row, n in zip(rows, lengths, strict=True)]
        dropped = Counter(block for row, blocks in zip(rows, kept, strict=True) for block in row.blocks[len(blocks) :])
        needs: list[tuple[int, bool]] = []  # number of new blocks, and whether the last old block is copied
        for row, blocks, length, more in zip(rows, kept, lengths, added, strict=True):
            writes = more > 0 and length % self.block_size > 0
            shared = writes and self.blocks.holders(blocks[-1]) - dropped[blocks[-1]] > 1
            needs.append((self.block_count(length + more) - row.skipped - len(blocks), shared))
        needed = sum(count + copied for count, copied in needs)
        paged_checks.check_free_blocks(who, needed, self.available() + self.blocks.freed_by(dropped))
        self.invalidate_plan()
        self.blocks.release(dropped.elements())
        planned, allocated, replaced, copies, unused_slots = [], [], [], [], []
        for row, blocks, length, more, (count, copied) in zip(rows, kept, lengths, added, needs, strict=True):
            row.blocks, row.length = blocks, length
            new = self.blocks.allocate(count + copied)
            allocated += new
            if copied:
                replaced.append(blocks[-1])
                copies.append(new[0])
                blocks = blocks[:-1]
            planned.append(PlannedRow(row, blocks + new, length + more, row.position))
            filled = (length + more) % self.block_size
            unused_slots += [(new[-1], place) for place in range(filled, self.block_size)] if new and filled else []
        self.copy(replaced, copies)
        self._clear(unused_slots)
        return planned, allocated, replaced

    def copy(self, old: list[int], new: list[int]) -> None:
        """Copy each block in `old` to the block at the same index in `new`, in all pools."""
        if not old:
            return
        for pool in self._pools:
            source, target = (torch.tensor(numbers, device=pool.device) for numbers in (old, new))
            pool.index_copy_(0, target, pool.index_select(0, source))

    def _clear(self, slots: list[tuple[int, int]]) -> None:
        """Zero the slots of new blocks that will hold no token, because a previous row may have left NaN there.

        A mask would not help: the attention weight of such a key is 0, and 0 · NaN is NaN.
        """
        if not slots:
            return
        for pool in self._pools:
            block, place = torch.tensor(slots, device=pool.device).T
            pool.index_put_((block, place), torch.zeros((), dtype=pool.dtype, device=pool.device))
