"""vLLM on the CPU with rotation by ropewalk gives the same greedy tokens in float32 as transformers and as vLLM alone.

Before a release, run `tests/engines/environment.sh FOLDER`, then `FOLDER/bin/python -m pytest tests/engines -v`.
"""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

HERE = Path(__file__).parent
TOKENS = 32
# An installed ropewalk without its entry point.
HIDDEN = """
import importlib.metadata as metadata
found = metadata.entry_points
def entry_points(**asked):
    return metadata.EntryPoints(e for e in found(**asked) if e.name != "ropewalk") if asked else found()
metadata.entry_points = entry_points
"""
LENGTHS = (5, 17, 64, 300)
SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "short_factor": [1.0 + 0.01 * i for i in range(32)],
    "long_factor": [1.0 + 0.1 * i for i in range(32)],
}
GEMMA3 = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# The differences of each model from SMALL, and its expected ropes.
MODELS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama": ("LlamaForCausalLM", {}, ["Rope(head_dim=64, base=10000.0, pairing='half')"]),
    "llama3": (
        "LlamaForCausalLM",
        {"rope_parameters": LLAMA3},
        [
            "Rope(head_dim=64, base=500000.0, pairing='half', scaling=Llama3(factor=8.0, low_freq_factor=1.0, "
            "high_freq_factor=4.0, original_max_position_embeddings=128))"
        ],
    ),
    "linear": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        ["Rope(head_dim=64, base=10000.0, pairing='half', scaling=Linear(factor=4.0))"],
    ),
    "yarn": ("Qwen3ForCausalLM", {"rope_parameters": YARN}, ["scaling=YaRN(factor=4.0, original"]),
    "dynamic": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0},
            "max_position_embeddings": 256,
        },
        ["Rope(head_dim=64, base=10000.0, pairing='half', scaling=NTK(alpha=9.0))"],
    ),
    "ernie": ("Ernie4_5ForCausalLM", {}, ["Rope(head_dim=64, base=500000.0, pairing='interleaved')"]),
    "cohere": (
        "CohereForCausalLM",
        {"logit_scale": 1.0, "tie_word_embeddings": True},
        ["Rope(head_dim=64, base=500000.0, pairing='interleaved')"],
    ),
    "stablelm": (
        "StableLmForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
        ["Rope(head_dim=64, base=10000.0, pairing='half', rotary_dim=16)"],
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {"rope_parameters": GEMMA3, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2},
        [
            "Rope(head_dim=64, base=10000.0, pairing='half')",
            "Rope(head_dim=64, base=1000000.0, pairing='half', scaling=Linear(factor=8.0))",
        ],
    ),
    "phi3": (
        "Phi3ForCausalLM",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 2},
        ["PerPair(factors=(1.0, 1.1, 1.2,"],
    ),
    "deepseek": (
        "DeepseekV2ForCausalLM",
        {
            "first_k_dense_replace": 4,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
            "head_dim": 64,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
        },
        ["pairing='interleaved', scaling=YaRN("],
    ),
}


@functools.cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="ropewalk-engines-"))


@functools.cache
def model(name: str) -> tuple[Path, Any]:
    """Build and save a small model with random weights. Return its folder and the model."""
    architecture, changed, _ = MODELS[name]
    torch.manual_seed(0)
    cls = getattr(transformers, architecture)
    made = cls(cls.config_class(**{**SMALL, **changed})).eval()
    path = folder() / name
    made.save_pretrained(path)
    return path, made


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    drawn = random.Random(seed)
    return [[drawn.randrange(3, 512) for _ in range(n)] for n in lengths]


def by_transformers(name: str, asked: list[list[int]], tokens: int = TOKENS) -> list[list[int]]:
    _, made = model(name)
    done = []
    for each in asked:
        ids = torch.tensor([each])
        made_ids = made.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=-1)
        done.append(made_ids[0, len(each) :].tolist())
    return done


def engine(
    name: str, rounds: list[list[list[int]]], *, on: bool = True, env: dict[str, str] | None = None, **llm: Any
) -> dict[str, Any]:
    """Run `engine.py` in a new process, and return the JSON that it wrote."""
    path, _ = model(name)
    settings = {
        "VLLM_PLUGINS": "ropewalk" if on else "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(folder() / "cache"),
        **(env or {}),
    }
    options: dict[str, Any] = {"max_model_len": 512, **llm}
    if settings["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
        options["distributed_executor_backend"] = "uni"
    out = folder() / "answer.json"
    out.unlink(missing_ok=True)
    asked = json.dumps({"llm": options, "prompts": rounds, "tokens": TOKENS})
    command = [sys.executable, str(HERE / "engine.py"), str(path), asked, str(out)]
    run = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    answer: dict[str, Any] = json.loads(out.read_text())
    print(
        f"\n{name} {llm}: rotations in each worker {calls(answer) if answer['workers'] is not None else 'none'}"
    )  # pytest -s
    return answer


def calls(answer: dict[str, Any]) -> list[int]:
    """Return the number of rotations outside of compiled code, for each worker."""
    return [sum(layer["calls"] for layer in worker["layers"]) for worker in answer["workers"]]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "dynamic"])
