"""Every number that the page of the explorer shows: computed here, by the library, and never in the browser."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from ropewalk import Rope, _checks
from ropewalk.plots.distance import bound_and_score, distances
from ropewalk.plots.interactive.curves import WHO, Curve

SLIDER_STEPS = 64
_COLUMNS = 160  # positions of a heat map
_DISTANCES = 600
_SHOWN_PAIRS = 6
_MOST_PAIRS = 12
_MOST_LENGTHS = 12


def distances_of(curves: Sequence[Curve]) -> np.ndarray:
    """The distances of all scores, in tokens: 0, and evenly spread over the logarithm up to the longest curve's."""
    return distances(max(curve.longest for curve in curves), _DISTANCES)


def numbers_of(curve: Curve, distance: np.ndarray, pairs: Sequence[int] | None) -> dict[str, Any]:
    """The numbers of one curve, ready for JSON.

    Args:
        curve: what to draw.
        distance: those of `distances_of`, int64 `[distances]`.
        pairs: the pairs whose vectors are drawn; None spreads them over the pairs that rotate.

    Raises:
        RopeError: a pair is out of range.
    """
    rope = curve.rope
    before, after = replace(rope, scaling=None).inv_freq, rope.inv_freq
    bound, score = bound_and_score(after, distance)
    return {
        "before": None if rope.scaling is None else frequencies(before, curve.trained),
        "after": frequencies(after, curve.trained),
        "factor": rope.attention_factor,
        "vectors": _vectors(curve, shown_pairs(curve, pairs)),
        "heat": [_heat(rope, positions) for positions in heat_positions(curve.longest)],
        "bound": packed(bound, "f4"),
        "score": packed(score, "f4"),
        "angles": None if curve.trained is None else _angles(curve, before, after),
    }


def frequencies(speed: np.ndarray, trained: int | None) -> dict[str, Any]:
    """Radians per position, wavelength in positions and turns within the trained length; null for an idle pair."""
    turning = [w if w > 0 else None for w in speed.tolist()]
    return {
        "speed": [None if w is None else _short(w) for w in turning],
        "wavelength": [None if w is None else _short(2 * math.pi / w) for w in turning],
        "turns": None if trained is None else [_short(turn) for turn in _turns(speed, trained).tolist()],
    }


def shown_pairs(curve: Curve, pairs: Sequence[int] | None) -> list[int]:
    """The pairs whose vectors are drawn, ascending.

    Raises:
        RopeError: one of them is out of range, or there are too many.
    """
    speed = curve.rope.inv_freq
    if pairs is None:
        rotating = np.flatnonzero(speed > 0)
        if not len(rotating):
            rotating = np.arange(len(speed))
        spread = np.linspace(0, len(rotating) - 1, min(_SHOWN_PAIRS, len(rotating))).round().astype(int)
        return [int(pair) for pair in rotating[spread]]
    if isinstance(pairs, str) or not isinstance(pairs, Sequence) or not 1 <= len(pairs) <= _MOST_PAIRS:
        must = f"pairs must be a sequence of 1 to {_MOST_PAIRS} pairs"
        raise _checks.error(WHO, must, _checks.shown(pairs), "Pass None to spread them.")
    fix = f"The last pair of {curve.label} is {len(speed) - 1}."
    return sorted({_checks.integer(WHO, "pairs", pair, at_least=0, at_most=len(speed) - 1, cure=fix) for pair in pairs})


