"""Vision towers: `TOWERS` maps the model_type of a tower to its row, a `Tower`.

Each row was checked by running the rotary class and the rotation of the tower in transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ropewalk.configs.rows import source
from ropewalk.configs.tower import GRID, Tower, axial, gemma4, minimax
from ropewalk.rope.axes import Axes
from ropewalk.rope.rope import Rope

_MERGED = f"{GRID}; patches are in the order of the blocks that are merged"
_CENTRES = (
    "floats: the centre of each patch, from −1 to 1 along each side, times 2π: 2π · (2 · (i + 0.5) / n − 1) for the "
    "i-th of n; class and register tokens, which come first, are not rotated"
)
_MEMORY = "integers: column and row of each cell of the feature map, from 0; tokens of object pointers are not rotated"


def _tower(folder: str, ropes: Callable[[int, float], tuple[Rope, ...]], *sizes: int, **more: Any) -> Tower:
    width, heads, *own = sizes
    return Tower(source(folder), ropes, sizes=(width, heads, own[0] if own else None), **more)


def _memory(folder: str, *position_keys: str) -> Tower:
    """Build the `Tower` of a tracker of SAM, which rotates q and k in its attention to earlier frames (its memory)."""
    ignored = ("memory_attention_rope_feat_sizes", "memory_attention_rope_dropout", *position_keys)
    return _tower(
        folder,
        axial("interleaved"),
        256,
        1,
        axis_names=("column", "row"),
        positions=_MEMORY,
        width=("memory_attention_hidden_size",),
        heads=("memory_attention_num_attention_heads",),
        divided_by="memory_attention_downsample_rate",
        position_keys=ignored,
    )


_MUSE = {"axis_names": ("column", "row"), "positions": "integers: column and row of each patch in the grid, from 1"}
_CLASS_FIRST = (
    "integers: row and column of each patch, from 1; 0 and 0 for the class token, which comes first; patches are in "
    "the order of the blocks that are merged"
)
_LEARNED = f"{GRID}; the class token, which comes first, has learned angles of its own"
_QWEN = {"positions": _MERGED, "heads": ("num_heads", "num_attention_heads")}

TOWERS: dict[str, Tower] = {
    "qwen2_vl_vision": _tower("qwen2_vl", axial(), 1280, 16, **{**_QWEN, "width": ("embed_dim",)}),
    "qwen2_5_vl_vision": _tower("qwen2_5_vl", axial(), 3584, 16, **_QWEN),
    "qwen2_5_omni_vision_encoder": _tower("qwen2_5_omni", axial(), 3584, 16, **_QWEN),
    "qwen3_omni_moe_vision_encoder": _tower("qwen3_omni_moe", axial(), 1152, 16, **_QWEN),
    **{
        f"{name}_vision": _tower(name, axial(), 1152, 16, **_QWEN)
        for name in ("cohere_compass", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp")
    },
    "exaone4_5_vision": _tower("exaone4_5", axial(), 3584, 16, **_QWEN),
    "ernie4_5_vl_moe_vision": _tower("ernie4_5_vl_moe", axial(), 1280, 16, **_QWEN),
    "glm4v_vision": _tower("glm4v", axial(), 1536, 12, **_QWEN),
    "glm4v_moe_vision": _tower("glm4v_moe", axial(), 1536, 12, **_QWEN),
    "glm_ocr_vision": _tower("glm_ocr", axial(), 1024, 16, **_QWEN),
    "glm5_next_vision": _tower("glm5_next", axial(), 1024, 16, **_QWEN),
    "dots3_note_vision_encoder": _tower("dots3_note", axial(), 1536, 24, positions=_MERGED),
    "lfm3_vl_vision": _tower("lfm3_vl", axial(), 1024, 16, base=1e6, positions=_MERGED),
    **{f"{name}_vision": _tower(name, axial(), 1536, 16, **_MUSE) for name in ("muse_glimmer", "muse_spark")},
    "paddleocr_vl_vision": _tower("paddleocr_vl", axial(), 1152, 16),
    "video_llama_3_vision": _tower("video_llama_3", axial(), 768, 12, positions=_MERGED),
    **dict.fromkeys(("mlcd", "mlcd_vision_model"), _tower("mlcd", axial(), 1664, 16, positions=_LEARNED)),
    "step3p5_vision": _tower("step3p7", axial(order=(1, 0)), 1536, 16),
    "inkling2_vision": _tower("inkling2", axial("interleaved", order=(1, 0)), 1024, 16, positions=_CLASS_FIRST),
    "kimi_k25_vision": _tower(
        "kimi_k25",
        axial(order=(1, 0), layout=Axes.alternating),
        1152,
        16,
        width=("hidden_size", "vt_hidden_size"),
        heads=("num_attention_heads", "vt_num_attention_heads"),
    ),
    "moonvit": Tower(
        "vLLM model_executor/models/moonvit.py", axial("interleaved", order=(1, 0), layout=Axes.alternating)
    ),
    "dots_vit": Tower(
        "vLLM model_executor/models/dots_ocr.py",
        axial(),
        positions=_MERGED,
        width=("embed_dim", "hidden_size"),
        sizes=(1536, 12, None),
    ),
    "pixtral": _tower("pixtral", axial(layout=Axes.strided), 1024, 16),
    "minimax_m3_vl_vision": _tower(
        "minimax_m3_vl",
        minimax,
        1280,
        16,
        axis_names=("time", "height", "width"),
        positions=_MERGED.replace("row", "frame, row"),
    ),
    "gemma4_vision": _tower(
        "gemma4",
        gemma4,
        768,
        12,
        64,
        base=100.0,
        axis_names=("column", "row"),
        positions=GRID.replace("row and column", "column and row"),
    ),
    "llama4_vision_model": _tower(
        "llama4",
        axial("interleaved"),
        768,
        16,
        axis_names=("column", "row"),
        positions="integers: column and row of each patch, from 1; 0 and 0 for the class token, which comes last",
    ),
    "dinov3_vit": _tower("dinov3_vit", axial(), 384, 6, base=100.0, positions=_CENTRES),
    "eomt_dinov3": _tower("eomt_dinov3", axial(), 1024, 16, base=100.0, positions=_CENTRES),
    "sapiens2": _tower("sapiens2", axial(), 1024, 16, base=100.0, positions=_CENTRES),
    "sam2_video": _memory("sam2_video"),
    "sam3_tracker_video": _memory("sam3_tracker_video"),
    "edgetam_video": _memory("edgetam_video", "memory_attention_rope_k_sizes"),
    "sam3_vit_model": _tower(
        "sam3",
        axial("interleaved"),
        1024,
        16,
        axis_names=("column", "row"),
        positions="floats: column and row of each patch in its window, from 0; in a layer without windows, in the "
        "whole grid, times window_size / patches of a row",
    ),
}

TOWER_ONLY = frozenset({"chmv2", "sam3", "sam3_lite_text", "sam3_tracker", "sam3_vision_model"})
"""Models of which only the tower rotates."""

TOWER_OF_MODEL = {
    "colqwen3": "qwen3_vl_vision",
    "dots3_note": "dots3_note_vision_encoder",
    "dots_ocr": "dots_vit",
    "dots_vlm": "dots_vit",
    "glm46v": "glm4v_vision",
    "glmga": "glm4v_vision",
    "kimi_vl": "moonvit",
    "llama4": "llama4_vision_model",
    "mistral3": "pixtral",
    "qwen2_5_omni_thinker": "qwen2_5_omni_vision_encoder",
    "ops_colqwen3": "qwen3_vl_vision",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_vision_encoder",
    "qwen3_vl_nemotron_embed": "qwen3_vl_vision",
    "sam3_vision_model": "sam3_vit_model",
    "step3p7": "step3p5_vision",
}
"""Maps the model_type of a whole model to that of its tower, for configs in which the tower has no model_type.

For a model that is not listed, it is the model_type of the whole model followed by `_vision`.
"""
