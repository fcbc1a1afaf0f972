"""Models that multiply q, or both q and k, by a factor before they rotate them.

The factor is a power of the head size, or the value of a key in the config.

Source: transformers 5.23 models/esm, models/openai_privacy_filter, models/muse_glimmer, models/muse_spark.
"""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk._checks import number
from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.layer_ropes import QueryScale
from ropewalk.configs.layers import ALL, NoRopeLayers
from ropewalk.configs.reader import Reader


@dataclass(frozen=True)
class ScaledByHeadDim(Architecture):
    """The `Architecture` of a model that multiplies q by head_dim^power.

    Args:
        power: the exponent.
        scales_keys: whether k is multiplied by the same factor.
    """

    power: float = -0.5
    scales_keys: bool = False

    def query_scale(self, c: Reader) -> QueryScale:
        """Return the factor head_dim^power."""
        return QueryScale(constant=float(self.head_dim(c, Kind())) ** self.power, scales_keys=self.scales_keys)


@dataclass(frozen=True)
class ScaledByKey(Architecture):
    """The `Architecture` of a model that multiplies q by the value of the config key `key`."""

    key: str = "qk_scale_factor"

    def query_scale(self, c: Reader) -> QueryScale | None:
        """Return the value of the key as a factor, or None if it is missing."""
        if not c.fields.has(self.key):
            return None
        c.origins["query_scale"] = self.key
        return QueryScale(constant=number(c.fields.source, self.key, c.fields.get(self.key), above=0.0))


MODELS = {
    "esm": ScaledByHeadDim(
        source="transformers 5.23 models/esm",
        head_dim_keys=(),
        kinds={ALL: Kind(implied_base=10_000.0)},
        switch=("position_embedding_type", ("rotary",)),
    ),
    "openai_privacy_filter": ScaledByHeadDim(
        source="transformers 5.23 models/openai_privacy_filter",
        pairing="interleaved",
        head_dim_divides=False,
        power=-0.25,
        scales_keys=True,
    ),
    **{
        f"{name}_text": ScaledByKey(
            source=f"transformers 5.23 models/{name}",
            head_dim_divides=False,
            pattern=NoRopeLayers(key="layer_rope_theta", interval_key=""),
        )
        for name in ("muse_glimmer", "muse_spark")
    },
}
