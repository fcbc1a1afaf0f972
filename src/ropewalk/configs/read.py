"""from_config: whatever holds a config in, `ModelRopes` out. Chooses the reader of the dialect."""

from __future__ import annotations

from typing import Any

from ropewalk._checks import check_pairing, error, number, shown
from ropewalk.configs import hf, meta, source
from ropewalk.configs.gguf import read as gguf
from ropewalk.configs.model_ropes import ModelRopes


def from_config(
    config: Any,
    *,
    pairing: str | None = None,
    base: float | None = None,
    factor: float | None = None,
    text_only: bool = False,
) -> ModelRopes:
    """What a model's config means for rotation.

    Strict: a key that is misspelt, unused, contradictory or impossible is an error that names file, key and cure;
    what a config does not say is never guessed.

    Args:
        config: a dict, a config object with `to_dict()`, or a path to a file or to a folder that holds one.
            Hugging Face configs in the schema of transformers 4 (`rope_theta`, `rope_scaling`) or 5
            (`rope_parameters`), also text models inside multimodal ones; Meta's params.json; a GGUF file of llama.cpp.
            Arrays and tensors count as lists. A JSON file has at most 2 MiB, the header of a GGUF file 256 MiB.
        pairing: "half" or "interleaved", for a model_type that ropewalk does not know.
        base: the base, for a config that states none.
        factor: the factor of Llama 3's scaling, which Meta's params.json does not carry (8 in Llama 3.1, 32 in 3.2).
        text_only: for a model whose tokens have several axes (M-RoPE): the rope that its text tokens use.

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
    if not isinstance(text_only, bool):
        raise error("from_config", "text_only must be True or False", shown(text_only), "Pass a boolean.")
    if pairing is not None:
        check_pairing("from_config", pairing)
    if factor is not None:
        factor = number("from_config", "factor", factor, at_least=1.0)
    path = source.gguf_path(config)
    if path is not None:
        _refuse_factor(factor)
        return gguf.read(path, pairing=pairing, base=base, text_only=text_only)
    values, name = source.load(config)
    if meta.is_params(values):
        if pairing not in (None, "interleaved"):
            cure = "Leave it out; for weights permuted to another pairing, use dataclasses.replace(rope, pairing=...)."
            raise error("from_config", "pairing of Meta's params.json is 'interleaved'", shown(pairing), cure)
        return meta.read(values, name, base=base, factor=factor)
    _refuse_factor(factor)
    return hf.read(values, name, pairing=pairing, base=base, text_only=text_only)


def _refuse_factor(factor: float | None) -> None:
    if factor is not None:
        raise error("from_config", "factor is for Meta's params.json only", shown(factor), "Leave it out.")
