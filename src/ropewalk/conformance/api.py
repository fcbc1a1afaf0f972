"""`check`, which takes a target and returns a report, and `assert_right`, the same as a test."""

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
from ropewalk.conformance.subject import CallError


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
    """Check what an implementation of rotary embeddings computes, and name its bugs.

    The target is imported and called, so check only code that you would run. Nothing is expected of it unless `config`,
    `rope`, `base` or `pairing` says so; without them, only results that can never be right are wrong.

    Args:
        target: a function or a class, or a tuple of two: the first computes cos and sin, the second applies them. Also
            their name: "module:name", "file.py:name", "file.py:make,apply" or "transformers:llama".
        config: the config that the code should implement, as for `from_config`. Pass `layer` as well if its layers
            differ.
        rope: the `Rope` that the code should implement, instead of a config.
        head_dim: the number of channels of a head, without config and rope. None means 64.
        base: the expected base, without config and rope. None accepts the base that a class was constructed with, or
            the base that fits.
        pairing: "half" or "interleaved", without config and rope. None accepts both.
        layout: the layout of the tensors. None finds it by trying.
        call: the roles of the parameters, in order, for parameters whose names do not tell: "q,k,cos,sin" or
            "x,positions". "_" omits one.
        layer: the index of the layer of the config whose rope is expected.
        arguments: name → value, for parameters of a class that `check` cannot fill by itself.
        compiled: whether to count graph breaks under torch.compile as well, which takes a few seconds.

    Returns:
        A `Report` with `verdict`, `findings`, `grades` and `to_dict()`. Its `str` is the report as text.

    Raises:
        RopeError: the target cannot be judged: it does not exist, no known way of calling it works, or the config
            cannot be read.
    """
    if layout is not None and layout not in AXES:
        raise _checks.error(
            "check", f"layout must be one of {', '.join(AXES)}", _checks.shown(layout), "Pass one of them."
        )
    found = targets.load(target)
    config = found.config if config is None and rope is None else config
    wanted, settings = expected.read(
        config, rope, head_dim=head_dim, base=base, pairing=pairing, layer=layer, arguments=arguments or {}
    )
    report = Report(found.name)
    with torch.no_grad():
        try:
            subject = forms.find(found, settings, call, layout)
        except _checks.RopeError:
            if (narrow := expected.for_slice(wanted, settings)) is None:
                raise
            wanted, settings = narrow
            subject = forms.find(found, settings, call, layout)
            report.found["head"] = "only the rotated channels, which the caller slices out"
        try:
            diagnose.run(
                replace(subject, channels=forms.channels_of(subject, settings)), wanted, report, compiled=compiled
            )
        except CallError as e:
            raise _checks.failed(
                f"check: {found.name} accepts one call and fails on another",
                e,
                "If it was called in the wrong way, pass --call or --layout.",
            ) from e
    return report


def assert_right(target: Any, **options: Any) -> Report:
    """Run `check` as a test: fail with the whole report if anything is wrong. Cautions pass.

    Args:
        target: as for `check`.
        options: as for `check`.

    Returns:
        The `Report`, if nothing is wrong.

    Raises:
        AssertionError: something is wrong.
        RopeError: the target cannot be judged.
    """
    report = check(target, **options)
    if report.verdict == "wrong":
        raise AssertionError(str(report))
    return report
