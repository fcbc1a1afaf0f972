"""Compare the gradients of q and k with the transposed rotation, also at odd sizes and of functions in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.tools.check.find.subject import CallError, Subject
from ropewalk.tools.check.measure import sizes
from ropewalk.tools.check.measure.baseline import POSITIONS_IGNORED, Baseline
from ropewalk.tools.check.measure.case import Case, where
from ropewalk.tools.check.measure.fused import norm_weights, normed

_TIMES = 4


def check(baseline: Baseline) -> bool | str:
    """Report the first case of any call with a wrong gradient, as the smallest. Return whether gradients are judged."""
    report, plain, refused = baseline.report, baseline.subject, list[bool | str]()
    if report.verdict == "wrong" or {"no-gradient", *POSITIONS_IGNORED} & {*report.codes}:
        return False  # the gradient of a wrong result is wrong, too
    if plain.form.library is not None:
        return f"not judged: arrays of {plain.form.library} have no gradient of torch"
    known = len(report.findings)
    for call in (plain, *plain.others):
        there, name = replace(baseline, subject=call), "" if call is plain else f"In the call {call.signature}: "
        of_weights = [_find_fault_of_weights] if "weights" in call.form.takes and not call.noise else []
        for fault in (_find_fault, *of_weights):
            refused.append(sizes.judge_all(there, fault, few=True, call=name))
            if len(report.findings) > known:
                return True
    return refused[0]


def _find_fault(baseline: Baseline, case: Case) -> tuple[str, str] | None:
    """Return the code of what is wrong with the gradients of one call, and a description, or None."""
    subject, positions, overwritten = baseline.subject, case.positions(baseline.subject), False
    in_place = ("in-place-gradient", "wrong-gradient")[not subject.form.in_place]
    try:
        _, results = _call(subject, case, positions)
    except CallError as e:  # of another shape, as with several offsets in a parameter for one
        raise CallError("raises", str(e)) from e
    if sizes.find_fault(baseline, case) is not None:
        return None  # the result itself is wrong, and so is its gradient
    if not any(out.requires_grad for out in results if out is not None):
        return "no-gradient", "No result has a gradient with respect to its input."
    for index, (name, x, result) in enumerate(zip("qk", case.tensors(), results, strict=True)):
        if result is None:
            continue
        weight = _output_gradient(x)
        incoming, grads = subject.to_native(weight), list[Tensor]()
        try:
            for _ in range(_TIMES):
                inputs, results = _call(subject, case, positions)
                out, passed = cast(Tensor, results[index]), subject.to_native(weight.clone())
                grads.append(_gradient(out, inputs[index], passed))
                overwritten = overwritten or not torch.equal(passed, incoming)
        except RuntimeError as e:
            message = _checks.message_of(e)[:150]
            has_none = "inplace" in message or isinstance(e, NotImplementedError)
            return "no-gradient" if has_none else "wrong-gradient", f"The backward pass of {name} raises: {message}"
        if any(not torch.equal(grads[1], other) for other in grads[2:]):
            return "not-repeatable", f"The gradient of {name} is another one in each backward pass."
        grad = subject.from_native(grads[0])
        right = _right(baseline, weight, x, positions, name == "k")
        wrong = ~((grad - right).abs() < baseline.tolerance(positions) + subject.rounding(right))
        if not bool(wrong.any()):
            continue
        if bool(((grad - weight)[wrong].abs() < subject.close).all()):
            part = "" if torch.equal(grad, weight) else where(wrong)
            says = f"The gradient of {name} is that of a function that changes nothing{part}."
            return "no-gradient" if subject.form.in_place and not _is_claimed(result) else in_place, says
        if subject.form.in_place and _depends_on_values(subject, case, positions, index, weight, grads[0]):
            return in_place, f"The gradient of {name} depends on values that are overwritten{where(wrong)}."
        says = f"The gradient of {name} is not the output gradient rotated by minus the angle{where(wrong)}."
        return "wrong-gradient", says
    if overwritten:
        return "gradient-overwritten", "After the backward pass, the gradient of the result is another one."
    return None


class _WithGradient(torch.autograd.Function):
    """Has a gradient of any shape. `torch.autograd.grad` would load SymPy for it, which takes half a second."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return out.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


