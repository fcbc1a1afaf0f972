"""`diff.configs`: the differences of two configs, and whether weights and KV caches of one fit the other."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import oracle
from gguf_files import write
from ropewalk import RopeError, diff, from_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 4096,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


def changed(found: diff.ConfigDiff) -> dict[str, tuple[Any, Any]]:
    return {one["what"]: (one["first"], one["second"]) for row in found.facts["layers"] for one in row["changed"]}


def test_another_base() -> None:
    found = diff.configs(LLAMA, {**LLAMA, "rope_theta": 1_000_000.0})
    assert changed(found) == {"base": (10_000.0, 1_000_000.0)}
    [row] = found.facts["layers"]
    assert row["layers"] == [0, 1, 2, 3]
    assert row["at"][-1]["inv_freq"]["times"] == pytest.approx(100 ** (63 / 64), rel=1e-12)
    assert row["at"][-1]["inv_freq"]["slower"]
    assert found.facts["weights"]["fit"]
    assert not found.facts["kv_cache"]["fit"]
    text = found.text()
    assert "Different: 4 of 4 layers rotate differently." in text
    assert "base: 10000 → 1000000" in text
    assert "weights   fit unchanged: the same channels are rotated, at other frequencies, which the model" in text
    assert "KV cache  does not fit: the stored keys were rotated by other angles." in text


def test_another_scaling() -> None:
    found = diff.configs(LLAMA, {**LLAMA, "rope_scaling": YARN, "max_position_embeddings": 16_384})
    first, second = changed(found)["scaling"]
    assert first == {"rope_type": "default"}
    assert second["rope_type"] == "yarn"
    assert "scaling: default → yarn (factor 4, original_max_position_embeddings 4096" in found.text()
    [row] = found.facts["layers"]
    assert [at["sequence"] for at in row["at"]] == [4096, 16_384]
    assert row["at"][0]["attention_factor_ratio"] == pytest.approx(1 + 0.1 * math.log(4), rel=1e-12)
    assert not found.facts["kv_cache"]["fit"]


def test_an_attention_factor_alone() -> None:
    second = {**LLAMA, "rope_scaling": {**YARN, "attention_factor": 1.0}}
    found = diff.configs({**LLAMA, "rope_scaling": YARN}, second)
    ratio = 1 / (1 + 0.1 * math.log(4))
    assert found.facts["kv_cache"] == {
        "fit": False,
        "rescale": pytest.approx(ratio, rel=1e-12),
        "why": "of the rotation, only the attention factor differs",
    }
    assert "KV cache  fits after the rotated channels of its keys are multiplied by 0.878249" in found.text()
    assert "weights   fit unchanged: of the rotation, only the attention factor differs." in found.text()


def test_another_pairing() -> None:
    mine = {**LLAMA, "model_type": "mine"}
    half, interleaved = (from_config(mine, pairing=pairing) for pairing in ("half", "interleaved"))
    assert half.layers != interleaved.layers
    found = diff.configs(LLAMA, {**LLAMA, "model_type": "cohere"})
    assert changed(found) == {"pairing": ("half", "interleaved")}
    assert found.facts["weights"] == {"fit": False, "permute": True, "why": "the pairings differ"}
    assert "weights   must be permuted (q and k): the pairings differ." in found.text()
    assert "KV cache  does not fit: the channels of the stored keys are in another order." in found.text()
    assert all(at["same"] for at in found.facts["layers"][0]["at"])  # the angles are the same


@pytest.mark.parametrize(
    "second",
    [
        {**LLAMA, "rope_scaling": None},
        {**LLAMA, "rope_scaling": {"rope_type": "default"}},
        {**LLAMA, "rope_scaling": {"type": "linear", "factor": 1.0}},
        {**LLAMA, "head_dim": 128, "partial_rotary_factor": None},
        {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        from_config(LLAMA).to_hf_config(version=5),
    ],
)
def test_other_keys_of_the_same_meaning(second: dict[str, Any]) -> None:
    found = diff.configs(LLAMA, second)
    assert found.same
    assert found.facts["layers"] == []
    assert "The same: all layers rotate identically" in found.text()
    assert "KV cache  fits unchanged: the keys are rotated identically." in found.text()


def test_two_spellings_of_one_scheme() -> None:
    """The names of transformers 4 and 5, and YaRN's computed values stated explicitly."""
    older = {**LLAMA, "rope_scaling": {"type": "yarn", **{k: v for k, v in YARN.items() if k != "rope_type"}}}
    newer = from_config(older).to_hf_config(version=5)
    assert "rope_scaling" not in newer
    assert diff.configs(older, newer).same
    explicit = {**LLAMA, "rope_scaling": {**YARN, "attention_factor": 1 + 0.1 * math.log(4), "beta_fast": 32}}
    assert diff.configs(older, explicit).same


