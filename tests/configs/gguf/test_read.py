"""GGUF files written by llama.cpp's own package, compared with the oracle and with ggml; broken files."""

from __future__ import annotations

import io
import json
import math
import random
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import oracle
from gguf_files import write
from ropewalk import Rope, RopeError, from_config
from ropewalk.configs import ModelRopes
from ropewalk.configs.gguf import header as gguf_header
from ropewalk.configs.gguf import keys as table
from ropewalk.configs.gguf.row import GgufRow
from ropewalk.configs.tables.gguf import ROWS
from ropewalk.schemes import NTK, Linear, LongRoPE, PerPair, YaRN

GOLDEN = Path(__file__).parents[2] / "golden"
SIZES = {"block_count": 3, "embedding_length": 64, "attention.head_count": 4, "context_length": 4096}
LLAMA = {**SIZES, "rope.freq_base": 500000.0, "rope.dimension_count": 16}
YARN = {
    **LLAMA,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 16.0,
    "rope.scaling.original_context_length": 4096,
    "context_length": 65536,
}
LONGROPE = {**LLAMA, "rope.scaling.type": "longrope", "rope.scaling.original_context_length": 4096}
FREQS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
ONES = [1.0] * 8
GEMMA3 = {
    **LLAMA,
    "rope.freq_base_swa": 10000.0,
    "attention.sliding_window": 512,
    "attention.sliding_window_pattern": [True, True, False],
}
DEEPSEEK2 = {
    **YARN,
    "attention.key_length": 48,
    "attention.key_length_mla": 24,
    "rope.scaling.yarn_log_multiplier": 0.1,
    "nextn_predict_layers": 1,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


# ---- the ropes of files ---------------------------------------------------------------------------------------------


def test_llama(path: Path) -> None:
    ropes = from_config(write(path, LLAMA))
    assert ropes.rope == Rope(16, 500000.0, "interleaved")
    assert len(ropes.layers) == 3
    assert (ropes.model_type, ropes.source) == ("llama", str(path))
    assert (ropes.trained_length, ropes.max_position_embeddings) == (4096, 4096)
    assert ropes.warnings == ()
    assert ropes.origins["base"] == "llama.rope.freq_base"
    assert ropes.origins["head_dim"] == "llama.embedding_length / llama.attention.head_count"
    assert "llama_model_rope_type" in ropes.explain()
    json.dumps(ropes.facts(5000), allow_nan=False)


def test_by_its_name_or_its_first_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", LLAMA)
    blob = tmp_path / "sha256-abc"  # Ollama names its files like this
    blob.write_bytes(path.read_bytes())
    assert from_config(blob).layers == from_config(str(path)).layers == from_config(path).layers
    loud = path.rename(tmp_path / "MODEL.GGUF")
    assert from_config(loud).rope == Rope(16, 500000.0, "interleaved")


def test_a_folder_is_still_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "repository.gguf"
    folder.mkdir()
    with pytest.raises(RopeError, match=r"config\.json: the config must be an existing file"):
        from_config(folder)


@pytest.mark.parametrize(
    ("architecture", "pairing"), [("qwen2", "half"), ("gptneox", "half"), ("chatglm", "interleaved")]
)
def test_partial_rotation(path: Path, architecture: str, pairing: Any) -> None:
    keys = {**LLAMA, "rope.dimension_count": 4, "attention.key_length": 24}
    assert from_config(write(path, keys, architecture=architecture)).rope == Rope(24, 5e5, pairing, rotary_dim=4)


def test_the_whole_head_rotates_without_a_dimension_count(path: Path) -> None:
    ropes = from_config(write(path, {**LLAMA, "rope.dimension_count": None}, architecture="qwen3"))
    assert ropes.rope == Rope(16, 500000.0, "half")
    assert ropes.origins["rotary_dim"] == "the whole head"


def test_old_llama_states_no_base(path: Path) -> None:
    ropes = from_config(write(path, SIZES))
    assert ropes.rope == Rope(16, 10_000.0, "interleaved")
    assert any("no llama.rope.freq_base" in warning for warning in ropes.warnings)
    ropes = from_config(path, base=1e6)
    assert ropes.rope.base == 1e6
    assert ropes.warnings == ()
    assert from_config(write(path, SIZES, architecture="qwen2"), base=1e6).rope == Rope(16, 1e6, "half")


def test_llama_3_without_its_factors(path: Path) -> None:
    """kalosm#340: files of Llama 3.1 and later that were converted before llama.cpp wrote rope_freqs.weight."""
    keys = {**LLAMA, "context_length": 131_072}
    lost = "if the model is Llama 3.1 to 3.3, the file has lost the tensor rope_freqs.weight"
    [warning] = from_config(write(path, keys)).warnings
    assert warning.startswith(lost)
    for other in ({**LLAMA, "context_length": 8192}, {**keys, "rope.freq_base": 1e6}):
        assert from_config(write(path, other)).warnings == ()
    kept = from_config(write(path, keys, {FREQS: np.full(8, 8, np.float32)}))
    assert not any(warning.startswith(lost) for warning in kept.warnings)


@pytest.mark.parametrize(
    "architecture", ["baichuan", "falcon", "gptneox", "minicpm", "minicpm3", "orion", "phi2", "plamo", "xverse"]
)
def test_an_architecture_for_which_no_base_is_written(path: Path, architecture: str) -> None:
    """In llama.cpp's conversion/*.py their converters call add_rope_freq_base for a stated rope_theta at most."""
    size = 24 if architecture == "falcon" else 8
    keys = {**SIZES, "block_count": 32, "attention.key_length": 24, "rope.dimension_count": size}
    ropes = from_config(write(path, keys, architecture=architecture))
    assert ropes.rope.base == 10_000.0
    assert f"no {architecture}.rope.freq_base, for which llama.cpp uses 10000" in ropes.warnings[0]
    assert from_config(path, base=1e6).rope.base == 1e6


def test_a_switch_that_is_off(path: Path) -> None:
    ropes = from_config(write(path, {**LLAMA, "rope.scaling.finetuned": False}, architecture="granite"))
    assert ropes.layers == (None,) * 3
    assert "no rotation" in ropes.explain()


def test_blocks_that_predict_further_tokens_are_not_layers(path: Path) -> None:
    ropes = from_config(write(path, {**LLAMA, "nextn_predict_layers": 1}, architecture="glm4moe"))
    assert ropes.layers == (Rope(16, 500000.0, "half"),) * 2
    assert ropes.origins["layers"] == "glm4moe.block_count - glm4moe.nextn_predict_layers"
    with pytest.raises(RopeError, match="nextn_predict_layers must be an integer from 1 to 2, got 3"):
        from_config(write(path, {**LLAMA, "nextn_predict_layers": 3}, architecture="glm4moe"))


def test_an_unknown_architecture(path: Path) -> None:
    write(path, LLAMA, architecture="qwen9")
    with pytest.raises(RopeError, match=r"does not define its rotation\. Did you mean 'qwen\d?'\? .*pass pairing="):
        from_config(path)
    assert from_config(path, pairing="half").rope == Rope(16, 500000.0, "half")


def test_llama_3_1(path: Path) -> None:
    exact = np.array(oracle.by_parts(5e5, 128, 8, 1, 4, 8192), float)
    factors = np.array(oracle.inv_freq(5e5, 128), float) / exact
    keys = {**LLAMA, "rope.dimension_count": 128, "embedding_length": 4096, "attention.head_count": 32}
    ropes = from_config(write(path, {**keys, "context_length": 131072}, {FREQS: factors.astype(np.float32)}))
    np.testing.assert_allclose(ropes.rope.inv_freq, exact, rtol=6e-8)
    assert ropes.rope.attention_factor == 1.0
    assert ropes.rope.pairing == "interleaved"
    assert ropes.trained_length is None  # the file does not state 8192
    assert ropes.max_position_embeddings == 131072
    assert ropes.origins["factors"] == FREQS


def test_pairs_that_do_not_rotate(path: Path) -> None:
    rope = from_config(write(path, LLAMA, {FREQS: [1.0, 2.0, 4.0, 1e30, 1e31, math.inf, 1e30, 1e30]})).rope
    assert rope.scaling == PerPair((1.0, 2.0, 4.0, *[math.inf] * 5))
    assert rope.inv_freq[3:].tolist() == [0.0] * 5


def test_an_attention_factor_with_factor_tensors(path: Path) -> None:
    rope = from_config(write(path, {**LLAMA, "rope.scaling.attn_factor": 1.5}, {FREQS: ONES})).rope
    assert rope.attention_factor == 1.5


@pytest.mark.parametrize(
    "keys",
    [
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scaling.factor": 4.0},
        {"rope.scale_linear": 4.0},
        {"rope.scaling.factor": 4.0, "rope.scale_linear": 4.0},
    ],
)
def test_linear(path: Path, keys: dict[str, Any]) -> None:
    ropes = from_config(write(path, {**LLAMA, **keys}))
    assert ropes.rope.scaling == Linear(4.0)
    np.testing.assert_allclose(ropes.rope.inv_freq, np.array(oracle.linear(5e5, 16, 4), float), rtol=1e-14)
    assert ropes.trained_length is None
    assert ropes.warnings


@pytest.mark.parametrize(
    "keys",
    [
        {"rope.scaling.type": "none"},
        {"rope.scaling.type": "linear"},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
        {"rope.scaling.factor": 0.0},
        {"rope.scaling.attn_factor": 1.0, "rope.scaling.finetuned": False, "rope.scaling.alpha": 0.0},
        {"rope.scaling.type": "none", "rope.scaling.original_context_length": 2048},
    ],
)
def test_no_scaling(path: Path, keys: dict[str, Any]) -> None:
    ropes = from_config(write(path, {**LLAMA, **keys}))
    assert ropes.rope == Rope(16, 500000.0, "interleaved")
    assert ropes.trained_length == keys.get("rope.scaling.original_context_length", 4096)


def test_yarn(path: Path) -> None:
    ropes = from_config(write(path, YARN))
    assert ropes.rope.scaling == YaRN(16.0, 4096)
    np.testing.assert_allclose(ropes.rope.inv_freq, np.array(oracle.yarn(5e5, 16, 16, 4096), float), rtol=1e-13)
    assert ropes.rope.attention_factor == pytest.approx(0.1 * math.log(16) + 1)
    assert (ropes.trained_length, ropes.max_position_embeddings) == (4096, 65536)
    assert ropes.warnings == ()
    assert ropes.origins["factor"] == "llama.rope.scaling.factor"
    assert from_config(write(path, {**YARN, "context_length": 32768})).warnings


def test_yarn_with_its_own_attention_factor(path: Path) -> None:
    rope = from_config(write(path, {**YARN, "rope.scaling.attn_factor": 0.5})).rope
    assert rope.attention_factor == pytest.approx(0.5 * (0.1 * math.log(16) + 1))


def test_yarn_states_the_factor_that_llama_cpp_uses(path: Path) -> None:
    same = {f"rope.scaling.yarn_{name}": value for name, value in (
        ("beta_fast", 32.0), ("beta_slow", 1.0), ("ext_factor", 1.0), ("attn_factor", 0.1 * math.log(16) + 1),
        ("log_multiplier", 0.0))}  # fmt: skip
    assert from_config(write(path, {**YARN, **same})).rope.scaling == YaRN(16.0, 4096)


def test_ministral_3_reads_more_of_yarn(path: Path) -> None:
    more = {"yarn_beta_fast": 4.0, "yarn_beta_slow": 2.0, "yarn_log_multiplier": 1.0}
    keys = {**YARN, **{f"rope.scaling.{k}": v for k, v in more.items()}, "attention.temperature_scale": 0.5}
    ropes = from_config(write(path, keys, architecture="mistral3"))
    assert ropes.rope.scaling == YaRN(16.0, 4096, 4.0, 2.0, mscale=1.0, mscale_all_dim=1.0)
    assert ropes.rope.attention_factor == 1.0
    assert ropes.query_scale is not None
    assert ropes.query_scale.at(4095) == 1.0
    assert ropes.query_scale.at(4096) == pytest.approx(1 + 0.5 * math.log(2))
    assert from_config(write(path, YARN, architecture="mistral3")).query_scale is None
    # Without the key, llama.cpp uses context_length, here 4096.
    scale = from_config(write(path, {**LLAMA, "attention.temperature_scale": 0.5}, architecture="mistral3")).query_scale
    assert scale is not None
    assert (scale.at(4095), scale.at(4096)) == (1.0, pytest.approx(1 + 0.5 * math.log(2)))


def test_gpt_oss_is_read_as_llama_cpp_rotates_it(path: Path) -> None:
    ropes = from_config(write(path, YARN, architecture="gpt-oss"))
    assert ropes.rope == Rope(16, 500000.0, "half", scaling=YaRN(16.0, 4096))
    assert any("truncate=False" in warning for warning in ropes.warnings)


PHI = [row for row in json.loads((GOLDEN / "lengths.json").read_text())["rows"] if "phi" in row["model"]]


@pytest.mark.parametrize("row", [pytest.param(row, id=str(row["length"])) for row in PHI])
@pytest.mark.parametrize("stated", ["longrope", None])  # older files do not state the type of the scaling
def test_phi_3_5_at_both_lengths(path: Path, row: dict[str, Any], stated: str | None) -> None:
    """Compare with numbers of the same model that were recorded from transformers."""
    parameters, dim = row["rope_parameters"], row["rotary_dim"]
    keys = {**LONGROPE, "attention.key_length": dim, "rope.dimension_count": dim, "rope.freq_base": 10000.0,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(32) / math.log(4096))}  # fmt: skip
    tensors = {SHORT: parameters["short_factor"], LONG: parameters["long_factor"]}
    ropes = from_config(write(path, {**keys, "rope.scaling.type": stated}, tensors, architecture="phi3"))
    assert isinstance(ropes.rope.scaling, LongRoPE)
    assert ropes.rope.pairing == "half"
    rope = ropes.rope.at_length(row["length"])
    np.testing.assert_allclose(rope.inv_freq, row["inv_freq"], rtol=4e-7)
    assert rope.attention_factor == pytest.approx(row["attention_scaling"], rel=1e-7)
    assert any("4096" in warning for warning in ropes.warnings)


