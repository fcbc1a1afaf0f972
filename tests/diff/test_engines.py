"""`diff.engines`: compared with recorded tables and with the modules of running engines; its errors and its text."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest

import oracle
from each import each
from ropewalk import LongRoPE, Rope, RopeError, YaRN, diff, from_config
from ropewalk.configs.engine_ropes import ropes_for_engines
from ropewalk.engines import ENGINES
from ropewalk.tools.diff.rope_difference import compare_ropes

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = {row["name"]: row for row in json.loads((GOLDEN / "text_models.json").read_text())["rows"]}
NAMES = [engine.name for engine in ENGINES.values()]
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 2,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 131_072,
}


def scaled(**parameters: Any) -> dict[str, Any]:
    return {**LLAMA, "rope_scaling": parameters}


def yarn(**more: Any) -> dict[str, Any]:
    return scaled(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, **more)


def phi(**more: Any) -> dict[str, Any]:
    """Return a Phi-3 config whose short list slows each pair by two and whose long list slows it by ten."""
    lists = {"short_factor": [2.0] * 64, "long_factor": [10.0] * 64}
    scaling = {"rope_type": "longrope", "type": "longrope", "original_max_position_embeddings": 4096, **lists, **more}
    return {**LLAMA, "model_type": "phi3", "rope_scaling": scaling}


LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TAKEN = {
    "yarn": ({"rope_type": "yarn", "factor": 4.0}, {"mlx-lm": 4096}),
    "llama3": (LLAMA3, {"mlx-lm": 8192, "exllamav3": 8192}),
}


@pytest.mark.filterwarnings("ignore:.*the file has no original_max")
@pytest.mark.parametrize("rope_type", TAKEN)
def test_without_an_original_length_each_engine_takes_its_own(rope_type: str) -> None:
    """By the code of each engine: the class of transformers, or the default of a call of `get`."""
    parameters, defaults = TAKEN[rope_type]
    ((config, _),) = ropes_for_engines(scaled(**parameters))[1]
    for engine in ENGINES.values():
        answer = engine.answer(config)
        if (rope_type, engine.name) == ("yarn", "exllamav3"):
            assert (answer.why, answer.rope) == ("unknown", None)
            continue
        length = defaults.get(engine.name, LLAMA["max_position_embeddings"])
        assert answer.rope is not None
        assert answer.rope.scaling is not None
        assert answer.rope.scaling.trained_length(None) == length
        assert f"{length:,} tokens." in answer.notes[0]
        assert answer.evidence == "read"
    stated = scaled(**parameters, original_max_position_embeddings=1024)
    for engine in ENGINES.values():
        assert not any("Without" in note for note in engine.answer(ropes_for_engines(stated)[1][0][0]).notes)


# The factor of cos and sin in transformers, vLLM, SGLang, llama.cpp, mlx-lm and exllamav3, as their
# code computes it. For llama.cpp, the config goes through its converter for Llama.
M, HALF, SOLE = 1.3465736, 0.6732868, 1.2450275
YARN_TABLE = {
    "nothing": ({}, (M, M, M, M, M, M)),
    "attention_factor 1": ({"attention_factor": 1.0}, (1, 1, M, M, M, 1)),
    "both mscales 1": ({"mscale": 1.0, "mscale_all_dim": 1.0}, (1, 1, 1, M, 1, M)),
    "mscale alone": ({"mscale": 0.707}, (M, M, M, M, SOLE, M)),
    "mscale_all_dim 0": ({"mscale": 0.707, "mscale_all_dim": 0}, (M, M, SOLE, M, SOLE, M)),
    "attn_factor": ({"attn_factor": 0.5}, (M, M, HALF, M, M, M)),
}


@pytest.mark.parametrize("case", YARN_TABLE)
def test_attention_factors_of_yarn(case: str) -> None:
    more, wanted = YARN_TABLE[case]
    [row] = diff.engines(yarn(**more)).facts["ropes"]
    found = {name: one["attention_factor"] for name, one in row["at"][-1]["engines"].items()}
    assert found == {name: pytest.approx(value, rel=1e-6) for name, value in zip(NAMES, wanted, strict=True)}


def test_engines_that_honour_truncate() -> None:
    """In gpt-oss, some engines round the ends of the ramp, which changes frequencies by up to 43 %."""
    [row] = diff.engines(yarn(truncate=False)).facts["ropes"]
    same = {name for name, one in row["at"][0]["engines"].items() if one["apart"]["same"]}
    assert same == {"transformers", "vLLM", "SGLang", "exllamav3"}
    notes = {one["name"]: one["notes"] for one in row["engines"]}
    assert notes["mlx-lm"] == ["It ignores truncate."]
    assert notes["transformers"] == []


LONGROPE_TABLE = [  # sequence, length that the engines are configured for, engines that use the long list
    (4096, 4096, {"mlx-lm"}),
    (100, 131_072, {"vLLM", "llama.cpp", "mlx-lm", "exllamav3"}),
    (4097, 131_072, {"transformers", "vLLM", "llama.cpp", "mlx-lm", "exllamav3"}),  # SGLang: positions > 4096
    (4098, 131_072, {"transformers", "vLLM", "SGLang", "llama.cpp", "mlx-lm", "exllamav3"}),
]


@pytest.mark.parametrize(("sequence", "setting", "wanted"), LONGROPE_TABLE)
def test_when_longrope_uses_the_long_list(sequence: int, setting: int, wanted: set[str]) -> None:
    from ropewalk.configs.engine_ropes import ropes_for_engines

    [(asked, _)] = ropes_for_engines(phi())[1]
    fastest = {}
    for engine in ENGINES.values():
        rope = engine.answer(asked).at(sequence, setting)
        assert rope is not None
        fastest[engine.name] = rope.inv_freq[0]
        assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)), rel=1e-12)
    assert {name for name, w in fastest.items() if w == 0.1} == wanted
    assert {name for name, w in fastest.items() if w == 0.5} == set(NAMES) - wanted


def test_phimoe_never_takes_the_long_list_in_transformers() -> None:
    config = {**phi(short_mscale=1.1, long_mscale=1.3), "model_type": "phimoe"}
    rope = from_config(config, engine="transformers").rope
    assert [rope.at_length(n).inv_freq[0] for n in (64, 131_072)] == [0.5, 0.5]
    assert [rope.at_length(n).attention_factor for n in (64, 131_072)] == [1.1, 1.3]


WHOLE = json.loads((GOLDEN / "engines" / "vllm.json").read_text())["rows"]


@pytest.mark.filterwarnings("ignore:.* so the base is 10000:UserWarning")
def test_the_rule_of_vllm_matches_its_modules() -> None:
    """The rule of vLLM gives the frequencies, attention factor, pairing and channels of each recorded module."""
    models = sorted({row["model"] for row in WHOLE})
    assert len(models) == 32

    def check(model: str) -> None:
        rows = [row for row in WHOLE if row["model"] == model]
        length = rows[0]["max_model_len"]
        ropes = from_config(MODELS[model]["config"], engine="vllm", text_only=True)
        found = {rope.at_length(length) for rope in ropes.layers if rope is not None}
        matched = {rope: [row for row in rows if agrees(rope, row)] for rope in found}
        assert all(matched.values()), found
        assert all(any(row in ours for ours in matched.values()) for row in rows)

    each(((model, model) for model in models), check)


def agrees(rope: Rope, row: dict[str, Any]) -> bool:
    frequencies = np.float32(row["inv_freq"]).astype(float) / row.get("positions_divided_by", 1.0)
    return (
        rope.rotary_dim == row["rotary_dim"]
        and rope.pairing == ("half" if row.get("is_neox_style", True) else "interleaved")
        and math.isclose(rope.attention_factor, row["attention_factor_from_cache"], rel_tol=1e-7)
        and np.allclose(rope.inv_freq, frequencies, rtol=5e-7, atol=0)
    )


@pytest.mark.filterwarnings("ignore:.* so the base is 10000:UserWarning")
def test_the_rule_of_transformers_matches_its_models() -> None:
    """The rule of transformers gives the frequencies after a forward pass, and the attention factor, of each model."""

    count: list[str] = []

    def check(row: dict[str, Any]) -> None:
        config = row["config"]
        if config["model_type"] == "kimi_k2":  # the numbers are those of the class for deepseek_v3
            config = {**config, "model_type": "deepseek_v3"}
        ropes = from_config(config, engine="transformers", text_only=True)
        for case in row["cases"]:
            rope = ropes.layers[case.get("layer_idx", 0)]
            if rope is None or case.get("inv_freq") is None or "indexer" in case["id"]:
                continue
            count.append(case["id"])
            static = rope.at_length(max(max(p) if isinstance(p, list) else p for p in case["positions"]) + 1)
            np.testing.assert_allclose(static.inv_freq, case["inv_freq"], rtol=6e-7, atol=0)
            assert static.attention_factor == pytest.approx(case["attention_scaling"], rel=1e-6)

    each(MODELS.items(), check)
    assert len(count) > 70


META = {"dim": 4096, "n_heads": 32, "n_layers": 2, "rope_theta": 5e5, "use_scaled_rope": True}


def test_the_params_json_of_meta(tmp_path: Path) -> None:
    """It is compared as the config.json of Llama 3.1, up to 8 · 8192 tokens."""
    path = tmp_path / "params.json"
    path.write_text(json.dumps(META))
    found = diff.engines(path, factor=8.0)
    assert (found.verdict, found.facts["length"], found.facts["model_type"]) == ("agree", 65_536, "llama")
    first = found.facts["ropes"][0]["at"][0]["engines"]["transformers"]
    assert first["inv_freq"][-1] == pytest.approx(5e5 ** (-126 / 128) / 8)
    assert first["inv_freq"][0] == 1.0
    assert found.facts["source"] == str(path)
    assert "It was compared as the config.json of the same model, converted for transformers." in found.text()
    with pytest.raises(RopeError, match=r"Pass factor=8\.0"):
        diff.engines(path)


@pytest.mark.parametrize(
    ("scaling", "longest", "expected"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 32_768, 131_072),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 40_960, 131_072),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 40_960, 40_960),
        ({"rope_type": "dynamic", "factor": 1.0}, 8192, 16_384),
        ({"rope_type": "linear", "factor": 4.0}, 8192, 8192),
    ],
)
def test_the_length_is_that_of_the_scaled_context(scaling: dict[str, Any], longest: int, expected: int) -> None:
    config = {**LLAMA, "rope_scaling": scaling, "max_position_embeddings": longest}
    assert diff.engines(config, names=("transformers",)).facts["length"] == expected
    assert diff.configs(config, {**config, "rope_theta": 7e5}).facts["length"] == expected


class TestRefusals:
    def test_an_integer_as_linear_factor(self) -> None:
        found = diff.engines(scaled(rope_type="linear", factor=4))
        [row] = found.facts["ropes"]
        refused = {one["name"]: one["refused"] for one in row["engines"] if one["refused"]}
        assert set(refused) == {"vLLM", "SGLang"}
        assert "Write 4.0" in refused["vLLM"]
        assert found.verdict != "agree"
        assert "vLLM and SGLang do not run this config" in found.text()
        assert diff.engines(scaled(rope_type="linear", factor=4.0)).verdict == "agree"

    @pytest.mark.parametrize("key", [{"attn_factor": 0.0}, {"extrapolation_factor": 1.5}, {"attn_factor": "much"}])
    def test_keys_of_sglang_out_of_range(self, key: dict[str, Any]) -> None:
        [row] = diff.engines(yarn(**key), length=4096).facts["ropes"]
        refused = {one["name"]: one["refused"] for one in row["engines"] if one["refused"]}
        assert set(refused) == {"SGLang"}
        assert refused["SGLang"].endswith("not described here")

    def test_dynamic_ntk(self) -> None:
        config = {**scaled(rope_type="dynamic", factor=4.0), "max_position_embeddings": 2048}
        found = diff.engines(config)
        [row] = found.facts["ropes"]
        assert found.facts["length"] == 8192  # the scaled context
        assert [at["sequence"] for at in row["at"]] == [2048, 8192]
        assert [one["name"] for one in row["engines"] if one["refused"]] == ["exllamav3"]
        same = [{name for name, one in at["engines"].items() if one["apart"]["same"]} for at in row["at"]]
        # SGLang scales all lengths as for 4 · 2048 tokens.
        assert same == [{"transformers", "vLLM", "llama.cpp", "mlx-lm"}, {"transformers", "SGLang", "mlx-lm"}]

    def test_longrope_with_a_pairing_that_two_engines_refuse(self) -> None:
        config = {**phi(), "model_type": "mine"}
        [row] = diff.engines(config, pairing="interleaved").facts["ropes"]
        assert [one["name"] for one in row["engines"] if one["refused"]] == ["vLLM", "SGLang", "mlx-lm"]

    def test_an_older_name_of_longrope(self) -> None:
        for model, refused in (("phi3", []), ("llama", ["SGLang", "mlx-lm"])):
            config = {**phi(rope_type=None, type="su"), "model_type": model}
            [row] = diff.engines(config).facts["ropes"]
            assert [one["name"] for one in row["engines"] if one["refused"]] == refused

    def test_longrope_of_a_model_for_which_llama_cpp_writes_no_lists(self) -> None:
        rope = from_config({**phi(), "model_type": "llama"}, engine="llama.cpp").rope
        assert rope == from_config(LLAMA).rope

    def test_longrope_of_minicpm_in_llama_cpp(self) -> None:
        """The converter writes only the lists, so llama.cpp uses the context length of the model and a factor of 1."""
        minicpm = {**phi(), "model_type": "minicpm", "max_position_embeddings": 32_768}
        scheme = from_config(minicpm, engine="llama.cpp").rope.scaling
        assert (scheme.original_max_position_embeddings, scheme.attention_factor) == (32_768, 1.0)
        assert (scheme.short_mscale, scheme.long_mscale) == (None, None)
        assert from_config(minicpm).rope.scaling.original_max_position_embeddings == 4096

    def test_a_scaling_in_the_code_of_a_model(self) -> None:
        telechat = {"model_type": "telechat", "n_head": 4, "n_layer": 1, "hidden_size": 256, "training_seqlen": 32_768}
        [(config_rope, _)] = ropes_for_engines(telechat)[1]
        assert {engine.apply_rule(config_rope).refusal for engine in ENGINES.values()} == {
            "the scaling is in the model's own code instead of the config, which is not described here"
        }

    def test_from_config_names_the_engine_that_refuses(self) -> None:
        with pytest.raises(
            RopeError, match=r"config: exllamav3 1\.6\.5 must run the config, got ValueError: Unknown rope_type"
        ):
            from_config({**scaled(rope_type="dynamic", factor=4.0)}, engine="exllamav3")

    def test_engines_are_compared_with_the_first_that_runs(self) -> None:
        dynamic = {**scaled(rope_type="dynamic", factor=4.0), "max_position_embeddings": 2048}
        found = diff.engines(dynamic, names=("exllamav3", "sglang", "mlx-lm"))
        assert [row["compared_with"] for row in found.facts["ropes"]] == ["SGLang"]
        nobody = diff.engines(dynamic, names=("exllamav3",))
        assert nobody.facts["ropes"][0]["compared_with"] is None
        assert "exllamav3 does not run this config" in nobody.text()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"names": "vllm"}, r"names must be a collection, got 'vllm'\. Pass a tuple, e\.g\. names=\('vllm',\)"),
            ({"names": ("tgi",)}, "engine must be one of 'transformers', 'vllm', .*, got 'tgi'"),
            ({"length": 0}, "length"),
        ],
    )
    def test_arguments(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(RopeError, match=message):
            diff.engines(yarn(), **arguments)

    def test_configs_in_formats_of_one_program(self) -> None:
        with pytest.raises(RopeError, match=r"FluxTransformer2DModel of diffusers\. What engines read is known for"):
            from_config({"_class_name": "FluxTransformer2DModel"}, engine="vllm")
        with pytest.raises(RopeError, match=r"factor requires Meta's params\.json"):
            from_config(yarn(), engine="vllm", factor=8.0)
        with pytest.raises(RopeError, match=r"factor requires Meta's params\.json, got a config of Hugging Face"):
            diff.engines(yarn(), factor=8.0)
        with pytest.raises(RopeError, match="engine must be one of"):
            from_config(yarn(), engine=3)  # type: ignore[arg-type]

    def test_a_vision_tower(self) -> None:
        towers = json.loads((GOLDEN / "vision_towers.json").read_text())["rows"]
        tower = next(row["config"] for row in towers if row["config"]["model_type"] == "pixtral")
        says = r"text_only requires a text model, got pixtral, a vision tower\. Pass such a config"
        with pytest.raises(RopeError, match=says):
            diff.engines(tower)

    def test_a_model_that_does_not_rotate(self) -> None:
        smol = {**LLAMA, "model_type": "smollm3", "no_rope_layers": [0, 0]}
        found = diff.engines(smol, names=["transformers", "vllm"])
        assert (found.facts["ropes"], found.verdict) == ([], "agree")
        assert "No layer rotates, so there is nothing to compare." in found.text()
        assert "No layer rotates by the config.\n" in diff.engines(smol).text()  # llama.cpp rotates them

    def test_a_config_without_a_length(self) -> None:
        config = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
        with pytest.raises(RopeError, match="the length must be passed if the config does not state it"):
            diff.engines(config)
        assert diff.engines(config, length=4096).verdict == "agree"


class TestNumbersOfAnEngine:
    def test_schemes_are_kept_if_the_engine_has_them(self) -> None:
        assert from_config(yarn(), engine="vllm").rope == from_config(yarn()).rope
        rope = from_config(yarn(attention_factor=1.0, truncate=False), engine="mlx-lm").rope
        assert rope.scaling == YaRN(32.0, 4096, attention_factor=1 + 0.1 * math.log(32))

    def test_extrapolation_factor_is_no_scheme(self) -> None:
        """SGLang keeps half of the part of each frequency that YaRN would keep, here computed in mpmath."""
        rope = from_config(yarn(extrapolation_factor=0.5), engine="sglang").rope
        low, high = 20, 46  # rounded indices of the pairs that complete 32 turns and one turn
        assert oracle_yarn_ends() == (low, high)
        for i, w in enumerate(rope.inv_freq):
            plain = mpmath.mpf(10_000) ** (-mpmath.mpf(i) / 64)
            kept = (1 - min(max(mpmath.mpf(i - low) / (high - low), 0), 1)) / 2
            assert w == pytest.approx(float(plain / 32 * (1 - kept) + plain * kept), rel=1e-14)

    def test_ignored_keys_are_a_warning(self) -> None:
        ropes = from_config(yarn(attn_factor=0.5), engine="llama.cpp")
        wanted = "llama.cpp 0c1e57098: It ignores attn_factor."
        assert wanted in ropes.warnings
        assert "mlx-lm 0.32.2: It ignores attn_factor." in from_config(yarn(attn_factor=0.5), engine="mlx-lm").warnings

    def test_an_engine_that_reads_one_says_what_it_does_with_it(self) -> None:
        """As `YARN_TABLE` has it of SGLang's own class."""
        said = "SGLang 0.5.23: It multiplies the attention factor of YaRN by attn_factor, 0.5."
        assert said in from_config(yarn(attn_factor=0.5), engine="sglang").warnings
        assert not any("attn_factor" in said for said in from_config(yarn(), engine="sglang").warnings)

    def test_without_an_engine_such_a_key_is_an_error(self) -> None:
        with pytest.raises(RopeError, match=r"rope_scaling\.attn_factor"):
            from_config(yarn(attn_factor=0.5))

    def test_longrope_keeps_its_switch(self) -> None:
        rope = from_config(phi(), engine="vllm").rope
        assert isinstance(rope.scaling, LongRoPE)
        assert rope.at_length(131_072).inv_freq[0] == 0.1
        with_length = [w for w in from_config(phi(), engine="vllm").warnings if "max_model_len" in w]
        assert with_length

    def test_yarn_with_several_axes(self) -> None:
        """vLLM computes the ends of the ramp from four times the length."""
        config = {**yarn(mrope_section=[16, 24, 24]), "model_type": "qwen2_vl_text"}
        with pytest.raises(RopeError, match="no model qwen2_vl_text by itself: pass the whole config of qwen2_vl"):
            from_config(config, engine="vllm", text_only=True)
        rope = from_config({"model_type": "qwen2_vl", "text_config": config}, engine="vllm", text_only=True).rope
        assert rope.scaling == YaRN(32.0, 4 * 4096)

    def test_a_query_scale_that_vllm_does_not_read(self) -> None:
        config = MODELS["devstral-small-2-24b"]["config"]
        assert from_config(config, text_only=True).query_scale is not None
        ropes = from_config(config, engine="vllm", text_only=True)
        assert ropes.query_scale is None
        assert any("does not scale q by its position" in warning for warning in ropes.warnings)
        assert from_config(config, engine="sglang", text_only=True).query_scale is not None
        assert "vLLM: It does not scale q by its position" in diff.engines(config).text()

    def test_exllamav3_takes_the_factor_from_the_lengths(self) -> None:
        """Qwen 2.5 documents YaRN with 32,768 positions and a factor of 4, which exllamav3 does not scale."""
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
        config = {**LLAMA, "max_position_embeddings": 32_768, "rope_scaling": scaling}
        rope = from_config(config, engine="exllamav3").rope
        assert rope.attention_factor == 1.0
        np.testing.assert_allclose(rope.inv_freq, from_config(LLAMA).rope.inv_freq, rtol=1e-15, atol=0)
        assert "The config's factor 4 is ignored" in " ".join(diff.engines(config).text().split())

    def test_a_second_rope_of_the_layers(self) -> None:
        ropes = from_config(MODELS["deepseek-v3.2"]["config"], engine="vllm")
        assert set(ropes.extra_ropes) == {"indexer"}


