"""Small models with random weights, one for every row of the table in docs/transformers-models.md."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Given to a config as far as it has the key. Every number of heads, tokens and channels differs from its neighbours.
TINY: dict[str, Any] = {
    "attention_head_size": 16,
    "bos_token_id": 1,
    "d_model": 64,
    "eos_token_id": 2,
    "expert_ffn_hidden_size": 32,
    "ffn_hidden_size": 96,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 8,
    "initializer_range": 0.1,  # sharper attention than a new model's: what is rotated wrongly shows
    "index_head_dim": 32,
    "index_n_heads": 4,
    "intermediate_size": 96,
    "kv_lora_rank": 16,
    "max_position_embeddings": 131_072,
    "moe_intermediate_size": 32,
    "moe_k": 2,
    "moe_num_experts": 4,
    "n_embd": 64,
    "n_group": 1,
    "n_head": 4,
    "n_heads": 4,
    "n_inner": 96,
    "n_layer": 2,
    "n_positions": 131_072,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 0,
    "num_layers": 2,
    "num_local_experts": 4,
    "num_shared_experts": 1,
    "pad_token_id": 0,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "rotary_dim": 8,
    "shared_expert_intermediate_size": 32,
    "sliding_window": 64,
    "topk_group": 1,
    "v_head_dim": 16,
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
}
_LINEAR, _FULL, _SLIDING = "linear_attention", "full_attention", "sliding_attention"
# Of the mixers beside attention; those of the classes take twenty seconds.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
_LATENT = {"num_key_value_heads": 4}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 16_384}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8_192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 2.0 * i for i in range(8)],
    "original_max_position_embeddings": 4_096,
}

# name → what its config is given beside TINY (None takes a key of TINY away). The model type is before a colon.
MODELS: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "apertus": {},
    "arcee": {},
    "aria_text": {},
    "axk1": _LATENT,
    "bamba": {"attn_layer_indices": [1], **_MAMBA},
    "beam": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": {},
    "cohere2_moe": {},
    "cwm": {},
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2},
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "diffllama": {},
    "doge": {},
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "eurobert": {},
    "exaone4": {},
    "exaone_moe": {},
    "falcon": {"head_dim": None, "alibi": False, "new_decoder_architecture": False},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "flex_olmo": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {"num_hidden_layers": 6},
    "gemma3n_text": {"num_hidden_layers": 6},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "gpt_neox": {},
    "gpt_neox_japanese": {},
    "gpt_oss": {},
    "granite": {},
    "granite_swa": {},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid": {"position_embedding_type": "rope", "layer_types": [_LINEAR, _FULL], **_MAMBA},
    "granitemoeshared": {},
    "gte": {},
    "helium": {},
    "hrm_text": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hy_v4": {},
    "hyperclovax": {},
    "jais2": {},
    "jetmoe": {},
    "jina_embeddings_v3": {},
    "kolibri1": {},
    "laguna": {},
    "lara_mini": {"num_hidden_layers": 3, "layer_types": [_LINEAR, _SLIDING, _FULL]},
    "lfm2": {"layer_types": ["conv", _FULL]},
    "lfm2_moe": {"layer_types": ["conv", _FULL]},
    "llama": {},
    "llama:linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    "llama:llama3": {"rope_parameters": _LLAMA3},
    "llama:yarn": {"rope_parameters": _YARN},
    "llama4_text": {"num_hidden_layers": 4},
    "longcat_flash": {**_LATENT, "num_hidden_layers": None, "num_layers": 1},
    "mellum": {},
    "minicpm3": _LATENT,
    "minimax": {"layer_types": [_LINEAR, _FULL]},
    "minimax_m2": {},
    "ministral": {},
    "ministral3": {},
    "mistral": {},
    "mixtral": {},
    "modernbert": {"num_hidden_layers": 4},
    "modernbert-decoder": {"num_hidden_layers": 4},
    "molmo2_text": {},
    "nemotron": {"num_key_value_heads": 2},
    "nomic_bert": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"num_hidden_layers": 4},
    "olmo_hybrid": {},
    "olmoe": {},
    "openai_privacy_filter": {},
    "persimmon": {},
    "phi": {},
    "phi3": {"head_dim": None},
    "phi3:longrope": {"head_dim": None, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 4_096},
    "phi3:partial": {
        "head_dim": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    },
    "phimoe": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_next": {"layer_types": [_LINEAR, _FULL]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "sarvam_mla": _LATENT,
    "seed_oss": {},
    "smollm3": {"num_hidden_layers": 4},
    "solar_open": {},
    "stablelm": {},
    "starcoder2": {},
    "ultrabert": {},
    "vaultgemma": {},
    "youtu": _LATENT,
}

CONVERTED_ONLY: dict[str, dict[str, Any]] = {"codegen": {}, "gptj": {}}
"""Models that `convert` supports and `accelerate` does not."""

# Compiled without a graph break, in test_transformers_processes.py. Ways to be called: plain, LongRoPE, by layer type,
# half tables, pairs to halves, complex numbers twice, the whole head, each column twice, one tensor at a time, and with
# a table in each layer.
COMPILED = (
    "llama",
    "phi3:longrope",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v2",
    "llama4_text",
    "gpt_neox",
    "cohere2",
    "gemma3n_text",
)
LENGTH = {"phi3:longrope": 131_072}  # what accelerate has to be told


def config(name: str, **changes: Any) -> Any:
    """Return the config of a small model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name.partition(":")[0]]
    default = kind()
    given = {key: value for key, value in TINY.items() if getattr(default, key, None) is not None or key == "head_dim"}
    given = {key: value for key, value in given.items() if hasattr(default, key)}
    given |= MODELS.get(name, {}) | changes
    return kind(**{key: value for key, value in given.items() if value is not None})


def build(name: str, **changes: Any) -> nn.Module:
    """Build a small model with the same weights each time, and with a language-model head if it has one."""
    from transformers import AutoModel, AutoModelForCausalLM

    made = config(name, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        try:
            model = AutoModelForCausalLM.from_config(made)
        except ValueError:
            model = AutoModel.from_config(made)
    return model.eval()
