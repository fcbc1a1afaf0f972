"""The steps of a check: structure, law, conditions, far positions, dtypes, state."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from ropewalk import Rope
from ropewalk._layout import Pairing
from ropewalk.conformance import compiled as compile_
from ropewalk.conformance import conditions, dtypes, forms, law, reach, states, structure, ways
from ropewalk.conformance.conditions import Known
from ropewalk.conformance.expected import Expected
from ropewalk.conformance.law import Law
from ropewalk.conformance.report import Report
from ropewalk.conformance.structure import Structure
from ropewalk.conformance.subject import Subject

SMALL = torch.arange(64)


def run(subject: Subject, expected: Expected, report: Report, *, compiled: bool) -> None:
    """Fill the report."""
    channels = subject.channels
    report.found["call"] = subject.shape + (f", tables: {subject.tables}" if subject.ours else "")
    report.found["layout"] = subject.layout
    report.found["positions"] = {
        "rows": "each row of the batch has its own",
        "shared": "one row for the whole batch",
        "offset": "counted from an offset",
        "none": "counted from 0",
    }[subject.positions]
    if _along_heads(subject, channels):
        report.add("heads-taken-for-tokens", f"In layout {subject.layout} the angle follows the head, not the token.")
        return
    found = structure.of(forms.matrices(subject, channels, SMALL[None, :16]))
    if found is None:
        _without_pairs(subject, channels, report)
        return
    _say_structure(found, channels, expected, subject, report)
    if found.flaw is not None:
        report.add(found.flaw, _FLAWS[found.flaw])
        return
    numbers = reach.numbers(subject, found, channels, SMALL[None])[0]
    sizes = numbers.abs()
    if bool(sizes.isfinite().all()) and float((sizes - sizes[:1]).abs().max()) > 0.02 * float(sizes.max()):
        report.add("not-a-rotation", "The length of a pair changes with the position of its token.")
        return
    held = _judge_law(subject, found, channels, numbers, expected, report)
    known = Known(subject, found, channels, numbers, _judge_k(subject, found, channels, numbers, report))
    sure = report.codes
    if not {"query-and-key-crossed", "key-not-rotated", "key-unlike-query", "rest-not-passed"} & {*report.codes}:
        conditions.judge(known, report)
    if not subject.ours and held.code is None and not {"positions-ignored", "offset-ignored"} & {*report.codes}:
        reach.judge(subject, found, channels, held, report, expected.length)
    if not subject.ours and expected.longer is not None and expected.length is not None and held.code is None:
        reach.longer(subject, found, channels, held, report, expected.longer, 2 * expected.length)
    if held.rounding is None:
        dtypes.judge(known, held, report, expected.length)
    states.judge(known, report, expected.length, sure)
    if "earlier-calls-matter" not in report.codes:
        dtypes.cast(known, held, report, expected.length)
    if compiled:
        compile_.judge(known, report)


_FLAWS = {
    "not-a-rotation": "The two channels of a pair are not (a cos − b sin, b cos + a sin) of one angle.",
    "mixed-pairings": "The channels of one pair are multiplied by the cosines of different angles.",
}


def _along_heads(subject: Subject, channels: int) -> bool:
    x = torch.sin(1 + torch.arange(channels, dtype=torch.float32)).expand(1, 5, 3, channels)
    out, _ = subject(x, x.clone(), SMALL[None, :5])
    return bool((out - out[:, :1]).abs().max() < 1e-6) and bool((out - out[:, :, :1]).abs().max() > 1e-4)


def _without_pairs(subject: Subject, channels: int, report: Report) -> None:
    if subject.has_k:
        x = torch.ones(1, 5, 3, channels)
        q_out, _ = subject(torch.zeros_like(x), x, SMALL[None, :5])
        if bool(q_out.abs().max() > 1e-3):
            report.add("query-and-key-crossed", "With q all zeros, the first result is not.")
            return
    x = torch.sin(1 + torch.arange(channels, dtype=torch.float32)).expand(1, 5, 3, channels)
    out, _ = subject(x, x, SMALL[None, :5])
    if not bool(out.isfinite().all()):
        report.add("not-finite", "So it is at positions 0 to 4.")
    elif torch.equal(out, x):
        report.add("not-rotated", "The output is the input.")
    else:
        report.add("not-rotated", "Channels do not change in pairs.")


def _say_structure(found: Structure, channels: int, expected: Expected, subject: Subject, report: Report) -> None:
    report.found["pairing"] = found.pairing or "neither half nor interleaved"
    end = found.rotary_offset + found.rotary_dim
    report.found["rotated channels"] = f"{found.rotary_offset} to {end - 1} of {channels}"
    report.found["output order"] = {"same": "each channel where it was read"}.get(found.order, found.order)
    if found.order != "same" and found.order != expected.output_order:
        order = "the second of each pair first" if found.order == "swapped" else f"in {found.order} order"
        report.add("output-order", f"Pairs are read {found.pairing} and written {order}.")
    if found.pairing is None:
        first, second = found.ins[0].tolist()
        says = f"Channels {first} and {second} form the first pair: that is neither half nor interleaved."
        report.add("wrong-pairing", says)
    elif expected.pairing is not None and found.pairing != expected.pairing:
        means = f"your config says {expected.model_type}, whose weights are" if expected.model_type else "you expect"
        report.add("wrong-pairing", f"The pairing is {found.pairing}; {means} {expected.pairing}.")
    if found.lost:
        report.add(
            "rest-not-passed", f"Channel {found.lost[0]} and {len(found.lost) - 1} more do not come back as they were."
        )
    rope = expected.rope
    if (
        rope is not None
        and not subject.ours
        and (found.rotary_dim, found.rotary_offset) != (rope.rotary_dim, rope.rotary_offset)
    ):
        if found.pairs == int((rope.inv_freq != 0).sum()) and found.rotary_offset == rope.rotary_offset:
            return
        wanted = f"{rope.rotary_offset} to {rope.rotary_offset + rope.rotary_dim - 1}"
        report.add("wrong-slice", f"Channels {found.rotary_offset} to {end - 1} are rotated, and should be {wanted}.")


def _judge_law(
    subject: Subject, found: Structure, channels: int, numbers: Tensor, expected: Expected, report: Report
) -> Law:
    """Direction, base, scheme and attention factor."""
    rope = expected.rope
    if subject.ours:
        rope = Rope(ways.GIVEN_CHANNELS, ways.GIVEN_BASE, "half")
    elif rope is None:
        rope = _rope_that_fits(subject, found, channels, numbers, expected, report)
    held = law.of(numbers, SMALL, rope, channels)
    if held.code in ("wrong-base", "wrong-frequencies") and expected.longer is not None and not subject.ours:
        other = law.of(numbers, SMALL, expected.longer, channels)
        if other.code is None:
            held = replace(other, code="length-ignored", says="A short sequence has the frequencies of a long one.")
    told = subject.ours or expected.rope is not None or expected.base is not None
    if not told and held.code in ("wrong-base", "wrong-frequencies"):
        fastest = float(held.inv_freq.abs().max())
        if fastest < 1.001:
            held = replace(held, code=None, says="")  # whatever scaling the class has of its own accord
        else:
            says = f"A pair turns by {fastest:.4g} radians per token; no scheme of text goes beyond 1."
            held = replace(held, code="wrong-frequencies", says=says)
    report.found["direction"] = "backwards" if held.kind == "backwards" else "forwards"
    report.found["attention factor"] = f"{law.nice(held.factor):.6g}"
    if held.code is not None and not (held.code == "wrong-frequencies" and "wrong-slice" in report.codes):
        report.add(held.code, held.says)
    if not subject.ours:
        report.found["frequencies"] = _named(held, found, rope)
    wanted = 1.0 if rope is None else rope.attention_factor
    if told and abs(held.factor / wanted - 1) > 2e-3 and held.code != "not-finite":
        known = {wanted**2: "applied twice", 1.0: "missing", 1 / wanted: "inverted"}
        how = next((says for value, says in known.items() if abs(held.factor / value - 1) < 1e-3), "another one")
        report.add(
            "attention-factor",
            f"cos and sin are multiplied by {held.factor:.5g}, and should be by {wanted:.5g}: {how}.",
        )
    return held


def _rope_that_fits(
    subject: Subject, found: Structure, channels: int, numbers: Tensor, expected: Expected, report: Report
) -> Rope | None:
    """Without a config: the base that was asked for, or the one that fits; None where there is no plain one."""
    pairing = cast(Pairing | None, found.pairing)
    if pairing is None:
        return None
    asked = expected.base or (subject.made.base if subject.made is not None else None)
    fitted = law.fit(law.measured(numbers, SMALL), found.rotary_dim)
    plain = fitted is not None and abs(fitted[1] - 1) < 1e-4
    base = asked or (fitted[0] if plain and fitted is not None else _rounded_base(found, numbers))
    if base is None or base <= 1:
        return None
    return Rope(
        channels,
        base,
        pairing,
        rotary_dim=found.rotary_dim,
        rotary_offset=found.rotary_offset,
    )


def _rounded_base(found: Structure, numbers: Tensor) -> float | None:
    """The common base whose frequencies, angles or tables in 16 bits these are."""
    for base in (1e4, 1e5, 1.5e5, 5e5, 1e6, 5e6, 1e7):
        rope = Rope(found.rotary_dim, base, "half")
        one = law.of(numbers, SMALL, rope, found.rotary_dim)
        if one.rounding is not None or one.kind != "plain" or one.shift:
            return base
    return None


def _named(held: Law, found: Structure, rope: Rope | None) -> str:
    """The frequencies in words."""
    fitted = law.fit(held.inv_freq, found.rotary_dim)
    if fitted is not None:
        divided = "" if abs(fitted[1] - 1) < 1e-4 else f", divided by {fitted[1]:g}"
        return f"base {fitted[0]:.10g}{divided}"
    if rope is not None and rope.scaling is not None and held.code is None:
        return f"those of {type(rope.scaling).__name__}, base {rope.base:.10g}"
    scaled = law.fast_and_slow(held.inv_freq, found.rotary_dim)
    if scaled is None:
        return "no progression"
    return f"base {scaled[0]:.10g}, slow pairs divided by {scaled[1]:g}, as Llama 3 and YaRN have them"


def _judge_k(subject: Subject, found: Structure, channels: int, numbers: Tensor, report: Report) -> Tensor:
    """k by itself, and its numbers; those of q where there is no k, or it is too wrong."""
    if not subject.has_k:
        return numbers
    of_k = structure.of(forms.matrices(subject, channels, SMALL[None, :16], of="k"))
    x = torch.ones(1, 5, 3, channels)
    _, crossed = subject(x, torch.zeros_like(x), SMALL[None, :5])
    if crossed is not None and bool(crossed.abs().max() > 1e-3):
        report.add("query-and-key-crossed", "With k all zeros, the result for k is not.")
        return numbers
    if of_k is None:
        report.add("key-not-rotated", "k comes back as it went in.")
        return numbers
    same = torch.equal(of_k.ins, found.ins) and torch.equal(of_k.outs, found.outs) and of_k.flaw is None
    x = found.firsts(channels).expand(1, len(SMALL), 2, channels)
    _, out = subject(x, x, SMALL[None])
    if not same or out is None:
        report.add("key-unlike-query", "k has other pairs than q.")
        return numbers
    of_keys = found.numbers(out)[0, :, 0]
    sizes = float(of_keys.abs().median() / numbers.abs().median())
    if law.worst(of_keys / sizes, numbers, 1.0) > 1e-4:
        other = law.worst(of_keys.conj() / sizes, numbers, 1.0) < 1e-4
        report.add("key-unlike-query", f"k is rotated {'the other way' if other else 'by other angles'}.")
    elif abs(sizes - 1) > 1e-3:
        report.drop("attention-factor")
        report.add("attention-factor", f"k is multiplied by {sizes:.5g} times what q is multiplied by.")
    return of_keys
