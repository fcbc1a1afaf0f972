"""from_config: whatever holds a config in, `ModelRopes` out. Chooses the reader of the dialect."""

from __future__ import annotations

from typing import Any

from ropewalk.configs import hf, source
from ropewalk.configs.model_ropes import ModelRopes


def from_config(config: Any, *, pairing: str | None = None, base: float | None = None) -> ModelRopes:
    """What a model's config means for rotation.

    Strict: a key that is misspelt, unused, contradictory or impossible is an error that names file, key and cure;
    what a config does not say is never guessed.

    Args:
        config: a dict, a config object with `to_dict()`, or a path to a config.json or to a folder that holds one.
            Hugging Face's Llama family (model_type llama, mistral, qwen2, qwen3), in the schema of transformers 4
            (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).
        pairing: "half" or "interleaved", for a model_type that ropewalk does not know.
        base: the base, for a config that states none.

    Returns:
        `ModelRopes`: `.rope`, `.layers`, `.explain()`.

    Raises:
        RopeError: the config cannot be read, or does not have one clear meaning.

    Example:
        >>> ropes = from_config(
        ...     {
        ...         "model_type": "mistral",
        ...         "hidden_size": 4096,
        ...         "num_attention_heads": 32,
        ...         "num_hidden_layers": 32,
        ...         "rope_theta": 1000000.0,
        ...     }
        ... )
        >>> ropes.rope
        Rope(head_dim=128, base=1000000.0, pairing='half')
        >>> len(ropes.layers)
        32
    """
    values, name = source.load(config)
    return hf.read(values, name, pairing=pairing, base=base)