def oracle_yarn_ends() -> tuple[int, int]:
    def index(turns: int) -> mpmath.mpf:
        return 128 * mpmath.log(4096 / (turns * 2 * mpmath.pi)) / (2 * mpmath.log(10_000))

    return int(mpmath.floor(index(32))), int(mpmath.ceil(index(1)))


ODD = (math.nan, math.inf, -1, 0, 0.5, 1e308, 10**400, True, "x", [], {}, None, [1.0] * 64)


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_but_numbers_or_rope_errors(engine: str) -> None:
    """Each key of four schemes has an unusual or invalid value."""
    keys = {
        "yarn": ("attn_factor", "extrapolation_factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast"),
        "dynamic": ("max_trained_positions", "factor", "alpha"),
        "longrope": ("attention_factor", "short_mscale", "factor", "long_factor"),
        "linear": ("factor",),
    }
    plain = {
        "yarn": yarn()["rope_scaling"],
        "dynamic": {"rope_type": "dynamic", "factor": 4.0},
        "longrope": phi()["rope_scaling"],
        "linear": {"rope_type": "linear", "factor": 4.0},
    }
    count = 0
    for scheme, names in keys.items():
        for name, value in itertools.product(names, ODD):
            for model in ("llama", "phi3", "deepseek_v3"):
                sizes = {"qk_rope_head_dim": 128, "qk_nope_head_dim": 64} if model == "deepseek_v3" else {}
                config = {**LLAMA, **sizes, "model_type": model, "rope_scaling": {**plain[scheme], name: value}}
                with contextlib.suppress(RopeError):
                    rope = from_config(config, engine=engine).rope.at_length(131_072)
                    assert np.isfinite(rope.inv_freq).all()
                    count += 1
    assert count > 30


