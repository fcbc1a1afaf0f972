"""Which architecture of llama.cpp pairs which channels, and what else about rotation it implies. Data in one place.

Checked against llama.cpp as vendored in llama-cpp-python 0.3.36: llama_model_rope_type in src/llama-model.cpp for the
pairing; src/models/*.cpp for whether all layers turn alike and which tensors and keys are read.
"""

from __future__ import annotations

SOURCE = "llama.cpp src/llama-model.cpp, llama_model_rope_type"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# LLAMA_ROPE_TYPE_NORM; all layers alike, in src/models. The converter permutes q and k of Llama for it.
INTERLEAVED = _words(
    "arcee arctic bailingmoe chameleon chatglm command-r deepseek ernie4_5 ernie4_5-moe glm4 granite granitemoe "
    "internlm2 llada llama llama-embed maincoder minicpm mistral3 neo-bert olmo xverse"
)
# LLAMA_ROPE_TYPE_NEOX; all layers alike, in src/models.
HALF = _words(
    "apertus bailingmoe2 bitnet codeshell dbrx dots1 dream eurobert exaone falcon falcon-h1 gemma gemma2 glm4moe "
    "gpt-oss gptneox grovemoe hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 jais2 jina-bert-v3 llada-moe minimax-m2 "
    "nemotron nomic-bert nomic-bert-moe olmo2 olmoe openelm orion pangu-embedded phi2 phi3 phimoe qwen qwen2 qwen2moe "
    "qwen3 qwen3moe rnd1 seed_oss stablelm starcoder2"
)
NOT_ALL_LAYERS = "Its layers do not all rotate alike: not supported yet."
REFUSED = {
    **dict.fromkeys(
        _words(
            "afmoe cohere2 cohere2moe deci dots3note exaone-moe exaone4 gemma-embedding gemma3 gemma3n gemma4 "
            "gemma4-assistant granite_swa granitehybrid graniteswitch laguna lfm2 lfm2moe llama4 maple mellum mimo2 "
            "minimax-01 modern-bert muse-glimmer nanbeige plamo2 plamo3 qwen3next smallthinker smollm3 spark2_5 "
            "step35"
        ),
        NOT_ALL_LAYERS,
    ),
    **dict.fromkeys(
        _words("bailingmoe3 deepseek2 deepseek2-ocr deepseek32 deepseek4 glm-dsa hy_v4 minicpm3 mistral4 plm"),
        "Multi-head latent attention: not supported yet.",
    ),
    **dict.fromkeys(
        _words("paddleocr qwen2vl qwen35 qwen35moe qwen3tts qwen3vl qwen3vlmoe qwen4exp"),
        "Its tokens have several axes: not supported yet.",
    ),
    **dict.fromkeys(
        _words(
            "arwkv7 bert bloom clip glm5-next gpt2 gptj jais jamba jina-bert-v2 kimi-k3 kimi-linear mamba mamba2 mpt "
            "nemotron_h nemotron_h_moe refact rwkv6 rwkv6qwen2 rwkv7 starcoder t5 t5encoder wavtokenizer-dec"
        ),
        "llama.cpp rotates nothing in it.",
    ),
    "baichuan": "Its 13B rotates nothing, its 7B all layers, and no key says which it is.",
    **dict.fromkeys(
        _words("cogvlm dflash eagle3 grok hrm_text minimax-m3 plamo pockettts talkie"), "It is not supported yet."
    ),
}

LONGROPE_IF_TYPE = _words("apertus granite granitemoe llama llama-embed minicpm mistral3")
LONGROPE_BY_TENSORS = frozenset({"phi3", "phimoe"})  # whatever rope.scaling.type says
READS_FREQS = LONGROPE_IF_TYPE | {"arcee", "exaone"}
READS_ALPHA = frozenset({"hunyuan-dense", "hunyuan_vl"})
READS_YARN = frozenset({"mistral3"})  # yarn_beta_fast, yarn_beta_slow, yarn_log_multiplier
FINETUNED_IS_SWITCH = frozenset({"granite", "granitemoe"})
WHOLE_HEAD = frozenset({"falcon", "llama", "llama-embed"})
