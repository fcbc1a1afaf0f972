"""Verify whole models: those that transformers builds, tables as vLLM computes them, and each known failure."""

from __future__ import annotations

import importlib
import json
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny_models
import tiny_towers
from ropewalk import RopeError, conformance
from ropewalk.configs.read import read_config
from ropewalk.integrations import vllm

GOLDEN = Path(__file__).parents[1] / "golden"
ROWS = json.loads((GOLDEN / "engines" / "vllm.json").read_text())["rows"]
CONFIGS = {row["name"]: row["config"] for row in json.loads((GOLDEN / "text_models.json").read_text())["rows"]}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 32_768}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
LAYERS = 2


def llama(parameters: dict[str, Any]) -> nn.Module:
    return tiny_models.build("llama", rope_parameters=parameters)


def engine(**tensors: Tensor) -> nn.Module:
    """Make a model whose layers share one rotary module, which holds these tensors, as in vLLM and SGLang."""
    rotary, model = nn.Module(), nn.Module()
    for name, tensor in tensors.items():
        rotary.register_buffer(name, tensor, persistent=False)
    model.layers = nn.ModuleList(nn.Module() for _ in range(LAYERS))
    for layer in model.layers:
        layer.rotary_emb = rotary
    return model


def table_of(model: Any, positions: Tensor | None = None) -> Tensor:
    """Return vLLM's table of the frequencies of a model of transformers, without an attention factor."""
    t = torch.outer(torch.arange(3000.0) if positions is None else positions, model.model.rotary_emb.inv_freq)
    return torch.cat((t.cos(), t.sin()), dim=-1)


def cache(parameters: dict[str, Any]) -> Tensor:
    return table_of(llama(parameters))


@pytest.mark.parametrize("name", [*tiny_models.MODELS, *tiny_towers.TOWERS])
def test_models_of_transformers_are_not_accused(name: str) -> None:
    model = (tiny_models if name in tiny_models.MODELS else tiny_towers).build(name)
    found = conformance.verify(model)
    blind = name == "llama4_vision_model"  # its module keeps its table in no tensor of its own
    assert found.verdict == ("not judged" if blind else "right"), str(found)
    assert not found.unseen


@pytest.mark.filterwarnings("ignore:.*no rope_theta")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted({row["model"] for row in ROWS}))
def test_tables_of_vllm_are_right(name: str, dtype: torch.dtype) -> None:
    """Build vLLM's table by its formula, from the frequencies that its own classes were recorded to have."""
    model, ropes = nn.Module(), read_config(CONFIGS[name], text_only=True)
    model.layers = nn.ModuleList(nn.Module() for _ in ropes.layers)
    for row in (row for row in ROWS if row["model"] == name):
        positions = torch.arange(2000) / row.get("positions_divided_by", 1.0)
        t = torch.outer(positions, torch.tensor(row["inv_freq"], dtype=torch.float32))
        table = (torch.cat((t.cos(), t.sin()), dim=-1) * row["attention_factor_from_cache"]).to(dtype)
        if row.get("short_factor"):  # LongRoPE: that of the long factors follows in the same table
            ratio = torch.tensor(row["short_factor"]) / torch.tensor(row["long_factor"])
            t = t * ratio
            table = torch.cat((table, torch.cat((t.cos(), t.sin()), dim=-1) * row["attention_factor_from_cache"]))
        for layer, rope in zip(model.layers, ropes.layers, strict=True):
            if rope is not None and rope.base == row["base"]:
                layer.rotary_emb = nn.Module()
                table = table.to(dtype)
                layer.rotary_emb.register_buffer("cos_sin_cache", table)
    found = conformance.verify(model, CONFIGS[name], text_only=True)
    assert (found.verdict, found.unseen) == ("right", ()), str(found)
    if row.get("short_factor"):
        table[2000:] = table[2000:].flip(0)
        table[2000] = table[0]
        assert conformance.verify(model, CONFIGS[name], text_only=True).verdict == "wrong"
    assert ("rounded to bfloat16" in str(found)) == (dtype == torch.bfloat16)


def scaled_twice(parameters: dict[str, Any]) -> nn.Module:
    model, plain = llama(parameters), llama({**PLAIN, "rope_theta": parameters["rope_theta"]})
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq * (rotary.inv_freq / plain.model.rotary_emb.inv_freq)
    return model


