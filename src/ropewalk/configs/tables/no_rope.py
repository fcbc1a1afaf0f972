"""Models that no `Rope` describes, or that rotate nothing although their configs have rope keys."""

from __future__ import annotations

from dataclasses import replace

from ropewalk.configs.architecture import Architecture
from ropewalk.configs.families.functions import own_length
from ropewalk.configs.rows import other_positions, refused, without_rope

FOPE = (
    "It has FoPE, whose cos and sin mix several frequencies, so no Rope describes it: compute them from cos_coef and "
    "sin_coef of the checkpoint, and pass them to Rotation(cos, sin, pairing='half', per_head=True). Each head of q "
    "takes the tables of its key head."
)
"""Why a config with FoPE is refused."""
_BEFORE_PROJECTION = "It rotates hidden states before the projections, not q and k."
_BY_HEAD = "transformers rotates each head by the index of the head, not by the position of the token."
# Maps the positions that models use instead of a rope to their model_types.
_OTHER_POSITIONS = {
    "learned absolute positions": (
        "albert align_text_model bart beit bert bert-generation big_bird bigbird_pegasus biogpt blip blip_text_model "
        "bridgetower camembert canine clip clip_text_model clip_vision_model clipseg convbert ctrl data2vec-text deit "
        "dinov2 distilbert electra ernie flaubert flava gpt2 gpt_bigcode gpt_neo groupvit ibert imagegpt layoutlm "
        "layoutlmv2 layoutlmv3 led longformer luke lxmert mbart mobilebert mvp nystromformer openai-gpt opt owlvit "
        "pegasus plbart prophetnet roberta roberta-prelayernorm roc_bert rugpt3xl siglip "
        "siglip2_vision_model splinter squeezebert tapas "
        "trocr vilt vision-text-dual-encoder visual_bert vit vit_mae xlm xlm-roberta xlm-roberta-xl xmod yolos"
    ),
    "sinusoidal positions": "blenderbot cohere_asr fsmt m2m_100 marian musicgen pegasus_x speech_to_text whisper xglm",
    "relative positions": ("deberta deberta-v2 longt5 mpnet mt5 pop2piano switch_transformers t5 udop umt5 xlnet"),
    "ALiBi": "bloom mpt",
    "no positions: it has no attention": ("falcon_mamba gla mamba mamba2 rwkv rwkv5 rwkv6 rwkv7 xlstm"),
    "convolutional positions": "hubert sew unispeech wav2vec2 wavlm",
}


NO_ROPE_MODELS: dict[str, Architecture] = {
    **{name: other_positions(name, instead) for instead, names in _OTHER_POSITIONS.items() for name in names.split()},
    "git": other_positions(
        "git", "learned absolute positions. Only Grok 2 has a rope: its architectures are ['Grok1ForCausalLM']"
    ),
    "qwen2_5_omni_dit": refused("qwen2_5_omni", "It rotates one head only."),
    "interns1_pro": replace(refused("", FOPE), source="vLLM models/interns1_pro.py", in_transformers=False),
    "qwen2_5_omni_token2wav": refused("qwen2_5_omni", "Its diffusion transformer rotates one head only."),
    "lightglue": refused(
        "lightglue",
        "It computes the angles of points in an image with a layer, whose weights are in the checkpoint.",
    ),
    "esmfold2": refused(
        "esmfold2",
        "It rotates atoms by coordinates in space and by numbers of residues, which are not token positions.",
    ),
    "vjepa2": refused("vjepa2", "It uses cos and sin of other channels for a pair, which is not a rotation."),
    "efficientloftr": refused(
        "efficientloftr",
        "It rotates q and k before they are split into heads, and rows and columns alternate. Treat the width as one "
        'head: Rope(256, 10000.0, "interleaved", axes=Axes.alternating((128, 128))) at grid(height, width, start=1).',
    ),
    "sam3_video": refused(
        "sam3_video",
        "It contains two models that rotate: pass config['detector_config'] for the vision tower, or "
        "config['tracker_config'] for the attention to memory.",
    ),
    "wav2vec2-bert": refused("wav2vec2_bert", _BEFORE_PROJECTION),
    "wav2vec2-conformer": refused("wav2vec2_conformer", _BEFORE_PROJECTION),
    "seamless_m4t": refused("seamless_m4t", _BEFORE_PROJECTION),
    "neucodec": refused("neucodec", _BY_HEAD),
    "xcodec2": refused("xcodec2", _BY_HEAD),
    **dict.fromkeys(("clvp", "clvp_encoder"), refused("clvp", "It rotates the values as well.")),
    "glm5_next_text": without_rope("glm5_next"),
    "jamba": without_rope("jamba"),
    "kimi_linear": replace(without_rope("kimi_linear"), trained_length=own_length("model_max_length")),
    "zamba": without_rope("zamba"),
    "inkling_text": without_rope("inkling"),
    "inkling2_text": without_rope("inkling2"),
    "inkling2_loop_text": without_rope("inkling2_loop"),
    "moshi_depth": without_rope("moshi"),
}
