"""What trainers, and engines without recorded rules, say about configs. The numbers are literal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import oracle
from ropewalk import diff, from_config

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
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
BETAS = {**YARN, "beta_fast": 32.0, "beta_slow": 1.0}
MLA = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "kv_lora_rank": 512}
M = 0.1 * math.log(4) + 1
MSCALES = {**BETAS, "type": "yarn", "mscale": 0.5, "mscale_all_dim": 1.0}
QWEN_3 = {"max_window_layers": 28, "use_sliding_window": False}
DEEPSEEK = {**MLA, "attention_bias": False, "n_group": 1, "topk_group": 1}
GEMMA_3 = {"sliding_window_pattern": 2}
NESTED = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {**LINEAR, "rope_theta": 1e6}}


def numbers(found: diff.EngineDiff, name: str, row: int = -1) -> tuple[list[float], float]:
    """Return the frequencies and the attention factor of an engine at the longest compared length."""
    entry = found.facts["ropes"][row]["at"][-1]["engines"][name]
    return entry["inv_freq"], entry["attention_factor"]


def answer(trainer: str, model_type: str, scaling: dict[str, Any] | None, **more: Any) -> tuple[Any, Any]:
    """Return the largest divisor of a frequency and the attention factor, or the state and the reason."""
    config = {**LLAMA, "model_type": model_type, **more, **({} if scaling is None else {"rope_scaling": scaling})}
    found = diff.engines(config, names=("transformers", trainer))
    [*_, row] = found.facts["ropes"]
    name = row["engines"][1]["name"]
    if name not in row["at"][-1]["engines"]:
        return found.facts["states"][name], row["engines"][1]["refused"]
    inv_freq, factor = numbers(found, name)
    last = from_config(config, engine=trainer).layers[row["layers"][0]]
    slowest = inv_freq[-1] / last.base ** (1 / len(inv_freq) - 1)
    return pytest.approx(1 / slowest, rel=1e-6), pytest.approx(factor, rel=1e-6)


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
    # The structs of mistral.rs for Qwen have no scaling, and that for Mistral has only rope_parameters.
    ("mistral.rs", "qwen2", YARN, {}, (1, 1)),
    ("mistral.rs", "qwen3", YARN, QWEN_3, (1, 1)),
    ("mistral.rs", "mistral", BETAS, {}, (1, 1)),
    ("mistral.rs", "mistral", None, {"rope_parameters": {**BETAS, "rope_theta": 1e6, "attention_factor": 1.0}}, (4, M)),
    ("mistral.rs", "mistral", None, {"rope_parameters": {**BETAS, "rope_theta": 1e6, "mscale": 0.5}}, (4, (M + 1) / 2)),
    ("mistral.rs", "deepseek_v3", MSCALES, DEEPSEEK, (4, (M + 1) / 2 / M)),
    ("mistral.rs", "llama", LINEAR, {}, (4, 1)),
    ("mistral.rs", "llama", LLAMA_3, {}, (8, 1)),
    # It reads the keys of Gemma 3 in transformers 4 only.
    ("mistral.rs", "gemma3_text", LINEAR, GEMMA_3, (4, 1)),
    ("mistral.rs", "gemma3_text", None, {**GEMMA_3, "rope_parameters": NESTED}, (1, 1)),
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
        ("mistral.rs", "llama", YARN, "refused", "its struct for this model has no such scheme"),
        ("mistral.rs", "llama", {"rope_type": "default"}, "refused", "missing field `factor`"),
        ("mistral.rs", "llama", {"type": "linear", "factor": 4.0}, "refused", "missing field `rope_type`"),
        ("mistral.rs", "gpt_oss", YARN, "refused", "it needs the keys layer_types"),
        ("mistral.rs", "qwen2_moe", YARN, "unknown", "if it has one, was not looked up"),
    ],
)
def test_what_a_trainer_does_not_run(trainer: str, model_type: str, scaling: Any, state: str, reason: str) -> None:
    found = answer(trainer, model_type, scaling)
    assert found[0] == state
    assert reason in found[1]


def test_gemma_4_in_megatron() -> None:
    """Megatron-Bridge#4916: the class in modeling_gemma4.py divides the exponents by the whole head (v0.6.0)."""
    keys = {"sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}
    keys["full_attention"] = {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25}
    gemma = {"model_type": "gemma4_text", "head_dim": 64, "global_head_dim": 128, "num_hidden_layers": 2}
    gemma |= {"layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 8192}
    local, full = from_config({**gemma, "rope_parameters": keys}, engine="megatron").layers
    assert local is not None
    assert full is not None
    assert local.inv_freq == pytest.approx([1e4 ** (-i / 32) for i in range(32)], rel=1e-6)
    assert full.inv_freq == pytest.approx([1e6 ** (-i / 64) for i in range(16)] + [0.0] * 48, rel=1e-6)


def test_gemma_3_with_images_in_megatron() -> None:
    """gemma3_vl_bridge.py has the lines about rotation of gemma3_bridge.py, whose models were run (v0.6.0)."""
    text = {"model_type": "gemma3_text", "head_dim": 64, "num_hidden_layers": 6, "sliding_window_pattern": 6}
    text |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "max_position_embeddings": 131_072}
    for scaling, state in ((None, "same"), ({"rope_type": "linear", "factor": 8.0}, "same"), (BETAS, "differs")):
        config = {"model_type": "gemma3", "text_config": {**text, "rope_scaling": scaling}}
        found = diff.engines(config, names=("transformers", "megatron"))
        assert found.facts["states"]["Megatron-Bridge"] == state
        assert all(row["engines"][1]["judged"] for row in found.facts["ropes"])
        alone = diff.engines(config["text_config"], names=("transformers", "megatron"))
        ropes = [[row["at"] for row in one.facts["ropes"]] for one in (found, alone)]
        assert ropes[0] == ropes[1]


def test_a_slice_of_the_head_in_megatron() -> None:
    """The class of YaRN rotates the whole head, but DeepSeek-V4 the last 64 of 512 channels."""
    v4 = {"model_type": "deepseek_v4", "head_dim": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 2}
    v4 |= {"compress_ratios": [4, 128], "compress_rope_theta": 1.6e5, "index_head_dim": 128, "rope_theta": 1e4}
    v4 |= {"max_position_embeddings": 131_072, "rope_scaling": BETAS}
    [*_, row] = diff.engines(v4, names=("transformers", "megatron")).facts["ropes"]
    assert row["engines"][1]["refused"] == "how it rotates the last channels of a head was not recorded"


def test_megatron_is_named_by_the_bridge_that_reads_configs() -> None:
    """Megatron-LM reads none: its scripts took `--rope-scaling-factor` and trained with 8 (its issue 6305)."""
    for name in ("megatron", "Megatron-Bridge"):
        assert "Megatron-Bridge 0.6.2" in diff.engines(LLAMA, names=("transformers", name)).text()


@pytest.mark.parametrize(
    ("model_type", "more", "reason"),
    [
        ("llama", {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6}}, "missing field `rope_theta`"),
        ("mistral", {"rope_parameters": {**YARN, "rope_theta": 1e6}}, "it needs beta_fast, beta_slow in the scaling"),
        ("deepseek_v3", {**DEEPSEEK, "rope_scaling": {**BETAS, "type": "yarn"}}, "it needs mscale, mscale_all_dim in"),
        ("deepseek_v3", {**DEEPSEEK, "rope_scaling": BETAS}, "untagged enum DeepSeekV2RopeScaling"),
    ],
)
def test_what_the_structs_of_mistral_rs_need(model_type: str, more: dict[str, Any], reason: str) -> None:
    state, said = answer("mistral.rs", model_type, None, **more)
    assert (state, reason in said) == ("refused", True), said


