"""What the file of each model in an engine reads, compared with models that the engines built (golden files)."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from each import each
from ropewalk import Rope, RopeError, diff, from_config
from ropewalk.configs.models import ARCHITECTURES
from ropewalk.configs.tables.wrappers import WRAPPERS
from ropewalk.engines import ENGINES, MORE_ENGINES, TRAINERS
from ropewalk.schemes import YaRN

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "golden" / "engine_models"
sys.path.insert(0, str(ROOT / "tools" / "recording"))
import tables  # noqa: E402

OLDER = {"transformers-4": MORE_ENGINES["transformers-4"]}
ALL = {**ENGINES, **OLDER, **{name: trainer for name, trainer in TRAINERS.items() if not trainer.built_in}}


def file_name(name: str) -> str:
    return name.replace("-", "_").replace(".", "_")


FILES = {name: file_name(name) for name in ALL}
RECORDED = [name for name in FILES if name != "transformers"]


def golden(kind: str, name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{kind}_of_{file_name(name)}.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", [*FILES, *MORE_ENGINES])
def test_the_tables_are_those_of_the_golden_files(name: str) -> None:
    recorded = golden("models", name)
    engine = {**ALL, **MORE_ENGINES}[name]
    assert (tables.PACKAGE / f"{engine.files}.json").read_text() == tables.text(tables.table(recorded))
    peer = recorded["peer"]
    assert peer["version"] == engine.version if "version" in peer else peer["commit"][:9] == engine.version


@pytest.mark.parametrize("name", FILES)
def test_each_known_model_type_was_looked_up(name: str) -> None:
    known = {model for model, row in ARCHITECTURES.items() if not row.refusal} | WRAPPERS.keys()
    looked_up = {row["model_type"].partition("/")[0] for row in golden("models", name)["rows"]}
    assert known <= looked_up


def with_keys(config: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Add keys to a config. Those of an object that the config has are added to this object."""
    inner = {key: {**config[key], **value} for key, value in keys.items() if isinstance(config.get(key), dict)}
    return {**config, **keys, **inner}


SEQUENCE = 512
"""The length for which the ropes were recorded."""

COMPARED = {
    "mlx-lm": (300, 60),
    "sglang": (250, 45),
    "vllm": (250, 45),
    "exllamav3": (120, 25),
    "llama.cpp": (100, 30),
    "megatron": (150, 20),
    "automodel": (100, 20),
    "transformers-4": (280, 40),
}
"""At least so many configs of so many models, in each schema, have equal ropes, or are rejected by both."""


@pytest.mark.filterwarnings(
    "ignore:.*not stated:UserWarning",
    "ignore:.* so the base is:UserWarning",
    "ignore:.* ha(s|ve) no effect in transformers:UserWarning",
)
@pytest.mark.parametrize("name", RECORDED)
def test_ropes_are_those_that_the_models_build(name: str) -> None:
    """`from_config` gives the rope of each layer of the engine's own model, or refuses what the engine refuses."""
    recorded = golden("ropes", name)
    compared: list[list[str]] = []

    def check(row: dict[str, Any]) -> None:
        config = with_keys(recorded["configs"][row["config"]], row["keys"])
        layers, refusal = (), ""
        try:
            layers = from_config(config, engine=name, text_only=True).layers
        except RopeError as e:
            refusal = str(e)
        if "it does not apply this scheme" in refusal and "ropes" in row:
            [group, *_] = row["ropes"]
            own = from_config(config, text_only=True).layers[group["layers"][0]]
            with pytest.raises(AssertionError):
                compare(own, group["rope"], in_forward_pass=True)
            return
        if "was not recorded" in refusal:
            return
        compared.append(row["case"].split(", "))
        assert ("must run the config" in refusal) == ("refused" in row), (refusal, row)
        if refusal:
            return
        for group in row["ropes"]:
            for layer in group["layers"]:
                compare(layers[layer], group["rope"], in_forward_pass=name == "mlx-lm")

        compared.append(row["case"].split(", "))

    each(((row["case"], row) for row in recorded["rows"]), check)
    configs, models = COMPARED[name]
    assert len(compared) >= configs
    for version in ("v4", "v5"):
        assert len({model for model, *rest in compared if rest[:1] == [version]}) >= models
    assert {scheme for _, *rest in compared for scheme in rest[1:]} == {"default", "linear", "llama3", "yarn"}


