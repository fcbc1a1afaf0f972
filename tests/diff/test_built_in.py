"""Compare trainers that read no config with what their own functions computed for their models (golden files)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from each import each
from ropewalk import Rope, diff
from ropewalk.engines import TRAINERS, Answer, ConfigRope
from ropewalk.schemes import PerPair

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = {"torchtitan": 30, "torchtune": 34, "maxtext": 59}
"""The trainers and the number of their models."""


def rows(name: str) -> list[dict[str, Any]]:
    found = json.loads((GOLDEN / "trainers" / f"models_of_{name}.json").read_text())
    assert found["peer"]["version"] == TRAINERS[name].version
    assert len(found["rows"]) == MODELS[name]
    return found["rows"]  # type: ignore[no-any-return]


def answer(name: str, row: dict[str, Any], kind: str, model_type: str) -> Answer:
    """Return the answer for a config with the shape and the frequencies of a model."""
    recorded = row["ropes"][kind]
    inv_freq = np.array(recorded["inv_freq"])
    head_dim, pairs = recorded["head_dim"], len(inv_freq)
    rope = Rope(head_dim, base=123.0, rotary_dim=2 * pairs, pairing=recorded["weights"])
    if inv_freq.all():  # else there is only one model of this shape
        factors = tuple(rope.inv_freq / inv_freq)
        rope = Rope(
            head_dim,
            base=123.0,
            rotary_dim=2 * pairs,
            pairing=recorded["weights"],
            scaling=PerPair(factors=factors, attention_factor=recorded["attention_factor"]),
        )
    keys = {"hidden_size": row["hidden_size"], "num_attention_heads": row["heads"], "vocab_size": row["vocab_size"]}
    config = ConfigRope(rope, model_type=model_type, values=keys, kind=kind, layers=row["layers"])
    return TRAINERS[name].answer(config)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_the_rope_that_the_trainer_computes(name: str) -> None:
    def check(row: dict[str, Any]) -> None:
        for kind, recorded in row["ropes"].items():
            for model_type in row["models"]:
                found = answer(name, row, kind, model_type)
                assert found.rope is not None, found.refusal
                assert found.evidence == row.get("evidence", "run")
                assert found.rope.pairing == recorded["weights"]
                # As for engines: powers in float32, and YaRN's weight multiplied by its factor.
                factor = getattr(found.rope.scaling, "factor", None) or 1.0
                np.testing.assert_allclose(found.rope.inv_freq, recorded["inv_freq"], rtol=6e-7 + 2**-24 * factor)
                assert found.rope.attention_factor == pytest.approx(recorded["attention_factor"], rel=2e-7)

    each(((row["case"], row) for row in rows(name)), check)


def test_the_models_of_torchtitan_that_rotate_complex_numbers() -> None:
    """Their tables come from torch.polar, so they are not bitwise equal to those of other trainers."""
    for row in rows("torchtitan"):
        for kind, recorded in row["ropes"].items():
            for model_type in row["models"]:
                rounding = answer("torchtitan", row, kind, model_type).rounding
                assert rounding is not None
                assert rounding.is_complex is (recorded["class"] == "ComplexRoPE")


@pytest.mark.parametrize("name", MODELS)
def test_rotated_vectors_have_the_bits_of_the_rounding_profile(name: str) -> None:
    """A vector in bfloat16 has the same bits as in the trainer, and other bits with another dtype of the rotation."""
    recorded = [row for row in rows(name) if "rotated" in row["ropes"].get("all", {})]
    assert len(recorded) >= 3
    for row in recorded:
        of_row = row["ropes"]["all"]
        found = answer(name, row, "all", row["models"][0])
        assert found.rope is not None
        assert found.rounding is not None
        assert found.rounding.evidence == "run"
        outside = found.rounding.factor != "cos and sin in float32"  # then cos and sin do not have the factor
        cos, sin = tables(found.rope, without_factor=outside)
        y = torch.tensor(of_row["rotated"])
        after = found.rope.attention_factor if found.rounding.factor.startswith("q and k") else 1.0
        bits = {
            (table, rotation): rotate(cos, sin, of_row, after, table == "float32", rotation == "float32")
            for table in ("float32", "the model's")
            for rotation in ("float32", "the model's")
        }
        same = [profile for profile, rotated in bits.items() if torch.equal(rotated, y)]
        assert same == [(found.rounding.table, found.rounding.rotation)], row["case"]


def tables(rope: Rope, *, without_factor: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of the recorded positions from float32 operations."""
    turned = rope.at(torch.tensor([0, 1, 17, 4095]), numerics="float32")
    factor = rope.attention_factor if without_factor else 1.0
    return turned.cos / factor, turned.sin / factor


