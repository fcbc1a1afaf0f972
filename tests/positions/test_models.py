"""Positions of image tokens in models: each call in the table of docs/positions.md, compared with the model's code.

The code of transformers runs here. The results of diffusers and timm were recorded (tests/golden/positions).
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk import positions

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "golden" / "positions"


def table() -> dict[str, str]:
    """Read the table of the page. Map the first cell of each row to its call."""
    section = (ROOT / "docs" / "positions.md").read_text().split("## Positions of known models")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {row[0].removeprefix("| ").replace("`", ""): row[1].strip("`") for row in rows if row[1].startswith("`")}


CALLS = table()


def call(row: str, **given: Any) -> Tensor:
    """Evaluate the call of a row."""
    names = {name: getattr(positions, name) for name in ("axis", "crop", "grid", "mesh", "with_unrotated")}
    made = eval(CALLS[row], {"torch": torch, **names, **given})
    assert isinstance(made, Tensor)
    return made


def modeling(name: str) -> Any:
    pytest.importorskip("transformers", "5.23")
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def recorded(peer: str, name: str) -> dict[str, Any]:
    golden = json.loads((RECORDED / f"{peer}_positions.json").read_text())
    return next(row for row in golden["cases"] if row["id"] == name)  # type: ignore[no-any-return]


def same(ours: Tensor, row: dict[str, Any], speed: float = 1.0) -> None:
    """Compare with a float32 recording, up to a few roundings of 2⁻²⁴ times `size`, the largest coordinate."""
    size = max(1.0, float(ours.abs().max()))
    bound = 4 * 2.0**-24 * size * speed
    if "coordinates" in row:
        theirs = torch.tensor(row["coordinates"], dtype=torch.float64)
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= bound
    else:
        angles = ours.double() * speed
        for name, function in (("cos", torch.cos), ("sin", torch.sin)):
            theirs = torch.tensor(row[name], dtype=torch.float64)
            assert ours.shape == theirs.shape
            assert (function(angles) - theirs).abs().max() <= bound + 2.0**-24


# Code of transformers.
def vision_position_ids(row: str, merge: int, **more: Any) -> None:
    pytest.importorskip("transformers", "5.23")
    from transformers.vision_utils import get_vision_position_ids

    theirs = get_vision_position_ids(torch.tensor([[3, 4, 6]]), merge, **more)
    assert torch.equal(call(row, h=4, w=6, frames=3), theirs.T)


def qwen(row: str) -> None:
    vision_position_ids(row, 2)


def kimi(row: str) -> None:
    vision_position_ids(row, 1)


def minimax(row: str) -> None:
    vision_position_ids(row, 2, include_temporal=True)


def pixtral(row: str) -> None:
    modeling("pixtral")
    from transformers import PixtralVisionConfig, PixtralVisionModel

    config = PixtralVisionConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        image_size=64,
        patch_size=4,
    )
    model, seen = PixtralVisionModel(config), []
    model.patch_positional_embedding.register_forward_pre_hook(lambda _, given: seen.append(given[1]))
    model(torch.zeros(1, 3, 12, 20), image_sizes=torch.tensor([[12, 20]]))
    assert torch.equal(call(row, h=3, w=5), seen[0].T)


def vjepa2(row: str) -> None:
    module = modeling("vjepa2")
    attention = object.__new__(module.VJEPA2RopeAttention)
    torch.nn.Module.__init__(attention)
    attention.grid_size = 3  # its images are square
    theirs = attention.get_position_ids(torch.zeros(1, 18, 1))
    assert torch.equal(call(row, h=3, w=3, frames=2), torch.stack(theirs))


def gemma4(row: str) -> None:
    modeling("gemma4")
    np = pytest.importorskip("numpy")
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    processor = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=1, do_resize=False)
    made = processor(np.zeros((12, 20, 3), dtype=np.uint8), return_tensors="pt", input_data_format="channels_last")
    theirs = made["image_position_ids"][0]
    real = theirs[(theirs >= 0).all(dim=1)]  # padded with -1
    assert torch.equal(call(row, h=3, w=5), real.T)


def sam2(row: str) -> None:
    attention = modeling("sam2_video").Sam2VideoMemoryAttention
    theirs = attention.precompute_positions(SimpleNamespace(memory_attention_rope_feat_sizes=[5, 3]))
    assert torch.equal(call(row, h=3, w=5), theirs.T)


def sam3(row: str) -> None:
    config = SimpleNamespace(image_size=(30, 50), patch_size=10, window_size=2)
    theirs = modeling("sam3").Sam3ViTLayer.precompute_positions(config, 0)
    assert torch.equal(call(row, h=5, w=3, window=2), theirs.T)


def llama4(row: str) -> None:
    config = SimpleNamespace(
        image_size=12,
        patch_size=4,
        hidden_size=4,
        num_attention_heads=1,
        rope_parameters={"rope_theta": 10000.0},
    )
    turns = modeling("llama4").Llama4VisionRotaryEmbedding._compute_freqs_ci(config)[:, 0]  # one pair of each axis
    same(call(row, h=3, w=3), {"cos": turns.real.T.tolist(), "sin": turns.imag.T.tolist()})


def efficientloftr(row: str) -> None:
    theirs = modeling("efficientloftr").compute_embeddings(torch.ones(1), 3, 5, 4)
    assert torch.equal(call(row, h=3, w=5).float(), theirs.reshape(-1, 2).T)


def dinov3(row: str) -> None:
    centres = modeling("dinov3_vit").get_patches_center_coordinates
    for h, w in ((3, 5), (14, 14), (37, 4)):
        ours = call(row, h=h, w=w, prefix=5)
        same(ours[:, 5:], {"coordinates": centres(h, w, torch.float32, torch.device("cpu")).T.tolist()})
        assert not ours[:, :5].any()


# Recorded from diffusers and timm.
def rope_vit(row: str) -> None:
    """`init_t_xy(3, 5)` of naver-ai/rope-vit, deit/models_v2_rope.py at ce85c2e, as it was recorded: t_x, t_y."""
    t_x = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]
    t_y = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert call(row, h=5, w=3).tolist() == [t_x, t_y]


def from_timm(name: str, **given: Any) -> Callable[[str], None]:
    return lambda row: same(call(row, h=3, w=5, **given), recorded("timm", name))


def pixel(row: str) -> None:
    same(call(row, h=3, w=5), recorded("timm", "grid pixel 3x5"))
    same(call(row, h=1, w=5)[[1, 0]], recorded("timm", "grid pixel 1x5 xy"))


def from_diffusers(name: str, speed: float = 1.0, **given: Any) -> Callable[[str], None]:
    return lambda row: same(call(row, **given), recorded("diffusers", name), speed)


def wan(row: str) -> None:
    for name in ("wan", "hunyuan_video"):
        from_diffusers(f"{name} 3x2x5", h=2, w=5, frames=3)(row)


def part(peer: str, name: str, first: int, last: int) -> dict[str, Any]:
    """Return some tokens of a recording."""
    values = recorded(peer, name)
    cut = {key: [axis[first:last] for axis in values[key]] for key in ("coordinates", "cos", "sin") if key in values}
    assert cut
    return cut


FLUX2 = "flux2 3x5 with 4 tokens of text and two references"
QWEN, LAYERED = "qwen_image 4x5 and 3x2 with 6 tokens of text", "qwen_image layered 3x5"
LUMINA2 = "lumina2 3x5 behind 7 tokens of text"


def flux2_image(row: str) -> None:
    same(call(row, h=3, w=5), part("diffusers", FLUX2, 4, 19))


def flux2_references(row: str) -> None:
    same(call(row, h=2, w=3, i=0), part("diffusers", FLUX2, 19, 25))
    same(call(row, h=1, w=2, i=1), part("diffusers", FLUX2, 25, 27))


def flux2_text(row: str) -> None:
    same(call(row, tokens=4), part("diffusers", FLUX2, 0, 4))


def qwen_image(row: str) -> None:
    same(call(row, h=4, w=5, frames=1, i=0), part("diffusers", QWEN, 0, 20))
    same(call(row, h=3, w=2, frames=1, i=1), part("diffusers", QWEN, 20, 26))
    same(call(row, h=3, w=5, frames=1, i=1), part("diffusers", LAYERED, 15, 30))
    same(call(row, h=4, w=4, frames=1, i=-1), part("diffusers", LAYERED, 30, 46))


def qwen_image_text(row: str) -> None:
    same(call(row, tokens=6, after=2), part("diffusers", QWEN, 26, 32))
    same(call(row, tokens=6, after=2), part("diffusers", LAYERED, 46, 52))


def lumina2_image(row: str) -> None:
    same(call(row, h=3, w=5, tokens=7), part("diffusers", LUMINA2, 7, 22))


def lumina2_text(row: str) -> None:
    same(call(row, tokens=7), part("diffusers", LUMINA2, 0, 7))


def cogvideox(row: str) -> None:
    for name, frames, h, w, base in (
        ("cogvideox 3x4x6 trained on 4x6", 3, 4, 6, (4, 6)),
        ("cogvideox 2x5x3 trained on 30x45", 2, 5, 3, (30, 45)),
        ("cogvideox 2x3x8 trained on 30x45", 2, 3, 8, (30, 45)),
    ):
        values = recorded("diffusers", name)
        (top, left), (bottom, right) = positions.crop(h, w, *base)
        assert [[top, left], [bottom, right]] == values["region"]
        sides = {"top": top, "left": left, "bottom": bottom, "right": right}
        same(call(row, frames=frames, h=h, w=w, **sides), values)


ROWS: dict[str, Callable[[str], None]] = {
    "Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4V, PaddleOCR-VL: vision": qwen,
    "Kimi K2.5: vision": kimi,
    "MiniMax M3 VL: vision": minimax,
    "Pixtral": pixtral,
    "V-JEPA 2": vjepa2,
    "Gemma 4: vision": gemma4,
    "SAM 2 video, memory attention": sam2,
    "SAM 3: vision, layers without windows": sam3,
    "rope-vit, axial and mixed": rope_vit,
    "Llama 4: vision": llama4,
    "EfficientLoFTR": efficientloftr,
    "DINOv3": dinov3,
    'timm, DINOv3 with normalize_coords="max"': from_timm("grid centered 3x5 max"),
    "timm, EVA-02, trained on H × W": from_timm("grid index 3x5 of 16x16", H=16, W=16),
    'timm, the same with grid_indexing="xy"': from_timm("grid index 3x5 of 7x9 xy", H=7, W=9),
    "timm, in_pixels": pixel,
    "FLUX.1": from_diffusers("flux 3x5", h=3, w=5),
    "FLUX.2": flux2_image,
    "FLUX.2, reference image i": flux2_references,
    "FLUX.2, text": flux2_text,
    "Wan, HunyuanVideo": wan,
    "Cosmos, if the pipeline passes fps": from_diffusers("cosmos 3x2x5 16 fps", h=2, w=5, frames=3, fps=16),
    "Qwen-Image, image or layer i": qwen_image,
    "Qwen-Image, text": qwen_image_text,
    "Lumina 2, image after tokens of text": lumina2_image,
    "Lumina 2, text": lumina2_text,
    "Mochi": from_diffusers("mochi 3x4x7", h=4, w=7, frames=3),
    "LTX, fps frames a second": from_diffusers("ltx 4x2x5 25 fps", math.pi / 2, h=2, w=5, frames=4, fps=25),
    "LTX-2": from_diffusers("ltx2 4x2x5 24 fps", math.pi / 2, h=2, w=5, frames=4, fps=24),
    "CogVideoX 1.0, cropped": cogvideox,
    "CogVideoX 1.5": from_diffusers("cogvideox15 3x4x6", h=4, w=6, frames=3),
}


def test_every_row_of_the_table_is_compared() -> None:
    assert list(CALLS) == list(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_row(row: str) -> None:
    ROWS[row](row)


def test_other_grids_of_timm() -> None:
    axis, mesh, grid = positions.axis, positions.mesh, positions.grid
    same(grid(3, 5), recorded("timm", "grid index 3x5"))
    same(grid(3, 5, start=1), recorded("timm", "grid index 3x5 offset 1"))
    same(mesh(axis(3), axis(5)), recorded("timm", "grid centered 3x5"))
    same(mesh(axis(3, -1, 1), axis(5, -1, 2 * 5 / 3 - 1)), recorded("timm", "grid centered 3x5 min"))
    shifted = mesh(*(axis(n, -1 + 0.5 / n, 1 + 0.5 / n) for n in (3, 5)))
    same(shifted, recorded("timm", "grid centered 3x5 offset 0.25"))


def test_augmentation_of_timm() -> None:
    for name, seed, given in (
        ("augmented shift", 5, {"shift": 0.3}),
        ("augmented all", 6, {"shift": 0.3, "jitter": 1.5, "rescale": 2.0}),
    ):
        centred = positions.mesh(positions.axis(3), positions.axis(4))
        same(positions.augment(centred, seed, **given), recorded("timm", name))


@pytest.mark.parametrize(
    "given",
    [
        {"shift": 0.4},
        {"jitter": 1.7},
        {"rescale": 2.0},
        {"shift": 0.1, "rescale": 3.0},
        {"shift": 0.2, "jitter": 1.2, "rescale": 2.0},
    ],
)
def test_augmentation_of_dinov3(given: dict[str, float]) -> None:
    module = modeling("dinov3_vit")
    coordinates = module.get_patches_center_coordinates(3, 4, torch.float32, torch.device("cpu"))
    for seed in range(5):
        torch.manual_seed(seed)
        theirs = module.augment_patches_center_coordinates(coordinates, **given).T
        generator = torch.Generator().manual_seed(seed)
        before = torch.get_rng_state()
        assert torch.equal(positions.augment(coordinates.T, seed, **given), theirs)
        assert torch.equal(positions.augment(coordinates.T, generator, **given), theirs)
        assert torch.equal(torch.get_rng_state(), before)
