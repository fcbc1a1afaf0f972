"""TeleChat: the base is a constant in its code, and the alpha of its NTK scaling depends on the trained length.

Source: modeling_telechat.py and configuration_telechat.py of telechat-7B and TeleChat2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.fields import ConfigValue
from ropewalk.configs.layers import ALL
from ropewalk.configs.reader import Reader

_BASE_LENGTH = 8192  # the default of the class for base_seqlen


@dataclass(frozen=True)
class TeleChat(Architecture):
    """The `Architecture` of TeleChat, with NTK of alpha = 2^ceil(log2(training_seqlen / base_seqlen) + 1) - 1."""

    def collect(self, c: Reader, name: str, kind: Kind, layers: list[str]) -> dict[str, ConfigValue]:
        """Collect the keys that define the rope. Add rope_type "dynamic" and alpha if alpha is more than 1."""
        rope_keys = super().collect(c, name, kind, layers)
        trained = c.fields.size("training_seqlen") if c.fields.has("training_seqlen") else _BASE_LENGTH
        base_length = c.fields.size("base_seqlen") if c.fields.has("base_seqlen") else _BASE_LENGTH
        alpha = max(2 ** math.ceil(math.log2(trained / base_length) + 1) - 1, 1)
        where = "training_seqlen / base_seqlen"
        c.warnings.append(f"beyond {trained} tokens the model's own code changes the base with the length.")
        if alpha > 1:
            c.add(rope_keys, "rope_type", "dynamic", where)
            c.add(rope_keys, "alpha", float(alpha), where)
        return rope_keys

    def why_unwritable(self, version: int) -> str:
        """Return why `to_hf_config` cannot write this model_type: only the model's own code reads it."""
        return "Keep its own config.json: only its own code reads this model_type."


MODELS = {
    "telechat": TeleChat(
        source="modeling_telechat.py of telechat-7B",
        in_transformers=False,
        head_dim_keys=(),
        heads=("n_head", "num_attention_heads"),
        layers=("n_layer", "num_hidden_layers"),
        kinds={ALL: Kind(bases=(), implied_base=10_000.0)},
    )
}
