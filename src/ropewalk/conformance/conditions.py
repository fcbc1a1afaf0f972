"""The rest of what models do with a rotation: batches, ragged rows, one token, fewer key heads, views, gradients.

Each result is compared with what the numbers measured on one plain call predict, so that one bug is named once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.conformance.report import Report
from ropewalk.conformance.structure import Structure
from ropewalk.conformance.subject import Refused, Subject

TOKENS, HEADS = 5, 6
CLOSE = 1e-4  # float32 results of size 1


@dataclass(frozen=True)
class Known:
    """What is known of the subject: its numbers at positions 0 to 63, `[positions, pairs]`, and for k."""

    subject: Subject
    structure: Structure
    channels: int
    numbers: Tensor
    of_keys: Tensor

    def predicted(self, x: Tensor, positions: Tensor, *, key: bool = False) -> Tensor:
        """What should come out."""
        return self.structure.predicted(x, (self.of_keys if key else self.numbers)[positions])

    def tensor(self, rows: int, tokens: int, heads: int, seed: int) -> Tensor:
        """Numbers by a formula: no random state is read or changed."""
        n = torch.arange(rows * tokens * heads * self.channels, dtype=torch.float32)
        return torch.sin(0.1 + 0.7 * n + seed).reshape(rows, tokens, heads, self.channels)

    def off(self, positions: Tensor, k_heads: int = HEADS) -> tuple[Tensor, Tensor]:
        """How far q and k are off at these positions, `[batch, seq]`; k's are zero where there is no k."""
        rows, tokens = positions.shape
        q, k = self.tensor(rows, tokens, HEADS, 1), self.tensor(rows, tokens, k_heads, 2)
        q_out, k_out = self.subject(q, k, positions)
        q_off = (q_out - self.predicted(q, positions)).abs()
        return q_off, torch.zeros_like(q_off) if k_out is None else (
            k_out - self.predicted(k, positions, key=True)
        ).abs()


def judge(known: Known, report: Report) -> None:
    """Try all conditions that the subject can be asked for."""
    tried: list[tuple[str, Callable[[Known, Report], str | None]]] = [
        ("positions passed", _offset),
        ("one token", _one_token),
        ("batch", _batch),
        ("ragged rows", _ragged),
        ("fewer key heads", _grouped),
        ("views", _strided),
        ("input left alone", _mutated),
        ("gradients", _gradients),
    ]
    for name, attempt in tried:
        before = len(report.findings)
        try:
            says = attempt(known, report)
        except Refused as e:
            report.add("raises", f"Tried: {name}. {e}.")
            report.grade(name, f"raises: {e}")
            continue
        if says is not None:
            wrong = len(report.findings) > before
            report.grade(
                name, report.findings[-1].says if wrong and says == "" else says or "as it should be", not wrong
            )


def _bad(*off: Tensor) -> bool:
    return not all(bool((one < CLOSE).all()) for one in off)


def _offset(known: Known, report: Report) -> str | None:
    positions = torch.arange(7, 7 + TOKENS)[None]
    if not known.subject.takes(positions):
        return None
    if _bad(*known.off(positions)):
        x = known.tensor(1, TOKENS, HEADS, 1)
        out, _ = known.subject(x, x.clone(), positions)
        if not _bad((out - known.predicted(x, torch.arange(TOKENS)[None])).abs()):
            code = "offset-ignored" if known.subject.positions == "offset" else "positions-ignored"
            report.add(code, "Tokens at positions 7 to 11 are rotated as at 0 to 4.")
        else:
            report.add(
                "wrong-far-positions", "Tokens at positions 7 to 11 have other angles than in a sequence from 0 on."
            )
        return ""
    scattered = torch.tensor([[9, 3, 60, 3, 0]])
    if known.subject.takes(scattered) and _bad(*known.off(scattered)):
        report.add("positions-ignored", "Positions 9, 3, 60, 3, 0 are not each rotated by their own angle.")
    return ""


def _one_token(known: Known, report: Report) -> str | None:
    positions = torch.tensor([[9]])
    if not known.subject.takes(positions) or {"positions-ignored", "offset-ignored"} & {*report.codes}:
        return None
    if _bad(*known.off(positions)):
        report.add("one-token-wrong", "One token at position 9 has other angles than among others.")
    return ""


def _batch(known: Known, report: Report) -> str | None:
    for tokens, first in ((TOKENS, 0), (1, 9)):
        positions = torch.arange(first, first + tokens).expand(3, tokens)
        if not known.subject.takes(positions):
            continue
        q_off, k_off = known.off(positions)
        if _bad(q_off[1:], k_off[1:]) and not _bad(q_off[:1], k_off[:1]):
            report.add("batch-ignored", f"Of 3 rows with {tokens} token(s) each, only the first is right.")
        elif _bad(q_off, k_off) and not {"one-token-wrong", "positions-ignored"} & {*report.codes}:
            report.add("batch-ignored", f"3 rows with {tokens} token(s) each come out wrong.")
    return "" if "b" in known.subject.layout else None


