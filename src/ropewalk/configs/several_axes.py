"""Architectures of text models whose tokens have several positions, such as time, height and width."""

from __future__ import annotations

from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.axes_rules import ERNIE, GLM4V, HUNYUAN, NEOMME, QWEN2_VL, QWEN3_5, QWEN3_VL
from ropewalk.configs.layers import Every
from ropewalk.configs.rows import several_axes

_FULL, _SLIDING = "full_attention", "sliding_attention"

SEVERAL_AXES: dict[str, Architecture] = {
    "cohere_compass_text": several_axes(
        "cohere_compass", QWEN3_VL, kinds={_FULL: Kind(bases=()), _SLIDING: Kind(bases=())}
    ),
    "qwen2_vl_text": several_axes("qwen2_vl", QWEN2_VL, head_dim_keys=()),
    "qwen2_5_vl_text": several_axes("qwen2_5_vl", QWEN2_VL, head_dim_keys=()),
    "qwen2_vl": several_axes("qwen2_vl", QWEN2_VL, head_dim_keys=()),
    "qwen2_5_vl": several_axes("qwen2_5_vl", QWEN2_VL, head_dim_keys=()),
    "qwen2_5_omni_text": several_axes("qwen2_5_omni", QWEN2_VL),
    "qwen2_5_omni_talker": several_axes("qwen2_5_omni", QWEN2_VL, head_dim_divides=False),
    "qwen3_vl_text": several_axes("qwen3_vl", QWEN3_VL, head_dim_divides=False),
    "qwen3_vl_moe_text": several_axes("qwen3_vl_moe", QWEN3_VL),
    "qwen3_omni_moe_text": several_axes("qwen3_omni_moe", QWEN3_VL),
    "qwen3_omni_moe_talker_text": several_axes("qwen3_omni_moe", QWEN3_VL),
    "cosmos3_edge_text": several_axes("cosmos3_edge", QWEN3_VL),
    "ernie4_5_vl_moe_text": several_axes("ernie4_5_vl_moe", ERNIE, pairing="interleaved"),
    "glm4v_text": several_axes("glm4v", GLM4V, fraction=1.0, pairing="interleaved"),
    "glm4v_moe_text": several_axes("glm4v_moe", GLM4V, fraction=0.5),
    "glm_image_text": several_axes("glm_image", GLM4V, fraction=1.0),
    "glm_ocr_text": several_axes("glm_ocr", GLM4V, fraction=1.0, pairing="interleaved"),
    "paddleocr_vl_text": several_axes("paddleocr_vl", QWEN2_VL, head_dim_divides=False),
    "hunyuan_vl_text": several_axes("hunyuan_vl", HUNYUAN, head_dim_divides=False),
    "neomme": several_axes(
        "neomme", NEOMME, fraction=1.0, head_dim_divides=False, kinds={_FULL: Kind(bases=()), _SLIDING: Kind(bases=())}
    ),
    "qwen4_exp_text": several_axes(
        "qwen4_exp",
        QWEN3_5,
        fraction=1.0,
        flat=True,
        head_dim_divides=False,
        kinds={"indexed_attention": Kind(), _FULL: Kind(), "linear_attention": None},
        pattern=Every(4, "indexed_attention", "linear_attention", key="full_attention_interval"),
    ),
    **{
        f"{name}_text": several_axes(
            name,
            QWEN3_5,
            fraction=0.25,
            head_dim_divides=False,
            kinds={_FULL: Kind(), "linear_attention": None},
            pattern=Every(4, _FULL, "linear_attention", key="full_attention_interval"),
        )
        for name in ("qwen3_5", "qwen3_5_moe")
    },
}
"""Maps a model_type to its row."""