def test_a_config_whose_layers_are_alike_and_a_file_that_tells_them_apart() -> None:
    """The converter of llama.cpp reads further keys of the base for the sliding layers of gpt-oss."""
    recorded = golden("ropes", "llama.cpp")
    row = next(row for row in recorded["rows"] if row["case"] == "gpt_oss, v4, default")
    config = with_keys(recorded["configs"]["gpt_oss"], row["keys"])
    compare(from_config(config, engine="llama.cpp").rope, row["ropes"][0]["rope"], in_forward_pass=False)


def compare(rope: Any, wanted: Any, *, in_forward_pass: bool) -> None:
    """Compare a rope with a recorded one.

    Only a forward pass shows that a layer does not rotate. Other recordings have the ropes that a layer builds.
    """
    if rope is None or wanted is None:
        assert not in_forward_pass or rope is wanted
        return
    static = rope.at_length(SEQUENCE)
    rotating = static.inv_freq[static.inv_freq > 0]  # proportional scaling has pairs that do not rotate
    assert 2 * len(rotating) == wanted["rotary_dim"]
    assert wanted["pairing"] in ("", static.pairing)
    # A power in float32 is exp(-x ln base): it multiplies the rounding of its exponent by up to ln base. YaRN's factor,
    # at most 8, multiplies the rounding of the weight of the unscaled frequency.
    rtol = 2**-24 * (4 + 8 + math.log(static.base))
    np.testing.assert_allclose(rotating, wanted["inv_freq"], rtol=rtol, atol=0)
    assert static.attention_factor == pytest.approx(wanted["attention_factor"], rel=2e-7)


LLAMA_5 = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 131_072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
}


STEP = {
    "head_dim": 64,
    "layer_types": ["full_attention"] * 2,
    "rope_parameters": {"full_attention": LLAMA_5["rope_parameters"]},
}


LING = {
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "head_dim": 64,
    "layer_group_size": 2,
    "partial_rotary_factor": 0.5,
    "rope_interleave": True,
}


def state(config: dict[str, Any], name: str) -> tuple[str, list[str]]:
    """Return the state of an engine, and its notes and refusals for the first rope."""
    facts = diff.engines(config).facts
    engine = ENGINES[name].name
    [entry] = [entry for entry in facts["ropes"][0]["engines"] if entry["name"] == engine]
    return facts["states"][engine], [*entry["notes"], *filter(None, [entry["refused"]])]


