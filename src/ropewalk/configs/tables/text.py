"""Text models of transformers: `TEXT` maps a model_type to its row, an `Architecture`.

A row states facts about deployed code and names its source. The rows were checked by running the code of the models:
the frequencies of their rotary classes, and the channels that their attention pairs.
"""

from __future__ import annotations

from dataclasses import replace

from ropewalk.configs.architecture import Architecture, QueryScale
from ropewalk.configs.families import functions
from ropewalk.configs.families.deepseek import COMPRESSED, DeepSeekV4
from ropewalk.configs.layers import ALL, NO_ROPE, Every, Kind, LayerCodes, LayerFlags, LayerIndices
from ropewalk.configs.rows import hybrid, latent, llama_like, local_only, row, source

_FRACTION_INSTEAD = "transformers uses partial_rotary_factor instead"
_FULL, _SLIDING, _SPARSE = "full_attention", "sliding_attention", "compressed_sparse_attention"
# Gemma 3: full layers have a large base and the scaling. Sliding layers have a base of their own and no scaling.
_GEMMA_KINDS = {_FULL: Kind(), _SLIDING: Kind(bases=("rope_local_base_freq",), implied_base=10_000.0, scaled=False)}
_GEMMA_PATTERN = Every(6, _FULL, _SLIDING, key="sliding_window_pattern")
_MODERNBERT_KINDS = {_FULL: Kind(bases=("global_rope_theta",)), _SLIDING: Kind(bases=("local_rope_theta",))}
_GEMMA4_KINDS = {_FULL: Kind(bases=(), head_dim_key="global_head_dim"), _SLIDING: Kind(bases=())}
_NESTED_KINDS = {_FULL: Kind(bases=()), _SLIDING: Kind(bases=())}
_LINEAR = ("linear_attention",)
_EVERY_FOURTH_FULL = Every(4, _FULL, "linear_attention", key="full_attention_interval")
_COMMAND_R_LENGTH = functions.own_length("model_max_length")  # as vLLM and SGLang read it
# The factor (1 + (position + 1) / 2048)^0.1.
_BEAM_SCALE = QueryScale(original_max_position_embeddings=2048, offset=1, power=0.1, only_unrotated=True)
_NO_ROPE_LAYERS = LayerFlags("no_rope_layers", otherwise=Every(4, NO_ROPE, ALL, key="no_rope_layer_interval"))
_DEEPSEEK_V4 = DeepSeekV4(
    source=source("deepseek_v4"),
    pairing="interleaved",
    head_dim_divides=False,
    partial=0.125,
    dim_key="qk_rope_head_dim",
    rotates_values=True,
    kinds={
        _SLIDING: Kind(scaled=False, section="main"),
        _SPARSE: COMPRESSED,
        "heavily_compressed_attention": COMPRESSED,
    },
    pattern=LayerCodes("compress_ratios", {0: _SLIDING, 4: _SPARSE, 128: "heavily_compressed_attention"}, longer=True),
)

_MIMO = row(
    "mimo_v2_flash",
    head_dim_divides=False,
    partial=0.334,
    kinds={_FULL: Kind(), _SLIDING: Kind(bases=("swa_rope_theta",), head_dim_key="swa_head_dim")},
    pattern=LayerCodes("hybrid_layer_pattern", {0: _FULL, 1: _SLIDING}),
)

