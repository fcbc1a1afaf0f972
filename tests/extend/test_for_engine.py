"""What an engine needs to rotate as a config says (`ropewalk extend` without a length)."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from ropewalk import Rope, schemes
from ropewalk.engines import ENGINES, ConfigRope, Flags
from ropewalk.engines._override import Override
from ropewalk.tools.cli import main
from ropewalk.tools.extend import extend

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


def row_of(config: Any, engine: str, **options: Any) -> dict[str, Any]:
    return extend(config, engines=(engine,), **options).facts["engines"][0]


def keys(command: str) -> dict[str, Any]:
    """Return the JSON in a command, as a shell passes it."""
    return json.loads(next(word for word in shlex.split(command) if word.startswith("{")))


def test_nothing_is_needed() -> None:
    for config, name in ((FLAT, "vllm"), (with_yarn(), "vLLM")):
        row = row_of(config, name)
        assert (row["commands"][0], row["notes"]) == ("vllm serve MODEL --max-model-len 131072", [])


def test_sglang_reads_the_attention_factor_from_another_key() -> None:
    """1 / (0.1 ln 4 + 1), by which SGLang multiplies the magnitude that it computes."""
    row = row_of(with_yarn(attention_factor=1.0), "sglang")
    assert "the attention factor is 1.13863 and not 1" in row["notes"][0]
    parameters = keys(row["commands"][0])["rope_parameters"]
    assert parameters.pop("attn_factor") == pytest.approx(0.8782488562869419, rel=1e-12)
    assert parameters == {**PLAIN, **RAMP}


def test_a_nested_text_model() -> None:
    text = {**FLAT, "rope_scaling": {"type": "linear", "factor": 4}}
    config = {"model_type": "llava", "text_config": text, "vision_config": {}}
    assert list(keys(row_of(config, "vllm")["commands"][0])) == ["text_config"]
    override = ENGINES["transformers"].override
    assert isinstance(override, Override)
    assert override.write("m", {"text_config": {"rope_parameters": {"rope_theta": 1e6, "truncate": True}}}, 4096) == (
        "AutoModelForMultimodalLM.from_pretrained('m', text_config={'rope_parameters': {'rope_theta': 1000000.0, "
        "'truncate': True}})"
    )


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_integer_that_must_be_a_float(engine: str) -> None:
    row = row_of({**FLAT, "rope_scaling": {"type": "linear", "factor": 4}}, engine)
    assert '"factor": 4.0' in row["commands"][0]


def test_flags_of_llama_cpp() -> None:
    assert row_of(with_yarn(beta_fast=64.0), "llama.cpp")["commands"] == [
        "llama-server -m MODEL.gguf --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 32768 --yarn-beta-fast 64 "
        "--yarn-beta-slow 1 --rope-freq-base 1000000 -c 131072",
    ]


@pytest.mark.parametrize(
    ("engine", "config", "why"),
    [
        # --yarn-attn-factor is overwritten, and no flag states the factors of llama3.
        ("llama.cpp", with_yarn(attention_factor=1.0), "the attention factor is 1.13863 and not 1"),
        ("llama.cpp", {**FLAT, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "pairs differ"),
        ("vllm", {**FLAT, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "It never scales"),
        # transformers, which vLLM loads the config with, refuses it before an override is applied
        ("vllm", {**with_yarn(), "model_type": "phi3"}, "it does not run this config: KeyError"),
        ("vllm", {**FLAT, "model_type": "internlm"}, "it has no model internlm"),
        # No argument scales q, or makes llama.cpp rotate other layers of SmolLM3.
        ("vllm", {**with_yarn(llama_4_scaling_beta=0.1), "model_type": "ministral3", "head_dim": 128}, "not scale q"),
        ("llama.cpp", {**FLAT, "model_type": "smollm3", "no_rope_layers": [0, 1, 1, 1]}, "all but each 4th layer"),
    ],
)
def test_what_no_command_cures(engine: str, config: dict[str, Any], why: str) -> None:
    row = row_of(config, engine)
    [said] = row["why_not"]
    assert (row["commands"], why in said) == ([], True)


def test_a_model_that_was_not_recorded() -> None:
    row = row_of({**FLAT, "model_type": "fern"}, "vllm", pairing="half")
    assert (row["commands"], row["why_not"]) == (
        [],
        ["layers 0-3 of 4: what its file for fern reads was not recorded."],
    )


def test_a_config_that_an_override_would_break() -> None:
    """SGLang reads the fraction of Phi-4-mini at the top only, and agrees with the config as it was published."""
    lists = {"short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
    scaling = {"type": "longrope", "original_max_position_embeddings": 4096, **lists}
    config = {**FLAT, "model_type": "phi3", "partial_rotary_factor": 0.75, "rope_scaling": scaling}
    assert row_of(config, "sglang")["commands"][0].endswith("--model-path MODEL --context-length 131072")


@pytest.mark.parametrize("engine", ["vLLM", "SGLang", "llama.cpp"])
def test_the_engines_have_these_arguments(engine: str) -> None:
    """Every argument in a command is in the recorded list of the engine's own parser."""
    whole_number = {**FLAT, "rope_scaling": {"type": "linear", "factor": 4}}
    config = with_yarn(beta_fast=64.0) if engine == "llama.cpp" else whole_number
    arguments = set(re.findall(r"--[a-z-]+", row_of(config, engine)["commands"][0])) - {"--model-path"}
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
    row = row_of({**phi, "rope_scaling": scaling}, "sglang")
    assert row["commands"][0].endswith("--model-path MODEL --context-length 131072")
    assert "so that token is not rotated." in " ".join(row["notes"])


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(with_yarn(attention_factor=1.0)))
    shown = CliRunner().invoke(main, ["extend", str(path), "--for", "sglang"])
    assert shown.exit_code == 0
    assert f"{path} (model_type qwen2), to 131,072 tokens" in shown.output
    assert "launch_server --model-path " in shown.output
    assert "--json-model-override-args '{" in shown.output
    fern = tmp_path / "fern.json"
    fern.write_text(json.dumps({**FLAT, "model_type": "fern"}))
    assert CliRunner().invoke(main, ["extend", str(fern), "--for", "vllm", "--pairing", "half"]).exit_code == 2
    measured = CliRunner().invoke(main, ["extend", str(path), "--measure"])
    assert (measured.exit_code, "--measure has no effect without --to. Pass both." in measured.output) == (2, True)
