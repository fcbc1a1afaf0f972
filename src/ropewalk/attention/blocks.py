"""Allocate the blocks of a paged cache by number, and count the rows (requests) that hold each block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


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
