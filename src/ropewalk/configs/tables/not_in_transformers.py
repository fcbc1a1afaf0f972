"""Models whose code is not in transformers, but comes with the checkpoint or with an inference engine."""

from __future__ import annotations

from typing import Any

from ropewalk.configs.architecture import Architecture
from ropewalk.configs.families import functions
from ropewalk.configs.families.latent import Latent
from ropewalk.configs.layers import ALL, Every, Kind, LayerCodes, LayerIndices
from ropewalk.configs.rows import remote

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_IMPLIED_BASE = {"kinds": {ALL: Kind(implied_base=10_000.0)}}
_MLX = "mlx-lm models"
_SGLANG = "SGLang srt/models"
_VLLM = "vLLM model_executor/models"


def _latent(code: str, **fields: Any) -> Architecture:
    """Build the `Architecture` of a model outside transformers with the latent attention of DeepSeek-V3."""
    pairing = {"pairing": "interleaved", "output_order": "half"}
    return Latent(source=code, in_transformers=False, **{**pairing, **fields})


REMOTE: dict[str, Architecture] = {
    **{
        name: remote(where, **more)
        for name, where, more in (
            ("aquila", "modeling_aquila.py of AquilaChat-7B", _IMPLIED_BASE),
            ("bamboo", "modeling_bamboo.py of Bamboo-base-v0_1", {}),
            ("deepseek", "modeling_deepseek.py of deepseek-moe-16b-base", {}),
            (
                "hunyuan",
                "modeling_hunyuan.py and configuration_hunyuan.py of Tencent-Hunyuan-Large",
                {"head_dim_keys": ("head_dim", "attention_head_dim"), "switch": ("use_rotary_pos_emb", (True,), True)},
            ),
            ("internlm2", "modeling_internlm2.py of internlm2-chat-7b; vLLM model_executor/models/internlm2.py", {}),
            ("llava_llama", "llava_llama.py of LLaVA: Llama with flat keys", _IMPLIED_BASE),
            ("llava_mistral", "llava_mistral.py of LLaVA: Mistral with flat keys", {}),
            ("llava_qwen", "llava_qwen.py of LLaVA-NeXT: Qwen 2 with flat keys", {}),
            ("mimo", "vLLM model_executor/models/mimo.py: as Qwen 2", {}),
            ("minicpm", "modeling_minicpm.py of MiniCPM-2B-sft-bf16", _IMPLIED_BASE),
            ("minicpmv", "modeling_minicpm.py of MiniCPM-V; vLLM model_executor/models/minicpmv.py", {}),
            ("orion", "modeling_orion.py of Orion-14B-Base; vLLM model_executor/models/orion.py", {}),
            ("ouro", "vLLM model_executor/models/ouro.py at 171227911", {}),
            ("telechat3", "vLLM transformers_utils/config.py, models/llama.py; mlx-lm models/telechat3.py", {}),
            ("xverse", "modeling_xverse.py of XVERSE-7B", _IMPLIED_BASE),
            ("Yi", "modeling_yi.py of Yi-34B", {}),
            ("yuan", "yuan_hf_model.py of Yuan2-2B-hf", {"kinds": {ALL: Kind(bases=(), implied_base=10_000.0)}}),
        )
    },
    **{
        name: remote(
            "modelling_RW.py and configuration_RW.py of falcon-7b and falcon-40b, renamed to falcon in transformers",
            heads=("n_head", "num_attention_heads"),
            layers=("n_layer", "num_hidden_layers"),
            kinds={ALL: Kind(implied_base=10_000.0)},
            switch=("alibi", (None, False), False),
        )
        for name in ("RefinedWeb", "RefinedWebModel")
    },
    # The whole head of every layer rotates. The head size is hidden / heads if head_dim is not given.
    **{
        name: remote(code)
        for name, code in (
            ("Klear", f"{_MLX}/Klear.py"),
            ("iquestloopcoder", f"{_MLX}/iquestloopcoder.py; {_SGLANG}/iquest_loopcoder.py"),
            ("nanbeige", f"{_MLX}/nanbeige.py; {_SGLANG}/nanbeige.py"),
            ("sdar", f"{_SGLANG}/sdar.py"),
            ("sdar_moe", f"{_SGLANG}/sdar_moe.py"),
            ("solar", f"{_VLLM}/solar.py"),
            ("dots_ocr", f"{_SGLANG}/dots_ocr.py: Qwen 2 with flat keys"),
            ("minicpmo", f"{_VLLM}/minicpmo.py: Qwen 2 or 3 with flat keys"),
            ("molmo", f"{_VLLM}/molmo.py"),
            ("PanguEmbedded", f"{_VLLM}/openpangu.py"),
            ("bidir_mistral", "modeling_nvembed.py of NV-Embed-v2: Mistral without a causal mask"),
            ("Dream", "dream/model/modeling_dream.py of NVlabs/Fast-dLLM at 24cc59e75"),
            ("arctic", "vLLM model_executor/models/arctic.py of Snowflake-Labs/vllm at fd47e57f4"),
            # The name of the class in the files of GroveMoE is not stored with its code, so both spellings are rows.
            ("grovemoe", "SGLang srt/models/grovemoe.py of inclusionAI/GroveMoE at 0b37d9496"),
            ("grove_moe", "SGLang srt/models/grovemoe.py of inclusionAI/GroveMoE at 0b37d9496"),
        )
    },
    "k2_horizon": remote(f"{_VLLM}/k2_horizon.py", check=functions.refuse_rope_head_dim),
    "xllm": remote(f"{_SGLANG}/xllm.py", check=functions.refuse_rope_head_dim),
    "TeleFLM": remote(f"{_VLLM}/teleflm.py", **_IMPLIED_BASE),
    "step3_text": remote(f"{_VLLM}/step3_text.py", head_dim_divides=False, length_key="max_position_embedding"),
    "plamo": remote(f"{_MLX}/plamo.py", **_IMPLIED_BASE),
    "lille-130m": remote(
        f"{_MLX}/lille-130m.py",
        pairing="interleaved",
        head_dim_keys=(),
        hidden=("n_embd",),
        heads=("n_head",),
        layers=("n_layer",),
    ),
    "openelm": remote(
        f"{_MLX}/openelm.py",
        head_dim_divides=False,
        layers=("num_transformer_layers",),
        kinds={ALL: Kind(bases=("rope_freq_constant",), implied_base=10_000.0)},
        keys_without_effect={"rope_max_length": "it is the length of a table"},
    ),
    "llada": remote(
        "llada/model/modeling_llada.py and configuration_llada.py of NVlabs/Fast-dLLM at 24cc59e75",
        head_dim_keys=(),
        hidden=("d_model",),
        heads=("n_heads",),
        layers=("n_layers",),
        switch=("rope", (True,), False),
        keys_without_effect={"rope_full_precision": "it selects the dtype of q and k while they rotate"},
    ),
    "phi3small": remote(
        f"{_MLX}/phi3small.py",
        head_dim_keys=(),
        kinds={ALL: Kind(bases=("rope_embedding_base",), implied_base=1_000_000.0)},
        fixed={"rope_position_scale": (1.0, "divided positions"), "rope_scaling": (None, "its own LongRoPE")},
    ),
    # gte of Alibaba and Jina Embeddings 3, before transformers had them.
    "new": remote(
        f"{_VLLM}/bert_with_rope.py and config.py; configuration.py of Alibaba-NLP/new-impl",
        switch=("position_embedding_type", ("rope",), "rope"),
        more_keys=functions.add_gte_scaling,
        trained_length=lambda c: c.longest,
        own_config=True,
    ),
    "xlm-roberta-flash": remote(
        f"{_VLLM}/bert_with_rope.py and config.py; XLMRobertaFlashConfig of jinaai/xlm-roberta-flash-implementation",
        switch=("position_embedding_type", ("rotary",), "rotary"),
        dim_key="rotary_emb_dim",
        partial=1.0,
        kinds={ALL: Kind(bases=("rotary_emb_base",), implied_base=10_000.0)},
    ),
    # Some of the channels of each head rotate.
    "moondream3_text": remote(
        f"{_VLLM}/moondream3.py: 32 channels rotate",
        head_dim_keys=(),
        hidden=("dim",),
        heads=("n_heads",),
        layers=("n_layers",),
        partial=0.5,
        more_keys=lambda c, keys: c.add(
            keys, "partial_rotary_factor", 32 / c.head_width(("dim",), ("n_heads",), "head_dim"), "32 channels"
        ),
    ),
    "phi-msft": remote(
        f"{_MLX}/phixtral.py",
        head_dim_keys=(),
        hidden=("n_embd", "model_dim"),
        heads=("n_head", "num_heads"),
        layers=("n_layer", "num_layers"),
        dim_key="rotary_dim",
        kinds={ALL: Kind(bases=(), implied_base=10_000.0)},
        keys_without_effect={"flash_rotary": "it selects a kernel"},
    ),
    **{
        name: remote(code, partial=1.0, dim_key="rotary_dim")
        for name, code in (
            ("bailing_moe", f"{_MLX}/bailing_moe.py; {_VLLM}/bailing_moe.py"),
            ("bailing_moe_v2", f"{_VLLM}/bailing_moe.py"),
            ("llada2_moe", f"{_SGLANG}/llada2.py"),
        )
    },
    "bailing_moe_linear": remote(f"{_MLX}/bailing_moe_linear.py", partial=1.0),
    "param2moe": remote(f"{_VLLM}/param2moe.py", partial=1.0),
    # Multi-head latent attention.
    "dots_vlm": _latent(f"{_SGLANG}/dots_vlm.py: DeepSeek-V3 with flat keys"),
    "youtu_llm": _latent(f"{_MLX}/youtu_llm.py"),
    "k3_dspark": _latent("vLLM models/kimi_k3/common/dspark_mla.py", fixed={"mla_use_nope": (False, "no rotation")}),
    "gigachat3_5": _latent(
        f"{_SGLANG}/gigachat35.py",
        kinds={_FULL: Kind(), _LINEAR: None},
        pattern=LayerIndices("full_attention_layers", _FULL, _LINEAR, otherwise=_LINEAR, overrides_layer_types=False),
    ),
    "longcat_flash_ngram": _latent(
        f"{_MLX}/longcat_flash_ngram.py", layers=functions.longcat_layers, query_scale=functions.longcat_query_scale
    ),
    "bailing_moe_v3": _latent(
        f"{_MLX}/bailing_moe_v3.py; {_SGLANG}/bailing_moe_v3.py",
        partial_keys=(),
        kinds={_FULL: Kind(), _LINEAR: None},
        pattern=functions.bailing_kinds,
        keys_without_effect=dict.fromkeys(("partial_rotary_factor", "rotary_dim"), "qk_rope_head_dim channels rotate"),
    ),
    "nemotron_h_puzzle": remote(f"{_VLLM}/nemotron_h.py", kinds={ALL: None}, layers=functions.nemotron_h_layers),
    # Ling 2.5 and 2.6, Ring 2.5: layers with linear attention rotate some channels in the other pairing.
    "bailing_moe_v2_5": _latent(
        f"{_SGLANG}/bailing_moe_linear.py; models/modeling_bailing_moe_v2_5.py of inclusionAI/Ring-V2.5",
        partial=0.5,
        keys_without_effect={"rotary_dim": "the model's code reads partial_rotary_factor"},
        kinds={_FULL: Kind(), _LINEAR: Kind(head_dim_key="head_dim", pairing="half")},
        pattern=functions.bailing_kinds,
        own_config=True,
    ),
    # The layers differ.
    "baichuan_m1": remote(
        f"{_MLX}/baichuan_m1.py",
        head_dim_keys=(),
        kinds={_FULL: Kind(), _SLIDING: Kind(heads_key="num_swa_attention_heads")},
        pattern=LayerIndices("sliding_window_layers", _SLIDING, _FULL, otherwise=_FULL),
    ),
    "gear": remote(
        f"{_MLX}/gear.py",
        head_dim_divides=False,
        kinds={
            _FULL: Kind(),
            _SLIDING: Kind(bases=("rope_local_base_freq",), implied_base=10_000.0, scaled=False),
            "conv_mixer": None,
        },
    ),
    "jet_nemotron": remote(
        f"{_SGLANG}/jet_nemotron.py", head_dim_keys=(), kinds={"attn": Kind(), "swa": Kind(), "jet": None}
    ),
    "minicpm_sala": remote(
        f"{_SGLANG}/minicpm.py",
        kinds={"minicpm4": Kind(), "lightning-attn": Kind(head_dim_key="lightning_head_dim")},
        pattern=functions.minicpm_sala_kinds,
    ),
    "iquest_q1": remote(
        f"{_SGLANG}/iquest_q1.py",
        head_dim_divides=False,
        partial=0.25,
        dim_key="rotary_dim",
        kinds={_FULL: Kind(), _SLIDING: Kind(bases=("swa_rope_theta",))},
        pattern=functions.iquest_q1_kinds,
    ),
    "plamo2": remote(
        f"{_MLX}/plamo2.py",
        head_dim_keys=("hidden_size_per_head",),
        head_dim_divides=False,
        kinds={_FULL: Kind(bases=(), implied_base=10_000.0), "mamba": None},
        pattern=functions.plamo2_kinds,
    ),
    "plamo3": remote(
        f"{_MLX}/plamo3.py; {_VLLM}/plamo3.py",
        head_dim_divides=False,
        kinds={_FULL: Kind(), _SLIDING: Kind(bases=("rope_local_theta",), scaled=False)},
        pattern=Every(8, _FULL, _SLIDING, key="sliding_window_pattern"),
    ),
    "spark2_5": remote(
        f"{_MLX}/spark2_5.py; {_SGLANG}/spark2_5.py",
        head_dim_divides=False,
        partial=1.0,
        kinds={_FULL: Kind(bases=()), _SLIDING: Kind(bases=())},
        pattern=Every(4, _FULL, _SLIDING),
    ),
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
            kinds={_FULL: Kind(), _LINEAR: None},
            pattern=LayerCodes("attn_type_list", {0: "linear_attention", 1: _FULL}),
        )
        for name in ("minimax_m1", "minimax_text_01")
    },
    # One step differs, which a function reads.
    "baichuan": remote(
        "modeling_baichuan.py of Baichuan-7B; vLLM model_executor/models/baichuan.py",
        head_dim_keys=(),
        check=functions.refuse_baichuan_13b,
        **_IMPLIED_BASE,
    ),
    # ChatGLM 2 and 3, GLM-4 and CodeGeeX 2 with their own code, not "glm" of transformers.
    "chatglm": remote(
        "modeling_chatglm.py of chatglm3-6b-32k and glm-4-9b-chat; vLLM model_executor/models/chatglm.py",
        pairing=functions.chatglm_pairing,
        head_dim_keys=("kv_channels",),
        layers=("num_layers", "num_hidden_layers"),
        partial_keys=(),
        partial=0.5,
        kinds={ALL: Kind(bases=(), implied_base=10_000.0)},
        more_keys=functions.add_chatglm_base,
        fixed={"position_encoding_2d": (False, "the two positions for each token of ChatGLM-6B (version 1)")},
        keys_without_effect={"rotary_percent": "the code of CodeGeeX 2 always rotates half of the head"},
        own_config=True,
    ),
    # Version 1.
    "internlm": remote(
        "modeling_internlm.py of internlm-chat-7b and internlm-20b",
        more_keys=functions.add_internlm_rotary,
        **_IMPLIED_BASE,
    ),
    # Grok 1 and 2.
    "grok-1": remote(
        "SGLang models/grok.py; model.py of xai-org/grok-1",
        partial=1.0,
        partial_keys=(),
        more_keys=functions.add_grok_scaling,
        query_scale=functions.grok_query_scale,
        fixed={"extrapolation_factor": (1.0, "another weight of the ramp")},
        own_config=True,
        **_IMPLIED_BASE,
    ),
    "minimind": remote(
        "model/model.py and model/model_minimind.py of jingyaogong/minimind",
        pairing=functions.minimind_pairing,
        head_dim_keys=(),
        hidden=("dim", "hidden_size"),
        heads=("n_heads", "num_attention_heads"),
        layers=("n_layers", "num_hidden_layers"),
    ),
    "talkie": remote("mlx-lm models/talkie.py", backwards=True, kinds={ALL: Kind(implied_base=1_000_000.0)}),
    "nemotron-nas": remote(
        "modeling_decilm.py of Llama-3_1-Nemotron-51B-Instruct; vLLM model_executor/models/nemotron_nas.py",
        pattern=functions.nemotron_nas_kinds,
    ),
    # Version 1.
    "qwen": remote(
        "modeling_qwen.py of Qwen-7B; vLLM up to 0.23 model_executor/models/qwen.py",
        head_dim_keys=("kv_channels",),
        hidden=("hidden_size", "n_embd"),
        heads=("num_attention_heads", "n_head"),
        layers=("num_hidden_layers", "n_layer"),
        partial_keys=("rotary_pct",),
        partial=1.0,
        kinds={ALL: Kind(bases=("rotary_emb_base",))},
        keys_without_effect={"rope_theta": "the model's code reads rotary_emb_base"},
        check=functions.warn_of_qwen_ntk,
        trained_length=functions.own_length("seq_length"),
    ),
    "telechat": remote(
        "modeling_telechat.py of telechat-7B",
        head_dim_keys=(),
        heads=("n_head", "num_attention_heads"),
        layers=("n_layer", "num_hidden_layers"),
        kinds={ALL: Kind(bases=(), implied_base=10_000.0)},
        more_keys=functions.add_telechat_scaling,
        own_config=True,
    ),
}
"""Maps a model_type to its row."""
