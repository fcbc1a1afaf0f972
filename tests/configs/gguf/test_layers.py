"""GGUF files whose layers differ, or with latent attention or several axes.

The expected ropes are derived by hand from llama.cpp's code, or read from the recorded config.json of the same model.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_files import write
from ropewalk import Axes, Rope, RopeError, from_config
from ropewalk.configs.gguf.keys import ARCHITECTURES
from ropewalk.configs.tables.gguf import UNROTATED
from ropewalk.schemes import Linear, LongRoPE, PerPair, YaRN

GOLDEN = Path(__file__).parents[2] / "golden"
MODELS = {row["name"]: row["config"] for row in json.loads((GOLDEN / "text_models.json").read_text())["rows"]}
CLASSES = {
    row["config"]["model_type"]: row["config"]
    for row in json.loads((GOLDEN / "class_defaults.json").read_text())["rows"]
}
BASE, LOCAL, WINDOW, PATTERN = (
    "rope.freq_base",
    "rope.freq_base_swa",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
)
KEYS = {
    "embedding_length": 64,
    "attention.head_count": 4,
    "context_length": 4096,
    BASE: 5e5,
    "rope.dimension_count": 16,
}
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 512,
}
SLIDES = {WINDOW: 128}
SECTIONS = "rope.dimension_sections"
FREQS = "rope_freqs.weight"
EIGHT = [float(n) for n in range(1, 9)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


HALF = Rope(16, 5e5, "half")
INTERLEAVED = Rope(16, 5e5, "interleaved")
SLOW = dataclasses.replace(HALF, scaling=Linear(8.0))
SLOW_INTERLEAVED = dataclasses.replace(INTERLEAVED, scaling=Linear(8.0))
YARNED = dataclasses.replace(HALF, scaling=YaRN(8.0, 512))
NEAR = Rope(16, 1e4, "half")
FACTORS = dataclasses.replace(HALF, scaling=PerPair(tuple(EIGHT)))
FACTORS_INTERLEAVED = dataclasses.replace(FACTORS, pairing="interleaved")

# Architecture, keys, tensors, and a letter for each layer: G is full (global), L is sliding (local), n does not rotate.
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str, dict[str, Rope]]] = [
    ("gemma3", {**SLIDES, **LINEAR}, {}, "LLLLLGLLLLLGL", {"L": NEAR, "G": SLOW}),
    ("gemma3", {**SLIDES, LOCAL: 2e4}, {}, "LLLLLGLLLLLGL", {"L": Rope(16, 2e4, "half"), "G": HALF}),
    ("gemma3", {**SLIDES, PATTERN: 2, **YARN}, {}, "LGLGL", {"L": NEAR, "G": YARNED}),
    ("gemma3", {**SLIDES, PATTERN: [1, 0, 0, 1]}, {}, "LGGL", {"L": NEAR, "G": HALF}),
    ("gemma3", LINEAR, {}, "GGGGGGG", {"G": SLOW}),
    ("gemma3", {WINDOW: 0}, {}, "GGGGGGG", {"G": HALF}),
    ("gemma3n", SLIDES, {}, "LLLLGLLLLGLL", {"L": NEAR, "G": HALF}),
    ("gemma3n", {**SLIDES, PATTERN: [True, False, True]}, {}, "LGL", {"L": NEAR, "G": HALF}),
    ("gemma-embedding", SLIDES, {}, "LLLLLGLLL", {"L": NEAR, "G": HALF}),
    (
        "gemma4",
        {**SLIDES, PATTERN: [True, False], LOCAL: 1e4, "attention.key_length": 16, "attention.key_length_swa": 8,
         "rope.dimension_count_swa": 8},
        {FREQS: [*EIGHT[:4], 1e30, 1e30, 1e30, 1e30]},
        "LG",
        {"L": Rope(8, 1e4, "half"), "G": Rope(16, 5e5, "half", scaling=PerPair((*EIGHT[:4], *[math.inf] * 4)))},
    ),
    ("modern-bert", {**SLIDES, LOCAL: 1e4}, {}, "GLLGLLGL", {"L": NEAR, "G": HALF}),
    ("modern-bert", {**SLIDES, LOCAL: 1e4, PATTERN: 4}, {}, "GLLLGLLL", {"L": NEAR, "G": HALF}),
    ("modern-bert", {}, {}, "GGGG", {"G": HALF}),
    ("plamo3", {**SLIDES, LOCAL: 1e4}, {}, "LLLLLLLGL", {"L": NEAR, "G": HALF}),
    ("mimo2", {**SLIDES, LOCAL: 1e4, PATTERN: [0, 1, 1], "attention.head_count_kv": [2, 4, 4]}, {}, "GLL",
     {"L": NEAR, "G": HALF}),
    ("laguna", {**SLIDES, LOCAL: 1e4, "attention.key_length": 16, "rope.dimension_count": 8,
                "rope.dimension_count_swa": 16, "attention.head_count": [4, 6, 6, 6, 4], **YARN}, {}, "GLLLG",
     {"L": NEAR, "G": Rope(16, 5e5, "half", rotary_dim=8, scaling=YaRN(8.0, 512))}),
    ("laguna", YARN, {}, "GGG", {"G": YARNED}),
    ("olmo2", {**SLIDES, **YARN}, {}, "LLLGLLLGL", {"L": HALF, "G": YARNED}),
    ("olmo2", {**SLIDES, **YARN, LOCAL: 5e5, PATTERN: [True, False]}, {}, "LG", {"L": HALF, "G": YARNED}),
    ("olmo2", YARN, {}, "GGGG", {"G": YARNED}),
    ("mellum", {**SLIDES, **YARN}, {}, "LLLGL", {"L": HALF, "G": YARNED}),
    ("gemma2", SLIDES, {}, "LGLG", {"L": HALF, "G": HALF}),
    ("gemma2", {**SLIDES, LOCAL: 1e4}, {}, "LGLG", {"L": NEAR, "G": HALF}),
    ("gpt-oss", {**SLIDES, **YARN}, {}, "LGLG", {"L": YARNED, "G": YARNED}),
    ("gpt-oss", {**SLIDES, **YARN, LOCAL: 1e4}, {}, "LGLG",
     {"L": dataclasses.replace(YARNED, base=1e4), "G": YARNED}),
    ("spark2_5", {**SLIDES, PATTERN: [True, False], "rope.dimension_count_swa": 4, LOCAL: 1e4, **LINEAR}, {}, "LG",
     {"L": Rope(16, 1e4, "half", rotary_dim=4, scaling=Linear(8.0)), "G": SLOW}),
    ("cohere2", SLIDES, {}, "LLLnLLLnL", {"L": INTERLEAVED}),
    ("cohere2", {**SLIDES, LOCAL: 5e5, PATTERN: 2}, {}, "LnLnL", {"L": INTERLEAVED}),
    ("exaone4", SLIDES, {FREQS: EIGHT}, "LLLn" * 16, {"L": FACTORS}),
    ("exaone4", {}, {FREQS: EIGHT}, "G" * 30, {"G": FACTORS}),
    ("exaone-moe", SLIDES, {}, "LLLnL", {"L": HALF}),
    ("exaone-moe", {**SLIDES, "nextn_predict_layers": 1, PATTERN: [1, 0, 0]}, {FREQS: EIGHT}, "Ln.", {"L": FACTORS}),
    ("muse-glimmer", SLIDES, {}, "LLLnL", {"L": INTERLEAVED}),
    ("maple", {**SLIDES, PATTERN: [False, True]}, {}, "nL", {"L": HALF}),
    ("llama4", {}, {}, "LLLnLLLnL", {"L": INTERLEAVED}),
    ("llama4", {WINDOW: 8192, **LINEAR}, {}, "LLLnL", {"L": SLOW_INTERLEAVED}),
    ("llama4", {PATTERN: [1, 1, 1, 0, 1]}, {FREQS: EIGHT}, "LLLnL", {"L": FACTORS_INTERLEAVED}),
    ("afmoe", SLIDES, {}, "LLLnLLL", {"L": HALF}),
    ("afmoe", {**SLIDES, LOCAL: 1e4}, {}, "LLLnLLL", {"L": NEAR}),
    ("smallthinker", SLIDES, {}, "nLLLnL", {"L": HALF}),
    ("smallthinker", {WINDOW: 0}, {}, "GGGGG", {"G": HALF}),
    ("smollm3", {}, {}, "LLLnLLLnLL", {"L": INTERLEAVED}),
    ("granite_swa", {**SLIDES, PATTERN: [0, 1, 1]}, {FREQS: EIGHT}, "LLL", {"L": FACTORS_INTERLEAVED}),
    ("granite_swa", {**SLIDES, "attention.rope_pattern": [False, True, True]}, {}, "nLL", {"L": INTERLEAVED}),
    ("lfm2", {"attention.head_count_kv": [0, 0, 8, 0, 8]}, {}, "nnGnG", {"G": HALF}),
    ("lfm2", {"attention.head_count_kv": 8}, {}, "GGG", {"G": HALF}),
    ("lfm2moe", {"attention.head_count_kv": [0, 2]}, {}, "nG", {"G": HALF}),
    ("granitehybrid", {"attention.head_count_kv": [0, 4]}, {FREQS: EIGHT}, "nG", {"G": FACTORS_INTERLEAVED}),
    ("granitehybrid", {"attention.head_count_kv": [0, 4], "rope.scaling.finetuned": False}, {}, "nn", {}),
    ("plamo2", {"attention.head_count_kv": [0, 4, 0]}, {}, "nGn", {"G": HALF}),
    ("qwen3next", {}, {}, "nnnGnnnGn", {"G": HALF}),
    ("qwen3next", {"full_attention_interval": 2}, {}, "nGnGn", {"G": HALF}),
    ("qwen3next", {"attention.recurrent_layers": [False, True]}, {}, "Gn", {"G": HALF}),
    ("minimax-01", {}, {}, "nnnnnnnGn", {"G": HALF}),
    ("cohere2moe", {**SLIDES, "leading_dense_block_count": 1}, {}, "GLLLnLLLn", {"L": INTERLEAVED, "G": INTERLEAVED}),
    ("cohere2moe", {**SLIDES, "leading_dense_block_count": 0}, {}, "nLLLn", {"L": INTERLEAVED}),
    ("deci", {"attention.head_count": [0, 4, 4], "attention.head_count_kv": [0, 0, 4], "attention.key_length": 16},
     {FREQS: EIGHT}, "nnG", {"G": FACTORS_INTERLEAVED}),
    ("baichuan", {}, {}, "G" * 32, {"G": INTERLEAVED}),
    ("baichuan", {}, {}, "n" * 40, {}),
    ("cogvlm", {**LINEAR, BASE: 1e4, "rope.dimension_count": 8}, {}, "GG", {"G": NEAR}),
    ("deepseek2-ocr", {BASE: None, "rope.dimension_count": 8}, {}, "GG", {"G": NEAR}),
    ("step35", {**SLIDES, PATTERN: [0, 1, 1], LOCAL: 1e4}, {FREQS: EIGHT}, "GLL",
     {"L": NEAR, "G": Rope(16, 5e5, "half", rotary_dim=8, scaling=PerPair((1.0, 2.0, 3.0, 4.0)))}),
    ("step35", {**SLIDES, **LINEAR, PATTERN: [0, 1], LOCAL: 1e4, "rope.dimension_count": None}, {}, "GL",
     {"L": NEAR, "G": Rope(16, 5e5, "half", rotary_dim=8, scaling=Linear(8.0))}),
    (
        "gemma4-assistant",
        {**SLIDES, PATTERN: [True, False], LOCAL: 1e4, "attention.key_length": 16, "attention.key_length_swa": 8,
         "rope.dimension_count_swa": 8, "nextn_predict_layers": 2},
        {FREQS: EIGHT},
        "LG",
        {"L": Rope(8, 1e4, "half"), "G": FACTORS},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "window"), [("gemma3", 128), ("gemma-embedding", 65), ("modern-bert", 65)])
def test_half_of_a_symmetric_window_is_on_each_side(architecture: str, window: int, path: Path) -> None:
    """`llama_hparams::is_masked_swa` hides keys that are more than n_swa / 2 away, before and after the token."""
    write(path, {**KEYS, **SLIDES, LOCAL: 1e4, "block_count": 7}, architecture=architecture)
    assert set(from_config(path).windows) == {None, window}


@pytest.mark.parametrize(
    ("architecture", "keys", "tensors", "layers", "ropes"), [pytest.param(*case, id=case[0]) for case in CASES]
)
def test_layers(
    path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, Any], layers: str, ropes: dict[str, Rope]
) -> None:
    read = from_config(write(path, {"block_count": len(layers), **KEYS, **keys}, tensors, architecture=architecture))
    layers = layers.rstrip(".")  # the last block is not a layer
    assert read.layers == tuple(ropes.get(letter) for letter in layers)
    assert len(read.layer_kinds) == len(layers)
    assert read.query_scale is None or read.query_scale.only_unrotated
    assert (read.softmax_factor, read.output_order, dict(read.extra_ropes)) == (1.0, None, {})
    json.dumps(read.facts(5000), allow_nan=False)


def test_every_row_has_a_case() -> None:
    differing = {name: row for name, row in ARCHITECTURES.items() if row.layers not in (None, UNROTATED)}
    elsewhere = {"qwen35", "qwen35moe", "qwen4exp", "bailingmoe3", "dots3note", "deepseek4"}
    assert {case[0] for case in CASES} | elsewhere == differing.keys()
    assert all(row.source.startswith("llama.cpp src/models/") for row in differing.values())


def test_origins_of_layer_types(path: Path) -> None:
    ropes = from_config(write(path, {"block_count": 3, **KEYS, **SLIDES, PATTERN: 3}, architecture="gemma3"))
    assert ropes.origins["layer_types"] == f"gemma3.{PATTERN}: the last of every 3 is full_attention"
    assert ropes.origins["base"] == ("implied by gemma3: 10000 in sliding layers and gemma3.rope.freq_base")
    assert ropes.layer_kinds == ("sliding_attention", "sliding_attention", "full_attention")
    assert ropes.windows == (SLIDES[WINDOW], SLIDES[WINDOW], None)


# ---- latent attention -----------------------------------------------------------------------------------------------

MLA = {**KEYS, "block_count": 2, "rope.dimension_count": 16, "attention.key_length": 80, "attention.key_length_mla": 24,
       "attention.value_length_mla": 24}  # fmt: skip
M1 = 0.1 * math.log(8) + 1


def latent(pairing: Any, scaling: Any = None) -> Rope:
    return Rope(24, 5e5, pairing, rotary_dim=16, rotary_offset=8, scaling=scaling)


@pytest.mark.parametrize(
    ("architecture", "keys", "rope", "softmax"),
    [
        ("deepseek2", {}, latent("interleaved"), 1.0),
        ("deepseek2", {"attention.key_length_mla": None, "attention.key_length": 24}, latent("interleaved"), 1.0),
        (
            "deepseek2",
            {**YARN, "rope.scaling.yarn_log_multiplier": 0.1},
            latent("interleaved", YaRN(8.0, 512, mscale=1.0, mscale_all_dim=1.0)),
            M1**2,
        ),
        (
            "deepseek2",
            {**YARN, "rope.scaling.yarn_log_multiplier": 0.0707},
            latent("interleaved", YaRN(8.0, 512, mscale=0.707, mscale_all_dim=0.707)),
            (0.0707 * math.log(8) + 1) ** 2,
        ),
        # Without the key, llama.cpp multiplies cos and sin, and also the softmax scale.
        ("deepseek2", YARN, latent("interleaved", YaRN(8.0, 512)), M1**2),
        # Only in deepseek2 is mscale equal to mscale_all_dim.
        (
            "mistral4",
            {**YARN, "rope.scaling.yarn_log_multiplier": 0.05},
            latent("interleaved", YaRN(8.0, 512, mscale=1.0, mscale_all_dim=0.5)),
            M1**2,
        ),
        ("glm-dsa", {"attention.indexer.key_length": 32}, latent("interleaved"), 1.0),
        ("deepseek32", {"attention.indexer.key_length": 32}, latent("interleaved"), 1.0),
        ("minicpm3", {"attention.key_length_mla": None, "attention.key_length": 24}, latent("half"), 1.0),
        ("plm", {"attention.key_length_mla": None, "attention.key_length": 24, **LINEAR},
         latent("interleaved", Linear(8.0)), 1.0),
        # Their attention does not scale the softmax.
        ("plm", {"attention.key_length_mla": None, "attention.key_length": 24, **YARN},
         latent("interleaved", YaRN(8.0, 512)), 1.0),
    ],
)  # fmt: skip
def test_latent(path: Path, architecture: str, keys: dict[str, Any], rope: Rope, softmax: float) -> None:
    ropes = from_config(write(path, {**MLA, **keys}, architecture=architecture))
    assert ropes.layers == (rope,) * 2
    assert ropes.softmax_factor == pytest.approx(softmax, rel=1e-6)
    assert any("and also the softmax scale" in warning for warning in ropes.warnings) == (
        architecture in ("deepseek2", "mistral4") and rope.attention_factor != 1.0
    )


def test_indexers(path: Path) -> None:
    keys = {**MLA, "attention.indexer.key_length": 32}
    others = from_config(write(path, keys, architecture="deepseek32")).extra_ropes
    assert others == {"indexer": Rope(32, 5e5, "half", rotary_dim=16)}
    others = from_config(write(path, keys, architecture="glm-dsa")).extra_ropes
    assert others == {"indexer": Rope(32, 5e5, "interleaved", rotary_dim=16)}


INDEXER = {"attention.indexer.key_length": 32}
COMPRESSED = YaRN(8.0, 512, attention_factor=1.0)
FLAT = {**KEYS, "block_count": 1}


@pytest.mark.parametrize(
    ("architecture", "keys", "layers", "indexer"),
    [
        ("hy_v4", {}, [latent("interleaved")] * 2, None),
        ("hy_v4", INDEXER, [latent("interleaved")] * 2, Rope(32, 5e5, "interleaved", rotary_dim=16, rotary_offset=16)),
        ("bailingmoe3", {"attention.head_count_kv": [0, 1]}, [None, latent("interleaved")], None),
        (
            "bailingmoe3",
            {"attention.head_count_kv": [0, 1], SECTIONS: [2, 3, 3, 0]},
            [None, dataclasses.replace(latent("half"), axes=Axes.sections((2, 3, 3)))],
            None,
        ),
        (
            "dots3note",
            {**SLIDES, **INDEXER, PATTERN: [0, 1], LOCAL: 1e4, "attention.key_length_mla_swa": 32},
            [latent("interleaved"), Rope(32, 1e4, "interleaved", rotary_dim=16, rotary_offset=16)],
            Rope(32, 5e5, "half", rotary_dim=16),
        ),
        # It scales only the layers with compressed attention, and cancels the attention factor of YaRN.
        (
            "deepseek4",
            {**SLIDES, **INDEXER, **YARN, "attention.key_length": 24, "attention.key_length_mla": None,
             "attention.value_length_mla": None, "block_count": 4, "nextn_predict_layers": 1,
             "attention.compress_ratios": [0, 4, 128, 0], "attention.compress_rope_freq_base": 1e4},
            [latent("interleaved"), *[dataclasses.replace(latent("interleaved", COMPRESSED), base=1e4)] * 2],
            Rope(32, 1e4, "interleaved", rotary_dim=16, rotary_offset=16, scaling=COMPRESSED),
        ),
        (
            "qwen4exp",
            {**FLAT, **INDEXER, "block_count": 4, SECTIONS: [3, 3, 2, 0], "attention.key_length": 16,
             "attention.key_length_mla": None},
            [None, None, None, dataclasses.replace(HALF, axes=Axes.interleaved((3, 3, 2)))],
            Rope(32, 5e5, "half", rotary_dim=16, axes=Axes.interleaved((3, 3, 2))),
        ),
        (
            "minimax-m3",
            {**FLAT, **INDEXER, "rope.dimension_count": 8, "attention.key_length": 16,
             "attention.key_length_mla": None},
            [Rope(16, 5e5, "half", rotary_dim=8)],
            Rope(32, 5e5, "half", rotary_dim=8),
        ),
    ],
)  # fmt: skip
def test_layers_with_an_indexer_or_latent_attention(
    path: Path, architecture: str, keys: dict[str, Any], layers: list[Rope | None], indexer: Rope | None
) -> None:
    ropes = from_config(write(path, {**MLA, **keys}, architecture=architecture))
    assert list(ropes.layers) == layers
    assert ropes.extra_ropes == ({} if indexer is None else {"indexer": indexer})
    assert ropes.rotates_values == (architecture == "deepseek4")
    assert any("its converter does not permute" in warning for warning in ropes.warnings) == (architecture == "hy_v4")


def test_grok_has_its_own_defaults_of_yarn(path: Path) -> None:
    keys = {**FLAT, **YARN, "rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_ext_factor": 1.0}
    assert from_config(write(path, keys, architecture="grok")).rope.scaling == YaRN(8.0, 512, beta_fast=8.0)
    keys |= {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0}
    stated = YaRN(8.0, 512, beta_fast=16.0, beta_slow=2.0)
    assert from_config(write(path, keys, architecture="grok")).rope.scaling == stated


@pytest.mark.parametrize(
    ("architecture", "keys", "tensors", "rope"),
    [
        ("eagle3", {}, {FREQS: EIGHT}, FACTORS_INTERLEAVED),
        ("nanbeige", {}, {FREQS: EIGHT}, FACTORS_INTERLEAVED),
        ("pockettts", {}, {}, INTERLEAVED),
        ("graniteswitch", {}, {}, INTERLEAVED),
        ("graniteswitch", {"rope.scaling.finetuned": False}, {}, None),
        ("hrm_text", YARN, {}, YARNED),
        ("plamo", {}, {}, HALF),
        ("talkie", {}, {}, HALF),
    ],
)
def test_layers_that_are_alike(
    path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, Any], rope: Rope | None
) -> None:
    read = from_config(write(path, {**FLAT, **keys}, tensors, architecture=architecture))
    assert read.layers == (rope,)


def test_minicpm3_reads_its_factor_tensors(path: Path) -> None:
    keys = {**MLA, "attention.key_length_mla": None, "attention.key_length": 24}
    keys |= {"rope.scaling.original_context_length": 512}
    tensors = {"rope_factors_short.weight": [1.0] * 8, "rope_factors_long.weight": EIGHT}
    rope = from_config(write(path, keys, tensors, architecture="minicpm3")).rope
    assert isinstance(rope.scaling, LongRoPE)
    assert rope.rotary_offset == 8


def test_the_query_scale_grows_with_the_position(path: Path) -> None:
    keys = {**MLA, "attention.temperature_scale": 0.1, "attention.temperature_length": 512}
    scale = from_config(write(path, keys, architecture="deepseek2")).query_scale
    assert scale is not None
    assert (scale.at(511), scale.at(512)) == (1.0, pytest.approx(1 + 0.1 * math.log(2)))
    scale = from_config(
        write(path, {**KEYS, "block_count": 4}, architecture="llama4")
    ).query_scale  # llama.cpp: without a key
    assert scale is not None
    assert scale.only_unrotated
    assert (scale.at(8190), scale.at(8191)) == (1.0, pytest.approx(1 + 0.1 * math.log(2)))


# ---- several axes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "sections", "axis"),
    [
        ("qwen2vl", [2, 3, 3, 0], [0, 0, 1, 1, 1, 2, 2, 2]),
        ("paddleocr", [2, 3, 3, 0], [0, 0, 1, 1, 1, 2, 2, 2]),
        ("qwen3vl", [4, 2, 2, 0], [0, 1, 2, 0, 1, 2, 0, 3]),
        ("qwen3vlmoe", [3, 3, 2, 0], [0, 1, 2, 0, 1, 2, 0, 1]),
        ("qwen3tts", [4, 2, 2, 0], [0, 1, 2, 0, 1, 2, 0, 3]),
        # NORM without sections. If there are sections, the converter permutes q and k.
        ("glm4", [2, 3, 3, 0], [0, 0, 1, 1, 1, 2, 2, 2]),
        ("glm4moe", [2, 3, 3, 0], [0, 0, 1, 1, 1, 2, 2, 2]),
        ("hunyuan_vl", [2, 2, 2, 0], [0, 0, 1, 1, 2, 2, 0, 0]),  # the sections cover 6 of 8 pairs and repeat
    ],
)
def test_axes(path: Path, architecture: str, sections: list[int], axis: list[int]) -> None:
    """The row of positions of each of 8 pairs, derived by hand from ggml_mrope_cache_init."""
    write(path, {"block_count": 2, **KEYS, SECTIONS: sections}, architecture=architecture)
    text = from_config(path, text_only=True)
    assert text.layers == (HALF,) * 2
    assert text.warnings[0].startswith("text only")
    ropes = from_config(path)
    axes = Axes(axis, lengths=[8] * (4 if 3 in axis else 3))
    assert ropes.layers == (dataclasses.replace(HALF, axes=axes),) * 2
    assert ropes.axis_names == ("time", "height", "width", "fourth row")[: axes.count]
    assert ropes.origins["axes"].endswith(SECTIONS)
    expected = [f"covers {sum(sections)} pairs, but 8 rotate: llama.cpp"] * (sum(sections) != 8)
    expected += ["a fourth row of positions filled with 0"] * (3 in axis)
    assert len(ropes.warnings) == len(expected)
    assert all(words in warning for words, warning in zip(expected, ropes.warnings, strict=True))
    assert not any("but 8 rotate" in warning for warning in text.warnings)


def test_the_last_pairs_of_qwen3_vl(path: Path) -> None:
    """By the code of ggml, pair 61 would use the height, which has only 20 pairs."""
    keys = {
        **KEYS,
        "block_count": 1,
        "attention.key_length": 128,
        "rope.dimension_count": 128,
        SECTIONS: [24, 20, 20, 0],
    }
    write(path, keys, architecture="qwen3vl")
    ropes = from_config(path, text_only=True)
    assert ropes.rope == Rope(128, 5e5, "half")
    assert any("does not rotate pairs 61-62 of text tokens" in warning for warning in ropes.warnings)
    axes = from_config(path).rope.axes
    assert axes is not None
    assert axes.count == 4
    model_axes = Axes.interleaved((24, 20, 20)).axis
    assert [(i, axes.axis[i], model_axes[i]) for i in range(64) if axes.axis[i] != model_axes[i]] == [
        (61, 3, 0),
        (62, 3, 0),
    ]
    assert "no axis of rope.dimension_sections covers pairs 61-62" in from_config(path).warnings[0]
    write(path, {**keys, SECTIONS: [22, 21, 21, 0]}, architecture="qwen3vl")
    assert len(from_config(path, text_only=True).warnings) == 1
    assert from_config(path).rope.axes == Axes.interleaved((22, 21, 21))
    assert from_config(path).warnings == ()


@pytest.mark.parametrize("architecture", ["glm4", "glm4moe", "hunyuan_vl"])
@pytest.mark.parametrize("more", [{}, {SECTIONS: [0, 0, 0, 0]}, {SECTIONS: [8, 0, 0, 0]}])
def test_no_axes_without_sections(path: Path, architecture: str, more: dict[str, Any]) -> None:
    rope = from_config(write(path, {"block_count": 2, **KEYS, **more}, architecture=architecture)).rope
    assert rope == (INTERLEAVED if architecture == "glm4" else HALF)


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
def test_several_axes_and_layers_that_differ(path: Path, architecture: str) -> None:
    keys = {"block_count": 5, **KEYS, SECTIONS: [3, 3, 2, 0], "nextn_predict_layers": 1}
    rope = dataclasses.replace(HALF, axes=Axes.interleaved((3, 3, 2)))
    ropes = from_config(write(path, keys, architecture=architecture))
    assert ropes.layers == (None, None, None, rope)
    keys_with_list = {**keys, "attention.recurrent_layers": [False, True, True, True, False]}
    ropes = from_config(write(path, keys_with_list, architecture=architecture))
    assert ropes.layers == (rope, None, None, None)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("gemma4", {LOCAL: 1e4, "attention.key_length_swa": 16}, "sliding_window_pattern must be given, since"),
        ("gemma4", {LOCAL: 1e4, PATTERN: [1, 0]}, "rope_freqs.weight must be given for gemma4"),
        ("gemma4", {PATTERN: [1, 0]}, "gemma4.rope.freq_base_swa must be given, since it is the base"),
        ("modern-bert", SLIDES, "modern-bert.rope.freq_base_swa must be given, since it is the base"),
        ("gemma3", {WINDOW: 128, BASE: None, PATTERN: 2}, "gemma3.rope.freq_base must be given, since it is the base"),
        ("gemma3", {WINDOW: 128, PATTERN: 0}, "sliding_window_pattern must be an integer of at least 1, got 0"),
        ("gemma3", {WINDOW: 128, PATTERN: [1, 0, 1]}, "with an entry for each of the 2 layers, got 3 entries"),
        ("gemma3", {WINDOW: 128, PATTERN: "LG"}, "with an entry for each of the 2 layers, got 'LG'"),
        ("gemma3", {WINDOW: 128, PATTERN: [1.0, 0.5]}, "must contain only booleans or counts, got 1.0"),
        ("gemma3", {WINDOW: 128, PATTERN: [1] * 1000}, "got an array of 1000"),
        ("gemma3", {WINDOW: "wide"}, "gemma3.attention.sliding_window must be an integer"),
        (
            "gemma3",
            {WINDOW: 128, PATTERN: 2, **YARN, "rope.scaling.attn_factor": 2.0},
            "gemma3.rope.scaling.attn_factor must be 1 or missing",
        ),
        ("gemma3", {"attention.key_length_swa": 8}, "Sliding-window layers with another head size"),
        ("olmo2", {WINDOW: 128, LOCAL: 1e4}, "olmo2.rope.freq_base_swa must agree with rope.freq_base=500000"),
        ("cohere2", {WINDOW: 128, LOCAL: 1e4}, "llama.cpp does not use it in cohere2"),
        ("exaone4", {WINDOW: 128}, " must be 0 or missing, since exaone4 has 2 layers instead of 64, got 128"),
        ("llama4", {WINDOW: 0}, "With 0, llama.cpp rotates all layers but the last"),
        ("llama4", {PATTERN: 1}, "must agree with the implied kinds (the last of every 4 is full_attention"),
        ("afmoe", {PATTERN: [0, 1]}, "llama.cpp ignores the key"),
        ("llama", {"attention.rope_pattern": [0, 1]}, "layers do not all rotate alike"),
        ("lfm2", {"attention.head_count_kv": [0, -1]}, "must contain only booleans or counts, got -1"),
        ("qwen3next", {"full_attention_interval": 0}, "full_attention_interval must be an integer of at least 1"),
        ("deepseek2", {"rope.dimension_count": None}, "attention.key_length_mla must be given"),
        ("deepseek2", {"attention.key_length": 16}, "rope.dimension_count must be less than the 16 channels"),
        ("plm", {"attention.key_length": 24, "rope.dimension_count": None}, "must be less than the 24 channels of the"),
        (
            "deepseek2",
            {**LINEAR, "attention.key_length": 24},
            "rope.scaling.type must be yarn for deepseek2, got linear",
        ),
        (
            "deepseek2",  # llama.cpp uses 32 for Kimi K2 nevertheless
            {**YARN, "attention.key_length": 24, "rope.scaling.yarn_beta_fast": 1.0},
            "rope.scaling.yarn_beta_fast must not be given for deepseek2",
        ),
        ("deepseek32", {"attention.key_length": 24}, "deepseek32.attention.indexer.key_length must be an integer"),
        (
            "deepseek2",
            {"attention.key_length": 24, "attention.temperature_scale": 0.1},
            "attention.temperature_length must be given",
        ),
        ("qwen2vl", {}, "qwen2vl.rope.dimension_sections must be a list of 4 numbers of pairs, got None"),
        ("qwen2vl", {SECTIONS: [8, 0, 0]}, " must be a list of 4 numbers of pairs, got (8, 0, 0)"),
        (
            "qwen2vl",
            {SECTIONS: [2, 2, 2, 2]},
            "must not assign pairs to a fourth axis, got (2, 2, 2, 2). The content of the fourth row of positions is",
        ),
        ("hunyuan_vl", {SECTIONS: [2, 2, 2, 2]}, "must not assign pairs to a fourth axis"),
        ("qwen2vl", {SECTIONS: [0, 0, 0, 0]}, "must assign at least one pair to an axis, got (0, 0, 0, 0)"),
    ],
)
def test_refusals(path: Path, architecture: str, keys: dict[str, Any], message: str) -> None:
    write(path, {"block_count": 2, **KEYS, **keys}, architecture=architecture)
    with pytest.raises(RopeError) as raised:
        from_config(path, text_only=True)
    assert message in str(raised.value)
    assert str(raised.value).startswith(str(path))


# ---- compared with the Hugging Face config of the same model --------------------------------------------------------


def assert_same(gguf_rope: Rope, hf_rope: Rope) -> None:
    """Check that two ropes rotate alike. Factors in a GGUF file have float32 precision."""
    assert (gguf_rope.head_dim, gguf_rope.rotary_offset) == (hf_rope.head_dim, hf_rope.rotary_offset)
    np.testing.assert_allclose(gguf_rope.inv_freq, hf_rope.inv_freq, rtol=1e-6)
    assert gguf_rope.attention_factor == pytest.approx(hf_rope.attention_factor)


def converter_keys(config: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that the converter writes for the sizes of a config, and `more`."""
    text = config.get("text_config", config)
    keys = {
        "block_count": text["num_hidden_layers"],
        "context_length": text["max_position_embeddings"],
        "embedding_length": text["hidden_size"],
        "attention.head_count": text["num_attention_heads"],
    }
    if "qk_rope_head_dim" in text:
        keys["attention.key_length"] = text.get("kv_lora_rank", 512) + text["qk_rope_head_dim"]
        keys["attention.key_length_mla"] = text["qk_nope_head_dim"] + text["qk_rope_head_dim"]
        keys["rope.dimension_count"] = text["qk_rope_head_dim"]
    elif text.get("head_dim"):
        keys["attention.key_length"] = text["head_dim"]
    return {**keys, **more}


