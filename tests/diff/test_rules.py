"""Compare the rules of each engine with numbers that its own code computed for small configs (golden files)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from each import each
from ropewalk import from_config
from ropewalk.configs.engine_ropes import ropes_for_engines
from ropewalk.engines import ENGINES, MORE_ENGINES

FOLDER = Path(__file__).parents[1] / "golden" / "engine_rules"
FILES = {
    "transformers": "transformers",
    "vllm": "vllm",
    "sglang": "sglang",
    "mlx-lm": "mlx_lm",
    "exllamav3": "exllamav3",
    "llama.cpp": "llama_cpp",
}
MORE = {"onnxruntime-genai": "onnxruntime_genai", "lmdeploy": "lmdeploy"}


def golden(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / f"rules_of_{({**FILES, **MORE})[name]}.json").read_text())
    return loaded


@pytest.mark.parametrize("name", [*FILES, *MORE])
def test_rules_are_those_of_the_running_engine(name: str) -> None:
    """A rule gives the frequencies within float32 rounding, the attention factor, and the refusals of the engine."""
    found = golden(name)
    engine = {**ENGINES, **MORE_ENGINES}[name]
    peer = found["peer"]
    assert peer["version"] == engine.version if "version" in peer else peer["commit"].startswith(engine.version)
    seen = set()

    def check(row: dict[str, Any]) -> None:
        # In the golden rows of Gemma, the rope is that of the last kind of layer.
        [*_, (config_rope, _)] = ropes_for_engines(row["config"])[1]
        answer = engine.apply_rule(config_rope)
        seen.add("default" if config_rope.rope.scaling is None else config_rope.rope.scaling.rope_type)
        rope = answer.at(row["sequence"], row["setting"])
        if "refused" in row:
            assert rope is None
            assert answer.refusal
            return
        assert rope is not None, answer.refusal
        # Powers in float32 have an error of 2.4e-7, and of 5.3e-7 in MLX. YaRN's weight of the unscaled frequency is
        # rounded to 2⁻²⁴, and this error is `factor` times as large relative to the scaled frequency.
        factor = getattr(config_rope.rope.scaling, "factor", None) or 1.0
        np.testing.assert_allclose(rope.inv_freq, row["inv_freq"], rtol=6e-7 + 2**-24 * factor, atol=0)
        assert rope.attention_factor == pytest.approx(row["attention_factor"], rel=2e-7)

    each(((row["case"], row) for row in found["rows"]), check)
    run = {scheme for scheme, rule in engine.rules.items() if rule.evidence == "run"}
    assert run <= seen, "a rule says that it was run, and no golden value holds it"


def test_warnings_of_yarn_about_engines() -> None:
    """The warnings of YaRN about mscale agree with the same recorded numbers."""
    rows = {
        name: {row["case"]: row["attention_factor"] for row in golden(name)["rows"] if "inv_freq" in row}
        for name in FILES
    }
    alone, zero = "yarn, mscale 0.707", "yarn, mscale 0.707, mscale_all_dim 0"
    both = "yarn, mscale = mscale_all_dim = 1"
    assert [name for name in FILES if rows[name][alone] != rows[name]["yarn, nothing"]] == ["mlx-lm"]
    assert [name for name in FILES if rows[name][zero] != rows[name][alone]] == ["sglang"]
    assert {name for name in FILES if rows[name][both] != 1.0} == {"exllamav3", "llama.cpp"}
    cases = {row["case"]: row["config"] for row in golden("vllm")["rows"]}
    for case in (alone, zero):
        assert "mlx-lm uses one alone and SGLang a 0." in " ".join(from_config(cases[case]).warnings)
    assert "so the attention factor is 1. Not every engine computes this" in " ".join(from_config(cases[both]).warnings)


KEYS = {
    "yarn, attention_factor 1.2": {"attention_factor"},
    "yarn, attn_factor 0.5": {"attn_factor"},
    "yarn, extrapolation_factor 0.5": {"extrapolation_factor"},
    "yarn, truncate false": {"truncate"},
    "yarn, betas 16 and 2": {"beta_fast", "beta_slow"},
    "longrope, attention_factor": {"attention_factor"},
    "longrope, mscales, long": {"short_mscale", "long_mscale"},
    "proportional, factor 2": {"factor"},
}
PLAIN = {"yarn": "yarn, nothing", "long": "longrope, 131072 of 131072", "prop": "proportional"}


@pytest.mark.parametrize("name", FILES)
def test_exactly_the_keys_without_effect_are_noted_as_ignored(name: str) -> None:
    """A key that changes no number is noted as ignored, except by the rules that have other notes about it."""
    rows = {row["case"]: row for row in golden(name)["rows"]}
    for case, keys in KEYS.items():
        row, plain = rows[case], rows[PLAIN[case[:4]]]
        [*_, (config_rope, _)] = ropes_for_engines(row["config"])[1]
        notes = " ".join(ENGINES[name].apply_rule(config_rope).notes)
        said = all(key in notes for key in keys) and "ignores" in notes
        same = (row["attention_factor"], row["inv_freq"]) == (plain["attention_factor"], plain["inv_freq"])
        if row["config"]["model_type"] == plain["config"]["model_type"]:
            assert said == same, (case, notes)