def test_longrope_without_an_attention_factor(path: Path) -> None:
    ropes = from_config(write(path, LONGROPE, {SHORT: ONES, LONG: ONES}))
    assert ropes.rope.at_length(9999).attention_factor == 1.0
    assert any("attn_factor" in warning for warning in ropes.warnings)


def test_alpha(path: Path) -> None:
    rope = from_config(write(path, {**LLAMA, "rope.scaling.alpha": 1000.0}, architecture="hunyuan_vl")).rope
    assert rope.scaling == NTK(1000.0)
    np.testing.assert_allclose(rope.inv_freq, np.array(oracle.ntk(5e5, 16, 1000), float), rtol=1e-13)


def test_split_files(path: Path) -> None:
    parts = {"split.count": 2}
    for architecture in ("llama", "phi3"):
        with pytest.raises(RopeError, match=r"split\.count must be at most 1, since another file may"):
            from_config(write(path, LLAMA, architecture=architecture, more=parts))
    assert from_config(write(path, LLAMA, {FREQS: ONES}, more=parts)).rope.scaling == PerPair(tuple(ONES))
    assert from_config(write(path, LLAMA, architecture="qwen2", more=parts)).rope.scaling is None


CASES = json.loads((GOLDEN / "peers" / "ggml.json").read_text())["cases"]


