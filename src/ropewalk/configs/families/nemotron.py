"""Nemotron-NAS, some of whose layers have no attention, and Nemotron-H, which rotates nothing.

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
    """A block rotates unless its attention is left out or replaced by a linear layer."""

    def kinds_of_layers(self, c: Reader) -> list[str]:
        """The kind of each layer."""
        key, count = "block_configs", self.count(c)
        kinds = []
        for block in c.fields.listed(key, count) or []:
            attention = block.get("attention") if isinstance(block, Mapping) else None
            if not isinstance(attention, Mapping):
                must, cure = "each must be an object with attention", "Is it the list of another model?"
                raise c.fields.error(key, must, shown(block), cure)
            absent = attention.get("no_op") or attention.get("replace_with_linear")
            kinds.append(NO_ROPE if absent else ALL)
        if not kinds:
            must = "it must be given, since some layers have no attention"
            raise c.fields.error(key, must, "none", "Add a list with one entry a layer.")
        c.origins["layer_types"] = f"{key}: those with attention rotate"
        return kinds


@dataclass(frozen=True)
class NemotronH(Architecture):
    """It counts its layers by the list of their kinds, where no number is given."""

    def count(self, c: Reader) -> int:
        """num_hidden_layers, or the length of layers_block_type."""
        key = "layers_block_type"
        listed = c.fields.get(key)
        if c.fields.has("num_hidden_layers") or not isinstance(listed, list) or not listed:
            return super().count(c)
        c.origins["layers"] = f"the length of {key}"
        return len(listed)


MODELS = {
    "nemotron-nas": NemotronNAS(
        source="modeling_decilm.py of Llama-3_1-Nemotron-51B-Instruct; vLLM model_executor/models/nemotron_nas.py",
        in_transformers=False,
        kinds={ALL: Kind()},
    ),
    "nemotron_h": NemotronH(source="transformers 5.23 models/nemotron_h", kinds={ALL: None}),
}