def with_the_ramp_of_the_usual_base() -> nn.Module:
    plain, usual, ramp = (
        llama(of).model.rotary_emb.inv_freq for of in (PLAIN, PLAIN | {"rope_theta": 1e4}, YARN | {"rope_theta": 1e4})
    )
    return changed("inv_freq", lambda _: plain * ramp / usual)


def changed(name: str, change: Callable[[Any], Any]) -> nn.Module:
    model = llama(YARN)
    setattr(model.model.rotary_emb, name, change(getattr(model.model.rotary_emb, name)))
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return llama(YARN)


FAILURES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str, str]] = {
    "bfloat16 model": (
        lambda: llama(YARN).bfloat16(),
        YARN,
        "low-precision-frequencies",
        "in float32; .bfloat16() rounds it",
    ),
    "float16 model": (lambda: llama(YARN).half(), YARN, "low-precision-frequencies", "float16"),
    "on meta": (on_meta, YARN, "lost-on-meta", "without values"),
    "never filled": (lambda: changed("inv_freq", torch.zeros_like), YARN, "lost-on-meta", "never filled"),
    "not finite": (lambda: changed("inv_freq", lambda w: w / 0), YARN, "lost-on-meta", "never filled"),
    "yarn dropped": (lambda: llama(PLAIN), YARN, "scaling-ignored", "base 500000 without any scaling"),
    "llama3 dropped": (lambda: llama(PLAIN), LLAMA3, "scaling-ignored", "without any scaling"),
    "linear not stated": (
        lambda: llama(LINEAR),
        {**PLAIN, "rope_theta": 1e4},
        "wrong-frequencies",
        "not asked for: the slowest pair is 4 times slower",
    ),
    "llama3 not stated": (lambda: llama(LLAMA3), PLAIN, "wrong-frequencies", "the slowest pair is 8 times slower"),
    "table of yarn not stated": (
        lambda: engine(cos_sin_cache=cache(YARN)),
        PLAIN,
        "wrong-frequencies",
        "the slowest pair is 4 times slower",
    ),
    "linear twice": (lambda: scaled_twice(LINEAR), LINEAR, "scaling-twice", "scaled twice"),
    "yarn twice": (lambda: scaled_twice(YARN), YARN, "scaling-twice", "scaled twice"),
    "base": (lambda: llama({**PLAIN, "rope_theta": 1e4}), PLAIN, "wrong-base", "10000 instead of 500000"),
    "ramp": (
        lambda: llama({**YARN, "original_max_position_embeddings": 131_072}),
        YARN,
        "yarn-original-length",
        "131,072 trained tokens instead of 32,768",
    ),
    "ramp of the usual base": (
        with_the_ramp_of_the_usual_base,
        YARN,
        "wrong-frequencies",
        "The ends of the ramp are those of base 10000 instead of 500000.",
    ),
    "factor twice": (
        lambda: changed("attention_scaling", lambda factor: factor**2),
        YARN,
        "attention-factor",
        "as if applied twice",
    ),
    "factor dropped": (lambda: changed("attention_scaling", lambda _: 1.0), YARN, "attention-factor", "1 instead of"),
    "table without scaling": (lambda: engine(cos_sin_cache=cache(PLAIN)), LLAMA3, "scaling-ignored", "without any"),
    "table without factor": (lambda: engine(cos_sin_cache=cache(YARN)), YARN, "attention-factor", "1 instead of"),
    "table on meta": (lambda: engine(cos_sin_cache=cache(PLAIN).to("meta")), PLAIN, "lost-on-meta", "meta device"),
    "table of what was in memory": (
        lambda: engine(cos_sin_cache=1e30 * cache(PLAIN) ** 3),
        PLAIN,
        "lost-on-meta",
        "no cosines and sines",
    ),
    "table never filled": (lambda: engine(cos_sin_cache=0 * cache(PLAIN)), PLAIN, "lost-on-meta", "never filled"),
    "table of bfloat16 without scaling": (
        lambda: engine(cos_sin_cache=cache(PLAIN).bfloat16()),
        LLAMA3,
        "scaling-ignored",
        "without any",
    ),
    "table of bfloat16 with another base": (
        lambda: engine(cos_sin_cache=cache({**LLAMA3, "rope_theta": 1e4}).bfloat16()),
        LLAMA3,
        "wrong-base",
        "10000 instead of 500000",
    ),
    "table of bfloat16 with another ramp": (
        lambda: engine(
            cos_sin_cache=(1.13863 * cache({**YARN, "original_max_position_embeddings": 131_072})).bfloat16()
        ),
        YARN,
        "yarn-original-length",
        "131,072 trained tokens",
    ),
    "table of float16 that is scaled twice": (
        lambda: engine(cos_sin_cache=table_of(scaled_twice(LINEAR)).half()),
        LINEAR,
        "scaling-twice",
        "scaled twice",
    ),
    "table of rounded positions": (
        lambda: engine(cos_sin_cache=table_of(llama(LLAMA3), torch.arange(3000.0).bfloat16().float())),
        LLAMA3,
        "low-precision-positions",
        "rounded to bfloat16",
    ),
    "table that is wrong far away": (
        lambda: engine(cos_sin_cache=torch.cat((cache(LLAMA3)[:2000], 1.0001 * cache(LLAMA3)[2000:].flip(0)))),
        LLAMA3,
        "wrong-far-positions",
        "off by",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_are_named(name: str) -> None:
    build, stated, code, says = FAILURES[name]
    found = conformance.verify(build(), llama(stated).config)
    (held,) = (held for held in found.held if held.verdict != "right")
    assert (held.verdict, held.code, held.layers) == ("wrong", code, tuple(range(LAYERS))), str(found)
    assert says in held.says
    assert found.verdict == "wrong"
    assert f"WRONG  {held.names[0]}" in str(found)


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        (YARN, "base 500000, yarn, factor 4."),
        (LLAMA3, "base 500000, llama3, factor 8."),
        (PLAIN, "base 500000, without scaling."),
    ],
)
def test_what_is_right_is_named(stated: dict[str, Any], says: str) -> None:
    assert f"the rope of the config, {says}" in str(conformance.verify(llama(stated)))


