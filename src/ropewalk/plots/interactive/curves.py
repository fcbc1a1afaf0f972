"""The ropes that the explorer draws: each distinct rope of each model, resolved to a length where it depends on one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from ropewalk import ModelRopes, Rope, _checks
from ropewalk.plots.figure import scheme

WHO = "plots.explorer"
_USUAL_LENGTH = 131_072


@dataclass(frozen=True)
class Curve:
    """A static rope of a model, with what its labels say.

    Args:
        model: the name of the model.
        part: which of its ropes this is; "" where it has one.
        rope: the frequencies, resolved.
        scheme: what the scaling is called, before it was resolved.
        layers: how many layers have it, in words; "" where the model does not say.
        trained: tokens the model was trained on before scaling, or None.
        longest: the longest sequence to draw, in tokens.
        limit: the length that the frequencies were resolved for, in tokens; None where they do not depend on one.
        axis_names: what the axes of the rope are; () for one axis.
        unit: what a position counts: "token", or "patch" in a vision tower.
    """

    model: str
    part: str
    rope: Rope
    scheme: str
    layers: str = ""
    trained: int | None = None
    longest: int = _USUAL_LENGTH
    limit: int | None = None
    axis_names: tuple[str, ...] = ()
    unit: str = "token"

    @property
    def label(self) -> str:
        """The model and, where it has several ropes, the part."""
        return f"{self.model}: {self.part}" if self.part else self.model


def curves_of(
    models: Mapping[str, Rope | ModelRopes], length: int | None, trained_length: int | None
) -> tuple[list[Curve], list[Curve]]:
    """Every rope to draw over tokens, and those of vision towers, in the order of `models`.

    Raises:
        RopeError: `models` maps other things than names to ropes, or nothing in it rotates tokens.
    """
    tokens: list[Curve] = []
    towers: list[Curve] = []
    must = "models must map names to Rope or ModelRopes objects"
    if not isinstance(models, Mapping) or not all(isinstance(name, str) for name in models):
        raise _checks.error(WHO, must, _checks.shown(models), 'Pass a dict such as {"my model": rope}.')
    for name, model in models.items():
        if isinstance(model, Rope):
            tokens += _of_rope(name, model, length, trained_length)
        elif isinstance(model, ModelRopes):
            tokens += _of_model(name, model, length, trained_length)
            towers += _of_tower(name, model)
        else:
            raise _checks.error(WHO, must, _checks.shown(model), "Pass what from_config returned.")
    if not tokens:
        got = "no layer that rotates" if models else "none"
        raise _checks.error(WHO, "models must have a rope for text tokens", got, "Pass a model that rotates.")
    return tokens, towers


def _of_rope(name: str, rope: Rope, length: int | None, trained: int | None) -> list[Curve]:
    trained = (None if rope.scaling is None else rope.scaling.trained_length(None)) or trained
    return _resolved(Curve(name, "", rope, _scheme(rope), "", trained, length or max(_USUAL_LENGTH, trained or 1)))


def _of_model(name: str, model: ModelRopes, length: int | None, trained: int | None) -> list[Curve]:
    trained = model.trained_length or trained
    longest = length or max(model.max_position_embeddings or trained or _USUAL_LENGTH, trained or 1)
    ropes: list[tuple[str, str, Rope]] = []
    groups = [(rope, layers) for rope, layers in model.groups() if rope is not None]
    for rope, layers in groups:
        part = _part(model, layers) if len(groups) > 1 else ""
        ropes.append((part, f"{len(layers)} of {len(model.layers)}", rope))
    ropes += [(other, "", rope) for other, rope in model.extra_ropes.items()]
    curves: list[Curve] = []
    for part, layers_said, rope in _merged(ropes):
        names = model.axis_names if rope.axes is not None else ()
        curves += _resolved(Curve(name, part, rope, _scheme(rope), layers_said, trained, longest, axis_names=names))
    return curves


def _scheme(rope: Rope) -> str:
    """The name of the scaling, and its factor where it has one."""
    factor = None if rope.scaling is None else rope.scaling.facts().get("factor")
    return scheme(rope) if factor is None else f"{scheme(rope)}, factor {factor:g}"


def _part(model: ModelRopes, layers: list[int]) -> str:
    """The kind of these layers where they are of one, and else their numbers."""
    kinds = {model.layer_kinds[i] for i in layers} if model.layer_kinds else set()
    if len(kinds) == 1 and (kind := kinds.pop()) != "all":
        return f"{kind.removesuffix('_attention').replace('_', ' ')} attention"
    runs = groupby(enumerate(layers), lambda pair: pair[1] - pair[0])
    spans = [[layer for _, layer in run] for _, run in runs]
    shown = ", ".join(str(s[0]) if len(s) == 1 else f"{s[0]}–{s[-1]}" for s in spans[:4])
    return f"layer{'s' if len(layers) > 1 else ''} {shown}{' …' if len(spans) > 4 else ''}"


def _merged(ropes: Iterable[tuple[str, str, Rope]]) -> list[tuple[str, str, Rope]]:
    """One entry for ropes that rotate alike: those that differ in pairing or place in the head look the same here."""
    found: dict[Rope, list[tuple[str, str, Rope]]] = {}
    for entry in ropes:
        rope = entry[2]
        alike = replace(rope, head_dim=rope.rotary_dim, rotary_offset=0, pairing="half")
        found.setdefault(alike, []).append(entry)
    if len(found) == 1:
        return [("", *next(iter(found.values()))[0][1:])]
    return [(" and ".join(part or "attention" for part, _, _ in same), *same[0][1:]) for same in found.values()]


def _resolved(curve: Curve) -> list[Curve]:
    """The curve itself, or where its frequencies depend on the length, one at each end of the range."""
    if curve.rope.is_static:
        return [curve]
    lengths = sorted({min(curve.trained or curve.longest, curve.longest), curve.longest})
    joined = f"{curve.part}, " if curve.part else ""
    at = [
        replace(curve, part=f"{joined}up to {n:,} tokens", rope=curve.rope.at_length(n), longest=n, limit=n)
        for n in lengths
    ]
    return [replace(at[0], part=curve.part)] if len(at) == 1 else at


def _of_tower(name: str, model: ModelRopes) -> list[Curve]:
    if model.vision is None:
        return []
    count = len(model.vision.ropes)
    return [
        Curve(
            name,
            "vision tower" if count == 1 else f"vision tower, rope {number} of {count}",
            rope,
            _scheme(rope),
            axis_names=model.vision.axis_names,
            unit="patch",
        )
        for number, rope in enumerate(model.vision.ropes, start=1)
        if rope.axes is not None
    ]
