"""Step 3.5: bases and shares in lists with an entry for each layer.

Source: transformers 5.23 models/step3p7; config.json of Step-3.5-Flash.
"""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.fields import Given
from ropewalk.configs.reader import TRAINED, Reader

_FULL, _SLIDING = "full_attention", "sliding_attention"
_LISTED = {
    "rope_theta": ("rope_theta",),
    "partial_rotary_factor": ("partial_rotary_factor", "partial_rotary_factors"),
}


@dataclass(frozen=True)
class Step(Architecture):
    """A key may hold one value, or that of each layer."""

    def given(self, c: Reader, name: str, kind: Kind, layers: list[str]) -> dict[str, Given]:
        """What the lists say about these layers, and then what the sections say."""
        given: dict[str, Given] = {}
        for key, places in _LISTED.items():
            for place in places:
                if not isinstance(c.fields.get(place), list):
                    c.add(given, key, c.fields.get(place), place)
                    continue
                for i, value in enumerate(c.fields.listed(place, len(layers)) or []):
                    if layers[i] == name:
                        c.add(given, key, value, f"{place}[{i}]")
        c.add(given, TRAINED, c.fields.get(TRAINED), TRAINED)
        self.add_sections(c, given, name, kind)
        return given


MODELS = {
    "step3p5": Step(
        source="transformers 5.23 models/step3p7",
        head_dim_divides=False,
        partial=1.0,
        kinds={_FULL: Kind(), _SLIDING: Kind(scaled=False)},
        partial_keys=_LISTED["partial_rotary_factor"],
        fixed={"yarn_only_types": ([_FULL], "Other layers are scaled")},
    )
}
