"""Test models of transformers whose tokens have several positions (M-RoPE): text, images and video."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
import tiny_models
from model_checks import NEAR, attached, relative, tokens, worst_gradient
from ropewalk import RopeError
from ropewalk.integrations.transformers import accelerate, restore

pytest.importorskip("transformers", "5.23")
IN_BLOCKS, IN_TURN = (0, 0, 1, 1, 1, 2, 2, 2), (0, 1, 2, 0, 1, 2, 0, 1)
SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
SMALL = {**SECTIONS, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}
# What each is given, and the axis of each of its pairs.
MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "qwen2_vl_text": ({"rope_parameters": SECTIONS}, IN_BLOCKS),
    "qwen2_5_vl_text": ({"rope_parameters": SECTIONS}, IN_BLOCKS),
    "glm4v_text": ({"rope_parameters": SECTIONS}, IN_BLOCKS),
    "glm4v_moe_text": (
        {"rope_parameters": {**SECTIONS, "mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}},
        (0, 1, 1, 2),
    ),
    "glm_image_text": ({"rope_parameters": SECTIONS}, IN_BLOCKS),
    "glm_ocr_text": ({"rope_parameters": SECTIONS}, IN_BLOCKS),
    "qwen3_vl_text": ({"rope_parameters": SECTIONS}, IN_TURN),
    "qwen3_vl_moe_text": ({"rope_parameters": SECTIONS}, IN_TURN),
    "cosmos3_edge_text": ({"rope_parameters": SECTIONS}, IN_TURN),
    "hy_v4_vl_text": ({"rope_parameters": {**SECTIONS, "mrope_section": [3, 3, 2]}}, IN_TURN),
    "qwen3_5_text": ({"rope_parameters": SMALL, "num_hidden_layers": 4}, (0, 1)),
    "qwen3_5_moe_text": ({"rope_parameters": SMALL, "num_hidden_layers": 4}, (0, 1)),
    "ernie4_5_vl_moe_text": (
        {"rope_parameters": {**SECTIONS, "mrope_section": [3, 3, 2]}, "moe_intermediate_size": [32, 32]},
        (1, 2, 1, 2, 1, 2, 0, 0),
    ),
    "paddleocr_vl_text": ({"rope_parameters": SECTIONS}, IN_BLOCKS),
    "qwen2_5_omni_text": ({"rope_parameters": SECTIONS}, IN_BLOCKS),
    "qwen3_omni_moe_text": ({"rope_parameters": SECTIONS}, IN_TURN),
}
# Parts of larger models, which no AutoModel builds.
CLASSES = {
    "ernie4_5_vl_moe_text": "Ernie4_5_VLMoeTextModel",
    "paddleocr_vl_text": "PaddleOCRTextModel",
    "qwen2_5_omni_text": "Qwen2_5OmniThinkerTextModel",
    "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel",
}


def built(name: str) -> Any:
    """Build a small model with the same random weights each time."""
    if name not in CLASSES:
        return tiny_models.build(name, **MODELS[name][0])
    folder = name.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return getattr(module, CLASSES[name])(tiny_models.config(name, **MODELS[name][0])).eval()


def places(seq: int) -> Tensor:
    """Return positions [axes, batch, seq] with a different order on each axis."""
    return torch.stack([(torch.arange(2 * seq).reshape(2, seq) * step) % 37 for step in (1, 5, 11)])


@pytest.mark.parametrize("name", MODELS)
def test_text_and_images(name: str) -> None:
    """The results are near transformers. They are bitwise equal with the model's own angles, and after restore."""
    model, ids = built(name), tokens(2, 16)
    given: list[dict[str, Tensor]] = [{}, {"position_ids": places(16)}]
    with torch.no_grad():
        wanted = [model(input_ids=ids, **more)[0] for more in given]
        assert relative(wanted[1], wanted[0]) > 1e-3  # positions count
        said = accelerate(model)
        for more, theirs in zip(given, wanted, strict=True):
            assert relative(model(input_ids=ids, **more)[0], theirs) <= NEAR
        restore(model)
        accelerate(model, angles="theirs")
        for more, theirs in zip(given, wanted, strict=True):
            assert torch.equal(model(input_ids=ids, **more)[0], theirs)
        restore(model)
        assert torch.equal(model(input_ids=ids, **given[1])[0], wanted[1])
    assert all(rope.axes is not None for rope in said.ropes.values())


@pytest.mark.parametrize("name", MODELS)
def test_the_angle_of_each_pair(name: str) -> None:
    """Compare with mpmath, at positions where float32 products drift."""
    model, axis = built(name), MODELS[name][1]
    [where] = accelerate(model).ropes
    positions = torch.tensor([[99_999, 3], [70_001, 65_537], [2, 131_071]])[:, None]  # [axes, batch, seq]
    rotation = attached(model.get_submodule(where)(torch.zeros(1, 2, 64), positions))
    assert rotation.cos.shape == (2, len(axis))
    inv_freq = [float(w) for w in oracle.inv_freq(10_000.0, 2 * len(axis))]
    for pair, a in enumerate(axis):
        cos, sin = oracle.cos_sin(positions[a, 0].tolist(), inv_freq[pair : pair + 1])
        torch.testing.assert_close(rotation.cos[:, pair].double(), torch.from_numpy(cos[:, 0]), rtol=0, atol=3.1e-8)
        torch.testing.assert_close(rotation.sin[:, pair].double(), torch.from_numpy(sin[:, 0]), rtol=0, atol=3.1e-8)


