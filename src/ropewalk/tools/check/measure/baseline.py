"""The measurement of one plain call, which is the multiplier (cos + i·sin) of each pair at each position.

Every other call is compared with the prediction from these multipliers, so a bug in the plain call is reported only
once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk import Axes
from ropewalk.tools.check.find.subject import Subject
from ropewalk.tools.check.measure.case import CLOSE, KNOWN, Case, usual
from ropewalk.tools.check.measure.law import Law
from ropewalk.tools.check.measure.structure import Structure
from ropewalk.tools.check.report import Report

POSITIONS_IGNORED = {"positions-ignored", "offset-ignored", "segments-ignored"}
"""The findings with which only calls from position 0 on are judged."""
SMALL = torch.arange(KNOWN)  # the positions of the plain call


def measure(
    subject: Subject, structure: Structure, positions: Tensor, dtype: torch.dtype = torch.float32, *, of: str = "q"
) -> Tensor:
    """Measure the multiplier of each pair of q or k, complex128 `[batch, seq, pairs]`.

    The positions are `[batch, seq]` or, for a subject with axes, `[axes, batch, seq]`.
    """
    x = structure.unit_input(subject.channels).to(dtype).expand(*positions.shape[-2:], 2, -1).contiguous()
    q_out, k_out = subject(x, x, positions)
    return structure.multipliers(q_out if k_out is None or of == "q" else k_out)[:, :, 0]


@dataclass(frozen=True)
class OnAxes:
    """The angles that positions on each axis cause.

    Args:
        alone: the multiplier of each pair at positions 0 to 63 on one axis and 0 on the others, complex128 `[axes,
            positions, pairs]`.
        axis: the axis that turns each pair, or a negative number if none or several do.
        axes: the axes and progressions that explain the angles, or None.
        names: the name of each axis.
    """

    alone: Tensor
    axis: tuple[int, ...]
    axes: Axes | None
    names: tuple[str, ...]

    def at(self, positions: Tensor, at_0: Tensor) -> Tensor:
        """Predict the multipliers at positions `[axes, batch, seq]` below 64 from those at position 0."""
        turns = [alone[p] / alone[0] for alone, p in zip(self.alone, positions, strict=True)]
        return at_0 * torch.stack(turns).prod(0)


@dataclass(frozen=True)
class Baseline:
    """What is known about the target after the plain call.

    Args:
        subject: the target.
        structure: its pairs.
        multipliers: the measured multiplier of each pair of q at positions 0 to 63, complex128 `[positions, pairs]`.
        k_multipliers: the measured multiplier of each pair of k. Equal to `multipliers` if the subject takes no k.
        law: the law of the angles at these positions.
        report: receives the findings and grades.
        on_axes: the angles that each axis of the positions causes, or None if a token has one position.
    """

    subject: Subject
    structure: Structure
    multipliers: Tensor
    k_multipliers: Tensor
    law: Law
    report: Report
    on_axes: OnAxes | None = None

    def new_subject(self) -> Subject:
        """Return the target as a new object that has not been called yet, or the same if it is a function."""
        return self.subject if self.subject.rebuild is None else self.subject.rebuild()

    def measure(self, positions: Tensor, dtype: torch.dtype = torch.float32, subject: Subject | None = None) -> Tensor:
        """Measure the multipliers at positions `[seq]` of one row, complex128 `[seq, pairs]`."""
        return measure(subject or self.subject, self.structure, positions[None], dtype)[0]

    def predict(self, x: Tensor, positions: Tensor, *, key: bool = False) -> Tensor:
        """Predict the output for x at positions, float64 `[batch, seq, heads, channels]`."""
        return self.structure.predict(x, self.at(positions, key=key))

    def at(self, positions: Tensor, *, key: bool = False) -> Tensor:
        """Return the multipliers at positions `[seq]`, `[batch, seq]` or `[axes, batch, seq]`.

        They are those that were measured. Farther on, they are those of the law.
        """
        known = self.k_multipliers if key else self.multipliers
        if self.on_axes is not None and positions.ndim == 3:
            return self.on_axes.at(positions, known[0])
        return known[positions] if int(positions.max()) < len(known) else self.law.at(positions)

    def tolerance(self, positions: Tensor) -> Tensor:
        """Return how far results of size 1 may be from the prediction at positions, `[..., seq, 1, channels]`."""
        close = torch.full((*positions.shape[-2:], 1, self.subject.channels), CLOSE, dtype=torch.float64)
        if positions.ndim < 3 and int(positions.max()) >= len(self.multipliers):  # as predicted by the law
            for channels in (self.structure.ins, self.structure.outs):
                close[..., channels] = CLOSE + 2 * self.law.bound(positions)[..., None, :, None]
        return close

    def compare(
        self, case: Case, positions: Tensor, right: Tensor | None = None
    ) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """Call the target at positions, and yield the name, the input, the result and the prediction of q and of k.

        The prediction is that for the positions `right`, if they are passed. A target may take no k.
        """
        inputs = case.tensors()
        for name, x, out in zip("qk", inputs, self.subject(*inputs, positions), strict=True):
            if out is not None:
                yield name, x, out, self.predict(x, positions if right is None else right, key=name == "k")

    def matches(self, positions: Tensor, right: Tensor | None = None, **sizes: int) -> list[bool]:
        """Return whether the results for q and k at positions are the predicted ones, as for `compare`.

        Args:
            positions: `[batch, seq]` or `[axes, batch, seq]`.
            right: other positions, with the angles of which results are compared.
            sizes: heads and k_heads, if they are not the usual ones.
        """
        case = usual(self.subject, rows=positions.shape[-2], tokens=positions.shape[-1], **sizes)
        results, close = self.compare(case, positions, right), self.tolerance(positions)
        return [bool(((out - predicted).abs() < close).all()) for _, _, out, predicted in results]
