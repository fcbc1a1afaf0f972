"""Measure the difference between two ropes: their frequencies, attention factors, and scores over all distances."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ropewalk.rope.rope import Rope

EVERY_DISTANCE_UP_TO = 131_072
"""Scores are compared at every distance up to this one, in tokens.

For longer sequences, as many larger distances are compared, evenly spaced up to the longest.
"""

_ROWS = 4096
LAST_BITS = 1e-9
"""The relative difference that the last bits of float64 can make."""
FLOAT32 = 2.0**-23
"""The relative difference that a frequency can have if its base and its factor were rounded to float32."""


def difference(a: Rope, b: Rope, longest: int) -> dict[str, Any]:
    """Return how rope b differs from rope a, as a dict of JSON values.

    If they rotate other channels, `channels` says so in words, and nothing else is compared.
    """
    if (a.rotary_dim, a.pairing) == (b.rotary_dim, b.pairing):
        return {"channels": None, **compare_ropes(a, b, longest)}
    count = f"{b.rotary_dim} channels, not {a.rotary_dim}" if a.rotary_dim != b.rotary_dim else ""
    pairing = f"pairing {b.pairing}, not {a.pairing}" if a.pairing != b.pairing else ""
    return {"same": False, "channels": "; ".join(filter(None, (count, pairing)))}


def farthest(sequence: int, *windows: int | None) -> int:
    """Return the largest distance at which scores are compared, in tokens, in layers with at least one of `windows`."""
    bounds = [window for window in windows if window is not None]
    return min(sequence, max(bounds) - 1) if bounds and len(bounds) == len(windows) else sequence


def compare_ropes(a: Rope, b: Rope, longest: int, tolerance: float = LAST_BITS) -> dict[str, Any]:
    """Measure how rope b differs from rope a.

    Args:
        a, b: static ropes with the same number of pairs.
        longest: the largest distance at which scores are compared, in tokens.
        tolerance: the relative difference up to which numbers are equal. By default, last bits of float64 may differ.

    Returns:
        A dict of JSON values. `same` is whether the ropes are equal, except for the tolerance. `inv_freq`
        has the `pair` whose frequencies differ most; `times`, the ratio of the larger to the smaller of these two, or
        None if one is 0; `slower`, whether the pair rotates slower in b; and `pairs_that_differ`, their number.
        `attention_factor_ratio` is that of b to a. `scores` has the `largest_change` of an attention score, over all q
        and k whose pairs have the same norm, and the distance `at_distance` between q and k at which it occurs. A score
        of 1 is that of q with itself, without an attention factor.
    """
    first, second = a.inv_freq, b.inv_freq
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(first == second, 1.0, first / second)
    times = np.maximum(ratio, np.divide(1.0, ratio, out=np.full_like(ratio, np.inf), where=ratio > 0))
    pair = int(np.argmax(times))
    pairs = int(np.count_nonzero(times - 1.0 > tolerance))
    attention = b.attention_factor / a.attention_factor
    score, distance = _scores(first, second, a.attention_factor**2, b.attention_factor**2, longest, pairs > 0)
    return {
        "same": pairs == 0 and abs(attention - 1.0) < tolerance,
        "inv_freq": {
            "times": float(times[pair]) if math.isfinite(times[pair]) else None,
            "pair": pair,
            "slower": bool(second[pair] < first[pair]),
            "pairs_that_differ": pairs,
        },
        "attention_factor_ratio": attention,
        "scores": {"largest_change": score, "at_distance": distance},
    }


def _scores(first: np.ndarray, second: np.ndarray, a: float, b: float, longest: int, moving: bool) -> tuple[float, int]:
    """Return the largest change of a score, and the distance at which it occurs, in tokens.

    A pair with frequencies w and w' contributes |a e^(i m w) − b e^(i m w')| at distance m. The change of the score is
    the mean over the pairs.

    Args:
        first, second: w and w' of each pair, in radians per token, `[pairs]`.
        a, b: the squares of the attention factors.
        longest: the largest distance m, in tokens.
        moving: whether any frequencies differ. If none differ, the change is |a − b| at every distance.
    """
    if not moving:
        return abs(a - b), 0
    difference = first - second
    largest, distance = -1.0, 0
    for m in distances(longest):
        # |a e^(ix) − b e^(iy)|² = (a − b)² + 4 a b sin²((x − y) / 2), which stays accurate for small angles.
        square = (a - b) ** 2 + 4 * a * b * np.sin(np.outer(m, difference) / 2) ** 2
        mean = np.sqrt(square).mean(axis=1)
        at = int(np.argmax(mean))
        if mean[at] > largest * (1 + 1e-12):
            largest, distance = float(mean[at]), int(m[at])
    return largest, distance


def distances(longest: int) -> list[np.ndarray]:
    each = np.arange(min(longest, EVERY_DISTANCE_UP_TO) + 1)
    if longest > EVERY_DISTANCE_UP_TO:
        beyond = np.linspace(EVERY_DISTANCE_UP_TO, longest, EVERY_DISTANCE_UP_TO + 1)[1:]
        each = np.unique(np.concatenate((each, beyond.round().astype(np.int64))))
    return [each[i : i + _ROWS] for i in range(0, len(each), _ROWS)]