def test_one_row_of_positions_for_all_axes() -> None:
    """`generate` passes [1, batch, seq] if it continues from keys that it computed earlier."""
    model, ids = built("qwen2_vl_text"), tokens(2, 16)
    rotary, positions = model.rotary_emb, torch.arange(5, 37).reshape(2, 16)
    accelerate(model)
    with torch.no_grad():
        wanted = model(input_ids=ids, position_ids=positions.expand(3, -1, -1))[0]
        x = torch.zeros(2, 16, 64)
        assert all(map(torch.equal, rotary(x, positions[None]), rotary(x, positions)))
        assert torch.equal(model(input_ids=ids, position_ids=positions[None])[0], wanted)


def with_forward(name: str, forward: Any) -> Any:
    """Build a model whose rotary module has another `forward`, which gets what the model's own one returns."""
    model = built(name)
    theirs = type(model.rotary_emb)

    class Changed(theirs):  # type: ignore[misc,valid-type]
        def forward(self, x: Tensor, position_ids: Tensor) -> Any:
            return forward(super().forward, x, position_ids)

    model.rotary_emb.__class__ = Changed
    return model


def only_rows(forward: Any, x: Tensor, position_ids: Tensor) -> Any:
    """Take positions [3, batch, seq] only, as models of transformers before 5.18."""
    inside = position_ids[:, :, None, :]  # raises an IndexError for [batch, seq]
    return forward(x, inside.expand(3, -1, -1, -1)[:, :, 0])


def test_a_module_that_takes_a_row_for_each_axis_only() -> None:
    model, ids = with_forward("glm4v_text", only_rows), tokens(2, 16)
    with torch.no_grad():
        wanted = model(input_ids=ids, position_ids=places(16))[0]
        for angles, bound in (("exact", NEAR), ("theirs", 0.0)):
            accelerate(model, angles=angles)
            assert relative(model(input_ids=ids, position_ids=places(16))[0], wanted) <= bound
            restore(model)


@pytest.mark.parametrize("angles", ["exact", "theirs"])
@pytest.mark.parametrize(
    ("forward", "message"),
    [
        # Qwen2-VL, Qwen2.5-VL and -Omni and PaddleOCR-VL before 5.18, whose functions combine the rows.
        (
            lambda f, x, at: [table.expand(3, -1, -1, -1) for table in only_rows(f, x, at)],
            r"must return tables \[batch, seq, channels\], got tables with a row for each axis, \[3, 1, 7, 16\], as",
        ),
        (lambda f, x, at: {}["key"], "rotary_emb cannot be called with positions: KeyError: 'key'. This model comp"),
        (lambda f, x, at: f(x, at[:, :, :, None]), "rotary_emb cannot be called with positions: IndexError: "),
        (lambda f, x, at: f(x, at)[0], "must return cos and sin of position · inv_freq, got other numbers"),
        (lambda f, x, at: (*f(x, at), 1.0), "must return cos and sin of position · inv_freq, got other numbers"),
        (
            lambda f, x, at: dict(zip("cs", f(x, at), strict=True)),
            "must return cos and sin of position · inv_freq, got",
        ),
        (lambda f, x, at: None, "must return cos and sin of position · inv_freq, got other numbers"),
    ],
)
def test_modules_of_other_versions(forward: Any, message: str, angles: str) -> None:
    with pytest.raises(RopeError, match=message):
        accelerate(with_forward("qwen2_vl_text", forward), angles=angles)


def test_gradients() -> None:
    model, ids = built("qwen3_vl_text"), tokens(1, 16)
    found = []
    for _ in range(2):
        model.zero_grad()
        made = model(input_ids=ids, position_ids=places(16)[:, :1])[0]
        (made * torch.sin(torch.arange(made.numel(), dtype=torch.float32)).reshape(made.shape)).sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        if len(found) == 1:
            accelerate(model)
    assert worst_gradient(found[1], found[0]) <= 2 * NEAR


def test_compiled_in_one_graph() -> None:
    model, ids = built("qwen2_vl_text"), tokens(2, 16)
    accelerate(model)
    with torch.no_grad():
        wanted = model(input_ids=ids, position_ids=places(16))[0]
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert relative(compiled(input_ids=ids, position_ids=places(16))[0], wanted) <= NEAR


@pytest.mark.parametrize("name", ["qwen2_vl_text", "qwen3_vl_text", "ernie4_5_vl_moe_text"])
def test_a_model_that_was_cast(name: str) -> None:
    said = accelerate(built(name).to(torch.bfloat16))
    assert all(rope.axes is not None for rope in said.ropes.values())


class TestRefused:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_sections_of_another_order(self, dtype: torch.dtype) -> None:
        """This is also detected in a model that was cast, whose frequencies are rounded."""
        model = built("qwen2_vl_text").to(dtype)
        model.rotary_emb.mrope_section = [3, 3, 2]
        with pytest.raises(RopeError, match=r"rotary_emb must rotate by the axes of its config .*sections\(\(2, 3"):
            accelerate(model)
        accelerate(model, angles="theirs")

    def test_channels_of_a_pair_with_other_axes(self) -> None:
        """Hunyuan VL in transformers 5.23 has such pairs, which is not a rotation."""
        sections = {**SECTIONS, "mrope_section": [2, 2, 2, 2]}
        model = tiny_models.build("hunyuan_vl_text", rope_parameters=sections)
        with pytest.raises(RopeError, match="must rotate by the axes of its config"):
            accelerate(model)

    def test_another_number_of_axes(self) -> None:
        model = built("qwen3_vl_text")
        [where] = accelerate(model).ropes
        said = r"position_ids must be \[batch, seq\] or \[3, batch, seq\], got shape \(2, 1, 4\)"
        with pytest.raises(RopeError, match=said):
            model.get_submodule(where)(torch.zeros(1, 4, 64), torch.zeros(2, 1, 4, dtype=torch.long))
