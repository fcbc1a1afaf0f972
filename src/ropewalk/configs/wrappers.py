"""Models made of several: where their text model stands.

Source: the config classes of transformers 5.23.
"""

from __future__ import annotations

_WITH_TEXT_CONFIG = (
    "aria audioflamingo3 aya_vision cohere2_vision cosmos3_edge cosmos3_omni deepseek_ocr2 deepseek_vl "
    "deepseek_vl_hybrid diffusion_gemma embedding_gemma2 emu3 ernie4_5_vl_moe exaone4_5 fast_vlm fuyu gemma3 "
    "gemma3n gemma4 gemma4_unified glm46v glm4v glm4v_moe glm5_next glm_image glm_ocr glmasr got_ocr2 "
    "granite4_vision granite_docling granite_speech granite_speech_plus hyperclovax_vision_v2 idefics2 "
    "idefics3 internvl janus kimi_k25 lfm2_vl lighton_ocr llama4 llava llava_next llava_next_video "
    "llava_onevision minimax_m3_vl mistral3 mistral_large4 mllama modernvbert molmo2 musicflamingo ovis2 "
    "paddleocr_vl paligemma perception_lm qianfan_ocr qwen2_audio qwen3_5 qwen3_5_moe qwen3_asr qwen3_vl "
    "qwen3_vl_moe shieldgemma2 smolvlm unlimited_ocr vibevoice video_llava vipllava voxtral voxtral_realtime "
)
WRAPPERS: dict[str, str] = dict.fromkeys(_WITH_TEXT_CONFIG.split(), "text_config")
"""model_type of a model made of several → the key that holds its text model."""