TEXT: dict[str, Architecture] = {
    # The head size is hidden / heads if head_dim is not given.
    **llama_like(
        "apertus apertus1p5_text@apertus1p5 arcee deepseek_ocr2_encoder@deepseek_ocr2 esmc evolla gradium_phonon_tts "
        "granite4_vision_text@granite4_vision granite_docling_text@granite_docling aria_text@aria bitnet "
        "chameleon csm csm_depth_decoder_model@csm dia_encoder@dia dia_decoder@dia diffllama doge dots1 "
        "emu3_text_model@emu3 eurobert falcon_h1 flex_olmo granite granitemoe granitemoeshared gte "
        "hyperclovax jais2 jina_embeddings_v3 kyutai_speech_to_text lasr_encoder@lasr mimi mimi_encoder@mimi "
        "mimi_decoder@mimi mistral mixtral moshi olmo olmo2 olmoe phimoe pocket_tts "
        "pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_encoder@pocket_tts_audio_tokenizer "
        "pocket_tts_audio_tokenizer_decoder@pocket_tts_audio_tokenizer qwen2 "
        "qwen2_moe qwen3_omni_moe_code2wav@qwen3_omni_moe "
        "starcoder2 unlimited_ocr_text@unlimited_ocr voxtral_realtime_text@voxtral_realtime "
    ),
    # The head size is independent of hidden / heads, so the config must state it.
    **llama_like(
        "cwm gemma gemma2 higgs_audio_v2 hy_v3 internlm3 iquestcoder "
        "ministral muse_glimmer_assistant qwen3_omni_moe_talker_code_predictor@qwen3_omni_moe "
        "seed_oss timesfm2_5 t5_gemma_module@t5gemma vaultgemma voxtral_realtime_encoder@voxtral_realtime ",
        head_dim_divides=False,
    ),
    **{
        name: row(name, head_dim_divides=False, fixed={"use_rotary_pos_emb": (True, "no rotation")})
        for name in ("hunyuan_v1_dense", "hunyuan_v1_moe")
    },
    **llama_like("qwen3", head_dim_divides=False, trained_length=functions.qwen3_length),
    **llama_like("qwen3_moe", trained_length=functions.qwen3_length),
    **llama_like("ernie4_5 ernie4_5_moe ", pairing="interleaved"),
    **llama_like(
        "helium pe_audio_encoder@pe_audio pe_audio_video_encoder@pe_audio_video pe_video_encoder@pe_video ",
        pairing="interleaved",
        head_dim_divides=False,
    ),
    # Configs written before transformers 4.31 (Llama 1 and 2, Vicuna, Yarn-Llama) have no rope_theta at all.
    "llama": row("llama", kinds={ALL: Kind(implied_base=10_000.0)}),
    "falcon": row(
        "falcon",
        kinds={ALL: Kind(implied_base=10_000.0)},
        heads=("num_attention_heads", "n_head"),
        layers=("num_hidden_layers", "n_layer"),
        switch=("alibi", (None, False), False),
    ),
    # Files that were written for the code of Nomic have the names of GPT-2.
    "nomic_bert": row(
        "nomic_bert",
        hidden=("hidden_size", "n_embd"),
        heads=("num_attention_heads", "n_head"),
        layers=("num_hidden_layers", "n_layer"),
        kinds={ALL: Kind(bases=("rope_theta", "rotary_emb_base"))},
        fixed={"rotary_emb_fraction": (1.0, "another fraction"), "rotary_emb_interleaved": (False, "another pairing")},
        trained_length=functions.own_length("max_trained_positions"),
        keys_without_effect={"rotary_scaling_factor": "only Nomic's own code reads it, as dynamic NTK's factor"},
    ),
    "exaone": row("exaone", layers=("num_layers", "num_hidden_layers")),
    "jetmoe": row("jetmoe", head_dim_keys=("kv_channels",), head_dim_divides=False),
    "idefics": row("idefics", head_dim_keys=()),
    "deepseek_ocr2_text": row("deepseek_ocr2", head_dim_keys=()),
    **{
        name: row("blt", pairing="interleaved", head_dim_keys=())
        for name in ("blt_local_encoder", "blt_local_decoder", "blt_global_transformer", "blt_patcher")
    },
    "mllama_text_model": row(
        "mllama",
        head_dim_keys=(),
        pattern=LayerIndices("cross_attention_layers", kind=NO_ROPE, rest=ALL, otherwise=ALL),
    ),
    "ministral3": row("ministral3", head_dim_divides=False, query_beta=True),
    "gpt_oss": row("gpt_oss", head_dim_divides=False),
    "roformer": row(
        "roformer",
        pairing="interleaved",
        head_dim_keys=(),
        kinds={ALL: Kind(bases=(), implied_base=10_000.0)},
        fixed={"rotary_value": (False, "rotated values")},
    ),
    "dbrx": row(
        "dbrx",
        head_dim_keys=(),
        hidden=("d_model", "hidden_size"),
        heads=("n_heads", "num_attention_heads"),
        layers=("n_layers", "num_hidden_layers"),
        kinds={ALL: Kind(bases=("attn_config.rope_theta", "rope_theta"))},
    ),
    "hrm_text": row("hrm_text", head_dim_divides=False, layers=("num_layers_per_stack", "num_hidden_layers")),
    # Some of the channels of each head rotate.
    **{
        name: row(
            name,
            head_dim_keys=(),
            partial_keys=("rotary_pct",),
            partial=fraction,
            kinds={ALL: Kind(bases=("rotary_emb_base",))},
        )
        for name, fraction in (("gpt_neox", 0.25), ("gpt_neox_japanese", 1.0))
    },
    **{
        name: row(
            name,
            pairing="interleaved",
            head_dim_keys=(),
            hidden=("n_embd", "hidden_size"),
            heads=("n_head", "num_attention_heads"),
            layers=("n_layer", "num_hidden_layers"),
            dim_key="rotary_dim",
            fixed={"rotary": (True, "a model without rotation")},
            kinds={ALL: Kind(bases=(), implied_base=10_000.0)},
        )
        for name in ("gptj", "codegen", "moss")
    },
    "glm": row("glm", partial=0.5, pairing="interleaved"),
    "glm4": row("glm4", partial=0.5, pairing="interleaved"),
    "glm4_moe": row("glm4_moe", partial=0.5),
    "minimax_m2": row("minimax_m2", head_dim_divides=False, partial=1.0, dim_key="rotary_dim"),
    "minimax_m3_vl_text": row(
        "minimax_m3_vl", head_dim_divides=False, partial=1.0, keys_without_effect={"rotary_dim": _FRACTION_INSTEAD}
    ),
    "moonshine": row(
        "moonshine",
        pairing="interleaved",
        partial=0.9,
        heads=("decoder_num_attention_heads", "num_attention_heads"),
        layers=("decoder_num_hidden_layers", "num_hidden_layers"),
    ),
    "moonshine_streaming": row(
        "moonshine_streaming", partial=0.8, pairing="interleaved", more_keys=functions.add_whole_head
    ),
    "nemotron": row("nemotron", partial=0.5),
    "persimmon": row("persimmon", head_dim_keys=(), partial=0.5),
    "phi": row("phi", partial=0.5, keys_without_effect={"rotary_dim": _FRACTION_INSTEAD}),
    "phi3": row("phi3", partial=1.0),
    "phi4_multimodal": row("phi4_multimodal", partial=1.0),
    # Files that were not written by transformers have the sizes of the encoder under the names of Whisper.
    "dots3_note_audio_encoder": row(
        "dots3_note",
        partial=0.5,
        head_dim_keys=(),
        hidden=("whisper_config.d_model", "hidden_size"),
        heads=("whisper_config.encoder_attention_heads", "num_attention_heads"),
        layers=("whisper_config.encoder_layers", "num_hidden_layers"),
        kinds={ALL: Kind(bases=(), implied_base=10_000.0)},
    ),
    "glmasr_encoder": row("glmasr", partial=0.5),
    **{
        f"nemotron3_5_transcribe_{part}": row("nemotron3_5_transcribe", partial=0.5, more_keys=functions.add_whole_head)
        for part in ("asr_audio", "word_timestamp")
    },
    "nemotron3_diarization_audio": row("nemotron3_diarization", partial=1.0),
    "sarvam_moe": row("sarvam_moe", partial=1.0, keys_without_effect={"rotary_dim": _FRACTION_INSTEAD}),
    "solar_open": row("solar_open", partial=1.0, head_dim_divides=False),
    "stablelm": row(
        "stablelm",
        head_dim_keys=(),
        partial=0.25,
        partial_keys=("partial_rotary_factor", "rope_pct"),
        fixed={"rotary_scaling_factor": (1.0, "another factor")},
    ),
    # Each pair rotates by minus its angle.
    "nanochat": row("nanochat", backwards=True),
    # Multi-head latent attention.
    "deepseek_v2": latent("deepseek_v2", output_order=None),
    "deepseek_v3": latent("deepseek_v3"),
    "deepseek_v32": latent("deepseek_v32", indexer="half"),
    "kimi_k2": latent("deepseek_v3"),
    "axk1": latent("axk1"),
    "axk2": latent("axk2", indexer="half"),
    "bailing_hybrid": latent(
        "bailing_hybrid",
        kinds={_FULL: Kind(), "linear_attention": None},
        pattern=Every(6, _FULL, "linear_attention", key="layer_group_size"),
        keys_without_effect={"rotary_dim": "qk_rope_head_dim channels rotate"},
    ),
    "glm4_moe_lite": latent("glm4_moe_lite"),
    "glm_moe_dsa": latent("glm_moe_dsa", indexer="interleaved"),
    "mistral4": latent("mistral4", query_beta=True, partial=1.0),
    "mistral_large4_text": latent(
        "mistral_large4",
        indexer="interleaved",
        pattern=_NO_ROPE_LAYERS,
        learned=functions.lerope,
        query_scale=functions.ssmax_query_scale,
    ),
    "dory": row(
        "dory",
        head_dim_divides=False,
        kinds={_FULL: Kind(bases=(), implied_base=1e7), _SLIDING: Kind(bases=(), implied_base=1e4)},
        layers=functions.dory_layers,
        pattern=functions.dory_kinds,
    ),
    "lara_mini": row(
        "lara_mini",
        head_dim_divides=False,
        kinds={_SLIDING: Kind(), _FULL: None, "linear_attention": None},
        pattern=functions.lara_mini_kinds,
        flat=True,
    ),
    "hy_v4": latent("hy_v4", pairing="half", output_order=None, indexer="half", indexer_tail=True),
    "minicpm3": latent("minicpm3", pairing="half", output_order=None),
    "sarvam_mla": latent("sarvam_mla", keys_without_effect={"q_head_dim": "it is the sum of the two sizes of a head"}),
    "youtu": latent("youtu"),
    "dots3_note_text": latent(
        "dots3_note",
        kinds={_FULL: Kind(), "indexed_attention": Kind(), _SLIDING: Kind(bases=("swa_rope_theta",))},
        indexer="interleaved",
        prefixes={_SLIDING: "swa_"},
    ),
    # The frequencies depend on the kind of layer.
    **{
        name: row(folder, head_dim_divides=False, kinds=_GEMMA_KINDS, pattern=_GEMMA_PATTERN, sections="merged")
        for name, folder in (("gemma3_text", "gemma3"), ("t5gemma2_text", "t5gemma2"), ("t5gemma2_decoder", "t5gemma2"))
    },
    "gemma3n_text": row(
        "gemma3n", head_dim_divides=False, kinds=_GEMMA_KINDS, pattern=Every(5, _FULL, _SLIDING), sections="merged"
    ),
    "gemma4_text": row("gemma4", head_dim_divides=False, kinds=_GEMMA4_KINDS, pattern=Every(6, _FULL, _SLIDING)),
    **{
        f"{name}_text": row(name, head_dim_divides=False, kinds=_GEMMA4_KINDS)
        for name in ("gemma4_unified", "diffusion_gemma", "embedding_gemma2")
    },
    **{
        name: row(
            name.replace("-", "_"),
            head_dim_keys=(),
            kinds=_MODERNBERT_KINDS,
            pattern=Every(3, _FULL, _SLIDING, key="global_attn_every_n_layers", first=True),
            sections="merged",
        )
        for name in ("modernbert", "modernbert-decoder")
    },
    "olmo3": row(
        "olmo3",
        kinds={_FULL: Kind(), _SLIDING: Kind(bases=(), implied_base=500_000.0, scaled=False)},
        pattern=Every(4, _FULL, _SLIDING),
        sections="merged",
        check=functions.warn_of_olmo3_base,
    ),
    "ultrabert": row("ultrabert", kinds=_NESTED_KINDS, pattern=Every(3, _FULL, _SLIDING)),
    **{
        name: row(name, head_dim_divides=False, kinds=_NESTED_KINDS, partial=1.0, partial_keys=())
        for name in ("laguna", "mellum")
    },
    "lfm3": row("lfm3", head_dim_divides=False, kinds={**_NESTED_KINDS, "conv": None}),
    "zaya": row(
        "zaya", head_dim_divides=False, partial=1.0, kinds={"hybrid": Kind(bases=()), "hybrid_sliding": Kind(bases=())}
    ),
    "mimo_v2_flash": _MIMO,
    "molmo2_text": row(
        "molmo2",
        head_dim_divides=False,
        kinds={"scaled": Kind(), "unscaled": Kind(scaled=False)},
        pattern=LayerIndices("rope_scaling_layers", kind="scaled", rest="unscaled", otherwise="scaled"),
        flat=True,
    ),
    # Some layers do not rotate.
    "llama4_text": row(
        "llama4",
        pairing="interleaved",
        head_dim_divides=False,
        pattern=_NO_ROPE_LAYERS,
        query_scale=functions.llama4_query_scale,
    ),
    "smollm3": row("smollm3", pattern=_NO_ROPE_LAYERS),
    "cohere": row("cohere", pairing="interleaved", trained_length=_COMMAND_R_LENGTH),
    "cohere2": local_only(
        "cohere2",
        Every(4, _FULL, _SLIDING, key="sliding_window_pattern"),
        null_window=NO_ROPE,
        pairing="interleaved",
        partial_keys=("partial_rotary_factor", "rotary_pct"),  # 1.0 in Command R7B
        trained_length=_COMMAND_R_LENGTH,
    ),
    "exaone4": local_only("exaone4", Every(4, _FULL, _SLIDING, key="sliding_window_pattern"), null_window=ALL),
    "exaone_moe": local_only("exaone_moe", Every(4, _FULL, _SLIDING, key="sliding_window_pattern"), null_window=ALL),
    "afmoe": local_only("afmoe", Every(4, _FULL, _SLIDING, key="global_attn_every_n_layers"), head_dim_divides=False),
    "flint": local_only("flint", None, null_window=NO_ROPE),
    "beam": row("beam", kinds={_SLIDING: Kind(bases=()), _FULL: None}, query_scale=lambda _: _BEAM_SCALE),
    "kolibri1": local_only("kolibri1", Every(5, _FULL, _SLIDING), null_window=ALL, head_dim_divides=False),
    "granitemoehybrid": hybrid(
        "granitemoehybrid", _FULL, _LINEAR, None, switch=("position_embedding_type", ("rope",), None)
    ),
    "bamba": row("bamba", partial=0.5, pattern=LayerIndices("attn_layer_indices")),
    "zamba2": hybrid(
        "zamba2",
        "hybrid",
        ("linear_attention", "mamba"),
        functions.zamba2_kinds,
        head_dim_keys=("attention_head_dim",),
        head_dim_divides=False,
        switch=("use_mem_rope", (True,), False),
    ),
    **{
        name: hybrid(
            name,
            _FULL,
            ("conv",),
            LayerIndices("full_attn_idxs", _FULL, "conv", otherwise=None, overrides_layer_types=False),
        )
        for name in ("lfm2", "lfm2_moe")
    },
    "minimax": hybrid(
        "minimax",
        _FULL,
        _LINEAR,
        Every(2, _FULL, "linear_attention", first=True),
        keys_without_effect={"rotary_dim": _FRACTION_INSTEAD},
    ),
    "qwen3_next": hybrid("qwen3_next", _FULL, _LINEAR, _EVERY_FOURTH_FULL, partial=0.25, head_dim_divides=False),
    # One step differs, which a function reads.
    "cohere2_moe": row(
        "cohere2_moe",
        pairing="interleaved",
        head_dim_divides=False,
        kinds={_SLIDING: Kind(), _FULL: None, functions.DENSE_FULL: Kind()},
        pattern=functions.cohere2_moe_kinds,
        flat=True,
        sections="rope_parameters",
    ),
    "esm": row(
        "esm",
        head_dim_keys=(),
        kinds={ALL: Kind(implied_base=10_000.0)},
        switch=("position_embedding_type", ("rotary",), "absolute"),
        query_scale=functions.esm_query_scale,
    ),
    **{
        name: row(name, pattern=LayerFlags("layer_rope_theta", otherwise=ALL), more_keys=functions.add_bases_of_layers)
        for name in ("granite_swa", "granitemoe_swa")
    },
    "longcat_flash": latent(
        "longcat_flash", layers=functions.longcat_layers, query_scale=functions.longcat_query_scale
    ),
    **{
        f"{name}_text": row(
            name,
            head_dim_divides=False,
            pattern=LayerFlags("layer_rope_theta"),
            query_scale=functions.scale_by("qk_scale_factor"),
        )
        for name in ("muse_glimmer", "muse_spark")
    },
    "nemotron_h": row("nemotron_h", kinds={ALL: None}, layers=functions.nemotron_h_layers),
    "openai_privacy_filter": row(
        "openai_privacy_filter",
        pairing="interleaved",
        head_dim_divides=False,
        query_scale=functions.privacy_filter_query_scale,
    ),
    "recurrent_gemma": row(
        "recurrent_gemma",
        partial=0.5,
        kinds={"attention": Kind(), "recurrent": None},
        pattern=functions.recurrent_gemma_kinds,
    ),
    # The base and the rotated fraction may be lists with an entry for each layer.
    "step3p5": row(
        "step3p7",
        head_dim_divides=False,
        partial=1.0,
        kinds={_FULL: Kind(), _SLIDING: Kind(scaled=False)},
        partial_keys=("partial_rotary_factor", "partial_rotary_factors"),
        sections="nested or rope_scaling",
        listed=True,
        fixed={"yarn_only_types": ([_FULL], "scaling of other layers")},
    ),
    "olmo_hybrid": hybrid(
        "olmo_hybrid", _FULL, _LINEAR, Every(4, _FULL, "linear_attention"), head_dim_keys=(), null_base=True
    ),
    # Several steps differ.
    "deepseek_v4": _DEEPSEEK_V4,
    "deepseek_v41_text": replace(
        _DEEPSEEK_V4,
        source="mlx-lm models/deepseek_v41.py",
        pattern=LayerCodes("compress_ratios", {0: _SLIDING, 1: _SPARSE, 2: _SPARSE}),
        in_transformers=False,
    ),
    "mimo_v2": replace(_MIMO, source="vLLM model_executor/models/mimo_v2.py", in_transformers=False, partial=1.0),
    # The configs of SGLang's copies, which omit keys that equal the defaults of the class in transformers.
    "deepseek_ref": replace(
        _DEEPSEEK_V4,
        kinds={**_DEEPSEEK_V4.kinds, _SLIDING: Kind(implied_base=10_000.0, scaled=False, section="main")},
    ),
}
"""Maps a model_type to its row."""
