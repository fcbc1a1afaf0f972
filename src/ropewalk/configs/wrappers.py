"""Find the text model inside the config of a multimodal model, and add the keys that its config omits.

transformers omits values that equal the defaults of a class from the config of a nested model. A missing key therefore
means the default, but only in nested configs. For example, the text config of Gemma 3 4B has neither base nor head_dim,
and the text config of LLaVA 1.5 has no sizes.

Source: the config classes of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from ropewalk._checks import Assumed, shown
from ropewalk.configs.fields import Fields

_WITH_TEXT_CONFIG = (
    "aria audioflamingo3 aya_vision cohere2_vision cohere_compass cosmos3_edge cosmos3_omni deepseek_ocr2 deepseek_vl "
    "deepseek_vl_hybrid diffusion_gemma dots3_note embedding_gemma2 emu3 ernie4_5_vl_moe exaone4_5 fast_vlm fuyu "
    "gemma3 gemma3n gemma4 gemma4_unified glm46v glm4v glm4v_moe glm5_next glm_image glm_ocr glmasr got_ocr2 "
    "granite4_vision granite_docling granite_speech granite_speech_plus hunyuan_vl hyperclovax_vision_v2 idefics2 "
    "idefics3 internvl janus kimi_k25 lfm2_vl lighton_ocr llama4 llava llava_next llava_next_video "
    "llava_onevision minimax_m3_vl mistral3 mistral_large4 mllama modernvbert molmo2 musicflamingo ovis2 "
    "paddleocr_vl paligemma perception_lm qianfan_ocr qwen2_5_omni_thinker qwen2_audio qwen3_5 qwen3_5_moe qwen3_asr "
    "qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen4_exp shieldgemma2 smolvlm step3p7 unlimited_ocr vibevoice "
    "video_llava vipllava voxtral voxtral_realtime "
)
WRAPPERS: dict[str, str] = {
    **dict.fromkeys(_WITH_TEXT_CONFIG.split(), "text_config"),
    "deepseek_vl_v2": "language_config",
    "infimm-zephyr": "language",
    "qwen2_5_omni": "thinker_config",
    "qwen3_omni_moe": "thinker_config",
    "internvl_chat": "llm_config",
}
"""Maps the model_type of a model that contains others to the key of its text model."""

# Keys of the text model in configs with an unknown model_type. Vision towers and projectors have other keys.
_TEXT_KEYS = ("text_config", "llm_config", "language_config", "language", "llm", "decoder_config", "thinker_config")

# Models whose files may have the keys of the text model at the top level: maps them to the model_type to read.
_FLAT_AS = {"llava": "llama", "fuyu": "persimmon", "step3p7": "step3p5", "hunyuan_vl": "hunyuan_vl_text"}
# Models whose published files have the keys of the text model at the top level, while files written by transformers 5
# nest them: maps them to the key of the nested config.
_FLAT_OR_NESTED = {"qwen2_vl": "text_config", "qwen2_5_vl": "text_config"}
# Models whose nested text config omits its model_type: maps them to that model_type.
_MISSING_MODEL_TYPES = {"deepseek_vl_v2": "deepseek_ocr_text"}

_KEYS = (
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "max_position_embeddings",
    "head_dim",
    "rope_theta",
    "rope_local_base_freq",
)
_DEFAULTS: dict[str, tuple[float | None, ...]] = {
    "llama": (4096, 32, 32, 2048, None, 10000.0),
    "mistral": (4096, 32, 32, 131072, None, 10000.0),
    "mixtral": (4096, 32, 32, 131072, None, 1000000.0),
    "qwen2": (4096, 32, 32, 32768, None, 10000.0),
    "qwen3": (4096, 32, 32, 32768, 128, 10000.0),
    "qwen2_moe": (2048, 16, 24, 32768, None, 10000.0),
    "qwen3_moe": (2048, 32, 24, 32768, None, 10000.0),
    "gemma": (3072, 16, 28, 8192, 256, 10000.0),
    "gemma2": (2304, 8, 26, 8192, 256, 10000.0),
    "gemma3_text": (2304, 8, 26, 131072, 256, 1000000.0, 10000.0),
    "gemma3n_text": (2048, 8, 35, 32768, 256, 1000000.0, 10000.0),
    "llama4_text": (5120, 40, 48, 131072, 128, 500000.0),
    "mllama_text_model": (4096, 32, 40, 131072, None, 500000.0),
    "phi3": (3072, 32, 32, 4096, None, 10000.0),
    "cohere2": (8192, 64, 40, 8192, None, 10000.0),
    "granite": (4096, 32, 32, 2048, None, 10000.0),
    "starcoder2": (3072, 24, 30, 4096, None, 10000.0),
    "ministral3": (4096, 32, 34, 262144, 128, 10000.0),
    "glm4": (4096, 32, 40, 131072, None, 10000.0),
    "qwen2_vl_text": (8192, 64, 80, 32768, None, 1000000.0),
    "qwen2_5_vl_text": (8192, 64, 80, 32768, None, 1000000.0),
    "qwen3_vl_text": (4096, 32, 32, 128000, 128, 500000.0),
    "qwen3_vl_moe_text": (2048, 16, 24, 128000, None, 500000.0),
    "qwen3_5_text": (4096, 16, 32, 32768, 256, 10000.0),
    "smollm3": (2048, 16, 36, 32768, None, 2000000.0),
    "olmo2": (4096, 32, 32, 2048, None, 10000.0),
    "ernie4_5": (1024, 16, 18, 131072, None, 500000.0),
}
"""Maps the model_type of a text model to the defaults of its class for `_KEYS`. None or a shorter tuple: no default."""


def text_model(fields: Fields, known: Container[str], pairing_passed: bool) -> Fields:
    """Return the text model inside the config of a multimodal model, or `fields` if it is the config of a text model.

    Args:
        fields: the whole config.
        known: the model_types in the table of models.
        pairing_passed: whether the caller passed a pairing. A config with an unknown model_type is then treated as that
            of a text model.

    Returns:
        The config, with warnings about what was assumed.

    Raises:
        RopeError: the config of the text model is missing or not an object.
    """
    while (inner := _text_part(fields, known, pairing_passed)) is not None:
        inner.warnings += fields.warnings
        fields = inner
    return fields


def _text_part(fields: Fields, known: Container[str], pairing_passed: bool) -> Fields | None:
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        return None
    nested_key = _FLAT_OR_NESTED.get(model_type)
    if nested_key is not None and not fields.has("num_hidden_layers") and isinstance(fields.get(nested_key), Mapping):
        return _part(fields, nested_key, fields.get(nested_key))
    if model_type not in WRAPPERS:
        return None if model_type in known or pairing_passed else _part_of_unknown(fields, model_type, known)
    key = WRAPPERS[model_type]
    inner = fields.get(key)
    flat = _FLAT_AS.get(model_type)
    if flat is not None and fields.has("num_hidden_layers") and not _has_sizes(inner):
        warning = f"model_type {model_type} has the keys of its text model at the top level and is read as {flat}."
        part = Fields({**fields.config, "model_type": flat, key: None}, fields.source, fields.path)
        part.warnings.append(warning)
        return part
    if not isinstance(inner, Mapping):
        fix = "It must contain the text model."
        if inner is None and f"{model_type}_text" in known:
            fix += f" If the file is the text model alone, its model_type is {model_type + '_text'!r}."
        raise fields.error(key, "must be an object", shown(inner), fix)
    whole = dict(inner)
    if "model_type" not in whole and model_type in _MISSING_MODEL_TYPES:
        whole["model_type"] = _MISSING_MODEL_TYPES[model_type]
    return _part(fields, key, whole)


def _part(fields: Fields, key: str, inner: Mapping[str, Any], *warnings: str) -> Fields:
    """Return the text model under a key, with the defaults of its class added."""
    whole, added = with_class_defaults(inner)
    part = Fields(whole, f"{fields.source}: {key}", f"{fields.path}{key}.")
    part.warnings += warnings
    if added:
        reason = "not stated, because transformers omits the defaults of a class. Those defaults are used."
        part.warnings.append(Assumed(f"{', '.join(added)}: {reason}"))
    return part


def _has_sizes(inner: object) -> bool:
    return isinstance(inner, Mapping) and inner.get("num_hidden_layers") is not None


def _part_of_unknown(fields: Fields, model_type: str, known: Container[str]) -> Fields | None:
    """Return the text model inside a config with an unknown model_type, or None if no known text model is inside."""
    for key in _TEXT_KEYS:
        inner = fields.get(key)
        inner_type = inner.get("model_type") if isinstance(inner, Mapping) else None
        if isinstance(inner_type, str) and (inner_type in known or inner_type in WRAPPERS):
            warning = f"model_type {model_type!a:.80} is not known, but its text model under {key} is."
            return _part(fields, key, inner, warning)
    return None


def with_class_defaults(inner: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the config of a text model with the defaults of its class added, and the names of the added keys.

    No base is added if `rope_scaling` or `rope_parameters` states one, since the two bases could contradict each other.
    """
    model_type = inner.get("model_type")
    defaults = dict(zip(_KEYS, _DEFAULTS.get(model_type, ()) if isinstance(model_type, str) else (), strict=False))
    sections = [value for key in ("rope_scaling", "rope_parameters") if isinstance(value := inner.get(key), Mapping)]
    nested = [value for section in sections for value in section.values() if isinstance(value, Mapping)]
    has_base = any("rope_theta" in section for section in [*sections, *nested])
    added = [
        key
        for key, value in defaults.items()
        if value is not None and inner.get(key) is None and not (has_base and key.startswith("rope_"))
    ]
    return {**inner, **{key: defaults[key] for key in added}}, added
