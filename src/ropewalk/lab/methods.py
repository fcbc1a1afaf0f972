"""The methods that are compared: what a model trained on short sequences turns by when it reads n tokens.

A fixed method does the same at every length. A dynamic one takes the factor that the length needs, n / trained, and so
leaves sequences of up to the trained length as they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import ropewalk
from ropewalk import Rope, schemes
from ropewalk.lab.measure import Plan

FACTOR = 4.0
"""Of every fixed method; and the fine-tunes train on sequences so many times longer than the model has seen."""

LARGER_BASE = 50.0
"""By what the fine-tune with a larger base multiplies it: as Xiong et al. 2023, arXiv:2309.16039 (ABF)."""

_Choose = Callable[[Rope, int, int], Plan]


@dataclass(frozen=True)
class Method:
    """One way to read sequences longer than the trained ones.

    name: as it stands in tables. what: the same in words. plan: the trained rope, the trained length, and the length n
    to be read (both in tokens) → what these n tokens turn by.
    """

    name: str
    what: str
    plan: _Choose


def _fixed(scheme: Callable[[int], schemes.Scheme | None]) -> _Choose:
    """trained length → scheme, the same for every n."""
    return lambda rope, trained, n: dataclasses.replace(rope, scaling=scheme(trained))


def _dynamic(scheme: Callable[[float, int], schemes.Scheme]) -> _Choose:
    """Factor n / trained and trained length → scheme; none up to the trained length."""

    def plan(rope: Rope, trained: int, n: int) -> Rope:
        return rope if n <= trained else dataclasses.replace(rope, scaling=scheme(n / trained, trained))

    return plan


def _ntk_dynamic(rope: Rope, trained: int, n: int) -> Rope:
    return dataclasses.replace(rope, scaling=schemes.DynamicNTK(1.0, trained)).at_length(n)


def _self_extend(rope: Rope, trained: int, n: int) -> Plan:
    """Neighbours within a quarter of the trained length; the smallest group that leaves no distance untrained."""
    if n <= trained:
        return rope
    window = trained // 4
    group = next(g for g in range(2, n) if (n - 1) // g + window - window // g < trained)
    return ropewalk.SelfExtend(rope, group=group, window=window)


METHODS = (
    Method("none", "no scaling", _fixed(lambda trained: None)),
    Method("PI", "position interpolation, factor 4", _fixed(lambda trained: schemes.Linear(FACTOR))),
    Method("NTK", "NTK-aware, alpha 4", _fixed(lambda trained: schemes.NTK(FACTOR))),
    Method(
        "by parts",
        "NTK by parts, factor 4: YaRN without its attention factor",
        _fixed(lambda trained: schemes.YaRN(FACTOR, trained, attention_factor=1.0)),
    ),
    Method(
        "Llama 3",
        "Llama 3's scaling, factor 4, blended between 1 and 4 turns: by parts with another ramp",
        _fixed(lambda trained: schemes.Llama3(FACTOR, 1.0, 4.0, trained)),
    ),
    Method("YaRN", "YaRN, factor 4", _fixed(lambda trained: schemes.YaRN(FACTOR, trained))),
    Method("PI dynamic", "position interpolation, factor n / trained", _dynamic(lambda s, trained: schemes.Linear(s))),
    Method("NTK dynamic", "dynamic NTK, factor 1: alpha is n / trained", _ntk_dynamic),
    Method("YaRN dynamic", "YaRN, factor n / trained", _dynamic(schemes.YaRN)),
    Method(
        "Self-Extend",
        "Self-Extend, window trained / 4, the smallest group that keeps every distance below the trained length",
        _self_extend,
    ),
)
"""For a trained model that is left as it is."""


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
"""For fine-tunes, which train with what they are measured with; all fixed."""
