"""The public functions: `check`, which returns a report on a target, and `assert_right`, which fails a test."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ropewalk import Rope, _checks
from ropewalk.tools.check import expected
from ropewalk.tools.check.bugs import BUGS
from ropewalk.tools.check.find import calls, memory, words
from ropewalk.tools.check.find import target as targets
from ropewalk.tools.check.find.form import LAYOUTS
from ropewalk.tools.check.find.memory import Memory
from ropewalk.tools.check.find.subject import CallError
from ropewalk.tools.check.find.ways import LAST
from ropewalk.tools.check.measure import lengths, states, steps
from ropewalk.tools.check.report import Report


def check(
    target: Any,
    *,
    config: Any = None,
    rope: Rope | None = None,
    head_dim: int | None = None,
    base: float | None = None,
    pairing: str | None = None,
    factor: float | None = None,
    download: bool = False,
    layout: str | None = None,
    layer: int | None = None,
    ignore: Collection[str] = (),
    device: str | torch.device = "cpu",
) -> Report:
    """Check what an implementation of rotary embeddings computes, and name its bugs.

    The target is imported and called, so check only code that you would run. Pass `config`, `rope`, `base` or `pairing`
    to state what it should compute. Without them, only results that no rope explains count as wrong.

    Args:
        target: a function or a class; or a tuple of two, of which the first computes cos and sin and the second applies
            them. A string names them: "module:name", "file.py:name" or "file.py:make,apply".
        config: the config that the code should implement, as for `from_config`. Pass `layer` as well if its layers
            differ.
        rope: the `Rope` that the code should implement, instead of a config.
        head_dim: the number of channels of a head, if neither config nor rope is passed. None means 64.
        base: the expected base. With a config, as for `from_config`. Without one, None accepts the base that a class
            was constructed with, or any base that fits the measured angles.
        pairing: the expected pairing, "half" or "interleaved". With a config that requires the other, weights are
            expected to be converted. Without one, None accepts both.
        factor, download: as for `from_config`, if a config is passed.
        layout: the layout of the tensors: "bshd", "bhsd", "sbhd" or "thd"; "bsd", "td" or "bds" (one head for each
            call); "bhds"; or "hd", "d" or "1111d" (one token, of all heads or one). None tries all layouts.
        layer: the index of the layer of `config` whose rope is expected.
        ignore: codes of findings that are accepted. They are reported, but do not make the verdict "wrong". Any other
            name is a key of the config, as for `from_config`.
        device: the device on which the target runs, such as "cuda": its arguments are moved there, and its results to
            the CPU, where they are measured. Modules are moved as well.

    Returns:
        A `Report` with `verdict`, `findings`, `grades` and `to_dict()`. `str(report)` is the report as text.

    Raises:
        RopeError: an argument is invalid, the config cannot be read, the target does not exist, or no known way of
            calling it works.
    """
    if layout is not None:
        _checks.choice("check", "layout", layout, (*LAYOUTS, *LAST))
    codes = {name for name in ignore if name in BUGS or config is None}
    keys = [name for name in ignore if name not in codes]
    for code in codes:
        _checks.choice("check", "ignore", code, BUGS)
    used = Memory(memory.find_device(device))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = targets.load(target)
            if (default := torch.get_default_device()).type != "cpu":
                fix = "Drop torch.set_default_device or torch.device around check."
                raise _checks.error("check", "the default device must be the CPU", str(default), fix)
            reading: dict[str, Any] = {"pairing": pairing, "base": base, "factor": factor}
            reading |= {"ignore": keys or None, "download": download or None}
            expectation = expected.read(loaded, config, rope, reading, head_dim=head_dim, layer=layer)
            report = Report(loaded.name, ignored=frozenset(codes))
            if expectation.notes:
                report.found["note on the config"] = " ".join(expectation.notes)
            with torch.no_grad(), used.used():
                _run(loaded, expectation, layout, report)
    except (_checks.RopeError, OSError, KeyboardInterrupt):
        raise
    except BaseException as e:  # the target may raise anything, at any access to it or to what it returns
        fix = "If TARGET does not cause this, report it as a bug of ropewalk."
        raise _checks.error_from("check: TARGET cannot be judged", e, fix) from e
    return report


def _run(loaded: targets.Target, expectation: expected.Expected, layout: str | None, report: Report) -> None:
    """Find the call of a loaded target, and run all steps, or only that for a layer that must not rotate."""
    try:
        subject = calls.find(loaded, expectation, layout)
    except _checks.RopeError:
        used = memory.current()
        if not used.stays:
            raise
        report.add("wrong-device", f"On {used.device}: {used.stays}.")
        return
    if expectation.is_still:
        steps.judge_still(subject, report)
        return
    try:
        steps.run(subject, report)
        is_told = subject.is_told_its_layer and report.verdict == "right"
        if expectation.still is not None and is_told and subject.rebuild is not None:
            steps.judge_still(subject.rebuild(layer=expectation.still, is_still=True), report)
        if expectation.pairing is None and report.verdict == "right":
            report.test("other pairing", partial(_judge_other_pairing, loaded, expectation, layout, report))
    except lengths.SizeError as e:
        if len(loaded.objects) < 2:
            raise
        report.found = {"tables": "not judged: their angles depend on the number of tokens, so exact ones are passed"}
        report.findings, report.grades = [], []
        try:
            _run(replace(loaded, objects=loaded.objects[1:]), expectation, layout, report)
        except _checks.RopeError:
            raise e from None
    except CallError as e:
        new = subject if subject.rebuild is None else subject.rebuild()
        if not states.takes_64_tokens(subject) and states.takes_64_tokens(new):
            report.add("earlier-calls-matter", f"After a call with fewer tokens, one with 64 fails: {e}.")
            return
        fix = f"If `check` calls it in the wrong way, pass {_checks.argument('layout')}, or write an adapter."
        raise _checks.error("check", f"{report.target} must accept more than one call", str(e), fix) from e


def _judge_other_pairing(
    loaded: targets.Target, expectation: expected.Expected, layout: str | None, report: Report
) -> bool:
    """Check the code with the other pairing as well, if it has an option for it and none is stated."""
    other = {"half": "interleaved", "interleaved": "half"}.get(str(report.found.get("pairing")))
    spellings = {role: words.SPELLINGS[role] for role in ("interleaved", "is_neox")}
    known = [words.parameters(getattr(obj, "owner", obj)) or {} for obj in loaded.objects]
    options = [name for each in known for name in words.match(each, spellings).values()]
    there = Report(report.target, ignored=report.ignored)
    if other is None or not options:
        return False
    try:
        _run(loaded, replace(expectation, pairing=other), layout, there)
    except _checks.RopeError:  # the code refuses it
        return False
    if "wrong-pairing" in there.codes:  # the option is for something else
        return False
    for found in there.counted:
        if found.severity == "wrong":
            report.add(found.code, f"If {options[0]} asks for {other} pairing: {found.says}", found.case)
            break
    return True


def assert_right(target: Any, **options: Any) -> Report:
    """Run `check` in a test, and fail with the whole report if anything is wrong. Cautions do not fail.

    Args:
        target: as for `check`.
        options: any other arguments of `check`, such as `ignore`.

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
