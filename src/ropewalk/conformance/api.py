"""check: a target in, a report out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ropewalk import Rope, _checks
from ropewalk._layout import AXES, Layout
from ropewalk.conformance import diagnose, expected, forms
from ropewalk.conformance import target as targets
from ropewalk.conformance.report import Report
from ropewalk.conformance.subject import Refused


def check(
    target: Any,
    *,
    config: Any = None,
    rope: Rope | None = None,
    head_dim: int | None = None,
    base: float | None = None,
    pairing: str | None = None,
    layout: Layout | None = None,
    call: str | None = None,
    layer: int | None = None,
    arguments: Mapping[str, Any] | None = None,
    compiled: bool = False,
) -> Report:
    """What an implementation of rotary embeddings does, and what is wrong with it. It is executed.

    Args:
        target: a function or class, or two: what makes cos and sin, and the function that takes them. Or their name:
            "module:name", "file.py:name", "file.py:make,apply", "transformers:llama".
        config: what the code should do, as for `from_config`. Layers that differ need `layer`.
        rope: the same as a `Rope`.
        head_dim: channels of a head, where neither is given; 64 when None.
        base: the base, where neither is given; what a class was given, or what fits, when None.
        pairing: "half" or "interleaved", where neither is given; None takes both to be right.
        layout: of the tensors; tried out when None.
        call: what the parameters are, in order, where their names do not say: "q,k,cos,sin", "x,positions", "_" for one
            that is left out.
        layer: whose rope of the config is meant.
        arguments: name → value, for parameters of a class that nothing else is known for.
        compiled: whether to count graph breaks under torch.compile, too, which takes some seconds.

    Returns:
        A `Report`: `verdict`, `findings`, `grades`, `to_dict()`, and lines for people as its `str`.

    Raises:
        RopeError: it could not be judged: nothing of that name, no known way to call it, a config that cannot be read.
    """
    if layout is not None and layout not in AXES:
        raise _checks.error(
            "check", f"layout must be one of {', '.join(AXES)}", _checks.shown(layout), "Pass one of them."
        )
    found = targets.load(target)
    config = found.config if config is None and rope is None else config
    wanted, wishes = expected.read(
        config, rope, head_dim=head_dim, base=base, pairing=pairing, layer=layer, arguments=arguments or {}
    )
    report = Report(found.name)
    with torch.no_grad():
        try:
            subject = forms.find(found, wishes, call, layout)
        except _checks.RopeError:
            if (narrow := expected.of_slice(wanted, wishes)) is None:
                raise
            wanted, wishes = narrow
            subject = forms.find(found, wishes, call, layout)
            report.found["head"] = "the rotated channels alone, which the caller cuts out"
        try:
            diagnose.run(
                replace(subject, channels=forms.channels_of(subject, wishes)), wanted, report, compiled=compiled
            )
        except Refused as e:
            raise _checks.failed(
                f"check: {found.name} works on one call and not on another",
                e,
                "Pass --call or --layout, if it was misread.",
            ) from e
    return report


def assert_right(target: Any, **options: Any) -> Report:
    """`check`, as a test: an AssertionError with the whole report where anything is wrong. Cautions pass.

    Args:
        target: as for `check`, and so the options.

    Raises:
        AssertionError: something is wrong.
        RopeError: it could not be judged.
    """
    report = check(target, **options)
    if report.verdict == "wrong":
        raise AssertionError(str(report))
    return report
