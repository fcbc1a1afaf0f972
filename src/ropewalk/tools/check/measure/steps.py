"""Run the steps of a check in order: structure, law of angles, conditions, far positions, dtypes, state."""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ropewalk import Axes, Rope, _checks
from ropewalk._layout import Pairing
from ropewalk.tools.check.find import memory, words
from ropewalk.tools.check.find.subject import CallError, Subject
from ropewalk.tools.check.measure import (
    axes,
    conditions,
    fused,
    gradients,
    law,
    lengths,
    positions,
    repeats,
    sizes,
    states,
)
from ropewalk.tools.check.measure.baseline import SMALL, Baseline, OnAxes, measure
from ropewalk.tools.check.measure.case import HEADS, TOKENS, usual, where
from ropewalk.tools.check.measure.law import Law
from ropewalk.tools.check.measure.structure import Structure, infer
from ropewalk.tools.check.report import Report

_OF_DECODING = {"cache", "caches", "kvcache", "past", "prev", "previous", "incremental", "inference"}
"""Words in the names of parameters that only calls of decoding have."""


def run(subject: Subject, report: Report) -> None:
    """Run all steps, and add findings and grades to the report. Skip a step if a finding makes it meaningless."""
    if subject.expected.front:
        report.found["head"] = f"the rotated channels, and in q {subject.expected.front} before them"
    elif subject.expected.is_slice:
        report.found["head"] = "only the rotated channels, which the caller slices out"
    tables = f", tables: {subject.way.tables}" if subject.way.given is not None else ""
    report.found["call"] = subject.signature + tables
    stated: dict[str, Any] = {
        "pairing": subject.expected.rope or subject.expected.pairing,
        "base, scaling, attention factor": subject.expected.rope or subject.expected.base or subject.way.given,
    }
    if subject.axes is not None:
        stated["order of the axes"] = subject.expected.axes
    if unstated := [name for name, value in stated.items() if value is None]:
        report.found["not judged"] = f"{', '.join(unstated)}, which {_checks.argument('config')} states"
    if subject.unread:
        report.found["never read"] = ", ".join(subject.unread)
        if subject.of_grid and (offsets := [name for name in subject.unread if words.is_offset(name)]):
            report.add("offset-ignored", f"The code never reads {offsets[0]}.")
    if subject.not_passed:
        report.found["not passed"] = ", ".join(subject.not_passed)
        report.untried = [name for name in subject.not_passed if _OF_DECODING & {*name.lower().split("_")}]
    if subject.arguments is not None and subject.arguments.defaults:
        report.found["dtype of tables"] = f"that of x is passed, and not the default {subject.arguments.defaults}"
    buffers = () if subject.module is None else subject.module.named_buffers()
    if rounded := ", ".join(name for name, buffer in buffers if buffer.is_floating_point()):
        reads = "which conformance.verify reads in a loaded model"
        report.found["not tried"] = f"what .bfloat16() or .half() does to {rounded}, {reads}"
    if subject.way.positions == "packed" and "cu_seqlens" in subject.form.call.optional:
        name = subject.form.call.parameter_of["cu_seqlens"]
        report.found["other calls"] = f"not tried: those without {name}, of another layout"
    if "attention_mask" in subject.form.written:
        report.found["padding"] = "not tried: attention_mask is all ones"
    if "weights" in subject.form.takes:
        heads = "all heads" if subject.form.of_all_heads else "each head"
        report.found["norm"] = f"of {heads}, times {'1 + weight' if subject.form.added[0] else 'weight'}"
    if memory.current().without_gpu:
        report.found["device"] = "the CPU, in place of the GPU that the code names"
    if subject.noise:
        report.found["dtype"] = f"{law.NAMES[subject.form.dtype]}, since float32 is refused"
    report.found["layout"] = subject.layout
    report.found["positions"] = {
        "rows": "separate for each row of the batch",
        "shared": "one row for the whole batch",
        "offset": "counted from an offset",
        "offsets": "counted from an offset for each row",
        "runs": "counted from an offset for each document of a row",
        "packed": "counted from 0 in each document of a row",
        "none": "counted from 0",
    }[subject.way.positions]
    if repeats.judge(subject, report):
        return
    if other := subject.other_layout:  # found by calls before this, whose results may vary with the memory
        report.add("unstated-layout", f"It is judged in layout {subject.layout}. In {other} are wrong.")
    if (baseline := _measure(subject, report)) is None or "not-a-rotation" in report.codes:
        return
    if not subject.noise and _rounds_results(baseline):
        return
    of_options = {"scaling-ignored", "section-layout", "yarn-truncate"} & {*report.codes}
    if of_options and subject.arguments is not None and subject.arguments.adapter:
        must = f"every option that may be the reason for {min(of_options)} must be passed"
        raise _checks.error("check", must, "some whose names are not known", subject.arguments.adapter)
    sure = report.codes
    is_comparable = not {"query-and-key-crossed", "key-not-rotated", "key-unlike-query", "rest-not-passed"} & {*sure}
    if is_comparable:
        fused.judge(baseline)
        conditions.judge(baseline)
        report.test("several axes", partial(axes.judge_calls, baseline))
    if subject.way.given is None and not {"positions-ignored", "offset-ignored", "one-position"} & {*report.codes}:
        report.test("far positions", partial(positions.judge_far, baseline))
        report.test("long sequence", partial(positions.judge_length, baseline), may_raise=True)
    if is_comparable:
        report.test("sizes", partial(sizes.judge, baseline, sure))
    if report.verdict == "right":
        report.test("head sizes", partial(_judge_head_sizes, baseline))
    for dtype, name in law.NAMES.items():
        may_raise = subject.form.dtype not in (torch.float32, dtype)
        report.test(f"{name} tensors", partial(positions.judge_16_bits, baseline, dtype), may_raise=may_raise)
    report.test("under autocast", partial(positions.judge_autocast, baseline), may_raise=True)
    states.judge(baseline, sure)


