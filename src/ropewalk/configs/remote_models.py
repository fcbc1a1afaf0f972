"""Architectures of models whose code is not in transformers, for the table in `models.py`.

The code comes with the checkpoint or with an inference engine. Models whose configs `Architecture` itself cannot read
have subclasses of it in `families/`.
"""

from __future__ import annotations

from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.layers import ALL, LayerCodes
from ropewalk.configs.rows import remote

_FULL = "full_attention"
_IMPLIED_BASE = {"kinds": {ALL: Kind(implied_base=10_000.0)}}

REMOTE: dict[str, Architecture] = {
    **{
        name: remote(where, **more)
        for name, where, more in (
            ("aquila", "modeling_aquila.py of AquilaChat-7B", _IMPLIED_BASE),
            ("bamboo", "modeling_bamboo.py of Bamboo-base-v0_1", {}),
            ("deepseek", "modeling_deepseek.py of deepseek-moe-16b-base", {}),
            (
                "hunyuan",
                "modeling_hunyuan.py of Tencent-Hunyuan-Large",
                {"head_dim_keys": ("head_dim", "attention_head_dim")},
            ),
            ("internlm2", "modeling_internlm2.py of internlm2-chat-7b; vLLM model_executor/models/internlm2.py", {}),
            ("llava_llama", "llava_llama.py of LLaVA: Llama with flat keys", _IMPLIED_BASE),
            ("llava_mistral", "llava_mistral.py of LLaVA: Mistral with flat keys", {}),
            ("llava_qwen", "llava_qwen.py of LLaVA-NeXT: Qwen 2 with flat keys", {}),
            ("mimo", "vLLM model_executor/models/mimo.py: as Qwen 2", {}),
            ("minicpm", "modeling_minicpm.py of MiniCPM-2B-sft-bf16", _IMPLIED_BASE),
            ("minicpmv", "modeling_minicpm.py of MiniCPM-V; vLLM model_executor/models/minicpmv.py", {}),
            ("orion", "modeling_orion.py of Orion-14B-Base; vLLM model_executor/models/orion.py", {}),
            ("xverse", "modeling_xverse.py of XVERSE-7B", _IMPLIED_BASE),
            ("Yi", "modeling_yi.py of Yi-34B", {}),
            ("yuan", "yuan_hf_model.py of Yuan2-2B-hf", {"kinds": {ALL: Kind(bases=(), implied_base=10_000.0)}}),
        )
    },
    **{
        name: remote(
            "modelling_RW.py of falcon-7b and falcon-40b, renamed to falcon in transformers",
            heads=("n_head", "num_attention_heads"),
            layers=("n_layer", "num_hidden_layers"),
            kinds={ALL: Kind(implied_base=10_000.0)},
            switch=("alibi", (None, False)),
        )
        for name in ("RefinedWeb", "RefinedWebModel")
    },
    "stablelm_epoch": remote(
        "modeling_stablelm_epoch.py of stablelm-3b-4e1t",
        head_dim_keys=(),
        partial_keys=("rope_pct",),
        partial=0.25,
        fixed={"rotary_scaling_factor": (1.0, "another factor")},
    ),
    "mixformer-sequential": remote(
        "modeling_mixformer_sequential.py of phi-1_5",
        head_dim_keys=(),
        hidden=("n_embd",),
        heads=("n_head",),
        layers=("n_layer",),
        dim_key="rotary_dim",
        kinds={ALL: Kind(bases=(), implied_base=10_000.0)},
        keys_without_effect={"flash_rotary": "it selects a kernel"},
    ),
    # The text model of DeepSeek-OCR and DeepSeek-VL2 without latent attention.
    "deepseek_ocr_text": remote(
        "modeling_deepseekv2.py of DeepSeek-OCR with use_mla false; base of its class",
        head_dim_keys=(),
        fixed={"qk_rope_head_dim": (0, "latent attention without use_mla")},
        **_IMPLIED_BASE,
    ),
    "phi4mm": remote(
        "modeling_phi4mm.py of Phi-4-multimodal-instruct; vLLM model_executor/models/phi4mm.py", partial=1.0
    ),
    "minimax_m3": remote(
        "vLLM model_executor/models/minimax_m3.py", head_dim_divides=False, partial=1.0, dim_key="rotary_dim"
    ),
    **{
        name: remote(
            "modeling_minimax_m1.py of MiniMax-M1-40k; vLLM model_executor/models/minimax_text_01.py",
            partial=1.0,
            dim_key="rotary_dim",
            kinds={_FULL: Kind(), "linear_attention": None},
            pattern=LayerCodes("attn_type_list", {0: "linear_attention", 1: _FULL}),
        )
        for name in ("minimax_m1", "minimax_text_01")
    },
}
"""Maps a model_type to its row."""
