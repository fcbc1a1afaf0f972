"""Test adapters of PEFT around and inside an accelerated model, and device moves of the library accelerate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny_models
from model_checks import FAR, NEAR, gradients, output, rms, tokens
from ropewalk import Rope
from ropewalk.integrations.transformers import accelerate, restore

pytest.importorskip("transformers", "5.23")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


def adapted(model: Any) -> Any:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return peft.get_peft_model(model, config)


@pytest.mark.parametrize("first", ["peft", "accelerate"])
def test_adapters(first: str, tmp_path: Any) -> None:
    ids, plain = tokens(), adapted(tiny_models.build("llama")).eval()
    expected, grads, keys = output(plain, ids, FAR), gradients(plain, ids), list(plain.state_dict())
    model = tiny_models.build("llama")
    if first == "accelerate":
        accelerate(model, angles="theirs")
    model = adapted(model).eval()
    if first == "peft":
        accelerate(model, angles="theirs")
    assert torch.equal(output(model, ids, FAR), expected)
    assert list(model.state_dict()) == keys
    got = gradients(model, ids)
    assert got.keys() == grads.keys()
    assert any("lora" in name for name in got)
    assert max(rms(got[name], grads[name]) for name in grads) <= 2 * NEAR
    model.save_pretrained(tmp_path)
    restore(model)
    assert torch.equal(output(model, ids, FAR), expected)
    again = peft.PeftModel.from_pretrained(tiny_models.build("llama"), tmp_path).eval()
    assert torch.equal(output(again, ids, FAR), expected)


def test_merged_adapters() -> None:
    ids, model = tokens(), adapted(tiny_models.build("llama")).eval()
    accelerate(model)
    before = output(model, ids, FAR)
    merged = model.merge_and_unload()
    assert float((output(merged, ids, FAR) - before).detach().abs().max()) < 1e-4
    restore(merged)


def test_a_rotation_is_sent_to_another_device() -> None:
    """Hooks of the library accelerate move the arguments of layers, with keywords that only tensors accept."""
    send = pytest.importorskip("accelerate.utils").send_to_device
    rotation = Rope(16, 10_000.0, "half").at(torch.arange(4))
    sent = send({"position_embeddings": (rotation, rotation)}, "meta", non_blocking=True)["position_embeddings"]
    assert all(each.cos.is_meta and each.sin.is_meta for each in sent)
