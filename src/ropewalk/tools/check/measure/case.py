"""The sizes of one call, and the smallest call that still has a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ropewalk.tools.check.find import memory
from ropewalk.tools.check.find.subject import CallError, Subject
from ropewalk.tools.check.find.ways import ONE_ROW

KNOWN = 64  # positions of the plain call
_DOCUMENT = 3  # tokens of each document, if the target takes several in one row
_SIDE = 8  # rows and columns of the usual grid
TOKENS, HEADS = 5, 8  # usual sizes: the numbers of heads of most models are powers of two
_FAR = 41  # the first position, if it can be chosen: far enough from 0 for the slowest pairs to rotate visibly
_SMALLER = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


@dataclass(frozen=True)
class Case:
    """The sizes of one call: of the batch, and of the heads of q and of k. `str(case)` is the case in words."""

    rows: int
    tokens: int
    heads: int
    k_heads: int
    channels: int

    def __str__(self) -> str:
        def count(n: int, of: str) -> str:
            return f"{n} {of}" if n == 1 else f"{n} {of}s"

        heads = f"{count(self.heads, 'head')} of {self.channels} channels"
        if self.k_heads != self.heads:
            heads = f"{count(self.heads, 'head')} of q and {self.k_heads} of k, of {self.channels} channels"
        tokens = count(self.tokens, "token")
        return f"{heads}, {tokens if self.rows == 1 else f'{self.rows} rows of {tokens}'}"

    def positions(self, subject: Subject) -> Tensor:
        """Return positions `[rows, tokens]`: below `KNOWN` and others for each row, or from `_FAR` or 0 on.

        If the target takes several documents in one row, they are those of such documents. Of a grid, they are the
        places `[axes, rows, tokens]` on as many as are needed.
        """
        from_0 = torch.arange(self.tokens).expand(self.rows, -1)
        if subject.way.positions in ("packed", "runs"):
            return from_0 % _DOCUMENT
        if subject.of_grid and subject.axes:
            places = torch.zeros(subject.axes, *from_0.shape, dtype=torch.int64)
            places[-2:] = torch.stack((from_0 // _SIDE % _SIDE, from_0 % _SIDE))
            return places
        other = (from_0 + _FAR + 7 * torch.arange(self.rows)[:, None]) % KNOWN
        return next((p for p in (other, (from_0 + _FAR) % KNOWN, from_0 + _FAR) if subject.accepts(p)), from_0)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return test tensors q and k `[rows, tokens, heads, channels]`."""
        return tuple(  # type: ignore[return-value]
            waves(self.rows, self.tokens, heads, self.channels, seed)
            for seed, heads in ((1, self.heads), (2, self.k_heads))
        )

    def smallest(self, fails: Callable[[Case], bool]) -> Case:
        """Return the smallest case found that fails like this one: sizes are reduced one after the other."""

        def still_fails(case: Case) -> bool:
            try:
                return fails(case)
            except CallError:
                return False

        rows = [{"rows": n} for n in range(1, self.rows)]
        tokens = [{"tokens": n} for n in _SMALLER if n < self.tokens]
        of_q = [n for n in _SMALLER if n <= max(self.heads, self.k_heads)]
        heads = [{"heads": n, "k_heads": n} for n in of_q]
        if self.heads != self.k_heads:
            heads += [{"heads": n, "k_heads": k} for n in of_q for k in range(1, n) if n % k == 0]
        case = self
        for sizes in (rows, heads, tokens):
            smaller = (replace(case, **each) for each in sizes)
            case = next((each for each in smaller if each != case and still_fails(each)), case)
        return case


def usual(
    subject: Subject, *, rows: int = 1, tokens: int = TOKENS, heads: int = HEADS, k_heads: int | None = None
) -> Case:
    """Return the case of the usual sizes, apart from those that are passed. None means as many heads of k as of q.

    A subject that takes no k, or q, k and v stacked in one tensor, always has as many. One of one row has one.
    """
    if subject.layout in ONE_ROW or subject.way.positions in ("packed", "runs"):
        rows = 1
    if k_heads is None or not subject.has_k or subject.needs_equal_heads:
        k_heads = heads
    return Case(rows, tokens, heads, k_heads, subject.channels)


def first_fault(
    cases: Iterable[Case], fault: Callable[[Case], tuple[str, str] | None]
) -> tuple[tuple[str, str, Case] | None, str]:
    """Find the first case of which `fault` returns the code of what is wrong, and a description.

    Return these for the smallest case with that code, and the case, or None; and what the first call raises that is
    refused, or "".
    """
    raised = ""
    for case in cases:
        try:
            found = fault(case)
        except CallError as e:
            if e.code == "raises":
                raised = raised or f"{e} ({case})"
                continue
            found = e.code, f"{e}."
        if found is not None:
            break
    else:
        return None, raised
    smallest = case.smallest(lambda smaller: (fault(smaller) or ("", ""))[0] == found[0])
    return (*(found if smallest == case else fault(smallest) or found), smallest), raised


def unwritten(call: Callable[[], Sequence[Tensor | None]]) -> list[Tensor]:
    """Return where each result of a call is NaN if new memory holds NaN, and only then, bool.

    From the first of these calls on, memory that the target allocates holds NaN, and no longer earlier results.
    """
    used = memory.current()
    used.poison = False
    try:
        plain = call()
        if any(x is not None and bool(x.isnan().any()) for x in plain):  # it may be that of an earlier call
            freed = [torch.zeros_like(x) for x in plain if x is not None for _ in range(16)]
            del freed
            plain = call()
    finally:
        used.poison = True
    return [
        after.isnan() & ~before.isnan()
        for before, after in zip(plain, call(), strict=True)
        if before is not None and after is not None
    ]


def waves(rows: int, tokens: int, heads: int, channels: int, seed: int) -> Tensor:
    """Compute a tensor `[rows, tokens, heads, channels]` by a formula, without using any random state.

    Its numbers are exact in every dtype.
    """
    return _waves(rows * tokens * heads * channels, seed).clone().reshape(rows, tokens, heads, channels)


@lru_cache(16)
def _waves(count: int, seed: int) -> Tensor:
    n = torch.arange(count, dtype=torch.float32)
    return torch.sin(0.1 + 0.7 * n + seed).bfloat16().half().float()


def where(wrong: Tensor) -> str:
    """Say in words in which rows, tokens, heads and channels elements `[rows, tokens, heads, channels]` are wrong."""
    parts = []
    for axis, name in ((2, "head"), (3, "channel"), (1, "token"), (0, "row")):
        there = wrong.any(dim=tuple(a for a in range(4) if a != axis)).nonzero().flatten().tolist()
        first, last, n = there[0], there[-1], len(there)
        if n == 1 < wrong.shape[axis]:
            parts.append(f"{name} {first}")
        elif n == last - first + 1 < wrong.shape[axis]:
            parts.append(f"{name}s {first} to {last}")
        elif n < 0.75 * wrong.shape[axis]:  # others are all but those that happen to look right
            parts.append(f"{name}s {', '.join(map(str, there[:8]))}{', …' if n > 8 else ''}")
    return f" in {', '.join(parts)} (counted from 0)" if parts else ""
