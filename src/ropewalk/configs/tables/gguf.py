"""The table of llama.cpp's architectures: `ROWS` maps the names of architectures to the row that they share.

The rows were checked against llama.cpp as vendored in llama-cpp-python 0.3.36: against llama_model_rope_type in
src/llama-model.cpp for the pairing, src/models/*.cpp for the rotation of each layer and the tensors and keys that are
read, and conversion/*.py for the content of files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ropewalk.configs.architecture import QueryScale
from ropewalk.configs.gguf.row import (
    BASE,
    BASE_COMPRESSED,
    BASE_SWA,
    DIM_SWA,
    HEAD_MLA_SWA,
    HEAD_SWA,
    KV_HEADS,
    MODEL_KIND,
    ORIGINAL,
    ROPE_PATTERN,
    GgufRow,
    ImpliedBase,
    Indexer,
    Layers,
)
from ropewalk.configs.layers import ALL, NO_ROPE, Every, Kind, LayerCodes, LayerFlags

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_WINDOWS, _RECURRENT = "attention.sliding_window_pattern", "attention.recurrent_layers"
_LENGTH = "attention.temperature_length"

_UNSCALED = Kind((BASE,), scaled=False)
_LOCAL = Kind((BASE_SWA, BASE))
_LOCAL_WITH_HEAD = replace(_LOCAL, head_dim_key=HEAD_SWA, dim_key=DIM_SWA)
_GEMMA_LOCAL = Kind((BASE_SWA,), implied_base=10_000.0, scaled=False)
_COMPRESSED = Kind((BASE_COMPRESSED,))
_LOCAL_WITH_BASE = Kind((BASE_SWA,), scaled=False)  # an error without a base, although llama.cpp then uses 10000


def _in(model: str) -> str:
    return f"llama.cpp src/models/{model}.cpp"


def _last(n: int) -> Every:
    return Every(n, _FULL, _SLIDING, key=_WINDOWS)


def _first(n: int) -> Every:
    return Every(n, _FULL, _SLIDING, key=_WINDOWS, first=True)


def _windows(full: Kind | None, local: Kind, default: Every | None, **more: Any) -> Layers:
    """Build the layers of an architecture in which some layers have a sliding window and the others full attention.

    `default` is the pattern for files without a list, and `more` are further fields of `Layers`.
    """
    return Layers({_FULL: full, _SLIDING: local}, LayerFlags(_WINDOWS, _SLIDING, _FULL, default), **more)


def _unrotated_fourth(default: Every, **more: Any) -> Layers:
    """Build the layers of an architecture in which one of every four does not rotate, whatever list the file has."""
    return _windows(None, _LOCAL, default, ignores_list=True, **more)


def _linear(interval: int) -> Layers:
    """Build the layers of an architecture in which the last of every `interval` layers rotates."""
    pattern = Every(interval, _FULL, _LINEAR, key="full_attention_interval")
    return Layers({_FULL: MODEL_KIND, _LINEAR: None}, LayerFlags(_RECURRENT, _LINEAR, _FULL, pattern))


def _kv_heads(other: str) -> Layers:
    """Build the layers of an architecture in which a layer without heads of k is of kind `other`."""
    return Layers({_FULL: MODEL_KIND, other: None}, LayerFlags(KV_HEADS, _FULL, other, _FULL))


_UNWRITTEN = ImpliedBase(
    10_000.0, "llama.cpp's converter may write none for it", "Compare it with the base in the model's config.json."
)
_FIXED_BASE = Layers({ALL: Kind((), implied_base=10_000.0, scaled=False)}, ALL)
_LOCAL_WITH_BASE_AND_HEAD = replace(_LOCAL_WITH_BASE, head_dim_key=HEAD_SWA, dim_key=DIM_SWA)


UNROTATED = Layers({NO_ROPE: None}, NO_ROPE)
ROWS: dict[str, GgufRow] = {
    # ---- all layers rotate alike, and llama.cpp reads no further keys or tensors ----
    "arctic bailingmoe chameleon chatglm command-r deepseek ernie4_5 ernie4_5-moe internlm2 llada maincoder neo-bert "
    "olmo pockettts": GgufRow("interleaved"),
    "xverse": GgufRow("interleaved", implied_base=_UNWRITTEN),
    "gptneox orion phi2 plamo": GgufRow("half", implied_base=_UNWRITTEN),
    "bailingmoe2 bitnet codeshell dbrx dots1 dream eurobert falcon-h1 gemma grovemoe hrm_text hunyuan-moe "
    "hy_v3 jais2 jina-bert-v3 llada-moe minimax-m2 nemotron nomic-bert nomic-bert-moe olmoe openelm "
    "pangu-embedded qwen qwen2 qwen2moe qwen3 qwen3moe rnd1 seed_oss stablelm starcoder2 talkie": GgufRow("half"),
    "minimax-m3": GgufRow("half", _in("minimax-m3"), indexer=Indexer("half")),
    # ---- all layers rotate alike, and llama.cpp reads further keys or tensors ----
    # Llama is interleaved because the converter permutes its q and k.
    "llama": GgufRow(
        "interleaved",
        freqs="read",
        longrope="by type",
        whole_head="required",
        implied_base=ImpliedBase(
            10_000.0,
            "files of Llama 1 and 2 have no rope.freq_base",
            "In a model newer than Llama 2, the key was lost.",
        ),
    ),
    "llama-embed": GgufRow("interleaved", freqs="read", longrope="by type", whole_head="required"),
    "falcon": GgufRow("half", whole_head="required", implied_base=_UNWRITTEN),
    # Nanbeige runs its layers several times, and eagle3 is a draft of one layer.
    "arcee eagle3 nanbeige": GgufRow("interleaved", freqs="read"),
    "exaone": GgufRow("half", freqs="read"),
    "minicpm": GgufRow("interleaved", freqs="read", longrope="by type", implied_base=_UNWRITTEN),
    "apertus": GgufRow("half", freqs="read", longrope="by type"),
    "granite granitemoe": GgufRow("interleaved", freqs="read", longrope="by type", finetuned_is_switch=True),
    "graniteswitch": GgufRow("interleaved", _in("granite-switch"), finetuned_is_switch=True),
    "grok": GgufRow("half", _in("grok"), yarn_betas=(8.0, 1.0), yarn_attention="extra"),
    "phi3 phimoe": GgufRow("half", longrope="by tensors"),
    "hunyuan-dense": GgufRow("half", alpha=True),
    "mistral3": GgufRow(
        "interleaved",
        _in("mistral3"),
        freqs="read",
        longrope="by type",
        yarn_betas=(32.0, 1.0),
        yarn_log="whole",
        temperature_length=ORIGINAL,
    ),
    # ---- multi-head latent attention ----
    "deepseek2": GgufRow(
        "interleaved",
        _in("deepseek2"),
        latent=True,
        scales_softmax=True,
        yarn_log="tenth",
        yarn_log_is_mscale=True,
        temperature_length=_LENGTH,
    ),
    # The code of deepseek2 rotates the whole head in it, without scaling.
    "deepseek2-ocr": GgufRow("half", _in("deepseek2"), layers=_FIXED_BASE, whole_head="always"),
    # llama.cpp runs mistral4 with the code of deepseek2.
    "mistral4": GgufRow(
        "interleaved", _in("deepseek2"), latent=True, scales_softmax=True, yarn_log="tenth", temperature_length=_LENGTH
    ),
    "deepseek32": GgufRow(
        "interleaved", _in("deepseek32"), latent=True, scales_softmax=True, yarn_log="tenth", indexer=Indexer("half")
    ),
    "glm-dsa": GgufRow("interleaved", _in("glm-dsa"), latent=True, scales_softmax=True, indexer=Indexer("interleaved")),
    "hy_v4": GgufRow(
        "interleaved",
        _in("hy-v4"),
        latent=True,
        indexer=Indexer("interleaved", tail=True, optional=True),
        warning="llama.cpp rotates adjacent channels as pairs, and its converter does not permute the weights. "
        "transformers pairs the two halves instead.",
    ),
    "bailingmoe3": GgufRow(
        "interleaved", _in("bailingmoe3"), latent=True, layers=_kv_heads(_LINEAR), axes="mrope if sections"
    ),
    "dots3note": GgufRow(
        "interleaved",
        _in("dots3note"),
        latent=True,
        layers=_windows(MODEL_KIND, Kind((BASE_SWA,), head_dim_key=HEAD_MLA_SWA), None),
        indexer=Indexer("half", _FULL),
    ),
    "deepseek4": GgufRow(
        "interleaved",
        _in("deepseek4"),
        latent=True,
        layers=Layers(
            {_SLIDING: _UNSCALED, _SPARSE: _COMPRESSED, _HEAVY: _COMPRESSED},
            LayerCodes("attention.compress_ratios", {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}),
        ),
        rotates_values=True,
        yarn_attention="one",
        indexer=Indexer("interleaved", _SPARSE, tail=True),
    ),
    "minicpm3": GgufRow("half", _in("minicpm3"), latent=True, longrope="by tensors", implied_base=_UNWRITTEN),
    "plm": GgufRow("interleaved", _in("plm"), latent=True),
    # ---- tokens have several positions ----
    "paddleocr qwen2vl": GgufRow("half", axes="mrope"),
    "qwen3tts qwen3vl qwen3vlmoe": GgufRow("half", axes="imrope"),
    "glm4": GgufRow("interleaved", axes="mrope if sections"),
    "glm4moe": GgufRow("half", axes="mrope if sections"),
    "hunyuan_vl": GgufRow("half", axes="mrope if sections", alpha=True),
    # ---- sliding layers have their own base and no scaling ----
    "gemma3": GgufRow(
        "half", _in("gemma3"), layers=_windows(MODEL_KIND, _GEMMA_LOCAL, _last(6), alike_without_window=True)
    ),
    "gemma3n": GgufRow("half", _in("gemma3n"), layers=_windows(MODEL_KIND, _GEMMA_LOCAL, _last(5))),
    "gemma-embedding": GgufRow("half", _in("gemma-embedding"), layers=_windows(MODEL_KIND, _GEMMA_LOCAL, _last(6))),
    "gemma4": GgufRow(
        "half", _in("gemma4"), layers=_windows(MODEL_KIND, _LOCAL_WITH_BASE_AND_HEAD, None), freqs="needed"
    ),
    # A draft, whose q attends to the cache of another model.
    "gemma4-assistant": GgufRow(
        "half",
        _in("gemma4-assistant"),
        layers=_windows(MODEL_KIND, _LOCAL_WITH_BASE_AND_HEAD, None),
        freqs="needed",
        drafts=True,
    ),
    "step35": GgufRow(
        "half",
        _in("step35"),
        layers=_windows(replace(MODEL_KIND, halved=True), _LOCAL_WITH_BASE_AND_HEAD, None),
        freqs="read",
    ),
    "modern-bert": GgufRow(
        "half", _in("modern-bert"), layers=_windows(MODEL_KIND, _LOCAL_WITH_BASE, _first(3), alike_without_window=True)
    ),
    "plamo3": GgufRow(
        "half", _in("plamo3"), layers=_windows(MODEL_KIND, _LOCAL_WITH_BASE, _last(8), alike_without_window=True)
    ),
    "mimo2": GgufRow("half", _in("mimo2"), layers=_windows(MODEL_KIND, _LOCAL_WITH_BASE, None)),
    "laguna": GgufRow(
        "half",
        _in("laguna"),
        layers=_windows(MODEL_KIND, replace(_LOCAL_WITH_HEAD, scaled=False), _first(4), alike_without_window=True),
    ),
    # ---- sliding layers have the base of the model and no scaling ----
    "olmo2": GgufRow("half", _in("olmo2"), layers=_windows(MODEL_KIND, _UNSCALED, _last(4), alike_without_window=True)),
    "mellum": GgufRow(
        "half", _in("mellum"), layers=_windows(MODEL_KIND, _UNSCALED, _last(4), alike_without_window=True)
    ),
    # ---- sliding layers may have their own base, and have the scaling of the model ----
    "gemma2": GgufRow("half", _in("gemma2"), layers=_windows(MODEL_KIND, _LOCAL, _last(2))),
    "gpt-oss": GgufRow(
        "half",
        _in("openai-moe"),
        layers=_windows(MODEL_KIND, _LOCAL, _last(2)),
        yarn_warning="llama.cpp rounds the ends of YaRN's ramp, and so do these ropes. The model's own config does "
        "not: it has truncate=False.",
    ),
    "spark2_5": GgufRow("half", _in("spark2-5"), layers=_windows(MODEL_KIND, _LOCAL_WITH_HEAD, None)),
    # ---- full layers do not rotate ----
    "cohere2": GgufRow("interleaved", _in("cohere2"), layers=_windows(None, MODEL_KIND, _last(4))),
    "cohere2moe": GgufRow(
        "interleaved",
        _in("cohere2moe"),
        layers=_windows(None, MODEL_KIND, _first(4), leading="leading_dense_block_count"),
    ),
    "exaone4": GgufRow("half", _in("exaone4"), layers=_windows(None, MODEL_KIND, _last(4), count=64), freqs="read"),
    "exaone-moe": GgufRow("half", _in("exaone-moe"), layers=_windows(None, MODEL_KIND, _last(4)), freqs="read"),
    "muse-glimmer": GgufRow(
        "interleaved", _in("muse-glimmer"), layers=_windows(None, replace(_LOCAL, scaled=False), _last(4))
    ),
    "maple": GgufRow("half", _in("maple"), layers=_windows(None, _LOCAL_WITH_HEAD, None)),
    "llama4": GgufRow(
        "interleaved",
        _in("llama4"),
        layers=_unrotated_fourth(
            _last(4), zero_window_refusal="With 0, llama.cpp rotates all layers but the last, which is not supported."
        ),
        freqs="read",
        query_scale=QueryScale(beta=0.1, original_max_position_embeddings=8192, offset=1, only_unrotated=True),
    ),
    "afmoe": GgufRow("half", _in("afmoe"), layers=_unrotated_fourth(_last(4))),
    "smallthinker": GgufRow(
        "half", _in("smallthinker"), layers=_unrotated_fourth(_first(4), alike_without_window=True)
    ),
    # ---- llama.cpp passes no base and no scaling ----
    "cogvlm": GgufRow("half", _in("cogvlm"), layers=_FIXED_BASE, whole_head="always"),
    # ---- some layers do not rotate, according to a pattern or a list ----
    # Only the 7B, with its 32 layers, rotates.
    "baichuan": GgufRow(
        "interleaved",
        _in("baichuan"),
        layers=Layers({ALL: MODEL_KIND, NO_ROPE: None}, ALL, count=32, alike=NO_ROPE),
        implied_base=_UNWRITTEN,
    ),
    "smollm3": GgufRow(
        "interleaved", _in("smollm3"), layers=Layers({ALL: MODEL_KIND, NO_ROPE: None}, Every(4, NO_ROPE, ALL))
    ),
    "granite_swa": GgufRow(
        "interleaved",
        _in("granite-swa"),
        layers=Layers({ALL: MODEL_KIND, NO_ROPE: None}, LayerFlags(ROPE_PATTERN, otherwise=ALL)),
        freqs="read",
        longrope="by type",
    ),
    # ---- some layers have no attention ----
    "deci": GgufRow(
        "interleaved",
        _in("deci"),
        layers=_kv_heads("no attention"),
        freqs="read",
        longrope="by type",
        whole_head="required",
    ),
    "lfm2": GgufRow("half", _in("lfm2"), layers=_kv_heads("conv")),
    "lfm2moe": GgufRow("half", _in("lfm2moe"), layers=_kv_heads("conv")),
    "granitehybrid": GgufRow(
        "interleaved", _in("granite-hybrid"), layers=_kv_heads("mamba"), freqs="read", finetuned_is_switch=True
    ),
    "plamo2": GgufRow("half", _in("plamo2"), layers=_kv_heads("mamba")),
    "qwen3next": GgufRow("half", _in("qwen3next"), layers=_linear(4)),
    "qwen35": GgufRow("half", _in("qwen35"), layers=_linear(4), axes="imrope"),
    "qwen35moe": GgufRow("half", _in("qwen35moe"), layers=_linear(4), axes="imrope"),
    "qwen4exp": GgufRow("half", _in("qwen4exp"), layers=_linear(4), axes="imrope", indexer=Indexer("half", _FULL)),
    "minimax-01": GgufRow("half", _in("minimax-01"), layers=_linear(8)),
    # ---- no layer rotates, although some attend ----
    "glm5-next jamba kimi-k3 kimi-linear nemotron_h nemotron_h_moe": GgufRow("half", layers=UNROTATED, latent=True),
    # ---- no Rope describes them ----
    "arwkv7 bert bloom clip gpt2 gptj jais jina-bert-v2 mamba mamba2 mpt refact rwkv6 rwkv6qwen2 rwkv7 starcoder t5 "
    "t5encoder wavtokenizer-dec": GgufRow(None, refusal="llama.cpp rotates nothing in this architecture."),
    "dflash": GgufRow(None, refusal="It drafts in the layout of several models, which is not supported yet."),
}
"""Maps the names of architectures, separated by spaces, to the row that they share."""

_HF_NAMES = (
    "afmoe apertus arcee baichuan bailingmoe2:bailing_moe_v2 bailingmoe:bailing_moe bitnet cohere2 command-r:cohere "
    "dots1 ernie4_5 ernie4_5-moe:ernie4_5_moe eurobert exaone exaone-moe:exaone_moe exaone4 falcon falcon-h1:falcon_h1 "
    "gemma gemma2 gemma3:gemma3_text gemma3n:gemma3n_text glm4 glm4moe:glm4_moe gptneox:gpt_neox granite granitemoe "
    "hunyuan-dense:hunyuan_v1_dense hunyuan-moe:hunyuan_v1_moe hy_v3 internlm2 jais2 jamba kimi-linear:kimi_linear "
    "laguna lfm2 lfm2moe:lfm2_moe llama mellum minicpm minimax-m2:minimax_m2 minimax-m3:minimax_m3_vl_text "
    "mistral3:ministral3 modern-bert:modernbert nemotron nemotron_h nemotron_h_moe:nemotron_h nomic-bert:nomic_bert "
    "olmo olmoe orion phi2:phi phi3 phimoe qwen2 qwen2moe:qwen2_moe qwen2vl:qwen2_vl qwen3 qwen35:qwen3_5/qwen3_5_text "
    "qwen35moe:qwen3_5_moe/qwen3_5_moe_text qwen3moe:qwen3_moe qwen3next:qwen3_next qwen3vl:qwen3_vl/qwen3_vl_text "
    "qwen3vlmoe:qwen3_vl_moe/qwen3_vl_moe_text seed_oss smollm3 stablelm starcoder2 xverse"
)
HF_MODEL_TYPES = {name.split(":")[0]: name.split(":")[-1] for name in _HF_NAMES.split()}
"""Maps architectures to the model_type of Hugging Face whose files the converter writes with this architecture.

"outer/inner" is that of a file with a text_config. Files of "llama" can be those of Mistral and others, which rotate as
Llama does, and those of qwen2vl of Qwen 2.5 VL. Architectures that several model_types share, and that then rotate
differently, are missing (olmo2, deepseek2), and so are those of which a file does not hold all numbers (gpt-oss).
"""
HF_PUBLISHED_IN_5 = {name for name in HF_MODEL_TYPES.values() if name.startswith("qwen3_5")}
"""Those whose config.json has rope_parameters."""
