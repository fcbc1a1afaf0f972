"""The measurement of one plain call, which is the multiplier (cos + i·sin) of each pair at each position.

Every other call is compared with the prediction from these multipliers, so a bug in the plain call is reported only
once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ropewalk.tools.check.expected import Expected
from ropewalk.tools.check.find.subject import Subject
from ropewalk.tools.check.measure.case import KNOWN, Case, waves
from ropewalk.tools.check.measure.law import Law
from ropewalk.tools.check.measure.structure import Structure
from ropewalk.tools.check.report import Report

TOKENS, HEADS = 5, 8  # usual sizes: the numbers of heads of most models are powers of two
POSITIONS_IGNORED = {"positions-ignored", "offset-ignored"}  # then only calls from position 0 on are judged
SMALL = torch.arange(KNOWN)  # the positions of the plain call


def usual(subject: Subject) -> Case:
    """Return the case of the usual sizes."""
    return Case(1, TOKENS, HEADS, HEADS, subject.channels)


def measure(
    subject: Subject, structure: Structure, positions: Tensor, dtype: torch.dtype = torch.float32, *, of: str = "q"
) -> Tensor:
    """Measure the multiplier of each pair of q or k, complex128 `[batch, seq, pairs]`.

    The positions are `[batch, seq]` or, for a subject with axes, `[axes, batch, seq]`.
    """
    x = structure.unit_input(subject.channels).to(dtype).expand(*positions.shape[-2:], 2, -1).contiguous()
    q_out, k_out = subject(x, x.clone(), positions)
    return structure.multipliers(q_out if k_out is None or of == "q" else k_out)[:, :, 0]


@dataclass(frozen=True)
class Baseline:
    """What is known about the target after the plain call.

    Args:
        subject: the target.
        structure: its pairs.
        multipliers: the measured multiplier of each pair of q at positions 0 to 63, complex128 `[positions, pairs]`.
        k_multipliers: the measured multiplier of each pair of k. Equal to `multipliers` if the subject takes no k.
        law: the law of the angles at these positions.
        expected: what the target should compute.
        report: receives the findings and grades.
    """

    subject: Subject
    structure: Structure
    multipliers: Tensor
    k_multipliers: Tensor
    law: Law
    expected: Expected
    report: Report

    def new_subject(self) -> Subject:
        """Return the target as a new object that has not been called yet, or the same if it is a function."""
        return self.subject if self.subject.rebuild is None else self.subject.rebuild()

    def measure(self, positions: Tensor, dtype: torch.dtype = torch.float32, subject: Subject | None = None) -> Tensor:
        """Measure the multipliers at positions `[seq]` of one row, complex128 `[seq, pairs]`."""
        return measure(subject or self.subject, self.structure, positions[None], dtype)[0]

    def predict(self, x: Tensor, positions: Tensor, *, key: bool = False) -> Tensor:
        """Predict the output for x at positions `[batch, seq]`, float64 `[batch, seq, heads, channels]`."""
        return self.structure.predict(x, self.at(positions, key=key))

    def at(self, positions: Tensor, *, key: bool = False) -> Tensor:
        """Return the multipliers at positions `[...]`: those that were measured, or those of the law from there on."""
        known = self.k_multipliers if key else self.multipliers
        return known[positions] if int(positions.max()) < len(known) else self.law.at(positions)

    def usual(self, **sizes: int) -> Case:
        """Return the case of the usual sizes, apart from those that are passed."""
        return replace(usual(self.subject), **sizes)

    def tensor(self, rows: int, tokens: int, heads: int, seed: int) -> Tensor:
        """Return a test tensor `[rows, tokens, heads, channels]`."""
        return waves(rows, tokens, heads, self.subject.channels, seed)

    def errors(self, positions: Tensor, k_heads: int = HEADS) -> tuple[Tensor, Tensor]:
        """Return the absolute error of each element of the rotated q and k at positions `[batch, seq]`.

        If the subject takes no k, the errors of k are zero.
        """
        rows, tokens = positions.shape
        q, k = self.usual(rows=rows, tokens=tokens, k_heads=k_heads).tensors()
        q_out, k_out = self.subject(q, k, positions)
        q_off = (q_out - self.predict(q, positions)).abs()
        return q_off, torch.zeros_like(q_off) if k_out is None else (k_out - self.predict(k, positions, key=True)).abs()
