"""Models that no Rope describes, and why; and models that have keys of a rope and rotate nothing."""

from __future__ import annotations

from ropewalk.configs.architecture import Architecture
from ropewalk.configs.families.refused import Refused
from ropewalk.configs.rows import refused, without_rope

_BEFORE_PROJECTION = "It rotates hidden states before the projections, not q and k."
_BY_HEAD = "transformers rotates each of its heads by the number of the head, not by the position of the token."
# What models have in place of a rope.
_INSTEAD = {
    "learned absolute positions": (
        "albert align_text_model bart beit bert bert-generation big_bird bigbird_pegasus biogpt blip blip_text_model "
        "bridgetower camembert canine clip clip_text_model clip_vision_model clipseg convbert ctrl data2vec-text deit "
        "dinov2 distilbert electra ernie flaubert flava git gpt2 gpt_bigcode gpt_neo groupvit ibert imagegpt layoutlm "
        "layoutlmv2 layoutlmv3 led longformer luke lxmert mbart mobilebert mvp nystromformer openai-gpt opt owlvit "
        "pegasus plbart prophetnet roberta roberta-prelayernorm roc_bert rugpt3xl siglip "
        "siglip2_vision_model splinter squeezebert tapas "
        "trocr vilt vision-text-dual-encoder visual_bert vit vit_mae xlm xlm-roberta xlm-roberta-xl xmod yolos"
    ),
    "sinusoidal positions": "blenderbot cohere_asr fsmt m2m_100 marian musicgen pegasus_x speech_to_text whisper xglm",
    "relative positions": ("deberta deberta-v2 longt5 mpnet mt5 pop2piano switch_transformers t5 udop umt5 xlnet"),
    "ALiBi": "bloom mpt",
    "no positions: it has no attention": ("falcon_mamba gla mamba mamba2 rwkv rwkv5 rwkv6 rwkv7 xlstm"),
    "positions of a convolution": "hubert sew unispeech wav2vec2 wavlm",
}


def _without(model_type: str, instead: str) -> Refused:
    return Refused(
        source=f"the model's own code: {instead}", why=f"{model_type} has no rotary positions: it has {instead}."
    )


NO_ROPES: dict[str, Architecture] = {
    **{name: _without(name, instead) for instead, names in _INSTEAD.items() for name in names.split()},
    "qwen2_5_omni_dit": refused("qwen2_5_omni", "It rotates one head only."),
    "nanochat": refused("nanochat", "It rotates the other way, by minus the angle: negate the positions yourself."),
    "vjepa2": refused(
        "vjepa2",
        "It pairs channels with cos and sin of others, which is no rotation; docs/several-axes.md writes it out.",
    ),
    "efficientloftr": refused(
        "efficientloftr",
        "It rotates q and k before they are split into heads, by rows and columns in turn: as one head of the whole "
        'width, Rope(256, 10000.0, "interleaved", axes=Axes.alternating((128, 128))) at grid(height, width, start=1).',
    ),
    "sam3_video": refused(
        "sam3_video",
        "It holds two models that rotate: pass config['detector_config'] for the vision tower and "
        "config['tracker_config'] for the attention to memory.",
    ),
    "mistral_large4_text": refused(
        "mistral_large4", "Its frequencies come from the checkpoint: a learned factor for each pair."
    ),
    "wav2vec2-bert": refused("wav2vec2_bert", _BEFORE_PROJECTION),
    "wav2vec2-conformer": refused("wav2vec2_conformer", _BEFORE_PROJECTION),
    "seamless_m4t": refused("seamless_m4t", _BEFORE_PROJECTION),
    "neucodec": refused("neucodec", _BY_HEAD),
    "xcodec2": refused("xcodec2", _BY_HEAD),
    "clvp_encoder": refused("clvp", "It rotates the values as well."),
    "glm5_next_text": without_rope("glm5_next"),
    "jamba": without_rope("jamba"),
    "kimi_linear": without_rope("kimi_linear"),
    "zamba": without_rope("zamba"),
    "inkling_text": without_rope("inkling"),
    "inkling2_text": without_rope("inkling2"),
    "moshi_depth": without_rope("moshi"),
}
