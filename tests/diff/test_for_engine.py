"""What an engine needs to rotate as a config says (`diff.for_engine`, `ropewalk explain --for`)."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from ropewalk import Rope, RopeError, diff, schemes
from ropewalk.engines import ENGINES, ConfigRope, Flags
from ropewalk.engines._override import Override
from ropewalk.tools.cli import main

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "engine_commands.json").read_text())
ROWS = {(row["engine"], row["case"]): row for row in GOLDEN["rows"]}
FLAT: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 131_072,
    "rope_theta": 1e6,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
PLAIN = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
RAMP = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


def with_yarn(**changes: Any) -> dict[str, Any]:
    return {**FLAT, "rope_scaling": {**YARN, **changes}}


def keys(command: str) -> dict[str, Any]:
    """Return the JSON at the end of a command, as a shell passes it."""
    return json.loads(shlex.split(command)[-1])


def test_nothing_is_needed() -> None:
    plain = diff.for_engine(FLAT, "vllm")
    assert (plain.verdict, plain.facts["command"], plain.facts["differences"]) == ("nothing needed", None, [])
    scaled = diff.for_engine(with_yarn(), "vLLM")
    assert (scaled.verdict, scaled.facts["command"]) == ("nothing needed", None)
    assert "The rope needs nothing: vLLM 0.33.0 rotates as the config says, up to 131,072 tokens." in scaled.text()
    assert scaled.facts["notes"] == []
    # Its own code refuses more than this key, as recorded for `extend` ("length of a scaled config alone").
    short = diff.for_engine({**with_yarn(), "max_position_embeddings": 32_768}, "vllm")
    assert "It may accept fewer tokens, unless it gets what `ropewalk extend --to 131072`" in short.facts["notes"][0]
    assert "No engine was run." in scaled.text()


def test_sglang_reads_the_attention_factor_from_another_key() -> None:
    """1 / (0.1 ln 4 + 1), by which SGLang multiplies the magnitude that it computes."""
    found = diff.for_engine(with_yarn(attention_factor=1.0), "sglang")
    assert found.verdict == "command"
    assert "the attention factor is 1.13863 and not 1" in found.facts["differences"][0]
    parameters = keys(found.facts["command"])["rope_parameters"]
    assert parameters.pop("attn_factor") == pytest.approx(0.8782488562869419, rel=1e-12)
    assert parameters == {**PLAIN, **RAMP}


def test_a_nested_text_model() -> None:
    text = {**FLAT, "rope_scaling": {"type": "linear", "factor": 4}}
    config = {"model_type": "llava", "text_config": text, "vision_config": {}}
    assert list(keys(diff.for_engine(config, "vllm").facts["command"])) == ["text_config"]
    override = ENGINES["transformers"].override
    assert isinstance(override, Override)
    assert override.write("m", {"text_config": {"rope_parameters": {"rope_theta": 1e6, "truncate": True}}}, None) == (
        "AutoModelForMultimodalLM.from_pretrained('m', text_config={'rope_parameters': {'rope_theta': 1000000.0, "
        "'truncate': True}})"
    )


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_integer_that_must_be_a_float(engine: str) -> None:
    found = diff.for_engine({**FLAT, "rope_scaling": {"type": "linear", "factor": 4}}, engine)
    assert found.verdict == "command"
    assert '"factor": 4.0' in found.facts["command"]


def test_flags_of_llama_cpp() -> None:
    found = diff.for_engine(with_yarn(beta_fast=64.0), "llama.cpp")
    assert (found.verdict, found.facts["command"]) == (
        "command",
        "llama-server -m MODEL.gguf --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 32768 --yarn-beta-fast 64 "
        "--yarn-beta-slow 1 --rope-freq-base 1000000",
    )


@pytest.mark.parametrize(
    ("engine", "config", "verdict", "why"),
    [
        # --yarn-attn-factor is overwritten, and no flag states the factors of llama3.
        ("llama.cpp", with_yarn(attention_factor=1.0), "cannot", "the attention factor is 1.13863 and not 1"),
        ("llama.cpp", {**FLAT, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "cannot", "pairs differ"),
        ("vllm", {**FLAT, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "cannot", "It never scales"),
        # transformers, which vLLM loads the config with, refuses it before an override is applied
        ("vllm", {**with_yarn(), "model_type": "phi3"}, "cannot", "it does not run this config: KeyError"),
        ("vllm", {**FLAT, "model_type": "internlm"}, "cannot", "it has no model internlm"),
    ],
)
def test_what_no_command_cures(engine: str, config: dict[str, Any], verdict: str, why: str) -> None:
    found = diff.for_engine(config, engine)
    assert (found.verdict, found.facts["command"]) == (verdict, None)
    assert why in " ".join(found.facts["differences"])
    assert "No argument that was looked up makes it do so." in found.text().replace("\n", " ")


def test_a_model_that_was_not_recorded() -> None:
    found = diff.for_engine({**FLAT, "model_type": "fern"}, "vllm", pairing="half")
    assert (found.verdict, found.facts["command"]) == ("not judged", None)
    assert found.facts["differences"] == ["layers 0-3 of 4: what its file for fern reads was not recorded."]


YARN_8K = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("scaling", "longest", "said"),
    [
        (None, 32_768, "its config states 32,768."),
        (YARN_8K, 32_768, "it was trained for 8,192 (rope_scaling.original_max_position_embeddings), and its scaling"),
        ({"type": "linear", "factor": 4.0}, 131_072, "its config states 32,768."),
        ({"type": "dynamic", "factor": 4.0}, 131_072, "it was trained for 32,768 (in its config), and its scaling"),
    ],
)
def test_a_length_that_the_model_was_not_trained_for(scaling: Any, longest: int, said: str) -> None:
    """`longest` is the greatest length that the model may have been trained or scaled for."""
    config = {**FLAT, "max_position_embeddings": 32_768, "rope_scaling": scaling}
    assert diff.for_engine(config, "transformers", length=longest).facts["too_long"] is None
    found = diff.for_engine(config, "transformers", length=longest + 1)
    assert (found.verdict, "needs nothing" in found.text()) == ("not trained", False)
    assert f"The model was not trained for {longest + 1:,} tokens: {said}" in found.text().replace("\n", " ")


def test_a_config_that_an_override_would_break() -> None:
    """SGLang reads the fraction of Phi-4-mini at the top only, and agrees with the config as it was published."""
    lists = {"short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
    scaling = {"type": "longrope", "original_max_position_embeddings": 4096, **lists}
    config = {**FLAT, "model_type": "phi3", "partial_rotary_factor": 0.75, "rope_scaling": scaling}
    assert diff.for_engine(config, "sglang").verdict == "nothing needed"


@pytest.mark.parametrize("engine", ["vLLM", "SGLang", "llama.cpp"])
def test_the_engines_have_these_arguments(engine: str) -> None:
    """Every argument in a command is in the recorded list of the engine's own parser."""
    whole_number = {**FLAT, "rope_scaling": {"type": "linear", "factor": 4}}
    config = with_yarn(beta_fast=64.0) if engine == "llama.cpp" else whole_number
    arguments = set(re.findall(r"--[a-z-]+", diff.for_engine(config, engine).facts["command"])) - {"--model-path"}
    assert arguments
    assert arguments <= set(ROWS[engine, "arguments"]["arguments"])
    assert "--rope-scaling" not in ROWS["vLLM", "arguments"]["arguments"]


