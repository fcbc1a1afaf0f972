"""Nemotron-NAS, in which some layers have no attention, and Nemotron-H, which rotates nothing.

Source: modeling_decilm.py of Llama-3_1-Nemotron-51B-Instruct and vLLM model_executor/models/nemotron_nas.py;
transformers 5.23 models/nemotron_h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ropewalk._checks import shown
from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.layers import ALL, NO_ROPE
from ropewalk.configs.reader import Reader


@dataclass(frozen=True)
class NemotronNAS(Architecture):
    """The `Architecture` of Nemotron-NAS, in which `block_configs` describes the attention of each layer."""

    def kinds_of_layers(self, c: Reader) -> list[str]:
        """Return the kind of each layer. Layers whose attention is removed, or is a linear layer, do not rotate."""
        key, count = "block_configs", self.number_of_layers(c)
        kinds = []
        for block in c.fields.layer_list(key, count) or []:
            attention = block.get("attention") if isinstance(block, Mapping) else None
            if not isinstance(attention, Mapping):
                must, fix = "must contain objects with the key attention", "Check that it is the list of this model."
                raise c.fields.error(key, must, shown(block), fix)
            absent = attention.get("no_op") or attention.get("replace_with_linear")
            kinds.append(NO_ROPE if absent else ALL)
        if not kinds:
            must = "must be given, since some layers have no attention"
            raise c.fields.error(key, must, "none", "Add a list with one entry for each layer.")
        c.origins["layer_types"] = f"{key}: blocks with attention rotate"
        return kinds


@dataclass(frozen=True)
class NemotronH(Architecture):
    """The `Architecture` of Nemotron-H, whose config may state the number of layers only by the length of a list."""

    def number_of_layers(self, c: Reader) -> int:
        """Return num_hidden_layers, or the length of layers_block_type if that key is missing."""
        key = "layers_block_type"
        layer_kinds = c.fields.get(key)
        if c.fields.has("num_hidden_layers") or not isinstance(layer_kinds, list) or not layer_kinds:
            return super().number_of_layers(c)
        c.origins["layers"] = f"the length of {key}"
        return len(layer_kinds)


MODELS = {
    "nemotron-nas": NemotronNAS(
        source="modeling_decilm.py of Llama-3_1-Nemotron-51B-Instruct; vLLM model_executor/models/nemotron_nas.py",
        in_transformers=False,
        kinds={ALL: Kind()},
    ),
    "nemotron_h": NemotronH(source="transformers 5.23 models/nemotron_h", kinds={ALL: None}),
}
