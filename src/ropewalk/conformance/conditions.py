"""Test the calls that models make, such as batches, a single token, fewer key heads than query heads, and views.

The first, plain call measures the multiplier (cos + i·sin) of each pair at each position. Every other call is compared
with the prediction from these multipliers, so a bug in the plain call is reported only once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.conformance.report import Report
from ropewalk.conformance.structure import Structure
from ropewalk.conformance.subject import CallError, Subject

TOKENS, HEADS = 5, 6
CLOSE = 1e-4  # tolerance of float32 results of size 1


@dataclass(frozen=True)
class Baseline:
    """The measurement of one plain call, with which all other calls are compared.

    Args:
        subject: the target.
        structure: its pairs.
        channels: the number of channels of the heads that are passed to it.
        multipliers: the measured multiplier of each pair of q at positions 0 to 63, complex128 `[positions, pairs]`.
        k_multipliers: the measured multiplier of each pair of k. Equal to `multipliers` if the subject takes no k.
    """

    subject: Subject
    structure: Structure
    channels: int
    multipliers: Tensor
    k_multipliers: Tensor

    def predict(self, x: Tensor, positions: Tensor, *, key: bool = False) -> Tensor:
        """Predict the output for x at positions `[batch, seq]`, float64 `[batch, seq, heads, channels]`."""
        return self.structure.predict(x, (self.k_multipliers if key else self.multipliers)[positions])

    def tensor(self, rows: int, tokens: int, heads: int, seed: int) -> Tensor:
        """Compute a tensor `[rows, tokens, heads, channels]` by a formula, without using any random state."""
        n = torch.arange(rows * tokens * heads * self.channels, dtype=torch.float32)
        return torch.sin(0.1 + 0.7 * n + seed).reshape(rows, tokens, heads, self.channels)

    def errors(self, positions: Tensor, k_heads: int = HEADS) -> tuple[Tensor, Tensor]:
        """Return the absolute error of each element of the rotated q and k at positions `[batch, seq]`.

        If the subject takes no k, the errors of k are zero.
        """
        rows, tokens = positions.shape
        q, k = self.tensor(rows, tokens, HEADS, 1), self.tensor(rows, tokens, k_heads, 2)
        q_out, k_out = self.subject(q, k, positions)
        q_off = (q_out - self.predict(q, positions)).abs()
        return q_off, torch.zeros_like(q_off) if k_out is None else (k_out - self.predict(k, positions, key=True)).abs()


def judge(baseline: Baseline, report: Report) -> None:
    """Run every test that the subject supports, and add findings and grades to the report."""
    tests: list[tuple[str, Callable[[Baseline, Report], str | None]]] = [
        ("positions passed", _check_offset),
        ("one token", _check_one_token),
        ("batch", _check_batch),
        ("ragged rows", _check_ragged_rows),
        ("fewer key heads", _check_fewer_key_heads),
        ("views", _check_views),
        ("input unchanged", _check_inputs_unchanged),
        ("gradients", _check_gradients),
    ]
    for name, test in tests:
        before = len(report.findings)
        try:
            says = test(baseline, report)
        except CallError as e:
            report.add("raises", f"In the test of {name}: {e}.")
            report.grade(name, f"raises: {e}")
            continue
        if says is not None:
            wrong = len(report.findings) > before
            report.grade(name, report.findings[-1].says if wrong and says == "" else says or "as expected", not wrong)


def _differ(*errors: Tensor) -> bool:
    """Return whether any error is at least CLOSE, or NaN."""
    return not all(bool((error < CLOSE).all()) for error in errors)


def _check_offset(baseline: Baseline, report: Report) -> str | None:
    positions = torch.arange(7, 7 + TOKENS)[None]
    if not baseline.subject.accepts(positions):
        return None
    if _differ(*baseline.errors(positions)):
        x = baseline.tensor(1, TOKENS, HEADS, 1)
        out, _ = baseline.subject(x, x.clone(), positions)
        if not _differ((out - baseline.predict(x, torch.arange(TOKENS)[None])).abs()):
            code = "offset-ignored" if baseline.subject.positions == "offset" else "positions-ignored"
            report.add(code, "Tokens at positions 7 to 11 are rotated by the angles of 0 to 4.")
        else:
            report.add(
                "wrong-far-positions",
                "Tokens at positions 7 to 11 have other angles than in a sequence that starts at 0.",
            )
        return ""
    scattered = torch.tensor([[9, 3, 60, 3, 0]])
    if baseline.subject.accepts(scattered) and _differ(*baseline.errors(scattered)):
        report.add("positions-ignored", "Positions 9, 3, 60, 3, 0 are not each rotated by their own angle.")
    return ""


def _check_one_token(baseline: Baseline, report: Report) -> str | None:
    positions = torch.tensor([[9]])
    if not baseline.subject.accepts(positions) or {"positions-ignored", "offset-ignored"} & {*report.codes}:
        return None
    if _differ(*baseline.errors(positions)):
        report.add("one-token-wrong", "A single token at position 9 has other angles than within a sequence.")
    return ""


def _check_batch(baseline: Baseline, report: Report) -> str | None:
    for tokens, first in ((TOKENS, 0), (1, 9)):
        positions = torch.arange(first, first + tokens).expand(3, tokens)
        if not baseline.subject.accepts(positions):
            continue
        q_off, k_off = baseline.errors(positions)
        if _differ(q_off[1:], k_off[1:]) and not _differ(q_off[:1], k_off[:1]):
            report.add("batch-ignored", f"Of 3 rows with {tokens} token(s) each, only the first is right.")
        elif _differ(q_off, k_off) and not {"one-token-wrong", "positions-ignored"} & {*report.codes}:
            report.add("batch-ignored", f"The results for 3 rows with {tokens} token(s) each are wrong.")
    return "" if "b" in baseline.subject.layout else None


def _check_ragged_rows(baseline: Baseline, report: Report) -> str | None:
    positions = torch.tensor([[0, 1, 2, 3, 4], [20, 21, 22, 23, 24], [5, 5, 60, 1, 2]])
    if not baseline.subject.accepts(positions):
        if baseline.subject.positions == "shared":
            report.grade("ragged rows", "not judged: only positions shared by all rows of the batch can be passed")
        return None
    q_off, k_off = baseline.errors(positions)
    if _differ(q_off, k_off) and not {"batch-ignored", "positions-ignored"} & {*report.codes}:
        x = baseline.tensor(3, TOKENS, HEADS, 1)
        out, _ = baseline.subject(x, x.clone(), positions)
        if not _differ((out - baseline.predict(x, positions[:1].expand(3, -1))).abs()):
            report.add("first-row-positions", "Rows that begin at 0, 20 and 5 all get the positions of the first row.")
        else:
            report.add("rows-mixed-up", "Rows that begin at 0, 20 and 5 are not each rotated by their own positions.")
    return ""


def _check_fewer_key_heads(baseline: Baseline, report: Report) -> str | None:
    if not baseline.subject.has_k:
        return None
    for heads in (2, 1):
        try:
            _, k_off = baseline.errors(torch.arange(TOKENS)[None], heads)
        except CallError as e:
            report.add("grouped-heads", f"6 heads of q and {heads} of k: {e}.")
            return ""
        if _differ(k_off):
            report.add("grouped-heads", f"6 heads of q and {heads} of k: the result for k is wrong.")
    return ""


def _views(baseline: Baseline) -> list[tuple[str, Tensor, Tensor]]:
    """Return test tensors q and k in the target's layout, for each way in which models lay them out in memory.

    Each entry of the list is a description of the memory layout, then q and k.
    """
    subject, views = baseline.subject, []
    for seed in (1, 2):
        x = baseline.tensor(1, TOKENS, HEADS, seed)
        views.append(
            {
                "contiguous tensors": subject.to_native(x).contiguous(),
                "slices of one tensor with q, k and v": subject.to_native(
                    torch.cat((x, x, x), dim=-1)[..., : baseline.channels]
                ),
                "views of a tensor with tokens before heads": subject.to_native(x),
                "views of a tensor with heads before tokens": subject.to_native(
                    x.transpose(1, 2).contiguous().transpose(1, 2)
                ),
            }
        )
    return [(name, views[0][name], views[1][name]) for name in views[0]]


def _check_views(baseline: Baseline, report: Report) -> str | None:
    positions = torch.arange(TOKENS)[None]
    for name, q, k in _views(baseline)[1:]:
        expected = [baseline.predict(baseline.subject.from_native(x).clone(), positions, key=x is k) for x in (q, k)]
        results = baseline.subject.call_native(q, k, positions)
        for out, right in zip(results, expected, strict=True):
            if out is not None and (out.shape != q.shape or _differ((baseline.subject.from_native(out) - right).abs())):
                report.add("strided-input", f"The results for {name} are wrong.")
    return ""


def _check_inputs_unchanged(baseline: Baseline, report: Report) -> str | None:
    positions = torch.arange(TOKENS)[None]
    for name, q, k in _views(baseline):
        before = q.clone(), k.clone()
        baseline.subject.call_native(q, k, positions)
        if not torch.equal(q, before[0]) or not torch.equal(k, before[1]):
            report.add("input-changed", f"A call with {name} changes the values of its arguments.")
    return ""


def _check_gradients(baseline: Baseline, report: Report) -> str | None:
    positions = torch.arange(TOKENS)[None]
    q = baseline.subject.to_native(baseline.tensor(1, TOKENS, HEADS, 1)).contiguous().requires_grad_()
    k = q.detach().clone().requires_grad_()
    weight = baseline.tensor(1, TOKENS, HEADS, 3)
    with torch.enable_grad():
        for out, x in zip(baseline.subject.call_native(q, k, positions), (q, k), strict=True):
            if out is None:
                continue
            if not out.requires_grad:
                report.add(
                    "no-gradient", f"The result for {'q' if x is q else 'k'} has no gradient with respect to its input."
                )
                return ""
            try:
                (grad,) = torch.autograd.grad(
                    (baseline.subject.from_native(out) * weight).sum(), x, retain_graph=True, allow_unused=True
                )
            except RuntimeError as e:
                report.add("wrong-gradient", f"The backward pass raises: {str(e)[:150]}")
                return ""
            if grad is None:
                report.add("no-gradient", f"The gradient of {'q' if x is q else 'k'} is None.")
                return ""
            expected = baseline.structure.predict_gradient(
                weight, (baseline.multipliers if x is q else baseline.k_multipliers)[positions]
            )
            if _differ((baseline.subject.from_native(grad) - expected).abs()):
                report.add("wrong-gradient", "The gradient is not the output gradient rotated by minus the angle.")
    return ""
