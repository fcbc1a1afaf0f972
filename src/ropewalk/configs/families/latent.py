"""Multi-head latent attention (MLA), in which only the last channels of a head rotate.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; transformers models/deepseek_v2, deepseek_v3 and deepseek_v32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from ropewalk._checks import RopeError, with_context
from ropewalk.configs.architecture import Architecture
from ropewalk.configs.layers import Kind
from ropewalk.configs.reader import ConfigValue, Reader
from ropewalk.rope.rope import Pairing, Rope
from ropewalk.schemes import Scaling


@dataclass(frozen=True)
class Latent(Architecture):
    """The `Architecture` of a model with MLA.

    A head has qk_nope_head_dim unrotated channels, and then qk_rope_head_dim rotated channels. A kind of layer with a
    key of its own for the head size has no MLA.

    Args:
        indexer: the pairing of the indexer, a second attention in each layer (DeepSeek-V3.2); None if there is none.
        indexer_tail: whether the last channels of the indexer's head rotate instead of the first.
        prefixes: maps a kind of layer to the prefix of the config keys that state its head sizes, e.g. "swa_".
    """

    indexer: str | None = None
    indexer_tail: bool = False
    prefixes: Mapping[str, str] = field(default_factory=dict)

    def implied_pairing(self, c: Reader) -> str:
        """Return "half" if rope_interleave is false, else the field `pairing`."""
        return super().implied_pairing(c) if c.boolean("rope_interleave", True) else "half"

    def shape(
        self, c: Reader, name: str, kind: Kind, rope_keys: dict[str, ConfigValue], scheme: Scaling | None
    ) -> tuple[int, int, int]:
        if kind.head_dim_key:
            return super().shape(c, name, kind, rope_keys, scheme)
        c.origins["head_dim"] = "qk_nope_head_dim + qk_rope_head_dim"
        c.origins["rotary_dim"] = "qk_rope_head_dim, the last of the head"
        prefix = "" if c.has("per_layer_config") else self.prefixes.get(name, "")
        unrotated_key, rotated_key = f"{prefix}qk_nope_head_dim", f"{prefix}qk_rope_head_dim"
        unrotated = c.per_layer_size(name, "qk_nope_head_dim") or c.channels(unrotated_key)
        if prefix and not c.has(rotated_key):
            key = f"{prefix}head_dim"
            whole = c.channels(key)
            if whole <= unrotated:
                fix = "Check both sizes: the remaining channels rotate."
                raise c.error(key, f"must be more than {unrotated_key}={unrotated}", str(whole), fix)
            return whole, whole - unrotated, unrotated
        rotated = c.per_layer_size(name, "qk_rope_head_dim") or c.channels(rotated_key)
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
        return read_indexer(c, rope, self.indexer, rotates_tail=self.indexer_tail, source=self.name_and_source(c))

    def softmax_factor(self, c: Reader, schemes: list[Scaling]) -> float:
        """Return the square of the magnitude that YaRN has for mscale_all_dim, or 1 without YaRN.

        See `Scaling.softmax_factor`.
        """
        factor = max((scheme.softmax_factor for scheme in schemes), default=1.0)
        if not math.isfinite(factor):
            fix = "Released models have 0.1 to 1."
            raise c.error("mscale_all_dim", "must give a finite softmax factor", "infinity", fix)
        return factor


def read_indexer(c: Reader, rope: Rope, pairing: str, *, rotates_tail: bool, source: str) -> dict[str, Rope]:
    """Return the rope of the indexer, a second attention in each layer of DeepSeek-V3.2 and later models.

    Args:
        c: the reader of the config.
        rope: the rope of the layer's q and k. The indexer rotates the same number of channels at the same frequencies,
            by positions on the same axes.
        pairing: the indexer's pairing in the model's own code. The key `indexer_rope_interleave` overrides it.
        rotates_tail: whether the last channels of the indexer's head rotate instead of the first.
        source: the model_type and the code that defines its indexer, for messages.

    Returns:
        {"indexer": rope}, or an empty dict if the config has no index_head_dim.
    """
    if not c.has("index_head_dim"):
        return {}
    width = c.channels("index_head_dim")
    c.origins["indexer"] = f"index_head_dim and model_type {source}"
    key = "indexer_rope_interleave"
    if c.has(key):
        config_pairing = "interleaved" if c.boolean(key, True) else "half"
        c.origins["indexer"] = f"index_head_dim and {key}"
        if config_pairing != pairing:
            c.warnings.append(
                f"{key} sets the pairing of the indexer to {config_pairing!r}, but it is {pairing!r} in {source}."
            )
        pairing = config_pairing
    offset = max(width - rope.rotary_dim, 0) if rotates_tail else 0
    try:
        sizes: dict[str, Any] = {"rotary_dim": rope.rotary_dim, "rotary_offset": offset, "axes": rope.axes}
        indexer = Rope(width, rope.base, cast(Pairing, pairing), scaling=rope.scaling, **sizes)
    except RopeError as e:
        raise with_context(f"{c.source}: index_head_dim", e) from None
    return {"indexer": indexer}