@pytest.mark.parametrize("case", [pytest.param(c, id=c["id"]) for c in CASES if not c["params"]["offset"]])
def test_ggml_rotates_alike(path: Path, case: dict[str, Any]) -> None:
    """Compare with the recorded results of ggml for the parameters that llama.cpp reads from the file."""
    p = case["params"]
    keys = {**SIZES, "attention.key_length": case["head_dim"], "rope.dimension_count": p["n_dims"],
            "rope.freq_base": p["freq_base"]}  # fmt: skip
    if p["ext_factor"]:
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 1 / p["freq_scale"],
                 "rope.scaling.original_context_length": p["n_ctx_orig"]}  # fmt: skip
    architecture, tensors = "gptneox" if p["mode"] else "chatglm", None
    if p["freq_factors"]:
        architecture, tensors = "phi3", {SHORT: [1.0] * len(p["freq_factors"]), LONG: p["freq_factors"]}
        keys |= {"rope.scaling.original_context_length": p["n_ctx_orig"], "rope.scaling.attn_factor": p["attn_factor"]}
    rope = from_config(write(path, keys, tensors, architecture=architecture)).rope.at_length(p["n_ctx_orig"] + 1)
    q = oracle.golden_q(case["q_shape"])[:, : case["q_heads"]]
    turned = rope.at(torch.tensor(case["positions"]))(torch.from_numpy(q), layout="bhsd").numpy()
    expected = np.array(case["q_rot"], np.float32).reshape(q.shape)
    bound = np.array([4 * math.sqrt(2) * rope.attention_factor * (n * 2.0**-23 + 1e-6) for n in case["positions"]])
    assert (np.abs(turned - expected) <= bound[:, None]).all()


