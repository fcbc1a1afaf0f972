"""Multi-head latent attention, in which only the last channels of a head rotate.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; transformers 5.23 models/deepseek_v2, deepseek_v3 and deepseek_v32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.fields import Given
from ropewalk.configs.reader import Reader
from ropewalk.rope import Rope
from ropewalk.schemes import Scaling


@dataclass(frozen=True)
class Latent(Architecture):
    """Multi-head latent attention: a head is qk_nope_head_dim + qk_rope_head_dim channels, and the last of them rotate.

    Args:
        indexer: pairing of a second rope in each layer (DeepSeek-V3.2's indexer); None where there is none.
        prefixes: kind of layer → what stands before the keys of the sizes of its heads.
    """

    indexer: str | None = None
    prefixes: Mapping[str, str] = field(default_factory=dict)

    def pairing_of(self, c: Reader) -> str:
        """Half where rope_interleave is false."""
        return self.pairing if c.fields.boolean("rope_interleave", True) else "half"

    def shape(
        self, c: Reader, name: str, kind: Kind, given: dict[str, Given], scheme: Scaling | None, layers: list[str]
    ) -> tuple[int, int, int]:
        """Channels of a head before the rotated ones, and the rotated ones."""
        c.origins["head_dim"] = "qk_nope_head_dim + qk_rope_head_dim"
        c.origins["rotary_dim"] = "qk_rope_head_dim, the last of the head"
        prefix = "" if c.fields.has("per_layer_config") else self.prefixes.get(name, "")
        before, rotated = f"{prefix}qk_nope_head_dim", f"{prefix}qk_rope_head_dim"
        still = c.own_size(name, layers, "qk_nope_head_dim") or c.fields.size(before)
        if prefix and not c.fields.has(rotated):
            key = f"{prefix}head_dim"
            whole = c.fields.size(key)
            if whole <= still:
                cure = "The channels that are left rotate."
                raise c.fields.error(key, f"it must be more than {before}={still}", str(whole), cure)
            return whole, whole - still, still
        turned = c.own_size(name, layers, "qk_rope_head_dim") or c.fields.size(rotated)
        return still + turned, turned, still

    def says_share(self, config: Mapping[str, object]) -> bool:
        """Never: two sizes say it."""
        return False

    def keys(self) -> set[str]:
        """The sizes of heads, too, with each prefix."""
        names = ("v_head_dim", "qk_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "head_dim")
        sizes = {prefix + name for prefix in ("", *self.prefixes.values()) for name in names}
        return super().keys() | sizes | {"rope_interleave"}

    def others(self, c: Reader, name: str, rope: Rope) -> dict[str, Rope]:
        """The indexer's, in layers without a prefix."""
        if self.indexer is None or name in self.prefixes:
            return {}
        return c.indexer(rope, self.indexer, trailing=False, source=self.known_by(c))

    def softmax_factor(self, c: Reader, schemes: list[Scaling]) -> float:
        """m(mscale_all_dim)²."""
        factor = max((scheme.softmax_factor for scheme in schemes), default=1.0)
        if not math.isfinite(factor):
            cure = "Models have 0.1 to 1."
            raise c.fields.error("mscale_all_dim", "its square must be finite", "one that is not", cure)
        return factor
