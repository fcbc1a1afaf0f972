"""The ropes of Meta's params.json, compared with the oracle, and errors for missing keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oracle
from ropewalk import Llama3, Rope, RopeError, from_config

LLAMA3 = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "rope_theta": 500000.0, "use_scaled_rope": False}
LLAMA31 = {**LLAMA3, "use_scaled_rope": True}
LLAMA2 = {"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-06, "vocab_size": -1}


def test_llama_3() -> None:
    ropes = from_config(LLAMA3)
    assert ropes.rope == Rope(128, 500000.0, "interleaved")
    assert len(ropes.layers) == 32
    assert "view_as_complex" in ropes.explain()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_31_and_32(factor: float) -> None:
    rope = from_config(LLAMA31, factor=factor).rope
    np.testing.assert_allclose(
        rope.inv_freq, np.array(oracle.by_parts(5e5, 128, factor, 1, 4, 8192), float), rtol=1e-14
    )
    assert from_config({**LLAMA31, "rope_scaling_factor": factor}).rope == rope


def test_llama_2_states_no_base() -> None:
    ropes = from_config(LLAMA2)
    assert ropes.rope == Rope(128, 10_000.0, "interleaved")
    assert ropes.warnings
    assert from_config(LLAMA2, base=1e6).rope.base == 1e6


def test_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(LLAMA3))
    assert from_config(tmp_path).rope == from_config(tmp_path / "params.json").rope == from_config(LLAMA3).rope


@pytest.mark.parametrize(
    ("config", "kwargs", "message"),
    [
        (LLAMA31, {}, "use_scaled_rope needs the factor of the scaling, which the format does not contain"),
        (LLAMA31, {}, "add rope_scaling_factor to the file"),
        (LLAMA31, {}, "Pass factor=8.0 (Llama 3.1) or factor=32.0 (Llama 3.2 1B and 3B)"),
        (LLAMA31, {"factor": 0.5}, "factor must be a finite number of at least 1"),
        (
            {**LLAMA31, "rope_scaling_factor": 8},
            {"factor": 32.0},
            "rope_scaling_factor is 8, and factor must agree",
        ),
        (LLAMA3, {"factor": 8.0}, "use_scaled_rope must be true if a factor is given"),
        ({**LLAMA3, "use_scaled_rope": 1}, {}, "use_scaled_rope must be true or false, got 1"),
        ({**LLAMA3, "rope_theta": None}, {}, "rope_theta must be given, since it is the base"),
        ({**LLAMA3, "rope_theta": "5e5"}, {}, "rope_theta must be a finite number"),
        (LLAMA3, {"base": 1e6}, "rope_theta is 500000, and base must agree"),
        ({**LLAMA3, "rope_thetta": 1}, {}, "'rope_thetta' is about rotation and must be a key that"),
        (
            {**LLAMA3, "rope_flavour": 1},
            {},
            "ropewalk knows no such key of this model. If the model's own code does not read it either, pass ignore=",
        ),
        ({**LLAMA3, "ntk_alpha": 4}, {}, "'ntk_alpha' is about rotation"),
        ({**LLAMA3, "dim": 4097}, {}, "dim must be a multiple of n_heads=32"),
        ({**LLAMA3, "n_layers": 10**9}, {}, "n_layers must be an integer from 1 to 10000"),
        ({**LLAMA3, "n_heads": 0}, {}, "n_heads must be an integer of at least 1"),
        ({**LLAMA3, "head_dim": 10**9}, {}, "head_dim must be an integer from 2 to 65536"),
    ],
)
def test_refusals(config: dict[str, Any], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeError) as raised:
        from_config(config, **kwargs)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"hidden_dim": 1, "use_hf_rope": True}, "in ExecuTorch's params.json"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "belongs to latent attention (DeepSeek, Mistral)"),
        ({"nope_layer_interval": 4, "use_scaled_rope": True}, "belongs to the params.json of Llama 4"),
    ],
)  # fmt: skip
def test_other_programs_that_name_sizes_as_meta_does(keys: dict[str, Any], named: str) -> None:
    """Their ropes are other ones, so no advice helps to read them as Meta's."""
    with pytest.raises(RopeError) as raised:
        from_config({**LLAMA3, **keys})
    assert named in str(raised.value)
    assert str(raised.value).endswith("Read the config.json of the model instead.")


def test_mistral_without_scaling() -> None:
    """It has the pairing of Meta's code. Which base a missing key means depends on the version of Mistral's code."""
    mistral = {"dim": 5120, "n_layers": 40, "head_dim": 128, "hidden_dim": 32768, "n_heads": 32, "n_kv_heads": 8}
    ropes = from_config({**mistral, "rope_theta": 1e9, "sliding_window": 4096, "model_type": "transformer"})
    assert ropes.rope == Rope(128, 1e9, "interleaved")
    with pytest.raises(RopeError, match="rope_theta must be given, since it is the base"):
        from_config(mistral)
    assert from_config(mistral, base=1e6).rope == Rope(128, 1e6, "interleaved")
    with pytest.raises(RopeError, match="rope_theta is 1e\\+09, and base must agree with it"):
        from_config({**mistral, "rope_theta": 1e9}, base=1e6)


def test_head_dim_of_its_own() -> None:
    assert from_config({**LLAMA3, "head_dim": 64}).rope.head_dim == 64


def test_factor_is_refused_for_other_formats() -> None:
    with pytest.raises(RopeError, match=r"factor requires Meta's params\.json"):
        from_config({"model_type": "llama"}, factor=8.0)


def test_scheme() -> None:
    assert from_config(LLAMA31, factor=8.0).rope.scaling == Llama3(8.0, 1.0, 4.0, 8192)


def test_the_pairing_is_that_of_the_format() -> None:
    params = {"dim": 64, "n_layers": 1, "n_heads": 2, "rope_theta": 1e4}
    assert from_config(params, pairing="interleaved").rope.pairing == "interleaved"
    with pytest.raises(RopeError, match=r"pairing of Meta's params\.json must be 'interleaved', got 'half'"):
        from_config(params, pairing="half")