def _ragged(known: Known, report: Report) -> str | None:
    positions = torch.tensor([[0, 1, 2, 3, 4], [20, 21, 22, 23, 24], [5, 5, 60, 1, 2]])
    if not known.subject.takes(positions):
        if known.subject.positions == "shared":
            report.grade(
                "ragged rows", "not judged: all rows of a batch share their positions, no others can be passed"
            )
        return None
    q_off, k_off = known.off(positions)
    if _bad(q_off, k_off) and not {"batch-ignored", "positions-ignored"} & {*report.codes}:
        x = known.tensor(3, TOKENS, HEADS, 1)
        out, _ = known.subject(x, x.clone(), positions)
        if not _bad((out - known.predicted(x, positions[:1].expand(3, -1))).abs()):
            report.add("first-row-positions", "Rows that begin at 0, 20 and 5 are all rotated as the first.")
        else:
            report.add("rows-mixed-up", "Rows that begin at 0, 20 and 5 are not each rotated by their own positions.")
    return ""


def _grouped(known: Known, report: Report) -> str | None:
    if not known.subject.has_k:
        return None
    for heads in (2, 1):
        try:
            _, k_off = known.off(torch.arange(TOKENS)[None], heads)
        except Refused as e:
            report.add("grouped-heads", f"6 heads of q and {heads} of k: {e}.")
            return ""
        if _bad(k_off):
            report.add("grouped-heads", f"6 heads of q and {heads} of k: k comes out wrong.")
    return ""


def _views(known: Known) -> list[tuple[str, Tensor, Tensor]]:
    """q and k in the layout of the function, with strides that models give them."""
    subject, found = known.subject, []
    for seed in (1, 2):
        x = known.tensor(1, TOKENS, HEADS, seed)
        found.append(
            {
                "contiguous tensors": subject.native(x).contiguous(),
                "slices of q, k and v in one": subject.native(torch.cat((x, x, x), dim=-1)[..., : known.channels]),
                "views of tokens before heads": subject.native(x),
                "views of heads before tokens": subject.native(x.transpose(1, 2).contiguous().transpose(1, 2)),
            }
        )
    return [(name, found[0][name], found[1][name]) for name in found[0]]


def _strided(known: Known, report: Report) -> str | None:
    positions = torch.arange(TOKENS)[None]
    for name, q, k in _views(known)[1:]:
        wanted = [known.predicted(known.subject.back(x).clone(), positions, key=x is k) for x in (q, k)]
        results = known.subject.called(q, k, positions)
        for out, right in zip(results, wanted, strict=True):
            if out is not None and (out.shape != q.shape or _bad((known.subject.back(out) - right).abs())):
                report.add("strided-input", f"{name.capitalize()} come out wrong.")
    return ""


def _mutated(known: Known, report: Report) -> str | None:
    positions = torch.arange(TOKENS)[None]
    for name, q, k in _views(known):
        before = q.clone(), k.clone()
        known.subject.called(q, k, positions)
        if not torch.equal(q, before[0]) or not torch.equal(k, before[1]):
            report.add("input-changed", f"After a call with {name}, what was passed has other values.")
    return ""


def _gradients(known: Known, report: Report) -> str | None:
    positions = torch.arange(TOKENS)[None]
    q = known.subject.native(known.tensor(1, TOKENS, HEADS, 1)).contiguous().requires_grad_()
    k = q.detach().clone().requires_grad_()
    weight = known.tensor(1, TOKENS, HEADS, 3)
    with torch.enable_grad():
        for out, x in zip(known.subject.called(q, k, positions), (q, k), strict=True):
            if out is None:
                continue
            if not out.requires_grad:
                report.add("no-gradient", f"The result for {'q' if x is q else 'k'} is detached from it.")
                return ""
            try:
                (grad,) = torch.autograd.grad(
                    (known.subject.back(out) * weight).sum(), x, retain_graph=True, allow_unused=True
                )
            except RuntimeError as e:
                report.add("wrong-gradient", f"The backward pass raises: {str(e)[:150]}")
                return ""
            if grad is None:
                report.add("no-gradient", f"None reaches {'q' if x is q else 'k'}.")
                return ""
            wanted = known.structure.adjoint(weight, (known.numbers if x is q else known.of_keys)[positions])
            if _bad((known.subject.back(grad) - wanted).abs()):
                report.add("wrong-gradient", "It is not the rotation by minus the angle.")
    return ""
