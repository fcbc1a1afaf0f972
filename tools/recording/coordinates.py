"""positions/: the positions that diffusers and timm compute for the tokens of small grids.

If a class does not return positions, cos and sin of its fastest pair on each axis are recorded instead. The frequency
of that pair is 1 (π/2 in LTX).
"""

from __future__ import annotations

import importlib.util
import math
import typing
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import files
from .commands import functions
from .model import CannotRecordError
from .peers import package
from .rotated import shortest

TRANSFORMERS = "diffusers.models.transformers.transformer_"


def as_lists(values: Tensor) -> list[list[float]]:
    """Convert values [axes, tokens] to lists of float32 numbers."""
    return [shortest(row) for row in values.to(torch.float32)]


def tables(cos: Tensor, sin: Tensor, columns: list[int]) -> dict[str, Any]:
    """Return cos and sin of one pair of each axis, from tables [..., tokens, channels]."""
    return {
        name: as_lists(table.reshape(-1, table.shape[-1])[:, columns].T) for name, table in (("cos", cos), ("sin", sin))
    }


def flux(height: int, width: int) -> dict[str, Any]:
    pipeline = package("diffusers.pipelines.flux.pipeline_flux").FluxPipeline
    ids = pipeline._prepare_latent_image_ids(1, height, width, "cpu", torch.float32)
    return {"coordinates": as_lists(ids.T)}


def flux2(height: int, width: int, text: int, references: list[list[int]]) -> dict[str, Any]:
    pipeline = package("diffusers.pipelines.flux2.pipeline_flux2").Flux2Pipeline
    given = [torch.zeros(1, 1, *size) for size in references]
    parts = (
        pipeline._prepare_text_ids(torch.zeros(1, text, 1)),
        pipeline._prepare_latent_ids(torch.zeros(1, 1, height, width)),
        pipeline._prepare_image_ids(given),
    )
    return {"coordinates": as_lists(torch.cat(parts, dim=1)[0].T)}


def wan(frames: int, height: int, width: int) -> dict[str, Any]:
    rope = package(TRANSFORMERS + "wan").WanRotaryPosEmbed(6, (1, 2, 2), 64)
    return tables(*rope(torch.zeros(1, 1, frames, 2 * height, 2 * width)), [0, 2, 4])


def hunyuan_video(frames: int, height: int, width: int) -> dict[str, Any]:
    rope = package(TRANSFORMERS + "hunyuan_video").HunyuanVideoRotaryPosEmbed(2, 1, [2, 2, 2])
    return tables(*rope(torch.zeros(1, 1, frames, 2 * height, 2 * width)), [0, 2, 4])


def cosmos(frames: int, height: int, width: int, fps: int) -> dict[str, Any]:
    rope = package(TRANSFORMERS + "cosmos").CosmosRotaryPosEmbed(12)
    return tables(*rope(torch.zeros(1, 1, frames, 2 * height, 2 * width), fps=fps), [0, 2, 4])


def qwen_image(images: list[list[int]], text: int, layered: bool) -> dict[str, Any]:
    module = package(TRANSFORMERS + "qwenimage")
    rope = (module.QwenEmbedLayer3DRope if layered else module.QwenEmbedRope)(10000, [2, 2, 2], scale_rope=True)
    joined = torch.cat(rope([[tuple(image) for image in images]], max_txt_seq_len=text))
    return tables(joined.real, joined.imag, [0, 1, 2])


def mochi(frames: int, height: int, width: int) -> dict[str, Any]:
    rope = package(TRANSFORMERS + "mochi").MochiRoPE()
    return {"coordinates": as_lists(rope._get_positions(frames, height, width, dtype=torch.float32).T)}


def lumina2(text: int, height: int, width: int) -> dict[str, Any]:
    rope = package(TRANSFORMERS + "lumina2").Lumina2RotaryPosEmbed(10000, [2, 2, 2])
    hidden, mask = torch.zeros(1, 1, 2 * height, 2 * width), torch.ones(1, text, dtype=torch.int64)
    joined = rope(hidden, mask)[3][0]
    return tables(joined.real, joined.imag, [0, 1, 2])


def ltx(frames: int, height: int, width: int, fps: int) -> dict[str, Any]:
    rope = package(TRANSFORMERS + "ltx").LTXVideoRotaryPosEmbed(6)
    return tables(*rope(torch.zeros(1), frames, height, width, (8 / fps, 32, 32)), [0, 2, 4])


def ltx2(frames: int, height: int, width: int, fps: float) -> dict[str, Any]:
    rope = package(TRANSFORMERS + "ltx2").LTX2AudioVideoRotaryPosEmbed(6)
    return tables(*rope(rope.prepare_video_coords(1, frames, height, width, torch.device("cpu"), fps)), [0, 2, 4])


def cogvideox(frames: int, height: int, width: int, base: list[int]) -> dict[str, Any]:
    crop = package("diffusers.pipelines.cogvideo.pipeline_cogvideox").get_resize_crop_region_for_grid
    region = crop((height, width), base[1], base[0])
    made = package("diffusers.models.embeddings").get_3d_rotary_pos_embed(16, region, (height, width), frames)
    return {"region": [list(corner) for corner in region], **tables(*made, [0, 4, 10])}


def cogvideox15(frames: int, height: int, width: int, base: list[int]) -> dict[str, Any]:
    made = package("diffusers.models.embeddings").get_3d_rotary_pos_embed(
        16, None, (height, width), frames, grid_type="slice", max_size=tuple(base)
    )
    return tables(*made, [0, 4, 10])


def timm() -> dict[str, Any]:
    """Load functions of timm from their file, because the package needs torchvision."""
    spec = importlib.util.find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        raise CannotRecordError("timm is not installed")
    file = Path(spec.submodule_search_locations[0]) / "layers" / "pos_embed_sincos.py"
    wanted = ("swap_shape_xy", "_build_grid", "_coord_aug_config", "_apply_coord_augs")
    names = {"torch": torch, "math": math, "Real": Real, "register_notrace_function": lambda function: function}
    return functions(str(file), wanted, **names, **{name: getattr(typing, name) for name in typing.__all__})


def grid(**options: Any) -> dict[str, Any]:
    return {"coordinates": as_lists(timm()["_build_grid"](**options).reshape(-1, 2).T)}


def augmented(seed: int, **options: Any) -> dict[str, Any]:
    found = timm()
    torch.manual_seed(seed)
    centred = found["_build_grid"]([3, 4], grid_type="centered").reshape(-1, 2)
    return {"coordinates": as_lists(found["_apply_coord_augs"](centred, **options).T)}


RECORD = {
    made.__name__: made
    for made in (flux, flux2, wan, hunyuan_video, cosmos, qwen_image, mochi, lumina2, ltx, ltx2, cogvideox, cogvideox15)
} | {"grid": grid, "augmented": augmented}


def record(row: dict[str, Any]) -> dict[str, Any]:
    """Record a row again, by the function that the first word of its id names."""
    return {"id": row["id"], "params": row["params"], **RECORD[row["id"].split()[0]](**row["params"])}


def _golden(name: str) -> files.Golden:
    return files.Golden(
        f"positions/{name}_positions.json", lambda row: str(row["id"]), record, package=name, rows="cases"
    )


GOLDEN = [_golden("diffusers"), _golden("timm")]