def judge_still(subject: Subject, report: Report) -> None:
    """Judge the object of a layer that must not rotate. Raise RopeError if nothing tells the code which layer it is."""
    layer = subject.expected.layer
    if not subject.is_told_its_layer:
        got, fix = f"layer {layer}, which does not, and code that is not told its layer", "Pass a layer that rotates."
        raise _checks.error("check", "the layer must rotate", got, fix)
    report.found["call"] = subject.signature
    x = subject.equal_heads(TOKENS, HEADS)
    if not (is_still := torch.equal(subject(x, x, SMALL[None, :TOKENS])[0], x)):
        report.add("wrong-layer", f"Layer {layer} of the config has no rotation, and the code rotates q in it.")
    report.grade(f"layer {layer}", "q is left as it is, as expected" if is_still else "q is rotated", is_still)


def _measure(subject: Subject, report: Report) -> Baseline | None:
    """Measure the plain call, and add findings to the report. Return None if one of them makes it meaningless."""
    if _judge_heads(subject, report):
        return None
    maps = subject.linear_maps(_few(subject))
    if maps.dtype not in (torch.float32, torch.float64):
        says = f"The input is float32, and the output is {str(maps.dtype).removeprefix('torch.')}. No more was judged."
        report.add("wrong-output-dtype", says)
        return None
    if not bool(maps.isfinite().all()):
        report.add("not-finite", "The result is not finite at positions 0 to 15. No more was judged.")
        return None
    is_angle = (maps[0].abs() - math.sin(1)).abs() < 1e-5 + subject.noise / 4
    if subject.way.given is not None and int(is_angle.sum()) > 2:  # more than the first pair, as if off by one token
        report.add("tables-misused", "At position 0, where cos is 1 and sin is 0, channels are multiplied by sin(1).")
        return None
    if bool((zero := ~maps.flatten(1).any(-1)).any()):
        says = f"The result is 0 at position {int(zero.nonzero()[0])}, as with cos and sin of 0."
        if bool(maps[1].any()) and torch.allclose(maps[2].norm(), 2 * maps[1].norm()):
            says += " Its size grows like the position, as if the arguments of `torch.polar` were exchanged."
        report.add("not-a-rotation", says)
        return None
    if "weights" in subject.form.takes:  # a norm, even of a head of size 1, rounds
        maps = torch.where((maps - 1).abs() < subject.close, 1.0, maps)
    structure = infer(maps, subject.close)
    if (structure is None or structure.flaw is not None) and _rotates_once(subject):
        report.add("earlier-calls-matter", "The first call of a new object rotates by angles, and later ones do not.")
        return None
    if (structure is None or structure.flaw is not None) and "weights" in subject.form.takes:
        x = torch.linspace(0.1, 1.0, subject.channels).expand(1, 1, HEADS, -1)  # whose parts have other sizes
        alone, other, both = (subject(each, each, SMALL[None, :1])[0] for each in (x, x.flip(-1), x + x.flip(-1)))
        if not torch.allclose(alone + other, both, rtol=1e-2, atol=1e-2):
            says = "Of heads of size 1, the result for a sum is not the sum of the results."
            report.add("wrong-norm", f"{says} The norm is not that of the whole head. No more was judged.")
            return None
    if structure is None:
        _report_no_pairs(subject, report)
        return None
    if structure.lost and "weights" in subject.form.takes:
        says = f"Heads of size 1 do not keep their size: channel {structure.lost[0]} is changed."
        report.add("wrong-norm", f"{says} The norm is not that of the whole head.")
        return None
    if structure.flaw == "xpos":
        fix = "Check the rotation without that scale."
        raise _checks.error("check", "pairs must keep their size", "powers of the position, as in xPos", fix)
    if structure.flaw is None:
        multipliers = measure(subject, structure, SMALL[None])[0]
        if ((multipliers[-2:] - 1).abs().amax(-1) > 1e-5).tolist() == [True, False]:
            report.add("last-token-wrong", f"Of {len(SMALL)} tokens, the last is not rotated. No more was judged.")
            return None
        if not lengths.judge(subject, report):
            return None
    plain = structure.pairing is None and subject.expected.axes is None
    blocks = structure.blocks if plain and (subject.axes or not subject.expected.pairing) else 0
    in_blocks = blocks > 0 and subject.axes in (None, blocks)  # as in CroCo, DUSt3R and VGGT
    structure = replace(structure, pairing="half") if in_blocks else structure
    _judge_structure(structure, subject, report)
    report.found["pairing"] += (f", in {blocks} blocks" if subject.axes is None else ", within each axis") * in_blocks
    if structure.flaw is not None:
        if structure.pairing is None:  # then a part of the pairs was found
            report.drop("wrong-pairing", "rest-not-passed")
        says = _FLAWS[structure.flaw]
        if structure.flaw in ("not-a-rotation", "channel-overwritten", "stretched") and _rotates_in_16_bits(subject):
            says += " With float16 tensors it rotates: of them, `.float()` is a copy, but of float32 ones it is none."
        report.add("not-a-rotation" if structure.flaw == "stretched" else structure.flaw, says)
        return None
    subject, on_axes = axes.judge(subject, structure, multipliers, report)
    measured = _judge_law(subject, structure, multipliers, report, on_axes)
    if measured.shift and not measured.explains(multipliers, SMALL):
        return None
    k_multipliers = _judge_k(subject, structure, multipliers, measured, report)
    return Baseline(subject, structure, multipliers, k_multipliers, measured, report, on_axes)


