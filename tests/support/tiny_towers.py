"""Small vision towers of transformers with random weights, and images and video for them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ropewalk.configs.tables.towers import TOWERS as SOURCES

SIDE = 4  # of a patch, in pixels
# Given to a config as far as it has the key. Head size 16, and for three axes 20: 18 channels turn.
TINY: dict[str, Any] = {
    "attention_dropout": 0.0,
    "deepstack_visual_indexes": [0],
    "depth": 2,
    "embed_dim": 64,
    "fullatt_block_indexes": [1],
    "head_dim": 16,
    "hidden_size": 64,
    "image_size": 32,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_heads": 4,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_position_embeddings": 64,
    "out_hidden_size": 64,
    "patch_size": SIDE,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 16,
}
_DOTS = {"adapter_in_dim": 64, "adapter_out_dim": 64}
_LLAMA4 = {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64, "intermediate_size": 256}
_HEADS_OF_3 = {"hidden_size": 80}
# model_type → class, and what its config is given beside TINY.
TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere_compass_vision": ("CohereCompassVisionModel", {}),
    "dots3_note_vision_encoder": ("Dots3NoteVisionModel", {"mlp_layer_types": ["dense", "dense"], **_DOTS}),
    "ernie4_5_vl_moe_vision": ("Ernie4_5_VLMoeVisionTransformerPretrainedModel", {}),
    "exaone4_5_vision": ("Exaone4_5_VisionModel", {"num_key_value_heads": 2}),
    "glm4v_moe_vision": ("Glm4vMoeVisionModel", {}),
    "glm4v_vision": ("Glm4vVisionModel", {}),
    "glm5_next_vision": ("Glm5NextVisionModel", {}),
    "glm_ocr_vision": ("GlmOcrVisionModel", {}),
    "inkling2_vision": ("Inkling2VisionModel", {}),
    "kimi_k25_vision": ("Kimi_K25VisionModel", {}),
    "lfm3_vl_vision": ("Lfm3VlVisionModel", {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}),
    "minimax_m3_vl_vision": ("MiniMaxM3VLVisionModel", _HEADS_OF_3),
    "muse_glimmer_vision": ("MuseGlimmerVisionModel", {}),
    "muse_spark_vision": ("MuseSparkVisionModel", {}),
    "paddleocr_vl_vision": ("PaddleOCRVisionModel", {}),
    "qwen2_5_omni_vision_encoder": ("Qwen2_5OmniVisionEncoder", {}),
    "qwen2_5_vl_vision": ("Qwen2_5_VisionTransformerPretrainedModel", {}),
    "qwen2_vl_vision": ("Qwen2VisionTransformerPretrainedModel", {}),
    "qwen3_5_moe_vision": ("Qwen3_5MoeVisionModel", {}),
    "qwen3_5_vision": ("Qwen3_5VisionModel", {}),
    "qwen3_omni_moe_vision_encoder": ("Qwen3OmniMoeVisionEncoder", {}),
    "qwen3_vl_moe_vision": ("Qwen3VLMoeVisionModel", {}),
    "qwen3_vl_vision": ("Qwen3VLVisionModel", {}),
    "qwen4_exp_vision": ("Qwen4ExpVisionModel", {}),
    "step3p5_vision": ("Step3p7VisionModel", {}),
    "video_llama_3_vision": ("VideoLlama3VisionModel", {}),
    "pixtral": ("PixtralVisionModel", {}),
    "dinov3_vit": ("DINOv3ViTModel", {"num_register_tokens": 2}),
    "sapiens2": ("Sapiens2Model", {}),
    "eomt_dinov3": ("EomtDinov3ForUniversalSegmentation", {"num_blocks": 1, "num_queries": 4}),
    "sam3_vit_model": ("Sam3ViTModel", {}),
    "llama4_vision_model": ("Llama4VisionModel", _LLAMA4),
    "gemma4_vision": ("Gemma4VisionModel", {"num_key_value_heads": 2}),
}


NOT_SERVED = {"mlcd_vision_model": ("MLCDVisionModel", {})}


def config(name: str, **changes: Any) -> Any:
    """Return the config of a small tower."""
    kind = _class(name).config_class
    default = kind()
    given = {key: value for key, value in TINY.items() if hasattr(default, key)}
    return kind(**given | (TOWERS | NOT_SERVED)[name][1] | changes)


def build(name: str, **changes: Any) -> Any:
    """Build a tower with the same weights each time.

    They are larger than usual, so that a wrong rotation is visible.
    """
    with torch.random.fork_rng(devices=[]), _without_loss(name), torch.no_grad():
        torch.default_generator.manual_seed(0)
        model = _class(name)(config(name, **changes)).eval()
        for part, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.2)
            elif "scale" in part:  # of a layer's output
                parameter.fill_(1.0)
        return model


def _class(name: str) -> Any:
    return getattr(_file(name), (TOWERS | NOT_SERVED)[name][0])


def _file(name: str) -> Any:
    folder = SOURCES[name].source.rpartition("/")[2]
    return importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")


def _without_loss(name: str) -> Any:
    """Remove the loss of EoMT, which needs SciPy."""
    if name != "eomt_dinov3":
        return contextlib.nullcontext()
    return mock.patch.object(_file(name), "requires_backends")


def numbers(*shape: int) -> Tensor:
    """Return numbers between −1 and 1, the same each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)


