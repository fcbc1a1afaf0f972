"""Models whose code is not in transformers, and in what they differ from Llama."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oracle
from each import each
from ropewalk import NTK, DynamicNTK, Rope, RopeError, diff, from_config
from ropewalk.configs.models import ARCHITECTURES
from ropewalk.configs.tables import wrappers
from ropewalk.schemes import Linear, Proportional

INTERNLM = {
    "model_type": "internlm",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
}


@pytest.mark.parametrize(
    ("more", "base", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rotary": {"base": 20000, "type": "origin"}}, 2e4, None),
        ({"rotary": {"base": 20000, "type": "dynamic"}}, 2e4, DynamicNTK(1.0, 2048)),
        ({"rotary": {"base": 20000, "type": "dynamic", "scaling_factor": 2.0}}, 2e4, DynamicNTK(2.0, 2048)),
        ({"rotary": {"base": 20000, "scaling_factor": 2.0}}, 2e4, None),
        ({}, 1e4, None),
    ],
)
def test_internlm(more: dict[str, Any], base: float, scaling: Any) -> None:
    assert from_config({**INTERNLM, **more}).rope == Rope(16, base, "half", scaling=scaling)


@pytest.mark.parametrize(
    ("rotary", "message"),
    [
        ({"base": 1e4, "kind": "x"}, "rotary.kind must be one of base, type, scaling_factor, got 'x'"),
        ({"type": "xpos"}, "rotary.type must be one of default, dynamic"),
        ([1], "rotary must be an object or null"),
    ],
)
def test_internlm_refuses(rotary: Any, message: str) -> None:
    with pytest.raises(RopeError) as raised:
        from_config({**INTERNLM, "rotary": rotary})
    assert message in str(raised.value)


def test_nemotron_nas() -> None:
    """Some blocks have no attention, or a linear layer instead of it."""
    blocks = [{"no_op": False}, {"no_op": True}, {"no_op": False, "replace_with_linear": True}]
    config = {
        "model_type": "nemotron-nas",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "rope_theta": 5e5,
        "block_configs": [{"attention": block} for block in blocks],
    }
    rope = Rope(16, 5e5, "half")
    assert from_config(config).layers == (rope, None, None)
    for wrong in ([1, 2, 3], [{}] * 3):
        with pytest.raises(RopeError, match="block_configs must contain objects with the key attention"):
            from_config({**config, "block_configs": wrong})
    with pytest.raises(RopeError, match="block_configs must be given, since some layers have no attention"):
        from_config({**config, "block_configs": None})


def test_baichuan_by_its_width() -> None:
    """The 7B has a hidden size of 4096. The 13B uses ALiBi."""
    config = {"model_type": "baichuan", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 1}
    assert from_config(config).rope == Rope(128, 1e4, "half")
    with pytest.raises(RopeError, match="ALiBi"):
        from_config({**config, "hidden_size": 5120, "num_attention_heads": 40})


def test_minimind_by_its_names() -> None:
    old = {"model_type": "minimind", "dim": 64, "n_heads": 4, "n_layers": 1, "rope_theta": 1e6}
    new = {
        "model_type": "minimind",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "rope_theta": 1e6,
    }
    assert from_config(old).rope == Rope(16, 1e6, "interleaved")
    assert from_config(new).rope == Rope(16, 1e6, "half")


def test_minimax_m1_rotates_layers_with_softmax_attention() -> None:
    config = {
        "model_type": "minimax_m1",
        "head_dim": 128,
        "rotary_dim": 64,
        "num_hidden_layers": 3,
        "rope_theta": 1e7,
        "attn_type_list": [0, 0, 1],
    }
    assert from_config(config).layers == (None, None, Rope(128, 1e7, "half", rotary_dim=64))


@pytest.mark.parametrize(("trained", "alpha"), [(8192, None), (16384, 3.0), (32768, 7.0), (20000, 7.0), (4096, None)])
def test_telechat(trained: int, alpha: float | None) -> None:
    """By the model's own code, alpha is 2^ceil(log2(training_seqlen / 8192) + 1) - 1, but at least 1."""
    config = {"model_type": "telechat", "hidden_size": 64, "n_head": 4, "n_layer": 1, "training_seqlen": trained}
    scaling = None if alpha is None else NTK(alpha)
    assert from_config(config).rope == Rope(16, 1e4, "half", scaling=scaling)


