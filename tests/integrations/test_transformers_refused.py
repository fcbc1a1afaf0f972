"""Test what `accelerate` refuses before it changes anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tiny_models
from model_checks import refused
from ropewalk import Rope, RopeError
from ropewalk.integrations.transformers import accelerate, compare, restore
from rotating_functions import rotating_function

pytest.importorskip("transformers", "5.23")


@pytest.fixture
def llama() -> Any:
    return tiny_models.build("llama")


class TestRefused:
    def test_twice(self, llama: Any) -> None:
        accelerate(llama)
        for angles in ("exact", "theirs"):
            refused(llama, "one that is accelerated already. Call restore", angles=angles)
        restore(llama)
        accelerate(llama)

    def test_nothing_to_restore(self, llama: Any) -> None:
        with pytest.raises(RopeError, match="restore: the model must be accelerated, got one that is not"):
            restore(llama)

    @pytest.mark.parametrize("model", [None, "meta-llama/Llama-3.1-8B", nn.Linear(2, 2)])
    def test_no_model(self, model: Any) -> None:
        for call in (accelerate, restore):
            with pytest.raises(RopeError, match="model must be a model of transformers, with its config"):
                call(model)

    def test_a_part_of_a_model(self, llama: Any) -> None:
        refused(llama.model.rotary_emb, "must be a model of transformers, with its config, got LlamaRotaryEmbedding")

    def test_angles(self, llama: Any) -> None:
        refused(llama, "angles must be one of 'exact', 'theirs', got 'fast'", angles="fast")

    def test_the_opposite_direction(self) -> None:
        """NanoChat: its config can be read, but its function cannot be replaced."""
        refused(tiny_models.build("nanochat"), "each pair by plus its angle, got nanochat, which rotates by minus")
        refused(
            tiny_models.build("nanochat"),
            "a function that ropewalk can replace must rotate .*nanochat",
            angles="theirs",
        )

    def test_axes_that_the_config_does_not_mention(self, llama: Any) -> None:
        llama.model.rotary_emb.mrope_section = [3, 3, 2]
        refused(llama, r"the config must state the axes of model.rotary_emb, got mrope_section \[3")
        accelerate(llama, angles="theirs")

    def test_without_a_rope(self) -> None:
        refused(
            tiny_models.build("gpt2"), "the model must have a rotary module that is called with positions, got GPT2"
        )

    def test_on_the_meta_device(self) -> None:
        refused(tiny_models.build("llama").to("meta"), "must have values, got a model on the meta device")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_a_config_that_was_changed(self, llama: Any, dtype: torch.dtype) -> None:
        llama.to(dtype)
        llama.config.rope_parameters["rope_theta"] = 20_000.0
        refused(
            llama,
            r"model.rotary_emb must have the frequencies and the attention factor of its config, "
            r"got inv_freq\[\d\] 0.*If the config was changed",
        )
        accelerate(llama, angles="theirs")

    def test_an_attention_factor_that_was_changed(self) -> None:
        model = tiny_models.build("llama:yarn")
        model.model.rotary_emb.attention_scaling *= 1.001
        refused(model, r"got attention factor 1\.20\d+ instead of 1\.20")

    def test_another_number_of_channels(self, llama: Any) -> None:
        for name in ("inv_freq", "original_inv_freq"):
            setattr(llama.model.rotary_emb, name, getattr(llama.model.rotary_emb, name)[:4].clone())
        refused(llama, "got 4 frequencies instead of 8")

    def test_another_pairing(self, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """A fork of the modeling file has another pairing than the model type of the config."""
        import transformers.models.llama.modeling_llama as file

        monkeypatch.setattr(file, "apply_rotary_pos_emb", rotating_function("interleaved"))
        refused(llama, r"model.rotary_emb must pair channels as its config says \(half\), got .*: interleaved")

    def test_other_angles(self, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        rotary = llama.model.rotary_emb
        theirs = type(rotary).forward
        monkeypatch.setattr(type(rotary), "forward", lambda self, x, position_ids: theirs(self, x, position_ids + 1))
        refused(llama, "must return cos and sin of position · inv_freq, got other numbers")

    def test_the_last_channels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A fork of the modeling file rotates the last channels of a head, but the config means the first ones."""
        import transformers.models.gpt_neox.modeling_gpt_neox as file

        monkeypatch.setattr(file, "apply_rotary_pos_emb", rotating_function("half", whole="last"))
        model = tiny_models.build("gpt_neox")
        refused(model, "must rotate the first 4 channels, as its config says, got a function that rotates the last")

    def test_a_config_without_ropes(self) -> None:
        """Flint rotates only in its first layers. This model has a rotary module that no layer uses."""
        message = "must have the frequencies and the attention factor of its config, got a config without ropes"
        refused(tiny_models.build("flint"), message)

    def test_two_ropes_that_cannot_be_told_apart(self, llama: Any) -> None:
        ropes = [Rope(16, 10_000.0, "half"), Rope(16, 10_000.001, "half")]
        with pytest.raises(RopeError, match="frequencies of one rope of its config, got several"):
            compare.find_rope("rotary_emb", llama.model.rotary_emb, None, ropes)
        assert compare.find_rope("rotary_emb", llama.model.rotary_emb, None, ropes[:1]) is ropes[0]

    def test_a_config_that_cannot_be_read(self, llama: Any) -> None:
        llama.config.rope_parameters["rope_type"] = "no_such_type"
        refused(llama, "from_config cannot read the config, which angles='theirs' does not need: .*no_such_type")
        accelerate(llama, angles="theirs")


