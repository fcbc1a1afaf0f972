"""The rows of a paged cache: which blocks each holds, what the newest step will change, and copies before writing."""

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
    """The tokens of one row.

    Attributes:
        blocks: numbers of the blocks that hold them, in order.
        skipped: blocks at the beginning of the row that have been given back, being out of the window.
        length: tokens so far, those of skipped blocks included.
        position: of the next token.
    """

    blocks: list[int] = field(default_factory=list)
    skipped: int = 0
    length: int = 0
    position: int = 0


@dataclass
class Planned:
    """A row as it will be when a forward pass has stored its tokens."""

    row: Row
    blocks: list[int]
    length: int
    position: int


@dataclass
class Plan:
    """The newest step, until it is dropped.

    Attributes:
        numbers: of its rows.
        progress: how far its forward pass has come.
        rows: what becomes of them.
        taken: blocks that were free before.
        replaced: shared blocks that rows got a copy of: one holder less for each, once the tokens are counted.
        counted: whether the rows have these tokens.
    """

    numbers: list[int]
    progress: Progress
    rows: list[Planned]
    taken: list[int]
    replaced: list[int]
    counted: bool = False


class Rows:
    """Rows by number, on the host.

    Args:
        pools: keys and values of all layers, `[blocks, block_size, ...]`.
        window: tokens that a token sees; None: all.

    Attributes:
        blocks: which are free.
        by_number: the rows that are there, in the order of their admission.
        following: the number of the next row.
        key_positions: of the token in each slot, int64 `[blocks, block_size]`; also of those of the newest step.
        plan: the newest step, unless it is outdated.
    """

    def __init__(self, pools: list[Tensor], window: int | None) -> None:
        count, self.block_size = pools[0].shape[:2]
        self.window = window
        self.blocks = Blocks(count)
        self.by_number: dict[int, Row] = {}
        self.following = 0
        self.key_positions = torch.zeros(count, self.block_size, dtype=torch.int64)
        self.plan: Plan | None = None
        self._pools = [*pools, self.key_positions]

    def chosen(self, who: str, numbers: int | Sequence[int] | Tensor | None) -> list[int]:
        """The row numbers that are meant: all that are there when None."""
        return paged_checks.rows(who, numbers, self.by_number, self.following)

    def of(self, numbers: list[int]) -> list[Row]:
        """These rows."""
        return [self.by_number[number] for number in numbers]

    def add(self, row: Row) -> int:
        """The number that a row gets. The caller holds its blocks."""
        number, self.following = self.following, self.following + 1
        self.by_number[number] = row
        return number

    def settled(self) -> list[Row]:
        """All rows, with the tokens that all layers have stored."""
        self.settle()
        return list(self.by_number.values())

    def spanned(self, length: int) -> int:
        """How many blocks so many tokens need."""
        return -(-length // self.block_size)

    def places(self, row: Row) -> Tensor:
        """Positions of the cached tokens of a row, int64 `[tokens]`, without those of skipped blocks."""
        return self.key_positions[row.blocks].flatten()[: row.length - row.skipped * self.block_size]

    def length_before(self, row: Row, at: int) -> int:
        """How many tokens come before the first one that is at position `at` or after it."""
        later = (self.places(row) >= at).nonzero()
        return int(later[0]) if len(later) else row.length

    def available(self) -> int:
        """Blocks that are free once the newest step is dropped."""
        self.settle()
        return self.blocks.free + (len(self.plan.taken) if self.plan is not None and not self.plan.counted else 0)

    def settle(self) -> None:
        """Count the tokens of the newest step if all layers have stored them.

        The last layer does not do it itself: under torch.compile it cannot touch what is here.
        """
        plan = self.plan
        if plan is None or plan.counted or plan.progress.stored() < len(plan.progress.layers):
            return
        plan.counted = True
        for planned in plan.rows:
            row = planned.row
            row.blocks, row.length, row.position = planned.blocks, planned.length, planned.position
            if self.window is not None:  # of the next token, which sees itself and the window - 1 before it
                unseen = max(0, row.length - self.window + 1) // self.block_size - row.skipped
                self.blocks.release(row.blocks[:unseen])
                row.blocks, row.skipped = row.blocks[unseen:], row.skipped + unseen
        self.blocks.release(plan.replaced)

    def finished(self, who: str) -> Plan | None:
        """The newest step, where all layers have stored it, or None where none has; raise if it stopped in between."""
        self.settle()
        if self.plan is None:
            return None
        self.plan.progress.check_whole(who)
        return self.plan if self.plan.counted else None

    def drop(self) -> None:
        """From now on the newest step is outdated; what it has taken is free again, if its tokens are not counted."""
        if self.plan is not None:
            self.plan.progress.outdated = True
            if not self.plan.counted:
                self.blocks.release(self.plan.taken)
        self.plan = None

    def extended(
        self, who: str, rows: list[Row], lengths: list[int], added: list[int]
    ) -> tuple[list[Planned], list[int], list[int]]:
        """Cut rows to some lengths, at once, and take the blocks that they need for more tokens.

        Nothing is cut or taken if there are not enough. The step before is dropped.

        Args:
            who: who speaks in the message.
            rows: which.
            lengths: what each is cut to.
            added: new tokens of each.

        Returns:
            The rows as they will be, their position still to be said; blocks taken; shared blocks that were copied.
        """
        kept = [row.blocks[: self.spanned(n) - row.skipped] for row, n in zip(rows, lengths, strict=True)]
        cut = Counter(block for row, blocks in zip(rows, kept, strict=True) for block in row.blocks[len(blocks) :])
        needs: list[tuple[int, bool]] = []  # new blocks, and whether the last of the old ones is copied
        for row, blocks, length, more in zip(rows, kept, lengths, added, strict=True):
            writes = more > 0 and length % self.block_size > 0
            shared = writes and self.blocks.holders(blocks[-1]) - cut[blocks[-1]] > 1
            needs.append((self.spanned(length + more) - row.skipped - len(blocks), shared))
        wanted = sum(count + copied for count, copied in needs)
        paged_checks.enough(who, wanted, self.available() + self.blocks.freed_by(cut))
        self.drop()
        self.blocks.release(cut.elements())
        planned, taken, replaced, copies, rests = [], [], [], [], []
        for row, blocks, length, more, (count, copied) in zip(rows, kept, lengths, added, needs, strict=True):
            row.blocks, row.length = blocks, length
            new = self.blocks.take(count + copied)
            taken += new
            if copied:
                replaced.append(blocks[-1])
                copies.append(new[0])
                blocks = blocks[:-1]
            planned.append(Planned(row, blocks + new, length + more, row.position))
            filled = (length + more) % self.block_size
            rests += [(new[-1], place) for place in range(filled, self.block_size)] if new and filled else []
        self.copy(replaced, copies)
        self._clear(rests)
        return planned, taken, replaced

    def copy(self, old: list[int], new: list[int]) -> None:
        """Copy whole blocks, in all pools."""
        if not old:
            return
        for pool in self._pools:
            source, target = (torch.tensor(numbers, device=pool.device) for numbers in (old, new))
            pool.index_copy_(0, target, pool.index_select(0, source))

    def _clear(self, slots: list[tuple[int, int]]) -> None:
        """Put 0 where a new block will have no token: what another row has left there may be nan.

        A mask does not keep that out of a sum over keys: its share is 0, and 0 times nan is nan.
        """
        if not slots:
            return
        for pool in self._pools:
            block, place = torch.tensor(slots, device=pool.device).T
            pool.index_put_((block, place), torch.zeros((), dtype=pool.dtype, device=pool.device))
