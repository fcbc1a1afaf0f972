"""Run the steps of a check: structure, law, conditions, far positions, dtypes, state."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from ropewalk import Rope
from ropewalk._layout import Pairing
from ropewalk.conformance import compiled as compile_
from ropewalk.conformance import conditions, dtypes, forms, law, reach, states, structure, ways
from ropewalk.conformance.conditions import Baseline
from ropewalk.conformance.expected import Expected
from ropewalk.conformance.law import Law
from ropewalk.conformance.report import Report
from ropewalk.conformance.structure import Structure
from ropewalk.conformance.subject import Subject

SMALL = torch.arange(64)


def run(subject: Subject, expected: Expected, report: Report, *, compiled: bool) -> None:
    """Run all steps and add what they find to the report. Steps that an earlier finding makes pointless are skipped."""
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
        report.add("heads-taken-for-tokens", f"In layout {subject.layout} the angle follows the head, not the token.")
        return
    found = structure.infer(forms.linear_maps(subject, channels, SMALL[None, :16]))
    if found is None:
        _report_no_pairs(subject, channels, report)
        return
    _judge_structure(found, channels, expected, subject, report)
    if found.flaw is not None:
        report.add(found.flaw, _FLAWS[found.flaw])
        return
    multipliers = reach.measure(subject, found, channels, SMALL[None])[0]
    sizes = multipliers.abs()
    if bool(sizes.isfinite().all()) and float((sizes - sizes[:1]).abs().max()) > 0.02 * float(sizes.max()):
        report.add("not-a-rotation", "The length of a pair depends on the position of its token.")
        return
    measured = _judge_law(subject, found, channels, multipliers, expected, report)
    baseline = Baseline(subject, found, channels, multipliers, _judge_k(subject, found, channels, multipliers, report))
    sure = report.codes
    if not {"query-and-key-crossed", "key-not-rotated", "key-unlike-query", "rest-not-passed"} & {*report.codes}:
        conditions.judge(baseline, report)
    if (
        not subject.given_tables
        and measured.code is None
        and not {"positions-ignored", "offset-ignored"} & {*report.codes}
    ):
        reach.judge(subject, found, channels, measured, report, expected.length)
    if (
        not subject.given_tables
        and expected.longer is not None
        and expected.length is not None
        and measured.code is None
    ):
        reach.judge_length(subject, found, channels, measured, report, expected.longer, 2 * expected.length)
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
        report.add("not-finite", "It is not finite at positions 0 to 4 already.")
    elif torch.equal(out, x):
        report.add("not-rotated", "The output equals the input.")
    else:
        report.add("not-rotated", "The channels do not change in pairs.")


def _judge_structure(found: Structure, channels: int, expected: Expected, subject: Subject, report: Report) -> None:
    report.found["pairing"] = found.pairing or "neither half nor interleaved"
    end = found.rotary_offset + found.rotary_dim
    report.found["rotated channels"] = f"{found.rotary_offset} to {end - 1} of {channels}"
    report.found["output order"] = {"same": "same as the input"}.get(found.order, found.order)
    if found.order != "same" and found.order != expected.output_order:
        order = "with the second channel first" if found.order == "swapped" else f"in {found.order} order"
        report.add("output-order", f"Pairs are read in {found.pairing} order and written {order}.")
    if found.pairing is None:
        first, second = found.ins[0].tolist()
        says = f"Channels {first} and {second} form the first pair, which is neither half nor interleaved pairing."
        report.add("wrong-pairing", says)
    elif expected.pairing is not None and found.pairing != expected.pairing:
        says = f"The pairing is {found.pairing}, but {expected.pairing} is expected."
        if expected.model_type:
            model = f"weights of model_type {expected.model_type}"
            says = f"The pairing is {found.pairing}, but {model} use {expected.pairing}."
        report.add("wrong-pairing", says)
    if found.lost:
        report.add("rest-not-passed", f"Channel {found.lost[0]} and {len(found.lost) - 1} more are changed.")
    rope = expected.rope
    if (
        rope is not None
        and not subject.given_tables
        and (found.rotary_dim, found.rotary_offset) != (rope.rotary_dim, rope.rotary_offset)
    ):
        if found.pairs == int((rope.inv_freq != 0).sum()) and found.rotary_offset == rope.rotary_offset:
            return
        wanted = f"{rope.rotary_offset} to {rope.rotary_offset + rope.rotary_dim - 1}"
        report.add("wrong-slice", f"Channels {found.rotary_offset} to {end - 1} are rotated instead of {wanted}.")


def _judge_law(
    subject: Subject, found: Structure, channels: int, multipliers: Tensor, expected: Expected, report: Report
) -> Law:
    """Judge direction, base, scheme and attention factor."""
    rope = expected.rope
    if subject.given_tables:
        rope = Rope(ways.GIVEN_CHANNELS, ways.GIVEN_BASE, "half")
    elif rope is None:
        rope = _fitting_rope(subject, found, channels, multipliers, expected, report)
    measured = law.identify(multipliers, SMALL, rope, channels)
    if (
        measured.code in ("wrong-base", "wrong-frequencies")
        and expected.longer is not None
        and not subject.given_tables
    ):
        other = law.identify(multipliers, SMALL, expected.longer, channels)
        if other.code is None:
            measured = replace(
                other, code="length-ignored", says="A short sequence gets the frequencies of a long one."
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
        report.found["frequencies"] = _describe_frequencies(measured, found, rope)
    wanted = 1.0 if rope is None else rope.attention_factor
    if stated and abs(measured.factor / wanted - 1) > 2e-3 and measured.code != "not-finite":
        known = {wanted**2: "applied twice", 1.0: "missing", 1 / wanted: "inverted"}
        how = next(
            (
                f": the attention factor is {says}"
                for value, says in known.items()
                if abs(measured.factor / value - 1) < 1e-3
            ),
            "",
        )
        report.add(
            "attention-factor",
            f"cos and sin are multiplied by {measured.factor:.5g} instead of {wanted:.5g}{how}.",
        )
    return measured


def _fitting_rope(
    subject: Subject, found: Structure, channels: int, multipliers: Tensor, expected: Expected, report: Report
) -> Rope | None:
    """The rope to compare with if no config is passed: with the requested base, or else with the base that fits."""
    pairing = cast(Pairing | None, found.pairing)
    if pairing is None:
        return None
    asked = expected.base or (subject.arguments.base if subject.arguments is not None else None)
    fitted = law.fit_base(law.measure_frequencies(multipliers, SMALL), found.rotary_dim)
    plain = fitted is not None and abs(fitted[1] - 1) < 1e-4
    base = asked or (fitted[0] if plain and fitted is not None else _rounded_base(found, multipliers))
    if base is None or base <= 1:
        return None
    return Rope(
        channels,
        base,
        pairing,
        rotary_dim=found.rotary_dim,
        rotary_offset=found.rotary_offset,
    )


def _rounded_base(found: Structure, multipliers: Tensor) -> float | None:
    """The common base that explains the multipliers with one bug, such as a rounding to 16 bits. None if none does."""
    for base in (1e4, 1e5, 1.5e5, 5e5, 1e6, 5e6, 1e7):
        rope = Rope(found.rotary_dim, base, "half")
        one = law.identify(multipliers, SMALL, rope, found.rotary_dim)
        if one.rounding is not None or one.kind != "plain" or one.shift:
            return base
    return None


def _describe_frequencies(measured: Law, found: Structure, rope: Rope | None) -> str:
    """Describe the frequencies in words."""
    fitted = law.fit_base(measured.inv_freq, found.rotary_dim)
    if fitted is not None:
        divided = "" if abs(fitted[1] - 1) < 1e-4 else f", divided by {fitted[1]:g}"
        return f"base {fitted[0]:.10g}{divided}"
    if rope is not None and rope.scaling is not None and measured.code is None:
        return f"{type(rope.scaling).__name__}, base {rope.base:.10g}"
    scaled = law.fit_scaled_base(measured.inv_freq, found.rotary_dim)
    if scaled is None:
        return "not a geometric progression"
    return f"base {scaled[0]:.10g}, slow pairs divided by {scaled[1]:g}, as in Llama 3 and YaRN"


def _judge_k(subject: Subject, found: Structure, channels: int, multipliers: Tensor, report: Report) -> Tensor:
    """Judge k, and return its multipliers. Return those of q if there is no k, or if k is too wrong to measure."""
    if not subject.has_k:
        return multipliers
    k_structure = structure.infer(forms.linear_maps(subject, channels, SMALL[None, :16], of="k"))
    x = torch.ones(1, 5, 3, channels)
    _, crossed = subject(x, torch.zeros_like(x), SMALL[None, :5])
    if crossed is not None and bool(crossed.abs().max() > 1e-3):
        report.add("query-and-key-crossed", "If k is all zeros, the result for k is not zero.")
        return multipliers
    if k_structure is None:
        report.add("key-not-rotated", "k is returned unchanged.")
        return multipliers
    same = (
        torch.equal(k_structure.ins, found.ins)
        and torch.equal(k_structure.outs, found.outs)
        and k_structure.flaw is None
    )
    x = found.unit_input(channels).expand(1, len(SMALL), 2, channels)
    _, out = subject(x, x, SMALL[None])
    if not same or out is None:
        report.add("key-unlike-query", "The pairs of k differ from those of q.")
        return multipliers
    k_multipliers = found.multipliers(out)[0, :, 0]
    sizes = float(k_multipliers.abs().median() / multipliers.abs().median())
    if law.largest_error(k_multipliers / sizes, multipliers, 1.0) > 1e-4:
        other = law.largest_error(k_multipliers.conj() / sizes, multipliers, 1.0) < 1e-4
        report.add("key-unlike-query", f"k is rotated {'in the opposite direction' if other else 'by other angles'}.")
    elif abs(sizes - 1) > 1e-3:
        report.drop("attention-factor")
        report.add("attention-factor", f"The factor of k is {sizes:.5g} times that of q.")
    return k_multipliers
