"""DeepSeek-V4: the last channels of q, k and v rotate, and layers with compressed attention have their own base.

Source: transformers models/deepseek_v4; configs of its quantised copies ("deepseek_ref", llm-compressor's).
"""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk.configs.architecture import Architecture
from ropewalk.configs.families.latent import read_indexer
from ropewalk.configs.layers import Kind
from ropewalk.configs.reader import ConfigValue, Reader
from ropewalk.rope.rope import Rope
from ropewalk.schemes import Scaling

_OWN_SECTION = "compress_rope_parameters"
COMPRESSED = Kind(bases=("compress_rope_theta",), section="compress")
"""The kind of layers with compressed attention."""


@dataclass(frozen=True)
class DeepSeekV4(Architecture):
    """The `Architecture` of DeepSeek-V4, in which the last channels of a head rotate.

    If `rope_parameters` has no objects for kinds of layers, the attention factor of YaRN is 1 by default.
    """

    def choose_sections(self, c: Reader) -> None:
        """Drop the base and the fraction of a section without objects for kinds of layers, which are not read there."""
        super().choose_sections(c)
        for section in () if c.strict or c.nested else tuple(c.sections):
            values = c.sections[section]
            unread = {key: values[key] for key in ("rope_theta", "partial_rotary_factor") if key in values}
            c.sections[section] = {key: value for key, value in values.items() if key not in unread}
            c.lost_base = c.lost_base or (unread.get("rope_theta") is not None and not c.has("rope_theta"))
            lost = {f"{section}.{key}": value for key, value in unread.items() if value != c.get(key)}
            c.warn_of_unread(lost, "these keys at the top level")

    def collect(self, c: Reader, name: str, kind: Kind) -> dict[str, ConfigValue]:
        """Collect the keys that define the rope of a kind of layer.

        For layers with compressed attention, llm-compressor writes these keys to `compress_rope_parameters`.
        """
        if kind is COMPRESSED and c.has(_OWN_SECTION):
            rope_keys: dict[str, ConfigValue] = {}
            c.add(rope_keys, "rope_theta", c.get("compress_rope_theta"), "compress_rope_theta")
            c.sections[_OWN_SECTION] = c.section(_OWN_SECTION)
            c.add_flat(rope_keys, _OWN_SECTION, scaled=True, with_base=True)
            del c.sections[_OWN_SECTION]
        else:
            rope_keys = super().collect(c, name, kind)
        if kind is COMPRESSED and not c.nested and rope_keys.get("rope_type", ConfigValue("", "")).value == "yarn":
            implied = f"implied by {c.get('model_type')} ({self.source})"
            rope_keys.setdefault("attention_factor", ConfigValue(1.0, implied))
        return rope_keys

    def shape(
        self, c: Reader, name: str, kind: Kind, rope_keys: dict[str, ConfigValue], scheme: Scaling | None
    ) -> tuple[int, int, int]:
        head_dim, rotary_dim, _ = super().shape(c, name, kind, rope_keys, scheme)
        c.origins["rotary_dim"] = f"{c.origins['rotary_dim'].partition(',')[0]}, the last of the head"  # of each kind
        return head_dim, rotary_dim, head_dim - min(rotary_dim, head_dim)

    def extra_ropes(self, c: Reader, name: str, rope: Rope) -> dict[str, Rope]:
        if name != "compressed_sparse_attention":
            return {}
        return read_indexer(c, rope, "interleaved", rotates_tail=True, source=self.name_and_source(c))
