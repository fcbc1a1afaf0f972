"""Ropes of which a part is in the checkpoint: the learned factors of Mistral Large 4."""

from __future__ import annotations

import json
import math
import os
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


def freed() -> torch.Tensor:
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


class Broken(dict[str, Any]):
    def __getitem__(self, name: str) -> Any:
        raise OSError("disk")


def beside(more: dict[str, Any] | None = None, **changed: list[float]) -> dict[str, Any]:
    """Return the model's own tensors, some of them changed (`s0`: scale of layer 0), and others after them."""
    named = {f"layers.{name[1:]}.attention.ssmax_scaling.{name[0]}": value for name, value in changed.items()}
    return {"lerope.alpha": ALPHA, **scales(), **named, **(more or {})}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (None, r"tensor lerope.alpha of the checkpoint must be known.*4 learned numbers.*or pass weights="),
        ({}, r"got no such tensor"),
        ({"lerope.alpha": [1.0]}, r"tensor lerope.alpha must have a number for each of 4 pairs, got 1"),
        ({"lerope.alpha": [math.nan] * 4}, r"alpha\[0\] must be a finite number"),
        ({"lerope.alpha": [101.0] * 4}, r"alpha\[0\] must be a finite number of at least -100 and at most"),
        ({"lerope.alpha": "alpha"}, r"lerope.alpha must be a tensor of at most"),
        ({"lerope.alpha": torch.zeros(4), "model.rotary_emb.alpha": torch.zeros(4)}, r"got lerope.alpha and model\."),
        ({"mtp.lerope.alpha": ALPHA, "visual.rotary_emb.alpha": ALPHA, 0: ALPHA}, r"got no such tensor"),
        ({"lerope.alpha": torch.zeros(4, dtype=torch.bool)}, r"lerope.alpha must be .* real numbers, .*torch\.bool"),
        ({"lerope.alpha": freed()}, r"lerope.alpha must be a tensor of .*its memory was freed"),
        (Broken({"lerope.alpha": ALPHA}), r"lerope.alpha must be a tensor of .*got OSError\('disk'\)"),
        ([torch.zeros(4)], r"weights must map names to tensors"),
        (beside(s0=[math.nan, 1.0]), r"config: HeadQueryScale: scale\[0\]\[0\] must be a finite number, got nan"),
        (beside(b3=[1.0, -math.inf]), r"config: HeadQueryScale: bias\[3\]\[1\] must be a finite number, got -inf"),
        (beside(s0=[1.0]), r"scale and bias must have a number for each head of each layer, got \[1, 2\] numbers"),
        ({name: [] for name in beside()} | {"lerope.alpha": ALPHA}, r"for each head of each layer, got \[0\] numbers"),
        (beside({"model.layers.0.self_attn.softmax_scaling.scale": [1.0, 2.0]}),
         r"every layer from 0 to 3 must have one tensor .*got layers.0.attention.ssmax_scaling.s and model\.layers"),
        (beside({"layers.4.attention.ssmax_scaling.s": [1.0, 2.0]}), r"must have one tensor .*got layers\.4\."),
        (beside({f"layers.{'9' * 5000}.attention.ssmax_scaling.s": [1.0]}), r"must have one tensor .*got 'layers\.999"),
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


def test_heads_of_another_model() -> None:
    with pytest.raises(RopeError, match=r"num_attention_heads must be 2, the numbers in the tensor layers.0.*got 8"):
        from_config({**CONFIG, "num_attention_heads": 8}, weights=beside())


@pytest.mark.parametrize("prefix", ["vision_tower.", "mtp_dspark.", "model.draft.", "model.layers.0.mtp."])
def test_only_the_text_model_is_read(prefix: str) -> None:
    """Tensors of a tower or a draft are not taken, whether they are last, first or alone."""
    own = beside()
    others = {f"{prefix}{name}": torch.full((4 if "alpha" in name else 2,), 9.0) for name in own}
    expected = from_config(CONFIG, weights=own)
    for both in ({**own, **others}, {**others, **own}):
        ropes = from_config(CONFIG, weights=both)
        assert (ropes.layers, ropes.query_scale) == (expected.layers, expected.query_scale)
    assert from_config(CONFIG, weights={**others, "lerope.alpha": ALPHA}).query_scale is None


