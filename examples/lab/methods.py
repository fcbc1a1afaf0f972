"""The methods that the lab compares: which rope a model that was trained on short sequences uses for n tokens.

A fixed method uses the same rope at every length. A dynamic method uses the factor n / trained length for longer
sequences, and no scaling for sequences up to the trained length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import ropewalk
from ropewalk import Rope, schemes

FACTOR = 4.0
"""Factor of every fixed method. Fine-tunes train on sequences longer than the trained length by this factor."""

LARGER_BASE = 50.0
"""Factor of the base in the fine-tune with a larger base, as in Xiong et al. 2023, arXiv:2309.16039 (ABF)."""


Plan = Rope | ropewalk.SelfExtend
_Choose = Callable[[Rope, int, int], Plan]


@dataclass(frozen=True)
class Method:
    """A method for sequences longer than the trained ones.

    Args:
        name: the name in tables.
        what: a description.
        plan: a function of the trained rope, the trained length in tokens, and a number of tokens. It returns the rope,
            or the SelfExtend, for that number of tokens.
    """

    name: str
    what: str
    plan: _Choose


def _fixed_plan(scheme: Callable[[int], schemes.Scheme | None]) -> _Choose:
    """Return a plan with the same scheme for every number of tokens. `scheme` is a function of the trained length."""
    return lambda rope, trained, n: dataclasses.replace(rope, scaling=scheme(trained))


def _dynamic_plan(scheme: Callable[[float, int], schemes.Scheme]) -> _Choose:
    """Return a plan that scales a sequence of n tokens only if n is larger than the trained length.

    `scheme` is a function of n / trained length and the trained length.
    """

    def plan(rope: Rope, trained: int, n: int) -> Rope:
        return rope if n <= trained else dataclasses.replace(rope, scaling=scheme(n / trained, trained))

    return plan


def _ntk_dynamic(rope: Rope, trained: int, n: int) -> Rope:
    return dataclasses.replace(rope, scaling=schemes.DynamicNTK(1.0, trained)).at_length(n)


def _self_extend(rope: Rope, trained: int, n: int) -> Plan:
    """Return the rope itself up to the trained length, and a SelfExtend for longer sequences.

    The window of the SelfExtend is a quarter of the trained length. Its group is the smallest one with which every
    distance is below the trained length.
    """
    if n <= trained:
        return rope
    window = trained // 4
    group = next(g for g in range(2, n) if (n - 1) // g + window - window // g < trained)
    return ropewalk.SelfExtend(rope, group=group, window=window)


METHODS = (
    Method("none", "no scaling", _fixed_plan(lambda trained: None)),
    Method("PI", "position interpolation, factor 4", _fixed_plan(lambda trained: schemes.Linear(FACTOR))),
    Method("NTK", "NTK-aware, alpha 4", _fixed_plan(lambda trained: schemes.NTK(FACTOR))),
    Method(
        "by parts",
        "NTK by parts, factor 4: YaRN without its attention factor",
        _fixed_plan(lambda trained: schemes.YaRN(FACTOR, trained, attention_factor=1.0)),
    ),
    Method(
        "Llama 3",
        "Llama 3's scaling, factor 4, blended between 1 and 4 turns: like by parts, with another ramp",
        _fixed_plan(lambda trained: schemes.Llama3(FACTOR, 1.0, 4.0, trained)),
    ),
    Method("YaRN", "YaRN, factor 4", _fixed_plan(lambda trained: schemes.YaRN(FACTOR, trained))),
    Method(
        "PI dynamic", "position interpolation, factor n / trained", _dynamic_plan(lambda s, trained: schemes.Linear(s))
    ),
    Method("NTK dynamic", "dynamic NTK, factor 1: alpha is n / trained", _ntk_dynamic),
    Method("YaRN dynamic", "YaRN, factor n / trained", _dynamic_plan(schemes.YaRN)),
    Method(
        "Self-Extend",
        "Self-Extend, window trained / 4, the smallest group that keeps every distance below the trained length",
        _self_extend,
    ),
)
"""Methods for a trained model without fine-tuning."""


def _larger_base(rope: Rope, trained: int, n: int) -> Rope:
    return dataclasses.replace(rope, base=LARGER_BASE * rope.base)


TUNES = (
    *(method for method in METHODS if method.name in ("none", "PI", "NTK", "YaRN")),
    Method(
        "larger base",
        "base times 50, which is NTK with alpha 39: far more than the factor 4 of the others",
        _larger_base,
    ),
)
"""Methods for fine-tunes, which are trained and measured with the same rope. All are fixed."""

BASELINES = {
    "learned": "a learned vector for each absolute position; those beyond the trained length keep their initial values",
    "sinusoidal": "the sines and cosines of the first Transformer, added to the embeddings",
    "no positions": "nothing but the causal mask",
}
"""Models that are trained without rotation: name → how the model gets positions."""
