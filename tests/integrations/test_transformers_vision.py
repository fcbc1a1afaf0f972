"""Test vision towers of transformers with images of several sizes, packed images, and video."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
import tiny_models
import tiny_towers
from model_checks import NEAR, attached, refused, relative
from ropewalk import Rope, formats
from ropewalk.configs.tables.towers import TOWERS
from ropewalk.integrations.transformers import accelerate, restore
from ropewalk.integrations.transformers.functions import Form, attach, dispatcher, original, probe
from ropewalk.integrations.transformers.modules import BatchAngles
from ropewalk.positions import grid, with_unrotated
from rotating_functions import rotating_function
from tower_checks import exact_tables, rotary

pytest.importorskip("transformers", "5.23")
# One of each way: packed, in windows, three axes, every other pair, [batch, tokens] with a layout of its own, centres
# and prefix tokens, floats and a module in each layer, a table, and halves of a head.
WAYS = (
    "qwen2_vl_vision",
    "qwen2_5_vl_vision",
    "minimax_m3_vl_vision",
    "kimi_k25_vision",
    "pixtral",
    "dinov3_vit",
    "sam3_vit_model",
    "llama4_vision_model",
    "gemma4_vision",
)
GIVEN_POSITIONS = sorted(
    set(tiny_towers.TOWERS) - {"dinov3_vit", "eomt_dinov3", "sapiens2", "llama4_vision_model"} | {"gemma4_vision"}
)


def given_positions(module: Any, positions: Tensor) -> list[Tensor]:
    """Return cos and sin of all parts of a head at positions `[axes, tokens]`, with one column for each pair."""
    ids, x = positions.T, torch.zeros(positions.shape[1], 64)
    parts = 2 if isinstance(module, BatchAngles) else 1
    tables = module(x[None], ids[None]) if parts == 2 else module(x, ids)
    width = module.ropewalk.width
    return [torch.cat([formats.narrow(t, width).squeeze(0) for t in table.chunk(parts, -1)], -1) for table in tables]


@pytest.mark.parametrize("name", GIVEN_POSITIONS)
def test_the_angle_of_each_pair(name: str) -> None:
    """Compare with mpmath, at positions where float32 products drift."""
    model = tiny_towers.build(name)
    positions = torch.tensor([[99_999, 3, 8], [70_001, 65_537, 0], [2, 131_071, 5]])
    positions = positions if name == "minimax_m3_vl_vision" else positions[:2]
    exact = exact_tables(name, positions)
    said = accelerate(model)
    module = model.get_submodule(said.modules[0])
    for ours, wanted in zip(given_positions(module, positions), exact, strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=3.1e-8)
    if not said.functions:  # the tower itself rotates by exact tables
        return
    restore(model)
    accelerate(model, angles="theirs")
    theirs = given_positions(model.get_submodule(said.modules[0]), positions)
    assert (theirs[0].double() - exact[0]).abs().max() > 1e-5


@pytest.mark.parametrize("name", sorted({*GIVEN_POSITIONS} - {"gemma4_vision", "sam3_vit_model"}))
def test_the_meaning_of_the_positions_in_words(name: str) -> None:
    """Compare it with the positions that the tower gives its rotary module for an image of 4 × 6 patches."""
    model, words, given = tiny_towers.build(name), TOWERS[name].positions, []
    [module] = rotary(model)
    module.register_forward_pre_hook(
        lambda _, inputs, named: given.extend([*inputs, *named.values()]), with_kwargs=True
    )
    model(**tiny_towers.calls(name)[0])
    order = "thw" if "frame, row and column" in words else "wh" if "column and row" in words else "hw"
    merge = 2 if "order of the blocks that are merged" in words else 1
    made = grid(4, 6, 1 if order == "thw" else None, order=order, merge=merge, start=int("from 1" in words))
    assert torch.equal(given[-1].T, with_unrotated(made, before=int("which comes first" in words)))


@pytest.mark.parametrize("name", ["dinov3_vit", "llama4_vision_model"])
def test_the_angles_of_towers_that_are_given_none(name: str) -> None:
    """Compare in float64, because float32 tables of transformers are only near."""
    model, [given, *_] = tiny_towers.build(name), tiny_towers.calls(name)
    [rotary_module] = rotary(model)
    pixels = given["pixel_values"]
    theirs = rotary_module(pixels)
    said = accelerate(model)
    rotation = attached(model.get_submodule(said.modules[0])(pixels.double()))
    assert rotation.cos.dtype is torch.float64
    if name == "llama4_vision_model":
        places = torch.cartesian_prod(torch.arange(8), torch.arange(8)).T.flip(0) + 1
        cos, sin = exact_tables(name, torch.nn.functional.pad(places, (0, 1)))
        theirs = theirs[:, 0].real, theirs[:, 0].imag
    else:
        rows, columns = torch.meshgrid(torch.arange(4.0).double(), torch.arange(6.0).double(), indexing="ij")
        places = [2 * torch.pi * (2 * (i.flatten() + 0.5) / n - 1) for i, n in ((rows, 4), (columns, 6))]
        inv_freq = torch.tensor([float(w) for w in oracle.inv_freq(100.0, 8)], dtype=torch.float64)
        angles = torch.cat([place[:, None] * inv_freq for place in places], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        theirs = tuple(table[:, :8] for table in theirs)
    torch.testing.assert_close(rotation.cos, cos, rtol=0, atol=1e-14)
    torch.testing.assert_close(rotation.sin, sin, rtol=0, atol=1e-14)
    torch.testing.assert_close(theirs[0].double(), cos, rtol=0, atol=4e-6)


@torch.no_grad()
def test_training_of_dinov3_draws_the_same_numbers() -> None:
    """These numbers shift, jitter and rescale the coordinates."""
    changes = {"pos_embed_shift": 0.3, "pos_embed_jitter": 1.2, "pos_embed_rescale": 2.0}
    model, [given, *_] = tiny_towers.build("dinov3_vit", **changes), tiny_towers.calls("dinov3_vit")
    still = tiny_towers.output(model, given)
    model.train()
    found = []
    for _ in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(3)
            found.append(tiny_towers.output(model, given))
        if len(found) == 1:
            accelerate(model)
    assert relative(found[0], still) > 0.1
    assert relative(found[1], found[0]) <= NEAR
    model.eval()
    assert relative(tiny_towers.output(model, given), still) <= NEAR


@pytest.mark.parametrize("name", ["dinov3_vit", "llama4_vision_model"])
def test_compiled(name: str) -> None:
    model, [*_, given] = tiny_towers.build(name), tiny_towers.calls(name)
    accelerate(model)
    with torch.no_grad():
        wanted = tiny_towers.output(model, given)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert relative(tiny_towers.output(compiled, given), wanted) <= NEAR


# Llama 4's complex table becomes real. The function of Qwen2.5-VL gets tables in bfloat16.
@pytest.mark.parametrize("name", sorted(set(WAYS) - {"llama4_vision_model", "qwen2_5_vl_vision"}))
def test_a_tower_that_was_cast(name: str) -> None:
    """It is as near to the same weights in float32 as transformers, whose frequencies were rounded.

    How roundings to bfloat16 cancel is chance, which the processor decides. It is less than a bit.
    """
    model, [given, *_] = tiny_towers.build(name).to(torch.bfloat16), tiny_towers.calls(name)
    given = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in given.items()}
    exact = copy.deepcopy(model).float()
    said = accelerate(exact)
    assert said.ropes == accelerate(copy.deepcopy(model)).ropes
    with torch.no_grad():
        wanted = tiny_towers.output(exact, {k: v.float() if v.is_floating_point() else v for k, v in given.items()})
        theirs = tiny_towers.output(model, given).float()
        accelerate(model)
        ours = tiny_towers.output(model, given).float()
        assert (ours - wanted).norm() <= 2 * (theirs - wanted).norm()
        if said.functions:
            restore(model)
            accelerate(model, angles="theirs")
            in_float32 = tiny_towers.output(model, given).float()
            assert (in_float32 - wanted).norm() <= 2 * (theirs - wanted).norm()


@pytest.mark.parametrize("name", ["qwen2_5_vl_vision", "dinov3_vit", "llama4_vision_model", "gemma4_vision"])
def test_copies_pickles_and_state(name: str) -> None:
    model, [given, *_] = tiny_towers.build(name), tiny_towers.calls(name)
    keys, plain = list(model.state_dict()), tiny_towers.output(model, given)
    accelerate(model)
    expected = tiny_towers.output(model, given)
    assert list(model.state_dict()) == keys
    model.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(tiny_towers.output(other, given), expected)
        restore(other)
        assert torch.equal(tiny_towers.output(other, given), plain)


def whole(tower: str = "pixtral") -> Any:
    """Build a LLaVA with a text model and a tower."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    text = tiny_models.config("mistral")
    config = LlavaConfig(vision_config=tiny_towers.config(tower), text_config=text, image_token_index=99)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return LlavaForConditionalGeneration(config).eval()