def test_a_file_that_shares_its_model_type_with_a_model_without_a_rope() -> None:
    """The published file of Jina Embeddings 3, whose class in transformers has another model_type."""
    file = {"model_type": "xlm-roberta", "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 2}
    file |= {"max_position_embeddings": 8194, "position_embedding_type": "rotary", "rotary_emb_base": 20000.0}
    jina = {**file, "model_type": "jina_embeddings_v3", "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}
    del jina["rotary_emb_base"], jina["position_embedding_type"]
    assert from_config(file).layers == from_config(jina).layers == (Rope(64, 2e4, "half"),) * 2
    states = diff.engines(file, names=["transformers", "transformers-4", "vllm"]).facts["states"]
    assert [*states.values()] == ["absent", "absent", "unknown"]  # transformers' model of this name has no rope
    with pytest.raises(RopeError, match="xlm-roberta has no rotary positions: it has learned absolute positions"):
        from_config({**file, "position_embedding_type": "absolute"})


def test_qwen() -> None:
    config = {
        "model_type": "qwen",
        "kv_channels": 128,
        "n_layer": 2,
        "rotary_emb_base": 1e6,
        "rotary_pct": 1.0,
        "seq_length": 2048,
        "max_position_embeddings": 8192,
        "use_dynamic_ntk": True,
    }
    ropes = from_config(config)
    assert ropes.rope == Rope(128, 1e6, "half")
    assert (ropes.trained_length, ropes.max_position_embeddings) == (2048, 8192)
    assert "beyond 2048 tokens the model's own code uses NTK" in ropes.warnings[0]
    assert from_config({**config, "use_dynamic_ntk": False}).warnings == ()


def test_latent_attention_of_an_unknown_model() -> None:
    renamed = {
        "model_type": "my_v3",
        "num_hidden_layers": 1,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_theta": 1e4,
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale_all_dim": 1.0},
    }
    ropes = from_config(renamed, pairing="interleaved")
    known = from_config({**renamed, "model_type": "deepseek_v3"})
    assert (ropes.layers, ropes.softmax_factor, ropes.output_order) == (
        known.layers,
        known.softmax_factor,
        known.output_order,
    )
    assert "read like that of DeepSeek-V3" in ropes.warnings[0]


ENGINES = {"mlx_lm": 22, "sglang": 27, "vllm": 43}
GOLDEN = Path(__file__).parents[1] / "golden"


def recorded(engine: str) -> list[tuple[str, dict[str, Any]]]:
    rows = json.loads((GOLDEN / f"engine_models/remote_of_{engine}.json").read_text())["rows"]
    return [(row["model_type"], row) for row in rows]


@pytest.mark.filterwarnings("ignore:.* so the base is:UserWarning")
@pytest.mark.parametrize("engine", ENGINES)
def test_ropes_are_those_that_engines_build(engine: str) -> None:
    """Layers without a rope that follow the last rope are not in the recordings of SGLang and vLLM."""

    def check(row: dict[str, Any]) -> None:
        several_axes = any("axis" in (group["rope"] or {}) for group in row["ropes"])
        layers = from_config(row["config"], text_only=not several_axes).layers
        modules = 2 if row["model_type"] == "longcat_flash_ngram" else 1  # each layer has two attention modules
        assert layers[::modules] == layers[modules - 1 :: modules]
        expected = {index: group["rope"] for group in row["ropes"] for index in group["layers"]}
        for index, rope in enumerate(layers[::modules]):
            found = expected.pop(index, None)
            if rope is None or found is None:
                assert rope is found
                continue
            assert (rope.rotary_dim, rope.pairing) == (found["rotary_dim"], found["pairing"])
            assert (None if rope.axes is None else [*rope.axes.axis]) == found.get("axis")
            rtol = 2**-24 * (4 + 8 + math.log(rope.base))  # measured angles, and a power in float32
            np.testing.assert_allclose(rope.inv_freq, found["inv_freq"], rtol=rtol)
            assert rope.attention_factor == pytest.approx(found["attention_factor"], rel=2e-7)
        assert not expected

    rows = recorded(engine)
    assert len(rows) == ENGINES[engine]
    each(rows, check)


@pytest.mark.parametrize(("engine", "models"), [("mlx_lm", 2), ("sglang", 4), ("vllm", 3)])
def test_rows_read_by_hand_give_what_engines_build(engine: str, models: int) -> None:
    read = {"bailing_moe", "bailing_moe_v2", "dots_ocr", "kimi_vl", "nanbeige"} - (
        {"kimi_vl"} if engine == "mlx_lm" else set()
    )
    rows = [row for name, row in recorded(engine) if name in read]
    assert len(rows) == models
    for row in rows:
        [found], name = [group["rope"] for group in row["ropes"]], engine.replace("_", "-")
        assert diff.engines(row["config"], names=(name,)).verdict == "agree"
        [rope] = {*from_config(row["config"], engine=name).layers}
        assert rope is not None
        assert (rope.rotary_dim, rope.pairing) == (found["rotary_dim"], found["pairing"])
        np.testing.assert_allclose(rope.inv_freq, found["inv_freq"], rtol=2**-24 * (12 + math.log(rope.base)))


@pytest.mark.parametrize(("engine", "label"), [("mlx_lm", "mlx-lm 0"), ("sglang", "SGLang 0"), ("vllm", "vLLM 0")])
def test_rows_that_name_an_engine_were_run_in_it(engine: str, label: str) -> None:
    named = {name for name, row in ARCHITECTURES.items() if label in row.source and not row.refusal}
    of_schemes = {"grok-1", "telechat3", "talkie"}  # golden/deployed.json, in tests/schemes/test_deployed.py
    rows = recorded(engine)
    run = {name for name, _ in rows} | {from_config(row["config"]).model_type for _, row in rows}
    assert named - of_schemes <= run


def test_wrappers_outside_transformers_were_run() -> None:
    assert {name for names in wrappers.REMOTE.values() for name in names.split()} <= {
        name for engine in ENGINES for name, _ in recorded(engine)
    }


def test_ropes_are_those_of_the_models_own_code() -> None:
    rows = [row for row in json.loads((GOLDEN / "deployed.json").read_text())["rows"] if "config" in row]
    assert len(rows) == 5
    for row in rows:
        rope = from_config(row["config"]).rope
        assert rope is not None
        if "read_as" in row:
            assert rope == Rope(row["read_as"]["head_size"], row["read_as"]["base"], "half")
            assert row["read_as"]["rotary_dim"] == rope.head_dim
            continue
        q = torch.tensor(oracle.golden_q(row["params"]["shape"]))
        rotated = rope.at(torch.arange(q.shape[-2]))(q, layout="bhsd")
        np.testing.assert_allclose(rotated.flatten(), row["rotated"], atol=2e-6)


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 4096}


def test_keys_of_published_files() -> None:
    """Qwen 1 with a rope_theta, Hunyuan Large with a switch, VibeVoice with a decoder_config, and Step-3's length."""
    qwen = from_config({"model_type": "qwen", "rotary_emb_base": 1e4, "rope_theta": 1e6, "kv_channels": 16, **SIZES})
    assert qwen.rope == Rope(16, 1e4, "half")
    assert "rope_theta has no effect: the model's code reads rotary_emb_base." in qwen.warnings
    hunyuan = {"model_type": "hunyuan", "rope_theta": 1e4, **SIZES}
    assert from_config({**hunyuan, "use_rotary_pos_emb": True}).rope == Rope(16, 1e4, "half")
    assert from_config({**hunyuan, "use_rotary_pos_emb": False}).layers == (None, None)
    text = {"head_dim": 256, "rope_theta": 5e5, "max_seq_len": 32_768, **SIZES, "max_position_embedding": 65_536}
    for step in ({"model_type": "step3_text", **text}, {"model_type": "step3_vl", "text_config": text}):
        ropes = from_config(step)
        assert (ropes.rope, ropes.trained_length, ropes.warnings) == (Rope(256, 5e5, "half"), 65_536, ())
    decoder = {"model_type": "qwen2", "rope_theta": 1e6, **SIZES}
    for key in ("text_config", "decoder_config"):
        assert from_config({"model_type": "vibevoice", key: decoder}).rope == Rope(16, 1e6, "half")
    pangu = from_config({"model_type": "PanguEmbedded", "rope_theta": 16e6, "bias": True, **SIZES})
    assert pangu.rope == Rope(16, 16e6, "half")
    embed = {"model_type": "nvembed", "text_config": {**decoder, "model_type": "bidir_mistral"}}
    assert from_config({**embed, "latent_attention_config": {"model_type": "latent_attention"}}).rope == Rope(
        16, 1e6, "half"
    )


def test_models_that_contain_another() -> None:
    """Text models whose keys are flat, or whose model_type is missing."""
    text = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2, "rope_theta": 3e5}
    text["max_position_embeddings"] = 4096
    step = {**text, "head_dim": 32}
    for name, key, inner, rope in (
        ("NVLM_D", "llm_config", {"model_type": "qwen2", **text}, Rope(64, 3e5, "half")),
        ("bagel", "llm_config", text, Rope(64, 3e5, "half")),
        ("jet_vlm", "text_config", {**text, "layer_types": ["attn", "swa"]}, Rope(64, 3e5, "half")),
        ("locateanything", "text_config", text, Rope(64, 3e5, "half")),
        ("ovis2_5", "llm_config", {"model_type": "qwen3", **step}, Rope(32, 3e5, "half")),
        ("pointsv1.5_chat", "llm_config", text, Rope(64, 3e5, "half")),
        ("step3_vl", "text_config", step, Rope(32, 3e5, "half")),
    ):
        ropes = from_config({"model_type": name, key: inner})
        assert (ropes.rope, ropes.warnings) == (rope, ())
    assert from_config({"model_type": "kimi_k3", "text_config": {"num_hidden_layers": 2}}).layers == (None, None)
    openvla = {"model_type": "openvla", "text_config": {"model_type": "llama", "vocab_size": 32064}}
    with pytest.warns(UserWarning, match="not stated"):
        assert from_config(openvla).rope == Rope(128, 1e4, "half")
    dots = from_config({"model_type": "dots_ocr", **text, "vision_config": {}})
    assert dots.rope == Rope(64, 3e5, "half")
    assert dots.vision is not None
    assert dots.vision.model_type == "dots_vit"
    llada = {"model_type": "llada", "d_model": 256, "n_heads": 4, "n_layers": 2, "rope_theta": 5e5, "rope": True}
    assert from_config(llada).rope == Rope(64, 5e5, "half")
    assert from_config({**llada, "rope": False}).layers == (None, None)