def test_schemes_that_depend_on_the_length() -> None:
    """One scheme is the same at every length. Another list differs only at the lengths that use it."""
    lists = {"short_factor": [1.0] * 64, "long_factor": [4.0] * 64, "original_max_position_embeddings": 4096}
    first = {**LLAMA, "max_position_embeddings": 16_384, "rope_scaling": {"rope_type": "longrope", **lists}}
    second = {**first, "rope_scaling": {**first["rope_scaling"], "long_factor": [8.0] * 64}}
    same = diff.configs(first, dict(first))
    assert same.same
    assert same.facts["kv_cache"]["why"] == "the keys are rotated identically, if both run at the same length"
    found = diff.configs(first, second)
    assert [at["same"] for at in found.facts["layers"][0]["at"]] == [True, False]
    assert not found.same
    assert "long_factor [64 numbers]" in found.text()
    assert diff.configs(first, second, length=4096).facts["layers"]  # the lists differ only beyond the trained length


def test_another_size_of_the_head() -> None:
    found = diff.configs(LLAMA, {**LLAMA, "head_dim": 64})
    assert changed(found)["head_dim"] == (128, 64)
    assert found.facts["weights"]["why"] == "the head size differs"
    assert not found.facts["weights"]["fit"]


def test_another_number_of_layers() -> None:
    found = diff.configs(LLAMA, {**LLAMA, "num_hidden_layers": 5})
    assert "Different: 5 layers instead of 4, the first 4 rotate identically." in found.text()
    assert not found.facts["weights"]["fit"]
    assert not found.facts["kv_cache"]["fit"]


def test_layers_that_do_not_rotate() -> None:
    smol = {**LLAMA, "model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0]}
    found = diff.configs({**smol, "no_rope_layers": [1, 1, 1, 1]}, smol)
    [row] = found.facts["layers"]
    assert row["layers"] == [3]
    assert "rotated in the first config only" in found.text()
    assert found.facts["weights"]["why"] == "other channels are rotated, which the model must have been trained for"


def test_a_query_scale() -> None:
    scaling = {**YARN, "llama_4_scaling_beta": 0.1, "rope_theta": 1e6}
    ministral = {**LLAMA, "model_type": "ministral3", "head_dim": 128, "rope_parameters": scaling}
    del ministral["rope_theta"]
    other = {**ministral, "rope_parameters": {**scaling, "llama_4_scaling_beta": 0.2}}
    found = diff.configs(ministral, other)
    assert not found.same
    assert [one["what"] for one in found.facts["beside"]] == ["query_scale"]
    assert found.facts["kv_cache"]["fit"]  # the query scale changes only q
    assert "other differences" in found.text()


class TestArguments:
    def test_a_key_to_ignore_that_one_of_them_has(self, tmp_path: Path) -> None:
        odd = {**LLAMA, "rope_scaling": {**YARN, "my_yarn_key": 1}}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(odd))
        with pytest.raises(RopeError, match="my_yarn_key"):
            diff.configs(LLAMA, path)
        found = diff.configs(LLAMA, path, ignore=("rope_scaling.my_yarn_key",))
        assert (found.same, found.facts["same"]) == (False, None)
        with pytest.raises(RopeError, match="every key to ignore must be in one of the configs"):
            diff.configs(LLAMA, path, ignore=("rope_scaling.my_yarn_key", "rope_scaling.no"))
        with pytest.raises(RopeError, match="ignore must be a collection of keys"):
            diff.configs(LLAMA, path, ignore="rope_scaling.my_yarn_key")

    def test_no_length(self) -> None:
        config = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
        with pytest.raises(RopeError, match="the length must be passed if neither config states it"):
            diff.configs(config, config)
        assert diff.configs(config, config, length=100).same
        with pytest.raises(RopeError, match="length"):
            diff.configs(config, config, length=-1)

    def test_a_vision_tower(self) -> None:
        towers = json.loads((Path(__file__).parents[1] / "golden" / "vision_towers.json").read_text())["rows"]
        tower = next(row["config"] for row in towers if row["config"]["model_type"] == "pixtral")
        with pytest.raises(RopeError, match="the config must describe a text model, got only a vision tower"):
            diff.configs(LLAMA, tower)


