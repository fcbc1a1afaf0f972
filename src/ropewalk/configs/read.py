"""from_config: read a model's config in any supported format and return `ModelRopes`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ropewalk._checks import Assumed, error, shown
from ropewalk.configs import hf, source
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.source import Request
from ropewalk.configs.weights import Weights


def from_config(
    config: Any,
    *,
    pairing: str | None = None,
    base: float | None = None,
    factor: float | None = None,
    text_only: bool = False,
    ignore: Collection[str] = (),
    download: bool = False,
    engine: str | None = None,
    like: str | None = None,
    weights: Mapping[str, Any] | None = None,
) -> ModelRopes:
    """Read the ropes of a model from its config.

        ropes = ropewalk.from_config("path/to/Llama-3.1-8B")
        rope = ropes.rope  # the Rope of every layer; use ropes.layers if they differ
        print(ropes.explain())

    Reading is strict. A misspelt, unused or impossible key is an error that names the file, the key and a fix. So is a
    missing value, except for the base of models whose first configs had none, such as Llama, for the trained length of
    YaRN and Llama 3, for which transformers takes max_position_embeddings, and for the defaults of a class, which
    transformers omits. If a config states two values for one parameter, the one that transformers 5 takes
    counts; for a model_type whose code is not in transformers, it is an error. For each config with such a missing or
    second value, Python issues a `UserWarning`, which `.warnings` contains as well.

    Args:
        config: a dict, a config object with `to_dict()`, a path to a file or to a folder that contains one, or a hub id
            (`meta-llama/Llama-3.1-8B`), whose config.json is read from the local cache of `huggingface_hub`. The
            supported formats are: Hugging Face configs in the schemas of transformers 4 (`rope_theta`, `rope_scaling`)
            and 5 (`rope_parameters`), including multimodal models and vision towers; configs of diffusers'
            transformers; params.json of Meta and Mistral; litgpt's model_config.yaml; and GGUF files. Arrays and
            tensors are treated as lists. A JSON file may have at most 2 MiB, and the header of a GGUF file 256 MiB.
        pairing: "half" or "interleaved", for a model_type that ropewalk does not know.
        base: the base, for a config that states none.
        factor: the factor of Llama 3's scaling, which Meta's params.json does not contain (8 in Llama 3.1 and 3.2
            Vision, 32 in 3.2 1B and 3B).
        text_only: for a model whose tokens have several positions (M-RoPE), return the rope of text tokens and omit the
            vision tower. It has no effect on a text model whose tokens have one position. It is an error for the config
            of a vision tower or of a diffusers transformer, because such models have no text tokens.
        ignore: keys to ignore, as if the config did not have them. Use it for a key about rotation that ropewalk does
            not know and that the model's own code does not read. "a.b" is the key b inside a. A warning names each
            ignored key.
        download: whether to download the config.json of a hub id that is not in the cache.
        engine: the name of an inference engine, of `ropewalk.diff.ENGINES`, such as "vllm". The ropes then have the
            numbers that this engine computes from a Hugging Face config, even if the model's own code computes others.
            The warnings list the keys that the engine ignores, and say so if it was not recorded what the engine reads
            for this model. The pairing is that of the original weights, which llama.cpp's converter permutes for some
            models. With None, the ropes have the numbers of the model's own code.
        like: a model_type that ropewalk knows, such as "llama", by whose rules a Hugging Face config with an unknown
            model_type is read. A warning says so. `.model_type` remains that of the config.
        weights: tensors, arrays or lists by name, such as a state dict, for a model of which a part of the rope is in
            the checkpoint (Mistral Large 4). Without it, they are read from model.safetensors beside the config, or
            from the files that model.safetensors.index.json names: first the headers, then only these tensors. Tensors
            of a vision tower or a draft are not taken.

    Returns:
        `ModelRopes`, with `.rope`, `.layers`, `.vision` and `.explain()`.

    Raises:
        RopeError: the config cannot be read, is ambiguous or incomplete, or `engine` cannot run it or does not have the
            model.

    Examples:
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
    asked = Request(pairing, base, factor, text_only, ignore, download, engine, like, weights)
    ropes = _read(config, asked)
    assumed = [warning for warning in ropes.warnings if isinstance(warning, Assumed)]
    if assumed:
        warnings.warn(f"{ropes.source}: {' '.join(assumed)}", stacklevel=2)
    return ropes


def read_config(config: Any, **asked: Any) -> ModelRopes:
    """Read a config as `from_config` does, without a Python warning: for callers that show `.warnings` themselves."""
    return _read(config, Request(**asked))


def _read(config: Any, asked: Request) -> ModelRopes:
    if asked.engine is None:
        ropes = _read_own(config, asked)
    else:
        from ropewalk.configs import engine_ropes

        selected = engine_ropes.engine("from_config", asked.engine)
        ropes, values = engine_ropes.read(config, asked)
        ropes = engine_ropes.apply_engine(selected, ropes, values)
    keys = asked.ignore
    notes = [f"{key} was ignored as requested, so its effect in the model's own code is missing." for key in keys]
    return replace(ropes, warnings=(*ropes.warnings, *notes)) if keys else ropes


def _read_own(config: Any, asked: Request) -> ModelRopes:
    """Read the ropes of the model's own code."""
    tensors = Weights(asked.weights)
    values, name, other = source.load_any(config, asked)
    if other:
        from ropewalk.configs import other_formats

        ropes = other_formats.read(values, name, asked)
    elif source.is_denoiser(values):
        from ropewalk.configs import diffusers

        got = f"a config of diffusers: {shown(values['_class_name'])}"
        asked.refuse(got, "pairing", "base", "text_only", "like")
        ropes = diffusers.read(values, name)
    else:
        if isinstance(config, str | os.PathLike):
            tensors.folder = Path(name).parent
        ropes = hf.read(values, name, asked, tensors)
    if asked.weights is not None and not tensors.needed:
        must, fix = "weights require a model of which a part of the rope is in the checkpoint", "Omit weights."
        raise error("from_config", must, f"{ropes.model_type}, whose config states all", fix)
    return ropes