def test_formats_of_tables() -> None:
    """Right and wrong tables are found in every usual format."""
    for parameters, verdict in ((LLAMA3, "right"), (PLAIN, "wrong")):
        t = torch.outer(torch.arange(500.0), llama(parameters).model.rotary_emb.inv_freq)
        each, halves = t.repeat_interleave(2, -1), torch.cat((t, t), -1)
        for tensors in (
            {"freqs_cis": torch.polar(torch.ones_like(t), t)},
            {"cache": torch.stack((t.cos(), t.sin()), -1)},
            {"cos_cached": halves.cos()[None, None], "sin_cached": halves.sin()[None, None]},
            {"cos": each.cos(), "sin": each.sin()},
            {"theta": llama(parameters).model.rotary_emb.inv_freq},
        ):
            found = conformance.verify(engine(**tensors), llama(LLAMA3).config)
            assert found.verdict == verdict, (list(tensors), str(found))


@pytest.mark.filterwarnings("ignore:.*has no effect in transformers")
def test_a_config_that_states_the_base_twice(tmp_path: Path) -> None:
    """What transformers 5 does with such a file is what it reads, and is not what the author meant."""
    from transformers import AutoConfig, AutoModelForCausalLM

    file = llama(PLAIN).config.to_dict() | {"rope_parameters": LLAMA3}
    file["rope_scaling"] = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    (tmp_path / "config.json").write_text(json.dumps(file))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    rotary = model.model.rotary_emb
    assert rotary.config.rope_parameters["rope_theta"] == 10_000.0  # the base of the file is lost
    found = conformance.verify(model, tmp_path)
    assert found.verdict == "wrong"
    assert found.held[-1].code == "stated-twice"
    assert "500000" in str(found)
    assert "base is 10000" in str(found)


def test_what_is_not_seen_is_not_judged() -> None:
    plain = llama(PLAIN)
    assert conformance.verify(nn.Linear(2, 2), plain.config).unseen == (0, 1)
    one = engine(cos_sin_cache=cache(PLAIN))
    del one.layers[1].rotary_emb
    found = conformance.verify(one, plain.config)
    assert (found.verdict, found.unseen) == ("not judged", (1,))
    # A tower of another base, a mask, and sinusoidal embeddings are none of the text model's.
    plain.vision_tower = engine(inv_freq=torch.tensor([1.0, 0.5]))
    plain.register_buffer("mask", torch.ones(8, 8))
    plain.register_buffer("missing", torch.zeros(8, 8))
    plain.register_buffer("weights", cache(PLAIN).roll(8, -1))
    found = conformance.verify(plain)
    assert found.verdict == "right"
    assert [held.verdict for held in found.held] == ["right", "not judged"]


