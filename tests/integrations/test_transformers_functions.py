"""Test the functions of modeling files: what a probe finds out about them, and the dispatchers that replace them."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracle
import tiny_models
from model_checks import output, tokens
from ropewalk import Rope, Rotation, formats
from ropewalk.integrations.transformers import accelerate, restore
from ropewalk.integrations.transformers.functions import Form, attach, dispatcher, original, probe
from rotating_functions import rotating_function

pytest.importorskip("transformers", "5.23")


PLACE = ("file", "function")


@pytest.fixture
def llama() -> Any:
    return tiny_models.build("llama")


def carrying(rotation: Rotation, form: Form, place: tuple[str, str] = PLACE) -> Any:
    """Return tables that carry a Rotation."""
    cos, sin = formats.to_full_width(rotation, repeated="halves")
    return attach((cos, sin) if cos.ndim == 3 else (cos[None], sin[None]), rotation, {place: form})


class TestProbe:
    @pytest.mark.parametrize("whole", [None, "first", "last"])
    @pytest.mark.parametrize(("pairing", "order"), [("half", "same"), ("interleaved", "same"), ("interleaved", "half")])
    @pytest.mark.parametrize("width", ["halves", "half"])
    def test_every_way(self, pairing: str, order: str, whole: str | None, width: Any) -> None:
        form = probe(rotating_function(pairing, order, whole, wide=width == "halves"), width)
        assert isinstance(form, Form)
        assert (form.pairing, form.order, form.whole) == (pairing, order, whole)
        assert dict(form.layouts) == {1: "bhsd", 2: "bshd"}
        assert form.unsqueeze_dim == 1

    @pytest.mark.parametrize(
        ("function", "width"),
        [
            (rotating_function("half", sign=-1.0), "halves"),
            (lambda q, k, cos, sin: (q, k), "halves"),
            (lambda q, k, cos, sin: (q * cos[:, None], k * sin[:, None]), "halves"),
            (lambda q, k, cos, sin: (q, k, cos), "halves"),
            (lambda q, k: (q, k), "halves"),
            (rotating_function("half"), "complex"),
            (lambda q, k, cos, sin: rotating_function("half")(q, -k, cos, sin), "halves"),
        ],
    )
    def test_the_other_direction_and_other_functions(self, function: Any, width: Any) -> None:
        assert probe(function, width) == "rotates in a way that no Rotation describes, or may do more"

    def test_tables_of_another_width(self) -> None:
        found = probe(rotating_function("half", wide=False), "halves")
        assert isinstance(found, str)
        assert found.startswith("raised ValueError: the tables do not fit")

    def test_one_tensor_and_a_fixed_layout(self) -> None:
        def turn(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
            return rotating_function("half")(x, x, cos, sin, unsqueeze_dim=2)[0]

        form = probe(turn, "halves")
        assert isinstance(form, Form)
        assert (form.at, form.names, form.layouts) == (1, ("x", "sin", "cos"), ((None, "bshd"),))

    @pytest.mark.parametrize(("axis", "layout"), [(1, "bhsd"), (2, "bshd")])
    def test_one_name_and_two_layouts(self, axis: int, layout: str) -> None:
        """Llama 4 and DeepSeek-V2 have functions of the same name, for different layouts."""

        def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
            freqs = freqs_cis.unsqueeze(axis)
            rotated = (torch.view_as_complex(x.unflatten(-1, (-1, 2))) * freqs for x in (xq, xk))
            q, k = (torch.view_as_real(x).flatten(-2) for x in rotated)
            return q, k

        form = probe(apply_rotary_emb, "complex")
        assert isinstance(form, Form)
        assert (form.layouts, form.pairing) == (((None, layout),), "interleaved")

    def test_no_random_numbers_are_drawn(self) -> None:
        state = torch.random.get_rng_state()
        probe(rotating_function("half"), "halves")
        assert torch.equal(torch.random.get_rng_state(), state)


class TestDispatcher:
    """Compare with oracle.py, for combinations that no tested model has."""

    @pytest.mark.parametrize(("axis", "layout"), [(1, "bhsd"), (2, "bshd")])
    @pytest.mark.parametrize("whole", ["first", "last"])
    def test_dispatcher_rotates_as_the_function_does(self, axis: int, layout: str, whole: str) -> None:
        function = rotating_function("interleaved", "half", whole)
        form = probe(function, "halves")
        assert isinstance(form, Form)
        rotate = dispatcher(function, PLACE)
        positions = torch.tensor([[0, 5, 9, 70_000, 3]])
        rotation = Rope(8, 10_000.0, "interleaved").at(positions[0])
        cos, sin = oracle.cos_sin(positions[0].tolist(), [float(w) for w in oracle.inv_freq(10_000.0, 8)])
        tables = [torch.from_numpy(t).float().repeat(1, 2)[None] for t in (cos, sin)]
        shape = [2, 3, 5, 12] if layout == "bhsd" else [2, 5, 3, 12]
        q, k = torch.randn(shape), torch.randn(shape)[..., :8]  # keys are the slice alone
        cos, sin = carrying(rotation, form)
        got = rotate(q, k, cos=cos, sin=sin, unsqueeze_dim=axis)
        wanted = function(q, k, *tables, unsqueeze_dim=axis)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, wanted, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(rotate(q, k, *tables, axis), wanted, strict=True))

    def test_a_function_that_is_a_module(self, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """With the package `kernels`, the function of the file is an nn.Module."""
        import transformers.models.llama.modeling_llama as file

        plain, ids = original(file.apply_rotary_pos_emb), tokens()

        class Function(nn.Module):
            def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
                return plain(q, k, cos, sin, unsqueeze_dim)

        monkeypatch.setattr(file, "apply_rotary_pos_emb", Function())
        other = copy.deepcopy(llama)
        expected = output(other, ids)
        accelerate(llama, angles="theirs")
        assert torch.equal(output(llama, ids), expected)
        assert torch.equal(output(other, ids), expected)

    def test_two_forms_of_one_function(self) -> None:
        """Two models of a file may have tables of different formats, because the tables carry the form."""
        function = rotating_function("half", whole="first")
        rotation, q = Rope(8, 10_000.0, "half").at(torch.arange(5)), torch.randn(2, 3, 5, 12)
        form = probe(function, "halves")
        assert isinstance(form, Form)
        rotate = dispatcher(function, PLACE)
        for whole, at in (("first", slice(0, 8)), ("last", slice(4, 12))):
            tables = carrying(rotation, dataclasses.replace(form, whole=whole))
            wanted = function(q[..., at], q[..., at], *map(torch.Tensor.clone, tables))[0]
            assert torch.equal(rotate(q, q, *tables)[0][..., at], wanted)

    @pytest.mark.parametrize("change", ["cos", "sin", "exchanged", "tokens", "batch", "heads", "axis", "place", "key"])
    def test_the_original_where_tables_do_not_fit(self, change: str) -> None:
        """Tables that the model's code has changed, and shapes that only the original can broadcast."""
        calls = []

        def function(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
            calls.append((cos, sin))
            return q, k

        form = probe(rotating_function("half"), "halves")
        assert isinstance(form, Form)
        rotation = Rope(8, 10_000.0, "half").at(torch.arange(10).reshape(2, 5))
        cos, sin = carrying(rotation, form)
        q, axis = torch.randn(2, 3, 5, 8), 1
        if change == "cos":
            cos = cos[..., :8]
        elif change == "sin":
            sin = -sin
        elif change == "exchanged":
            cos, sin = sin, cos
        elif change == "axis":
            axis = 0
        elif change == "place":
            cos, sin = carrying(rotation, form, ("elsewhere", "function"))
        elif change != "key":
            q = torch.randn({"tokens": (2, 3, 4, 8), "batch": (1, 3, 5, 8), "heads": (2, 3, 5, 12)}[change])
        dispatcher(function, PLACE)(q, None if change == "key" else q, cos, sin, axis)
        assert calls == [(cos, sin)]

    def test_parts_that_are_not_of_the_text_model(self) -> None:
        from transformers import LlavaConfig, LlavaForConditionalGeneration

        vision = {"model_type": "pixtral", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
        vision |= {"intermediate_size": 48, "image_size": 32, "patch_size": 16}
        text = tiny_models.config("mistral").to_dict()
        config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=99)
        model = LlavaForConditionalGeneration(config).eval()
        model.model.vision_tower.patch_positional_embedding.config = tiny_models.config("llama")  # no known tower's
        ids = tokens() % 90
        expected = model(input_ids=ids)[0]
        said = accelerate(model, angles="theirs")
        assert said.modules == ("model.language_model.rotary_emb",)
        assert (
            "keeps its own rotation: model.vision_tower.patch_positional_embedding: it is not part of the text model"
            in str(said)
        )
        assert torch.equal(model(input_ids=ids)[0], expected)
        restore(model)
        assert accelerate(model).ropes["model.language_model.rotary_emb"].base == 10_000.0
