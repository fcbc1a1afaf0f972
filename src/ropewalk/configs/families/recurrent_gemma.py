"""RecurrentGemma: its config has a short list of kinds of layers, which repeats until all layers have a kind.

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
    """The `Architecture` of RecurrentGemma, in which `block_types` repeats over the layers."""

    def kinds_of_layers(self, c: Reader) -> list[str]:
        """Return the kind of each layer, "attention" or "recurrent", by repeating `block_types`."""
        key, count = "block_types", self.number_of_layers(c)
        block_types = c.fields.get(key)
        if not isinstance(block_types, list) or not block_types:
            raise c.fields.error(key, "must be a list of kinds of layers", shown(block_types), "Add it.")
        return check_kinds(
            c.fields, key, [block_types[i % len(block_types)] for i in range(count)], self.kinds, c.origins
        )


MODELS = {
    "recurrent_gemma": RecurrentGemma(
        source="transformers 5.23 models/recurrent_gemma", partial=0.5, kinds={"attention": Kind(), "recurrent": None}
    )
}
