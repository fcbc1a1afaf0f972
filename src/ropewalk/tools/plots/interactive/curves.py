"""Select the ropes that the explorer draws: each distinct rope of each model, resolved if it depends on the length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from ropewalk import ModelRopes, Rope, _checks
from ropewalk.tools.diff.lengths import stated_length
from ropewalk.tools.plots.figure import scheme_name

WHO = "plots.explorer"
_DEFAULT_LENGTH = 131_072


@dataclass(frozen=True)
class Curve:
    """A static rope to draw, and the facts for its labels.

    Args:
        model: the name of the model.
        part: a name for this rope of the model, or "" if the model has only one rope.
        rope: the rope, resolved to a length if it depends on one.
        scheme: the name of the scheme of the rope before it was resolved.
        layers: how many layers use the rope, as in "6 of 36", or "" if that is unknown.
        trained: the trained length before scaling, in tokens, or None if it is unknown.
        window: a bound of the distances in all layers that use the rope, as in `ModelRopes.windows`.
        longest: the longest sequence to draw, in tokens.
        limit: the length to which the rope was resolved, in tokens. None if its frequencies never depended on a length.
        axis_names: the names of the rope's axes, or () for one axis.
        unit: the unit of positions: "token", or "patch" in the vision part of a model.
    """

    model: str
    part: str
    rope: Rope
    scheme: str
    layers: str = ""
    trained: int | None = None
    longest: int = _DEFAULT_LENGTH
    limit: int | None = None
    axis_names: tuple[str, ...] = ()
    unit: str = "token"
    window: int | None = None

    @property
    def label(self) -> str:
        """The name of the model, followed by the part if the model has several ropes."""
        return f"{self.model}: {self.part}" if self.part else self.model


def curves_of(
    models: Mapping[str, Rope | ModelRopes], length: int | None, trained_length: int | None
) -> tuple[list[Curve], list[Curve]]:
    """Return the curves of ropes for tokens, and the curves of ropes for patches, both in the order of `models`.

    The arguments are those of `explorer`.

    Raises:
        RopeError: `models` does not map names to ropes, or nothing in it rotates tokens.
    """
    tokens: list[Curve] = []
    towers: list[Curve] = []
    must = "models must map names to Rope or ModelRopes objects"
    if not isinstance(models, Mapping) or not all(isinstance(name, str) for name in models):
        raise _checks.error(WHO, must, _checks.shown(models), 'Pass a dict such as {"my model": rope}.')
    for name, model in models.items():
        if isinstance(model, Rope):
            tokens += _rope_curves(name, model, length, trained_length)
        elif isinstance(model, ModelRopes):
            tokens += _model_curves(name, model, length, trained_length)
            towers += _tower_curves(name, model)
        else:
            raise _checks.error(WHO, must, _checks.shown(model), "Pass the result of from_config.")
    if not tokens:
        got = "no layer that rotates" if models else "none"
        raise _checks.error(WHO, "models must have a rope for text tokens", got, "Pass a model that rotates.")
    return tokens, towers


def _rope_curves(name: str, rope: Rope, length: int | None, trained: int | None) -> list[Curve]:
    trained = (None if rope.scaling is None else rope.scaling.trained_length(None)) or trained
    return _resolve(Curve(name, "", rope, _scheme(rope), "", trained, length or max(_DEFAULT_LENGTH, trained or 1)))


def _model_curves(name: str, model: ModelRopes, length: int | None, trained: int | None) -> list[Curve]:
    trained = model.trained_length or trained
    longest = length or max(stated_length(model) or trained or _DEFAULT_LENGTH, trained or 1)
    ropes: list[tuple[str, str, Rope, int | None]] = []
    groups = [(rope, layers) for rope, layers in model.groups() if rope is not None]
    for rope, layers in groups:
        part = _part(model, layers) if len(groups) > 1 else ""
        windows = [window for window in map(model.window, layers) if window is not None]
        window = max(windows) if len(windows) == len(layers) else None
        ropes.append((part, f"{len(layers)} of {len(model.layers)}", rope, window))
    ropes += [(part, "", rope, None) for part, rope in model.extra_ropes.items()]
    curves: list[Curve] = []
    for part, layer_count, rope, window in _merge_equal(ropes):
        names = model.axis_names if rope.axes is not None else ()
        curve = Curve(name, part, rope, _scheme(rope), layer_count, trained, longest, axis_names=names, window=window)
        curves += _resolve(curve)
    return curves


def _scheme(rope: Rope) -> str:
    """Return the name of a rope's scheme, with the factor of the scheme if there is one."""
    factor = None if rope.scaling is None else rope.scaling.facts().get("factor")
    return scheme_name(rope) if factor is None else f"{scheme_name(rope)}, factor {factor:g}"


def _part(model: ModelRopes, layers: list[int]) -> str:
    """Name a group of layers by their kind of attention if all have the same kind, otherwise by their indices."""
    kinds = {model.layer_kinds[i] for i in layers} if model.layer_kinds else set()
    if len(kinds) == 1 and (kind := kinds.pop()) != "all":
        return f"{kind.removesuffix('_attention').replace('_', ' ')} attention"
    runs = groupby(enumerate(layers), lambda pair: pair[1] - pair[0])
    spans = [[layer for _, layer in run] for _, run in runs]
    shown = ", ".join(str(s[0]) if len(s) == 1 else f"{s[0]}–{s[-1]}" for s in spans[:4])
    return f"layer{'s' if len(layers) > 1 else ''} {shown}{' …' if len(spans) > 4 else ''}"


def _merge_equal(ropes: Iterable[tuple[str, str, Rope, int | None]]) -> list[tuple[str, str, Rope, int | None]]:
    """Merge ropes that look alike in the figures, because they differ only in pairing or in the rotated channels."""
    groups: dict[tuple[Rope, int | None], list[tuple[str, str, Rope, int | None]]] = {}
    for entry in ropes:
        rope = entry[2]
        key = replace(rope, head_dim=rope.rotary_dim, rotary_offset=0, pairing="half")
        groups.setdefault((key, entry[3]), []).append(entry)
    if len(groups) == 1:
        return [("", *next(iter(groups.values()))[0][1:])]
    return [(" and ".join(part or "attention" for part, *_ in entries), *entries[0][1:]) for entries in groups.values()]


def _resolve(curve: Curve) -> list[Curve]:
    """Return the curve itself if its rope is static, otherwise curves for the trained and for the longest length.

    If both lengths are equal, the result is one curve.
    """
    if curve.rope.is_static:
        return [curve]
    lengths = sorted({min(curve.trained or curve.longest, curve.longest), curve.longest})
    prefix = f"{curve.part}, " if curve.part else ""
    resolved = [
        replace(curve, part=f"{prefix}up to {n:,} tokens", rope=curve.rope.at_length(n), longest=n, limit=n)
        for n in lengths
    ]
    return [replace(resolved[0], part=curve.part)] if len(resolved) == 1 else resolved


def _tower_curves(name: str, model: ModelRopes) -> list[Curve]:
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
