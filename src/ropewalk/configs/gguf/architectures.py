"""Which architecture of llama.cpp pairs which channels, and what else about rotation it implies. Data in one place.

Checked against llama.cpp as vendored in llama-cpp-python 0.3.36: llama_model_rope_type in src/llama-model.cpp for the
pairing; src/models/*.cpp for which layers turn how and which tensors and keys are read; conversion/*.py for what files
hold. Keys are written without the architecture before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ropewalk.configs.architecture import ALL, NO_ROPE, Every, Kind

SOURCE = "llama.cpp src/llama-model.cpp, llama_model_rope_type"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True)
class Layers:
    """Which layers of an architecture are of which kind, and how each kind turns.

    Args:
        source: where this can be seen.
        kinds: name of a kind → how it gets its rope; None where it does not rotate.
        otherwise: the kinds where the file has no list: by a pattern, all the same, or None where it must have one.
        key: key of a list with an entry for each layer; "" where llama.cpp reads none.
        flagged, unflagged: the kind where an entry is true or greater than 0, and where it is false or 0.
        window: whether all layers turn alike where attention.sliding_window is 0 or not given.
        fixed: whether `otherwise` holds whatever `key` says, which must then say the same.
        count: the only number of layers with which they differ; None for any.
        no_window: why attention.sliding_window must not be 0; "" where it may.
    """

    source: str
    kinds: Mapping[str, Kind | None]
    otherwise: Every | str | None
    key: str = ""
    flagged: str = ""
    unflagged: str = ""
    window: bool = False
    fixed: bool = False
    count: int | None = None
    no_window: str = ""


FULL, SLIDING = "full_attention", "sliding_attention"
_WINDOWS, _RECURRENT = "attention.sliding_window_pattern", "attention.recurrent_layers"
KV_HEADS, ROPE_PATTERN = "attention.head_count_kv", "attention.rope_pattern"
BASE, BASE_SWA = "rope.freq_base", "rope.freq_base_swa"
DIM, DIM_SWA, SECTIONS = "rope.dimension_count", "rope.dimension_count_swa", "rope.dimension_sections"
HEAD, HEAD_SWA, HEAD_MLA = "attention.key_length", "attention.key_length_swa", "attention.key_length_mla"

OWN = Kind(bases=(BASE,))  # as the model
_UNSCALED = Kind(bases=(BASE,), scaled=False)
_LOCAL = Kind(bases=(BASE_SWA, BASE))
_GEMMA_LOCAL = Kind(bases=(BASE_SWA,), implied_base=10_000.0, scaled=False)
_STATED_LOCAL = Kind(bases=(BASE_SWA,), scaled=False)  # llama.cpp would take 10000


def _windows(
    model: str,
    full: Kind | None,
    local: Kind,
    otherwise: Every | None,
    *,
    window: bool = False,
    count: int | None = None,
) -> Layers:
    """Sliding layers and full ones, in a list or by a pattern."""
    return Layers(
        f"llama.cpp src/models/{model}.cpp",
        {FULL: full, SLIDING: local},
        otherwise,
        _WINDOWS,
        SLIDING,
        FULL,
        window=window,
        count=count,
    )


def _fixed(model: str, otherwise: Every, *, window: bool = False, no_window: str = "") -> Layers:
    """Every fourth layer does not turn, whatever the file says of windows; the others may have a base of their own."""
    row = _windows(model, None, _LOCAL, otherwise, window=window)
    return replace(row, fixed=True, no_window=no_window)


def _linear(model: str, interval: int) -> Layers:
    """Of so many layers the last attends and turns."""
    kinds = {FULL: OWN, "linear_attention": None}
    pattern = Every(interval, FULL, "linear_attention", key="full_attention_interval")
    return Layers(f"llama.cpp src/models/{model}.cpp", kinds, pattern, _RECURRENT, "linear_attention", FULL)


def _kv_heads(model: str, other: str) -> Layers:
    """Layers with heads of keys turn."""
    return Layers(f"llama.cpp src/models/{model}.cpp", {FULL: OWN, other: None}, FULL, KV_HEADS, FULL, other)


def _last(n: int) -> Every:
    return Every(n, FULL, SLIDING, key=_WINDOWS)


def _first(n: int) -> Every:
    return Every(n, FULL, SLIDING, key=_WINDOWS, first=True)


DIFFERING: dict[str, Layers] = {
    # Sliding layers have a base of their own, and no scaling is meant for them.
    "gemma3": _windows("gemma3", OWN, _GEMMA_LOCAL, _last(6), window=True),
    "gemma3n": _windows("gemma3n", OWN, _GEMMA_LOCAL, _last(5)),
    "gemma-embedding": _windows("gemma-embedding", OWN, _GEMMA_LOCAL, _last(6)),
    "gemma4": _windows("gemma4", OWN, Kind(bases=(BASE_SWA,), scaled=False, head_dim_key=HEAD_SWA), None),
    "modern-bert": _windows("modern-bert", OWN, _STATED_LOCAL, _first(3), window=True),
    "plamo3": _windows("plamo3", OWN, _STATED_LOCAL, _last(8), window=True),
    "mimo2": _windows("mimo2", OWN, _STATED_LOCAL, None),
    "laguna": _windows(
        "laguna", OWN, Kind(bases=(BASE_SWA, BASE), scaled=False, head_dim_key=HEAD_SWA), _first(4), window=True
    ),
    # They have the base of the model, and no scaling.
    "olmo2": _windows("olmo2", OWN, _UNSCALED, _last(4), window=True),
    "mellum": _windows("mellum", OWN, _UNSCALED, _last(4), window=True),
    # They may have a base of their own, and have the scaling of the model.
    "gemma2": _windows("gemma2", OWN, _LOCAL, _last(2)),
    "gpt-oss": _windows("openai-moe", OWN, _LOCAL, _last(2)),
    "spark2_5": _windows("spark2-5", OWN, Kind(bases=(BASE_SWA, BASE), head_dim_key=HEAD_SWA), None),
    # Full layers do not turn.
    "cohere2": _windows("cohere2", None, OWN, _last(4)),
    "exaone4": _windows("exaone4", None, OWN, _last(4), count=64),
    "exaone-moe": _windows("exaone-moe", None, OWN, _last(4)),
    "muse-glimmer": _windows("muse-glimmer", None, Kind(bases=(BASE_SWA, BASE), scaled=False), _last(4)),
    "maple": _windows("maple", None, Kind(bases=(BASE_SWA, BASE), head_dim_key=HEAD_SWA), None),
    "llama4": _fixed("llama4", _last(4), no_window="llama.cpp then rotates all layers but the last: not supported."),
    "afmoe": _fixed("afmoe", _last(4)),
    "smallthinker": _fixed("smallthinker", _first(4), window=True),
    "smollm3": Layers("llama.cpp src/models/smollm3.cpp", {ALL: OWN, NO_ROPE: None}, Every(4, NO_ROPE, ALL)),
    "granite_swa": Layers(
        "llama.cpp src/models/granite-swa.cpp", {ALL: OWN, NO_ROPE: None}, ALL, ROPE_PATTERN, ALL, NO_ROPE
    ),
    # Layers without attention.
    "lfm2": _kv_heads("lfm2", "conv"),
    "lfm2moe": _kv_heads("lfm2moe", "conv"),
    "granitehybrid": _kv_heads("granite-hybrid", "mamba"),
    "plamo2": _kv_heads("plamo2", "mamba"),
    "qwen3next": _linear("qwen3next", 4),
    "qwen35": _linear("qwen35", 4),
    "qwen35moe": _linear("qwen35moe", 4),
    "minimax-01": _linear("minimax-01", 8),
}
# Multi-head latent attention: the last rope.dimension_count channels of the head turn, by src/models/deepseek2.cpp,
# deepseek32.cpp, glm-dsa.cpp, minicpm3.cpp, plm.cpp. mistral4 is deepseek2 there.
LATENT = _words("deepseek2 deepseek32 glm-dsa minicpm3 mistral4 plm")
SCALES_SOFTMAX = _words("deepseek2 deepseek32 glm-dsa mistral4")
INDEXERS = {"deepseek32": "half", "glm-dsa": "interleaved"}  # a second rope, from the first channel on
# Positions with several axes; some have them only where rope.dimension_sections says so.
MROPE, IMROPE = _words("paddleocr qwen2vl"), _words("qwen3tts qwen3vl qwen3vlmoe qwen35 qwen35moe")
MROPE_IF_SECTIONS = _words("glm4 glm4moe hunyuan_vl")

# LLAMA_ROPE_TYPE_NORM. The converter permutes q and k of Llama for it.
INTERLEAVED = _words(
    "arcee arctic bailingmoe chameleon chatglm cohere2 command-r deepseek deepseek2 deepseek32 ernie4_5 ernie4_5-moe "
    "glm-dsa glm4 granite granite_swa granitehybrid granitemoe internlm2 llada llama llama-embed llama4 maincoder "
    "minicpm mistral3 mistral4 muse-glimmer neo-bert olmo plm smollm3 xverse"
)
# LLAMA_ROPE_TYPE_NEOX, MROPE and IMROPE.
HALF = _words(
    "afmoe apertus bailingmoe2 bitnet codeshell dbrx dots1 dream eurobert exaone exaone-moe exaone4 falcon falcon-h1 "
    "gemma gemma-embedding gemma2 gemma3 gemma3n gemma4 glm4moe gpt-oss gptneox grovemoe hunyuan-dense hunyuan-moe "
    "hunyuan_vl hy_v3 jais2 jina-bert-v3 laguna lfm2 lfm2moe llada-moe maple mellum mimo2 minicpm3 minimax-01 "
    "minimax-m2 modern-bert nemotron nomic-bert nomic-bert-moe olmo2 olmoe openelm orion paddleocr pangu-embedded phi2 "
    "phi3 phimoe plamo2 plamo3 qwen qwen2 qwen2moe qwen2vl qwen3 qwen35 qwen35moe qwen3moe qwen3next qwen3tts qwen3vl "
    "qwen3vlmoe rnd1 seed_oss smallthinker spark2_5 stablelm starcoder2"
)
NOT_ALL_LAYERS = "Its layers do not all rotate alike: not supported yet."
REFUSED = {
    **dict.fromkeys(_words("bailingmoe3 deepseek4 dots3note"), "Latent attention of several kinds: not supported yet."),
    **dict.fromkeys(
        _words(
            "arwkv7 bert bloom clip glm5-next gpt2 gptj jais jamba jina-bert-v2 kimi-k3 kimi-linear mamba mamba2 mpt "
            "nemotron_h nemotron_h_moe refact rwkv6 rwkv6qwen2 rwkv7 starcoder t5 t5encoder wavtokenizer-dec"
        ),
        "llama.cpp rotates nothing in it.",
    ),
    **dict.fromkeys(_words("cohere2moe deci graniteswitch nanbeige"), NOT_ALL_LAYERS),
    "baichuan": "Its 13B rotates nothing, its 7B all layers, and no key says which it is.",
    "deepseek2-ocr": "Its attention turns the whole head, whatever rope.dimension_count says: not supported yet.",
    "gemma4-assistant": "It drafts for another model, with its keys: not supported yet.",
    "hy_v4": "llama.cpp and transformers pair different channels in it: not supported yet.",
    "qwen4exp": "It rotates pooled blocks as well: not supported yet.",
    "step35": "Its full layers turn half of what the file says: not supported yet.",
    **dict.fromkeys(
        _words("cogvlm dflash eagle3 grok hrm_text minimax-m3 plamo pockettts talkie"), "It is not supported yet."
    ),
}


def read_by(architecture: str) -> frozenset[str]:
    """Of the keys that not every architecture reads, those that this one does."""
    row, names = DIFFERING.get(architecture), set()
    if row is not None:
        kinds = [kind for kind in row.kinds.values() if kind is not None]
        names |= {row.key, *(base for kind in kinds for base in kind.bases)}
        names |= {HEAD_SWA, DIM_SWA} if any(kind.head_dim_key for kind in kinds) else set()
    names |= {HEAD_MLA} if architecture in LATENT else set()
    return frozenset(names | ({SECTIONS} if architecture in MROPE | IMROPE | MROPE_IF_SECTIONS else set()))


LONGROPE_IF_TYPE = _words("apertus granite granite_swa granitemoe llama llama-embed minicpm mistral3")
LONGROPE_BY_TENSORS = frozenset({"minicpm3", "phi3", "phimoe"})  # whatever rope.scaling.type says
NEEDS_FREQS = frozenset({"gemma4"})
READS_FREQS = LONGROPE_IF_TYPE | NEEDS_FREQS | _words("arcee exaone exaone-moe exaone4 granitehybrid llama4")
READS_ALPHA = frozenset({"hunyuan-dense", "hunyuan_vl"})
READS_BETAS = frozenset({"mistral3"})  # yarn_beta_fast, yarn_beta_slow
# yarn_log_multiplier, which is mscale_all_dim; in files of some it is a tenth of it. mscale is the same, or else 1.
READS_LOG = _words("deepseek2 deepseek32 mistral3 mistral4")
LOG_IS_TENTH = READS_LOG - {"mistral3"}
LOG_IS_BOTH = frozenset({"deepseek2"})
# attention.temperature_scale, with the length of this key.
READS_TEMPERATURE = {
    "mistral3": "rope.scaling.original_context_length",
    **dict.fromkeys(("deepseek2", "mistral4"), "attention.temperature_length"),
}
FINETUNED_IS_SWITCH = frozenset({"granite", "granitehybrid", "granitemoe"})  # where false, nothing rotates
WHOLE_HEAD = frozenset({"falcon", "llama", "llama-embed"})
