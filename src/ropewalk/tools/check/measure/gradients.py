"""Compare the gradients of q and k with the transposed rotation, also at odd sizes and of functions in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.tools.check.find.subject import CallError, Subject
from ropewalk.tools.check.measure.baseline import POSITIONS_IGNORED, Baseline
from ropewalk.tools.check.measure.case import CLOSE, HEADS, TOKENS, Case, first_fault, usual, where

_TIMES = 4


_USUAL = ((TOKENS, HEADS, HEADS),)  # tokens, heads of q, heads of k
ODD = ((33, 3, 1), (1, 12, 4), (7, 5, 5))


def check(baseline: Baseline, sizes: Sequence[tuple[int, int, int]] = _USUAL) -> bool:
    """Report the first case with a wrong gradient, as the smallest one. Return whether gradients are judged.

    Args:
        baseline: the first measurement.
        sizes: the numbers of tokens, of heads of q and of heads of k to try.

    Raises:
        CallError: the call with the usual sizes fails.
    """
    if {"wrong-norm", "no-gradient"} & {*baseline.report.codes}:
        return False
    cases = [usual(baseline.subject, tokens=tokens, heads=q, k_heads=k) for tokens, q, k in sizes]
    found, raised = first_fault(cases, partial(find_fault, baseline))
    if found is not None:
        baseline.report.add(*found)
    elif raised and sizes == _USUAL:
        raise CallError("raises", raised)
    return True


def find_fault(baseline: Baseline, case: Case, positions: Tensor | None = None) -> tuple[str, str] | None:
    """Return the code of what is wrong with the gradients of one call, and a description, or None.

    The output gradients are those of the first channels of all pairs, and then those of the second. Each element of
    such a gradient is a single term, so an element that is zero is a term without a gradient.

    Args:
        baseline: the first measurement.
        case: the sizes of the call.
        positions: those of the call. None means those of the case, or from 0 on, if others were found to be ignored.

    Raises:
        CallError: the call fails.
    """
    subject = baseline.subject
    if positions is None:
        is_ignored = POSITIONS_IGNORED & {*baseline.report.codes}
        positions = torch.arange(case.tokens)[None] if is_ignored else case.positions(subject)
    inputs = [subject.to_native(x).contiguous().requires_grad_() for x in case.tensors()]
    in_place = ("in-place-gradient", "wrong-gradient")[not subject.form.in_place]
    with torch.enable_grad():
        # A function that works in place is passed what a model passes: the result of a layer, and not a leaf.
        passed = [x.clone() for x in inputs] if subject.form.in_place else inputs
        results = subject.call_native(passed[0], passed[1], positions.clone())
        if not any(out.requires_grad for out in results if out is not None):
            return "no-gradient", "No result has a gradient with respect to its input."
        for name, out, x in zip("qk", results, inputs, strict=True):
            if out is None:
                continue
            if not out.requires_grad:
                return "wrong-gradient", f"The result for {name} has no gradient, unlike the other."
            for weight in _weights(baseline, subject.from_native(x, case.rows)):
                try:
                    product = (subject.from_native(out, case.rows) * weight).sum()
                    grads = [
                        torch.autograd.grad(product, x, retain_graph=True, materialize_grads=True)[0]
                        for _ in range(_TIMES)
                    ]
                except RuntimeError as e:
                    message = _checks.message_of(e)[:150]
                    has_none = "inplace" in message or isinstance(e, NotImplementedError)
                    return "no-gradient" if has_none else "wrong-gradient", f"The backward pass raises: {message}"
                if any(not torch.equal(grads[1], other) for other in grads[2:]):
                    return "not-repeatable", f"The gradient of {name} is another one in each backward pass."
                grad = subject.from_native(grads[0], case.rows)
                right = _right(baseline, weight, subject.from_native(x.detach(), case.rows), positions, name == "k")
                wrong = ~((grad - right).abs() < CLOSE)
                if not bool(wrong.any()):
                    continue
                if not bool(grad[wrong].any()):
                    return "wrong-gradient", f"A part of the gradient of {name} is zero{where(wrong)}."
                if bool(((grad - weight)[wrong].abs() < CLOSE).all()):
                    says = f"The gradient of {name} is that of a function that changes nothing{where(wrong)}."
                    return "no-gradient" if subject.form.in_place and not _is_claimed(out) else in_place, says
                if subject.form.in_place and _depends_on_values(
                    subject, case, positions, name == "k", weight, grads[0]
                ):
                    return in_place, f"The gradient of {name} depends on values that are overwritten{where(wrong)}."
                return "wrong-gradient", "The gradient is not the output gradient rotated by minus the angle."
    return None


def _is_claimed(out: Tensor) -> bool:
    """Return whether a `torch.autograd.Function` computes the gradient of a result."""
    nodes: list[Any] = [out.grad_fn]
    seen: set[Any] = {None}
    while nodes:
        if (node := nodes.pop()) not in seen:
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
    return any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in seen)


def _weights(baseline: Baseline, x: Tensor) -> list[Tensor]:
    """Return two output gradients: 0 in the first channels of all pairs, and 0 in the second."""
    weights = [torch.sin(0.3 + 0.9 * torch.arange(x.numel())).view(x.shape) for _ in range(2)]
    for weight, channels in zip(weights, baseline.structure.outs.T, strict=True):
        weight[..., channels] = 0
    return weights


def _right(baseline: Baseline, weight: Tensor, x: Tensor, positions: Tensor, key: bool) -> Tensor:
    """Return the right gradient. A norm, which is passed heads of size 1, also removes its part along each head."""
    right = baseline.structure.predict_gradient(weight, baseline.at(positions, key=key))
    if "weights" not in baseline.subject.form.takes:
        return right
    unit = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True))
    return right - unit * (unit * right).mean(-1, keepdim=True)


def _depends_on_values(
    subject: Subject, case: Case, positions: Tensor, key: bool, weight: Tensor, grad: Tensor
) -> bool:
    """Return whether the gradient of q or k changes with their values, which that of a rotation does not."""
    if "weights" in subject.form.takes:
        return True
    inputs = [(2 * subject.to_native(x)).contiguous().requires_grad_() for x in case.tensors()]
    out = subject.call_native(inputs[0].clone(), inputs[1].clone(), positions.clone())[key]
    product = (subject.from_native(out, case.rows) * weight).sum()  # type: ignore[arg-type]
    other = torch.autograd.grad(product, inputs[key], materialize_grads=True)[0]
    return bool(((other - grad).abs() > CLOSE).any())