class TestRopeDifference:
    A = Rope(8, 10_000.0, "half")

    def test_equal_ropes(self) -> None:
        found = compare_ropes(self.A, Rope(8, 10_000.0, "half"), 1000)
        assert found["same"]
        assert (found["inv_freq"]["times"], found["inv_freq"]["pairs_that_differ"]) == (1.0, 0)
        assert found["scores"] == {"largest_change": 0.0, "at_distance": 0}

    def test_an_attention_factor_alone(self) -> None:
        b = Rope(8, 10_000.0, "half", scaling=YaRN(1.0, 4096, attention_factor=2.0))
        found = compare_ropes(self.A, b, 1000)
        assert not found["same"]
        assert (found["inv_freq"]["times"], found["attention_factor_ratio"]) == (1.0, 2.0)
        assert found["scores"] == {"largest_change": 3.0, "at_distance": 0}

    def test_another_base(self) -> None:
        """The expected distance is found by computing the score at each distance in mpmath."""
        b = Rope(8, 20_000.0, "half", scaling=YaRN(1.0, 4096, attention_factor=1.5))
        found = compare_ropes(self.A, b, 60)
        apart = found["inv_freq"]
        assert (apart["pair"], apart["pairs_that_differ"], apart["slower"]) == (3, 3, True)
        assert apart["times"] == pytest.approx(2 ** (3 / 4), rel=1e-12)
        pairs = list(zip(oracle.inv_freq(10_000.0, 8), oracle.inv_freq(20_000.0, 8), strict=True))
        changes = [
            mpmath.fsum(abs(mpmath.expj(m * w) - mpmath.mpf("2.25") * mpmath.expj(m * v)) for w, v in pairs) / 4
            for m in range(61)
        ]
        worst = max(range(61), key=changes.__getitem__)
        assert found["scores"]["at_distance"] == worst
        assert found["scores"]["largest_change"] == pytest.approx(float(changes[worst]), rel=1e-12)

    def test_the_longest_distance_counts(self) -> None:
        """The pairs are so slow that the change still grows there. Beyond 131,072 tokens, distances are sampled."""
        slow = Rope(2, 10_000.0, "half", scaling=from_config(scaled(rope_type="linear", factor=1e7)).rope.scaling)
        slower = Rope(2, 10_000.0, "half", scaling=from_config(scaled(rope_type="linear", factor=2e7)).rope.scaling)
        for longest in (1000, 131_073, 200_000):
            assert compare_ropes(slow, slower, longest)["scores"]["at_distance"] == longest

    def test_a_pair_that_does_not_rotate(self) -> None:
        still = from_config({**MODELS["gemma-4-26b-a4b"]["config"]}, text_only=True).layers[-1]
        assert still is not None
        turning = Rope(still.head_dim, still.base, "half")
        facts = compare_ropes(turning, still, 10)
        assert facts["inv_freq"]["times"] is None
        json.dumps(facts, allow_nan=False)