class TestWhole:
    @torch.no_grad()
    def test_text_and_tower(self) -> None:
        model = whole()
        ids = torch.cat((torch.tensor([1, 5]), torch.full((24,), 99), torch.tensor([7, 8])))[None]
        given = {
            "input_ids": ids,
            "pixel_values": tiny_towers.numbers(1, 3, 16, 24),
            "vision_feature_select_strategy": "full",
        }
        given["image_sizes"] = torch.tensor([[16, 24]])
        expected = model(**given).logits
        said = accelerate(model)
        assert said.modules == (
            "model.language_model.rotary_emb",
            "model.vision_tower.patch_positional_embedding",
        )
        assert [place.split(".")[2] for place in said.functions] == ["mistral", "pixtral"]
        assert not said.left_alone
        assert relative(model(**given).logits, expected) <= NEAR
        assert restore(model) == (
            "rotates as transformers does: "
            "model.vision_tower.patch_positional_embedding, model.language_model.rotary_emb"
        )
        assert torch.equal(model(**given).logits, expected)

    def test_frequencies_that_were_changed(self) -> None:
        """The text model is accelerated, and the tower is listed with the reason."""
        model = whole()
        model.model.vision_tower.patch_positional_embedding.inv_freq.mul_(0.5)
        said = accelerate(model)
        assert said.modules == ("model.language_model.rotary_emb",)
        [left] = said.left_alone
        assert "patch_positional_embedding must have the frequencies with which it was built, got inv_freq" in left
        restore(model)
        assert len(accelerate(model, angles="theirs").modules) == 2

    def test_a_config_that_cannot_be_read(self) -> None:
        model = whole()
        model.model.vision_tower.config.rope_parameters["factor"] = 2.0
        assert "must be a key that pixtral reads, got 2.0" in accelerate(model).left_alone[0]

    @torch.no_grad()
    def test_learned_angles_of_the_class_token(self) -> None:
        """MLCD puts them before the tables, so its own function rotates by exact angles."""
        model, pixels = whole("mlcd_vision_model").model.vision_tower, tiny_towers.numbers(1, 3, 16, 16)
        expected = model(pixels).last_hidden_state
        accelerate(model)
        assert relative(model(pixels).last_hidden_state, expected) <= NEAR


