"""The multipliers (cos + i·sin) of a plain call, from which every other is predicted: its bugs are reported once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk import Axes
from ropewalk.tools.check.find.subject import Subject
from ropewalk.tools.check.measure.case import KNOWN, Case, usual, where
from ropewalk.tools.check.measure.law import Law
from ropewalk.tools.check.measure.structure import Structure
from ropewalk.tools.check.report import Report

POSITIONS_IGNORED = {"positions-ignored", "offset-ignored", "segments-ignored", "one-position"}
"""The findings with which only calls from position 0 on are judged."""
SMALL = torch.arange(KNOWN)  # the positions of the plain call


def measure(
    subject: Subject, structure: Structure, positions: Tensor, dtype: torch.dtype = torch.float32, *, of: str = "q"
) -> Tensor:
    """Measure the multipliers of q or k, complex128 `[batch, seq, pairs]`, at positions `[…, batch, seq]`."""
    if subject.of_grid and positions.ndim == 2:  # the largest grids have too many tokens
        axes = torch.eye(subject.axes or 0, dtype=torch.int64)[:, :, None, None] * positions
        alone = torch.stack([measure(subject, structure, each, dtype, of=of) for each in axes])
        at_0 = measure(subject, structure, 0 * axes[0], dtype, of=of)
        return at_0 * (alone / at_0).prod(0)
    x = structure.unit_input(subject.channels).to(dtype).expand(*positions.shape[-2:], 2, -1).contiguous()
    q_out, k_out = subject(x, x, positions)
    return structure.multipliers(q_out if k_out is None or of == "q" else k_out)[:, :, 0]


@dataclass(frozen=True)
class OnAxes:
    """The angles that positions on each axis cause."""

    alone: Tensor  # the multipliers at positions 0 to 63 on one axis and 0 on the others, `[axes, positions, pairs]`
    axis: tuple[int, ...]  # that turns each pair, or a negative number if none or several do
    axes: Axes | None  # and progressions that explain the angles
    names: tuple[str, ...]

    def at(self, positions: Tensor, at_0: Tensor) -> Tensor:
        """Predict the multipliers at positions `[axes, batch, seq]` below 64 from those at position 0."""
        turns = [alone[p] / alone[0] for alone, p in zip(self.alone, positions, strict=True)]
        return at_0 * torch.stack(turns).prod(0)


@dataclass(frozen=True)
class Baseline:
    """What is known about the target after the plain call."""

    subject: Subject
    structure: Structure
    multipliers: Tensor  # of q at positions 0 to 63, complex128 `[positions, pairs]`
    k_multipliers: Tensor  # of k, or those of q if the subject takes no k
    law: Law  # of the angles at these positions
    report: Report
    on_axes: OnAxes | None = None  # None if a token has one position

    def new_subject(self, dtype: torch.dtype | None = None) -> Subject:
        """Return the target as a new object that has not been called yet, or the same if it is a function."""
        return self.subject if self.subject.rebuild is None else self.subject.rebuild(dtype=dtype)

    def measure(self, positions: Tensor, dtype: torch.dtype = torch.float32, subject: Subject | None = None) -> Tensor:
        """Measure the multipliers at positions `[seq]` of one row, complex128 `[seq, pairs]`."""
        return measure(subject or self.subject, self.structure, positions[None], dtype)[0]

    def predict(self, x: Tensor, positions: Tensor, *, key: bool = False) -> Tensor:
        """Predict the output for x at positions, float64 `[batch, seq, heads, channels]`."""
        return self.structure.predict(x, self.at(positions, key=key))

    def at(self, positions: Tensor, *, key: bool = False) -> Tensor:
        """Return the multipliers at positions `[…, seq]`: those that were measured, and farther on those of the law."""
        known = self.k_multipliers if key else self.multipliers
        if self.on_axes is not None and positions.ndim == 3:
            return self.on_axes.at(positions, known[0])
        return known[positions] if int(positions.max()) < len(known) else self.law.at(positions)

    def tolerance(self, positions: Tensor) -> Tensor:
        """Return how far results of size 1 may be from the prediction at positions, `[..., seq, 1, channels]`."""
        close = torch.full((*positions.shape[-2:], 1, self.subject.channels), self.subject.close, dtype=torch.float64)
        if positions.ndim < 3 and int(positions.max()) >= len(self.multipliers):  # as predicted by the law
            for channels in (self.structure.ins, self.structure.outs):
                close[..., channels] += 2 * self.law.bound(positions)[..., None, :, None]
        return close

    def compare(self, case: Case, positions: Tensor) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """Call the target, and yield the name, input, result and prediction of q and, if it takes k, of k."""
        inputs = case.tensors()
        for name, x, out in zip("qk", inputs, self.subject(*inputs, positions), strict=True):
            if out is not None:
                yield name, x, out, self.predict(x, positions, key=name == "k")

    def judge(self, positions: Tensor, otherwise: str, *explanations: tuple[str, Tensor], of_k: str = "") -> bool:
        """Report a call whose results are not those at positions `[…, batch, seq]`, and return whether it is one.

        `otherwise` is the code of the bug if nothing explains the results, and `of_k` if only that for k is wrong. The
        explanations are codes of other bugs than positions of the first row, or from 0 on, or equal on all axes, each
        with the positions that the results then have.
        """
        case = usual(self.subject, rows=positions.shape[-2], tokens=positions.shape[-1])
        for name, x, out, _ in self.compare(case, positions):
            if (found := self.fault(name, x, out, positions, otherwise, *explanations)) is not None:
                code, says = found
                if code == "positions-ignored" and self._counts_gaps():
                    code, says = "offset-ignored", f"{says} Positions are counted from the smallest one of the call."
                self.report.add(of_k if name == "k" and of_k else code, f"With {case}, {says}")
                return True
        return False

    def _counts_gaps(self) -> bool:
        """Return whether tokens from position 0 on get their angles, with gaps between them."""
        positions = torch.tensor([[0, 2, 5]])
        if not self.subject.accepts(positions):
            return False
        results = self.compare(usual(self.subject, tokens=3), positions)
        return all(self.fault(name, x, out, positions, "") is None for name, x, out, _ in results)

    def fault(
        self, name: str, x: Tensor, out: Tensor, positions: Tensor, otherwise: str, *explanations: tuple[str, Tensor]
    ) -> tuple[str, str] | None:
        """Return the code of what is wrong with one result at positions, and a description, or None."""

        def of_heads(places: Tensor, of_sines: Tensor | None = None) -> Tensor:
            z = self.at(places, key=name == "k")
            z = z if of_sines is None else torch.complex(z.real, self.at(of_sines, key=name == "k").imag)
            off = (out - self.structure.predict(x, z)).abs()
            return (off < self.tolerance(places)).all(-1)

        def is_right(places: Tensor, of_sines: Tensor | None = None) -> Tensor:
            return of_heads(places, of_sines).all(-1)

        if not bool((wrong := ~is_right(positions)).any()):
            return None
        right = of_heads(positions)
        if bool((wrong & right.any(-1)).any()):  # as by a wrong grid over rows and heads, and not by positions
            of_rows = 1 < positions.shape[-2] == out.shape[2]  # with as many heads
            how = ", as by tables without an axis for heads" * of_rows
            says = f"some heads of {name} are rotated otherwise{where(~right[..., None])}{how}."
            return "rows-mixed-up" if of_rows else "heads-differ", says
        row, token = wrong.nonzero()[0].tolist()
        here = f"{name} of token {token} in row {row}"
        asked = positions[..., row, token].tolist()
        others = [("first-row-positions", positions[..., :1, :]), (self._ignored, torch.arange(positions.shape[-1]))]
        others = others if positions.shape[-1] > 1 else []  # the bugs of a single token have a name of their own
        if positions.ndim == 3:
            others.insert(0, ("axis-ignored", positions[:1]))
        for code, places in [*explanations, *((code, places.expand_as(positions)) for code, places in others)]:
            got = places[..., row, token].tolist()
            if got != asked and bool(is_right(places)[wrong].all()):
                return code, f"{here} is rotated by position {got} instead of {asked}."
        for code, places in others:
            places = places.expand_as(positions)
            for cosines, sines in ((positions, places), (places, positions)):
                if bool(is_right(cosines, sines)[wrong].all()):
                    of_cos, of_sin = (int(each[..., row, token].max()) for each in (cosines, sines))
                    return code, f"{here} has the cosines of position {of_cos} and the sines of {of_sin}."
        for other in range(len(self.multipliers) if positions.ndim == 2 else 0):
            if bool(is_right(torch.full_like(positions, other))[row, token]):
                return otherwise, f"{here} is rotated by position {other} instead of {asked}."
        return otherwise, f"{here} is not rotated by position {asked}."

    @property
    def _ignored(self) -> str:
        """The code of the bug that positions count from 0, whatever is passed."""
        kinds = {"packed": "segments-ignored", "runs": "segments-ignored"}
        offset = "offset-ignored" if "offset" in self.subject.way.positions else "positions-ignored"
        return kinds.get(self.subject.way.positions, offset)