def _few(subject: Subject) -> Tensor:
    """Return the positions at which pairs are found, `[1, seq]`."""
    return SMALL[None, : 8 if subject.of_grid else 16]


def _rounds_results(baseline: Baseline) -> bool:
    """Report float32 results that are rounded to 16 bits, and return whether they are. Report rounded inputs, too."""
    subject, report = baseline.subject, baseline.report
    q, k = usual(subject).tensors()
    out, of_k = subject(q, k, conditions.FIRST)
    name = next((name for dtype, name in law.NAMES.items() if torch.equal(out, out.to(dtype).float())), "")
    if name:
        report.drop("low-precision-tables")
        says = f"The input is float32, and all numbers of the output are rounded to {name}. No more was judged."
        report.add("wrong-output-dtype", says)
        return True
    more = 1 + 2.0**-13  # which 16 bits do not hold
    results = zip((out, of_k), subject(more * q, more * k, conditions.FIRST), strict=True)
    if any(a is not None and b is not None and float((b - more * a).abs().max()) > 5e-5 for a, b in results):
        report.add("low-precision-input", "If x is multiplied by 1 + 2⁻¹³, the result is not.")
    if "weights" in subject.form.takes:  # a norm divides by such a factor
        off = max(float((o - right).abs().max()) for *_, o, right in baseline.compare(usual(subject), conditions.FIRST))
        if is_rounded := 1e-4 < off < 3e-2:
            report.add("low-precision-input", f"A norm is off by up to {off:.2g}, as in 16 bits. No more was judged.")
        return is_rounded
    return False


def _rotates_in_16_bits(subject: Subject) -> bool:
    with contextlib.suppress(CallError):
        narrow = replace(subject, form=replace(subject.form, dtype=torch.float16))
        found = infer(narrow.linear_maps(_few(subject)), narrow.close)
        return found is not None and found.flaw is None
    return False


def _rotates_once(subject: Subject) -> bool:
    """Return whether the first call of a new object rotates pairs, each by an angle."""
    with contextlib.suppress(CallError):
        new = None if subject.rebuild is None else subject.rebuild()
        first = None if new is None else infer(new.linear_maps(_few(new)), new.close)
        return first is not None and first.flaw is None
    return False


