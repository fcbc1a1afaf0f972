"""InternLM, the first: some of its files have base and scaling in an object of their own, `rotary`.

Source: modeling_internlm.py of internlm-chat-7b and internlm-20b.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ropewalk._checks import nearest, short, shown
from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.fields import Given
from ropewalk.configs.layers import ALL
from ropewalk.configs.reader import Reader

_KEYS = {"base": "rope_theta", "type": "rope_type", "scaling_factor": "factor"}


@dataclass(frozen=True)
class InternLM(Architecture):
    """`rotary.type` is "origin" or "dynamic", whose factor is 1 where none is given."""

    def given(self, c: Reader, name: str, kind: Kind, layers: list[str]) -> dict[str, Given]:
        """What `rotary` says, too."""
        given = super().given(c, name, kind, layers)
        rotary = c.fields.get("rotary")
        if rotary is None:
            return given
        if not isinstance(rotary, Mapping):
            raise c.fields.error("rotary", "it must be an object or null", shown(rotary), "Is it of another model?")
        for key, value in rotary.items():
            where = f"rotary.{short(key)}"
            if key not in _KEYS:
                cure = f"Its code reads no other.{nearest(str(key), _KEYS)}"
                raise c.fields.error(where, f"it must be one of {', '.join(_KEYS)}", shown(value), cure)
            c.add(given, _KEYS[key], "default" if (key, value) == ("type", "origin") else value, where)
        if given.get("rope_type", Given("", "")).value == "dynamic":
            given.setdefault("factor", Given(1.0, f"implied by {self.known_by(c)}"))
        else:
            given.pop("factor", None)
        return given


MODELS = {
    "internlm": InternLM(
        source="modeling_internlm.py of internlm-chat-7b and internlm-20b",
        in_transformers=False,
        kinds={ALL: Kind(implied_base=10_000.0)},
    )
}
