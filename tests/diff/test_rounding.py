"""The verdict about two engines: bitwise equal, equal up to the rounding of a step, or different from a position on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ropewalk import Rope, YaRN, diff
from ropewalk.engines import ENGINES, TRAINERS, Answer, ConfigRope, Rounding
from ropewalk.schemes import PerPair
from ropewalk.tools.diff.rope_difference import difference
from ropewalk.tools.diff.verdict import judge

ROUNDINGS = Path(__file__).parents[1] / "golden" / "engine_rules"
ROWS = json.loads((ROUNDINGS / "rounding_of_transformers.json").read_text())["rows"]
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768, "attention_factor": 1.0}
BETAS = {**YARN, "beta_fast": 32.0, "beta_slow": 1.0}
ROPE = Rope(128, 10_000.0, "half")


def profile(engine: str, model_type: str, rope: Rope = ROPE) -> Rounding:
    found = ENGINES[engine].apply_rule(ConfigRope(rope, model_type=model_type)).rounding
    assert found is not None
    return found


def test_the_profiles_of_transformers_give_the_bits_of_its_models() -> None:
    assert len(ROWS) == 172
    for row in ROWS:
        steps = {name: "the model's" if row[name] == "bfloat16" else row[name] for name in ("table", "rotation")}
        found = profile("transformers", row["model_type"])
        assert {"table": found.table, "rotation": found.rotation, "evidence": found.evidence} == {
            **steps,
            "evidence": "run",
        }
    assert profile("transformers", "deepseek_v2").evidence == "read"


@pytest.mark.parametrize(("name", "count"), [("megatron", 19), ("automodel", 14)])
def test_the_profiles_of_trainers_give_the_bits_of_their_models(name: str, count: int) -> None:
    rows = json.loads((ROUNDINGS / f"rounding_of_{name}.json").read_text())["rows"]
    assert len(rows) == count
    for row in rows:
        found = TRAINERS[name].apply_rule(ConfigRope(ROPE, model_type=row["model_type"])).rounding
        assert found is not None
        steps = [step.replace("the model's", "bfloat16") for step in (found.table, found.rotation)]
        assert (*steps, found.evidence) == (row["table"], row["rotation"], "run"), row


def test_megatron_rotates_llama_with_a_fused_kernel_unless_it_is_scaled_by_yarn() -> None:
    llama, yarn = (diff.engines({**LLAMA, **more}, names=("megatron",)) for more in ({}, {"rope_scaling": BETAS}))
    [[plain], [scaled]] = ([rope["engines"][0] for rope in found.facts["ropes"]] for found in (llama, yarn))
    assert (plain["rounding"]["table"], plain["rounding"]["evidence"]) == ("float32", "read")
    assert (scaled["rounding"]["table"], scaled["rounding"]["evidence"]) == ("the model's", "run")


def test_the_table_of_sglang_depends_on_the_head_size() -> None:
    assert profile("sglang", "llama").table == "float32"
    assert profile("sglang", "llama", Rope(96, 10_000.0, "half")).table == "the model's"
    latent = Rope(192, 10_000.0, "interleaved", rotary_dim=64, rotary_offset=128)
    assert profile("sglang", "deepseek_v3", latent).table == "float32"  # its head has 64 channels


def test_sglang_rotates_gemma_3_with_a_table_in_the_dtype_of_the_model() -> None:
    """Its `Gemma3RotaryEmbedding` casts cos and sin to the dtype of x. `get_rope` builds a table in float32."""
    gemma = {**LLAMA, "model_type": "gemma3_text", "head_dim": 256, "sliding_window": 512}
    rows = diff.engines(gemma, names=("sglang",)).facts["ropes"]
    found = [(row["engines"][0]["rounding"]["table"], row["engines"][0]["rounding"]["rotation"]) for row in rows]
    assert {*found} == {("the model's", "float32")}


def test_every_profile_names_its_source() -> None:
    for engine in {**ENGINES, **TRAINERS}.values():
        found = engine.apply_rule(ConfigRope(ROPE, model_type="llama")).rounding
        assert found is not None
        assert found.source, engine.name


def verdict(a: Rounding, b: Rounding, second: Rope = ROPE, longest: int = 131_072, **answer: Any) -> dict[str, Any]:
    answers = [Answer(ROPE, evidence="run", rounding=a), Answer(second, rounding=b, **{"evidence": "run", **answer})]
    return judge(*answers, ROPE, second, difference(ROPE, second, longest), longest)


RUN = Rounding(evidence="run")


def test_bitwise_equal_is_only_said_of_what_was_recorded() -> None:
    assert verdict(RUN, RUN) == {"word": "bitwise equal", "steps": [], "from_position": None}
    assert verdict(RUN, replace(RUN, evidence="read"))["word"] == "same operations"
    assert verdict(RUN, RUN, evidence="read")["word"] == "same operations"


@pytest.mark.parametrize(
    ("changed", "steps"),
    [
        ({"inv_freq": "float64"}, ["inv_freq"]),
        ({"computed": "float32 exp2"}, ["inv_freq"]),
        ({"where": "CPU"}, ["inv_freq"]),
        ({"angle": "float64"}, ["angles"]),
        ({"table": "float32"}, ["cos and sin"]),
        ({"rotation": "float32"}, ["the rotation"]),
        ({"is_complex": True}, ["cos and sin", "the rotation"]),
        ({"factor": "q and k"}, []),  # the attention factor is 1
        ({"notes": "Nothing.", "source": "elsewhere.py"}, []),
    ],
)
def test_the_steps_that_are_rounded_differently(changed: dict[str, Any], steps: list[str]) -> None:
    found = verdict(RUN, replace(RUN, **changed))
    assert (found["word"], found["steps"]) == ("equal up to rounding" if steps else "bitwise equal", steps)


def test_the_factor_counts_if_it_is_not_1() -> None:
    rope = replace(ROPE, scaling=YaRN(factor=4.0, original_max_position_embeddings=32_768))
    answers = [Answer(rope, evidence="run", rounding=one) for one in (RUN, replace(RUN, factor="q and k"))]
    assert judge(*answers, rope, rope, difference(rope, rope, 8), 8)["steps"] == ["cos and sin"]


def test_the_first_position_at_which_a_pair_differs() -> None:
    """Pair 0 turns by 1 radian per position, and by 2⁻¹² less if the base is that much larger for it alone."""
    slower = Rope(2, 10_000.0, "half", scaling=None)
    assert slower.inv_freq.tolist() == [1.0]
    other = replace(slower, scaling=PerPair(factors=(1 + 2**-12,)))
    in_float32 = replace(RUN, table="float32", rotation="float32")
    answers = [Answer(slower, rounding=in_float32), Answer(other, rounding=in_float32)]
    found = judge(*answers, slower, other, difference(slower, other, 4096), 4096)
    # Both results are rounded by 2⁻⁹, and both angles by 2⁻²² per position.
    speed = 1 - 1 / (1 + 2**-12)
    expected = next(p for p in range(4096) if 2 * math.sin(p * speed / 2) > 2 * 2**-9 + p * (2 - speed) * 2**-22)
    assert (found["word"], found["from_position"], expected) == ("different", 17, 17)
    barely = replace(slower, scaling=PerPair(factors=(1 + 2**-28,)))
    answers[1] = Answer(barely, rounding=in_float32)
    found = judge(*answers, slower, barely, difference(slower, barely, 4096), 4096)
    assert (found["word"], found["from_position"]) == ("different", None)


def test_another_attention_factor_differs_from_position_0_on() -> None:
    found = diff.engines({**LLAMA, "rope_scaling": YARN}, names=("transformers", "sglang"))
    assert found.facts["ropes"][0]["at"][0]["engines"]["SGLang"]["verdict"]["from_position"] == 0
    assert "SGLang: different from position 0 on by 1.296 times." in found.text()


def test_reasons_are_shown_only_for_what_differs() -> None:
    """They are those of the engines that differ and of the one that they are compared with."""
    config = {**LLAMA, "rope_scaling": YARN}
    for names, first in ((("transformers", "vllm", "sglang"), "SGLang"), (("mlx-lm", "vllm"), "mlx-lm")):
        assert diff.engines(config, names=names).text().endswith(f"\n  why:\n    {first}: It ignores attention_factor.")
    for text in (diff.engines(LLAMA).text(), diff.engines(config, names=("sglang", "mlx-lm")).text()):
        assert not any(words in text for words in ("why:", "what each engine does", "how the engines round"))


def test_no_pair_of_engines_with_different_roundings_is_bitwise_equal() -> None:
    found = diff.engines(LLAMA, names=("transformers", "vllm"))
    assert found.verdict == "agree"
    assert not found.bitwise
    assert "vLLM: equal up to the rounding of inv_freq and the rotation." in found.text()
    alone = diff.engines(LLAMA, names=("transformers",))
    assert alone.verdict == "agree"
    assert alone.bitwise
