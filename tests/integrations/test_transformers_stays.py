"""Test what `accelerate` does not change (weights, files, other models, copies), and what `restore` undoes."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import ropewalk
import tiny_models
from model_checks import FAR, NEAR, output, relative, tokens
from ropewalk.integrations.transformers import accelerate, restore

pytest.importorskip("transformers", "5.23")
LLAMA = "transformers.models.llama.modeling_llama"


@pytest.fixture
def llama() -> Any:
    return tiny_models.build("llama")


def test_state_and_saved_model(llama: Any, tmp_path: Any) -> None:
    from transformers import LlamaForCausalLM

    ids, keys = tokens(), list(llama.state_dict())
    expected = output(llama, ids)
    accelerate(llama)
    assert list(llama.state_dict()) == keys
    llama.save_pretrained(tmp_path)
    assert not any(b"ropewalk" in path.read_bytes() for path in tmp_path.iterdir())
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(output(again, ids), expected)
    llama.load_state_dict(again.state_dict())


def test_frequencies_that_are_saved() -> None:
    """ESM stores inv_freq in its checkpoints."""
    changes = {"vocab_size": 33, "pad_token_id": 1, "position_embedding_type": "rotary", "mask_token_id": 32}
    model = tiny_models.build("esm", **changes)
    state = copy.deepcopy(model.state_dict())
    accelerate(model)
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(state)


def test_other_models_of_the_file(llama: Any) -> None:
    ids, other = tokens(), tiny_models.build("llama")
    expected = output(other, ids)
    accelerate(llama)
    assert torch.equal(output(other, ids), expected)


def test_restored_in_another_order() -> None:
    first, second, ids = tiny_models.build("llama"), tiny_models.build("llama"), tokens()
    expected = output(first, ids, FAR)
    accelerate(first)
    accelerate(second)
    exact = output(first, ids, FAR)
    restore(first)
    assert torch.equal(output(first, ids, FAR), expected)
    assert torch.equal(output(second, ids, FAR), exact)
    restore(second)
    assert torch.equal(output(second, ids, FAR), expected)


@pytest.mark.parametrize("angles", ["exact", "theirs"])
def test_copies_and_pickles(angles: Any) -> None:
    model, ids = tiny_models.build("llama"), tokens()
    plain = output(model, ids, FAR)
    accelerate(model, angles=angles)
    expected, file = output(model, ids, FAR), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(output(other, ids, FAR), expected)
        restore(other)
        assert torch.equal(output(other, ids, FAR), plain)
    assert torch.equal(output(model, ids, FAR), expected)


def test_device_moves() -> None:
    model = tiny_models.build("llama")
    accelerate(model)
    model.to("meta")
    result = model(input_ids=tokens().to("meta"), position_ids=torch.arange(64, device="meta")[None])[0]
    assert result.is_meta
    assert all(buffer.is_meta for buffer in model.buffers())


def test_encoder_and_decoder() -> None:
    """Each has its own rotary module and config."""
    from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration

    sizes = {key: tiny_models.TINY[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    decoder = {**sizes, "cross_attention_hidden_size": 64}
    model = T5GemmaForConditionalGeneration(T5GemmaConfig(encoder=sizes, decoder=decoder)).eval()
    ids, begun = tokens(2, 16), tokens(2, 8)
    with torch.no_grad():
        expected = model(input_ids=ids, decoder_input_ids=begun).logits
        said = accelerate(model)
        assert said.modules == ("model.encoder.rotary_emb", "model.decoder.rotary_emb")
        assert relative(model(input_ids=ids, decoder_input_ids=begun).logits, expected) <= NEAR
        restore(model)
        assert torch.equal(model(input_ids=ids, decoder_input_ids=begun).logits, expected)


def test_attributes_of_the_rotary_module(llama: Any) -> None:
    rotary, kind, buffers = llama.model.rotary_emb, type(llama.model.rotary_emb), dict(llama.named_buffers())
    accelerate(llama)
    assert llama.model.rotary_emb is rotary
    assert dict(llama.named_buffers()) == buffers
    assert isinstance(rotary, kind)
    assert type(rotary).__name__ == "LlamaRotaryEmbedding"
    assert type(rotary).compute_default_rope_parameters is kind.compute_default_rope_parameters
    assert "Rope(head_dim=16" in repr(rotary)
    restore(llama)
    assert type(rotary) is kind


def test_a_second_reference(llama: Any) -> None:
    """Multi-token-prediction heads share the rotary module of the base model."""
    llama.head = nn.Module()
    llama.head.rotary_emb = llama.model.rotary_emb
    accelerate(llama)
    assert llama.head.rotary_emb is llama.model.rotary_emb
    assert type(llama.head.rotary_emb).__module__.startswith("ropewalk")
    restore(llama)
    assert llama.head.rotary_emb is llama.model.rotary_emb
    assert type(llama.head.rotary_emb).__name__ == "LlamaRotaryEmbedding"


def test_the_report_as_text(llama: Any) -> None:
    said = accelerate(llama)
    assert said.modules == ("model.rotary_emb",)
    assert said.functions == (f"{LLAMA}.apply_rotary_pos_emb",)
    assert said.ropes == {"model.rotary_emb": ropewalk.Rope(16, 10_000.0, "half")}
    assert str(said) == (
        "rotates through ropewalk, with exact angles: model.rotary_emb\n"
        "  model.rotary_emb: Rope(head_dim=16, base=10000.0, pairing='half')\n"
        f"  by {LLAMA}.apply_rotary_pos_emb"
    )
    assert restore(llama) == "rotates as transformers does: model.rotary_emb"
    assert "the model's own float32 angles" in str(accelerate(llama, angles="theirs"))
