"""Multi-head latent attention (MLA), in which only the last channels of a head rotate.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; transformers 5.23 models/deepseek_v2, deepseek_v3 and deepseek_v32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ropewalk.configs.architecture import Architecture
from ropewalk.configs.fields import ConfigValue
from ropewalk.configs.indexer import read_indexer
from ropewalk.configs.layers import Kind
from ropewalk.configs.reader import Reader
from ropewalk.rope.rope import Rope
from ropewalk.schemes import Scaling


@dataclass(frozen=True)
class Latent(Architecture):
    """The `Architecture` of a model with MLA.

    A head has qk_nope_head_dim unrotated channels, and then qk_rope_head_dim rotated channels.

    Args:
        indexer: the pairing of the indexer, a second attention in each layer (DeepSeek-V3.2); None if there is none.
        prefixes: maps a kind of layer to the prefix of the config keys that state its head sizes, e.g. "swa_".
    """

    indexer: str | None = None
    prefixes: Mapping[str, str] = field(default_factory=dict)

    def implied_pairing(self, c: Reader) -> str:
        """Return "half" if rope_interleave is false, else the field `pairing`."""
        return super().implied_pairing(c) if c.boolean("rope_interleave", True) else "half"

    def shape(
        self,
        c: Reader,
        name: str,
        kind: Kind,
        rope_keys: dict[str, ConfigValue],
        scheme: Scaling | None,
        layers: list[str],
    ) -> tuple[int, int, int]:
        c.origins["head_dim"] = "qk_nope_head_dim + qk_rope_head_dim"
        c.origins["rotary_dim"] = "qk_rope_head_dim, the last of the head"
        prefix = "" if c.has("per_layer_config") else self.prefixes.get(name, "")
        unrotated_key, rotated_key = f"{prefix}qk_nope_head_dim", f"{prefix}qk_rope_head_dim"
        unrotated = c.per_layer_size(name, layers, "qk_nope_head_dim") or c.channels(unrotated_key)
        if prefix and not c.has(rotated_key):
            key = f"{prefix}head_dim"
            whole = c.channels(key)
            if whole <= unrotated:
                fix = "Check both sizes: the remaining channels rotate."
                raise c.error(key, f"must be more than {unrotated_key}={unrotated}", str(whole), fix)
            return whole, whole - unrotated, unrotated
        rotated = c.per_layer_size(name, layers, "qk_rope_head_dim") or c.channels(rotated_key)
        return unrotated + rotated, rotated, unrotated

    def needs_fraction(self, config: Mapping[str, object]) -> bool:
        return False  # the two sizes of a head determine the fraction

    def keys(self) -> set[str]:
        names = ("v_head_dim", "qk_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "head_dim")
        sizes = {prefix + name for prefix in ("", *self.prefixes.values()) for name in names}
        return super().keys() | sizes | {"rope_interleave"}

    def extra_ropes(self, c: Reader, name: str, rope: Rope) -> dict[str, Rope]:
        if self.indexer is None or name in self.prefixes:
            return {}
        return read_indexer(c, rope, self.indexer, rotates_tail=False, source=self.name_and_source(c))

    def softmax_factor(self, c: Reader, schemes: list[Scaling]) -> float:
        """Return the square of the magnitude that YaRN has for mscale_all_dim, or 1 without YaRN.

        See `Scaling.softmax_factor`.
        """
        factor = max((scheme.softmax_factor for scheme in schemes), default=1.0)
        if not math.isfinite(factor):
            fix = "Released models have 0.1 to 1."
            raise c.error("mscale_all_dim", "must give a finite softmax factor", "infinity", fix)
        return factor