def test_the_base_of_chatglm() -> None:
    """GLM-4-9B-Chat has rope_ratio 500. The files of all three engines multiply 10,000 by it."""
    config = {"model_type": "chatglm", "kv_channels": 128, "num_attention_heads": 32, "num_layers": 2}
    config |= {"hidden_size": 4096, "seq_length": 131_072, "rope_ratio": 500, "original_rope": True}
    for name in ("vllm", "sglang", "llama.cpp"):
        assert from_config(config, engine=name).rope.base == 5e6
    assert from_config({**config, "rope_ratio": 1}, engine="vllm").rope.base == 1e4


def test_gemma_4_in_sglang() -> None:
    """Its file passes the rope_type of rope_parameters to get_rope, without the keys that other schemes need."""
    config = MODELS["gemma-4-26b-a4b"]["config"]
    assert diff.engines(config, names=("transformers", "vllm", "sglang")).verdict == "agree"
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 65536}
    text = config["text_config"]
    text = {**text, "rope_parameters": {**text["rope_parameters"], "full_attention": yarn}}
    found = diff.engines({**config, "text_config": text}, names=("transformers", "sglang"))
    assert found.facts["states"]["SGLang"] == "unknown"


def test_all_facts_are_json() -> None:
    facts = diff.engines(yarn(mscale=0.707)).facts
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts


