"""`check` with several axes of positions: M-RoPE, grids of patches, and the bugs in which pair uses which axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from code_of_transformers import code_of
from ropewalk import Axes, Rope, conformance

T, H, W = 0, 1, 2


def half(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate x `[..., channels]` by angles `[..., pairs]`."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def progression(indices: Sequence[int], length: int, base: float = 100.0) -> list[float]:
    return [base ** (-i / length) for i in indices]


ONE = progression(range(8), 8)  # of 8 pairs
OWN = [*progression(range(4), 4), *progression(range(4), 4)]  # of two axes with 4 pairs each


def rotator(axis: Sequence[int], inv_freq: Sequence[float] = ONE) -> Callable[..., Any]:
    """A function of q and k `[batch, seq, heads, 16]`, whose pair i is turned by positions[axis[i]]."""

    def rotate(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.stack([positions[a].float() * w for a, w in zip(axis, inv_freq, strict=True)], dim=-1)
        return half(q, angles[:, :, None]), half(k, angles[:, :, None])

    return rotate


SECTIONS, MIXED, GRID = Axes.sections((2, 3, 3)), Axes.interleaved((3, 3, 2)), Axes.axial((8, 8))
CONTIGUOUS, ALTERNATING = [T, T, H, H, H, W, W, W], [T, H, W, T, H, W, T, H]


def test_rounded_tables_do_not_mix_axes() -> None:
    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        angles = torch.stack([positions[a].float() * w for a, w in zip(CONTIGUOUS, ONE, strict=True)], dim=-1)[
            :, :, None
        ]
        (a, b), cos, sin = x.chunk(2, dim=-1), angles.cos().bfloat16(), angles.sin().bfloat16()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    report = conformance.check(rotate, rope=Rope(16, 100.0, "half", axes=SECTIONS))
    assert report.codes == ["low-precision-tables", "wider-output"]


@pytest.mark.parametrize(
    ("axes", "axis", "inv_freq"),
    [(SECTIONS, CONTIGUOUS, ONE), (MIXED, ALTERNATING, ONE), (GRID, [0] * 4 + [1] * 4, OWN)],
)
def test_right(axes: Axes, axis: list[int], inv_freq: list[float]) -> None:
    rope = Rope(16, 100.0, "half", axes=axes)
    report = conformance.check(rotator(axis, inv_freq), rope=rope)
    assert report.codes == [], str(report)
    assert {grade.name: grade.right for grade in report.grades}["several axes"] is True
    alone = conformance.check(rotator(axis, inv_freq), head_dim=16)
    assert alone.codes == []
    assert alone.found["axes"] == report.found["axes"]
    assert alone.found["frequencies"].startswith("base 100")


# Name → the expected axes, the axis and frequency of each pair of the target, the code, and the smallest case.
WRONG: dict[str, tuple[Axes, list[int], list[float], str, str]] = {
    "height for width": (SECTIONS, [T, T, W, W, W, H, H, H], ONE, "axes-exchanged", "pair 2, position 1 on axis 2"),
    "height for width, interleaved": (
        MIXED,
        [T, W, H, T, W, H, T, W],
        ONE,
        "axes-exchanged",
        "pair 1, position 1 on axis 2",
    ),
    "columns first": (GRID, [1] * 4 + [0] * 4, OWN, "axes-exchanged", "pair 0, position 1 on axis 1"),
    "time last": (SECTIONS, [H, H, H, W, W, W, T, T], ONE, "sections-permuted", "pair 0, position 1 on axis 1"),
    "sizes of h, w, t for t, h, w": (
        SECTIONS,
        [T, T, T, H, H, H, W, W],
        ONE,
        "sections-permuted",
        "pair 2, position 1 on axis 0",
    ),
    "h, w, t with the sizes kept": (
        SECTIONS,
        [H, H, W, W, W, T, T, T],
        ONE,
        "sections-permuted",
        "pair 0, position 1 on axis 1",
    ),
    "interleaved": (SECTIONS, ALTERNATING, ONE, "section-layout", "pair 1, position 1 on axis 1"),
    "contiguous": (MIXED, [T, T, T, H, H, H, W, W], ONE, "section-layout", "pair 1, position 1 on axis 0"),
    "alternating": (
        GRID,
        [0, 1] * 4,
        [w for w in progression(range(4), 4) for _ in "hw"],
        "section-layout",
        "pair 1, position 1 on axis 1",
    ),
    "only the first axis": (SECTIONS, [T] * 8, ONE, "axis-ignored", "pair 2, position 1 on axis 1"),
    "height for width too": (SECTIONS, [T, T, *[H] * 6], ONE, "axis-ignored", "pair 5, position 1 on axis 2"),
    "restarts for each axis": (
        SECTIONS,
        CONTIGUOUS,
        [*progression(range(2), 2), *progression(range(3), 3) * 2],
        "axis-frequencies",
        "pair 1, position 1 on axis 0",
    ),
    "does not restart": (GRID, [0] * 4 + [1] * 4, ONE, "axis-frequencies", "pair 1, position 1 on axis 0"),
    "restarts, divided by the channels of the head": (
        GRID,
        [0] * 4 + [1] * 4,
        progression(range(4), 8) * 2,
        "axis-frequencies",
        "pair 1, position 1 on axis 0",
    ),
    "frequencies of the larger axis": (
        Axes.axial((4, 12)),
        [0] * 2 + [1] * 6,
        [*progression(range(2), 6), *progression(range(6), 6)],
        "axis-frequencies",
        "pair 1, position 1 on axis 0",
    ),
    "another base on one axis": (
        GRID,
        [0] * 4 + [1] * 4,
        [*progression(range(4), 4), *progression(range(4), 4, base=10.0)],
        "wrong-frequencies",
        "",
    ),
    "another base": (
        GRID,
        [0] * 4 + [1] * 4,
        progression(range(4), 4, base=25.0) * 2,
        "wrong-base",
        "",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name: str) -> None:
    axes, axis, inv_freq, code, case = WRONG[name]
    report = conformance.check(rotator(axis, inv_freq), rope=Rope(16, 100.0, "half", axes=axes))
    assert report.codes == [code], str(report)
    assert (report.findings[0].case or "").startswith(case), report.findings[0].case


def test_only_the_codes_of_the_axes_are_reported_for_half_turned_pairs() -> None:
    """The two channels of a pair use different axes, which is a rotation only if all positions are equal."""

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        freq = torch.tensor(ONE)
        of_channel = [T] * 5 + [H] * 5 + [W] * 6  # not of pairs
        angles = torch.stack([positions[a].float() * freq[i % 8] for i, a in enumerate(of_channel)], dim=-1)
        angles = angles[:, :, None]
        a, b = x.float().chunk(2, dim=-1)
        return (x * angles.cos() + torch.cat((-b, a), dim=-1) * angles.sin()).type_as(x)

    report = conformance.check(rotate, rope=Rope(16, 100.0, "half", axes=SECTIONS))
    assert report.codes == ["mixed-pairings"]
    assert report.findings[0].case == "pair 0, position 1 on axis 0 (time) and 0 on the others"


def moved(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    right = rotator(CONTIGUOUS)
    return lambda q, k, positions: right(q, k, change(positions))


def first_axis_of_one_token(positions: Tensor) -> Tensor:
    return positions[:1].expand_as(positions) if positions.shape[-1] == 1 else positions


def first_axis_of_text(positions: Tensor) -> Tensor:
    """Text after an image is counted on from the first axis."""
    positions = positions.clone()
    for row in range(positions.shape[1]):
        image = (positions[:, row] != positions[:1, row]).any(0).nonzero().flatten()
        if len(image) and (first := int(image[-1]) + 1) < positions.shape[-1]:
            positions[:, row, first:] += positions[0, row, first - 1] + 1 - positions[0, row, first]
    return positions


@pytest.mark.parametrize("change", [first_axis_of_one_token, first_axis_of_text])
def test_calls_with_other_positions_on_each_axis(change: Callable[[Tensor], Tensor]) -> None:
    rotate = moved(change)
    rotate.__annotations__["positions"] = "3bs"
    report = conformance.check(rotate, head_dim=16)
    assert report.codes == ["axis-ignored"], str(report)


def test_keys_on_other_axes() -> None:
    right, other = rotator(CONTIGUOUS), rotator(ALTERNATING)

    def rotate(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        q, _ = right(q, k, positions)
        _, k = other(q, k, positions)
        return q, k

    assert conformance.check(rotate, rope=Rope(16, 100.0, "half", axes=SECTIONS)).codes == ["key-unlike-query"]


@pytest.mark.parametrize("form", ["3bs", "bs3", "3s", "s3"])
def test_forms_of_positions(form: str) -> None:
    letters = form.replace("3", "a")

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        if positions.ndim != len(form) or positions.shape[letters.index("a")] != 3:
            raise ValueError
        by_axis = positions.permute([letters.index(letter) for letter in ("abs" if "b" in form else "as")])
        by_axis = by_axis if "b" in form else by_axis[:, None].expand(-1, len(x), -1)
        rotated: Tensor = rotator(CONTIGUOUS)(x, x, by_axis)[0]
        return rotated

    rope = Rope(16, 100.0, "half", axes=SECTIONS)
    assert conformance.check(rotate, rope=rope).codes == []
    assert conformance.check(rotate, head_dim=16).found["axes"] == "pairs 0 to 1 time, 2 to 4 height, 5 to 7 width"
    rotate.__annotations__["positions"] = form
    assert conformance.check(rotate, rope=rope).codes == []


class TablesOfEachAxis(torch.nn.Module):
    """Transformers' Qwen2-VL until 5.0: the tables of all axes are combined by the function."""

    def __init__(self, head_dim: int, base: float = 100.0) -> None:
        super().__init__()
        self.head_dim, self.base = head_dim, base

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        inv_freq = self.base ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = (position_ids[..., None].float() * inv_freq).repeat(1, 1, 1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def apply_multimodal(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: list[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    of_channel = [axis for _ in "ab" for axis, size in enumerate(mrope_section) for _ in range(size)]
    cos, sin = (
        torch.stack([table[a, ..., i] for i, a in enumerate(of_channel)], dim=-1).unsqueeze(unsqueeze_dim)
        for table in (cos, sin)
    )
    x, y = (torch.cat((-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]), dim=-1) for t in (q, k))
    return q * cos + x * sin, k * cos + y * sin


def apply_exchanged(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: list[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    return apply_multimodal(q, k, cos[[0, 2, 1]], sin[[0, 2, 1]], mrope_section, unsqueeze_dim)


def test_tables_of_each_axis() -> None:
    rope = Rope(16, 100.0, "half", axes=SECTIONS)
    assert conformance.check((TablesOfEachAxis, apply_multimodal), rope=rope).codes == []
    assert conformance.check((TablesOfEachAxis, apply_exchanged), rope=rope).codes == ["axes-exchanged"]
    assert conformance.check(apply_multimodal).codes == []
    assert conformance.check(apply_exchanged).codes == ["axes-exchanged"]


def of_patches(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate as CroCo, DUSt3R and VGGT do: the halves of each axis, with positions `[batch, seq, 2]`."""
    each = zip(x.chunk(2, dim=-1), positions.float().unbind(-1), strict=True)
    return torch.cat([half(part, (places[..., None] * torch.tensor(OWN[:4]))[:, :, None]) for part, places in each], -1)


def test_half_pairing_within_each_axis() -> None:
    report = conformance.check(of_patches, base=100.0, head_dim=16)
    assert (report.codes, report.found["pairing"]) == ([], "half, within each axis")
    assert report.found["frequencies"] == "base 100, a progression for each axis"
    assert conformance.check(of_patches, base=1e4, head_dim=16).codes == ["wrong-base"]
    rope = Rope(16, 100.0, "half", axes=GRID)  # the halves of the head
    assert "wrong-pairing" in conformance.check(of_patches, rope=rope).codes


def test_one_position_for_each_token_is_judged_as_text() -> None:
    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        if positions.ndim != 2:
            raise ValueError
        return half(x, (positions[..., None].float() * torch.tensor(ONE))[:, :, None])

    report = conformance.check(rotate, rope=Rope(16, 100.0, "half", axes=SECTIONS))
    assert (report.codes, report.found["axes"]) == (
        [],
        "not judged: one position is passed for each token, as for text",
    )


GLM = {
    "model_type": "glm4v_text",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 6, 6],
    },
}
TRANSFORMERS = {
    "qwen2_vl": "pairs 0 to 15 time, 16 to 39 height, 40 to 63 width",
    "qwen2_5_vl": "pairs 0 to 15 time, 16 to 39 height, 40 to 63 width",
    "qwen3_vl": "time 24 pairs (0, 3, 6, …), height 20 pairs (1, 4, 7, …), width 20 pairs (2, 5, 8, …)",
    "ernie4_5_vl_moe": "height 22 pairs (0, 2, 4, …), width 22 pairs (1, 3, 5, …), time 20 pairs (44, 45, 46, …)",
    "glm4v_text": "pairs 0 to 3 time, 4 to 9 height, 10 to 15 width",
    "qwen2_vl_vision": "pairs 0 to 19 height, 20 to 39 width",
    "pixtral": "pairs 0 to 15 height, 16 to 31 width",
    "kimi_k25_vision": "width 18 pairs (0, 2, 4, …), height 18 pairs (1, 3, 5, …)",
    "minimax_m3_vl_vision": "pairs 0 to 12 time, 13 to 25 height, 26 to 38 width",
}


@pytest.mark.parametrize("model", TRANSFORMERS)
def test_transformers(model: str) -> None:
    code, config = code_of(model)
    report = conformance.check(code, config=GLM if model == "glm4v_text" else config)
    assert report.codes == [], str(report)
    assert report.found["axes"] == TRANSFORMERS[model]
    assert "note on the config" not in report.found


def test_transformers_with_another_config() -> None:
    """The sections of the config are those of the weights."""
    section = [6, 4, 6]
    config = GLM | {"rope_parameters": GLM["rope_parameters"] | {"mrope_section": section}}  # type: ignore[operator]
    modeling = "transformers.models.glm4v.modeling_glm4v"
    target = f"{modeling}:Glm4vTextRotaryEmbedding,apply_rotary_pos_emb"
    assert conformance.check(target, config=config).found["axes"] == "pairs 0 to 5 time, 6 to 9 height, 10 to 15 width"


def test_tower_in_the_config_of_a_model(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("qwen2_vl")
    modeling = "transformers.models.qwen2_vl.modeling_qwen2_vl"
    target = f"{modeling}:Qwen2VLVisionRotaryEmbedding,apply_rotary_pos_emb_vision"
    file = tmp_path / "config.json"
    file.write_text(config.to_json_string(use_diff=False), "utf-8")
    for given in (config, config.to_dict(), file):
        assert conformance.check(target, config=given).found["axes"] == "pairs 0 to 19 height, 20 to 39 width"


@pytest.mark.parametrize(("row", "codes"), [("a", []), ("0", ["axis-ignored"])])
def test_a_cache_of_cos_and_sin_that_positions_on_several_axes_index(row: str, codes: list[str]) -> None:
    """As in SGLang, whose fused kernel read the first row of `[3, tokens]` (SGLang 34446)."""

    def rotate(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
        parts = [slice(0, 8), slice(8, 20), slice(20, 32)]
        tables = [cos_sin_cache[positions[eval(row, {"a": a})]].chunk(2, dim=-1) for a in range(3)]
        cos, sin = (torch.cat([t[i][..., p] for t, p in zip(tables, parts, strict=True)], -1)[:, None] for i in (0, 1))
        halves = (x.chunk(2, dim=-1) for x in (q, k))
        q, k = (torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1) for a, b in halves)
        return q, k

    report = conformance.check(rotate, rope=Rope(64, 100.0, "half", axes=Axes.sections((8, 12, 12))), layout="thd")
    assert report.codes == codes, str(report)
