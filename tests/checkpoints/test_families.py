"""Convert models of transformers to the other pairing and back.

The result has the same bytes, and between the conversions a rotation in the other pairing gives the same logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from checkpoint_families import load, logits, other_rotation, save
from ropewalk import RopeError, from_config
from ropewalk.tools import convert as checkpoints
from ropewalk.tools.convert.layouts import PROVEN
from ropewalk.tools.convert.verify import verify

pytest.importorskip("transformers", "5.23")

MODELS = tiny_models.MODELS | tiny_models.CONVERTED_ONLY

# One model for each order of q and k in a file.
WAYS: dict[str, dict[str, Any]] = {
    "codegen": {},
    "cohere": {"use_qk_norm": True},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "deepseek_v3:no_lora": {"q_lora_rank": None},
    "falcon": {},
    "falcon:each": {"multi_query": False, "bias": True},
    "falcon:grouped": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "glm": {},
    "gpt_neox": {},
    "gptj": {},
    "hunyuan_v1_dense": {},
    "llama": {"attention_bias": True},
    "olmo2": {},
    "persimmon": {},
    "phi3:partial": {},
    "qwen3": {},
    "qwen3_next": {},
    "stablelm": {"qk_layernorm": True, "use_qkv_bias": True},
}
REFUSED = {
    "deepseek_v32": "deepseek_v32 must have one rope in each layer and no other part that rotates, got also indexer",
    "dory": "every tensor of an attention must be known, got .*s_gate",
    "glm_moe_dsa": "glm_moe_dsa must have one rope in each layer and no other part that rotates, got also indexer",
    "hrm_text": "every tensor of an attention must be known, got model.H_module.layers.0.attn.gqkv_proj",
    "hy_v4": "hy_v4 must have one rope in each layer and no other part that rotates, got also indexer",
    "jetmoe": "every tensor of an attention must be known, got .*experts",
    "longcat_flash": "every tensor of an attention must be known, got model.layers.0.self_attn.0",
}
OWN_KEY = ("axk1", "deepseek_v3", "glm4_moe_lite", "sarvam_mla", "youtu")
"""Models that read the pairing from a key of their config."""


def check_round_trip(name: str, folder: Path, **changes: Any) -> None:
    first, second, third = (folder / part for part in ("first", "second", "third"))
    if name.partition(":")[0] == "falcon":
        changes = {"head_dim": None, "alibi": False, "new_decoder_architecture": False, **changes}
    model = save(name if name in MODELS else name.partition(":")[0], first, **changes)
    expected = logits(model)
    source = checkpoints.read(first)
    to = "interleaved" if source.pairing == "half" else "half"
    plan = checkpoints.plan(source, to)
    checkpoints.write(plan, second, lambda *_: None, lambda written: verify(plan, written, lambda _: None))
    rope = next(rope for rope in from_config(first).layers if rope is not None)
    converted = load(model, second)
    assert {rope.pairing for rope in from_config(second).layers if rope is not None} == {to}
    if source.model_type in OWN_KEY:
        result = logits(converted)
    else:
        assert (logits(converted) - expected).abs().max() > 1e-2  # the model's own rotation gives wrong logits
        with other_rotation(converted, source.pairing, rope.head_dim, rope.rotary_dim, rope.rotary_offset):
            result = logits(converted)
    torch.testing.assert_close(result, expected, atol=2e-5, rtol=2e-5)
    inverse_plan = checkpoints.plan(checkpoints.read(second), source.pairing)
    checkpoints.write(inverse_plan, third, lambda *_: None)
    assert {path.name for path in third.iterdir()} == {path.name for path in first.iterdir()}
    for path in third.glob("*.safetensors"):
        assert path.read_bytes() == (first / path.name).read_bytes()
    assert from_config(third).layers == from_config(first).layers
    assert "ropewalk_pairing" not in (third / "config.json").read_text()


@pytest.mark.parametrize("name", WAYS)
def test_each_way(name: str, tmp_path: Path) -> None:
    check_round_trip(name, tmp_path, **WAYS[name])


@pytest.mark.parametrize("name", [name for name in MODELS if name not in REFUSED])
def test_every_model(name: str, tmp_path: Path) -> None:
    check_round_trip(name, tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)

    def convert() -> None:
        source = checkpoints.read(tmp_path)
        checkpoints.plan(source, "interleaved" if source.pairing == "half" else "half")

    with pytest.raises(RopeError, match=REFUSED[name]):
        convert()


def test_proven_models_are_run() -> None:
    assert {name.partition(":")[0] for name in MODELS if name not in REFUSED} == PROVEN