# (channels of a head, rotated channels): no powers of two, and parts of which the half is odd.
_HEAD_SIZES = ((48, 48), (80, 80), (96, 96), (192, 192), (64, 22), (80, 32))
# What is named as it is, if it shows only at another size. Every other difference is "size-dependent".
_KEEP = {"key-unlike-query", "memory-overwritten", "query-and-key-crossed", "rest-not-passed", "wrong-gradient"}


def _judge_head_sizes(baseline: Baseline) -> bool | str:
    """Measure the same call with other numbers of channels, and report the first that is wrong only there."""
    subject, report, expected = baseline.subject, baseline.report, baseline.subject.expected
    if subject.way.given is None and subject.arguments is None and "head_size" not in subject.form.call.parameter_of:
        return "not judged: nothing states the size to the code, which may have one of its own"
    tried, used = False, memory.current()
    if expected.rope is None and subject.arguments is not None and (base := subject.arguments.base or 0) > 1:
        plain = law.moving(Rope(baseline.structure.rotary_dim, base, "half").inv_freq)
        if plain.shape == baseline.law.inv_freq.shape and torch.allclose(plain, baseline.law.inv_freq):
            expected = replace(expected, base=base)
    for channels, rotary_dim in _HEAD_SIZES:
        try:
            resized = None if subject.resize is None else subject.resize(channels, rotary_dim)
            if resized is None:
                continue
            channels = resized.channels
            there = Report(report.target, ignored=report.ignored)
            used.overwritten.clear()
            rope = expected.rope
            if rope is not None and resized.way.given is None:
                passed = resized.arguments is not None and "rotary_dim" in resized.arguments.sizes
                if rope.rotary_dim == rope.head_dim or passed:
                    rope = replace(rope, head_dim=channels, rotary_dim=rotary_dim, rotary_offset=0)
                elif rope.scaling is None:
                    rope = None  # the target chooses its share of another head itself
                else:
                    continue
            resized = replace(resized, expected=replace(expected, rope=rope, head_dim=channels))
            found = _measure(resized, there)
            if found is not None and torch.equal(found.structure.ins, baseline.structure.ins):
                continue  # it passes on the channels that these heads have in addition
            if found is not None and there.verdict == "right":
                fused.judge(found, few=True)
                gradients.check(found)
                sizes.judge_all(found, sizes.find_fault, few=True)
        except (CallError, _checks.RopeError):
            continue  # the target refuses this size in one of these calls
        tried = True
        known = {*report.codes, *report.ignored}
        if found is not None and abs(found.law.factor / baseline.law.factor - 1) < 2e-3:
            known.add("attention-factor")  # the same as at the first size
        new = [f for f in there.findings if f.severity == "wrong" and f.code not in known]
        if new:
            code, says, case = new[0].code, new[0].says, new[0].case or str(usual(resized))
            if used.overwritten and code == "heads-differ":  # the next head is what is overwritten
                code, says = "memory-overwritten", used.overwritten[0]
            part = "" if channels == rotary_dim else f", of which {rotary_dim} are rotated"
            report.add(code if code in _KEEP else "size-dependent", says, case + part)
            return True
    return tried or "not judged"


_FREQUENCIES = ("wrong-base", "wrong-frequencies")
_FLAWS = {
    "not-a-rotation": "The two channels of a pair do not become (a cos − b sin, b cos + a sin) for any one angle.",
    "stretched": "The numbers in place of cos and sin are not those of one angle: their squares do not add up to 1.",
    "channel-overwritten": "One channel of each pair is computed from the result for the other, as b cos + a' sin.",
    "mixed-pairings": "The two channels of a pair are multiplied by the cosines or sines of different angles.",
    "attention-factor": "cos and sin are multiplied by different factors.",
    "cos-and-sin-swapped": "They are swapped in one of the two channels of each pair. No more was judged.",
}


_MIXED = "Heads and tokens are mixed, as by reshape or view in place of transpose. No more was judged."