def yarn_keys(factor: float, original: int, **more: float) -> dict[str, Any]:
    keys = {"type": "yarn", "factor": factor, "original_context_length": original,
            **{f"yarn_{name}": value for name, value in more.items()}}  # fmt: skip
    return {f"rope.scaling.{name}": value for name, value in keys.items()}


DEEPSEEK_YARN = yarn_keys(40.0, 4096, beta_fast=32.0, beta_slow=1.0)


def window_keys(name: str) -> dict[str, Any]:
    config = MODELS[name].get("text_config", MODELS[name])
    return {WINDOW: config["sliding_window"], PATTERN: [kind == "sliding_attention" for kind in config["layer_types"]]}


def check_same_ropes(
    config: dict[str, Any],
    path: Path,
    architecture: str,
    keys: dict[str, Any],
    tensors: Any = None,
    *,
    pairing: str | None = None,
) -> None:
    """Check that the GGUF file and the config of a model give the same ropes, except for the pairing `pairing`."""
    hf_ropes = from_config(config, text_only=True)
    gguf_ropes = from_config(
        write(path, converter_keys(config, keys), tensors, architecture=architecture), text_only=True
    )
    assert len(gguf_ropes.layers) == len(hf_ropes.layers)
    for gguf_rope, hf_rope in zip(gguf_ropes.layers, hf_ropes.layers, strict=True):
        assert (gguf_rope is None) == (hf_rope is None)
        if gguf_rope is not None and hf_rope is not None:
            assert_same(gguf_rope, hf_rope)
            assert gguf_rope.pairing == (pairing or hf_rope.pairing)
    assert gguf_ropes.softmax_factor == pytest.approx(hf_ropes.softmax_factor)
    assert dict(gguf_ropes.extra_ropes) == dict(hf_ropes.extra_ropes)


