"""Granite with sliding windows: a list with the base of each layer, 0 where it does not rotate.

Source: transformers 5.23 models/granite_swa, models/granitemoe_swa.
"""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.fields import Fields, Given
from ropewalk.configs.layers import ALL, NoRopeLayers
from ropewalk.configs.reader import Reader

_KEY = "layer_rope_theta"


@dataclass(frozen=True)
class Bases(NoRopeLayers):
    """Without the list all layers rotate by the base of the model."""

    def without_list(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str]:
        """All layers rotate."""
        return [ALL] * count


@dataclass(frozen=True)
class GraniteSWA(Architecture):
    """The entries of the list are bases, all the same but for 0."""

    def given(self, c: Reader, name: str, kind: Kind, layers: list[str]) -> dict[str, Given]:
        """What the list says, too."""
        given = super().given(c, name, kind, layers)
        bases = c.fields.get(_KEY)
        for i, base in enumerate(bases if isinstance(bases, list) else []):
            c.add(given, "rope_theta", base or None, f"{_KEY}[{i}]")
        return given


MODELS = {
    name: GraniteSWA(source=f"transformers 5.23 models/{name}", pattern=Bases(key=_KEY, interval_key=""))
    for name in ("granite_swa", "granitemoe_swa")
}