def _judge_heads(subject: Subject, report: Report) -> bool:
    """Pass the same numbers in each of several heads, and return whether their results differ.

    With 5 heads of 5 tokens, nothing but the order of the axes tells a head from a token.
    """
    x = subject.equal_heads(TOKENS, HEADS)
    right = subject(x, x, SMALL[None, :TOKENS])
    for heads in (HEADS, 4, subject.channels, TOKENS):
        x = subject.equal_heads(TOKENS, heads)
        try:
            results = subject(x, x, SMALL[None, :TOKENS])
        except CallError:
            continue  # sizes.judge reports it
        for name, out, expected in zip("qk", results, right, strict=True):
            if out is None or expected is None:
                continue
            wrong = ((out - expected[:, :, :1]).abs() > 1e-4).any(-1).any(1)[0].nonzero().flatten().tolist()
            if wrong and bool((out - out[:, :1]).abs().max() < 1e-6):
                says = f"In layout {subject.layout}, the angle depends on the head instead of the token."
                report.add("heads-taken-for-tokens", says)
                return True
            if len(wrong) == heads != TOKENS and torch.equal(out, out[:, :, :1].expand_as(out)):
                says = f"All of {heads} heads of {name} get other angles than {HEADS} heads, as by their total width."
                report.add("size-dependent", f"{says} No more was judged.", str(usual(subject, heads=heads)))
                return True
            each = out[0].flatten(0, 1)
            if wrong and bool(((torch.cdist(each, each, math.inf) < 1e-4).sum(1) == heads).all()):  # those of tokens
                report.add("heads-differ", _MIXED, str(usual(subject, heads=heads)))
                return True
            if wrong and heads != TOKENS:
                of, each = subject.expected, out[0].transpose(0, 1).flatten(1)
                is_own = int((torch.cdist(each, each) < 1e-3).sum()) == heads and subject.way.given is None
                turns = torch.allclose(out.norm(dim=-1), x.norm(dim=-1), rtol=1e-3)
                is_added = bool((out[:, :-1, 1] - out[:, 1:, 0]).abs().max() < 1e-3)  # head 1 is at the next position
                if is_own and turns and not is_added and not (of.rope or of.base or of.pairing):
                    must, got = "all heads must have the same angles, as in text", "angles of its own for each head"
                    raise _checks.error("check", must, got, "If they are learned, check one head alone.")
                listed = ", ".join(map(str, wrong[:8]))
                says = f"Of {heads} heads of {name}, numbers {listed} differ. No more was judged."
                says = f"The number of the head is added to the position. {says}" if is_added else says
                report.add("heads-differ", says, str(usual(subject, heads=heads)))
                return True
    return False


def _report_no_pairs(subject: Subject, report: Report) -> None:
    if _report_crossed(subject, report):
        return
    x = subject.equal_heads(TOKENS, HEADS)
    out, _ = subject(x, x, SMALL[None, :TOKENS])
    if subject.gives_tokens_one_position():
        report.add("one-position", "From position 0 on or from 7 on, all tokens are changed alike.")
        return
    code, says = "not-a-rotation", "The channels do not change in pairs."
    is_moved = bool((out - x)[:, 1:].abs().amax(-1).min() > 1e-3)
    keeps_sizes = torch.allclose(out.norm(dim=-1), x.norm(dim=-1), rtol=1e-3)
    if is_moved and keeps_sizes and torch.equal(out[:, :1], x[:, :1]):  # equal tokens are rotated
        code, says = "heads-differ", _MIXED
    if torch.equal(out, x) and subject.is_told_its_layer:
        code, says = (
            "wrong-layer",
            f"Layer {subject.expected.layer} of the config rotates, and the code leaves q in it.",
        )
    elif torch.equal(out, x):
        code, says = "not-rotated", "The output equals the input."
        for rows, heads in ((3, HEADS), (TOKENS, HEADS), (1, TOKENS), (TOKENS, TOKENS)):  # a single one is token 0
            with contextlib.suppress(CallError):
                x, positions = subject.equal_heads(TOKENS, heads, rows), SMALL[:TOKENS].expand(rows, -1)
                if subject.accepts(positions) and not torch.equal(subject(x, x, positions)[0], x):
                    at = f"In layout {subject.layout} with {rows} rows and {heads} heads"
                    says = f"{at}, tokens are rotated. With one row or head, all have position 0."
                    code = "heads-taken-for-tokens"
    report.add(code, says)


def _report_crossed(subject: Subject, report: Report) -> bool:
    """Report where a result is not zero although only the other tensor is not. Return whether there are any."""
    x, says = subject.equal_heads(TOKENS, HEADS), []
    if subject.has_k and any(bool(out.any()) for out in subject(0 * x, 0 * x, SMALL[None, :TOKENS]) if out is not None):
        report.add("not-a-rotation", "The result for zeros is not 0. No more was judged.")
        return True
    for name, other, inputs in (("q", "k", (0 * x, x)), ("k", "q", (x, 0 * x))) if subject.has_k else ():
        out = dict(zip("qk", subject(*inputs, SMALL[None, :TOKENS]), strict=True))[name]
        if out is not None and bool((wrong := out.abs() > 1e-3).any()):
            says.append(f"The result for {name} is computed from {other}{where(wrong)}.")
    if says:
        report.add("query-and-key-crossed", " ".join(says))
    return bool(says)