LLAMA3_EXAONE = from_config(MODELS["exaone-4.0-32b"]).layers[0]


@pytest.mark.parametrize(
    ("name", "architecture", "keys"),
    [
        ("gemma-3-27b-it", "gemma3", {BASE: 1e6, WINDOW: 1024, **LINEAR}),
        ("modernbert-base", "modern-bert", {BASE: 1.6e5, LOCAL: 1e4, WINDOW: 128, PATTERN: 3}),
        ("mmbert-small", "modern-bert", {BASE: 1.6e5, LOCAL: 1.6e5, WINDOW: 128, PATTERN: 3}),
        (
            "olmo-3.1-32b-instruct",
            "olmo2",
            {BASE: 5e5, **window_keys("olmo-3.1-32b-instruct"),
             **yarn_keys(8.0, 8192, attn_factor=1.2079441541679836, beta_fast=32.0, beta_slow=1.0)},
        ),
        ("deepseek-v2-lite", "deepseek2",
         {BASE: 1e4, **DEEPSEEK_YARN, "rope.scaling.yarn_log_multiplier": 0.0707}),
        ("deepseek-v3.2", "deepseek32",
         {BASE: 1e4, **DEEPSEEK_YARN, "rope.scaling.yarn_log_multiplier": 0.1, "attention.indexer.key_length": 128,
          "block_count": 62, "nextn_predict_layers": 1}),
        ("default-glm4_moe_lite", "deepseek2", {BASE: 1e4}),
        ("default-minicpm3", "minicpm3", {BASE: 1e4, "attention.key_length": 96, "attention.key_length_mla": None}),
        ("default-afmoe", "afmoe", {BASE: 1e4, WINDOW: 1024}),
        ("default-exaone_moe", "exaone-moe", {BASE: 1e4, **window_keys("default-exaone_moe")}),
        ("default-lfm2", "lfm2", {BASE: 1e6, "attention.head_count_kv": [8] * 32}),
        ("qwen3-next-80b-a3b", "qwen3next", {BASE: 1e7, "rope.dimension_count": 64, "full_attention_interval": 4}),
        ("qwen3.5-27b", "qwen35", {BASE: 1e7, "rope.dimension_count": 64, "full_attention_interval": 4,
                                   SECTIONS: [11, 11, 10, 0], "block_count": 65, "nextn_predict_layers": 1}),
        ("qwen2-vl-72b-instruct-gptq-int4", "qwen2vl", {BASE: 1e6, SECTIONS: [16, 24, 24, 0]}),
    ],
)  # fmt: skip
def test_models(path: Path, name: str, architecture: str, keys: dict[str, Any]) -> None:
    check_same_ropes(MODELS[name], path, architecture, keys)


