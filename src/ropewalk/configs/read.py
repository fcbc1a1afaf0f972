"""from_config: whatever holds a config in, `ModelRopes` out. Chooses the reader of the dialect."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ropewalk._checks import check_pairing, error, number, shown
from ropewalk.configs import diffusers, engine_ropes, hf, meta, source
from ropewalk.configs.gguf import read as gguf
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.engines import Asked
from ropewalk.engines import engine as engine_named


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
) -> ModelRopes:
    """What a model's config means for rotation.

    Strict: a key that is misspelt, unused, contradictory or impossible is an error that names file, key and cure;
    what a config does not say is never guessed.

    Args:
        config: a dict, a config object with `to_dict()`, a path to a file or to a folder that holds one, or a hub id
            (`meta-llama/Llama-3.1-8B`), whose config.json is read from the local cache of `huggingface_hub`.
            Hugging Face configs in the schema of transformers 4 (`rope_theta`, `rope_scaling`) or 5
            (`rope_parameters`), also multimodal models and vision towers alone; those of
            diffusers' transformers; Meta's params.json; a GGUF file of
            llama.cpp. Arrays and tensors count as lists. A JSON file has at most 2 MiB, the header of a GGUF file
            256 MiB.
        pairing: "half" or "interleaved", for a model_type that ropewalk does not know.
        base: the base, for a config that states none.
        factor: the factor of Llama 3's scaling, which Meta's params.json does not carry (8 in Llama 3.1 and
            3.2 Vision, 32 in 3.2 1B and 3B).
        text_only: for a model whose tokens have several axes (M-RoPE): the rope that its text tokens use. The vision
            tower is left out. It has no effect on a text model of one axis; of a vision tower alone or a config of
            diffusers nothing would be left, and it is an error.
        ignore: keys to read past, as if the file did not have them: for a key about rotation that ropewalk does not
            know and that the model's own code does not read. "a.b" is b inside a. Each becomes a warning.
        download: whether to download the config.json of a hub id that is not in the cache.
        engine: "transformers", "vllm", "sglang", "llama.cpp", "mlx-lm" or "exllamav3": the ropes with the numbers that
            this engine makes of a Hugging Face config, also where they are not what the model means. What it ignores
            is among the warnings. The pairing is that of the config's own weights, which llama.cpp's converter permutes
            for some models. None: what the config means.

    Returns:
        `ModelRopes`: `.rope`, `.layers`, `.vision`, `.explain()`.

    Raises:
        RopeError: the config cannot be read, or does not have one clear meaning; `engine` does not run it.

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
    if not isinstance(download, bool):
        raise error("from_config", "download must be True or False", shown(download), "Pass a boolean.")
    ignored = _keys(ignore)
    if engine is None:
        ropes = _read(config, pairing, base, factor, text_only, ignored, download)
    else:
        asked = engine_named("from_config", engine)
        _refuse_factor(factor)
        ropes, aside = _for_engines(config, pairing, base, text_only, ignored, download)
        ropes = engine_ropes.with_numbers_of(asked, ropes, aside)
    warnings = [f"{key}: ignored, as asked; what it means in the model's own code is not described." for key in ignored]
    return replace(ropes, warnings=(*ropes.warnings, *warnings)) if ignored else ropes


def ropes_to_ask(
    config: Any,
    *,
    pairing: str | None = None,
    base: float | None = None,
    ignore: Collection[str] = (),
    download: bool = False,
) -> tuple[ModelRopes, list[tuple[Asked, list[int]]]]:
    """What a Hugging Face config means for text, and each rope of it as the rules of engines are asked about it.

    Args and errors: as in `from_config`.

    Returns:
        The ropes, and each distinct one with what the config says of it and with its layers.
    """
    ropes, aside = _for_engines(config, pairing, base, True, _keys(ignore), download)
    return ropes, engine_ropes.asked(ropes, aside)


def _for_engines(
    config: Any, pairing: str | None, base: float | None, text_only: bool, ignore: tuple[str, ...], download: bool
) -> tuple[ModelRopes, dict[str, Any]]:
    """The ropes, read past the keys that only engines read; and those keys with their values."""
    who, must = "from_config", "engines are compared on a config of Hugging Face"
    if source.gguf_path(config) is not None:
        raise error(who, must, "a GGUF file", "llama.cpp alone reads it. Pass the config.json that it was made from.")
    values, name = source.load(config, download=download)
    values = source.without(values, ignore, name)
    if diffusers.is_denoiser(values) or meta.is_params(values):
        raise error(name, must, "another one", "No other config is read by several engines.")
    aside = engine_ropes.set_aside(values)
    values = source.without(values, tuple(aside), name)
    return hf.read(values, name, pairing=pairing, base=base, text_only=text_only), aside


def _keys(ignore: object) -> tuple[str, ...]:
    if isinstance(ignore, str) or not isinstance(ignore, Collection) or not all(isinstance(key, str) for key in ignore):
        must, fix = "ignore must be a collection of keys", 'Pass a tuple, e.g. ignore=("my_rope_key",).'
        raise error("from_config", must, shown(ignore), fix)
    return tuple(dict.fromkeys(ignore))


def _read(
    config: Any,
    pairing: str | None,
    base: float | None,
    factor: float | None,
    text_only: bool,
    ignore: tuple[str, ...],
    download: bool,
) -> ModelRopes:
    path = source.gguf_path(config)
    if path is not None:
        _refuse_factor(factor)
        return gguf.read(path, pairing=pairing, base=base, text_only=text_only, ignore=ignore)
    values, name = source.load(config, download=download)
    values = source.without(values, ignore, name)
    if diffusers.is_denoiser(values):
        _refuse_factor(factor)
        if pairing is not None or base is not None:
            must, given = "pairing and base are for text models", shown(values["_class_name"])
            raise error("from_config", must, f"a config of diffusers: {given}", "Leave them out.")
        if text_only:
            must, given = "text_only is for text models", shown(values["_class_name"])
            raise error("from_config", must, f"a config of diffusers: {given}", "Leave it out.")
        return diffusers.read(values, name)
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
