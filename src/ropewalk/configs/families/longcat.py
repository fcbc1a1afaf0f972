"""LongCat Flash: each layer has two attention modules, and q is multiplied by a factor that depends on q_lora_rank.

Source: transformers 5.23 models/longcat_flash.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ropewalk.configs.families.latent import Latent
from ropewalk.configs.layer_ropes import QueryScale
from ropewalk.configs.reader import Reader


@dataclass(frozen=True)
class LongCat(Latent):
    """The `Architecture` of LongCat Flash. In `ModelRopes`, each attention module counts as a layer."""

    def number_of_layers(self, c: Reader) -> int:
        """Return the number of attention modules, which is twice the number of layers in the config."""
        return 2 * super().number_of_layers(c)

    def query_scale(self, c: Reader) -> QueryScale:
        """Return the factor of q, √(hidden_size / q_lora_rank)."""
        c.origins["query_scale"] = "square root of hidden_size / q_lora_rank"
        return QueryScale(constant=math.sqrt(c.fields.size("hidden_size") / c.fields.size("q_lora_rank")))


MODELS = {
    "longcat_flash": LongCat(
        source="transformers 5.23 models/longcat_flash",
        pairing="interleaved",
        output_order="half",
        layers=("num_layers",),
    )
}
