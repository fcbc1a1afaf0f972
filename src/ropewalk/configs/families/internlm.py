"""InternLM (version 1): some of its configs have the base and the scaling in an object with the key `rotary`.

Source: modeling_internlm.py of internlm-chat-7b and internlm-20b.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ropewalk._checks import nearest, short_key, shown
from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.fields import ConfigValue
from ropewalk.configs.layers import ALL
from ropewalk.configs.reader import Reader

_KEYS = {"base": "rope_theta", "type": "rope_type", "scaling_factor": "factor"}


@dataclass(frozen=True)
class InternLM(Architecture):
    """The `Architecture` of InternLM.

    `rotary.type` is "origin" (no scaling) or "dynamic", whose factor is 1 by default.
    """

    def collect(self, c: Reader, name: str, kind: Kind, layers: list[str]) -> dict[str, ConfigValue]:
        """Collect the keys that define the rope, including those in `rotary`."""
        rope_keys = super().collect(c, name, kind, layers)
        rotary = c.fields.get("rotary")
        if rotary is None:
            return rope_keys
        if not isinstance(rotary, Mapping):
            raise c.fields.error(
                "rotary", "must be an object or null", shown(rotary), "Write an object with the keys base and type."
            )
        for key, value in rotary.items():
            where = f"rotary.{short_key(key)}"
            if key not in _KEYS:
                fix = f"The model's own code reads no other key.{nearest(str(key), _KEYS)}"
                raise c.fields.error(where, f"must be one of {', '.join(_KEYS)}", shown(value), fix)
            c.add(rope_keys, _KEYS[key], "default" if (key, value) == ("type", "origin") else value, where)
        if rope_keys.get("rope_type", ConfigValue("", "")).value == "dynamic":
            rope_keys.setdefault("factor", ConfigValue(1.0, f"implied by {self.name_and_source(c)}"))
        else:
            rope_keys.pop("factor", None)
        return rope_keys


MODELS = {
    "internlm": InternLM(
        source="modeling_internlm.py of internlm-chat-7b and internlm-20b",
        in_transformers=False,
        kinds={ALL: Kind(implied_base=10_000.0)},
    )
}