def test_the_gguf_package_reads_the_same(path: Path) -> None:
    factors = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 1e30]
    write(path, {**LLAMA, "per_layer": [True, False]}, {FREQS: factors})
    reader = gguf.GGUFReader(str(path))
    values, tensors = gguf_header.read(path)
    assert values["tokenizer.ggml.scores"] == (0.0, -1.0, -2.0)
    assert values["llama.per_layer"] == (True, False)
    for key, value in values.items():
        if isinstance(value, int | float | str):
            assert reader.fields[key].contents() == value
        if isinstance(value, tuple):
            assert reader.fields[key].contents() == list(value)
    assert {name for name in reader.fields if not name.startswith("GGUF.")} == set(values)
    expected = next(t.data for t in reader.tensors if t.name == FREQS)
    np.testing.assert_array_equal(np.array(tensors[FREQS][:-1], np.float32), expected[:-1])
    assert tensors[FREQS][-1] == math.inf


def test_every_architecture_has_one_row() -> None:
    assert len(table.ARCHITECTURES) == sum(len(names.split()) for names in ROWS)
    for name, row in table.ARCHITECTURES.items():
        assert row.pairing in ("half", "interleaved") or row == GgufRow(None, refusal=row.refusal), name
        assert (row.pairing is None) == bool(row.refusal), name
        assert row.latent or not row.scales_softmax, name
        assert row.yarn_log or not row.yarn_log_is_mscale, name
    names = set(gguf.MODEL_ARCH_NAMES.values()) - {"mmproj"}
    assert len(names & table.ARCHITECTURES.keys()) > 100  # the list of llama.cpp's names


# ---- refusals -------------------------------------------------------------------------------------------------------

S = "rope.scaling."
BOTH = {SHORT: ONES, LONG: ONES}


