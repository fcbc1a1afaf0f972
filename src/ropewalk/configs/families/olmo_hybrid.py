"""OLMo Hybrid: nothing rotates if the base is null.

Source: transformers 5.23 models/olmo_hybrid.
"""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.layers import NO_ROPE, Every
from ropewalk.configs.reader import Reader

_FULL, _LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True)
class OlmoHybrid(Architecture):
    """The `Architecture` of OLMo Hybrid, in which a base of null means that no layer rotates."""

    def kinds_of_layers(self, c: Reader) -> list[str]:
        """Return the kind of each layer. If the base is null, no layer rotates."""
        if c.fields.is_null("rope_theta", "rope_parameters.rope_theta"):
            c.origins["layer_types"] = "rope_theta is null, so nothing rotates"
            return [NO_ROPE] * self.number_of_layers(c)
        return super().kinds_of_layers(c)

    def keys_without_ropes(self, version: int) -> dict[str, object]:
        """Return the key of the base with the value null, which means that no layer rotates."""
        return {"rope_theta": None} if version == 4 else {"rope_parameters": {"rope_theta": None}}


MODELS = {
    "olmo_hybrid": OlmoHybrid(
        source="transformers 5.23 models/olmo_hybrid",
        head_dim_keys=(),
        kinds={_FULL: Kind(), _LINEAR: None},
        pattern=Every(4, _FULL, _LINEAR),
    )
}