class TestSentences:
    def test_a_base_that_is_not_read(self) -> None:
        """mlx-lm's file for Llama reads only the keys of transformers 4."""
        wanted = "It reads the base from rope_theta, so the base is 10000 and not 500000."
        assert state(LLAMA_5, "mlx-lm") == ("differs", [wanted])
        assert state({**LLAMA_5, "rope_theta": 500_000.0}, "mlx-lm") == ("same", [])
        assert diff.engines(LLAMA_5).verdict == "differ"

    @pytest.mark.parametrize("model", ["phi3", "phi4_multimodal", "phimoe"])
    @pytest.mark.parametrize("scheme", ["default", "linear", "dynamic", "llama3"])
    def test_schemes_that_the_classes_for_phi_reject(self, model: str, scheme: str) -> None:
        for_model = pytest.importorskip("transformers").AutoConfig.for_model
        llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32_768}
        schemes: dict[str, dict[str, Any]] = {"default": {}, "llama3": {"factor": 4.0, **llama3}}
        parameters = {"rope_theta": 1e4, "rope_type": scheme, **schemes.get(scheme, {"factor": 4.0})}
        config = {**LLAMA_5, "rope_parameters": parameters}
        try:
            for_model(model, **{key: value for key, value in config.items() if key != "model_type"})
            wanted = "same"
        except Exception:
            wanted = "refused"
        found = diff.engines({**config, "model_type": model}, names=["transformers"])
        assert found.facts["states"]["transformers"] == wanted

    def test_yarn_without_a_length_beside_rope_parameters(self) -> None:
        """mlx-lm takes 4,096 tokens, and the others max_position_embeddings."""
        scaling = {"rope_type": "yarn", "factor": 4.0}
        alone = {**LLAMA_5, "rope_parameters": {**LLAMA_5["rope_parameters"], **scaling}}
        twice = {**LLAMA_5, "rope_theta": 500_000.0, "rope_scaling": scaling}
        read = [
            diff.engines(config, names=["vllm", "sglang", "llama.cpp", "mlx-lm"]).facts["ropes"][0]["at"][0]["engines"]
            for config in (alone, twice)
        ]
        first = {name: found["inv_freq"] for name, found in read[0].items() if name != "mlx-lm"}
        assert first == {name: read[1][name]["inv_freq"] for name in first}
        wanted = YaRN(factor=4.0, original_max_position_embeddings=4096)
        assert read[1]["mlx-lm"]["inv_freq"] == Rope(64, 500_000.0, "half", scaling=wanted).inv_freq.tolist()

    def test_the_keys_of_hunyuan_ocr_at_the_top_level(self) -> None:
        """Tencent's files have no text_config. HunYuanVLConfig moves the keys into one, and engines run its model."""
        scaling = {"type": "xdrope", "alpha": 1000.0, "factor": 1.0, "xdrope_section": [16, 16, 16, 16]}
        text = {"hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128, "num_hidden_layers": 2,
                "max_position_embeddings": 32_768, "rope_theta": 10_000.0, "rope_scaling": scaling}  # fmt: skip
        states = {"transformers": "same", "vLLM": "same", "SGLang": "same", "llama.cpp": "same"}
        for config in (text, {"text_config": {"model_type": "hunyuan_vl_text", **text}}):
            found = diff.engines({"model_type": "hunyuan_vl", **config}, names=[name.lower() for name in states])
            assert found.facts["states"] == states

    def test_a_scaling_that_is_not_read(self) -> None:
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
        mixtral = {**LLAMA_5, "model_type": "mixtral", "rope_theta": 1e6, "rope_scaling": scaling}
        del mixtral["rope_parameters"]
        for name in ("mlx-lm", "sglang"):
            assert state(mixtral, name) == ("differs", ["It reads no scaling, so nothing is scaled."])
        assert state(mixtral, "vllm") == ("same", [])

    def test_a_model_that_an_engine_does_not_have(self) -> None:
        found = diff.engines({**LLAMA_5, "model_type": "arcee"})
        assert found.facts["states"]["mlx-lm"] == "absent"
        assert "  mlx-lm 0.32.2 has no model arcee." in found.text().splitlines()
        assert "mlx-lm has no model arcee." in " ".join(found.text().split("layers")[0].split())
        with pytest.raises(RopeError, match=r"mlx-lm 0\.32\.2 must run the config, got has no model arcee"):
            from_config({**LLAMA_5, "model_type": "arcee"}, engine="mlx-lm")

    @pytest.mark.parametrize(
        ("model", "name", "keys", "wanted"),
        [
            ("phimoe", "llama.cpp", {}, "unknown"),  # PhiMoEForCausalLM
            ("step3p5", "llama.cpp", STEP, "unknown"),
            ("step3p5", "vllm", STEP, "unknown"),
            ("step3p5", "sglang", STEP, "unknown"),
            ("exaone", "vllm", {}, "absent"),  # its transformers has no class for the config
            ("exaone", "vllm", {"auto_map": {"AutoConfig": "configuration_exaone.ExaoneConfig"}}, "unknown"),
            # The registries of both have the class of Ling 2.5 and 2.6, and not that of transformers.
            ("bailing_hybrid", "sglang", LING, "unknown"),
            ("bailing_hybrid", "vllm", {**LING, "architectures": ["BailingHybridForCausalLM"]}, "absent"),
            ("internvl_chat", "llama.cpp", {}, "absent"),
            ("internvl_chat", "llama.cpp", {"architectures": ["LlamaForCausalLM"]}, "unknown"),
        ],
    )
    def test_a_model_by_the_class_of_a_published_config(
        self, model: str, name: str, keys: dict[str, Any], wanted: str
    ) -> None:
        """Transformers has no class of this name, or the text model or the model's own code names it."""
        config = {**LLAMA_5, **keys, "model_type": model}
        if model == "internvl_chat":
            config = {"model_type": model, "llm_config": {**LLAMA_5, **keys}}
        assert [*diff.engines(config, names=[name]).facts["states"].values()] == [wanted]

    def test_a_model_by_the_row_of_its_class(self) -> None:
        """The layers with linear attention rotate half of their heads, and the others qk_rope_head_dim in full."""
        report = diff.engines({**LLAMA_5, **LING, "model_type": "bailing_hybrid"}, names=["vllm"])
        assert [*report.facts["states"].values()] == ["same"]
        assert "was not recorded" not in str(report)

    def test_published_configs_of_models_with_their_own_code(self) -> None:
        """Each engine has a base for MiMo's layers with a window, and rotates 64 channels. SGLang runs Kimi K2."""
        mimo = {**LLAMA_5, "model_type": "mimo_v2_flash", "num_hidden_layers": 2, "hybrid_layer_pattern": [0, 1]}
        mimo |= {"head_dim": 192, "partial_rotary_factor": 0.334, "rope_theta": 5e6, "swa_rope_theta": 1e4}
        del mimo["rope_parameters"]
        rows = diff.engines(mimo, names=["llama.cpp", "mlx-lm", "sglang"]).facts["ropes"]
        for row, base in zip(rows, (5e6, 1e4), strict=True):
            found = [engine["inv_freq"][1] for engine in row["at"][0]["engines"].values()]
            assert found == pytest.approx([base ** (-1 / 32)] * 3)
        kimi = {**LLAMA_5, "model_type": "kimi_k2", "rope_theta": 5e4, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
        del kimi["rope_parameters"]
        kimi["rope_scaling"] = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
        assert diff.engines(kimi, names=["vllm", "sglang"]).verdict == "agree"

    @pytest.mark.parametrize(
        ("model_type", "keys", "base"),
        [
            ("baichuan", {"hidden_size": 4096, "num_attention_heads": 32}, 1e4),
            ("internlm2", {"rope_theta": 1e6}, 1e6),
            ("internlm2", {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e4),
            ("qwen", {"rotary_emb_base": 1e6, "seq_length": 2048}, 1e4),
        ],
    )
    def test_models_whose_own_config_class_sglang_loads(
        self, model_type: str, keys: dict[str, Any], base: float
    ) -> None:
        """As their files of SGLang 0.5.23 read the attributes of their config classes in transformers 5.19."""
        config = {key: value for key, value in LLAMA_5.items() if key != "rope_parameters"} | {"model_type": model_type}
        [row] = diff.engines({**config, **keys}, names=["sglang"]).facts["ropes"]
        [found] = row["at"][0]["engines"].values()
        assert row["engines"][0]["judged"]
        assert found["inv_freq"][1] == pytest.approx(base ** (-1 / len(found["inv_freq"])))

    def test_phi_4_multimodal(self) -> None:
        """vLLM and SGLang run its text model as Llama, with the lists and the fraction of its own config class."""
        short, long = [1.0] * 24, [2.0] * 24
        config = {**LLAMA_5, "model_type": "phi4mm", "hidden_size": 1024, "num_attention_heads": 16}
        del config["rope_parameters"]
        config |= {"partial_rotary_factor": 0.75, "max_position_embeddings": 131072, "rope_theta": 1e4}
        config |= {"original_max_position_embeddings": 4096, "num_key_value_heads": 16}
        scaling = {"type": "longrope", "short_factor": short, "long_factor": long}
        [row] = diff.engines({**config, "rope_scaling": scaling}, names=["vllm", "sglang"]).facts["ropes"]
        assert all(engine["judged"] for engine in row["engines"])
        for at, factors in zip(row["at"], ((long, short), (long, long)), strict=True):
            for engine, factor in zip(at["engines"].values(), factors, strict=True):
                expected = 10_000.0 ** (-np.arange(24) / 24) / factor
                np.testing.assert_allclose(engine["inv_freq"], expected, rtol=1e-6)
        yarn = {"type": "yarn", "factor": 2.0}
        [row] = diff.engines({**config, "rope_scaling": yarn}, names=["vllm", "sglang"]).facts["ropes"]
        assert all("must be a dictionary with three fields" in engine["refused"] for engine in row["engines"])

    @pytest.mark.parametrize(("traditional", "states"), [(False, ["same", "same"]), (True, ["same", "unknown"])])
    def test_a_key_of_mlx_lm(self, traditional: bool, states: list[str]) -> None:
        """`models/llama.py` of mlx-lm passes rope_traditional to `nn.RoPE`, whose pairs are interleaved then."""
        config = {**LLAMA_5, "rope_theta": 5e5, "rope_parameters": None, "rope_traditional": traditional}
        found = diff.engines(config, names=["vllm", "mlx-lm"])
        assert [*found.facts["states"].values()] == states
        assert "only mlx-lm reads it" in " ".join(found.facts["warnings"])

    @pytest.mark.parametrize(("channels", "wanted"), [(32, "same"), (64, "differs"), (None, "differs")])
    def test_a_key_of_the_converter_of_llama_cpp(self, channels: int | None, wanted: str) -> None:
        """Bamba's files have it. `conversion/granite.py` writes rope.dimension_count only if it is there."""
        config = {**LLAMA_5, "model_type": "bamba", "attn_layer_indices": [1], "attn_rotary_emb": channels}
        config |= {"architectures": ["BambaForCausalLM"], "head_dim": None}
        found = diff.engines(config, names=["transformers", "llama.cpp"])
        assert [*found.facts["states"].values()] == ["same", wanted]

    def test_models_of_their_own_code_in_llama_cpp(self) -> None:
        """`conversion/minicpm.py` needs the two lists of a rope_scaling (llama.cpp, issue 12468)."""
        mini = {**LLAMA_5, "model_type": "minicpm", "rope_theta": 1e6, "rope_parameters": None}
        assert state(mini, "llama.cpp") == ("same", [])
        refused, [said] = state({**mini, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, "llama.cpp")
        assert (refused, "rope_scaling.long_factor" in said) == ("refused", True)
        # `conversion/bailingmoe.py` has a class for Ling 1, whose whole head rotates, and one for Ling 2.
        ling = {**mini, "model_type": "bailing_moe", "partial_rotary_factor": 0.5}
        assert state(ling, "llama.cpp")[0] == "differs"
        assert state({**ling, "architectures": ["BailingMoeV2ForCausalLM"]}, "llama.cpp") == ("same", [])

    def test_a_text_model_whose_class_is_not_in_transformers(self) -> None:
        """InternLM2Config reads rope_theta at the top, and a rope_scaling of two keys, in SGLang and on the hub."""
        text = {**LLAMA_5, "model_type": "internlm2"}
        config = {"model_type": "internvl_chat", "llm_config": text}
        why = "It reads the base from rope_theta, so the base is 10000 and not 500000."
        assert state(config, "sglang") == ("differs", [why])
        old = {**text, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
        del old["rope_parameters"]
        yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65_536}
        for name in ("vllm", "sglang"):
            assert state({**config, "llm_config": old}, name)[1] == []
            refused, [said] = state({**config, "llm_config": {**old, "rope_scaling": yarn}}, name)
            assert (refused, "two fields, `type` and `factor`" in said) == ("refused", True)

    def test_a_config_that_an_engine_cannot_load(self) -> None:
        granite = {**LLAMA_5, "model_type": "granite"}
        refused = "TypeError: ModelArgs.__init__() missing 1 required positional argument: 'rope_theta'"
        assert state(granite, "mlx-lm") == ("refused", [refused])
        assert state({**LLAMA_5, "model_type": "apertus"}, "mlx-lm") == (
            "refused",
            ["it needs the keys mlp_bias, post_norm, qk_norm"],
        )
        stablelm = {**granite, "model_type": "stablelm", "partial_rotary_factor": None}
        needs = "it needs the keys rope_theta, partial_rotary_factor (TypeError: missing positional arguments)"
        assert state(stablelm, "mlx-lm") == ("refused", [needs])

    def test_a_model_of_transformers(self) -> None:
        """vLLM has no file of its own for GPT-NeoX."""
        neox = {**LLAMA_5, "model_type": "gpt_neox", "rotary_pct": 0.25, "rotary_emb_base": 20_000.0}
        del neox["rope_parameters"]
        note = "It runs this model with GPTNeoXForCausalLM, the code of transformers."
        assert state(neox, "vllm") == ("same", [note])

    def test_a_model_that_was_not_recorded(self) -> None:
        mine = {**LLAMA_5, "model_type": "mine", "rope_theta": 1e4}
        del mine["rope_parameters"]
        found = diff.engines(mine, pairing="half")
        assert set(found.facts["states"].values()) == {"unknown"}
        assert found.verdict == "not judged"
        assert "What it reads for mine, if it has such a model, was not recorded." in " ".join(found.text().split())
        assert "run)" not in found.text(verbose=True)
        warned = from_config(mine, pairing="half", engine="sglang").warnings
        assert any(
            warning.startswith("SGLang 0.5.23 (not recorded for this model): What it reads") for warning in warned
        )

    def test_other_channels(self) -> None:
        """mlx-lm's file for GLM rotates the whole head."""
        glm = {**LLAMA_5, "model_type": "glm", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        del glm["rope_parameters"]
        found = diff.engines(glm, names=("transformers", "mlx-lm"))
        assert found.facts["ropes"][0]["at"][0]["engines"]["mlx-lm"]["apart"] == {
            "same": False,
            "channels": "64 channels, not 32",
        }
        assert "64 channels, not 32" in found.text()

    def test_kinds_of_layers_that_the_config_does_not_decide(self) -> None:
        """mlx-lm's file for Gemma 3 reads sliding_window_pattern, which is 6 by default, and not layer_types."""
        gemma = {
            "model_type": "gemma3_text",
            "head_dim": 64,
            "num_hidden_layers": 7,
            "layer_types": ["full_attention", *["sliding_attention"] * 6],
            "max_position_embeddings": 131_072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        }

        def bases(config: dict[str, Any]) -> list[float]:
            return [rope.base for rope in from_config(config, engine="mlx-lm").layers if rope is not None]

        assert bases(gemma) == [1e4, 1e4, 1e4, 1e4, 1e4, 1e6, 1e4]
        assert bases({**gemma, "sliding_window_pattern": 2}) == [1e4, 1e6, 1e4, 1e6, 1e4, 1e6, 1e4]
        with pytest.raises(RopeError, match="IndexError: list index out of range"):
            bases({**gemma, "sliding_window_pattern": 8})


def deepseek_v4(written: str = "rope_scaling") -> dict[str, Any]:
    """Return the published config that has this key and not the other one."""
    rows = json.loads((ROOT / "tests" / "golden" / "released.json").read_text())["rows"]
    return next(  # type: ignore[no-any-return]
        row["config"]
        for row in rows
        if row["model_type"] == "deepseek_v4"
        and {"rope_scaling", "rope_parameters"} & row["config"].keys() == {written}
    )


@pytest.mark.parametrize("written", ["rope_scaling", "rope_parameters"])
def test_deepseek_v4(written: str) -> None:
    """Engines multiply cos and sin by 1, which was only read in their code. mlx-lm does not have the model."""
    found, read = diff.engines(deepseek_v4(written)), {"SGLang", "vLLM", "llama.cpp"}
    assert found.facts["states"]["mlx-lm"] == "absent"
    assert {found.facts["states"][name] for name in read} == {"same"}
    for row in found.facts["ropes"]:
        assert {row["at"][-1]["engines"][name]["attention_factor"] for name in read} == {1.0}
        assert {entry["name"] for entry in row["engines"] if entry["seen"] == "read"} == read
    assert "SGLang 0.5.23 (srt/models/deepseek_v4.py, " in found.text(verbose=True)
    assert "; read, not run)" in found.text(verbose=True)


def test_minimax_m3_as_published() -> None:
    """Its text model has a name that transformers reads by the class of the wrapper: 64 of 128 channels, base 5e6."""
    text = {"model_type": "minimax_m3", "hidden_size": 6144, "num_attention_heads": 64, "num_key_value_heads": 4}
    text |= {"head_dim": 128, "num_hidden_layers": 2, "max_position_embeddings": 524_288, "rope_theta": 5_000_000}
    text |= {"rotary_dim": 64, "partial_rotary_factor": 0.5}
    whole = {"model_type": "minimax_m3_vl", "text_config": text}
    assert from_config(whole).layers == (Rope(128, 5e6, "half", rotary_dim=64),) * 2
    states = diff.engines(whole).facts["states"]
    assert {name for name, state in states.items() if state != "same"} == {"exllamav3"}
    override = {"rope_theta": 5e6, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 524_288}
    whole = {**whole, "text_config": {**text, "rope_parameters": override}}
    said = diff.engines(whole, names=("transformers", "vllm")).text()
    assert "vLLM: It reads no scaling on NVIDIA GPUs, so nothing is scaled." in said


@pytest.mark.parametrize(
    ("model", "stated"),
    [
        *(
            (name, {"partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]})
            for name in ("qwen3_5", "qwen3_5_moe")
        ),
        *((name, {"mrope_section": [24, 20, 20]}) for name in ("qwen3_vl", "qwen3_vl_moe")),
        *((name, {"partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}) for name in ("glm4v", "glm4v_moe")),
        ("gemma4", {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}),
    ],
)
def test_models_with_images_in_exllamav3(model: str, stated: dict[str, Any]) -> None:
    """By its source: it reads the text model inside by the keys of the text models whose code was run."""
    rope = {"rope_type": "default", "rope_theta": 777_777.0}
    whole = {**stated, "sliding_attention": rope} if model == "gemma4" else {**rope, **stated}
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128, "num_hidden_layers": 12}
    text = {"model_type": f"{model}_text", **sizes, "rope_parameters": whole, "max_position_embeddings": 4096}
    if model.startswith("qwen3_5"):
        text["head_dim"] = 256
    found = diff.engines({"model_type": model, "text_config": text}, names=("transformers", "exllamav3"))
    assert found.facts["states"]["exllamav3"] == "same", found.text()


def test_models_with_images_in_vllm_and_sglang() -> None:
    """Gemma 3n and LightOnOCR pass their text config on. Qwen 4 gives `get_rope` rope_parameters and the factor 1."""
    sizes = {"hidden_size": 2048, "num_attention_heads": 8, "head_dim": 256, "max_position_embeddings": 32_768}
    sizes |= {"num_hidden_layers": 8, "rope_theta": 777_777.0}
    gemma = {"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text", **sizes}}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "rope_theta": 1e7}
    yarn |= {"partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    qwen = {
        "model_type": "qwen4_exp",
        "text_config": {"model_type": "qwen4_exp_text", **sizes, "rope_parameters": yarn},
    }
    del qwen["text_config"]["rope_theta"]
    ocr = {"model_type": "mistral3", "text_config": {"model_type": "qwen3", **sizes}}
    three, two = ("transformers", "vllm", "sglang"), ("transformers", "vllm")
    for config, names in ((gemma, three), (ocr, three), (qwen, two)):
        assert diff.engines(config, names=names).verdict == "agree"


def test_olmo_3_in_sglang() -> None:
    """Its class of OLMo 2 scales only layers without a window, by a config class that reads the keys of transformers 4.

    Run with transformers 5.24, this class and `get_rope_config` gave the published base and scaling.
    """
    rows = json.loads((ROOT / "tests" / "golden" / "text_models.json").read_text())["rows"]
    config = next(row["config"] for row in rows if row["name"] == "olmo-3.1-32b-instruct")
    found = diff.engines(config, names=("transformers", "sglang"))
    assert found.verdict == "agree"
    factors = [row["at"][-1]["engines"]["SGLang"]["attention_factor"] for row in found.facts["ropes"]]
    assert factors == pytest.approx([1.0, 1.2079441541679836])
    both = {kind: {**config["rope_scaling"], "rope_theta": 5e5} for kind in ("full_attention", "sliding_attention")}
    newer = {key: value for key, value in config.items() if "rope" not in key} | {"rope_parameters": both}
    assert diff.engines(newer, names=("transformers", "sglang")).facts["states"]["SGLang"] == "unknown"


@pytest.mark.parametrize("model", ["deepseek_v3", "glm4_moe_lite", "glm_moe_dsa", "hy_v4", "youtu"])
def test_llama_cpp_pairs_adjacent_channels_of_latent_attention(model: str) -> None:
    """Its converter neither reads rope_interleave nor permutes these weights (`configs/tables/gguf.py`)."""
    config = {"model_type": model, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 64,
              "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
              "index_head_dim": 16, "rope_theta": 1e4, "max_position_embeddings": 128}  # fmt: skip
    wanted = ("differs", ["It rotates with the pairing interleaved and not half."])
    assert state({**config, "rope_interleave": False}, "llama.cpp") == wanted
    if model != "hy_v4":  # which is always half
        assert state(config, "llama.cpp")[0] == "same"


def test_nomic_needs_the_keys_of_its_own_code() -> None:
    """vLLM's NomicBertModelConfig and llama.cpp's converter read names of GPT-2, and transformers its own names."""
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "max_position_embeddings": 2048}
    native = {"model_type": "nomic_bert", **sizes, "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"}}
    own = {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_inner": 3072, "n_positions": 8192, "rotary_emb_base": 1000}
    own |= {"max_trained_positions": 2048, "activation_function": "swiglu", "rotary_emb_fraction": 1.0}
    names = ("transformers", "vllm", "llama.cpp")
    assert diff.engines({**native, **own}, names=names).verdict == "agree"
    found = diff.engines(native, names=names)
    assert found.facts["states"] == {"transformers": "same", "vLLM": "refused", "llama.cpp": "refused"}
    assert "it needs the keys activation_function, n_embd, n_inner, n_layer" in " ".join(found.text().split())


def test_a_published_gpt_oss() -> None:
    """Its base is a key of the config, and vLLM and SGLang get it in rope_parameters from transformers."""
    rows = json.loads((ROOT / "tests" / "golden" / "released.json").read_text())["rows"]
    config = next(row["config"] for row in rows if row["model_type"] == "gpt_oss" and "rope_theta" in row["config"])
    found = diff.engines(config, names=("transformers", "vllm", "sglang"))
    rows = found.facts["ropes"]
    second = [
        entry["inv_freq"][1] for row in rows for at in row["at"] for entry in at["engines"].values()
    ]  # which YaRN does not slow
    assert (found.verdict, second) == ("agree", [pytest.approx(150_000.0 ** (-1 / 32))] * len(second))


class TestTransformers4:
    """It is compared if only rope_parameters states the rope, which its classes do not read."""

    def test_what_it_loses(self) -> None:
        scaled = {**LLAMA_5, "rope_parameters": {**LLAMA_5["rope_parameters"], "rope_type": "linear", "factor": 4.0}}
        found = diff.engines(scaled)
        assert found.facts["states"]["transformers-4"] == "differs"
        lost = "so the base is 10000 and not 500000. It reads the scaling from rope_scaling, so nothing is scaled."
        assert lost in " ".join(found.text().split())
        assert from_config(scaled, engine="transformers-4").rope == Rope(64, 10_000.0, "half")

    @pytest.mark.parametrize(
        "keys",
        [{"rope_theta": 1e6}, {"model_type": "hy_v3", "head_dim": 64}, {"rope_parameters": None, "rope_theta": 1e6}],
    )
    def test_when_it_is_left_out(self, keys: dict[str, Any]) -> None:
        """The file has a key that it reads, or it does not have the model."""
        assert "transformers-4" not in diff.engines({**LLAMA_5, **keys}).facts["states"]
        assert list(diff.engines(LLAMA_5, names=("vllm",)).facts["states"]) == ["vLLM"]

    def test_a_model_inside_another(self) -> None:
        llava = {"model_type": "llava", "text_config": LLAMA_5}
        assert diff.engines(llava).facts["states"]["transformers-4"] == "differs"

    def test_a_part_without_a_name_of_its_own(self) -> None:
        """Transformers 4 has mllama (`MllamaTextConfig`), but no entry of CONFIG_MAPPING for its text model."""
        mllama = {"model_type": "mllama", "text_config": {**LLAMA_5, "model_type": "mllama_text_model"}}
        states = diff.engines(mllama, names=["transformers", "transformers-4"]).facts["states"]
        assert states["transformers-4"] == "unknown"


class TestVerdict:
    @pytest.mark.parametrize(
        ("changes", "names", "wanted"),
        [
            ({}, ("transformers", "mlx-lm"), "differ"),
            ({}, ("transformers", "sglang"), "agree"),
            ({}, ("sglang",), "agree"),
            ({"model_type": "arcee"}, ("transformers", "vllm"), "agree"),
            ({"model_type": "arcee"}, ("transformers", "mlx-lm"), "not judged"),  # the user selected mlx-lm
            ({"model_type": "arcee"}, ("mlx-lm",), "not judged"),
            ({"model_type": "granite"}, ("mlx-lm",), "differ"),  # it rejects the config
        ],
    )
    def test_selected_engines(self, changes: dict[str, Any], names: tuple[str, ...], wanted: str) -> None:
        found = diff.engines({**LLAMA_5, **changes}, names=names)
        assert found.verdict == wanted

    def test_engines_without_the_model_do_not_count_if_none_is_selected(self) -> None:
        arcee = {**LLAMA_5, "model_type": "arcee", "rope_theta": 500_000.0}
        found = diff.engines(arcee)
        assert "absent" in found.facts["states"].values()
        assert found.verdict == "agree"