@pytest.mark.parametrize(
    ("keys", "tensors", "architecture", "message"),
    [
        ({"rope.freq_base": None}, {}, "qwen2", "qwen2.rope.freq_base must be given, since it is the base"),
        ({"rope.freq_base": "5e5"}, {}, "llama", "llama.rope.freq_base must be a finite number"),
        ({"rope.freq_base": [1.0, 2.0]}, {}, "llama", "greater than 1, got (1.0, 2.0)"),
        ({"rope.freq_base": 0.5}, {}, "llama", "llama.rope.freq_base must be a finite number greater than 1"),
        (
            {"rope.freq_base_swa": 1e4},
            {},
            "llama",
            "llama.rope.freq_base_swa must agree with rope.freq_base=500000",
        ),
        ({"rope.dimension_count_swa": 8}, {}, "gpt-oss", "not supported yet"),
        ({"rope.dimension_sections": [4, 2, 2, 0]}, {}, "llama", "got (4, 2, 2, 0). llama.cpp reads it only for arch"),
        ({"attention.rope_pattern": [1, 0, 1]}, {}, "llama", "layers do not all rotate alike"),
        ({"attention.key_length_mla": 192}, {}, "llama", "Multi-head latent attention is not supported yet"),
        ({}, {}, "dflash", "It drafts in the layout of several models, which is not supported yet."),
        (
            {"rope.freq_base": 5e5},
            {},
            "cogvlm",
            "cogvlm.rope.freq_base must be 10000, got 500000.0. llama.cpp has no other base",
        ),
        ({}, {}, "deepseek4", "deepseek4.attention.compress_ratios must be given, since the layers differ"),
        (
            {**YARN, S + "yarn_attn_factor": 2.0},
            {},
            "grok",
            "must be 1, as without the key, got 2. llama.cpp does not use the key",
        ),
        ({}, {}, "mamba", "llama.cpp rotates nothing in this architecture"),
        ({"rope.dimension_count": 8}, {}, "llama", "must be the whole head of 16 channels for llama, got 8"),
        ({"rope.dimension_count": 7}, {}, "qwen2", "rotary_dim must be even"),
        ({"embedding_length": None}, {}, "llama", "It is required if llama.attention.key_length is not given"),
        ({"embedding_length": 65}, {}, "llama", " must be a multiple of llama.attention.head_count=4"),
        (
            {"attention.head_count": [4, 4, 4]},
            {},
            "llama",
            "head_count must be an integer of at least 1, got (4, 4, 4)",
        ),
        ({"attention.key_length": 2**31}, {}, "llama", "key_length must be an integer from 2 to 65536"),
        ({"block_count": None}, {}, "llama", "llama.block_count must be an integer from 1 to 10000, got None"),
        ({"block_count": 2**31}, {}, "llama", "llama.block_count must be an integer from 1 to 10000"),
        ({"context_length": 4096.5}, {}, "llama", "llama.context_length must be an integer"),
        ({"rope.frq_base": 1e4}, {}, "llama", "is not known here. Did you mean 'llama.rope.freq_base'?"),
        ({"roep.freq_base": 1e4}, {}, "llama", "'llama.roep.freq_base' is about rotation and must be a key that"),
        (
            {S + "low_freq_factor": 1.0},
            {},
            "llama",
            "is about rotation and must be a key that ropewalk knows for llama",
        ),
        ({S + "type": "llama3"}, {}, "llama", "type must be one of 'none', 'linear', 'longrope', 'yarn', got 'llama3'"),
        ({S + "type": 2}, {}, "llama", "llama.rope.scaling.type must be one of"),
        (
            {S + "type": "none", S + "factor": 4.0},
            {},
            "llama",
            "must not be given for llama with scaling 'none', got 4.0",
        ),
        ({S + "factor": 0.5}, {}, "llama", "Linear: factor must be a finite number of at least 1"),
        ({S + "factor": -4.0}, {}, "llama", "llama.rope.scaling.factor must be a finite number of at least 0"),
        ({S + "factor": 4.0, "rope.scale_linear": 2.0}, {}, "llama", " must agree with rope.scaling.factor=4, got 2"),
        (
            {S + "factor": 4.0, S + "attn_factor": 2.0},
            {},
            "llama",
            "llama.rope.scaling.attn_factor must not be given",
        ),
        ({S + "attn_factor": 2.0}, {}, "llama", "llama.rope.scaling.attn_factor must not be given"),
        ({S + "alpha": 1000.0}, {}, "llama", "llama.rope.scaling.alpha must not be given for llama"),
        ({S + "alpha": 0.5}, {}, "hunyuan_vl", "NTK: alpha must be a finite number of at least 1"),
        ({S + "finetuned": 1}, {}, "llama", "llama.rope.scaling.finetuned must be true or false"),
        ({**YARN, S + "factor": None}, {}, "llama", "llama.rope.scaling.factor must be given"),
        ({**YARN, S + "original_context_length": None}, {}, "llama", "original_context_length must be given"),
        (
            {**YARN, S + "original_context_length": 0},
            {},
            "llama",
            "original_context_length must be an integer of at least 1",
        ),
        (
            {**YARN, S + "yarn_attn_factor": 1.0},
            {},
            "llama",
            " must be 1.277259, as without the key, got 1. llama.cpp does",
        ),
        ({**YARN, S + "yarn_beta_fast": 64.0}, {}, "llama", "yarn_beta_fast must not be given for llama"),
        ({**YARN, S + "yarn_ext_factor": 0.5}, {}, "llama", "yarn_ext_factor must not be given for llama"),
        ({**YARN, S + "yarn_log_multiplier": 0.1}, {}, "llama", "yarn_log_multiplier must not be given for llama"),
        ({**YARN, S + "yarn_beta_slow": True}, {}, "llama", "yarn_beta_slow must not be given for llama"),
        ({**YARN, S + "yarn_beta_fast": 0.5}, {}, "mistral3", "YaRN: beta_fast must be"),
        (YARN, {FREQS: ONES}, "llama", "rope_freqs.weight must not be combined with scaling 'yarn'"),
        ({S + "factor": 4.0}, {FREQS: ONES}, "llama", "rope_freqs.weight must not be combined with scaling 'linear'"),
        ({}, {FREQS: ONES}, "qwen2", "rope_freqs.weight must be a tensor that llama.cpp reads for qwen2"),
        ({}, {FREQS: ONES[:7]}, "llama", "PerPair: factors must have 8 numbers"),
        (
            {},
            {FREQS: np.ones(8, np.float16)},
            "llama",
            "rope_freqs.weight: the tensor must hold 1 to 32768 numbers of type F32",
        ),
        ({}, {FREQS: np.ones((2, 4), np.float32)}, "llama", "rope_freqs.weight: the tensor must hold"),
        ({}, {FREQS: np.ones(40_000, np.float32)}, "llama", "rope_freqs.weight: the tensor must hold"),
        ({}, {"rope_freqs_swa.weight": ONES}, "llama", "a tensor about rotation must be one of rope_freqs.weight"),
        ({}, BOTH, "llama", "must be a tensor that llama.cpp reads for llama with scaling 'none'"),
        (LONGROPE, {}, "llama", "rope_factors_long.weight must be given with scaling 'longrope'"),
        (LONGROPE, {SHORT: ONES}, "phi3", "rope_factors_long.weight must be given with scaling 'longrope'"),
        (LONGROPE, {**BOTH, FREQS: ONES}, "llama", "rope_freqs.weight must be a tensor that llama.cpp reads"),
        (LONGROPE, BOTH, "qwen2", "must be a tensor that llama.cpp reads for qwen2 with scaling 'longrope'"),
        (
            {**LONGROPE, S + "factor": 32.0},
            BOTH,
            "phi3",
            "factor must not be given for phi3 with scaling 'longrope'",
        ),
        ({**LONGROPE, S + "original_context_length": None}, BOTH, "phi3", "original_context_length must be given"),
        ({**LONGROPE, S + "attn_factor": 0.0}, BOTH, "phi3", "attn_factor must be a finite number greater than 0"),
        (
            {**LONGROPE, S + "type": "yarn"},
            BOTH,
            "phi3",
            "must be a tensor that llama.cpp reads for phi3 with scaling 'yarn'",
        ),
    ],
)
def test_refusals(path: Path, keys: dict[str, Any], tensors: dict[str, Any], architecture: str, message: str) -> None:
    write(path, {**LLAMA, **keys}, tensors, architecture=architecture)
    with pytest.raises(RopeError) as raised:
        from_config(path)
    assert message in str(raised.value)
    assert str(raised.value).startswith(str(path))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"base": 1e6}, "llama.rope.freq_base is 500000, and base must agree with it"),
        ({"base": 0.5}, "from_config: base must be a finite number greater than 1"),
        ({"pairing": "half"}, "llama requires the pairing 'interleaved'"),
        ({"pairing": "NEOX"}, "from_config: pairing must be one of"),
        ({"factor": 8.0}, "factor requires Meta's params.json"),
    ],
)
def test_refused_arguments(path: Path, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeError) as raised:
        from_config(write(path, LLAMA), **kwargs)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"qwen2.rope.freq_base": 1e6}, "'qwen2.rope.freq_base' is about rotation and must be a key that"),
        ({"general.alignment": 24}, "general.alignment must be a power of 2, got 24"),
        ({"general.alignment": 2**30}, "general.alignment must be an integer from 1 to 1048576"),
        ({"general.alignment": "32"}, "general.alignment must be an integer"),
    ],
)
def test_refused_keys_elsewhere(path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeError) as raised:
        from_config(write(path, LLAMA, more=more))
    assert message in str(raised.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RopeError, match=r"gone\.gguf: the model must be an existing file, got no such file"):
        from_config(tmp_path / "gone.gguf")
    with pytest.raises(RopeError):
        from_config("null\0byte.gguf")