class TestLeftAlone:
    @pytest.mark.parametrize("name", ["qwen2_vl_vision", "kimi_k25_vision", "gemma4_vision"])
    def test_axes_of_another_order(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_towers.build(name)
        [module] = rotary(model)
        theirs = type(module).forward
        monkeypatch.setattr(
            type(module), "forward", lambda self, x, position_ids: theirs(self, x, position_ids.flip(-1))
        )
        refused(model, "must rotate by the axes of its config")
        if name == "gemma4_vision":
            refused(model, "it rotates several parts of a head", angles="theirs")
        else:
            accelerate(model, angles="theirs")

    def test_a_table_that_was_changed(self) -> None:
        model = tiny_towers.build("llama4_vision_model")
        model.rotary_embedding.freqs_ci[3] *= 1j
        refused(model, "pairs of rotary_embedding must rotate by the axes")

    @torch.no_grad()
    def test_a_function_that_may_do_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import transformers.models.sam3.modeling_sam3 as file

        plain = original(file.apply_rotary_pos_emb_2d)

        def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, repeat: int = 1) -> Any:
            return plain(q, k, cos.repeat_interleave(repeat, 0), sin.repeat_interleave(repeat, 0))

        monkeypatch.setattr(file, "apply_rotary_pos_emb_2d", function)
        model, [given, *_] = tiny_towers.build("sam3_vit_model"), tiny_towers.calls("sam3_vit_model")
        expected = tiny_towers.output(model, given)
        refused(model, "a function that ropewalk can replace .* or may do more", angles="theirs")
        said = accelerate(model)
        assert "the model's own functions rotate by the exact cos and sin of" in str(said)
        assert not said.functions
        assert relative(tiny_towers.output(model, given), expected) <= NEAR

    def test_another_pairing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import transformers.models.pixtral.modeling_pixtral as file

        monkeypatch.setattr(file, "apply_rotary_pos_emb", rotating_function("interleaved"))
        refused(tiny_towers.build("pixtral"), r"must pair channels as its config says \(half\), got .*: interleaved")

    def test_on_the_meta_device(self) -> None:
        refused(tiny_towers.build("dinov3_vit").to("meta"), "must have values, got a model on the meta device")

    def test_code_of_another_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_towers.build("qwen2_vl_vision")
        monkeypatch.setattr(type(model.rotary_pos_emb), "recomposition_frequencies", lambda self, freq: freq.no)
        refused(model, "must take the arguments that ropewalk knows, got AttributeError")


