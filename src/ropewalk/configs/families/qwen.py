"""Qwen (version 1): it has its own keys for the base and the rotated fraction, and its own dynamic scaling.

Source: modeling_qwen.py of Qwen-7B; vLLM up to 0.23 model_executor/models/qwen.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk._checks import length
from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.layers import ALL
from ropewalk.configs.reader import Reader
from ropewalk.schemes import Scaling


@dataclass(frozen=True)
class Qwen(Architecture):
    """The `Architecture` of Qwen, which was trained on seq_length tokens, not on max_position_embeddings."""

    def check(self, c: Reader) -> None:
        """Add a warning if the config enables Qwen's dynamic scaling, which no scheme describes."""
        super().check(c)
        if c.fields.boolean("use_dynamic_ntk", False):
            c.warnings.append(
                f"use_dynamic_ntk: beyond {self._sequence_length(c)} tokens the model's own code uses NTK with "
                "alpha = 2^ceil(log2(n / seq_length) + 1) - 1 at n tokens, and vLLM does not. These ropes do not "
                "include it. For longer texts use dataclasses.replace(rope, scaling=NTK(alpha))."
            )

    def trained_length(self, c: Reader, schemes: list[Scaling]) -> int | None:
        """Return seq_length, or max_position_embeddings if the config has no seq_length, in tokens."""
        return self._sequence_length(c)

    def _sequence_length(self, c: Reader) -> int | None:
        key = "seq_length"
        return length(c.fields.source, key, c.fields.get(key)) if c.fields.has(key) else c.longest


MODELS = {
    "qwen": Qwen(
        source="modeling_qwen.py of Qwen-7B; vLLM up to 0.23 model_executor/models/qwen.py",
        in_transformers=False,
        head_dim_keys=("kv_channels",),
        hidden=("hidden_size", "n_embd"),
        heads=("num_attention_heads", "n_head"),
        layers=("num_hidden_layers", "n_layer"),
        partial_keys=("rotary_pct",),
        partial=1.0,
        kinds={ALL: Kind(bases=("rotary_emb_base",))},
    )
}