def _judge_structure(structure: Structure, subject: Subject, report: Report) -> None:
    expected = subject.expected
    report.found["pairing"] = structure.pairing or "neither half nor interleaved"
    end = structure.rotary_offset + structure.rotary_dim
    report.found["rotated channels"] = f"{structure.rotary_offset} to {end - 1} of {subject.channels}"
    report.found["output order"] = {"same": "same as the input"}.get(structure.order, structure.order)
    if structure.order != "same" and structure.order != expected.output_order:
        order = "with the second channel first" if structure.order == "swapped" else f"in {structure.order} order"
        report.add("output-order", f"Pairs are read in {structure.pairing} order and written {order}.")
    if structure.pairing is None:
        first, second = structure.ins[0].tolist()
        says = f"Channels {first} and {second} form the first pair, which is neither half nor interleaved pairing."
        report.add("wrong-pairing", says)
    elif expected.pairing is not None and structure.pairing != expected.pairing:
        needs = f"{expected.pairing} is expected"
        if expected.model_type:
            needs = f"weights of model_type {expected.model_type} use {expected.pairing}"
        report.add("wrong-pairing", f"The pairing is {structure.pairing}, but {needs}.")
    if structure.lost:
        report.add("rest-not-passed", f"Channel {structure.lost[0]} and {len(structure.lost) - 1} more are changed.")
    rope = expected.rope
    if rope is None or subject.way.given is not None:
        return
    # In half pairing, channels between those that rotate may belong to pairs with frequency 0.
    dim = rope.rotary_dim if structure.pairing == "half" else 2 * int((rope.inv_freq != 0).sum())
    if (structure.rotary_dim, structure.rotary_offset) != (dim, rope.rotary_offset):
        first, last = rope.rotary_offset, rope.rotary_offset + rope.rotary_dim - 1
        says = f"Channels {structure.rotary_offset} to {end - 1} are rotated instead of {first} to {last}."
        i, partner = structure.ins[0].tolist()
        if structure.pairing == rope.pairing == "half" and i == first:
            says += f" Channel {i} rotates with {partner} instead of {first + rope.rotary_dim // 2}."
        report.add("wrong-slice", says)


