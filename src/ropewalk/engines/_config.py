"""`ConfigRope`: one rope of a config, with everything that engines read for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ropewalk.rope.rope import Rope
from ropewalk.schemes import Scaling

SECTIONS = ("rope_scaling", "rope_parameters")
"""The objects of a config that may hold the parameters of a rope."""


@dataclass(frozen=True)
class ConfigRope:
    """One rope of a config, with the keys that engines read.

    Args:
        rope: the rope that `from_config` returns.
        model_type: the model_type of the text model.
        longest: the max_position_embeddings of the config, in tokens, or None.
        section: the keys and values of `rope_scaling` or `rope_parameters` for this rope.
        nested: whether `rope_parameters` has an object for each kind of layer.
        model: the model_type of the config. If it contains a text model, that of the text model follows after a slash.
        known: whether ropewalk has a row for the model_type of the text model.
        whole: the config as it was passed.
        values: the config of the text model, as it is in the whole config.
        kind: the kind of the layers, such as "sliding_attention".
        section_name: the key of this kind in nested `rope_parameters`.
        window: the window of the layers, in tokens, or None.
        layer: the index of the first of the layers.
        layers: the number of layers of the model.
        ropes: maps each kind of layer of the model to its rope, or to None if it does not rotate.
        file_format: the `ModelRopes.file_format`, if the file was converted to this config.
        stated_twice: the parameters of which the config states a value that transformers does not read.
        by_transformers: the same with the config as transformers reads it; None if it reads all that the file states.
    """

    rope: Rope
    model_type: str = ""
    longest: int | None = None
    section: Mapping[str, Any] = field(default_factory=dict)
    nested: bool = False
    model: str = ""
    known: bool = False
    whole: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""
    section_name: str = ""
    window: int | None = None
    layer: int = 0
    layers: int = 0
    ropes: Mapping[str, Rope | None] = field(default_factory=dict)
    by_transformers: ConfigRope | None = None
    stated_twice: frozenset[str] = frozenset()
    file_format: str = ""

    @property
    def several_axes(self) -> bool:
        """Whether tokens have several positions (M-RoPE)."""
        return self.rope.axes is not None or "mrope_section" in self.section

    def read_section(self) -> Mapping[str, Any]:
        """Return the object with rope parameters that transformers reads of the file for this rope, as it is there."""
        old, new = (self.values.get(name) or {} for name in SECTIONS)
        own = new.get(self.section_name)
        return {**own, **old} if isinstance(own, Mapping) else old or new

    def with_own_length(self) -> ConfigRope:
        """Return `by_transformers` with the trained length that the object with rope parameters states."""
        by, key = self.by_transformers or self, "original_max_position_embeddings"
        if key not in self.stated_twice or self.read_section().get(key) is None:
            return by
        section = {**by.section, key: self.read_section()[key]}
        return replace(by, section=section, values={**by.values, "rope_parameters": section})

    def as_transformers(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """Return a written config of this one with the keys that transformers has after it read this one.

        Transformers keeps the rotated fraction at the top level, and adds no fraction of 1 and no key of a scheme.
        """
        fraction = "partial_rotary_factor"
        values = {**written, **{key: value for key, value in self.values.items() if key == fraction}}
        known = {"rope_type", "rope_theta"}.union(
            self.stated_twice, self.values, *(self.values.get(name) or {} for name in SECTIONS)
        )
        parameters = values.get("rope_parameters") or {}
        kept = {k: v for k, v in parameters.items() if k in known or isinstance(v, Mapping)}
        if parameters.get(fraction, 1.0) != 1.0:
            kept[fraction] = parameters[fraction]
        return {**values, "rope_parameters": kept} if parameters else values

    @property
    def listed_base(self) -> object:
        """The base of the layer in `layer_rope_theta`, which lists one for each layer; None without it."""
        bases = self.values.get("layer_rope_theta")
        return bases[self.layer] if isinstance(bases, list) and self.layer < len(bases) else None

    def with_scaling(self, scaling: Scaling | None) -> Rope:
        """Return the rope with `scaling` as its scheme, or the rope itself if it already has this scheme."""
        return self.rope if scaling == self.rope.scaling else replace(self.rope, scaling=scaling)


def to_finite(value: object, default: float | None = None) -> float | None:
    """Convert a value of a config, which was not checked, to a finite float.

    Returns:
        The float, `default` if the value is None, or None if the value is not a finite number.
    """
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
