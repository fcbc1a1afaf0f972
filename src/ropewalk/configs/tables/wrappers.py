"""Models that contain a text model, and the defaults of text models whose configs omit them.

Source: the config classes of transformers, and for models that it does not have those of vLLM
(transformers_utils/configs, model_executor/models) and SGLang (srt/configs).
"""

from __future__ import annotations

import json
from pathlib import Path

_WITH_TEXT_CONFIG = (
    "apertus1p5 aria audioflamingo3 aya_vision cohere2_vision cohere_compass cosmos3_edge cosmos3_omni deepseek_ocr2 "
    "deepseek_vl deepseek_vl_hybrid diffusion_gemma dots3_note embedding_gemma2 emu3 ernie4_5_vl_moe exaone4_5 "
    "fast_vlm fun_asr_nano fuyu gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant "
    "glm46v glm4v glm4v_moe glm5_next glm_image glm_ocr glmasr glmga got_ocr2 granite4_vision granite_docling "
    "granite_speech granite_speech_plus hunyuan_vl hy_v4_vl hyperclovax_vision_v2 idefics2 idefics3 inkling2 "
    "inkling2_loop inkling_mm_model internvl janus jev kimi_k25 lfm2_vl lfm3_vl lighton_ocr llama4 llava llava_next "
    "llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3 mistral_large4 "
    "mllama modernvbert molmo2 muse_glimmer muse_spark musicflamingo nemo_speechlm nemotron_h_omni omniasr ovis2 "
    "paddleocr_vl paligemma pe_audio pe_audio_video pe_video perception_lm pp_chart2table qianfan_ocr "
    "qwen2_5_omni_thinker qwen2_audio qwen3_5 qwen3_5_moe qwen3_asr qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe "
    "qwen4_exp shieldgemma2 smolvlm step3p7 t5gemma2_encoder ultravbert unlimited_ocr vibevoice vibevoice_asr "
    "video_llama_3 video_llava vipllava voxtral voxtral_realtime "
)
REMOTE = {
    "text_config": "colqwen3 funaudiochat intern_s2_preview interns2_mobius isaac jet_vlm kimi_k3 kimi_vl "
    "locateanything midashenglm moss_transcribe_diarize opencua openvla ops_colqwen3 qwen3_vl_nemotron_embed step3_vl "
    "ultravox deepseek_v41",
    "llm_config": "NVLM_D bagel h2ovl_chat ovis ovis2_5 pointsv1.5_chat skywork_chat",
}
"""Maps the key of the text model to the model_types of models whose code is not in transformers."""

WRAPPERS: dict[str, str] = {
    **dict.fromkeys(_WITH_TEXT_CONFIG.split(), "text_config"),
    **{name: key for key, names in REMOTE.items() for name in names.split()},
    "deepseek_vl_v2": "language_config",
    "infimm-zephyr": "language",
    "qwen2_5_omni": "thinker_config",
    "qwen3_omni_moe": "thinker_config",
    "internvl_chat": "llm_config",
    "blt": "global_config",
    "colmodernvbert": "vlm_config",
    "colpali": "vlm_config",
    "colqwen2": "vlm_config",
    "deepseek_ocr2_vision": "encoder_config",
    "dia": "decoder_config",
    "bailing_moe_v3_vl": "text_config",
    "openpangu_vl": "text_config",
    "lasr_ctc": "encoder_config",
    "moondream3": "config.text",
    "nemotron3_5_transcribe_audio": "asr_config",
    "nemotron3_diarization": "audio_config",
    "pi0": "vlm_config",
    "t5gemma": "decoder",
    "t5gemma2": "decoder",
}
"""Maps the model_type of a model that contains others to the key of its text model."""

OTHER_KEYS = {"vibevoice": "decoder_config", "qwen3_asr": "thinker_config"}
"""Maps the model_type of a model to another key of its text model, for files written by the model's own code."""

OTHER_PARTS = {
    "blt": ("patcher_config", "encoder_config", "decoder_config"),
    "deepseek_ocr2": ("vision_config.encoder_config",),
    "dia": ("encoder_config",),
    "nemo_speechlm": ("audio_config.asr_config", "audio_config.diarization_config", "word_timestamp_config"),
    "nemotron3_5_transcribe_audio": ("diarization_config",),
    "pe_audio": ("audio_config",),
    "pe_audio_video": ("audio_video_config", "audio_video_config.audio_config", "audio_video_config.video_config"),
    "pe_audio_video_encoder": ("audio_config", "video_config"),
    "pe_video": ("video_config",),
    "pi0": ("dit_config",),
    "t5gemma": ("encoder",),
    "t5gemma2": ("encoder",),
}
"""Maps the model_type of a model to the keys of the parts that rotate beside its text model."""

TOWER_KEYS = ("vision_config", "thinker_config", "backbone_config")
"""Keys of a tower, or of a part that contains one."""

# Keys of the text model in configs with an unknown model_type. Vision towers and projectors have other keys.
TEXT_KEYS = ("text_config", "llm_config", "language_config", "language", "llm", "decoder_config", "thinker_config")

# Models whose files may have the keys of the text model at the top level: maps them to the model_type to read.
FLAT_AS = {
    "llava": "llama",
    "fuyu": "persimmon",
    "step3p7": "step3p5",
    "hunyuan_vl": "hunyuan_vl_text",
    "isaac": "isaac_text",
    "openpangu_vl": "openpangu_vl_text",
}
# Models whose published files have the keys of the text model at the top level, while files written by transformers 5
# nest them: maps them to the key of the nested config.
FLAT_OR_NESTED = {"qwen2_vl": "text_config", "qwen2_5_vl": "text_config"}
# Models whose nested text config omits its model_type: maps them to that model_type.
MISSING_MODEL_TYPES = {
    "bagel": "qwen2",
    "deepseek_vl_v2": "deepseek_ocr_text",
    "jet_vlm": "jet_nemotron",
    "kimi_k3": "kimi_linear",
    "locateanything": "qwen2",
    "moondream3": "moondream3_text",
    "openvla": "llama",
    "pointsv1.5_chat": "qwen2",
    "step3_vl": "step3_text",
}
# Models whose text model is not as its model_type says: maps them to the model_type to read, and to the keys beside the
# text model that concern it.
TEXT_AS = {
    "bailing_moe_v3_vl": ("bailing_moe_v3_vl_text", ("mrope_section",)),
    "deepseek_v41": ("deepseek_v41_text", ()),
    "exaone4_5": ("exaone4", ()),
    "isaac": ("isaac_text", ()),
    "minimax_m3_vl": ("minimax_m3_vl_text", ()),
}
# Model_types of two models: maps them to a key of the other one and its value, and to the model_type to read it as.
SHARED_NAMES: dict[str, tuple[str, object, str]] = {
    "bailing_hybrid": ("architectures", ["BailingMoeV2_5ForCausalLM"], "bailing_moe_v2_5"),
    "git": ("architectures", ["Grok1ForCausalLM"], "grok-1"),
    "xlm-roberta": ("position_embedding_type", "rotary", "xlm-roberta-flash"),
}

DEFAULTS: dict[str, dict[str, float]] = json.loads(
    (Path(__file__).parent / "class_defaults.json").read_text(encoding="utf-8")
)
"""Maps the model_type of a text model to the defaults of its class."""
