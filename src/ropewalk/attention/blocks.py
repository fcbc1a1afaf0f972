"""Blocks of a paged cache by number: which are free, and how many rows hold each of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Blocks:
    """Blocks by number, each free or held by one row or several.

    Args:
        count: blocks, numbered from 0, all of them free.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count

    @property
    def free(self) -> int:
        """How many nobody holds."""
        return len(self._free)

    def holders(self, block: int) -> int:
        """How many hold this block."""
        return self._holders[block]

    def take(self, count: int) -> list[int]:
        """As many free blocks, each with one holder from now on. The caller has seen that there are enough."""
        taken = [self._free.pop() for _ in range(count)]
        self.hold(taken)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each."""
        for block in blocks:
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less for each. A block without any is free."""
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)

    def freed_by(self, released: Counter[int]) -> int:
        """How many would become free if as many holders as counted let go of each."""
        return sum(self._holders[block] == times for block, times in released.items())