def _judge_law(
    subject: Subject, structure: Structure, multipliers: Tensor, report: Report, on_axes: OnAxes | None
) -> Law:
    """Identify the law of the angles, and report a wrong direction, base, scheme or attention factor."""
    expected, rope = subject.expected, subject.expected.rope
    base = expected.base or (subject.arguments.base if subject.arguments is not None else None)
    if subject.way.given is not None:
        rope = subject.way.given
    elif rope is None:
        rope = _fitting_rope(subject, structure, multipliers, base, None if on_axes is None else on_axes.axes)
    is_fitted = base is None and subject.way.given is None
    measured = law.identify(multipliers, SMALL, rope, subject.channels, is_fitted=is_fitted, noise=subject.noise)
    if measured.code in _FREQUENCIES and expected.unresolved is not None:
        factor, length = getattr(expected.unresolved.scaling, "factor", 2.0), expected.length or 1
        for n in (2 * length, round(factor * length), *(length * 2**power for power in range(2, 8))):
            long = expected.unresolved.at_length(n)
            long_law = law.identify(multipliers, SMALL, long, subject.channels, noise=subject.noise)
            if long_law.code is None and subject.way.given is None:
                says = f"A short sequence gets the frequencies of one with {n:,} tokens."
                measured = replace(long_law, code="length-ignored", says=says)
                break
    if measured.says == law.NOT_PROPORTIONAL and rope is not None and subject.axes is None:
        right = Law(law.moving(rope.inv_freq), measured.factor, noise=subject.noise)
        wrong = (right.excess(multipliers, SMALL) > 1).any(-1).nonzero().flatten().tolist()
        of_right = Baseline(subject, structure, multipliers, multipliers, right, report)
        if wrong and wrong[0] > 1:
            code, says = positions.name_bug(of_right, multipliers, SMALL, wrong[:2][-1], right=wrong[0] - 1)
            measured = measured if code == "wrong-far-positions" else replace(measured, code=code, says=says)
    names = expected.axis_names
    if measured.code in _FREQUENCIES and subject.axes is None and len(names) == 2:  # of a vision tower
        must, got = "code of several axes must take a position on each", "one position for each token"
        fix = f"Check a function that takes them, {' and '.join(names)}, as positions: '2s', and passes what it needs."
        raise _checks.error("check", must, got, fix)
    stated = subject.way.given is not None or expected.rope is not None or expected.base is not None
    is_near = bool(((multipliers - measured.at(SMALL)).abs() < 1e-3 * measured.factor).all())  # as larger angles round
    if subject.axes is not None and not stated and measured.says == law.NOT_PROPORTIONAL and is_near:
        must, got = "tokens must turn by less than half a turn per position", "more, as for coordinates from -1 to 1"
        raise _checks.error("check", must, got, "Check a function that passes it the positions divided by 64.")
    if not stated and measured.code in _FREQUENCIES and measured.explains(multipliers, SMALL):
        measured = replace(measured, code=None, says="")  # the class applies a scaling of its own
        if float(measured.inv_freq.max()) < -law.ROUNDED:
            forwards = replace(measured, inv_freq=-measured.inv_freq, kind="backwards")
            measured = replace(forwards, code="rotates-backwards", says=law.BACKWARDS)
    speeds = measured.inv_freq.abs()
    halved = "Pairs 0 and 1, 2 and 3 and so on rotate at the same speed, as if their index was halved."
    alike = {"All pairs rotate at the same speed.": speeds[:1], halved: speeds[::2].repeat_interleave(2)[: len(speeds)]}
    if float(speeds.max()) < law.ROUNDED:
        alike = {"Tokens at positions 0 and 1 have the same angles.": speeds}
    same = [says for says, these in alike.items() if len(speeds) > 2 and torch.allclose(speeds, these, rtol=1e-3)]
    if len(speeds) == 1 and subject.channels > 8 and not subject.of_grid and subject.way.given is None:
        report.drop("wrong-slice")
        says = "Only one pair rotates, as if the exponents were not divided by the number of channels."
        measured = replace(measured, code="wrong-exponent", says=says)
    if same and subject.axes is None and (measured.code == "wrong-frequencies" or not (stated or measured.code)):
        measured = replace(measured, code="wrong-frequencies", says=same[0])
    stated_backwards = rope is not None and bool((rope.inv_freq < 0).any())
    report.found["direction"] = "backwards" if (measured.kind == "backwards") != stated_backwards else "forwards"
    report.found["attention factor"] = f"{law.round_digits(measured.factor):.6g}"
    explained = {"wrong-slice", "axis-frequencies", "mixed-pairings"} & {*report.codes}
    if measured.code is not None and not (measured.code == "wrong-frequencies" and explained):
        unread = [name for name in subject.unread if re.search("base|theta", name)] * (measured.code == "wrong-base")
        report.add(measured.code, measured.says + "".join(f" The code never reads {name}." for name in unread))
    describe = "not judged: check passes the tables" if subject.way.given is not None else None
    report.found["frequencies"] = describe or _describe_frequencies(measured, structure, rope)
    expected_factor = 1.0 if rope is None else rope.attention_factor
    if stated and abs(measured.factor / expected_factor - 1) > 2e-3:
        explanations = {"applied twice": expected_factor**2, "missing": 1.0, "inverted": 1 / expected_factor}
        fitting = [says for says, factor in explanations.items() if abs(measured.factor / factor - 1) < 1e-3]
        explanation = f": the attention factor is {fitting[0]}" if fitting else ""
        says = f"cos and sin are multiplied by {measured.factor:.5g} instead of {expected_factor:.5g}{explanation}."
        report.add("attention-factor", says)
    return measured