def rotate(
    cos: torch.Tensor, sin: torch.Tensor, recorded: dict[str, Any], after: float, float32_table: bool, in_float32: bool
) -> torch.Tensor:
    """Rotate the vector of the recorder, with tables and products in float32 or in bfloat16."""
    size = recorded["head_dim"]
    x = torch.tensor([(37 * i % 64 - 31) / 16 for i in range(size)]).bfloat16().expand(4, -1)
    first, second = (x[:, ::2], x[:, 1::2]) if recorded["pairing"] == "interleaved" else x.chunk(2, dim=-1)
    if not float32_table:
        cos, sin = cos.bfloat16().float(), sin.bfloat16().float()
    dtype = torch.float32 if in_float32 else torch.bfloat16
    products = [(a.float() * b).to(dtype) for a, b in ((first, cos), (second, sin), (second, cos), (first, sin))]
    real, imaginary = (products[0] - products[1]) * after, (products[2] + products[3]) * after
    stacked = (real, imaginary)
    joined = torch.stack(stacked, dim=-1).flatten(1) if recorded["pairing"] == "interleaved" else torch.cat(stacked, 1)
    return joined.bfloat16().float()


REAL = {
    "000": {"torchtune": ("qwen2_5.qwen2_5_14b_base", "same"), "MaxText": ("qwen2.5-14b", "same")},
    "006": {"torchtune": ("gemma2.gemma2_2b", "same"), "MaxText": ("gemma2-2b", "same")},
    "035": {"MaxText": ("gemma3-27b", "same")},
    "049": {"torchtune": ("mistral.mistral_7b", "differs"), "MaxText": ("mistral-7b", "same")},
    "052": {"torchtune": ("mistral.mistral_7b", "same"), "MaxText": ("mistral-7b", "differs")},
    "084": {"torchtitan": ("qwen3 0.6B", "same"), "MaxText": ("qwen3-0.6b", "same")},
    "086": {"torchtitan": ("qwen3 235B-A22B", "differs"), "MaxText": ("qwen3-235b-a22b", "differs")},
    "087": {"torchtitan": ("qwen3 30B-A3B", "same"), "MaxText": ("qwen3-30b-a3b-base", "same")},
    "089": {"MaxText": ("qwen3-480b-a35b", "same")},
    "095": {"torchtitan": ("qwen3_5 122B-A10B", "same")},
    "101": {"MaxText": ("llama4-17b-16e", "differs")},  # factor 8 and not 16
    "104": {"MaxText": ("mixtral-8x22b", "same")},
    "105": {"torchtitan": ("kimi_k2_7 Kimi-K2.5", "same"), "MaxText": ("kimi-k2-1t", "differs")},
    "109": {"MaxText": ("gemma4-26b", "same")},
    "124": {"torchtitan": ("qwen3_5 27B", "same")},
    "126": {"torchtitan": ("gpt_oss 120b", "same"), "MaxText": ("gpt-oss-120b", "same")},
    "134": {"torchtune": ("gemma.gemma_2b", "same"), "MaxText": ("gemma-2b", "same")},
    "163": {"torchtune": ("llama2.llama2_7b", "same"), "MaxText": ("llama2-7b", "same")},
    "168": {
        "torchtitan": ("llama3 8B", "same"),
        "torchtune": ("llama3_1.llama3_1_8b", "same"),
        "MaxText": ("llama3.1-8b", "same"),
    },
    "169": {  # Llama 3 has no scaling
        "torchtitan": ("llama3 8B", "differs"),
        "torchtune": ("llama3.llama3_8b", "same"),
        "MaxText": ("llama3-8b", "same"),
    },
    "179": {"torchtitan": ("qwen3 30B-A3B", "differs"), "MaxText": ("qwen3-30b-a3b", "same")},
    "270": {"MaxText": ("gemma3-4b", "same")},
    "289": {"torchtitan": ("qwen3 1.7B", "same"), "MaxText": ("qwen3-1.7b", "same")},
    "294": {"torchtune": ("phi3.phi3_mini", "differs")},  # Phi-3 with 128k tokens
    "395": {"torchtune": ("phi3.phi3_mini", "same")},
    "442": {"torchtitan": ("muse_glimmer 30B", "same")},
    "443": {"MaxText": ("deepseek4-284b", "differs")},  # it does not scale the compressed layers
    "471": {"torchtune": ("code_llama2.code_llama2_13b", "same"), "MaxText": ("llama2-13b", "differs")},
}
"""For the config of a file in released.json: the model of each trainer that has one, and its state in the diff."""