ONE, TWO, VIDEO = [[1, 4, 6]], [[1, 4, 6], [1, 8, 4]], [[3, 4, 4]]
"""Frames, and rows and columns of patches: an image, two of them packed, and a video."""


def _packed(*shape: int, name: str = "pixel_values", **more: Any) -> Callable[[list[list[int]]], dict[str, Any]]:
    """Return the patches of all images one after another, each of this shape."""

    def given(grids: list[list[int]]) -> dict[str, Any]:
        patches = sum(t * h * w for t, h, w in grids)
        return {name: numbers(patches, *shape), "grid_thw": torch.tensor(grids), **more}

    return given


_PIXELS = 3 * SIDE * SIDE
_QWEN = _packed(2 * _PIXELS, name="hidden_states")
_FLAT = {
    "dots3_note_vision_encoder": _packed(_PIXELS),
    "ernie4_5_vl_moe_vision": _packed(_PIXELS, name="hidden_states"),
    "kimi_k25_vision": _packed(3, SIDE, SIDE),
    "lfm3_vl_vision": _packed(2 * _PIXELS),
    "minimax_m3_vl_vision": _packed(2 * _PIXELS),
    "muse_glimmer_vision": _packed(2 * _PIXELS),
    "muse_spark_vision": _packed(2 * _PIXELS),
    "video_llama_3_vision": _packed(_PIXELS),
}


def _images(*sizes: tuple[int, int], batch: int = 2) -> list[dict[str, Any]]:
    """Return batches of images with these sizes in patches."""
    return [{"pixel_values": numbers(batch, 3, SIDE * height, SIDE * width)} for height, width in sizes]


def calls(name: str) -> list[dict[str, Any]]:
    """Return the arguments of calls: images of several sizes, packed images, and video if the tower supports it."""
    if name in ("dinov3_vit", "sapiens2", "step3p5_vision"):
        return _images((4, 6), (8, 4))
    if name in ("llama4_vision_model", "sam3_vit_model", "eomt_dinov3", *NOT_SERVED):
        return _images((8, 8))
    if name == "pixtral":
        sizes = torch.tensor([[16, 24], [32, 16]])
        return [*_images((4, 6), batch=1), {**_images((8, 6))[0], "image_sizes": sizes}]
    if name == "paddleocr_vl_vision":
        made = (_packed(3, SIDE, SIDE)(grids) for grids in (ONE, TWO))
        return [{**given, "pixel_values": given["pixel_values"][None]} for given in made]
    if name == "inkling2_vision":
        halves = [[[t, h // 2, w // 2] for t, h, w in grids] for grids in (ONE, TWO)]
        made = (_packed(2 * SIDE, 2 * SIDE, 3)(grids) for grids in halves)
        return [{"pixel_values": given["pixel_values"], "image_grid_thw": given["grid_thw"]} for given in made]
    if name == "gemma4_vision":
        places = torch.cartesian_prod(torch.arange(6), torch.arange(6)).flip(-1)
        return [{"pixel_values": numbers(2, 36, _PIXELS), "pixel_position_ids": places.expand(2, -1, -1)}]
    # A frame of GLM-4V is an image.
    grids = (ONE, TWO) if name.startswith("glm4v") else (ONE, TWO, VIDEO)
    made = [_FLAT.get(name, _QWEN)(each) for each in grids]
    if name == "video_llama_3_vision":
        made = [{**given, "merge_sizes": torch.tensor([2] * len(given["grid_thw"]))} for given in made]
    return made


def output(model: nn.Module, given: dict[str, Any]) -> Tensor:
    """Return the last hidden states."""
    made = model(**given)
    return made if isinstance(made, Tensor) else made[0]