def test_all_facts_are_json() -> None:
    found = diff.configs(LLAMA, {**LLAMA, "rope_scaling": YARN}).facts
    assert json.loads(json.dumps(found, allow_nan=False)) == found


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_a_faithful_conversion_is_the_same(tmp_path: Path) -> None:
    """A GGUF file holds the factors of Llama 3.1 in float32. Its weights and Meta's are in the order interleaved."""
    config = {**LLAMA, "rope_theta": 5e5, "max_position_embeddings": 131_072, "rope_scaling": LLAMA3}
    params = {"dim": 4096, "n_heads": 32, "n_layers": 4, "rope_theta": 5e5, "use_scaled_rope": True}
    slowed = oracle.by_parts(5e5, 128, 8, 1, 4, 8192)
    factors = [float(w / v) for w, v in zip(oracle.inv_freq(5e5, 128), slowed, strict=True)]
    shape = {"embedding_length": 4096, "attention.head_count": 32, "block_count": 4, "context_length": 131_072}
    for index, (error, same) in enumerate(((0.0, True), (1e-6, False))):
        tensor = {"rope_freqs.weight": [factor * (1 + error) for factor in factors]}
        file = write(tmp_path / f"{index}.gguf", {**shape, "rope.freq_base": 5e5}, tensor)
        for found in (diff.configs(config, file), diff.configs(file, config)):
            assert found.same is same
            assert found.facts["weights"]["permute"]
            assert not found.facts["kv_cache"]["fit"]
    lists = {"short_factor": [1.1] * 64, "long_factor": [1.3] * 64}
    longrope = {"type": "longrope", **lists, "attention_factor": 1.19}
    phi = {**LLAMA, "model_type": "phi3", "rope_scaling": longrope, "original_max_position_embeddings": 2048}
    keys = {**shape, "context_length": 4096, "rope.freq_base": 1e4, "rope.scaling.attn_factor": 1.19}
    tensors = {f"rope_factors_{name}.weight": lists[f"{name}_factor"] for name in ("short", "long")}
    for trained, same in ((2048, True), (2049, False)):
        keys["rope.scaling.original_context_length"] = trained
        file = write(tmp_path / f"{trained}.gguf", keys, tensors, architecture="phi3")
        assert diff.configs(phi, file).same is same
    found = diff.configs(params, config, factor=8.0)
    assert found.same
    text = "must be permuted (q and k): the pairings of these formats differ, and converters permute the weights."
    assert text in found.text()
    assert not diff.configs(params, {**config, "rope_theta": 1e4}, factor=8.0).same


def test_the_factor_of_a_params_json() -> None:
    """It is for the files whose rope is scaled, so Llama 3 and Llama 3.1 can be compared."""
    llama3 = {"dim": 4096, "n_heads": 32, "n_layers": 2, "rope_theta": 5e5}
    scaled = {**llama3, "use_scaled_rope": True}
    found = diff.configs(llama3, scaled, factor=8.0)
    [row] = found.facts["layers"]
    assert (found.facts["length"], [change["what"] for change in row["changed"]]) == (65_536, ["scaling"])
    assert diff.configs(scaled, {**scaled, "rope_scaling_factor": 8}, factor=8.0).same
    with pytest.raises(RopeError, match=r"factor requires Meta's params\.json with use_scaled_rope, got 8\.0"):
        diff.configs(llama3, llama3, factor=8.0, length=100)
