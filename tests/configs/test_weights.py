"""Ropes of which a part is in the checkpoint: the learned factors of Mistral Large 4."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import oracle
from ropewalk import Rope, RopeError, from_config
from ropewalk.configs.architecture import HeadQueryScale
from ropewalk.schemes import DynamicNTK, LeRoPE, YaRN

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "attention_factor": 1.0,
}
CONFIG = {
    "model_type": "mistral_large4_text",
    "num_hidden_layers": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 8,
    "index_head_dim": 16,
    "no_rope_layers": [1, 1, 0, 1],
    "rope_parameters": YARN,
}
ALPHA = [0.25, -0.5, 0.0, 1.5]


def scaled() -> list[Any]:
    """Return the frequencies that the model's formula gives in exact arithmetic."""
    frequencies = oracle.yarn(1e4, 8, 2048.0, 512)
    return [w * oracle.mpmath.exp(a) for w, a in zip(frequencies, ALPHA, strict=True)]


def save(folder: Path, tensors: dict[str, Any], file: str = "model.safetensors") -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / file)


def scales(layers: int = 4) -> dict[str, torch.Tensor]:
    """Tensors as the released checkpoint names them, with other numbers for the indexer."""
    tensors = {}
    for i in range(layers):
        tensors[f"layers.{i}.attention.ssmax_scaling.s"] = torch.tensor([0.5 + i, 1.0])
        tensors[f"layers.{i}.attention.ssmax_scaling.b"] = torch.tensor([2.0, 3.0 + i])
        tensors[f"layers.{i}.attention.indexer.ssmax_scaling.s"] = torch.tensor([9.0])
        tensors[f"layers.{i}.attention.indexer.ssmax_scaling.b"] = torch.tensor([9.0])
    return tensors


def test_a_folder(tmp_path: Path) -> None:
    save(tmp_path, {"lerope.alpha": torch.tensor(ALPHA, dtype=torch.bfloat16), **scales()})
    for source in (tmp_path, tmp_path / "config.json"):
        ropes = from_config(source)
        scheme = LeRoPE(ALPHA, YaRN(2048.0, 512, attention_factor=1.0))
        rope = Rope(12, 1e4, "interleaved", rotary_dim=8, rotary_offset=4, scaling=scheme)
        assert ropes.layers == (rope, rope, None, rope)
        assert ropes.extra_ropes["indexer"].scaling == scheme
        assert ropes.trained_length == 512
        assert ropes.origins["alpha"] == "lerope.alpha of the checkpoint"
    assert rope.inv_freq == pytest.approx([float(w) for w in scaled()], rel=1e-14)
    positions = [0, 1, 511, 100_000, 1_048_575]
    expected = oracle.cos_sin(positions, scaled())
    rotation = rope.at(torch.tensor(positions))
    for found, exact in zip((rotation.cos, rotation.sin), expected, strict=True):
        assert np.abs(found.double().numpy() - exact).max() <= 3.2e-8


def test_the_query_scale_of_each_head(tmp_path: Path) -> None:
    save(tmp_path, {"lerope.alpha": torch.tensor(ALPHA), **scales()})
    ropes = from_config(tmp_path)
    assert isinstance(ropes.query_scale, HeadQueryScale)
    assert ropes.query_scale.at(0, 3) == (2.0, 6.0)
    assert ropes.query_scale.at(9, 1) == pytest.approx((1.5 * math.log(10) + 2, math.log(10) + 4))
    assert "q is multiplied by scale · ln(position + 1) + bias, learned for each head" in ropes.explain()
    json.dumps(ropes.facts(), allow_nan=False)
    without = from_config(CONFIG, weights={"lerope.alpha": ALPHA})
    assert without.query_scale is None
    assert any("ssmax_scaling.s · ln(position + 1)" in warning for warning in without.warnings)