class TestProbe:
    """Probe functions that are written here, with tables without a batch axis."""

    @pytest.mark.parametrize("pairing", ["half", "interleaved"])
    def test_shared_tables(self, pairing: Any) -> None:
        form = probe(rotating_function(pairing), "halves", shared=True)
        assert isinstance(form, Form)
        assert dict(form.layouts) == {0: "bhsd", 1: "bshd"}
        assert (form.pairing, form.prefix) == (pairing, False)

    def test_tokens_before_those_of_the_tables(self) -> None:
        def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            n = q.shape[-2] - cos.shape[-2]
            rotated = rotating_function("half")(q[..., n:, :], k[..., n:, :], cos, sin, unsqueeze_dim=0)
            made = (torch.cat((x[..., :n, :], part), dim=-2) for x, part in zip((q, k), rotated, strict=True))
            return next(made), next(made)

        form = probe(apply_rope, "halves", shared=True)
        assert isinstance(form, Form)
        assert (form.layouts, form.prefix) == (((None, "bhsd"),), True)
        q, k = torch.randn(2, 3, 7, 8), torch.randn(2, 1, 7, 8)
        rotation = Rope(8, 10_000.0, "half").at(torch.arange(5))
        cos, sin = oracle.cos_sin(range(5), [float(w) for w in oracle.inv_freq(10_000.0, 8)])
        tables = [torch.from_numpy(t).float().repeat(1, 2) for t in (cos, sin)]
        place = ("file", "function")
        carrying = attach(formats.to_full_width(rotation, repeated="halves"), rotation, {place: form})
        got = dispatcher(apply_rope, place)(q, k, *carrying)
        assert all(map(torch.equal, got, apply_rope(q, k, *tables)))
