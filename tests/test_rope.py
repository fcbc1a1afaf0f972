"""Rope: construction, checks and derived values."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import oracle
from ropewalk import Llama3, Rope, RopeError, YaRN, from_config
from ropewalk.schemes import Linear


def rope(**changes: Any) -> Rope:
    return Rope(**{"head_dim": 8, "base": 10_000.0, "pairing": "half", **changes})


@pytest.mark.parametrize("base", [100.0, 10_000.0, 5e5, 1e8])
@pytest.mark.parametrize("dims", [(64, 64), (128, 32), (80, 80)])
def test_frequencies_are_those_of_the_rotary_dim(base: float, dims: tuple[int, int]) -> None:
    head_dim, rotary_dim = dims
    made = Rope(head_dim, base, "half", rotary_dim=rotary_dim)
    assert made.inv_freq.dtype == np.float64
    np.testing.assert_allclose(made.inv_freq, np.array(oracle.inv_freq(base, rotary_dim), float), rtol=1e-15)
    np.testing.assert_allclose(made.wavelength, 2 * math.pi / made.inv_freq, rtol=1e-15)


def test_an_odd_number_of_channels_rotates_as_in_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTNeoXConfig(
        hidden_size=1020,
        num_attention_heads=12,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    )
    with pytest.raises(RopeError, match=r"rotary_dim=22 and base \*\* \(22 / 21\), as GPT-NeoX does in transformers"):
        from_config(config)
    from transformers.models.gpt_neox import modeling_gpt_neox as neox

    q, k, positions = torch.randn(1, 2, 9, 85), torch.randn(1, 2, 9, 85), torch.arange(9)
    expected = neox.apply_rotary_pos_emb(q, k, *neox.GPTNeoXRotaryEmbedding(config)(q, positions[None]))
    made = Rope(85, 10_000.0 ** (22 / 21), "half", rotary_dim=22)
    torch.testing.assert_close(made.at(positions)(q, k, layout="bhsd"), expected)


def test_inv_freq_is_a_copy() -> None:
    made = rope()
    made.inv_freq[:] = 0
    assert made.inv_freq[0] == 1.0


def test_equal_by_value_for_every_type_of_number() -> None:
    assert rope(base=10_000) == rope(base=np.float64(1e4)) == rope(head_dim=np.int64(8)) == rope(base=Fraction(10_000))
    assert hash(rope(base=10_000)) == hash(rope())
    assert rope(rotary_dim=8) == rope()
    assert len({rope(), rope(rotary_dim=8), rope(pairing="interleaved"), rope(scaling=Linear(2))}) == 3


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        rope().base = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "Rope(head_dim=8, base=10000.0, pairing='half')"),
        ({"rotary_dim": 4}, "Rope(head_dim=8, base=10000.0, pairing='half', rotary_dim=4)"),
        ({"rotary_offset": 4}, "Rope(head_dim=8, base=10000.0, pairing='half', rotary_offset=4)"),
        (
            {"scaling": Linear(2), "pairing": "interleaved"},
            "Rope(head_dim=8, base=10000.0, pairing='interleaved', scaling=Linear(factor=2.0))",
        ),
    ],
)
def test_repr_can_be_read_and_evaluated(changes: dict[str, Any], text: str) -> None:
    assert repr(rope(**changes)) == text
    assert eval(text) == rope(**changes)


def test_survives_pickle_copy_and_replace() -> None:
    made = rope(scaling=YaRN(4, 4096))
    for twin in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), dataclasses.replace(made)):
        assert twin == made
        np.testing.assert_array_equal(twin.inv_freq, made.inv_freq)
    assert dataclasses.replace(rope(), base=1e6).inv_freq[1] == pytest.approx(1e6 ** (-1 / 4))


def test_offset_takes_the_rest_of_the_head() -> None:
    assert rope(rotary_offset=2).rotary_dim == 6


def test_a_rope_of_the_rotated_slice() -> None:
    """DeepSeek's MLA rotates the last 64 of 192 channels; the slice alone is a smaller rope of the same frequencies."""
    whole = Rope(192, 1e4, "interleaved", rotary_dim=64, rotary_offset=128)
    alone = dataclasses.replace(whole, head_dim=whole.rotary_dim, rotary_offset=0)
    np.testing.assert_array_equal(alone.inv_freq, whole.inv_freq)
    x, positions = torch.randn(5, 2, 192), torch.arange(5)
    rotated = whole.at(positions)(x, layout="thd")
    torch.testing.assert_close(rotated[..., 128:], alone.at(positions)(x[..., 128:], layout="thd"), rtol=0, atol=0)
    assert torch.equal(rotated[..., :128], x[..., :128])