def test_frequencies_that_follow_the_length() -> None:
    """After a long text, the buffers of dynamic NTK are those of its length."""
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = tiny_models.build("llama", rope_parameters=parameters, max_position_embeddings=64)
    before = model.model.rotary_emb.inv_freq.clone()
    with torch.no_grad():
        model(torch.zeros(1, 200, dtype=torch.long))
    assert not torch.equal(before, model.model.rotary_emb.inv_freq)
    assert conformance.verify(model).verdict == "right"
    model.model.rotary_emb.max_seq_len_cached = 300
    assert conformance.verify(model).verdict == "wrong"


def test_the_part_of_a_module_is_known_from_its_config(tmp_path: Path) -> None:
    """The text model of a multimodal model has another model_type than the file."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    small = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    text = {
        **small,
        "intermediate_size": 64,
        "vocab_size": 99,
        "rope_parameters": {**PLAIN, "mrope_section": [2, 3, 3]},
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    model = Qwen2_5_VLModel(config)
    assert conformance.verify(model, tmp_path).verdict == "right"
    model.language_model.rotary_emb.inv_freq *= 2
    assert conformance.verify(model, tmp_path).verdict == "wrong"


def test_softmax_scale() -> None:
    changes = {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}
    model = tiny_models.build("deepseek_v3", **changes)
    factor = (0.1 * math.log(4.0) + 1) ** 2
    attention = model.model.layers[0].self_attn
    assert attention.scaling * math.sqrt(attention.qk_head_dim) == pytest.approx(factor)
    assert conformance.verify(model).verdict == "right"
    attention.scaling = attention.qk_head_dim**-0.5
    found = conformance.verify(model)
    assert found.verdict == "wrong"
    assert f"1 instead of {factor:.6g}" in str(found)


def test_refused() -> None:
    with pytest.raises(RopeError, match=r"model must be a torch\.nn\.Module"):
        conformance.verify("path/to/model")
    with pytest.raises(RopeError, match="config must be passed"):
        conformance.verify(nn.Linear(2, 2))


class Loader:
    """vLLM's class, as far as the plugin uses it."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        return engine(cos_sin_cache=cache(LLAMA3 if model_config.right else PLAIN))


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> type[Loader]:
    fresh = type("BaseModelLoader", (), {"load_model": Loader.load_model})
    package = ModuleType("vllm.model_executor.model_loader")
    package.BaseModelLoader = fresh
    for name in ("vllm", "vllm.model_executor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    assert importlib.import_module(package.__name__) is package
    return fresh


def model_config(tmp_path: Path, *, right: bool, **overrides: Any) -> Any:
    config = llama(LLAMA3).config
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    return SimpleNamespace(model=str(tmp_path), hf_config=config, hf_overrides=overrides, right=right)


def test_plugin(
    loader: type[Loader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right, wrong = (model_config(tmp_path, right=right) for right in (True, False))
    vllm.register()
    assert loader.load_model is Loader.load_model  # it is off unless the variable is set
    monkeypatch.setenv("ROPEWALK_VERIFY", "1")
    vllm.register()
    vllm.register()
    with caplog.at_level(logging.INFO, "vllm.ropewalk"):
        assert isinstance(loader().load_model(None, right), nn.Module)
        loader().load_model(vllm_config=None, model_config=wrong)
    assert [(record.levelname, "WRONG" in record.getMessage()) for record in caplog.records] == [
        ("INFO", False),
        ("WARNING", True),
    ]
    monkeypatch.setenv("ROPEWALK_VERIFY", "yes")
    with pytest.raises(RopeError, match='ROPEWALK_VERIFY must be "1" or "strict"'):
        vllm.register()


def test_plugin_that_is_strict(loader: type[Loader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEWALK_VERIFY", "strict")
    vllm.register()
    loader().load_model(None, model_config(tmp_path, right=True))
    with pytest.raises(RopeError, match="rotary tables of a model must be those of its config"):
        loader().load_model(None, model_config(tmp_path, right=False))
    plain = model_config(tmp_path, right=False, rope_parameters=PLAIN)  # what was asked for at the start counts
    plain.hf_config = llama(PLAIN).config
    loader().load_model(None, plain)
    unreadable = SimpleNamespace(model="none", hf_config={"model_type": "unheard"}, hf_overrides={}, right=False)
    loader().load_model(None, unreadable)  # which cannot be judged, so it is served


def test_plugin_without_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEWALK_VERIFY", "1")
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    with pytest.raises(RopeError, match="vLLM must be installed, with its model loaders"):
        vllm.register()
