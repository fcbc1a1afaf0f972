"""`DEFAULT_BASES`, `DEFAULT_SECTIONS`: what classes of transformers take if a file states nothing where they read it.

Source: `default_theta` and `__post_init__` of the classes of transformers. A class that is not listed has the base
10000, and reads the base and the fraction of a file without a section from its top level.
"""

from typing import Any

DEFAULT_BASES: dict[str, float] = {
    name: base
    for base, names in {
        1e3: "nomic_bert",
        2e4: "jina_embeddings_v3 pe_audio_encoder pe_audio_video_encoder pe_video_encoder",
        1e5: "helium",
        1.5e5: "gpt_oss openai_privacy_filter",
        1.6e5: "deepseek_v4.compressed_sparse_attention deepseek_v4.heavily_compressed_attention gte "
        "modernbert.full_attention modernbert-decoder.full_attention",
        5e5: "bitnet blt_global_transformer blt_local_decoder blt_local_encoder cohere csm csm_depth_decoder_model "
        "ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text evolla exaone flex_olmo llama4_text mllama_text_model "
        "muse_glimmer_assistant olmo3 paddleocr_vl_text qwen3_vl_moe_text qwen3_vl_text",
        1e6: "cwm emu3_text_model gemma3_text.full_attention gemma3n_text.full_attention lfm2 lfm2_moe lfm3 minimax "
        "mixtral neomme.full_attention phimoe qwen2_5_omni_talker qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text "
        "qwen3_omni_moe_text solar_open t5gemma2_decoder.full_attention t5gemma2_text.full_attention",
        2e6: "smollm3",
        5e6: "minimax_m2 minimax_m3_vl_text",
        6e6: "bailing_hybrid",
        8e6: "sarvam_moe",
        1e7: "longcat_flash",
        11_158_840.0: "hy_v3",
        1.2e7: "apertus apertus1p5_text",
        8e7: "dots3_note_text",
        1e8: "cosmos3_edge_text",
    }.items()
    for name in names.split()
}
"""Maps a model_type, or "model_type.kind of layer", to a base."""

_BETAS = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
_YARN = {**_BETAS, "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_MISTRAL = {**_BETAS, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1}
DEFAULT_SECTIONS: dict[str, dict[str, Any]] = {
    "apertus": {**_LLAMA3, "rope_theta": 1.2e7, "factor": 8.0, "original_max_position_embeddings": 8192},
    "apertus1p5_text": {**_LLAMA3, "rope_theta": 1.2e7, "factor": 8.0, "original_max_position_embeddings": 8192},
    "cosmos3_edge_text": {"rope_theta": 1e8, "mrope_section": [24, 20, 20]},
    "cwm": {**_LLAMA3, "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8192},
    **dict.fromkeys(("gpt_oss", "openai_privacy_filter"), _YARN),
    "higgs_audio_v2": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 0.125,
        "high_freq_factor": 0.5,
        "original_max_position_embeddings": 1024,
    },
    "ministral3": {**_MISTRAL, "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384},
    "mistral4": {**_MISTRAL, "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192},
    "moonshine_streaming": {"rope_theta": 1e4, "partial_rotary_factor": 0.8},
    "muse_spark_text": {"rope_theta": 5e5},
    "nemotron3_5_transcribe_asr_audio": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "nemotron3_5_transcribe_word_timestamp": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
"""Maps a model_type to the rope_parameters of its class, which hold for files that have no section at all."""
