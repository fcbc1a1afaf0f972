"""Granite with sliding windows: its config has a list with the base of each layer, or 0 if the layer does not rotate.

Source: transformers 5.23 models/granite_swa, models/granitemoe_swa.
"""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.fields import ConfigValue, Fields
from ropewalk.configs.layers import ALL, NoRopeLayers
from ropewalk.configs.reader import Reader

_KEY = "layer_rope_theta"


@dataclass(frozen=True)
class BaseOfEachLayer(NoRopeLayers):
    """A config key with a list of bases, in which 0 marks the layers that do not rotate."""

    def without_list(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str]:
        """Return the same kind for all layers: without the list, all of them rotate."""
        return [ALL] * count


@dataclass(frozen=True)
class GraniteSWA(Architecture):
    """The `Architecture` of Granite with sliding windows. All layers that rotate must have the same base."""

    def collect(self, c: Reader, name: str, kind: Kind, layers: list[str]) -> dict[str, ConfigValue]:
        """Collect the keys that define the rope, including the bases in the list `layer_rope_theta`."""
        rope_keys = super().collect(c, name, kind, layers)
        bases = c.fields.get(_KEY)
        for i, base in enumerate(bases if isinstance(bases, list) else []):
            c.add(rope_keys, "rope_theta", base or None, f"{_KEY}[{i}]")
        return rope_keys


MODELS = {
    name: GraniteSWA(source=f"transformers 5.23 models/{name}", pattern=BaseOfEachLayer(key=_KEY, interval_key=""))
    for name in ("granite_swa", "granitemoe_swa")
}