def test_the_rope_that_stands_in_the_error_for_a_part_of_k2_horizon() -> None:
    """vLLM's k2_horizon.py rotates the first channels of both halves in turn, by the frequencies of a smaller head."""
    said = r"Rope\(16, base=rope_theta \*\* \(16 / 8\), scaling=Proportional\(8 / 16\), pairing='half'\)"
    with pytest.raises(RopeError, match=f"i and i \\+ 8 rotate for i < 4, .*{said}"):
        from_config({**INTERNLM, "model_type": "k2_horizon", "head_dim": 16, "rope_head_dim": 8})
    in_turn, position = torch.arange(16).reshape(2, 8).T.flatten()[:8], torch.tensor([3])
    q = torch.randn(1, 1, 1, 16)
    part = Rope(8, 1e7, "interleaved").at(position)(q[..., in_turn], layout="bshd")
    whole = Rope(16, base=1e7**2, scaling=Proportional(8 / 16), pairing="half").at(position)(q, layout="bshd")
    torch.testing.assert_close(whole[..., in_turn], part)
    assert torch.equal(whole[..., 4:8], q[..., 4:8])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "k2_horizon", "head_dim": 64, "rope_head_dim": 32}, "rope_head_dim must be the head size 64"),
        ({"model_type": "phi3small", "rope_scaling": {"type": "su"}}, "rope_scaling must be None"),
        ({"model_type": "iquest_q1", "head_dim": 64}, "must give the kinds of 2 layers"),
        (
            {"model_type": "iquest_q1", "head_dim": 64, "num_hidden_layers": 88, "no_rope_layers": 3},
            "no_rope_layers must be a list of layer numbers below 88",
        ),
        ({"model_type": "minicpm_sala", "mixer_types": "attn"}, "mixer_types must be a list"),
        (
            {"model_type": "dory", "head_dim": 64, "layer_types": ["mlp", "full_attention"]},
            "layer_types must contain only mlp, got 'full_attention'",
        ),
        ({"model_type": "esmfold2"}, "rotates atoms"),
        ({"model_type": "lightglue"}, "angles of points"),
    ],
)
def test_what_is_refused(config: dict[str, Any], message: str) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2, "rope_theta": 3e5}
    with pytest.raises(RopeError) as raised:
        from_config({**sizes, **config})
    assert message in str(raised.value)


