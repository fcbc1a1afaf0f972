"""Decide whether two engines rotate bitwise equally, equally up to rounding, or differently from some position on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ropewalk._rounding import explained_error
from ropewalk.engines import Answer, Rounding
from ropewalk.rope.rope import Rope
from ropewalk.tools.diff.rope_difference import distances

STEPS: Mapping[str, tuple[str, ...]] = {
    "inv_freq": ("inv_freq", "computed", "where"),
    "angles": ("angle",),
    "cos and sin": ("table", "is_complex"),
    "the rotation": ("rotation", "is_complex"),
}
"""Maps each step of a rotation to the fields of `Rounding` that describe it."""

_UNIT = 2.0**-9
"""The largest relative error of rounding to bfloat16."""


def judge(a: Answer, b: Answer, first: Rope, second: Rope, apart: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """Compare what two engines compute for one rope of a config, at one length.

    Args:
        a, b: the answers of the engines.
        first, second: their static ropes.
        apart: the difference of the ropes, as `rope_difference.difference` returns it.
        longest: the largest position, in tokens.

    Returns:
        A dict of JSON values. `word` is "bitwise equal" if the ropes and the roundings are the same and the bits of
        both engines were recorded, "same operations" if they are the same but were not recorded, "equal up to
        rounding", or "different". `steps` lists the steps that are rounded differently. `from_position` is the first
        position at which a rotated pair of channels differs by more than rounding explains, if q and k are bfloat16, or
        None if there is none.
    """
    one, other = (answer.rounding or Rounding() for answer in (a, b))
    steps = _steps(one, other, first.attention_factor != 1.0 or second.attention_factor != 1.0)
    if not apart["same"]:
        position = 1 if apart["channels"] else _first_position(one, other, first, second, longest)
        return {"word": "different", "steps": steps, "from_position": position}
    recorded = {one.evidence, other.evidence, a.evidence, b.evidence} == {"run"}
    word = "equal up to rounding" if steps else "bitwise equal" if recorded else "same operations"
    return {"word": word, "steps": steps, "from_position": None}


def _steps(a: Rounding, b: Rounding, scaled: bool) -> list[str]:
    """Return the steps that two engines round differently."""
    differ = {step: any(getattr(a, name) != getattr(b, name) for name in names) for step, names in STEPS.items()}
    differ["cos and sin"] |= scaled and a.factor != b.factor
    return [step for step, found in differ.items() if found]


def _first_position(a: Rounding, b: Rounding, first: Rope, second: Rope, longest: int) -> int | None:
    """Return the first position at which a pair differs by more than its roundings, or None.

    A pair of channels with norm 1 is rotated to f e^(i p w) by an engine with the attention factor f, so two engines
    are |f e^(i p w) − f' e^(i p w')| apart.
    """
    w, v = first.inv_freq, second.inv_freq
    f, g = first.attention_factor, second.attention_factor
    fixed = f * _units(a) + g * _units(b)
    per_position = f * explained_error(w) + g * explained_error(v)
    for p in distances(longest):
        apart = np.sqrt((f - g) ** 2 + 4 * f * g * np.sin(np.outer(p, w - v) / 2) ** 2)
        found = np.nonzero((apart > fixed + np.outer(p, per_position)).any(axis=1))[0]
        if found.size:
            return int(p[found[0]])
    return None


def _units(rounding: Rounding) -> float:
    """Return the largest error of a rotated channel in bfloat16 with exact angles, for a pair with norm 1."""
    return _UNIT * (1 + (rounding.rotation == "the model's") + (rounding.table in ("the model's", "bfloat16")))
