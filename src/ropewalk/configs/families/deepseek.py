"""DeepSeek-V4: heads that rotate at their end, values that rotate too, and compressed layers with a base of their own.

Source: transformers 5.23 models/deepseek_v4; configs of its quantised copies ("deepseek_ref", llm-compressor's).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.fields import Given
from ropewalk.configs.layers import Coded
from ropewalk.configs.reader import Reader
from ropewalk.rope import Rope
from ropewalk.schemes import Scaling

_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_OWN_SECTION = "compress_rope_parameters"
_COMPRESSED = Kind(bases=("compress_rope_theta",), section="compress")


@dataclass(frozen=True)
class DeepSeekV4(Architecture):
    """The last channels of the head rotate; YaRN has the attention factor 1 in a flat config."""

    rotates_values = True

    def given(self, c: Reader, name: str, kind: Kind, layers: list[str]) -> dict[str, Given]:
        """Compressed layers take the section that llm-compressor writes for them, where there is one."""
        if kind is _COMPRESSED and c.fields.has(_OWN_SECTION):
            given: dict[str, Given] = {}
            c.add(given, "rope_theta", c.fields.get("compress_rope_theta"), "compress_rope_theta")
            c.sections[_OWN_SECTION] = c.section(_OWN_SECTION)
            c.add_flat(given, _OWN_SECTION, scaled=True, based=True)
            del c.sections[_OWN_SECTION]
        else:
            given = super().given(c, name, kind, layers)
        if kind is _COMPRESSED and not c.nested and given.get("rope_type", Given("", "")).value == "yarn":
            implied = f"implied by {c.fields.get('model_type')} ({self.source})"
            given.setdefault("attention_factor", Given(1.0, implied))
        return given

    def shape(
        self, c: Reader, name: str, kind: Kind, given: dict[str, Given], scheme: Scaling | None, layers: list[str]
    ) -> tuple[int, int, int]:
        """The last channels rotate."""
        head_dim, rotary_dim, _ = super().shape(c, name, kind, given, scheme, layers)
        c.origins["rotary_dim"] += ", the last of the head"
        return head_dim, rotary_dim, head_dim - min(rotary_dim, head_dim)

    def others(self, c: Reader, name: str, rope: Rope) -> dict[str, Rope]:
        """The indexer of sparse layers."""
        if name != _SPARSE:
            return {}
        return c.indexer(rope, "interleaved", trailing=True, source=self.known_by(c))


_V4 = DeepSeekV4(
    source="transformers 5.23 models/deepseek_v4",
    pairing="interleaved",
    head_dim_divides=False,
    partial=0.125,
    dim_key="qk_rope_head_dim",
    kinds={_SLIDING: Kind(scaled=False, section="main"), _SPARSE: _COMPRESSED, _HEAVY: _COMPRESSED},
    pattern=Coded("compress_ratios", {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}),
)
MODELS = {
    "deepseek_v4": _V4,
    # SGLang's copies, which leave out what the class of transformers has by default.
    "deepseek_ref": replace(
        _V4, kinds={**_V4.kinds, _SLIDING: Kind(implied_base=10_000.0, scaled=False, section="main")}
    ),
}