def _gradient(out: Tensor, x: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of x from that of a result."""
    with torch.enable_grad():
        scalar = _WithGradient.apply(out, gradient)  # type: ignore[no-untyped-call]
        return torch.autograd.grad(scalar, x, materialize_grads=True, retain_graph=True)[0]


def _call(
    subject: Subject, case: Case, positions: Tensor, scale: float = 1.0
) -> tuple[list[Tensor], tuple[Tensor, Tensor | None]]:
    """Return q and k, which require gradients, and the results for them, all in the target's layout."""
    inputs = [(scale * subject.to_native(x)).contiguous().requires_grad_() for x in case.tensors()]
    # A function that works in place is passed what a model passes: the result of a layer, and not a leaf.
    with torch.enable_grad():
        passed = [x.clone() for x in inputs] if subject.form.in_place else inputs
        return inputs, subject.call_native(passed[0], passed[1], positions.clone())


def _find_fault_of_weights(baseline: Baseline, case: Case) -> tuple[str, str] | None:
    """Return the code of what is wrong with the gradients of the weights of a norm, and a description, or None."""
    subject, positions = baseline.subject, case.positions(baseline.subject)
    for index, name in enumerate("qk"):
        q, k = (x.clone().requires_grad_() for x in case.tensors())
        weights = [weight.clone().requires_grad_() for weight in norm_weights(subject, case.channels)]
        weights = weights[:1] * 2 if subject.form.shares_norm else weights
        x = (q, k)[index]
        with torch.enable_grad():
            results = subject.fused(q, k, positions, weights=weights)
            out, right = (results.q, results.k)[index], normed(subject, x, weights[index])
            if out is None or not out.requires_grad:
                continue
            right = baseline.predict(right, positions, key=name == "k")
        weight = _output_gradient(x)
        of_weight, of_x = torch.autograd.grad(right, (weights[index], x), weight.double())
        for leaf, expected in ((weights[index], of_weight), (x, of_x)):
            grad = _gradient(out, leaf, weight)
            if bool(((grad - expected).abs() > subject.close * expected.abs().max()).any()):
                says = "not the sum over all rows, tokens and heads" if bool(grad.any()) else "zero"
                says = f"The gradient of the weight of the norm of {name} is {says}."
                says = says if leaf is not x else f"The gradient of {name} is not multiplied by the weight of its norm."
                return "wrong-gradient", says
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


def _output_gradient(x: Tensor) -> Tensor:
    return torch.sin(0.3 + 0.9 * torch.arange(x.numel())).view(x.shape)


def _right(baseline: Baseline, weight: Tensor, x: Tensor, positions: Tensor, key: bool) -> Tensor:
    """Return the right gradient. A norm, which is passed heads of size 1, also removes its part along each head."""
    transposed = replace(baseline.structure, ins=baseline.structure.outs, outs=baseline.structure.ins)
    right = transposed.predict(weight, baseline.at(positions, key=key).conj())
    if "weights" not in baseline.subject.form.takes:
        return right
    size = x.double().square().mean(-1, keepdim=True).sqrt()
    axes = (-2, -1) if baseline.subject.form.of_all_heads else (-1,)
    unit, right = x.double() / size, right * size
    return (right - unit * (unit * right).mean(axes, keepdim=True)) / size


def _depends_on_values(
    subject: Subject, case: Case, positions: Tensor, index: int, weight: Tensor, grad: Tensor
) -> bool:
    """Return whether the gradient of q or k changes with their values, which that of a rotation does not."""
    if "weights" in subject.form.takes:
        return True
    inputs, results = _call(subject, case, positions, 2.0)
    out = cast(Tensor, results[index])
    other = _gradient(out, inputs[index], subject.to_native(weight))
    return bool(((other - grad).abs() > subject.close).any())
