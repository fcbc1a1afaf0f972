"""The configs that are recorded: class defaults of the installed transformers, completed where necessary."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
from typing import Any

# model_type → entries that complete its class default, which otherwise builds no model, or one without its rope.
_FULL, _LINEAR = "full_attention", "linear_attention"
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
FILLED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "chameleon": {"vocab_size": 100, "vocabulary_map": {"<image>": 3, "IMGIMGA": 4}, "image_token_id": 3},
    "cohere_compass_text": {"rope_parameters": {_FULL: {"rope_type": "default", "rope_theta": 10000.0}}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense"] * 32},
    "diffusion_gemma_text": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 8},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "position_embedding_type": "rotary"},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "glm4v_moe_text": {"rope_parameters": _MROPE, "head_dim": 128},
    "glm4v_text": {"rope_parameters": _MROPE},
    "glm_image_text": {"rope_parameters": _MROPE},
    "granitemoehybrid": {"position_embedding_type": "rope", "layer_types": [_LINEAR, _FULL] * 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 16, 16, 16]},
        "head_dim": 128,
    },
    "lfm2_moe": {"layer_types": (["conv", "conv", _FULL, "conv"] * 8)},
    "ministral": {"head_dim": 128},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "nemotron": {"num_key_value_heads": 48},
    "qwen3_omni_moe_talker_text": {"head_dim": 128},
    "qwen3_omni_moe_text": {"head_dim": 128},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "step3p5": {"sliding_window": 512},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_text": {"dropout_rate": 0.0},
}
# model_type → attributes that a part of a model reads, and that the whole model copies into its config.
COPIED: dict[str, dict[str, Any]] = {
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 64},
    "t5_gemma_module": {"dropout_rate": 0.0},
}
# Parts of models that CONFIG_MAPPING lacks → the model_type of the whole model, and the class of the part's config.
PARTS = {"qwen3_omni_moe_code2wav": ("qwen3_omni_moe", "Qwen3OmniMoeCode2WavConfig")}


def config_of(model_type: str) -> Any:
    """Return the config of a model_type with its class defaults, completed by `FILLED`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    filled = copy.deepcopy(FILLED.get(model_type, {}))
    if model_type in PARTS:
        whole, name = PARTS[model_type]
        return getattr(importlib.import_module(type(CONFIG_MAPPING[whole]()).__module__), name)(**filled)
    return CONFIG_MAPPING[model_type](**filled)


def config_from(model_type: str, values: dict[str, Any]) -> Any:
    """Return the config of a model_type with the values of a config file."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(values))


# model_type that transformers lacks → the model_type with the same code.
SAME_CODE = {"kimi_k2": "deepseek_v3"}


def text_config(values: dict[str, Any]) -> Any:
    """Return the config of the language model in a config file, completed by `FILLED`."""
    name = values["model_type"]
    filled = {key: value for key, value in FILLED.get(name, {}).items() if values.get(key) is None}
    return config_from(SAME_CODE.get(name, name), {**values, **filled}).get_text_config(decoder=True)


def model_types() -> list[str]:
    """Return every model_type of the installed transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES)


def plain(config: Any) -> Any:
    """Return a config as plain data for JSON. Infinite numbers become the string "inf"."""
    values = config.to_dict()
    for key in ("id2label", "label2id", "vision_config", "audio_config"):
        values.pop(key, None)
    values["output_attentions"] = False
    values["model_type"] = values["model_type"] or next(
        (name for name, (_, cls) in PARTS.items() if cls == type(config).__name__), ""
    )
    return json.loads(json.dumps(values, default=str).replace("Infinity", '"inf"'))


def modeling_file(config: Any) -> Any:
    """Import the modeling file of a config: the file next to the config, or the one that MODEL_MAPPING names."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    try:
        return importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    except ModuleNotFoundError:
        return importlib.import_module(MODEL_MAPPING[type(config)].__module__)


# model_type of a part of a model → the class that is built from its config.
CLASSES = {"t5_gemma_module": "T5GemmaEncoder"}


def named_class(config: Any) -> list[type]:
    """Return the class for a config that no class of the file names, from `CLASSES` or from MODEL_MAPPING."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    if config.model_type in CLASSES:
        return [getattr(modeling_file(config), CLASSES[config.model_type])]
    return [MODEL_MAPPING[type(config)]] if type(config) in MODEL_MAPPING else []


def rotates(model_type: str) -> bool:
    """Return whether the modeling file of a model mentions rotary positions."""
    try:
        source = inspect.getsource(modeling_file(config_of(model_type)))
    except Exception:
        return False
    return "rotary" in source.lower() or "rope" in source.lower()
