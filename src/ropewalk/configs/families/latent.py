"""Multi-head latent attention: only the last channels of a head rotate.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; transformers 5.23 models/deepseek_v2, deepseek_v3 and deepseek_v32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.fields import ConfigValue
from ropewalk.configs.reader import Reader
from ropewalk.rope import Rope
from ropewalk.schemes import Scaling


@dataclass(frozen=True)
class Latent(Architecture):
    """Multi-head latent attention with heads of qk_nope_head_dim + qk_rope_head_dim channels, of which the last rotate.

    Args:
        indexer: pairing of a second rope in each layer (DeepSeek-V3.2's indexer); None if there is none.
        prefixes: maps a kind of layer to the prefix of the keys of its head sizes.
    """

    indexer: str | None = None
    prefixes: Mapping[str, str] = field(default_factory=dict)

    def pairing_of(self, c: Reader) -> str:
        """Return "half" if rope_interleave is false, else the pairing of the row."""
        return self.pairing if c.fields.boolean("rope_interleave", True) else "half"

    def shape(
        self,
        c: Reader,
        name: str,
        kind: Kind,
        collected: dict[str, ConfigValue],
        scheme: Scaling | None,
        layers: list[str],
    ) -> tuple[int, int, int]:
        """Return head_dim, rotary_dim and rotary_offset from the two sizes of a head."""
        c.origins["head_dim"] = "qk_nope_head_dim + qk_rope_head_dim"
        c.origins["rotary_dim"] = "qk_rope_head_dim, the last of the head"
        prefix = "" if c.fields.has("per_layer_config") else self.prefixes.get(name, "")
        unrotated_key, rotated_key = f"{prefix}qk_nope_head_dim", f"{prefix}qk_rope_head_dim"
        unrotated = c.own_size(name, layers, "qk_nope_head_dim") or c.fields.size(unrotated_key)
        if prefix and not c.fields.has(rotated_key):
            key = f"{prefix}head_dim"
            whole = c.fields.size(key)
            if whole <= unrotated:
                cure = "Check both sizes: the remaining channels rotate."
                raise c.fields.error(key, f"must be more than {unrotated_key}={unrotated}", str(whole), cure)
            return whole, whole - unrotated, unrotated
        rotated = c.own_size(name, layers, "qk_rope_head_dim") or c.fields.size(rotated_key)
        return unrotated + rotated, rotated, unrotated

    def needs_share(self, config: Mapping[str, object]) -> bool:
        """Return False, since two sizes determine the share."""
        return False

    def keys(self) -> set[str]:
        """Return the keys of the base class and the head sizes with each prefix."""
        names = ("v_head_dim", "qk_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "head_dim")
        sizes = {prefix + name for prefix in ("", *self.prefixes.values()) for name in names}
        return super().keys() | sizes | {"rope_interleave"}

    def extra_ropes(self, c: Reader, name: str, rope: Rope) -> dict[str, Rope]:
        """Return the rope of the indexer, for layers without a prefix."""
        if self.indexer is None or name in self.prefixes:
            return {}
        return c.indexer(rope, self.indexer, rotates_tail=False, source=self.name_and_source(c))

    def softmax_factor(self, c: Reader, schemes: list[Scaling]) -> float:
        """Return m(mscale_all_dim)²."""
        factor = max((scheme.softmax_factor for scheme in schemes), default=1.0)
        if not math.isfinite(factor):
            cure = "Released models have 0.1 to 1."
            raise c.fields.error("mscale_all_dim", "must give a finite softmax factor", "infinity", cure)
        return factor