def test_real_configs() -> None:
    """The model of the shape is found, and differs where the frequencies that the trainer computed differ."""
    released = json.loads((GOLDEN / "released.json").read_text())["rows"]
    recorded = {name: {row["case"]: row for row in rows(name)} for name in MODELS}

    def check(row: dict[str, Any]) -> None:
        wanted = REAL[row["file"][:3]]
        found = diff.engines(row["config"], names=("transformers", *MODELS))
        states = {name: state for name, state in found.facts["states"].items() if state != "absent"}
        assert states == {"transformers": "same", **{name: state for name, (_, state) in wanted.items()}}
        for name, (model, _) in wanted.items():
            ropes = recorded[name.lower()][model]["ropes"]
            for group in found.facts["ropes"]:
                [entry] = [entry for entry in group["engines"] if entry["name"] == name]
                note = f"It reads no config.json. The rope is the one built into its model {model}."
                assert entry["notes"][0] == note
                inv_freq = group["at"][-1]["engines"][name]["inv_freq"]
                own = [one["inv_freq"] for one in ropes.values() if len(one["inv_freq"]) == len(inv_freq)]
                assert any(np.allclose(inv_freq, one, rtol=3e-6, atol=0) for one in own)

    each(((row["file"], row) for row in released if row["file"][:3] in REAL), check)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def entry(name: str, config: dict[str, Any]) -> dict[str, Any]:
    [group] = diff.engines(config, names=(name,)).facts["ropes"]
    return group["engines"][0]  # type: ignore[no-any-return]


def test_sentences() -> None:
    """Llama 3.2 1B has the factor 32. In torchtitan it has the default factor of Llama 3.1."""
    assert entry("torchtitan", LLAMA)["notes"] == [
        "It reads no config.json. The rope is the one built into its model llama3 1B.",
        "That model has the base 500000 and llama3 with factor 8, and the config has the base 500000 and llama3 with "
        "factor 32.",
    ]
    large = {**LLAMA, "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80, "head_dim": 128}
    large["rope_scaling"] = {**LLAMA["rope_scaling"], "factor": 8.0}  # type: ignore[dict-item]
    assert entry("maxtext", large)["notes"] == [
        "It reads no config.json. The rope is the one built into its model llama3.1-70b.",
        "Of the same shape, but with other numbers: llama3-70b, llama3.3-70b.",
    ]
    partial = {**LLAMA, "model_type": "qwen3_next", "num_attention_heads": 16, "num_hidden_layers": 48, "head_dim": 256}
    partial |= {"vocab_size": 151_936, "rope_theta": 1e7, "rope_scaling": None, "partial_rotary_factor": 0.5}
    assert entry("maxtext", partial)["notes"][1:] == [
        "That model has 64 rotated channels, the base 1e+07 and no scaling, and the config has 128 rotated channels, "
        "the base 1e+07 and no scaling."
    ]


def test_models_that_a_trainer_does_not_have() -> None:
    thin = entry("torchtitan", {**LLAMA, "num_hidden_layers": 17})
    only = "has no model llama of this shape, only llama3 1B, llama3 3B, llama3 8B, llama3 70B, llama3 405B"
    assert (thin["why"], thin["refused"]) == ("absent", only)
    assert entry("torchtitan", {**LLAMA, "vocab_size": 32_000})["why"] == "absent"  # Llama 2
    assert entry("torchtitan", {**LLAMA, "vocab_size": 128_258})["why"] is None  # tokens were added
    arcee = entry("maxtext", {**LLAMA, "model_type": "arcee"})
    assert (arcee["why"], arcee["refused"]) == ("absent", "has no model arcee")
