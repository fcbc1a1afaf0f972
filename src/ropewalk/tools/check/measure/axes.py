"""Find out which axis of the positions turns each pair, name the bugs in it, and test calls with several positions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, permutations

import numpy as np
import torch
from torch import Tensor

from ropewalk import Axes, Rope, _checks
from ropewalk.tools.check.expected import Expected
from ropewalk.tools.check.find.subject import CallError, Subject
from ropewalk.tools.check.measure import law
from ropewalk.tools.check.measure.baseline import SMALL, Baseline, OnAxes, measure
from ropewalk.tools.check.measure.structure import Structure
from ropewalk.tools.check.report import Report

FAR = 1023  # a position at which slow pairs have turned visibly
_MOVED = 3e-6  # of cos and sin: a pair that is not turned is copied without any rounding
_NONE, _SEVERAL = -1, -2  # instead of the axis of a pair


def judge(subject: Subject, structure: Structure, multipliers: Tensor, report: Report) -> tuple[Subject, OnAxes | None]:
    """Measure which axis turns each pair, report it, and name how it differs from what is expected.

    Return the target, of which the axes that it has are expected, so that no later step reports them again, and what
    was measured. None if the target has one axis, or if the two channels of a pair have different axes.
    """
    expected = subject.expected
    if subject.axes is None:
        if expected.axes is not None and subject.way.given is None:
            report.found["axes"] = "not judged: one position is passed for each token, as for text"
        return subject, None
    names = _names(subject.axes, expected)
    of_axes = [_measure(subject, structure, axis) for axis in range(subject.axes)]
    measured = torch.stack([z[: min(map(len, of_axes))] for z in of_axes])  # up to the end of the shortest
    sizes = measured.abs() / multipliers.abs().median()
    if bool((sizes - 1).abs().max() > 1e-2):  # more than by tables in 16 bits
        of, _, pair = ((sizes - 1).abs() > 1e-2).nonzero()[0].tolist()
        says = f"The two channels of pair {pair} are turned by different axes. With positions on one axis alone, "
        report.add(
            "mixed-pairings",
            f"{says}{names[of]}, its length changes by a factor of {float(sizes[of, :, pair].min()):.3g}.",
            _place(pair, of, names),
        )
        return subject, None
    turned = ((measured - measured[:, :1]).abs().amax(1) > _MOVED).T.tolist()
    axis = tuple(t.index(True) if sum(t) == 1 else (_SEVERAL if sum(t) else _NONE) for t in turned)
    report.found["axes"] = describe(axis, names)
    rope = expected.rope if subject.way.given is None else subject.way.given
    if subject.way.given is not None and subject.way.given.axes is not None and expected.axes is None:
        interleaved = Axes.interleaved([subject.way.given.axes.axis.count(a) for a in range(subject.axes)])
        if axis == interleaved.axis:  # both are right, because nothing states the layout of the sections
            rope = replace(subject.way.given, axes=interleaved)
    alone = measured[:, : len(SMALL)]
    if rope is None or rope.axes is None:
        if ignored := [name for of, name in enumerate(names) if min(axis) >= 0 and of not in axis]:
            report.add("axis-ignored", f"Positions on {' and '.join(ignored)} turn no pair.")
        if 0 < axis.count(_SEVERAL) <= 2 < len(axis) // subject.axes:  # as by sections of an odd number of channels
            report.add("mixed-pairings", f"Pair {axis.index(_SEVERAL)} is turned by several axes, and others by one.")
        return subject, OnAxes(alone, axis, _fitting(axis, multipliers, structure), names)
    moving = rope.inv_freq != 0
    right = tuple(np.array(rope.axes.axis)[moving].tolist())
    if len(right) != len(axis):
        return subject, OnAxes(alone, axis, None, names)
    if axis != right:
        _name(right, axis, names, report)
    explained = rope
    if bool(moving.all()) and min(axis) >= 0:
        explained = _judge_frequencies(rope, axis, multipliers, names, subject.noise, report)
    if subject.way.given is None:
        subject = replace(subject, expected=replace(expected, rope=explained))
    return subject, OnAxes(alone, axis, explained.axes, names)


def _names(count: int, expected: Expected) -> tuple[str, ...]:
    if len(expected.axis_names) == count:
        return expected.axis_names
    usual = {2: ("height", "width"), 3: ("time", "height", "width")}
    return usual.get(count, tuple(f"axis {axis}" for axis in range(count)))


def _measure(subject: Subject, structure: Structure, axis: int) -> Tensor:
    """Measure the multipliers at positions 0 to 63, and at FAR if possible, on one axis. The others are at 0."""

    def at(places: Tensor) -> Tensor:
        positions = torch.zeros(subject.axes or 0, 1, len(places), dtype=torch.int64)
        positions[axis] = places
        return measure(subject, structure, positions)[0]

    near = at(SMALL)
    with contextlib.suppress(CallError):
        return torch.cat((near, at(torch.tensor([0, FAR]))[1:]))
    return near


def describe(axis: Sequence[int], names: Sequence[str]) -> str:
    """Describe the axis of each pair: "pairs 0 to 15 time, 16 to 39 height, 40 to 63 width"."""
    runs = _runs(axis)
    if len(runs) <= len(names) + 1:
        ends = [f"{run[0]} to {run[-1]}" if run[1:] else f"{run[0]}" for run in runs]
        return "pairs " + ", ".join(
            f"{end} {_name_of(axis[run[0]], names)}" for end, run in zip(ends, runs, strict=True)
        )
    listed = {a: [i for i, of in enumerate(axis) if of == a] for a in dict.fromkeys(axis)}
    return ", ".join(
        f"{_name_of(a, names)} {len(pairs)} pairs ({', '.join(map(str, pairs[:3]))}{', …' if pairs[3:] else ''})"
        for a, pairs in listed.items()
    )


def _name_of(axis: int, names: Sequence[str]) -> str:
    return {_NONE: "no axis", _SEVERAL: "several axes"}.get(axis) or names[axis]


def _place(pair: int, axis: int, names: Sequence[str]) -> str:
    """Return the smallest case at which the angle of a pair on one axis shows."""
    return f"pair {pair}, position 1 on axis {axis} ({names[axis]}) and 0 on the others"


def _runs(axis: Sequence[int]) -> list[list[int]]:
    """Return the pairs of each run of pairs with one axis."""
    return [[*run] for _, run in groupby(range(len(axis)), key=axis.__getitem__)]


def _name(right: tuple[int, ...], axis: tuple[int, ...], names: Sequence[str], report: Report) -> None:
    """Name the bug of a target whose pairs are turned by `axis` instead of `right`."""
    pair = next(i for i, (a, b) in enumerate(zip(axis, right, strict=True)) if a != b)
    says = f"Pair {pair} is turned by {_name_of(axis[pair], names)} instead of {names[right[pair]]}."
    by = right[pair] if axis[pair] < 0 else axis[pair]
    case = _place(pair, by, names)
    ignored = [a for a in sorted({*right}) if a not in axis]
    if _SEVERAL in axis:
        report.add("section-layout", says, case)
    elif ignored:
        listed = " and ".join(names[a] for a in ignored)
        case = _place(right.index(ignored[0]), ignored[0], names)
        report.add("axis-ignored", f"Positions on {listed} turn no pair. {says}", case)
    else:
        report.add(_code(right, axis, len(names)), f"{says} In all, {describe(axis, names)}.", case)


def _code(right: tuple[int, ...], axis: tuple[int, ...], count: int) -> str:
    for order in permutations(range(count)):
        if axis == tuple(order[a] for a in right):
            return "axes-exchanged" if order[:-2] == (*range(count - 2),) else "sections-permuted"
    return "sections-permuted" if len(_runs(right)) == len(_runs(axis)) else "section-layout"


def _progressions(axis: tuple[int, ...], count: int) -> Iterator[tuple[str, Axes]]:
    """Yield the known progressions of frequencies over pairs with these axes, and what is said of them."""
    pairs = len(axis)
    sizes = tuple(axis.count(a) for a in range(count))
    ranks = tuple(axis[:i].count(a) for i, a in enumerate(axis))
    yield "one progression runs over all pairs", Axes(axis, lengths=(pairs,) * count)
    yield "each axis has a progression of its own", Axes(axis, ranks, tuple(max(size, 1) for size in sizes))
    yield "the pairs of each axis are counted from 0 in one progression", Axes(axis, ranks, (pairs,) * count)
    order = sorted({*axis}, key=axis.index)
    strided = tuple(rank * len(order) + order.index(a) for rank, a in zip(ranks, axis, strict=True))
    if max(strided) < pairs:
        yield "the axes take turns in one progression", Axes(axis, strided, (pairs,) * count)
    for a in range(count):
        if sizes[a] > max(ranks):
            yield f"every axis has the progression of axis {a}", Axes(axis, ranks, (sizes[a],) * count)


def progression_of(axes: Axes) -> str:
    """Return what is said of the progression of these axes, or "" if it is not known."""
    return next((says for says, of in _progressions(axes.axis, axes.count) if of == axes), "")


def _fitting(axis: tuple[int, ...], multipliers: Tensor, structure: Structure) -> Axes | None:
    """Return the axes with a known progression that explains the frequencies with some base, or None."""
    if min(axis) < 0 or 2 * len(axis) != structure.rotary_dim:
        return None
    inv_freq = law.measure_frequencies(multipliers, SMALL)
    for _, axes in _progressions(axis, max(axis) + 1):
        if law.fit_base(inv_freq, structure.rotary_dim, axes=axes, tolerance=1e-3) is not None:
            return axes
    return None


def _judge_frequencies(
    rope: Rope, axis: tuple[int, ...], multipliers: Tensor, names: Sequence[str], noise: float, report: Report
) -> Rope:
    """Return the rope whose frequencies the target has, if they differ only in how the axes share the progressions."""
    axes, code = rope.axes, law.identify(multipliers, SMALL, rope, rope.head_dim, noise=noise).code
    if axes is None or code not in ("wrong-frequencies", "wrong-base", "wrong-exponent"):
        return rope
    factor = float(multipliers.abs().median())
    own = progression_of(axes)
    for says, found in _progressions(axis, axes.count):
        try:
            other = replace(rope, axes=found)
            fits = law.Law(law.moving(other.inv_freq), factor, noise=noise).explains(multipliers, SMALL)
        except _checks.RopeError:  # the scheme does not apply to such axes
            continue
        if fits:
            if own not in ("", says):
                pair = int((np.abs(other.inv_freq / rope.inv_freq - 1) > 1e-3).argmax())
                rotates = (
                    f"Pair {pair} ({names[axis[pair]]}) rotates by {other.inv_freq[pair]:.4g} radians per position"
                )
                says = f"{rotates} instead of {rope.inv_freq[pair]:.4g}: {says}, but {own} is expected."
                report.add("axis-frequencies", says, _place(pair, axis[pair], names))
            return other
    return rope


# Positions `[axes, tokens]` of two tokens of text, a video of 2 × 2 × 2 patches, and two tokens of text.
_PLACES = torch.tensor(
    [
        [0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 6, 7],
        [0, 1, 2, 2, 3, 3, 2, 2, 3, 3, 6, 7],
        [0, 1, 2, 5, 2, 5, 2, 5, 2, 5, 6, 7],
        [0, 1, 4, 4, 4, 4, 4, 4, 4, 4, 6, 7],
    ]
)
_COUNTED_ON = torch.tensor([0] * 10 + [2] * 2)  # how much less each position is if text counts on from the first axis
# Of frames, rows and columns: two grids of as many tokens and other sides.
_GRIDS = torch.cat([torch.cartesian_prod(*map(torch.arange, sides)).mT for sides in ((1, 3, 7), (1, 7, 3))], dim=-1)
_ONE_TOKEN = torch.tensor([[7], [3], [11], [20]])


def judge_calls(baseline: Baseline) -> bool:
    """Test calls with other positions on each axis: an image between text, one token, a batch."""
    if (on_axes := baseline.on_axes) is None:
        return False
    count = len(on_axes.names)
    image = (_PLACES[1:3] if count == 2 else _PLACES[:count])[:, None]
    unlike = "axis-ignored" if len({*on_axes.axis}) < count else "rows-mixed-up"
    tests = (
        (image, unlike, ("axis-ignored", image - _COUNTED_ON)),
        (_ONE_TOKEN[:count, None], "one-token-wrong"),
        (torch.cat([image, image + 9, (image * 3).flip(-1)], dim=1), unlike),
    )
    for positions, *codes in tests:
        if baseline.subject.accepts(positions) and baseline.judge(positions, *codes, of_k="key-unlike-query"):
            return True
    for call in (other for other in baseline.subject.others if other.of_grid):
        with contextlib.suppress(CallError):  # it takes grids of one size in a call
            replace(baseline, subject=call).judge(_GRIDS[-count:, None], "grids-mixed-up")
    return True
