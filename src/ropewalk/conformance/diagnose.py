"""Run the steps of a check in order: structure, law of angles, conditions, far positions, dtypes, state, compiling."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from ropewalk import Rope
from ropewalk._layout import Pairing
from ropewalk.conformance import compiled as compile_
from ropewalk.conformance import conditions, dtypes, far_positions, law, states
from ropewalk.conformance.candidates import GIVEN_BASE, GIVEN_CHANNELS
from ropewalk.conformance.conditions import Baseline
from ropewalk.conformance.expected import Expected
from ropewalk.conformance.find_call import linear_maps
from ropewalk.conformance.law import Law
from ropewalk.conformance.report import Report
from ropewalk.conformance.structure import Structure, infer
from ropewalk.conformance.subject import Subject

SMALL = torch.arange(64)  # the positions of the plain call


def run(subject: Subject, expected: Expected, report: Report, *, compiled: bool) -> None:
    """Run all steps, and add findings and grades to the report. Skip a step if a finding makes it meaningless."""
    channels = subject.channels
    report.found["call"] = subject.signature + (f", tables: {subject.tables}" if subject.given_tables else "")
    report.found["layout"] = subject.layout
    report.found["positions"] = {
        "rows": "separate for each row of the batch",
        "shared": "one row for the whole batch",
        "offset": "counted from an offset",
        "none": "counted from 0",
    }[subject.positions]
    if _rotates_along_heads(subject, channels):
        report.add(
            "heads-taken-for-tokens", f"In layout {subject.layout}, the angle depends on the head instead of the token."
        )
        return
    structure = infer(linear_maps(subject, channels, SMALL[None, :16]))
    if structure is None:
        _report_no_pairs(subject, channels, report)
        return
    _judge_structure(structure, channels, expected, subject, report)
    if structure.flaw is not None:
        report.add(structure.flaw, _FLAWS[structure.flaw])
        return
    multipliers = far_positions.measure(subject, structure, channels, SMALL[None])[0]
    sizes = multipliers.abs()
    if bool(sizes.isfinite().all()) and float((sizes - sizes[:1]).abs().max()) > 0.02 * float(sizes.max()):
        report.add("not-a-rotation", "The length of a pair depends on the position of its token.")
        return
    measured = _judge_law(subject, structure, channels, multipliers, expected, report)
    baseline = Baseline(
        subject, structure, channels, multipliers, _judge_k(subject, structure, channels, multipliers, report)
    )
    sure = report.codes
    if not {"query-and-key-crossed", "key-not-rotated", "key-unlike-query", "rest-not-passed"} & {*report.codes}:
        conditions.judge(baseline, report)
    if (
        not subject.given_tables
        and measured.code is None
        and not {"positions-ignored", "offset-ignored"} & {*report.codes}
    ):
        far_positions.judge(subject, structure, channels, measured, report, expected.length)
    if (
        not subject.given_tables
        and expected.longer is not None
        and expected.length is not None
        and measured.code is None
    ):
        far_positions.judge_length(subject, structure, channels, measured, report, expected.longer, 2 * expected.length)
    if measured.rounding is None:
        dtypes.judge(baseline, measured, report, expected.length)
    states.judge(baseline, report, expected.length, sure)
    if "earlier-calls-matter" not in report.codes:
        dtypes.judge_cast(baseline, measured, report, expected.length)
    if compiled:
        compile_.judge(baseline, report)


_FLAWS = {
    "not-a-rotation": "The two channels of a pair do not become (a cos − b sin, b cos + a sin) for any one angle.",
    "mixed-pairings": "The two channels of a pair are multiplied by the cosines of different angles.",
}


def _rotates_along_heads(subject: Subject, channels: int) -> bool:
    x = torch.sin(1 + torch.arange(channels, dtype=torch.float32)).expand(1, 5, 3, channels)
    out, _ = subject(x, x.clone(), SMALL[None, :5])
    return bool((out - out[:, :1]).abs().max() < 1e-6) and bool((out - out[:, :, :1]).abs().max() > 1e-4)


def _report_no_pairs(subject: Subject, channels: int, report: Report) -> None:
    if subject.has_k:
        x = torch.ones(1, 5, 3, channels)
        q_out, _ = subject(torch.zeros_like(x), x, SMALL[None, :5])
        if bool(q_out.abs().max() > 1e-3):
            report.add("query-and-key-crossed", "If q is all zeros, the first result is not zero.")
            return
    x = torch.sin(1 + torch.arange(channels, dtype=torch.float32)).expand(1, 5, 3, channels)
    out, _ = subject(x, x, SMALL[None, :5])
    if not bool(out.isfinite().all()):
        report.add("not-finite", "The result is not finite even at positions 0 to 4.")
    elif torch.equal(out, x):
        report.add("not-rotated", "The output equals the input.")
    else:
        report.add("not-rotated", "The channels do not change in pairs.")


def _judge_structure(structure: Structure, channels: int, expected: Expected, subject: Subject, report: Report) -> None:
    report.found["pairing"] = structure.pairing or "neither half nor interleaved"
    end = structure.rotary_offset + structure.rotary_dim
    report.found["rotated channels"] = f"{structure.rotary_offset} to {end - 1} of {channels}"
    report.found["output order"] = {"same": "same as the input"}.get(structure.order, structure.order)
    if structure.order != "same" and structure.order != expected.output_order:
        order = "with the second channel first" if structure.order == "swapped" else f"in {structure.order} order"
        report.add("output-order", f"Pairs are read in {structure.pairing} order and written {order}.")
    if structure.pairing is None:
        first, second = structure.ins[0].tolist()
        says = f"Channels {first} and {second} form the first pair, which is neither half nor interleaved pairing."
        report.add("wrong-pairing", says)
    elif expected.pairing is not None and structure.pairing != expected.pairing:
        says = f"The pairing is {structure.pairing}, but {expected.pairing} is expected."
        if expected.model_type:
            model = f"weights of model_type {expected.model_type}"
            says = f"The pairing is {structure.pairing}, but {model} use {expected.pairing}."
        report.add("wrong-pairing", says)
    if structure.lost:
        report.add("rest-not-passed", f"Channel {structure.lost[0]} and {len(structure.lost) - 1} more are changed.")
    rope = expected.rope
    if (
        rope is not None
        and not subject.given_tables
        and (structure.rotary_dim, structure.rotary_offset) != (rope.rotary_dim, rope.rotary_offset)
    ):
        if structure.pairs == int((rope.inv_freq != 0).sum()) and structure.rotary_offset == rope.rotary_offset:
            return
        expected_range = f"{rope.rotary_offset} to {rope.rotary_offset + rope.rotary_dim - 1}"
        report.add(
            "wrong-slice", f"Channels {structure.rotary_offset} to {end - 1} are rotated instead of {expected_range}."
        )


def _judge_law(
    subject: Subject, structure: Structure, channels: int, multipliers: Tensor, expected: Expected, report: Report
) -> Law:
    """Identify the law of the angles, and report a wrong direction, base, scheme or attention factor."""
    rope = expected.rope
    if subject.given_tables:
        rope = Rope(GIVEN_CHANNELS, GIVEN_BASE, "half")
    elif rope is None:
        rope = _fitting_rope(subject, structure, channels, multipliers, expected, report)
    measured = law.identify(multipliers, SMALL, rope, channels)
    if (
        measured.code in ("wrong-base", "wrong-frequencies")
        and expected.longer is not None
        and not subject.given_tables
    ):
        long_law = law.identify(multipliers, SMALL, expected.longer, channels)
        if long_law.code is None:
            measured = replace(
                long_law, code="length-ignored", says="A short sequence gets the frequencies of a long one."
            )
    stated = subject.given_tables or expected.rope is not None or expected.base is not None
    if not stated and measured.code in ("wrong-base", "wrong-frequencies"):
        fastest = float(measured.inv_freq.abs().max())
        if fastest < 1.001:
            measured = replace(measured, code=None, says="")  # the class applies a scaling of its own
        else:
            says = f"A pair rotates by {fastest:.4g} radians per token. No scheme for text exceeds 1."
            measured = replace(measured, code="wrong-frequencies", says=says)
    report.found["direction"] = "backwards" if measured.kind == "backwards" else "forwards"
    report.found["attention factor"] = f"{law.round_digits(measured.factor):.6g}"
    if measured.code is not None and not (measured.code == "wrong-frequencies" and "wrong-slice" in report.codes):
        report.add(measured.code, measured.says)
    if not subject.given_tables:
        report.found["frequencies"] = _describe_frequencies(measured, structure, rope)
    expected_factor = 1.0 if rope is None else rope.attention_factor
    if stated and abs(measured.factor / expected_factor - 1) > 2e-3 and measured.code != "not-finite":
        explanations = {expected_factor**2: "applied twice", 1.0: "missing", 1 / expected_factor: "inverted"}
        explanation = next(
            (
                f": the attention factor is {says}"
                for value, says in explanations.items()
                if abs(measured.factor / value - 1) < 1e-3
            ),
            "",
        )
        report.add(
            "attention-factor",
            f"cos and sin are multiplied by {measured.factor:.5g} instead of {expected_factor:.5g}{explanation}.",
        )
    return measured


def _fitting_rope(
    subject: Subject, structure: Structure, channels: int, multipliers: Tensor, expected: Expected, report: Report
) -> Rope | None:
    """Return the rope with which measurements are compared if no rope is expected, or None if no base is found.

    Its base is the expected base, else the base of the constructor, else one that fits the measured frequencies.
    """
    pairing = cast(Pairing | None, structure.pairing)
    if pairing is None:
        return None
    expected_base = expected.base or (subject.arguments.base if subject.arguments is not None else None)
    fitted = law.fit_base(law.measure_frequencies(multipliers, SMALL), structure.rotary_dim)
    plain = fitted is not None and abs(fitted[1] - 1) < 1e-4
    base = expected_base or (fitted[0] if plain and fitted is not None else _rounded_base(structure, multipliers))
    if base is None or base <= 1:
        return None
    return Rope(
        channels,
        base,
        pairing,
        rotary_dim=structure.rotary_dim,
        rotary_offset=structure.rotary_offset,
    )


def _rounded_base(structure: Structure, multipliers: Tensor) -> float | None:
    """Return the first of several usual bases with which one bug explains the multipliers, or None if there is none.

    For example, the bug can be rounding to 16 bits.
    """
    for base in (1e4, 1e5, 1.5e5, 5e5, 1e6, 5e6, 1e7):
        rope = Rope(structure.rotary_dim, base, "half")
        measured = law.identify(multipliers, SMALL, rope, structure.rotary_dim)
        if measured.rounding is not None or measured.kind != "plain" or measured.shift:
            return base
    return None


def _describe_frequencies(measured: Law, structure: Structure, rope: Rope | None) -> str:
    """Describe the measured frequencies in words, for the report."""
    fitted = law.fit_base(measured.inv_freq, structure.rotary_dim)
    if fitted is not None:
        divided = "" if abs(fitted[1] - 1) < 1e-4 else f", divided by {fitted[1]:g}"
        return f"base {fitted[0]:.10g}{divided}"
    if rope is not None and rope.scaling is not None and measured.code is None:
        return f"{type(rope.scaling).__name__}, base {rope.base:.10g}"
    scaled = law.fit_scaled_base(measured.inv_freq, structure.rotary_dim)
    if scaled is None:
        return "not a geometric progression"
    return f"base {scaled[0]:.10g}, slow pairs divided by {scaled[1]:g}, as in Llama 3 and YaRN"


def _judge_k(subject: Subject, structure: Structure, channels: int, multipliers: Tensor, report: Report) -> Tensor:
    """Compare k with q, and return the multipliers of k.

    Return those of q if the subject takes no k, or if k has a bug that prevents the measurement.
    """
    if not subject.has_k:
        return multipliers
    k_structure = infer(linear_maps(subject, channels, SMALL[None, :16], of="k"))
    x = torch.ones(1, 5, 3, channels)
    _, k_of_zeros = subject(x, torch.zeros_like(x), SMALL[None, :5])
    if k_of_zeros is not None and bool(k_of_zeros.abs().max() > 1e-3):
        report.add("query-and-key-crossed", "If k is all zeros, the result for k is not zero.")
        return multipliers
    if k_structure is None:
        report.add("key-not-rotated", "k is returned unchanged.")
        return multipliers
    same = (
        torch.equal(k_structure.ins, structure.ins)
        and torch.equal(k_structure.outs, structure.outs)
        and k_structure.flaw is None
    )
    x = structure.unit_input(channels).expand(1, len(SMALL), 2, channels)
    _, out = subject(x, x, SMALL[None])
    if not same or out is None:
        report.add("key-unlike-query", "The pairs of k differ from those of q.")
        return multipliers
    k_multipliers = structure.multipliers(out)[0, :, 0]
    sizes = float(k_multipliers.abs().median() / multipliers.abs().median())
    if law.largest_error(k_multipliers / sizes, multipliers, 1.0) > 1e-4:
        is_opposite = law.largest_error(k_multipliers.conj() / sizes, multipliers, 1.0) < 1e-4
        report.add(
            "key-unlike-query", f"k is rotated {'in the opposite direction' if is_opposite else 'by other angles'}."
        )
    elif abs(sizes - 1) > 1e-3:
        report.drop("attention-factor")
        report.add("attention-factor", f"The factor of k is {sizes:.5g} times that of q.")
    return k_multipliers