class TestWhileRunning:
    def test_positions_of_several_axes(self, llama: Any) -> None:
        accelerate(llama)
        with pytest.raises(RopeError, match=r"position_ids must be \[batch, seq\], got shape \(3, 1, 4\)"):
            llama.model.rotary_emb(torch.zeros(1, 4, 1), torch.zeros(3, 1, 4, dtype=torch.long))

    def test_a_layer_type_without_a_rope(self) -> None:
        model = tiny_models.build("gemma3_text")
        accelerate(model)
        with pytest.raises(RopeError, match="the layer type must be one of 'full_attention', 'sliding_attention'"):
            model.model.rotary_emb(torch.zeros(1, 4, 1), torch.arange(4)[None], "chunked_attention")


class TestChanged:
    """A model whose numbers were changed by hand keeps them, or is refused with their name."""

    @pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_neox", "deepseek_v3"])
    @pytest.mark.parametrize("how", ["slower", "one of them", "none"])
    def test_frequencies(self, name: str, how: str) -> None:
        model = tiny_models.build(name)
        rotary = next(module for module in model.modules() if compare.is_rotary(module))
        buffers = [each for key, each in rotary.named_buffers() if key.endswith("inv_freq") and "original" not in key]
        buffers[0].mul_(0.25) if how == "slower" else buffers[0][1:2].mul_(1.01 if how == "one of them" else 0.0)
        refused(model, "must have the frequencies with which it was built, got inv_freq")
        accelerate(model, angles="theirs")

    def test_a_custom_rotary_module(self, llama: Any) -> None:
        """It has another name, and other positions from the eighth on."""
        theirs = type(llama.model.rotary_emb)

        class Slower(theirs):  # type: ignore[misc,valid-type]
            def forward(self, x: Any, position_ids: Any) -> Any:
                return super().forward(x, torch.where(position_ids >= 8, 8 + (position_ids - 8) // 4, position_ids))

        llama.model.rotary_emb = Slower(llama.config)
        refused(llama, "model.rotary_emb must return cos and sin of position · inv_freq")

        class Same(theirs):  # type: ignore[misc,valid-type]
            pass

        llama.model.rotary_emb = Same(llama.config)
        accelerate(llama)

    @pytest.mark.parametrize("name", ["phi3", "llama"])
    def test_frequencies_that_a_long_text_has_changed(self, name: str) -> None:
        """LongRoPE and dynamic NTK write into their buffers, which does not count as a change by hand."""
        parameters = {
            "phi3": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "original_max_position_embeddings": 16,
                "factor": 4.0,
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [2.0 + 0.3 * i for i in range(8)],
            },
            "llama": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
        }[name]
        more = {"max_position_embeddings": 64} if name == "phi3" else {"max_position_embeddings": 16}
        model = tiny_models.build(name, rope_parameters=parameters, **more)
        with torch.no_grad():
            model(torch.randint(0, 32, (1, 40)))
        said = accelerate(model, length=64)
        assert said.length == 64
        assert "for up to 64 tokens" in str(said)
        hash(said)

    def test_a_module_around_a_model(self, llama: Any) -> None:
        around = nn.Module()
        around.model, around.config = llama, {"lr": 1}
        refused(around, "and neither a part of it nor a module that contains it")

    def test_attention_of_an_adapter_that_rotates_by_itself(self, llama: Any) -> None:
        """PEFT's adaption prompts do this."""
        adapted = type("AdaptedAttention", (nn.Module,), {"__module__": "peft.tuners.adaption_prompt.layer"})
        llama.model.layers[1].self_attn = adapted()
        refused(llama, "the model must use its own attention, got model.layers.1.self_attn, AdaptedAttention of PEFT")
