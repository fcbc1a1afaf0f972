"""Text models whose tokens have several positions, such as time, height and width."""

from __future__ import annotations

from dataclasses import replace

from ropewalk.configs.architecture import Architecture
from ropewalk.configs.axes_rules import AxesRule, half_for_each, in_turn, interleaved_axes, time_last
from ropewalk.configs.families import functions
from ropewalk.configs.layers import Every, Kind
from ropewalk.configs.rows import latent, remote, row
from ropewalk.rope.axes import Axes

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_QWEN2_VL = AxesRule((16, 24, 24))
_QWEN3_VL = AxesRule((24, 20, 20), pattern=interleaved_axes, is_interleaved=True)
_HY_V4 = AxesRule((12, 10, 10), pattern=interleaved_axes, is_interleaved=True)
_QWEN3_5 = AxesRule((11, 11, 10), pattern=interleaved_axes, is_interleaved=True)
_GLM4V = AxesRule((8, 12, 12))
_ERNIE = AxesRule((22, 22, 20), pattern=time_last, order=(1, 2, 0))
_BAILING = AxesRule((12, 10, 10), pattern=lambda sections, _: Axes.time_last(sections))
_OPENPANGU = AxesRule(None, pattern=in_turn, is_interleaved=True, min_sections=2)
_NEOMME = AxesRule(None, names=("row", "column"), pattern=half_for_each, is_interleaved=True, keys=())
_HUNYUAN = AxesRule(
    None,
    names=("sequence", "width", "height", "image"),
    min_sections=3,
    keys=("mrope_section", "xdrope_section"),
    warning="transformers uses positions of different axes for the two channels of a pair, which is a rotation "
    "for text only. These axes are those of vLLM, where each pair has one axis.",
)


def _qwen3_5(folder: str) -> Architecture:
    """Build the `Architecture` of a model with the layers of Qwen 3.5."""
    kinds, pattern = {_FULL: Kind(), _LINEAR: None}, Every(4, _FULL, _LINEAR, key="full_attention_interval")
    return row(folder, axes=_QWEN3_5, partial=0.25, head_dim_divides=False, kinds=kinds, pattern=pattern)


SEVERAL_AXES: dict[str, Architecture] = {
    "cohere_compass_text": row(
        "cohere_compass", axes=_QWEN3_VL, kinds={_FULL: Kind(bases=()), _SLIDING: Kind(bases=())}
    ),
    "qwen2_vl_text": row("qwen2_vl", axes=_QWEN2_VL, head_dim_keys=()),
    "qwen2_5_vl_text": row("qwen2_5_vl", axes=_QWEN2_VL, head_dim_keys=()),
    "qwen2_vl": row("qwen2_vl", axes=_QWEN2_VL, head_dim_keys=()),
    "qwen2_5_vl": row("qwen2_5_vl", axes=_QWEN2_VL, head_dim_keys=()),
    "qwen2_5_omni_text": row("qwen2_5_omni", axes=_QWEN2_VL),
    "qwen2_5_omni_talker": row("qwen2_5_omni", axes=_QWEN2_VL, head_dim_divides=False),
    "qwen3_vl_text": row("qwen3_vl", axes=_QWEN3_VL, head_dim_divides=False),
    "qwen3_vl_moe_text": row("qwen3_vl_moe", axes=_QWEN3_VL),
    "qwen3_omni_moe_text": row("qwen3_omni_moe", axes=_QWEN3_VL),
    "qwen3_omni_moe_talker_text": row("qwen3_omni_moe", axes=_QWEN3_VL),
    "cosmos3_edge_text": row("cosmos3_edge", axes=_QWEN3_VL),
    "ernie4_5_vl_moe_text": row("ernie4_5_vl_moe", axes=_ERNIE, pairing="interleaved"),
    "glm4v_text": row("glm4v", axes=_GLM4V, partial=1.0, pairing="interleaved"),
    "glm4v_moe_text": row("glm4v_moe", axes=_GLM4V, partial=0.5),
    "glm_image_text": row("glm_image", axes=_GLM4V, partial=1.0),
    "glm_ocr_text": row("glm_ocr", axes=_GLM4V, partial=1.0, pairing="interleaved"),
    "paddleocr_vl_text": row("paddleocr_vl", axes=_QWEN2_VL, head_dim_divides=False),
    # The text model of bailing_moe_v3_vl, which is bailing_hybrid with several axes.
    "bailing_moe_v3_vl_text": replace(
        latent(
            "bailing_hybrid",
            kinds={_FULL: Kind(), _LINEAR: None},
            pattern=functions.bailing_kinds,
            more_keys=functions.add_sections,
            axes=_BAILING,
            own_config=True,
        ),
        source="vLLM layers/rotary_embedding/bailing_mrope.py and models/bailing_moe_v3.py",
        in_transformers=False,
    ),
    "interns2_mobius_text": replace(
        _qwen3_5("qwen3_5_moe"), source="vLLM models/interns2_mobius.py", in_transformers=False
    ),
    # Qwen 3 with positions of its own: half of the pairs are of time.
    "isaac_text": remote("vLLM models/isaac.py", axes=AxesRule((32, 16, 16)), own_config=True),
    **{
        name: remote(f"vLLM models/{file}.py: Qwen 3 with flat keys", axes=AxesRule(None))
        for name, file in (("KeyeVL", "keye"), ("KeyeVL1_5", "keye_vl1_5"))
    },
    "ernie4_5_moe_vl": remote(
        "ERNIE's modeling_ernie4_5_vl.py", axes=_ERNIE, pairing="interleaved", fixed={"rope_3d": (True, "one axis")}
    ),
    "openpangu_vl_text": remote(
        "vLLM layers/rotary_embedding/mrope_interleaved.py and models/openpangu.py",
        axes=_OPENPANGU,
        check=functions.require_interleaved,
    ),
    "hy_v4_vl_text": latent("hy_v4_vl", output_order=None, axes=_HY_V4, indexer="interleaved", indexer_tail=True),
    "hunyuan_vl_text": row("hunyuan_vl", axes=_HUNYUAN, head_dim_divides=False),
    "neomme": row(
        "neomme",
        axes=_NEOMME,
        partial=1.0,
        head_dim_divides=False,
        kinds={_FULL: Kind(bases=()), _SLIDING: Kind(bases=())},
    ),
    "qwen4_exp_text": row(
        "qwen4_exp",
        axes=_QWEN3_5,
        partial=1.0,
        flat=True,
        head_dim_divides=False,
        kinds={"indexed_attention": Kind(), _FULL: Kind(), _LINEAR: None},
        pattern=Every(4, "indexed_attention", _LINEAR, key="full_attention_interval"),
    ),
    **{f"{name}_text": _qwen3_5(name) for name in ("qwen3_5", "qwen3_5_moe")},
}
"""Maps a model_type to its row."""