@pytest.mark.parametrize(
    ("name", "architecture", "keys"),
    [
        ("gemma3n_text", "gemma3n", {BASE: 1e6, LOCAL: 1e4, WINDOW: 512}),
        ("cohere2", "cohere2", {BASE: 1e4, WINDOW: 4096}),
        ("llama4_text", "llama4", {BASE: 5e5}),
        ("deepseek_v3", "deepseek2", {BASE: 1e4}),
    ],
)
def test_class_defaults(path: Path, name: str, architecture: str, keys: dict[str, Any]) -> None:
    check_same_ropes(CLASSES[name], path, architecture, keys)


def test_smollm3_which_its_converter_permutes(path: Path) -> None:
    check_same_ropes(CLASSES["smollm3"], path, "smollm3", {BASE: 2e6}, pairing="interleaved")


def test_exaone_4_with_its_factors(path: Path) -> None:
    """The converter writes the divisors of Llama 3's scaling as factor tensors."""
    rope = LLAMA3_EXAONE
    assert rope is not None
    factors = (dataclasses.replace(rope, scaling=None).inv_freq / rope.inv_freq).astype(np.float32)
    check_same_ropes(
        MODELS["exaone-4.0-32b"], path, "exaone4", {BASE: 1e6, **window_keys("exaone-4.0-32b")}, {FREQS: factors}
    )


def test_gemma_4_with_its_factors(path: Path) -> None:
    keys = {BASE: 1e6, LOCAL: 1e4, **window_keys("gemma-4-26b-a4b"), "attention.key_length": 512,
            "attention.key_length_swa": 256, "rope.dimension_count": 512, "rope.dimension_count_swa": 256}  # fmt: skip
    check_same_ropes(MODELS["gemma-4-26b-a4b"], path, "gemma4", keys, {FREQS: [1.0] * 64 + [1e30] * 192})


def test_gpt_oss_except_for_the_ramp(path: Path) -> None:
    config = CLASSES["gpt_oss"]
    rounded = {**config, "rope_parameters": {**config["rope_parameters"], "truncate": True}}
    check_same_ropes(
        rounded, path, "gpt-oss", {BASE: 1.5e5, WINDOW: 128, **yarn_keys(32.0, 4096, beta_fast=32.0, beta_slow=1.0)}
    )
