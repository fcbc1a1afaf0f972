"""The public functions: `check`, which returns a report on a target, and `assert_right`, which fails a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ropewalk import Rope, _checks
from ropewalk._layout import AXES, Layout
from ropewalk.conformance import diagnose, expected, find_call
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

    The target is imported and called, so check only code that you would run. Pass `config`, `rope`, `base` or `pairing`
    to state what it should compute. Without them, only results that no rope explains count as wrong.

    Args:
        target: a function or a class; or a tuple of two, of which the first computes cos and sin and the second applies
            them. A string names them: "module:name", "file.py:name", "file.py:make,apply" or "transformers:llama".
        config: the config that the code should implement, as for `from_config`. Pass `layer` as well if its layers
            differ.
        rope: the `Rope` that the code should implement, instead of a config.
        head_dim: the number of channels of a head, if neither config nor rope is passed. None means 64.
        base: the expected base, if neither config nor rope is passed. None accepts the base that a class was
            constructed with, or any base that fits the measured angles.
        pairing: the expected pairing, "half" or "interleaved", if neither config nor rope is passed. None accepts both.
        layout: the layout of the tensors. None tries all layouts.
        call: the roles of the target's parameters, in order, if their names do not show them: "q,k,cos,sin" or
            "x,positions". "_" omits a parameter.
        layer: the index of the layer of `config` whose rope is expected.
        arguments: maps names of parameters to values, for a class or a function that computes all tables. Values are
            needed for parameters that `check` cannot choose a value for.
        compiled: whether to count graph breaks under torch.compile as well, which takes a few seconds.

    Returns:
        A `Report` with `verdict`, `findings`, `grades` and `to_dict()`. `str(report)` is the report as text.

    Raises:
        RopeError: an argument is invalid, the config cannot be read, the target does not exist, or no known way of
            calling it works.
    """
    if layout is not None and layout not in AXES:
        raise _checks.error(
            "check", f"layout must be one of {', '.join(AXES)}", _checks.shown(layout), "Pass one of them."
        )
    loaded = targets.load(target)
    config = loaded.config if config is None and rope is None else config
    expectation, settings = expected.read(
        config, rope, head_dim=head_dim, base=base, pairing=pairing, layer=layer, arguments=arguments or {}
    )
    report = Report(loaded.name)
    with torch.no_grad():
        try:
            subject = find_call.find(loaded, settings, call, layout)
        except _checks.RopeError:
            if (sliced := expected.for_slice(expectation, settings)) is None:
                raise
            expectation, settings = sliced
            subject = find_call.find(loaded, settings, call, layout)
            report.found["head"] = "only the rotated channels, which the caller slices out"
        try:
            diagnose.run(
                replace(subject, channels=find_call.channels_of(subject, settings)),
                expectation,
                report,
                compiled=compiled,
            )
        except CallError as e:
            raise _checks.error_from(
                f"check: {loaded.name} accepts one call but raises in another",
                e,
                "If `check` calls it in the wrong way, pass --call or --layout.",
            ) from e
    return report


def assert_right(target: Any, **options: Any) -> Report:
    """Run `check` in a test, and fail with the whole report if anything is wrong. Cautions do not fail.

    Args:
        target: as for `check`.
        options: any other arguments of `check`.

    Returns:
        The `Report`, if nothing is wrong.

    Raises:
        AssertionError: the report has a finding that is wrong. The message is the report.
        RopeError: the target cannot be judged.
    """
    report = check(target, **options)
    if report.verdict == "wrong":
        raise AssertionError(str(report))
    return report
