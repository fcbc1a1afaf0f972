"""The architectures: what a model_type implies about rotation and its config does not say. Data in one place.

A row is a fact about code that many run, so each names its source.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """What a model_type implies.

    Args:
        pairing: "half" or "interleaved".
        implied_base: the base of configs that state none; None where that is an error.
        partial: whether `partial_rotary_factor` may leave channels unrotated.
        source: where this can be seen.
    """

    pairing: str
    source: str
    implied_base: float | None = None
    partial: bool = False


ARCHITECTURES = {
    "llama": Architecture(
        pairing="half",
        # Configs written before transformers 4.31 (Llama 1 and 2, Vicuna, Yarn-Llama) have no rope_theta at all.
        implied_base=10_000.0,
        source="transformers 5.23 models/llama: rotate_half; LlamaConfig, rope_theta 10000 before it was a key",
    ),
    "mistral": Architecture(pairing="half", source="transformers 5.23 models/mistral: rotate_half"),
    "qwen2": Architecture(pairing="half", source="transformers 5.23 models/qwen2: rotate_half"),
    "qwen3": Architecture(pairing="half", source="transformers 5.23 models/qwen3: rotate_half"),
}
