"""RecurrentGemma: a list of kinds that repeats over the layers.

Source: transformers 5.23 models/recurrent_gemma.
"""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk._checks import shown
from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.layers import check_kinds
from ropewalk.configs.reader import Reader


@dataclass(frozen=True)
class RecurrentGemma(Architecture):
    """Attention layers rotate half of their heads."""

    def kinds_of_layers(self, c: Reader) -> list[str]:
        """Return the kind of each layer."""
        key, count = "block_types", self.count(c)
        listed = c.fields.get(key)
        if not isinstance(listed, list) or not listed:
            raise c.fields.error(key, "must be a list of kinds of layers", shown(listed), "Add it.")
        return check_kinds(c.fields, key, [listed[i % len(listed)] for i in range(count)], self.kinds, c.origins)


MODELS = {
    "recurrent_gemma": RecurrentGemma(
        source="transformers 5.23 models/recurrent_gemma", partial=0.5, kinds={"attention": Kind(), "recurrent": None}
    )
}
