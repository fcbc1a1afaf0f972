"""Granite with sliding windows: a list with the base of each layer, and 0 for layers that do not rotate.

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
class Bases(NoRopeLayers):
    """Without the list, all layers rotate with the base of the model."""

    def without_list(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str]:
        """Return one kind, which rotates, for all layers."""
        return [ALL] * count


@dataclass(frozen=True)
class GraniteSWA(Architecture):
    """The entries of the list are bases, which must be equal except for 0."""

    def collect(self, c: Reader, name: str, kind: Kind, layers: list[str]) -> dict[str, ConfigValue]:
        """Return the rope keys, including the bases in the list."""
        collected = super().collect(c, name, kind, layers)
        bases = c.fields.get(_KEY)
        for i, base in enumerate(bases if isinstance(bases, list) else []):
            c.add(collected, "rope_theta", base or None, f"{_KEY}[{i}]")
        return collected


MODELS = {
    name: GraniteSWA(source=f"transformers 5.23 models/{name}", pattern=Bases(key=_KEY, interval_key=""))
    for name in ("granite_swa", "granitemoe_swa")
}
