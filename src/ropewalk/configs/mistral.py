"""Read Mistral's params.json as the config.json of the same model. Pairs of its own weights are interleaved.

Source: transformers_utils/configs/mistral.py of vLLM, which reads these files with --config-format mistral.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ropewalk._checks import RopeError, error, shown, without_fix
from ropewalk.configs import hf
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.source import Request

FORMAT = "params.json of Mistral"
_ENCODERS = ("vision_encoder", "multimodal")
_OWN = ("yarn", "llama_4_scaling", *_ENCODERS)
_META = ("multiple_of", "ffn_dim_multiplier", "use_scaled_rope", "use_hf_rope")
"""Keys of the params.json of Meta and of ExecuTorch, which Mistral's files do not have."""
_SIZES = {
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
}
_SAME = ("head_dim", "rope_theta", "max_position_embeddings", "qk_rope_head_dim", "qk_nope_head_dim")
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
_SCALE = ("beta", "original_max_position_embeddings")


def matches(config: Mapping[str, Any]) -> bool:
    """Whether a params.json has keys that Mistral's files have and Meta's do not have."""
    has = {key for key, value in config.items() if value is not None}
    return ({"head_dim", "hidden_dim"} <= has and not has.intersection(_META)) or not has.isdisjoint(_OWN)


def has_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a params.json has an encoder, so that engines have the text model inside of the config."""
    return any(config.get(key) is not None for key in _ENCODERS)


def read(config: Mapping[str, Any], source: str, *, base: float | None) -> ModelRopes:
    """Read the ropes of a params.json of Mistral.

    Raises:
        RopeError: a key is missing or invalid, or has no counterpart in a config.json.
    """
    values = {_SIZES.get(key, key): config[key] for key in (*_SIZES, *_SAME) if config.get(key) is not None}
    latent = "qk_rope_head_dim" in values
    if config.get("max_seq_len") is not None:
        values.setdefault("max_position_embeddings", config["max_seq_len"])
    if type(config.get("sliding_window")) is int:
        values["sliding_window"] = config["sliding_window"]
    yarn, scale = (_section(config, key, source) for key in ("yarn", "llama_4_scaling"))
    unknown = [*(yarn.keys() - _YARN.keys() - {"apply_scale"}), *(scale.keys() - set(_SCALE))]
    if unknown:
        must = f"the keys of yarn and llama_4_scaling must be {', '.join([*_YARN, 'apply_scale', 'beta'])}"
        raise error(source, must, shown(unknown[0]), "Read the config.json of the model instead.")
    rope = {new: yarn[key] for key, new in _YARN.items() if yarn.get(key) is not None}
    rope["rope_type"] = "yarn" if yarn else "default"
    if yarn and _SCALE[1] not in rope:  # transformers, which takes max_position_embeddings, does not read this file
        raise error(source, f"{FORMAT} must state {_SCALE[1]} of yarn", "none", "Add it.")
    if yarn.get("apply_scale") is False:
        rope["attention_factor"] = 1.0
    elif yarn and latent:  # vLLM runs latent attention in DeepSeek's class, in which mscale is 1 if absent
        rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    if scale:
        length = yarn.get(_SCALE[1])
        if scale.get(_SCALE[1]) != length:
            must = "original_max_position_embeddings of llama_4_scaling must be that of yarn, as in a config.json"
            raise error(source, must, shown(scale.get(_SCALE[1])), "Read the config.json of the model instead.")
        rope["llama_4_scaling_beta"] = scale.get("beta")
    values["model_type"] = "mistral4" if latent else "ministral3" if scale else "mistral"
    values["rope_parameters"] = {**rope, "rope_theta": values.pop("rope_theta", None)}
    try:
        ropes = hf.read(values, source, Request(base=base))
    except RopeError as e:
        got = without_fix(e).removeprefix(f"{source}: ")
        raise error(source, f"{FORMAT} must state a rope", got, "Correct the key of Mistral with this meaning.") from e
    layers = tuple(rope and replace(rope, pairing="interleaved") for rope in ropes.layers)
    warnings = (*ropes.warnings, *["Only the text model was read, not the encoder."] * has_encoder(config))
    origins = {**ropes.origins, "pairing": FORMAT}
    return replace(ropes, layers=layers, file_format=FORMAT, origins=origins, warnings=warnings)


def _section(config: Mapping[str, Any], key: str, source: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise error(source, f"{key} must be an object", shown(value), "Read the config.json of the model instead.")
    return value
