"""ModelRopes: the ropes of a model, with methods that explain them and write them as a config."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ropewalk._checks import error, shown
from ropewalk._checks import length as checked_length
from ropewalk.configs.architecture import Architecture, HeadQueryScale, QueryScale
from ropewalk.configs.axes_rules import AxesRule
from ropewalk.configs.layers import Kind
from ropewalk.configs.models import ARCHITECTURES, name_of
from ropewalk.configs.reader import SECTIONS
from ropewalk.configs.source import to_plain
from ropewalk.rope.axes import Axes
from ropewalk.rope.rope import Rope

_Item = TypeVar("_Item", bound=Hashable)


@dataclass(frozen=True)
class VisionRopes:
    """The ropes of a vision tower, the part of a model that encodes images. All layers of the tower share them.

    Args:
        ropes: the ropes that are applied to q and k one after another, at the same positions. There is one, except in
            Gemma 4, which rotates each half of the head separately.
        axis_names: the names of the axes of the positions, in the order that `Rope.at` expects.
        positions: what the positions on these axes are, in words, and which tokens are not rotated.
        model_type: the model_type of the tower, from its config or implied by the whole config.
        source: the file or object that was read.
        origins: maps the name of a value, such as "base", to where it came from, in words.
        config: the part of the config that describes the tower. It is ignored in comparisons.
    """

    ropes: tuple[Rope, ...]
    axis_names: tuple[str, ...]
    positions: str
    model_type: str
    source: str
    origins: Mapping[str, str] = field(default_factory=dict, hash=False)
    config: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class ModelRopes:
    """The ropes of a model.

    Args:
        layers: one `Rope` for each layer, or None for a layer that does not rotate.
        model_type: the architecture, as the config names it.
        source: the file or object that was read.
        trained_length: the length in tokens that the model was trained on before scaling; None if it is not known.
        max_position_embeddings: the length in tokens that the config states, or None.
        extra_ropes: maps a name to a rope that layers have besides their own (DeepSeek-V3.2's "indexer"), or the key
            of another part of the model to its rope (Dia's "encoder_config").
        heads: the number of heads over whose channels each rope runs, if they rotate differently (LTX). Each head in
            turn has the next pairs of the rope, in its pairing. None if a rope is that of every head.
        softmax_factor: the factor of the attention's softmax scale, dimensionless (in DeepSeek, its mscale squared).
        query_scale: the factor that q is multiplied by in addition to the rotation, or None.
        output_order: "half" if the model's code reads interleaved pairs and writes them in half order (DeepSeek-V3).
            None if it writes each value to the channel that it was read from.
        rotates_values: whether the model rotates the values like the keys, and then rotates the output of the attention
            back by the position of the query (DeepSeek-V4, in which keys and values are the same).
        layer_kinds: the kind of each layer as the config names it ("sliding_attention"); () if all layers are alike.
        windows: for each layer a number of tokens that is greater than all distances between its q and k, such as its
            sliding window, or None if they are unbounded; () for no layer.
        axis_names: the names of the axes of the positions ("time", "height", "width"), in the order that `Rope.at`
            expects; () if tokens have one position. A text token has the same position on every axis.
        vision: the ropes of the vision tower; None if the model has no tower or ropewalk does not know it. If the
            config describes only a tower, `layers` is ().
        like: the model_type by whose rules an unknown `model_type` was read, or "".
        config: the config that was read, for `to_hf_config`. If it has another format, the sizes that the config.json
            of the same model states, or None if they are not known. It is ignored in comparisons.
        file_format: the format of the file in words if it is another one than that of Hugging Face or diffusers, or "".
        writer: what `to_hf_config` calls for another format; None for one of Hugging Face.
        origins: maps the name of a value, such as "base", to where it came from, in words.
        warnings: sentences for the user.
        stated_twice: the parameters of which the config states a value that transformers does not read.
    """

    layers: tuple[Rope | None, ...]
    model_type: str
    source: str
    trained_length: int | None = None
    max_position_embeddings: int | None = None
    extra_ropes: Mapping[str, Rope] = field(default_factory=dict, hash=False)
    heads: int | None = None
    softmax_factor: float = 1.0
    query_scale: QueryScale | HeadQueryScale | None = None
    output_order: str | None = None
    rotates_values: bool = False
    layer_kinds: tuple[str, ...] = ()
    windows: tuple[int | None, ...] = ()
    axis_names: tuple[str, ...] = ()
    vision: VisionRopes | None = None
    like: str = ""
    config: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)
    file_format: str = ""
    writer: Callable[[ModelRopes, int], dict[str, Any]] | None = field(default=None, repr=False, compare=False)
    origins: Mapping[str, str] = field(default_factory=dict, hash=False)
    warnings: tuple[str, ...] = ()
    stated_twice: frozenset[str] = frozenset()

    def groups(self) -> list[tuple[Rope | None, list[int]]]:
        """Return each distinct rope with the indices of its layers, in order of first appearance."""
        return list(indices_of(self.layers).items())

    def window(self, layer: int) -> int | None:
        """Return the window of a layer that rotates; None if it does not rotate, or if it is unbounded."""
        return self.windows[layer] if self.windows and self.layers[layer] is not None else None

    @property
    def rope(self) -> Rope:
        """The rope that all layers share.

        Raises:
            RopeError: the layers differ, or there are none because the config describes only a vision tower. The
                message names the attribute to use instead.
        """
        distinct = set(self.layers)
        if len(distinct) == 1 and (rope := self.layers[0]) is not None:
            return rope
        if not self.layers:
            raise error(self.source, "rope needs a text model", "only a vision tower", "Use .vision.ropes.")
        from ropewalk.configs.explain import ranges

        descriptions = "; ".join(f"layers {ranges(rows)}: {rope}" for rope, rows in self.groups())
        raise error(self.source, "rope must be the same in all layers", descriptions, "Use .layers[i].")

    def to_hf_config(self, *, version: int) -> dict[str, Any]:
        """Return the Hugging Face config that was read, with its rope keys in the schema of transformers 4 or 5.

        If the file has another format (GGUF, `params.json`), return the keys about rotation of the config.json of the
        same model, converted for transformers. Its pairing may differ, since converters permute q and k.

        Args:
            version: 4 for `rope_theta` and `rope_scaling`, or 5 for `rope_parameters`, which has an object for each
                layer type if layers differ.

        Returns:
            A new dict, from which `from_config` reads the same ropes.

        Raises:
            RopeError: the ropes were not read from a Hugging Face config and the file does not say enough to write one,
                or the schema cannot express them.
        """
        if type(version) is not int or version not in (4, 5):
            raise error(_WHO, "version must be 4 or 5", shown(version), "Pass the major version of transformers.")
        return write(self, version) if self.writer is None else self.writer(self, version)

    def facts(self, length: int | None = None) -> dict[str, Any]:
        """Return the content of `explain` as a dict of JSON values.

        Args:
            length: as in `explain`.
        """
        if length is not None:
            length = checked_length("explain", "length", length)
        windows = map(self.window, range(len(self.layers)))
        return {
            "source": self.source,
            "model_type": self.model_type,
            "layers": len(self.layers),
            "trained_length": self.trained_length,
            "max_position_embeddings": self.max_position_embeddings,
            "axis_names": list(self.axis_names),
            "length": length,
            "ropes": [
                {
                    "layers": rows,
                    "rope": None if rope is None else _rope_facts(rope, self.trained_length, length, window),
                }
                for (rope, window), rows in indices_of(zip(self.layers, windows, strict=True)).items()
            ],
            "vision": None if self.vision is None else _vision_facts(self.vision),
            "others": {
                name: _rope_facts(rope, self.trained_length if name == "indexer" else None, length)
                for name, rope in self.extra_ropes.items()
            },
            "heads": self.heads,
            "softmax_factor": self.softmax_factor,
            "query_scale": None if self.query_scale is None else dataclasses.asdict(self.query_scale),
            "output_order": self.output_order,
            "rotates_values": self.rotates_values,
            "origins": dict(self.origins),
            "warnings": list(self.warnings),
        }

    def explain(self, length: int | None = None) -> str:
        """Describe in words how fast the pairs rotate, which pairs a scheme slows, and where each value came from.

        Args:
            length: a length in tokens, at least 1. If it is passed, the text also describes sequences of that length.
        """
        from ropewalk.configs import explain

        return explain.text(self.facts(length))


def indices_of(items: Iterable[_Item]) -> dict[_Item, list[int]]:
    """Return the indices of each distinct item, in order of first appearance."""
    found: dict[_Item, list[int]] = {}
    for index, item in enumerate(items):
        found.setdefault(item, []).append(index)
    return found


def _vision_facts(vision: VisionRopes) -> dict[str, Any]:
    facts = {name: getattr(vision, name) for name in ("model_type", "source", "positions")}
    ropes = [_rope_facts(rope, None, None) for rope in vision.ropes]
    return {**facts, "axis_names": list(vision.axis_names), "ropes": ropes, "origins": dict(vision.origins)}


def _rope_facts(rope: Rope, trained: int | None, length: int | None, window: int | None = None) -> dict[str, Any]:
    scheme, resolved_at = rope.scaling, None
    far_trained, far = (None if n is None else min(n, window or n) for n in (trained, length))
    if not rope.is_static:
        resolved_at = length or trained or 1
        rope = rope.at_length(resolved_at)
    inv_freq, wavelength = rope.inv_freq.tolist(), rope.wavelength.tolist()
    unscaled = dataclasses.replace(rope, scaling=None).inv_freq.tolist()
    return {
        "scheme": {"rope_type": "default"} if scheme is None else scheme.facts(),
        "resolved_at_length": resolved_at,
        "base": rope.base,
        "pairing": rope.pairing,
        "head_dim": rope.head_dim,
        "rotary_dim": rope.rotary_dim,
        "rotary_offset": rope.rotary_offset,
        "axes": None if rope.axes is None else _axes_facts(rope.axes),
        "pairs": len(inv_freq),
        "attention_factor": rope.attention_factor,
        "inv_freq": inv_freq,
        # JSON has no infinity, so the wavelength of a pair that does not rotate is null.
        "wavelength": [w if math.isfinite(w) else None for w in wavelength],
        "slowed_by": [_ratio(before, after) for before, after in zip(unscaled, inv_freq, strict=True)],
        "window": window,
        "full_turns_when_trained": far_trained
        and sum(now > 0 and 2 * math.pi / w <= far_trained for w, now in zip(unscaled, inv_freq, strict=True)),
        "full_turns_at_length": far and sum(w <= far for w in wavelength),
    }


def _axes_facts(axes: Axes) -> dict[str, Any]:
    """Return the number of axes, their order as text, and the axis and frequency index of each pair."""
    facts = {"axis": list(axes.axis), "freq_index": list(axes.freq_index)}
    return {"count": axes.count, "pattern": repr(axes), **facts}


def _ratio(before: float, after: float) -> float | None:
    """Return the factor by which a scheme slows a pair, from its frequencies before and after scaling.

    Return None if the factor is infinite, because the scheme stops the pair.
    """
    ratio = abs(before / after) if after else math.inf
    return ratio if math.isfinite(ratio) else None


_WHO = "ModelRopes.to_hf_config"


def write(ropes: ModelRopes, version: int) -> dict[str, Any]:
    """Write a Hugging Face config, as `ModelRopes.to_hf_config` does."""
    if not ropes.layers:
        fix = "Keep the config that was read."
        raise error(_WHO, "the ropes must be those of a text model", f"{ropes.model_type}, a vision tower", fix)
    row = ARCHITECTURES.get(name_of(ropes.like or ropes.model_type, ropes.config or {}))
    if row is None or ropes.config is None:
        raise error(
            _WHO, "the ropes must come from a Hugging Face config", shown(ropes.model_type), "Write its config by hand."
        )
    if row.own_config or (version == 5 and not row.in_transformers):
        own = "Keep its own config.json: only its own code reads this model_type."
        fix = own if row.own_config else "Pass version=4: the model's own code reads those keys only."
        raise error(_WHO, "the model's code must be able to read the written config", ropes.model_type, fix)
    config = _without_rope_keys(ropes.config, row)
    first = dict(zip(reversed(ropes.layer_kinds), reversed(ropes.layers), strict=True))
    kinds = {name: (kind, first.get(name)) for name, kind in row.kinds.items() if kind is not None}
    rotating = {name: (kind, rope) for name, (kind, rope) in kinds.items() if rope is not None}
    if version == 5:
        parameters = {kind.section or name: _parameters(rope, row, ropes) for name, (kind, rope) in rotating.items()}
        scaled = [_parameters(rope, row, ropes) for kind, rope in rotating.values() if kind.scaled]
        config["rope_parameters"] = parameters if row.nested else next(iter([*scaled, *parameters.values()]), None)
    else:
        config.update(_version_4(rotating, row, ropes))
    if not rotating and row.null_base:
        config.update({"rope_theta": None} if version == 4 else {"rope_parameters": {"rope_theta": None}})
    return config


def _without_rope_keys(config: Any, row: Architecture) -> dict[str, Any]:
    drop = {*SECTIONS, *row.base_keys(), *row.partial_keys}
    return {key: to_plain(value, _WHO) for key, value in config.items() if key not in drop}


def _parameters(rope: Rope, row: Architecture, ropes: ModelRopes) -> dict[str, Any]:
    """Return the parameters of one kind of layer in the schema of transformers 5."""
    if rope.axes is not None and row.axes is None:
        raise error(_WHO, "this model_type must have ropes of one axis", repr(rope), "Write the sections by hand.")
    scheme = rope.scaling
    parameters = {"rope_theta": rope.base, **({"rope_type": "default"} if scheme is None else scheme.to_hf())}
    fraction = _fraction(rope, row, ropes)
    if fraction is not None:
        parameters["partial_rotary_factor"] = fraction
    if row.axes is not None:
        parameters.update(_sections(rope, row.axes, ropes))
    if ropes.query_scale is not None and ropes.query_scale.llama_4_scaling_beta is not None:
        parameters["llama_4_scaling_beta"] = ropes.query_scale.llama_4_scaling_beta
    return parameters


def _sections(rope: Rope, rule: AxesRule, ropes: ModelRopes) -> dict[str, Any]:
    """Return the keys of `rope_parameters` that assign the pairs of a rope to axes."""
    if rope.axes is None:  # read with text_only=True: the axes of the config stay
        keys, config = {*rule.keys, "mrope_interleaved"} - ropes.stated_twice, ropes.config or {}
        return {key: own[key] for section in SECTIONS if (own := config.get(section)) for key in keys & own.keys()}
    sections = rule.sections(rope.axes)
    if sections is None:
        must = f"the config of {ropes.model_type} must be able to express the axes"
        raise error(_WHO, must, repr(rope.axes), "Write its config by hand.")
    flag = {"mrope_interleaved": True} if rule.is_interleaved else {}
    return {rule.keys[0]: sections, **flag} if rule.keys else {}


def _fraction(rope: Rope, row: Architecture, ropes: ModelRopes) -> float | None:
    """Return partial_rotary_factor, or None if the config does not need it."""
    if not row.needs_fraction(ropes.config or {}) or (rope.scaling is not None and rope.scaling.whole_head):
        return None
    fraction = rope.rotary_dim / rope.head_dim
    return fraction if int(rope.head_dim * fraction) == rope.rotary_dim else math.nextafter(fraction, 1.0)


def _version_4(rotating: dict[str, tuple[Kind, Rope]], row: Architecture, ropes: ModelRopes) -> dict[str, Any]:
    """Return the keys about rotation in the schema of transformers 4: top-level keys and one `rope_scaling`.

    Raises:
        RopeError: the layers differ in a way that this schema cannot express.
    """
    config: dict[str, Any] = {}
    scalings = []
    for name, (kind, rope) in rotating.items():
        if kind.bases:
            key = kind.bases[-1 if "." in kind.bases[0] else 0]
            if config.setdefault(key, rope.base) != rope.base:
                raise error(_WHO, f"all layers must have the same {key}", "several", "Pass version=5.")
        elif kind.implied_base != rope.base:
            raise error(_WHO, "each kind of layer must have its own key for the base", name, "Pass version=5.")
        parameters = _parameters(rope, row, ropes)
        fraction = parameters.pop("partial_rotary_factor", None)
        if fraction is not None and row.partial_keys:
            config[row.partial_keys[0]] = fraction
        del parameters["rope_theta"]
        if kind.scaled:
            scalings.append(parameters)
        elif parameters != {"rope_type": "default"}:
            raise error(_WHO, f"layers of kind {name} must have no scaling", repr(rope), "Pass version=5.")
    if any(scaling != scalings[0] for scaling in scalings):
        raise error(_WHO, "all layers must have the same scaling", "several", "Pass version=5.")
    if scalings and scalings[0] != {"rope_type": "default"}:
        config["rope_scaling"] = scalings[0]
    return config
