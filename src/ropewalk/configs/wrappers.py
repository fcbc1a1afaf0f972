"""Models made of several: where their text model stands, and what its config means by leaving a key out.

transformers writes into the config of a model inside another only what differs from its class's defaults. So there, and
only there, a missing key means that default (Gemma 3 4B states neither base nor head_dim; LLaVA 1.5 not even a size).

Source: the config classes of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WITH_TEXT_CONFIG = (
    "aria audioflamingo3 aya_vision cohere2_vision cohere_compass cosmos3_edge cosmos3_omni deepseek_ocr2 deepseek_vl "
    "deepseek_vl_hybrid diffusion_gemma dots3_note embedding_gemma2 emu3 ernie4_5_vl_moe exaone4_5 fast_vlm fuyu "
    "gemma3 gemma3n gemma4 gemma4_unified glm46v glm4v glm4v_moe glm5_next glm_image glm_ocr glmasr got_ocr2 "
    "granite4_vision granite_docling granite_speech granite_speech_plus hyperclovax_vision_v2 idefics2 "
    "idefics3 internvl janus kimi_k25 lfm2_vl lighton_ocr llama4 llava llava_next llava_next_video "
    "llava_onevision minimax_m3_vl mistral3 mistral_large4 mllama modernvbert molmo2 musicflamingo ovis2 "
    "paddleocr_vl paligemma perception_lm qianfan_ocr qwen2_audio qwen3_5 qwen3_5_moe qwen3_asr qwen3_vl "
    "qwen3_vl_moe shieldgemma2 smolvlm step3p7 unlimited_ocr vibevoice video_llava vipllava voxtral voxtral_realtime "
)
WRAPPERS: dict[str, str] = dict.fromkeys(_WITH_TEXT_CONFIG.split(), "text_config")
"""model_type of a model made of several → the key that holds its text model."""

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
"""model_type of a text model → its class's defaults for `_KEYS`; None or nothing where it has none."""


def with_class_defaults(inner: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The config of a text model with what it leaves out, and the names of those keys.

    Bases are filled in only where none is stated in any section: a stated one would contradict.
    """
    model_type = inner.get("model_type")
    defaults = dict(zip(_KEYS, _DEFAULTS.get(model_type, ()) if isinstance(model_type, str) else (), strict=False))
    sections = [value for key in ("rope_scaling", "rope_parameters") if isinstance(value := inner.get(key), Mapping)]
    nested = [value for section in sections for value in section.values() if isinstance(value, Mapping)]
    based = any("rope_theta" in section for section in [*sections, *nested])
    left_out = [
        key
        for key, value in defaults.items()
        if value is not None and inner.get(key) is None and not (based and key.startswith("rope_"))
    ]
    return {**inner, **{key: defaults[key] for key in left_out}}, left_out