def test_plamo2_without_mamba() -> None:
    config = {"model_type": "plamo2", "hidden_size_per_head": 64, "num_hidden_layers": 6, "mamba_step": 4}
    rope = Rope(64, 1e4, "half")
    assert from_config(config).layers == (None, None, rope, None, None, None)
    assert from_config({**config, "num_hidden_layers": 2}).layers == (None, rope)
    assert from_config({**config, "mamba_enabled": False}).layers == (rope,) * 6


def test_ling_2_5_has_the_model_type_of_ling_3() -> None:
    config = {**dict(recorded("sglang"))["bailing_moe_v2_5"]["config"], "model_type": "bailing_hybrid"}
    layers = from_config(config).layers
    assert [rope and (rope.rotary_dim, rope.pairing) for rope in layers] == [(8, "half"), (16, "interleaved")] * 2
    after_last_group = from_config({**config, "num_hidden_layers": 5}).layers[4]
    assert after_last_group is not None
    assert after_last_group.pairing == "interleaved"
    assert from_config({**config, "architectures": ["BailingMoeV3ForCausalLM"]}).layers[0] is None
    # Both publish a rotary_dim of 64, which is not a key of their config classes.
    for name in ("BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM"):
        stated = {**config, "architectures": [name]}
        assert from_config({**stated, "rotary_dim": 64}).layers == from_config(stated).layers
    with pytest.raises(RopeError, match="only its own code reads this model_type"):
        from_config(config).to_hf_config(version=5)


