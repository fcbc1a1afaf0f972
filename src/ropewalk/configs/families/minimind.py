"""MiniMind: early versions use Meta's key names and interleaved pairs, later ones Hugging Face's names and half pairs.

Source: model/model.py and model/model_minimind.py of jingyaogong/minimind.
"""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk.configs.architecture import Architecture
from ropewalk.configs.reader import Reader


@dataclass(frozen=True)
class MiniMind(Architecture):
    """The `Architecture` of MiniMind. The key with which a config states the model's width decides the pairing."""

    def pairing_of(self, c: Reader) -> str:
        """Return "interleaved" if the config has Meta's key `dim`, else "half"."""
        return "interleaved" if c.fields.has("dim") else "half"


MODELS = {
    "minimind": MiniMind(
        source="model/model.py and model/model_minimind.py of jingyaogong/minimind",
        in_transformers=False,
        head_dim_keys=(),
        hidden=("dim", "hidden_size"),
        heads=("n_heads", "num_attention_heads"),
        layers=("n_layers", "num_hidden_layers"),
    )
}
