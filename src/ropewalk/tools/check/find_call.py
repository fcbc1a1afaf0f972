"""Find out how to call a target: try each candidate call on a few numbers, and choose the one that rotates best."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.tools.check import construct, roles, structure
from ropewalk.tools.check.candidates import TableSet, candidates
from ropewalk.tools.check.construct import Arguments, Settings
from ropewalk.tools.check.subject import CallError, Subject
from ropewalk.tools.check.target import Target


def find(target: Target, settings: Settings, call: str | None, layout: str | None) -> Subject:
    """Return the target as a `Subject`, which calls it in the way that rotates best.

    Raises:
        RopeError: no candidate call works. The message says why, or what the target raised.
    """
    try:
        return _find(target, settings, call, layout)
    except _checks.RopeError as e:
        if (wrap := _how_to_wrap(target)) is not None:
            raise _checks.error("check", f"{target.name} must take tensors of torch", *wrap) from e
        raise


def _find(target: Target, settings: Settings, call: str | None, layout: str | None) -> Subject:
    first, arguments = _construct(target.objects[0], settings)
    second = target.objects[1] if len(target.objects) == 2 else None
    errors: list[str] = []
    best: tuple[int, Subject] | None = None
    channels = settings.channels or settings.head_dim
    for subject in candidates(first, second, arguments, call, channels):
        if layout is not None and subject.layout != layout:
            continue
        score = _score(subject, errors)
        if score is not None and (best is None or score > best[0]):
            best = score, subject
        if score == _PERFECT:
            break
    if best is None:
        how, layout = _checks.argument("call", "q,k,cos,sin"), _checks.argument("layout")
        raise _checks.error(
            "check",
            f"{target.name} must be callable in a known way, and rotate tensors",
            errors[0] if errors else "no known parameters",
            " ".join((f"Describe its parameters: pass {how}, {layout} or arguments (--arg).", *settings.notes)),
        )

    def rebuild(base: float | None = None) -> Subject:
        new, arguments = _construct(target.objects[0], settings if base is None else replace(settings, base=base))
        chosen = best[1]
        return next(
            subject
            for subject in candidates(new, second, arguments, call, channels)
            if (subject.signature, subject.layout, subject.positions, subject.tables)
            == (chosen.signature, chosen.layout, chosen.positions, chosen.tables)
        )

    constructed = arguments is not None and first is not target.objects[0]
    return replace(best[1], rebuild=rebuild if constructed else None)


def _construct(target: Any, settings: Settings) -> tuple[Any, Arguments | None]:
    """Construct the object, or compute its tables, and return the result with the arguments that were used.

    A function that rotates is returned unchanged, with None instead of arguments.
    """
    if construct.is_constructor(target):
        arguments = construct.choose_arguments(target, settings)
        return construct.build(target, arguments.values), arguments
    parameters = roles.parameters(target) or {}
    if "dim" in roles.constructor_roles(parameters) and not {"q", "x"} & {*_call_roles(target)} and len(parameters) > 1:
        arguments = construct.choose_arguments(target, settings)
        return TableSet(construct.build(target, arguments.values)), arguments
    if settings.arguments:
        must = "arguments (--arg) require a class, or a function that computes all tables"
        names = ", ".join(settings.arguments)
        raise _checks.error("check", must, f"{names} for a function that is called with tokens", "Drop them.")
    return target, None


_WRAPPERS = {"numpy": "np.asarray", "jax": "jnp.asarray", "mlx": "mx.array"}


def _how_to_wrap(target: Target) -> tuple[str, str] | None:
    """Return what a target is, and how to wrap it, if it uses another library of arrays and not torch."""
    for obj in target.objects:
        owner = getattr(obj, "owner", obj)
        code = [owner, *vars(owner if inspect.isclass(owner) else type(owner)).values()]
        scope = next((function.__globals__ for function in code if inspect.isfunction(function)), {})
        used = {value.__name__.partition(".")[0] for value in scope.values() if inspect.ismodule(value)}
        for library in _WRAPPERS.keys() & used if "torch" not in used else ():
            array = _WRAPPERS[library]
            return f"code that uses {library}", (
                f"Check a function that converts them, with --ignore no-gradient: def rotate(x, positions): return "
                f"torch.from_numpy(np.array(f({array}(x.detach().float().numpy()), {array}(positions.numpy()))))"
                f".type_as(x)."
            )
    return None


def _call_roles(target: Any) -> roles.Roles:
    try:
        return roles.call_roles(target, None)
    except _checks.RopeError:
        return {}


_TOKENS, _HEADS = 5, 3
_PERFECT = 30  # the largest score


def _score(subject: Subject, errors: list[str]) -> int | None:
    """Score how much a candidate call behaves like a rotation. Return None, and append to `errors`, if it fails."""
    positions = torch.arange(_TOKENS)[None]
    x = torch.sin(1 + torch.arange(subject.channels, dtype=torch.float32)).expand(3, _TOKENS, _HEADS, -1)
    try:
        out, _ = subject(x[:1], x[:1], positions)
        maps = linear_maps(subject, positions)
    except CallError as e:
        errors.append(str(e))
        return None
    differs_by_head = bool((out - out[:, :, :1]).abs().max() > 1e-5)
    differs_by_token = bool((out - out[:, :1]).abs().max() > 1e-5)
    score = 12 * (differs_by_token and not differs_by_head)
    if (found := structure.infer(maps)) is not None:
        at_0 = found.multipliers(maps[0, :, found.ins[:, 0]].T).diagonal()
        score += (
            {None: 10, "attention-factor": 8, "not-a-rotation": 6}.get(found.flaw, 2)
            + 4 * (found.order == "same")
            + 2 * (found.pairing is not None)
            + 1 * bool((at_0.angle().abs() < 1e-5).all())
        )
    if subject.accepts(positions.expand(3, -1)):
        with contextlib.suppress(CallError):
            subject(x, x, positions.expand(3, -1))
            score += 1
    return score


def linear_maps(subject: Subject, positions: Tensor, of: str = "q") -> Tensor:
    """Measure the linear map that the subject applies to q or k at positions `[1, seq]`.

    The subject is called with one head for each channel, which is 1 in that channel and 0 elsewhere.

    Returns:
        `[seq, out channels, in channels]`.

    Raises:
        CallError: the call of the subject fails.
    """
    eye = torch.eye(subject.channels).expand(1, positions.shape[1], -1, -1).contiguous()
    q_out, k_out = subject(eye, eye.clone(), positions)
    return (q_out if k_out is None or of == "q" else k_out)[0].mT