def test_a_layer_after_the_last_one() -> None:
    """It predicts further tokens, as `num_nextn_predict_layers` says."""
    further = {f"layers.4.attention.ssmax_scaling.{name}": [9.0, 9.0] for name in "sb"}
    config = {**CONFIG, "num_nextn_predict_layers": 1}
    found, expected = from_config(config, weights=beside(further)), from_config(CONFIG, weights=beside())
    assert found.query_scale == expected.query_scale


def test_a_query_scale_of_one_layer() -> None:
    scale = HeadQueryScale(scale=((2.0,),), bias=((1.0,),))
    assert scale.at(0, 0) == (1.0,)
    for arguments in ((-1, 0), (0, 1), (0, -1)):
        with pytest.raises(RopeError, match=r"HeadQueryScale\.at: (position|layer) must be an integer"):
            scale.at(*arguments)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("header", r"model.safetensors must be a complete safetensors file, .*header has 16,777,2\d\d bytes"),
        ("damaged", r"model.safetensors must be a complete safetensors file, got a truncated or damaged one"),
        ("pipe", r"model.safetensors must be a file, got something else"),
        ("large", r"lerope.alpha must be a tensor of at most 1,048,576 real numbers, .*the shape \[2147483648\]"),
        ({"weight_map": {"lerope.alpha": "pipe"}}, r"pipe.safetensors must be a file, got something else"),
        ({"weight_map": {"lerope.alpha": "../missing"}}, r"must name safetensors files of its own folder, got '../"),
        ({"weight_map": {"lerope.alpha": "missing"}}, r"missing.safetensors must be a file, got none"),
        ({"weight_map": {"lerope.alpha": "good"}}, r"lerope.alpha must be a tensor .*does not contain tensor"),
        ({"weight_map": []}, r"must have a weight_map with entries"),
        ("[" * 100_000, r"index.json: the file must contain JSON"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path: Path, file: Any, message: str) -> None:
    """None of them hangs, takes much memory or ends in another error."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    single, pipe = tmp_path / "model.safetensors", tmp_path / "pipe.safetensors"
    save_file({"a": torch.zeros(1)}, tmp_path / "good.safetensors")
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)  # so that whoever opens the pipe to read does not wait
    if file == "pipe":
        pipe.rename(single)
    elif file in ("header", "large"):
        count = 4 if file == "header" else 2**31
        entry = {"lerope.alpha": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}
        head = json.dumps(entry).ljust(2**24 + 8 if file == "header" else 8).encode()
        with single.open("wb") as out:
            out.write(len(head).to_bytes(8, "little") + head)
            out.truncate(8 + len(head) + 4 * count)
    elif file == "damaged":
        single.write_bytes(b"\x08" * 100)
    else:
        text = json.dumps(file).replace('"}}', '.safetensors"}}') if isinstance(file, dict) else file
        (tmp_path / "model.safetensors.index.json").write_text(text)
    try:
        with pytest.raises(RopeError, match=message):
            from_config(tmp_path)
    finally:
        os.close(writer)


def test_other_files_are_not_opened(tmp_path: Path) -> None:
    save(tmp_path, {"lerope.alpha": torch.tensor(ALPHA)})
    save_file({"rotary_emb.alpha": torch.zeros(4)}, tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_text("other")
    (tmp_path / "c.safetensors").mkdir()
    (tmp_path / "d.safetensors").symlink_to("missing")
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert from_config(tmp_path).layers == from_config(CONFIG, weights={"lerope.alpha": ALPHA}).layers


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
