"""Compute every number that the explorer's page shows. The page's script computes none."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from ropewalk import Rope, _checks
from ropewalk.tools.plots.distance import bound_and_score, distances
from ropewalk.tools.plots.interactive.curves import WHO, Curve

SLIDER_STEPS = 64
_COLUMNS = 160  # the number of positions in a heat map
_DISTANCES = 600
_SHOWN_PAIRS = 6
_MOST_PAIRS = 12
_MOST_LENGTHS = 12


def distances_of(curves: Sequence[Curve]) -> np.ndarray:
    """Return the distances at which scores are drawn, in tokens: 0, and others spread evenly on a log axis."""
    return distances(max(curve.longest for curve in curves), _DISTANCES)


def numbers_of(curve: Curve, distance: np.ndarray, pairs: Sequence[int] | None) -> dict[str, Any]:
    """Compute the numbers of one curve, as plain data for JSON.

    Args:
        curve: the curve.
        distance: the result of `distances_of`, int64 `[distances]`.
        pairs: the pairs whose vectors are drawn. None means up to six, spread over the pairs that rotate.

    Raises:
        RopeError: `pairs` is not a sequence of 1 to 12 pairs of the rope.
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
        "bound": encode_array(bound, "f4"),
        "score": encode_array(score, "f4"),
        "angles": None if curve.trained is None else _angles(curve, before, after),
    }


def frequencies(speed: np.ndarray, trained: int | None) -> dict[str, Any]:
    """Return the speed (radians per position), wavelength (positions) and turns within the trained length of each pair.

    Speed and wavelength of a pair that does not rotate are None. turns is None if the trained length is unknown.
    """
    speeds = [w if w > 0 else None for w in speed.tolist()]
    return {
        "speed": [None if w is None else _short(w) for w in speeds],
        "wavelength": [None if w is None else _short(2 * math.pi / w) for w in speeds],
        "turns": None if trained is None else [_short(turn) for turn in _turns(speed, trained).tolist()],
    }


def shown_pairs(curve: Curve, pairs: Sequence[int] | None) -> list[int]:
    """Return the pairs whose vectors are drawn, ascending.

    Raises:
        RopeError: `pairs` is not a sequence of 1 to 12 pairs of the rope.
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
        raise _checks.error(WHO, must, _checks.shown(pairs), "Pass None to let six be chosen.")
    fix = f"The last pair of {curve.label} is {len(speed) - 1}."
    return sorted({_checks.integer(WHO, "pairs", pair, at_least=0, at_most=len(speed) - 1, fix=fix) for pair in pairs})


def strides(longest: int) -> list[int]:
    """Return the numbers of tokens that one step of the slider can stand for, ascending.

    The smallest is 1. With the largest, the last step of the slider is at `longest`, rounded down to a multiple of 64.
    Between the two is a power of two.
    """
    reach = max(1, longest // SLIDER_STEPS)
    return sorted({1, 2 ** (reach.bit_length() // 2), reach})


def heat_positions(longest: int) -> list[np.ndarray]:
    """Return the int64 positions of two heat maps: 0 to 159, and some up to `longest`, evenly spread on a log axis."""
    return [np.arange(_COLUMNS), distances(max(longest, 2), _COLUMNS + 1)[1:]]


def lengths(curve: Curve) -> list[int]:
    """Return the lengths at which angles are shown, in tokens: the trained length times powers of two, and a last one.

    The last length is the one to which the rope was resolved. If the rope does not depend on the length, it is the
    longest sequence or four times the trained length, whichever is greater.
    """
    trained = curve.trained or 1
    end = curve.limit or max(curve.longest, 4 * trained)
    doublings = [trained * 2**i for i in range(_MOST_LENGTHS - 1) if trained * 2**i <= end]
    return sorted({*doublings, end})


def _vectors(curve: Curve, pairs: list[int]) -> dict[str, Any]:
    """Return rotated vectors (1, 0), multiplied by the attention factor, with their pairs and positions.

    "xy" is float32 `[strides, steps + 1, pairs, 2]`. The position of a vector is its stride times its step.
    """
    steps = strides(curve.longest)
    cos, sin = _tables(curve.rope, np.outer(steps, np.arange(SLIDER_STEPS + 1)))
    return {
        "pairs": pairs,
        "strides": steps,
        "steps": SLIDER_STEPS,
        "xy": encode_array(np.stack([cos[..., pairs], sin[..., pairs]], axis=-1), "f4"),
    }


def _heat(rope: Rope, positions: np.ndarray) -> dict[str, Any]:
    """Return the positions and, as int8 `[pairs, positions]`, 127 times the cosines without the attention factor."""
    cos, _ = _tables(rope, positions)
    return {"positions": positions.tolist(), "cos": encode_array((cos / rope.attention_factor * 127).round().T, "i1")}


def _tables(rope: Rope, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return exact cos and sin of text tokens, which have the same position on every axis."""
    if rope.axes is not None:
        positions = np.broadcast_to(positions, (rope.axes.count, *positions.shape))
    return rope.tables(positions)


def _angles(curve: Curve, before: np.ndarray, after: np.ndarray) -> dict[str, Any]:
    """Return the part of the circle that each pair passes in training, and the part that it passes at each length.

    The part at a length is computed with and without scaling. For training, the frequencies before scaling are used,
    except that a pair with frequency 0 after scaling counts as not rotating in training either. A window bounds both.
    """
    before = np.where(after > 0, before, 0.0)
    trained, *turns = (min(n, curve.window or n) for n in (curve.trained or 0, *lengths(curve)))
    seen = _turns(before, trained)
    both = [(speed, zip(lengths(curve), turns, strict=True)) for speed in (before, after)]
    without, scaled = ([_compare_with_training(seen, _turns(speed, far), n) for n, far in at] for speed, at in both)
    return {"lengths": lengths(curve), "seen": _parts(seen), "without": without, "with": scaled}


def _compare_with_training(trained: np.ndarray, turns: np.ndarray, length: int) -> dict[str, Any]:
    """Return the part of the circle that each pair passes at a length, and the pairs that reach unseen angles."""
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
    """Convert turns to the part of the circle that is passed, at most 1."""
    return [_short(turn) for turn in np.minimum(turns, 1.0).tolist()]


def _ranges(pairs: list[int]) -> str:
    runs = groupby(enumerate(pairs), lambda pair: pair[1] - pair[0])
    spans = [[pair for _, pair in run] for _, run in runs]
    return ", ".join(str(s[0]) if len(s) == 1 else f"{s[0]}–{s[-1]}" for s in spans)


def _short(number: float) -> float:
    """Round to seven significant digits. A figure cannot show more, and all digits would take twice the size."""
    return float(f"{number:.7g}")


def encode_array(numbers: np.ndarray, dtype: str) -> dict[str, str]:
    """Encode an array for Plotly and the page's script: its dtype, its shape, and little-endian bytes in base64."""
    data = base64.b64encode(np.ascontiguousarray(numbers, dtype=f"<{dtype}").tobytes()).decode("ascii")
    return {"dtype": dtype, "bdata": data, "shape": ", ".join(map(str, numbers.shape))}
