"""DeepSeek-V4: the last channels of q, k and v rotate, and layers with compressed attention have their own base.

Source: transformers 5.23 models/deepseek_v4; configs of its quantised copies ("deepseek_ref", llm-compressor's).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.fields import ConfigValue
from ropewalk.configs.indexer import read_indexer
from ropewalk.configs.layers import LayerCodes
from ropewalk.configs.reader import Reader
from ropewalk.rope.rope import Rope
from ropewalk.schemes import Scaling

_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_OWN_SECTION = "compress_rope_parameters"
_COMPRESSED = Kind(bases=("compress_rope_theta",), section="compress")


@dataclass(frozen=True)
class DeepSeekV4(Architecture):
    """The `Architecture` of DeepSeek-V4, in which the last channels of a head rotate.

    If `rope_parameters` has no objects for kinds of layers, the attention factor of YaRN is 1 by default.
    """

    rotates_values = True

    def collect(self, c: Reader, name: str, kind: Kind, layers: list[str]) -> dict[str, ConfigValue]:
        """Collect the keys that define the rope of a kind of layer.

        For layers with compressed attention, llm-compressor writes these keys to `compress_rope_parameters`.
        """
        if kind is _COMPRESSED and c.fields.has(_OWN_SECTION):
            rope_keys: dict[str, ConfigValue] = {}
            c.add(rope_keys, "rope_theta", c.fields.get("compress_rope_theta"), "compress_rope_theta")
            c.sections[_OWN_SECTION] = c.section(_OWN_SECTION)
            c.add_flat(rope_keys, _OWN_SECTION, scaled=True, with_base=True)
            del c.sections[_OWN_SECTION]
        else:
            rope_keys = super().collect(c, name, kind, layers)
        if kind is _COMPRESSED and not c.nested and rope_keys.get("rope_type", ConfigValue("", "")).value == "yarn":
            implied = f"implied by {c.fields.get('model_type')} ({self.source})"
            rope_keys.setdefault("attention_factor", ConfigValue(1.0, implied))
        return rope_keys

    def shape(
        self,
        c: Reader,
        name: str,
        kind: Kind,
        rope_keys: dict[str, ConfigValue],
        scheme: Scaling | None,
        layers: list[str],
    ) -> tuple[int, int, int]:
        """Return head_dim, rotary_dim and the rotary_offset with which the last channels rotate."""
        head_dim, rotary_dim, _ = super().shape(c, name, kind, rope_keys, scheme, layers)
        c.origins["rotary_dim"] += ", the last of the head"
        return head_dim, rotary_dim, head_dim - min(rotary_dim, head_dim)

    def extra_ropes(self, c: Reader, name: str, rope: Rope) -> dict[str, Rope]:
        """Return the rope of the indexer, which only layers of the kind "compressed_sparse_attention" have."""
        if name != _SPARSE:
            return {}
        return read_indexer(c, rope, "interleaved", rotates_tail=True, source=self.name_and_source(c))


_V4 = DeepSeekV4(
    source="transformers 5.23 models/deepseek_v4",
    pairing="interleaved",
    head_dim_divides=False,
    partial=0.125,
    dim_key="qk_rope_head_dim",
    kinds={_SLIDING: Kind(scaled=False, section="main"), _SPARSE: _COMPRESSED, _HEAVY: _COMPRESSED},
    pattern=LayerCodes("compress_ratios", {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}),
)
MODELS = {
    "deepseek_v4": _V4,
    # The configs of SGLang's copies, which omit keys that equal the defaults of the class in transformers.
    "deepseek_ref": replace(
        _V4, kinds={**_V4.kinds, _SLIDING: Kind(implied_base=10_000.0, scaled=False, section="main")}
    ),
}
