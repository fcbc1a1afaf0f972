"""The blocks of a paged cache: which rows (requests) hold them, the changes that a step plans, and copies on write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.attention.step import Step
from ropewalk.attention.store import Store


class Blocks:
    """A reference-counted pool of block numbers. Each block is either free or held by one or more rows.

    Args:
        count: number of blocks. They are numbered from 0, and all are free at first.
        size: slots in a block.

    Attributes:
        written: for each block, the number of its first slots that may hold anything, such as the NaN of a token that
            was dropped. Its other slots are finite in all pools.
    """

    def __init__(self, count: int, size: int) -> None:
        self._size = size
        self.written = [size] * count
        self.recount(())

    @property
    def free(self) -> int:
        """Number of blocks that no row holds."""
        return len(self._free)

    def holders(self, block: int) -> int:
        """Return the number of rows that hold this block."""
        return self._holders[block]

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with one holder each. The caller must check that enough blocks are free."""
        allocated = [self._free.pop() for _ in range(count)]
        self.add_holder(allocated)
        for block in allocated:
            self.written[block] = self._size
        return allocated

    def add_holder(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block."""
        for block in blocks:
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each block. A block without holders becomes free."""
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)

    def freed_by(self, released: Counter[int]) -> int:
        """Return how many blocks would become free if each lost as many holders as `released` counts for it."""
        return sum(self._holders[block] == times for block, times in released.items())

    def recount(self, held: Iterable[int]) -> None:
        """Count the holders of all blocks again, given the blocks of each holder."""
        self._holders = [0] * len(self.written)
        self.add_holder(held)
        self._free = [block for block in reversed(range(len(self.written))) if not self._holders[block]]


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
        step: the forward pass. None until it has been created.
        rows: state of the rows of the step after it, by number.
        allocated: blocks allocated for the step, which the plan holds until the tokens are counted.
        replaced: shared blocks that were copied for a row. Each loses a holder once the tokens are counted.
    """

    step: Step | None
    rows: dict[int, Row]
    allocated: list[int]
    replaced: list[int]


class Move(NamedTuple):
    """A block whose keys move by `delta` positions for `rows`, in a copy if `copied` is True, otherwise in place."""

    block: int
    delta: int
    rows: list[int]
    copied: bool


class Rows:
    """All rows of a paged cache. Their state is in plain Python and CPU tensors.

    Args:
        stores: keys and values of each layer.
        count, block_size: number of blocks, and of slots in a block.
        window: number of tokens that each token attends to. None means no limit.

    Attributes:
        blocks: the allocator of blocks.
        next_number: number of the next row.
        key_positions: position of the token in each slot, int64 `[blocks, block_size]`, including tokens of the newest
            step.
    """

    def __init__(self, stores: Sequence[Store], count: int, block_size: int, window: int | None) -> None:
        self.block_size, self.window = block_size, window
        self.blocks = Blocks(count, block_size)
        self.next_number = 0
        self.key_positions = torch.zeros(count, self.block_size, dtype=torch.int64)
        self._stores = stores
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

    def plan_moves(self, who: str, deltas: dict[int, int]) -> list[Move]:
        """Group the moves of rows by block and distance, given the distance of each row by its number.

        A block is copied if it also belongs to a row that moves by another distance or not at all.

        Raises:
            RopeError: there are not enough free blocks for the copies.
        """
        by_block: dict[int, dict[int, list[int]]] = {}
        for number, delta in deltas.items():
            for block in self.by_number[number].blocks:
                by_block.setdefault(block, {}).setdefault(delta, []).append(number)
        moves = []
        for block, by_delta in by_block.items():
            needs_copy = 0 in by_delta or self.blocks.holders(block) > sum(len(group) for group in by_delta.values())
            for delta, group in by_delta.items():
                if delta:
                    moves.append(Move(block, delta, group, copied=needs_copy))
                    needs_copy = True
        self._check_free(who, sum(move.copied for move in moves), Counter())
        return moves

    def move(self, deltas: dict[int, int], moves: list[Move]) -> Tensor:
        """Change the positions of rows and of their tokens. The newest step is dropped.

        Args:
            deltas: distance by which each row moves, by number.
            moves: from `plan_moves`.

        Returns:
            The block of each move, int64 `[moves]`. Its keys must then be rotated.
        """
        copied = [move for move in moves if move.copied]
        self._changing = True
        self._release_plan()
        copies = self.blocks.allocate(len(copied))
        instead: dict[int, dict[int, int]] = {number: {} for number in deltas}
        for move, copy in zip(copied, copies, strict=True):
            self.blocks.add_holder([copy] * (len(move.rows) - 1))
            self.blocks.release([move.block] * len(move.rows))
            for number in move.rows:
                instead[number][move.block] = copy
        moved = {}
        for number, delta in deltas.items():
            row, new = self.by_number[number], instead[number]
            blocks = [new.get(block, block) for block in row.blocks]
            moved[number] = row._replace(blocks=blocks, position=row.position + delta)
        self._state = {**self.by_number, **moved}, None, False
        self._changing = False
        self._copy([move.block for move in copied], copies)
        copy_of = iter(copies)
        blocks_moved = torch.tensor([next(copy_of) if move.copied else move.block for move in moves], dtype=torch.int64)
        self.key_positions[blocks_moved] += torch.tensor([move.delta for move in moves], dtype=torch.int64)[:, None]
        return blocks_moved

    def select(self, who: str, numbers: int | Sequence[int] | Tensor | None) -> list[int]:
        """Check row numbers and return them as a list. None means all rows."""
        if numbers is None:
            return list(self.by_number)
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
            _checks.integer(who, "each of rows", row, at_least=0)
            if row not in self.by_number:
                got = f"row {row}, which was freed" if row < self.next_number else f"row {row}"
                raise _checks.error(who, must, got, f"The existing rows are {_checks.shown(list(self.by_number))}.")
        if len(set(listed)) < len(listed):
            raise _checks.error(who, must, _checks.shown(listed), "Pass each row once.")
        return [int(row) for row in listed]

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
        if plan is None or plan.step is None or not plan.step._is_complete():
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
        if plan is not None and plan.step is not None:
            plan.step._is_complete(who)
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
    ) -> list[Row]:
        """Truncate rows immediately, and plan their new tokens. The previous step is dropped. Return the planned rows.

        Args:
            who: name of the caller in the message.
            numbers: numbers of the rows.
            lengths, starts: number of tokens that each row keeps, and the position at which it continues.
            added: number of new tokens of each row.
            following: position of the next token of each row after the step.

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
        self._check_free(who, needed, dropped)
        truncated, plan, copies = {}, Plan(None, {}, [], []), []
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
        self._copy(plan.replaced, copies)
        if stale:
            self._clear([(block, place) for block, used in stale.items() for place in range(used, written[block])])
            for block, used in stale.items():
                written[block] = used
        return list(plan.rows.values())

    def attach(self, step: Step) -> None:
        """Make `step` the forward pass of the plan that `extend` has made."""
        rows, plan, counted = self._state
        self._state = rows, plan and plan._replace(step=step), counted

    def _copy(self, old: list[int], new: list[int]) -> None:
        """Copy each block in `old` to the block at the same index in `new`, in all layers."""
        if old:
            source, target = torch.tensor([old, new])
            self.key_positions[target] = self.key_positions[source]
            source, target = torch.stack([source, target]).to(self._stores[0].keys.device)
            for store in self._stores:
                store.copy(source, target, self.block_size)

    def _clear(self, slots: list[tuple[int, int]]) -> None:
        """Clear slots, given by block and place, that hold no token of the rows that attention reads.

        A token that was dropped, or a previous row, may have left NaN there. A mask would not help: the attention
        weight of such a key is 0, and 0 · NaN is NaN.
        """
        block, place = torch.tensor(slots).T.to(self._stores[0].keys.device)
        for store in self._stores:
            store.clear((block, place))

    def _check_free(self, who: str, needed: int, released: Counter[int]) -> None:
        """Raise unless this number of blocks is free once the newest step is dropped and these blocks are released."""
        free = self.available() + self.blocks.freed_by(released)
        if needed > free:
            fix = "Free or reset rows that have ended, send fewer tokens, or build the cache with more blocks."
            raise _checks.error(who, f"{needed} free blocks are needed", f"{free}", fix)

    def _release_plan(self) -> None:
        """Mark the newest step as outdated. Free its blocks unless its tokens have been counted."""
        if self.plan is not None:
            if self.plan.step is not None:
                self.plan.step._outdated = True
            if self.open_plan is not None:
                self.blocks.release(self.plan.allocated)
