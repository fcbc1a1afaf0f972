"""What rotates in a way that no Rope describes, and why; and what has keys of a rope and rotates nothing."""

from __future__ import annotations

from ropewalk.configs.architecture import Architecture
from ropewalk.configs.rows import refused, without_rope

_BEFORE_PROJECTION = "It rotates hidden states before the projections, not q and k."

NO_ROPES: dict[str, Architecture] = {
    "qwen2_5_omni_dit": refused("qwen2_5_omni", "It rotates one head only."),
    "nanochat": refused("nanochat", "It turns the other way, by minus the angle: negate the positions yourself."),
    "vjepa2": refused("vjepa2", "It pairs channels with cos and sin of others, which is no rotation."),
    "mistral_large4_text": refused(
        "mistral_large4", "Its frequencies come from the checkpoint: a learned factor for each pair."
    ),
    "wav2vec2-bert": refused("wav2vec2_bert", _BEFORE_PROJECTION),
    "wav2vec2-conformer": refused("wav2vec2_conformer", _BEFORE_PROJECTION),
    "seamless_m4t": refused("seamless_m4t", _BEFORE_PROJECTION),
    "neomme": refused("neomme", "Its tokens have two axes: not supported yet."),
    "clvp_encoder": refused("clvp", "It rotates the values as well."),
    "glm5_next_text": without_rope("glm5_next"),
    "jamba": without_rope("jamba"),
    "kimi_linear": without_rope("kimi_linear"),
    "nemotron_h": without_rope("nemotron_h"),
    "zamba": without_rope("zamba"),
    "inkling_text": without_rope("inkling"),
    "inkling2_text": without_rope("inkling2"),
    "moshi_depth": without_rope("moshi"),
    **{
        name: refused(name, "Vision towers have several axes: not supported yet.")
        for name in (
            "dinov3_vit",
            "gemma4_vision",
            "llama4_vision_model",
            "mlcd",
            "pixtral",
            "qwen2_5_vl_vision",
            "qwen2_vl_vision",
            "qwen3_5_vision",
            "qwen3_vl_vision",
            "sam2_video",
            "sam3_vit_model",
            "siglip2_vision_model",
        )
    },
}