def test_text_of_engines_that_agree() -> None:
    text = diff.engines(LLAMA).text(verbose=True)
    assert "All 6 engines rotate identically, up to 131,072 tokens." in text
    assert "read, not run" not in text.partition("how the engines round")[0]
    assert "\n\nvLLM runs this config. The" in diff.engines(LLAMA, names=("vllm",)).text()
    assert "All 3 rotate identically" in diff.engines(LLAMA, names=("vllm", "megatron", "automodel")).text()
    assert "Both trainers rotate identically" in diff.engines(LLAMA, names=("megatron", "automodel")).text()
    assert "Both engines rotate identically" in diff.engines(LLAMA, names=("vllm", "sglang")).text()


PHI15 = {**LLAMA, "model_type": "phi", "hidden_size": 2048, "num_hidden_layers": 2}
# As transformers 5 saves Phi-1.5: mlx-lm does not read the fraction there and takes 0.4 of 64 channels.
SAVED_PHI15 = {**PHI15, "rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}
PHI4_LISTS = {"short_factor": [1.0] * 48, "long_factor": [4.0] * 48, "original_max_position_embeddings": 4096}
PHI4_ROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75, **PHI4_LISTS}
PHI4 = {**LLAMA, "model_type": "phi3", "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "refuse", "said"),
    [
        (SAVED_PHI15, {"mlx-lm"}, "so it rotates 25 channels of a head and not 32"),
        ({**PHI4, "rope_parameters": PHI4_ROPE}, {"SGLang"}, "so it rotates 128 channels of a head and not 96"),
    ],
)
def test_an_impossible_rope_is_the_answer_of_its_engine(config: dict[str, Any], refuse: set[str], said: str) -> None:
    """mlx-lm 0.32.2 raises `[rope] dims must be even but got 25`; 48 factors do not divide 64 frequencies."""
    found = diff.engines({key: value for key, value in config.items() if key != "rope_theta"})
    assert {name for name, state in found.facts["states"].items() if state == "refused"} == refuse
    text = words(found.text())
    assert f"does not run it: it reads the channels from partial_rotary_factor, {said} (" in text
    assert "Pass " not in text
    assert len(found.facts["ropes"][0]["at"][0]["engines"]) >= 4