def _fitting_rope(
    subject: Subject, structure: Structure, multipliers: Tensor, base: float | None, of_axes: Axes | None
) -> Rope | None:
    """Return the rope with which measurements are compared if no rope is expected, or None if no base is found.

    Its base is the one that is passed, of the user or the constructor, else one that fits the measured frequencies.
    """
    dim, offset = structure.rotary_dim, structure.rotary_offset
    if 2 * structure.pairs < dim and of_axes is None:  # the others rest, as in one column of a grid
        dim, offset = 2 * structure.pairs, 0
    if base is None and not subject.noise:  # 16 bits are too few to find one
        inv_freq = law.measure_frequencies(multipliers, SMALL)
        fitted, reverse = (law.fit_base(f, dim, axes=of_axes) for f in (inv_freq, inv_freq.flip(0)))
        if fitted is not None and abs(fitted[1] - 1) < 1e-4:
            base = fitted[0]
        elif reverse is not None and abs(reverse[1] - 1) < 1e-4 and reverse[0] == float(f"{reverse[0]:.2g}"):
            base = reverse[0]  # a usual one, in the wrong order
        elif (loose := law.fit_base(inv_freq, dim, 0.1, of_axes)) is not None:
            base = float(f"{loose[0]:.2g}")  # that of frequencies that are rounded to 16 bits
        elif len(inv_freq) > 1 and abs(inv_freq[0] - 1) < 1e-5 and inv_freq[1] > 1.001:  # exponents without minus
            base = law.round_digits(float(inv_freq[1]) ** (dim / 2))
    pairing = cast(Pairing | None, structure.pairing)
    if pairing is None or base is None or base <= 1:
        return None
    rope = Rope(subject.channels, base, pairing, rotary_dim=dim, rotary_offset=offset, axes=of_axes)
    if dim < structure.rotary_dim:  # or the progression runs over those that rest, too
        index = structure.ins[:, 0] // (1 if pairing == "half" else 2)
        length = max(subject.channels // 2, int(index[-1]) + 1)
        whole = replace(rope, axes=Axes((0,) * structure.pairs, (*index.tolist(),), (length,)))
        rope = rope if law.identify(multipliers, SMALL, whole, subject.channels).code else whole
    return rope


def _describe_frequencies(measured: Law, structure: Structure, rope: Rope | None) -> str:
    """Describe the measured frequencies in words, for the report."""
    of_axes = None if rope is None else rope.axes
    fitted = law.fit_base(measured.inv_freq, structure.rotary_dim, axes=of_axes)
    if fitted is not None:
        divided = "" if abs(fitted[1] - 1) < 1e-4 else f", divided by {fitted[1]:g}"
        several = None if of_axes is None or of_axes.count == 1 else of_axes
        own = "" if several is None or several.one_progression else ", a progression for each axis"
        if several is not None and not own:
            says = axes.progression_of(several)
            own = "" if says.startswith("one ") or not says else f", {says}"
        is_part = 2 * structure.pairs != structure.rotary_dim and of_axes in (None, several)
        still = f" and exponents 2i/{structure.rotary_dim}" if is_part else ""
        return f"base {fitted[0]:.10g}{still}{divided}{own}"
    if rope is not None and rope.scaling is not None and measured.code is None:
        return f"{type(rope.scaling).__name__}, base {rope.base:.10g}"
    return f"no base fits: {measured.inv_freq[0]:.3g} to {measured.inv_freq[-1]:.3g} radians per token"


def _say_pairs(of_k: Structure, of_q: Structure) -> str:
    """Say which is the first pair of k that differs from that of q."""
    for at, a, b in (("read from", of_k.ins, of_q.ins), ("written to", of_k.outs, of_q.outs)):
        if a.shape == b.shape and not torch.equal(a, b):
            i = int((a != b).any(1).nonzero()[0])
            k, q = (" and ".join(map(str, each[i].tolist())) for each in (a, b))
            return f"Pair {i} of k is {at} channels {k}, and that of q {at} {q}."
    if of_k.pairs != of_q.pairs:
        return f"{of_k.pairs} pairs of k rotate, and {of_q.pairs} of q."
    return "The pairs of k are not rotated by one angle each."


def _judge_k(subject: Subject, structure: Structure, multipliers: Tensor, of: Law, report: Report) -> Tensor:
    """Compare k with q, and return the multipliers of k, or those of q if k has a bug that prevents the measurement."""
    if not subject.has_k:
        return multipliers
    k_structure = infer(subject.linear_maps(_few(subject), of="k"), subject.close)
    if _report_crossed(subject, report):
        return multipliers
    if k_structure is None:
        report.add("key-not-rotated", "k is returned unchanged.")
    elif k_structure.flaw is not None or not (
        torch.equal(k_structure.ins, structure.ins) and torch.equal(k_structure.outs, structure.outs)
    ):
        report.add("key-unlike-query", _say_pairs(k_structure, structure))
    else:
        k_multipliers = measure(subject, structure, SMALL[None], of="k")[0]
        sizes = float(k_multipliers.abs().median() / multipliers.abs().median())
        if not of.agree(k_multipliers / sizes, multipliers, SMALL):
            is_opposite = of.agree(k_multipliers.conj() / sizes, multipliers, SMALL)
            direction = "in the opposite direction" if is_opposite else "by other angles"
            report.add("key-unlike-query", f"k is rotated {direction}.")
        elif abs(sizes - 1) > 1e-3:
            report.drop("attention-factor")
            report.add("attention-factor", f"The factor of k is {sizes:.5g} times that of q.")
        return k_multipliers
    return multipliers