def test_static_ropes_are_the_same_at_any_length() -> None:
    made = rope(scaling=Llama3(8, 1, 4, 8192))
    assert made.at_length(1_000_000) is made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 1}, "head_dim must be an integer from 2 to 65536, got 1"),
        ({"head_dim": 10**9}, "head_dim must be an integer from 2"),
        ({"head_dim": 8.0}, "head_dim must be an integer"),
        ({"head_dim": True}, "head_dim must be an integer"),
        ({"head_dim": 7}, "rotary_dim must be even, since channels rotate in pairs, got 7. Pass rotary_dim=6"),
        ({"rotary_dim": 3}, "rotary_dim must be even"),
        ({"rotary_dim": 10}, "rotary_dim must be an integer from 2 to 8, got 10"),
        ({"rotary_dim": 0}, "rotary_dim must be an integer from 2"),
        ({"rotary_dim": 8, "rotary_offset": 2}, "rotary_dim must be an integer from 2 to 6, got 8"),
        ({"rotary_offset": -2}, "rotary_offset must be an integer from 0 to 6, got -2"),
        ({"rotary_offset": 8}, "rotary_offset must be an integer from 0 to 6"),
        ({"base": 1.0}, "base must be a finite number greater than 1, got 1.0"),
        ({"base": -10_000.0}, "base must be a finite number"),
        ({"base": math.nan}, "base must be a finite number"),
        ({"base": math.inf}, "base must be a finite number"),
        ({"base": 10**400}, "base must be a finite number"),
        ({"base": "10000"}, "base must be a finite number greater than 1, got '10000'"),
        ({"base": True}, "base must be a finite number"),
        ({"base": None}, "base must be a finite number"),
        ({"pairing": "neox"}, "pairing must be one of 'half', 'interleaved', got 'neox'"),
        ({"pairing": True}, "pairing must be one of"),
        ({"pairing": ["half"]}, "pairing must be one of"),
        ({"scaling": {"rope_type": "linear"}}, "scaling must be a scheme of ropewalk.schemes or None"),
        ({"scaling": Linear}, "scaling must be a scheme"),
    ],
)
def test_impossible_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeError) as raised:
        rope(**changes)
    assert f"Rope: {message}" in str(raised.value)
    assert len(str(raised.value)) < 400


def test_base_and_pairing_have_no_default() -> None:
    with pytest.raises(TypeError):
        Rope(8)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Rope(8, 1e4)  # type: ignore[call-arg]


@pytest.mark.parametrize("n", [0, -1, 1.5, True, None])
def test_at_length_requires_a_length(n: Any) -> None:
    with pytest.raises(RopeError, match="n must be an integer of at least 1"):
        rope().at_length(n)


def test_attention_factor_multiplies_cos_and_sin() -> None:
    made = rope(scaling=YaRN(16, 4096))
    plain = dataclasses.replace(made, scaling=YaRN(16, 4096, attention_factor=1.0))
    assert made.attention_factor == pytest.approx(0.1 * math.log(16) + 1)
    positions = torch.arange(100)
    for name in ("cos", "sin"):
        scaled, unscaled = getattr(made.at(positions), name), getattr(plain.at(positions), name)
        torch.testing.assert_close(scaled, unscaled * made.attention_factor, rtol=1e-6, atol=1e-9)
