"""How far two ropes with the same channels are apart: frequencies, attention factor, and scores over distances."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ropewalk.rope import Rope

EVERY_DISTANCE_UP_TO = 131_072
"""Distances that are looked at one by one; beyond, as many again are spread evenly up to the longest."""

_ROWS = 4096
_LAST_BITS = 1e-9


@dataclass(frozen=True)
class Apart:
    """How far the second of two static ropes is from the first.

    Args:
        times: the largest ratio of two frequencies of one pair, at least 1; inf where one of them stands still.
        pair: the pair with that ratio.
        slower: whether that pair turns slower in the second.
        pairs: how many pairs differ.
        attention: attention factor of the second over that of the first.
        score: by how much a score of q and k whose pairs are all equally large can change, in units of the score of q
            with itself at distance 0 without an attention factor.
        distance: between q and k where that is, in tokens.
    """

    times: float
    pair: int
    slower: bool
    pairs: int
    attention: float
    score: float
    distance: int

    @property
    def same(self) -> bool:
        """Whether there is nothing but differences in the last bits of float64."""
        return self.pairs == 0 and abs(self.attention - 1.0) < _LAST_BITS

    def facts(self) -> dict[str, Any]:
        """As plain data; JSON has no infinity, so `times` is null there."""
        return {
            "same": self.same,
            "inv_freq": {
                "times": self.times if math.isfinite(self.times) else None,
                "pair": self.pair,
                "slower": self.slower,
                "pairs_that_differ": self.pairs,
            },
            "attention_factor_ratio": self.attention,
            "scores": {"largest_change": self.score, "at_distance": self.distance},
        }


def apart(a: Rope, b: Rope, longest: int) -> Apart:
    """How far b is from a, over distances from 0 to `longest` tokens. Both are static and have as many pairs."""
    first, second = a.inv_freq, b.inv_freq
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(first == second, 1.0, first / second)
    times = np.maximum(ratio, np.divide(1.0, ratio, out=np.full_like(ratio, np.inf), where=ratio > 0))
    pair = int(np.argmax(times))
    pairs = int(np.count_nonzero(times - 1.0 > _LAST_BITS))
    score, distance = _scores(first, second, a.attention_factor**2, b.attention_factor**2, longest, pairs > 0)
    return Apart(
        times=float(times[pair]),
        pair=pair,
        slower=bool(second[pair] < first[pair]),
        pairs=pairs,
        attention=b.attention_factor / a.attention_factor,
        score=score,
        distance=distance,
    )


def _scores(first: np.ndarray, second: np.ndarray, a: float, b: float, longest: int, moving: bool) -> tuple[float, int]:
    """The largest mean over pairs of |a e^(i m w) − b e^(i m w')|, and its distance m."""
    if not moving:
        return abs(a - b), 0
    turning = first - second
    worst, where = -1.0, 0
    for m in _distances(longest):
        # |a e^(ix) − b e^(iy)|² = (a − b)² + 4 a b sin²((x − y) / 2), which keeps its digits for small angles.
        square = (a - b) ** 2 + 4 * a * b * np.sin(np.outer(m, turning) / 2) ** 2
        mean = np.sqrt(square).mean(axis=1)
        at = int(np.argmax(mean))
        if mean[at] > worst * (1 + 1e-12):
            worst, where = float(mean[at]), int(m[at])
    return worst, where


def _distances(longest: int) -> list[np.ndarray]:
    each = np.arange(min(longest, EVERY_DISTANCE_UP_TO) + 1)
    if longest > EVERY_DISTANCE_UP_TO:
        beyond = np.linspace(EVERY_DISTANCE_UP_TO, longest, EVERY_DISTANCE_UP_TO + 1)[1:]
        each = np.unique(np.concatenate((each, beyond.round().astype(np.int64))))
    return [each[i : i + _ROWS] for i in range(0, len(each), _ROWS)]