def test_published_keys_of_hunyuan_and_ouro() -> None:
    """Hunyuan-7B-Instruct states a key of its first code. vLLM's models/ouro.py passes no pairing to get_rope."""
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "num_hidden_layers": 1, "head_dim": 128, "rope_theta": 1e6}
    for name in ("hunyuan_v1_dense", "hunyuan_v1_moe"):
        config = {"model_type": name, **sizes, "use_rotary_pos_emb": True}
        assert from_config(config).rope == Rope(128, 1e6, "half")
        with pytest.raises(RopeError, match="use_rotary_pos_emb must be True"):
            from_config({**config, "use_rotary_pos_emb": False})
    assert from_config({"model_type": "ouro", **sizes, "total_ut_steps": 4}).rope == Rope(128, 1e6, "half")


def test_ntk_of_gte() -> None:
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 1, "max_position_embeddings": 8192}
    config = {"model_type": "new", **sizes, "rope_theta": 2e4, "position_embedding_type": "rope"}
    scaling = {"type": "ntk", "factor": 8.0}
    ropes = from_config({**config, "rope_scaling": scaling})
    assert ropes.rope == Rope(64, 160_000.0, "half", scaling=Linear(8 ** (2 / 64)))
    assert ropes.trained_length == 8192
    with pytest.raises(RopeError, match=r"rope_scaling\.mixed_b must be a key"):
        from_config({**config, "rope_scaling": {**scaling, "mixed_b": 0.5}})
    assert from_config({**config, "position_embedding_type": "absolute"}).layers == (None,)