def test_mistral_rs_rounds_the_ramp_of_gpt_oss_only_if_the_config_says_so() -> None:
    config = {**LLAMA, "model_type": "gpt_oss", "layer_types": ["full_attention"] * 2}
    for stated in ({}, {"truncate": False}, {"truncate": True}):
        found = diff.engines({**config, "rope_scaling": {**BETAS, **stated, "mscale": 0.5}}, names=("mistral.rs",))
        inv_freq, factor = numbers(found, "mistral.rs")
        wanted = oracle.yarn(1e6, 128, 4.0, 32_768, truncate=stated.get("truncate", False))
        np.testing.assert_allclose(inv_freq, [float(w) for w in wanted], rtol=1e-12)
        assert factor == pytest.approx(M)


@pytest.mark.parametrize("mscales", [{}, {"short_mscale": 1.5, "long_mscale": 2.0}])
def test_mistral_rs_uses_the_long_list_of_phi_from_the_trained_length_on(mscales: dict[str, float]) -> None:
    lists = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [16.0] * 64, **mscales}
    config = {**LLAMA, "model_type": "phi3", "original_max_position_embeddings": 4096, "rope_scaling": lists}
    for length, divisor in ((4095, 1), (4096, 16), (4097, 16)):
        inv_freq, factor = numbers(diff.engines(config, names=("mistral.rs",), length=length), "mistral.rs")
        assert inv_freq[0] == pytest.approx(1 / divisor)
        assert factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))


def test_mistral_rs_reads_half_of_the_parameters_of_gemma_4() -> None:
    """It reads the base of the sliding layers, and of the others only the share of the pairs that rotate."""
    full = {"rope_type": "proportional", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    nested = {"sliding_attention": {"rope_theta": 2e4}, "full_attention": full}
    types = ["sliding_attention", "full_attention"]
    config = {**LLAMA, "model_type": "gemma4_text", "layer_types": types, "rope_parameters": nested}
    del config["rope_theta"]
    found = diff.engines(config, names=("mistral.rs",))
    (sliding, _), (whole, _) = (numbers(found, "mistral.rs", row) for row in range(2))
    head = 2 * len(whole)
    np.testing.assert_allclose(sliding, [2e4 ** (-i / 64) for i in range(64)], rtol=1e-12)
    np.testing.assert_allclose(
        whole, [1e6 ** (-2 * i / head) if i < head // 4 else 0 for i in range(head // 2)], rtol=1e-12
    )