@pytest.mark.parametrize("engine", ["transformers", "vLLM", "SGLang"])
@pytest.mark.parametrize("case", ["no scaling", "other scaling", "nested"])
def test_what_an_override_does(engine: str, case: str) -> None:
    """The engine's own code was run on the config."""
    row = ROWS[engine, case]
    text, new, depth = row["config"], row["override"], 0
    if case == "nested":
        text, new, depth = text["text_config"], new["text_config"], 1
    old = {"rope_theta": text["rope_theta"], "rope_type": "default", **text.get("rope_scaling", {})}
    if "type" in old:
        old["rope_type"] = old["type"]
    override = ENGINES[engine.lower()].override
    assert isinstance(override, Override)
    assert override.applied(old, new["rope_parameters"], depth) == row["rope_parameters"]


@pytest.mark.parametrize(
    ("case", "scheme"),
    [
        ("none", None),
        ("linear", schemes.Linear(4.0)),
        ("yarn", schemes.YaRN(4.0, 8192, beta_fast=64.0)),
    ],
)
def test_what_llama_cpp_computes(case: str, scheme: schemes.Scaling | None) -> None:
    """llama.cpp's own lines were run with the flags. They compute in float32."""
    row = ROWS["llama.cpp", case]
    rope = Rope(128, 1e6, "half", scaling=scheme)
    override = ENGINES["llama.cpp"].override
    assert isinstance(override, Flags)
    written = override.write(ConfigRope(rope, model_type="llama"), rope, rope)
    assert written is not None
    assert written[0].split() == row["flags"]
    # The angle of a pair is that of the previous one times a rounded ratio, so two errors grow with each of 64 pairs.
    np.testing.assert_allclose(written[1].inv_freq, row["inv_freq"], rtol=2 * 64 * 2**-24)
    assert written[1].attention_factor == pytest.approx(row["attention_factor"], rel=1e-6)


def test_llama_cpp_overwrites_the_attention_factor_of_yarn() -> None:
    row = ROWS["llama.cpp", "attention factor"]
    assert row["flags"][6:8] == ["--yarn-attn-factor", "0.5"]
    assert row["attention_factor"] == ROWS["llama.cpp", "yarn"]["attention_factor"]


def test_notes_about_an_engine_that_needs_nothing() -> None:
    """SGLang follows a LongRoPE, except at one position."""
    phi = {**FLAT, "model_type": "phi3", "original_max_position_embeddings": 4096, "rope_theta": 10_000.0}
    scaling = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [16.0] * 64}
    found = diff.for_engine({**phi, "rope_scaling": scaling}, "sglang")
    assert found.verdict == "nothing needed"
    assert "so that token is not rotated." in " ".join(found.facts["notes"])
    assert "so that token is not rotated." in " ".join(found.text().split())


def test_refusals() -> None:
    for name in ("mlx-lm", "vlm"):  # mlx-lm has no known arguments
        with pytest.raises(
            RopeError, match=r"engine must be one of 'transformers', 'vllm', 'sglang', 'llama\.cpp', got"
        ):
            diff.for_engine(FLAT, name)


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(with_yarn(attention_factor=1.0)))
    shown = CliRunner().invoke(main, ["explain", str(path), "--for", "sglang"])
    assert shown.exit_code == 0
    assert f"{path} (model_type qwen2)" in shown.output
    assert "python -m sglang.launch_server --model-path MODEL --json-model-override-args '{" in shown.output
    facts = json.loads(CliRunner().invoke(main, ["explain", str(path), "--for", "vllm", "--json"]).output)
    assert facts["verdict"] == "nothing needed"
    fern = tmp_path / "fern.json"
    fern.write_text(json.dumps({**FLAT, "model_type": "fern"}))
    assert CliRunner().invoke(main, ["explain", str(fern), "--for", "vllm", "--pairing", "half"]).exit_code == 2
    piped = CliRunner().invoke(main, ["explain", str(path), "--for", "vllm", "--like", "llama"])
    assert (piped.exit_code, "--like has no effect with --for. Drop one of them." in piped.output) == (2, True)