def test_shards(tmp_path: Path) -> None:
    """Only the shard that holds the tensor is opened; the others need not exist."""
    save(tmp_path, {"model.language_model.rotary_emb.alpha": torch.tensor(ALPHA)}, file="b.safetensors")
    index = {"model.language_model.rotary_emb.alpha": "b.safetensors", "model.embed.weight": "a.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    rope = from_config(tmp_path).layers[0]
    assert rope is not None
    assert rope.inv_freq == pytest.approx([float(w) for w in scaled()], rel=1e-7)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (None, r"tensor lerope.alpha of the checkpoint must be known.*4 learned numbers.*or pass weights="),
        ({}, r"got no such tensor"),
        ({"lerope.alpha": [1.0]}, r"tensor lerope.alpha must have a number for each of 4 pairs, got 1"),
        ({"lerope.alpha": [math.nan] * 4}, r"alpha\[0\] must be a finite number"),
        ({"lerope.alpha": [101.0] * 4}, r"alpha\[0\] must be a finite number of at least -100 and at most"),
        ({"lerope.alpha": "alpha"}, r"lerope.alpha must be a tensor of at most"),
        ({"lerope.alpha": torch.zeros(4), "a.lerope.alpha": torch.zeros(4)}, r"got lerope.alpha and a.lerope.alpha"),
        ([torch.zeros(4)], r"weights must map names to tensors"),
    ],
)  # fmt: skip
def test_misuse(weights: Any, message: str) -> None:
    with pytest.raises(RopeError, match=message):
        from_config(CONFIG, weights=weights)


def test_weights_without_effect_are_refused() -> None:
    llama = {"model_type": "llama", "head_dim": 8, "num_hidden_layers": 2, "rope_theta": 1e4}
    with pytest.raises(RopeError, match="weights require a model of which a part of the rope is in the checkpoint"):
        from_config(llama, weights={"lerope.alpha": ALPHA})
    with pytest.raises(RopeError, match="weights and engine must not both be passed"):
        from_config(CONFIG, weights={"lerope.alpha": ALPHA}, engine="vllm")


def test_damaged_files(tmp_path: Path) -> None:
    save(tmp_path, {"lerope.alpha": torch.tensor(ALPHA)})
    (tmp_path / "model.safetensors").write_bytes(b"\x08" * 100)
    with pytest.raises(RopeError, match="cannot be read"):
        from_config(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"lerope.alpha": "../../missing"}}')
    with pytest.raises(RopeError, match="missing: cannot be read"):
        from_config(tmp_path)


def test_a_scheme_that_depends_on_the_length() -> None:
    with pytest.raises(RopeError, match="scaling must be a scheme that is the same at every length"):
        LeRoPE([0.0], DynamicNTK(2.0, 4096))  # type: ignore[arg-type]


def test_a_model_of_transformers(tmp_path: Path) -> None:
    """Its tables in float32 bit for bit, and its outputs after `accelerate`."""
    configuration = pytest.importorskip("transformers.models.mistral_large4.configuration_mistral_large4")
    from transformers.models.mistral_large4.modeling_mistral_large4 import MistralLarge4TextModel

    from ropewalk.integrations.transformers import accelerate

    small = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64)
    small |= dict.fromkeys(("qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim", "head_dim", "kv_lora_rank"), 16)
    small |= dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "n_routed_experts"), 4)
    small |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "index_head_dim": 32, "index_n_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = MistralLarge4TextModel(configuration.MistralLarge4TextConfig(**small)).eval()
        for name, tensor in model.state_dict().items():
            if name.endswith("rotary_emb.alpha"):
                tensor.normal_(0, 0.3)
            elif "softmax_scaling" in name:
                tensor.uniform_(0.5, 1)
        tokens = torch.randint(0, 64, (2, 40))
    model.save_pretrained(tmp_path)
    ropes = from_config(tmp_path)
    assert from_config(model.config, weights=model.state_dict()).layers == ropes.layers
    cos, sin = model.rotary_emb(torch.zeros(1, 1, 1), torch.arange(64)[None])
    assert ropes.layers[0] is not None
    rotation = ropes.layers[0].at(torch.arange(64), numerics="float32")
    assert torch.equal(rotation.cos, cos[0, :, :8])
    assert torch.equal(rotation.sin, sin[0, :, :8])
    scale = model.layers[1].self_attn.softmax_scaling
    one = torch.ones(1, 4, 1, 1)
    expected = scale(one, torch.tensor([[99]]), head_dim_first=True).flatten().tolist()
    assert isinstance(ropes.query_scale, HeadQueryScale)
    assert ropes.query_scale.at(99, 1) == pytest.approx(expected, rel=1e-6)
    with torch.no_grad():
        before = model(tokens).last_hidden_state
        accelerate(model)
        assert torch.dist(before, model(tokens).last_hidden_state, p=math.inf) <= 5e-6