def strides(longest: int) -> list[int]:
    """Tokens per step of the slider, ascending: 1, what reaches `longest` in all steps, and a power of two between."""
    reach = max(1, longest // SLIDER_STEPS)
    return sorted({1, 2 ** (reach.bit_length() // 2), reach})


def heat_positions(longest: int) -> list[np.ndarray]:
    """The first positions one by one, and from 1 to `longest` evenly spread over the logarithm: int64."""
    return [np.arange(_COLUMNS), distances(max(longest, 2), _COLUMNS + 1)[1:]]


def lengths(curve: Curve) -> list[int]:
    """Lengths for the angles that are met, in tokens: doublings of the trained length, and the longest."""
    trained = curve.trained or 1
    end = curve.limit or max(curve.longest, 4 * trained)
    doublings = [trained * 2**i for i in range(_MOST_LENGTHS - 1) if trained * 2**i <= end]
    return sorted({*doublings, end})


def _vectors(curve: Curve, pairs: list[int]) -> dict[str, Any]:
    """(1, 0) rotated: float32 `[strides, steps + 1, pairs, 2]`, the attention factor included."""
    steps = strides(curve.longest)
    cos, sin = _tables(curve.rope, np.outer(steps, np.arange(SLIDER_STEPS + 1)))
    return {
        "pairs": pairs,
        "strides": steps,
        "steps": SLIDER_STEPS,
        "xy": packed(np.stack([cos[..., pairs], sin[..., pairs]], axis=-1), "f4"),
    }


def _heat(rope: Rope, positions: np.ndarray) -> dict[str, Any]:
    """Cosines without the attention factor, in steps of 1/127: int8 `[pairs, positions]`."""
    cos, _ = _tables(rope, positions)
    return {"positions": positions.tolist(), "cos": packed((cos / rope.attention_factor * 127).round().T, "i1")}


def _tables(rope: Rope, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Exact cos and sin of text tokens, which have their position on every axis."""
    if rope.axes is not None:
        positions = np.broadcast_to(positions, (rope.axes.count, *positions.shape))
    return rope.tables(positions)


def _angles(curve: Curve, before: np.ndarray, after: np.ndarray) -> dict[str, Any]:
    """Parts of the circle that each pair has passed in training, and passes at each length with and without scaling.

    A model is trained with the frequencies before scaling. A pair that a scheme stops did not rotate there either.
    """
    before = np.where(after > 0, before, 0.0)
    trained = _turns(before, curve.trained or 0)
    return {
        "lengths": lengths(curve),
        "seen": _parts(trained),
        "without": [_reached(trained, _turns(before, n), n) for n in lengths(curve)],
        "with": [_reached(trained, _turns(after, n), n) for n in lengths(curve)],
    }


def _reached(trained: np.ndarray, turns: np.ndarray, length: int) -> dict[str, Any]:
    """Part of the circle that each pair passes, which pairs meet unseen angles, and the same in words."""
    unseen = np.flatnonzero((trained < 1) & (turns > trained * (1 + 1e-9))).tolist()
    words = "every angle was seen in training"
    if unseen:
        listed = f"pair{'s' if len(unseen) > 1 else ''} {_ranges(unseen)}"
        words = f"{len(unseen)} of {len(turns)} pairs reach angles that were not seen in training: {listed}"
    return {"part": _parts(turns), "unseen": unseen, "words": f"At {length:,} tokens, {words}."}


def _turns(speed: np.ndarray, tokens: int) -> np.ndarray:
    result: np.ndarray = speed * tokens / (2 * math.pi)
    return result


def _parts(turns: np.ndarray) -> list[float]:
    """Turns as a part of the circle: at most 1."""
    return [_short(turn) for turn in np.minimum(turns, 1.0).tolist()]


def _ranges(pairs: list[int]) -> str:
    runs = groupby(enumerate(pairs), lambda pair: pair[1] - pair[0])
    spans = [[pair for _, pair in run] for _, run in runs]
    return ", ".join(str(s[0]) if len(s) == 1 else f"{s[0]}–{s[-1]}" for s in spans)


def _short(number: float) -> float:
    """Seven significant digits: more than a figure can show, and half the bytes."""
    return float(f"{number:.7g}")


def packed(numbers: np.ndarray, dtype: str) -> dict[str, str]:
    """An array as Plotly and the page read it: little-endian bytes in base64, and the shape."""
    data = base64.b64encode(np.ascontiguousarray(numbers, dtype=f"<{dtype}").tobytes()).decode("ascii")
    return {"dtype": dtype, "bdata": data, "shape": ", ".join(map(str, numbers.shape))}