@pytest.mark.parametrize("name", ["model.gguf", "blob"])
def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path / name, LLAMA)
    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(RopeError, match=r"cannot be read: .*Permission denied"):
        from_config(path)


# ---- broken bytes ---------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def head(*entries: bytes, version: int = 3, tensors: int = 0, keys: int | None = None) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, len(entries) if keys is None else keys) + b"".join(entries)


def entry(key: str, kind: int, content: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + content


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + content


HUGE = 2**63


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file must have 4 more bytes, got only 0"),
        (b"GGML" + bytes(20), "the file must begin with b'GGUF', got b'GGML'"),
        (head(version=1), "the version must be 2 or 3, in little-endian, got 1"),
        (head(version=0x03000000), "It seems to be big-endian"),
        (head(keys=HUGE), "the number of keys must be at most 10000"),
        (head(keys=10_000), "the file must have 130000 more bytes"),
        (head(tensors=HUGE), "the number of tensors must be at most 65536"),
        (head(tensors=65_536), "the file must have 1572864 more bytes"),
        (head(struct.pack("<Q", HUGE) + bytes(9)), "the length of its name must be at most 256"),
        (head(struct.pack("<Q", 200) + bytes(9)), "the file must have 200 more bytes"),
        (head(entry("a", 13, b"")), "'a': the type must be 0 to 12, got 13"),
        (head(entry("a", 4, b"12")), "'a': the file must have 4 more bytes, got only 2"),
        (head(entry("a", 4, bytes(4)), entry("a", 4, bytes(4))), "'a': keys must be unique, got the key twice"),
        (head(entry("a", 8, struct.pack("<Q", HUGE))), "'a': the length of a string must be at most 67108864"),
        (head(entry("a", 8, struct.pack("<Q", 2**25))), "'a': the file must have 33554432 more bytes"),
        (head(entry("a", 8, struct.pack("<Q", 2) + b"\xff\xfe")), "'a': strings must be UTF-8"),
        (head(struct.pack("<Q", 1) + b"\xff" + bytes(8)), " strings must be UTF-8"),
        (head(entry("a", 9, array(4, HUGE))), "'a': the number of array entries must be at most 2097152"),
        (head(entry("a", 9, array(4, 2**21))), "'a': the file must have 8388608 more bytes"),
        (head(entry("a", 9, array(8, HUGE))), "'a': the number of array entries must be at most 2097152"),
        (head(entry("a", 9, array(8, 2**21))), "'a': the file must have 16777216 more bytes"),
        (
            head(entry("a", 9, array(8, 3, text("a") + struct.pack("<Q", 2**40) + bytes(99)))),
            "'a': the length of a string must be at most 67108864, got 1099511627776",
        ),
        (head(entry("a", 9, array(13, 1))), "'a': an array must hold numbers or strings, as in llama.cpp, got type 13"),
        (head(entry("a", 9, array(9, 1, array(4, 0)))), "'a': an array must hold numbers or strings"),
        (head(), "general.architecture must be a string, got None"),
        (head(entry("general.architecture", 4, bytes(4))), "general.architecture must be a string, got 0"),
        (head(entry("general.architecture", 8, text("x" * 999))), " must be a string, got a string of 999 bytes"),
        (
            head(text("t") + struct.pack("<I", 5) + bytes(40), tensors=1, keys=0),
            "'t': a tensor must have at most 4 axes",
        ),
    ],
)
def test_broken_headers(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(RopeError) as raised:
        from_config(path)
    assert message in str(raised.value)
    assert str(raised.value).startswith(str(path))
    assert len(str(raised.value)) < 1000


def test_missing_factor_tensors(path: Path) -> None:
    info = text(FREQS) + struct.pack("<IQIQ", 1, 8, 0, 2**63)
    for tensors, message in (
        (info, "rope_freqs.weight: the file must have 32 more bytes"),
        (info * 2, "names of tensors must be unique, got the name twice"),
    ):
        path.write_bytes(head(tensors, tensors=len(tensors) // len(info), keys=0))
        with pytest.raises(RopeError, match=message):
            from_config(path)


def test_long_strings_are_skipped(path: Path) -> None:
    write(path, LLAMA)
    content = path.read_bytes()
    keys = struct.unpack_from("<Q", content, 16)[0]
    more = entry("tokenizer.chat_template", 8, text("x" * 100_000))
    path.write_bytes(content[:16] + struct.pack("<Q", keys + 1) + more + content[24:])
    assert from_config(path).rope == Rope(16, 500000.0, "interleaved")


def test_many_strings_cost_neither_memory_nor_much_time(path: Path) -> None:
    strings = array(8, 100_000, text("abc") * 100_000)
    path.write_bytes(head(entry("general.architecture", 8, text("llama")), entry("tokens", 9, strings)))
    del strings
    tracemalloc.start()
    before = time.perf_counter()
    with pytest.raises(RopeError, match="block_count"):
        from_config(path)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert time.perf_counter() - before < 60


class Counting(io.FileIO):
    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        Counting.reads += 1
        return super().read(size)


def vocabulary(tokens: int, merges: int) -> list[bytes]:
    def words(count: int) -> bytes:
        return array(8, count, b"".join(text(f"word {i}") for i in range(count)))

    return [
        entry("more.tokens", 9, words(tokens)),
        entry("more.scores", 9, array(6, tokens, bytes(4 * tokens))),
        entry("more.token_type", 9, array(5, tokens, bytes(4 * tokens))),
        entry("more.merges", 9, array(8, merges, words(merges)[12:])),
    ]


def test_a_vocabulary_needs_few_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary is as large as Gemma 3's. Its 800,000 strings are not read one by one."""
    content = write(path, LLAMA).read_bytes()
    keys = struct.unpack_from("<Q", content, 16)[0]
    more = vocabulary(300_000, 500_000)
    path.write_bytes(content[:16] + struct.pack("<Q", keys + 4) + b"".join(more) + content[24:])
    Counting.reads = 0
    monkeypatch.setattr(Path, "open", lambda self, mode: Counting(self, mode))
    assert from_config(path).rope == Rope(16, 500000.0, "interleaved")
    assert 10 < Counting.reads < 500


def test_strings_across_the_edge_of_a_block(path: Path) -> None:
    """The lengths of the strings are close to that of a block, and one block ends inside a length field."""
    content = write(path, LLAMA).read_bytes()
    keys = struct.unpack_from("<Q", content, 16)[0]
    block = gguf_header._BLOCK
    for first in range(block - 24, block + 9):
        words = text("x" * first) + text("y" * 5) + text("") + text("z" * (2 * block + 1)) + text("end")
        path.write_bytes(content[:16] + struct.pack("<Q", keys + 1) + entry("t", 9, array(8, 5, words)) + content[24:])
        assert from_config(path).rope == Rope(16, 500000.0, "interleaved")
        path.write_bytes(head(entry("t", 9, array(8, 6, words))))
        with pytest.raises(RopeError, match="'t': the file must have 8 more bytes, got only 0"):
            from_config(path)
        path.write_bytes(head(entry("t", 9, array(8, 5, words[:-1]))))
        with pytest.raises(RopeError, match="'t': the file must have"):
            from_config(path)


def test_a_long_header_is_refused(path: Path) -> None:
    """A sparse file takes no disk space, but parsing it takes time."""
    with path.open("wb") as file:
        file.write(head(keys=40))
        for i in range(40):
            file.write(entry(f"k{i}", 9, array(12, 2**20)))
            file.seek(2**23, 1)
        file.truncate(2**31)
    with pytest.raises(RopeError, match="the header must have at most 268435456 bytes, got more"):
        from_config(path)


def test_factors_may_be_far_behind_the_header(path: Path) -> None:
    content = write(path, LLAMA, {FREQS: ONES}).read_bytes()
    at = content.index(FREQS.encode()) + len(FREQS) + 4 + 8 + 4  # the offset of its data, after its axes and type
    with path.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack("<Q", 2**29))
        file.seek(2**29 + len(content))
        file.write(bytes(64))
        file.truncate(2**30)
    with pytest.raises(RopeError, match=r"factors\[0\] must be a finite number greater than 0, got 0.0"):
        from_config(path)  # the sparse part of the file reads as zeros


def test_a_softmax_factor_that_is_not_finite(path: Path) -> None:
    keys = {key: value for key, value in DEEPSEEK2.items() if key != "rope.scaling.yarn_log_multiplier"}
    content = write(path, keys, architecture="deepseek2").read_bytes()
    count = struct.unpack_from("<Q", content, 16)[0]
    more = entry("deepseek2.rope.scaling.yarn_log_multiplier", 12, struct.pack("<d", 1e200))
    path.write_bytes(content[:16] + struct.pack("<Q", count + 1) + more + content[24:])
    with pytest.raises(RopeError, match="yarn_log_multiplier must give a finite softmax factor"):
        from_config(path)


def test_escapes_in_a_file_are_shown(path: Path) -> None:
    write(path, {**LLAMA}, architecture="evil\x1b[31m")
    with pytest.raises(RopeError) as raised:
        from_config(path)
    assert r"evil\x1b[31m" in str(raised.value)
    explained = from_config(path, pairing="half").explain()
    assert r"evil\x1b[31m" in explained
    assert explained.replace("\n", "").isprintable()


def test_long_arrays_are_skipped(path: Path) -> None:
    write(path, {**LLAMA, "short": [1] * 512, "long": [1] * 513})
    values, _ = gguf_header.read(path)
    assert values["llama.short"] == (1,) * 512
    assert repr(values["llama.long"]) == "an array of 513"


@pytest.mark.parametrize("entries", [array(4, 300, bytes(1200)), array(8, 300, text("") * 300)])
def test_too_many_entries_altogether(path: Path, monkeypatch: pytest.MonkeyPatch, entries: bytes) -> None:
    monkeypatch.setattr(gguf_header, "_MAX_ITEMS", 1000)
    path.write_bytes(head(*[entry(f"k{i}", 9, entries) for i in range(4)]))
    with pytest.raises(RopeError, match="the file must have at most 1000 keys, strings and tensors"):
        from_config(path)


def outcome(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    try:
        ropes = from_config(path)
    except RopeError as refusal:
        return "refused" if len(str(refusal)) < 2000 else "a long message"
    assert isinstance(ropes, ModelRopes)
    ropes.explain(5000)
    return "read"


@pytest.fixture
def models(tmp_path: Path) -> list[bytes]:
    phi3 = {**LONGROPE, "rope.scaling.attn_factor": 1.2}
    return [
        write(tmp_path / "a", LLAMA, {FREQS: ONES}).read_bytes(),
        write(tmp_path / "b", YARN, architecture="mistral3").read_bytes(),
        write(tmp_path / "c", phi3, BOTH, architecture="phi3").read_bytes(),
        write(tmp_path / "d", GEMMA3, architecture="gemma3").read_bytes(),
        write(tmp_path / "e", DEEPSEEK2, architecture="deepseek2").read_bytes(),
    ]


def test_every_truncation_of_a_file(path: Path, models: list[bytes]) -> None:
    for content in models:
        found = [outcome(path, content[:end]) for end in range(len(content))]
        read = found.index("read")
        assert read > len(content) // 2
        assert set(found[read:]) == {"read"}  # only weights are missing, which the reader does not need


def test_mutated_bytes(path: Path, models: list[bytes]) -> None:
    draw = random.Random(7)
    found = {"read": 0, "refused": 0}
    for _ in range(4000):
        content = bytearray(draw.choice(models))
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(content))
            match draw.randrange(3):
                case 0:
                    content[at] = draw.randrange(256)
                case 1:
                    content[at : at + 8] = draw.choice(
                        [b"\xff" * 8, bytes(8), struct.pack("<Q", draw.randrange(2**40))]
                    )
                case _:
                    del content[at : at + draw.randint(1, 9)]
        found[outcome(path, bytes(content))] += 1  # any other outcome raises a KeyError
    assert min(found.values()) > 200
