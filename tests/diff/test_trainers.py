"""What trainers, and engines without recorded rules, say about configs. The numbers are literal."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ropewalk import diff

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "head_dim": 128,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
BETAS = {**YARN, "beta_fast": 32.0, "beta_slow": 1.0}
MLA = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "kv_lora_rank": 512}
M = 0.1 * math.log(4) + 1


def answer(trainer: str, model_type: str, scaling: dict[str, Any] | None, **more: Any) -> tuple[Any, Any]:
    """Return the largest divisor of a frequency and the attention factor, or the state and the reason."""
    config = {**LLAMA, "model_type": model_type, **more, **({} if scaling is None else {"rope_scaling": scaling})}
    found = diff.engines(config, names=("transformers", trainer))
    [*_, row] = found.facts["ropes"]
    name = row["engines"][1]["name"]
    if name not in found.ropes[-1]:
        return found.facts["states"][name], row["engines"][1]["refused"]
    rope = found.ropes[-1][name]
    slowest = rope.inv_freq[-1] / rope.base ** (2 / rope.rotary_dim - 1)
    return pytest.approx(1 / slowest, rel=1e-6), pytest.approx(rope.attention_factor, rel=1e-6)


CASES = [
    # Megatron-Bridge#2791: the default of MLA, a factor of 40, is not left in a config without YaRN.
    ("megatron", "deepseek_v3", None, MLA, (1, 1)),
    ("megatron", "deepseek_v3", {"rope_type": "default"}, MLA, (1, 1)),
    ("megatron", "deepseek_v3", BETAS, MLA, (4, M)),
    # Megatron-Bridge#5097: linear scaling reaches Llama, but no other model.
    ("megatron", "llama", LINEAR, {}, (4, 1)),
    ("megatron", "qwen3", LINEAR, {}, (1, 1)),
    # An attention factor in the config is ignored, as for Laguna in vLLM.
    ("megatron", "qwen3", {**BETAS, "attention_factor": 1.0}, {}, (4, M)),
    ("automodel", "qwen3", {**BETAS, "attention_factor": 1.0}, {}, (4, 1)),
    # The bridge chooses the class without scaling after it copied the factor.
    ("megatron", "minimax_m2", BETAS, {"rotary_dim": 64}, (1, M)),
    ("megatron", "gpt_oss", BETAS, {}, (32, 0.1 * math.log(32) + 1)),
    # The class of gpt-oss applies YaRN to every scheme with a factor.
    ("automodel", "qwen3_moe", LINEAR, {}, (4, M)),
    ("automodel", "deepseek_v3", YARN, MLA, (1, 1)),
    ("automodel", "deepseek_v3", BETAS, MLA, (4, 1)),
    # TensorRT-LLM agrees with transformers about these,
    ("tensorrt-llm", "llama", None, {}, (1, 1)),
    ("tensorrt-llm", "llama", LINEAR, {}, (4, 1)),
    ("tensorrt-llm", "qwen3", YARN, {}, (4, M)),
    # and differs in an attention factor, in mscale alone, and in dynamic NTK, which it scales by alpha.
    ("tensorrt-llm", "qwen3", {**YARN, "attention_factor": 1.0}, {}, (4, M)),
    ("tensorrt-llm", "qwen3", {**YARN, "mscale": 0.5}, {}, (4, 0.05 * math.log(4) + 1)),
    ("tensorrt-llm", "llama", {"rope_type": "dynamic", "factor": 4.0}, {}, (1, 1)),
    ("tensorrt-llm", "llama", {"rope_type": "dynamic", "factor": 4.0, "alpha": 8.0}, {}, (8, 1)),
]


@pytest.mark.parametrize(("trainer", "model_type", "scaling", "more", "wanted"), CASES)
def test_known_differences(trainer: str, model_type: str, scaling: Any, more: dict[str, Any], wanted: Any) -> None:
    assert wanted == answer(trainer, model_type, scaling, **more)


@pytest.mark.parametrize(
    ("trainer", "model_type", "scaling", "state", "reason"),
    [
        ("megatron", "qwen3", YARN, "refused", "it needs beta_fast and beta_slow in the scaling"),
        ("megatron", "mistral", BETAS, "refused", "unexpected keyword argument 'scale_factor'"),
        ("megatron", "phi3", None, "absent", "has no model phi3"),
        ("tensorrt-llm", "llama", YARN, "unknown", "how the kernel of this model reads it was not looked up"),
        ("tensorrt-llm", "llama", {"rope_type": "default"}, "refused", "Unsupported rotary scaling type: default"),
        ("megatron", "glm4", None, "absent", "has no model glm4"),
    ],
)
def test_what_a_trainer_does_not_run(trainer: str, model_type: str, scaling: Any, state: str, reason: str) -> None:
    found = answer(trainer, model_type, scaling)
    assert found[0] == state
    assert reason in found[1]