def words(text: str) -> str:
    """Return a text without its line breaks."""
    return " ".join(text.split())


def test_text_of_engines_that_differ() -> None:
    text = diff.engines(yarn(mscale=0.707, truncate=False)).text()
    assert (
        "vLLM, SGLang and exllamav3 agree with transformers. llama.cpp and mlx-lm differ from transformers. "
        "The engines are configured for 131,072 tokens."
    ) in words(text)
    line = next(line for line in text.splitlines() if line.strip().startswith("mlx-lm 0.32.2  "))
    assert line.split()[2] == "1.24503"
    assert "25 pairs differ, at most 2.119 times faster (pair 45)" in line


def test_the_text_says_that_the_indexer_was_not_compared() -> None:
    """It is a second attention in each layer, and mlx-lm#512 is about its pairing."""
    found = diff.engines(MODELS["deepseek-v3.2"]["config"])
    assert found.facts["not_compared"][0] == "the rope of its indexer"
    assert "Not compared: the rope of its indexer; the softmax scale, " in " ".join(found.text().split())


def test_the_text_says_what_was_not_compared() -> None:
    smollm3 = {**LLAMA, "model_type": "smollm3", "no_rope_layers": [0] + [1] * (LLAMA["num_hidden_layers"] - 1)}
    names = ["transformers", "vllm", "sglang", "mlx-lm", "exllamav3"]
    text = diff.engines(smollm3, names=names).text()
    assert "If the same layers rotate, all 5 engines rotate identically, up to 131,072 tokens." in text
    assert "Not compared: which layers rotate." in text
    windows = {**LLAMA, "model_type": "mistral", "sliding_window": 4096}  # exllamav2#245: a Mistral beyond 8k tokens
    assert "Not compared: which engines apply its windows." in diff.engines(windows).text()
    assert "windows" not in diff.engines({**windows, "sliding_window": None}).text()
    scaling = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    deepseek = {**LLAMA, "model_type": "deepseek_v3", "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    deepseek["rope_scaling"] = scaling | {"original_max_position_embeddings": 4096}
    factor = (0.1 * math.log(40) + 1) ** 2
    said = f"Not compared: the softmax scale, which this config multiplies by {factor:.6g}."
    assert said in words(diff.engines(deepseek).text())


@pytest.mark.parametrize("n", [4, 2])
def test_llama_cpp_rotates_fixed_layers(n: int) -> None:
    """Its smollm3.cpp skips layers for which (il + 1) % 4 is 0. No key of a GGUF file states others."""
    flags = [int((i + 1) % n != 0) for i in range(8)]
    config = {**LLAMA, "model_type": "smollm3", "num_hidden_layers": 8, "no_rope_layers": flags}
    found = diff.engines(config)
    assert found.verdict == ("agree" if n == 4 else "differ")
    assert ("rotates all but each 4th layer, whatever the config states." in words(found.text())) is (n == 2)


def test_exllamav3_rotates_although_the_base_is_null() -> None:
    """Its read_dict takes null for a missing key. Its class of Olmo Hybrid passes every full_attention layer a rope."""
    kinds = ["linear_attention", "full_attention"]
    config = {**LLAMA, "model_type": "olmo_hybrid", "num_hidden_layers": 2, "layer_types": kinds}
    config = {**config, "rope_theta": None, "rope_parameters": {"rope_theta": None}}
    found, alike = diff.engines(config), diff.engines(config, names=["transformers", "vllm"])
    assert (found.verdict, found.facts["states"]["exllamav3"]) == ("differ", "differs")
    assert "No layer rotates by the config." in found.text()
    assert "exllamav3: It reads a base of null as 10000, and rotates the layers" in words(found.text())
    assert "No layer rotates, so there is nothing to compare." in alike.text()
    rotated = diff.engines({**config, "rope_parameters": {"rope_theta": 500_000.0}})
    assert rotated.facts["beside"] == {}


def test_no_engine_reads_the_pairing_of_convert() -> None:
    converted = diff.engines({**LLAMA, "ropewalk_pairing": "interleaved"})
    assert converted.verdict == "agree"
    assert "No engine reads ropewalk_pairing. They rotate as for any other llama." in converted.facts["warnings"]
    assert converted.facts["ropes"] == diff.engines(LLAMA).facts["ropes"]


def test_a_nested_truncate_in_transformers() -> None:
    config = {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_hidden_layers": 6,
        "max_position_embeddings": 131_072,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }
    sliding, full = diff.engines(config).facts["ropes"]
    assert sliding["at"][0]["engines"]["vLLM"]["apart"]["same"]
    assert full["engines"][0]["notes"] == [
        "It ignores truncate and rounds the ramp if the parameters are nested by the kind of layer."
    ]
    assert not full["at"][0]["engines"]["vLLM"]["apart"]["same"]


TRAINED = "original_max_position_embeddings"


def test_a_base_that_transformers_does_not_read() -> None:
    """transformers 5 reads rope_scaling in place of rope_parameters, and with it the engines that use its classes."""
    llama3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3["original_max_position_embeddings"] = 8192
    sizes = {"num_hidden_layers": 1, "head_dim": 128, "max_position_embeddings": 131_072}
    both = {"rope_parameters": {**llama3, "rope_theta": 5e5}, "rope_scaling": llama3}
    config = {"model_type": "llama", **sizes, **both}
    found = diff.engines(config)
    second = {name: each["inv_freq"][1] for name, each in found.facts["ropes"][0]["at"][0]["engines"].items()}
    assert found.verdict == "differ"
    assert {name for name, each in second.items() if each != pytest.approx(1e4 ** (-1 / 64))} == {"exllamav3"}
    with pytest.warns(UserWarning, match="no effect in transformers"):
        bases = {name: from_config(config, engine=name).rope.base for name in ("vllm", "llama.cpp", "exllamav3")}
    assert bases == {"vllm": 1e4, "llama.cpp": 1e4, "exllamav3": 5e5}
    # Which of two lengths an engine takes that reads the file itself was not recorded.
    scaled = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 4, **dict.fromkeys([TRAINED], 2048)}}
    states = diff.engines({"model_type": "llama", **sizes, **scaled, TRAINED: 1024}).facts["states"]
    assert [name for name, state in states.items() if state == "unknown"] == ["exllamav3"]