def test_same_tokens_as_transformers(name: str) -> None:
    """Each kind of layer is run, without compilation."""
    asked = prompts(*LENGTHS)
    answer = engine(name, [asked], enforce_eager=True)
    [worker] = answer["workers"]
    assert worker["left"] == []
    wanted = MODELS[name][2]
    found = sorted(layer["rope"] for layer in worker["layers"])
    assert len(found) == len(wanted)
    assert all(each in rope for each, rope in zip(wanted, found, strict=True)), found
    assert all(layer["calls"] > 0 for layer in worker["layers"])
    # vLLM chooses the long list of LongRoPE when the engine starts, and transformers in each call.
    tokens = engine(name, [asked], on=False, enforce_eager=True)["tokens"] if name == "phi3" else None
    tokens = tokens or by_transformers(name, asked)
    assert all(len(set(each)) > 8 for each in tokens)  # the generated tokens depend on positions
    assert answer["tokens"] == tokens


def test_one_rotation_of_each_layer_in_each_pass() -> None:
    """There is a pass for the prompt and one for each further token, in 4 layers, and the passes of the warm-up."""
    answer = engine("llama", [prompts(17)], enforce_eager=True)
    [count] = calls(answer)
    assert count % 4 == 0
    assert TOKENS * 4 <= count <= (TOKENS + 4) * 4


def test_off_unless_asked() -> None:
    asked = prompts(*LENGTHS)
    answer = engine("llama", [asked], on=False, enforce_eager=True)
    assert answer["workers"] is None
    assert answer["tokens"] == by_transformers("llama", asked)


def test_three_processes() -> None:
    asked = prompts(*LENGTHS)
    answer = engine("llama", [asked], env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, enforce_eager=True)
    assert calls(answer)[0] > 0
    assert answer["tokens"] == by_transformers("llama", asked)


def test_tensor_parallel() -> None:
    asked = prompts(*LENGTHS)
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    answer = engine("llama", [asked], env=env, enforce_eager=True, tensor_parallel_size=2)
    assert len(calls(answer)) == 2
    assert min(calls(answer)) > 0
    assert answer["tokens"] == by_transformers("llama", asked)


def test_compiled_code_rotates_by_the_rope() -> None:
    """vLLM never scales dynamic NTK. With override the layer does, compiled or not, so the tokens differ."""
    asked = prompts(*LENGTHS)
    config = {"max_model_len": 512, "additional_config": {"ropewalk": {"override": True}}}
    eager = engine("dynamic", [asked], enforce_eager=True, **config)
    assert [layer["rope"] for layer in eager["workers"][0]["layers"]] == MODELS["dynamic"][2]
    assert calls(eager)[0] > 0
    compiled = engine("dynamic", [asked], **config)
    assert calls(compiled) == [0]
    without = engine("dynamic", [asked], enforce_eager=True, on=False, max_model_len=512)
    left = engine("dynamic", [asked], enforce_eager=True, max_model_len=512)
    assert compiled["tokens"] == eager["tokens"]
    assert without["tokens"] == left["tokens"]
    assert without["tokens"] != eager["tokens"]
    assert "inv_freq[" in left["workers"][0]["left"][0]["why"]


@pytest.mark.parametrize("name", ["llama", "gemma3", "ernie"])
def test_compiled(name: str) -> None:
    asked = prompts(*LENGTHS)
    answer = engine(name, [asked])
    assert calls(answer) == [0]  # the rotation is part of the compiled code
    assert answer["workers"][0]["left"] == []
    assert answer["tokens"] == by_transformers(name, asked)


def test_chunked_prefill() -> None:
    asked = prompts(*LENGTHS)
    llm = {"enable_chunked_prefill": True, "max_num_batched_tokens": 48}
    answer = engine("llama", [asked], enforce_eager=True, **llm)
    assert calls(answer)[0] > 0
    assert answer["tokens"] == by_transformers("llama", asked)


def test_prefix_caching() -> None:
    """The second prompt begins like the first, and the third equals the first."""
    [start, one, other] = prompts(200, 20, 30)
    rounds = [[start + one], [start + other], [start + one]]
    answer = engine("llama", rounds, enforce_eager=True, enable_prefix_caching=True)
    assert calls(answer)[0] > 0
    assert answer["tokens"] == by_transformers("llama", [start + one, start + other, start + one])


def test_preempted_requests() -> None:
    """There are more requests than fit into the cache, so some wait or are computed again from the beginning."""
    asked = prompts(120, 130, 140, 150)
    answer = engine("llama", [asked], enforce_eager=True, num_gpu_blocks_override=5, enable_prefix_caching=False)
    assert calls(answer)[0] > 0
    assert answer["tokens"] == by_transformers("llama", asked)


def test_the_compile_cache_knows_the_plugin() -> None:
    """Compiled graphs have different names with and without the plugin, if both runs use one cache.

    The graphs differ.

    vLLM 0.32 on the CPU compiles again if it finds a graph ("'function' object has no attribute 'finalize_loading'"),
    so the effect of a loaded graph cannot be tested here.
    """
    asked = prompts(*LENGTHS)
    root = folder() / "toggled"
    missing = folder() / "without"
    missing.mkdir(exist_ok=True)
    (missing / "sitecustomize.py").write_text(HIDDEN)
    kept: list[set[str]] = []
    for on in (False, True, False):
        env = {"VLLM_CACHE_ROOT": str(root), **({} if on else {"PYTHONPATH": str(missing)})}
        answer = engine("llama", [asked], env=env)
        assert (answer["workers"] is not None) == on
        assert answer["tokens"] == by_transformers("llama", asked)
        kept.append({path.name for path in (root / "torch_compile_cache" / "torch_aot_compile").glob("*")})
    assert len(kept[1]) == len(kept[0]) + 1
    assert kept[2] == kept[1]
