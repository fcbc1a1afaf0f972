"""Step 3.5: the base and the fraction of the head that rotates may be lists with an entry for each layer.

Source: transformers 5.23 models/step3p7; config.json of Step-3.5-Flash.
"""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.fields import ConfigValue
from ropewalk.configs.reader import TRAINED, Reader

_FULL, _SLIDING = "full_attention", "sliding_attention"
_LISTED = {
    "rope_theta": ("rope_theta",),
    "partial_rotary_factor": ("partial_rotary_factor", "partial_rotary_factors"),
}


@dataclass(frozen=True)
class Step(Architecture):
    """The `Architecture` of Step 3.5.

    The base and the rotated fraction each have one value for all layers, or a list with a value for each layer.
    """

    def collect(self, c: Reader, name: str, kind: Kind, layers: list[str]) -> dict[str, ConfigValue]:
        """Collect the keys that define the rope of a kind of layer, including the entries of its layers in lists."""
        rope_keys: dict[str, ConfigValue] = {}
        for key, config_keys in _LISTED.items():
            for config_key in config_keys:
                if not isinstance(c.fields.get(config_key), list):
                    c.add(rope_keys, key, c.fields.get(config_key), config_key)
                    continue
                for i, value in enumerate(c.fields.layer_list(config_key, len(layers)) or []):
                    if layers[i] == name:
                        c.add(rope_keys, key, value, f"{config_key}[{i}]")
        c.add(rope_keys, TRAINED, c.fields.get(TRAINED), TRAINED)
        self.add_sections(c, rope_keys, name, kind)
        return rope_keys


MODELS = {
    "step3p5": Step(
        source="transformers 5.23 models/step3p7",
        head_dim_divides=False,
        partial=1.0,
        kinds={_FULL: Kind(), _SLIDING: Kind(scaled=False)},
        partial_keys=_LISTED["partial_rotary_factor"],
        fixed={"yarn_only_types": ([_FULL], "scaling of other layers")},
    )
}
