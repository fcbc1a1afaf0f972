"""Tables of other libraries, created by their code and compared with their rotation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from ropewalk import Axes, Llama3, Rope, RopeError, Rotation, YaRN, formats

POSITIONS = torch.tensor([[0, 1, 7, 4095, 100_000]])
Q, K = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16)


def peer(model: str, config: str, **how: Any) -> tuple[Any, Any]:
    """Return the modeling module of a model of transformers, and its rotary module for heads of 16."""
    transformers = pytest.importorskip("transformers")
    module = getattr(transformers.models, model)
    given = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16} | how
    configured = getattr(transformers, f"{config}Config")(**given)
    modeling = getattr(module, f"modeling_{model}")
    return modeling, getattr(modeling, f"{config}RotaryEmbedding")(configured)


@pytest.mark.parametrize(
    ("model", "config", "repeated", "pairing"),
    [
        ("llama", "Llama", "halves", "half"),
        ("cohere", "Cohere", "each", "interleaved"),
        ("ernie4_5", "Ernie4_5", "halves", "interleaved"),
    ],
)
def test_tables_of_transformers_rotate_as_its_functions_do(
    model: str, config: str, repeated: Any, pairing: Any
) -> None:
    modeling, rotary = peer(model, config)
    cos, sin = rotary(Q, POSITIONS)
    rotation = formats.from_full_width(cos, sin, repeated=repeated, pairing=pairing)
    for x, expected in zip((Q, K), modeling.apply_rotary_pos_emb(Q, K, cos, sin), strict=True):
        assert torch.equal(rotation(x, layout="bhsd"), expected)
    for mine, theirs in zip(formats.to_full_width(rotation, repeated=repeated), (cos, sin), strict=True):
        assert torch.equal(mine, theirs)


def test_complex_tables_rotate_as_metas_code_does() -> None:
    modeling, rotary = peer("llama4", "Llama4Text")
    turns = rotary(Q, POSITIONS)
    rotation = formats.from_complex(turns)
    q, k = Q.transpose(1, 2).contiguous(), K.transpose(1, 2).contiguous()
    for x, expected in zip((q, k), modeling.apply_rotary_emb(q, k, turns), strict=True):
        torch.testing.assert_close(rotation(x, layout="bshd"), expected, rtol=0, atol=1e-6)
    assert torch.equal(formats.to_complex(rotation), turns)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_a_cache_by_hand(pairing: Any) -> None:
    """In vLLM and FlashInfer, row p has cos of all pairs at position p, then their sin."""
    angles = np.outer(np.arange(12), [float(w) for w in oracle.inv_freq(1e4, 16)])
    cache = torch.from_numpy(np.concatenate((np.cos(angles), np.sin(angles)), axis=1)).float()
    table = formats.from_cache(cache, pairing=pairing)
    positions = torch.tensor([11, 0, 5, 5, 1])
    rotated = table[positions](Q, layout="bhsd")
    exact = oracle.rotate(Q.double().numpy(), angles[positions.numpy()], pairing)
    np.testing.assert_allclose(rotated.numpy(), exact, rtol=0, atol=1e-6)
    assert torch.equal(formats.to_cache(table), cache)
    assert torch.equal(formats.to_cache(Rope(16, 1e4, pairing).at(torch.arange(12)), dtype=torch.float16), cache.half())


@pytest.mark.parametrize("repeated", ["halves", "each"])
def test_full_width_by_hand(repeated: Any) -> None:
    rotation = Rope(8, 1e4, "half", rotary_dim=4, rotary_offset=2, scaling=YaRN(4.0, 512)).at(torch.tensor([3, 9]))
    cos, sin = formats.to_full_width(rotation, repeated=repeated, dtype=torch.float64)
    order = [0, 1, 0, 1] if repeated == "halves" else [0, 0, 1, 1]
    assert torch.equal(cos, rotation.cos.double()[:, order])
    assert torch.equal(sin, rotation.sin.double()[:, order])
    how = {"head_dim": 8, "rotary_offset": 2, "attention_factor": rotation.attention_factor}
    back = formats.from_full_width(cos.float(), sin.float(), repeated=repeated, pairing="half", **how)
    x = torch.randn(2, 3, 8)
    assert torch.equal(back(x, layout="thd"), rotation(x, layout="thd"))
    torch.testing.assert_close(back.inverse()(back(x, layout="thd"), layout="thd"), x)


def test_gradients_reach_the_tables() -> None:
    wide = torch.randn(5, 8).repeat(1, 2).requires_grad_()
    complex_ = torch.randn(5, 8, dtype=torch.complex64, requires_grad=True)
    cache = torch.randn(5, 16, requires_grad=True)
    for given, rotation in (
        (wide, formats.from_full_width(wide, wide, repeated="halves", pairing="half")),
        (complex_, formats.from_complex(complex_)),
        (cache, formats.from_cache(cache, pairing="half")),
    ):
        rotation(Q, layout="bhsd").square().sum().backward()
        assert given.grad is not None
        assert given.grad.abs().sum() > 0


WIDE = torch.randn(5, 8).repeat(1, 2)
ROTATION = Rope(16, 1e4, "half").at(torch.arange(5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: formats.from_full_width(WIDE, WIDE, repeated="each", pairing="half"),
            "twice, side by side.*'halves'",
        ),
        (
            lambda: formats.from_full_width(WIDE, WIDE[:, [0, 0, 1, 1]], repeated="halves", pairing="half"),
            "sin must contain every value twice, once in each half of a row.*'each'",
        ),
        (lambda: formats.from_full_width(WIDE, WIDE, repeated="both", pairing="half"), "repeated must be one of"),
        (lambda: formats.from_full_width(WIDE[:, :3], WIDE, repeated="each", pairing="half"), "an even number"),
        (lambda: formats.from_full_width(WIDE.bfloat16(), WIDE, repeated="halves", pairing="half"), r"\.float\(\)"),
        (lambda: formats.from_full_width(None, WIDE, repeated="halves", pairing="half"), "cos must be a float32"),
        (lambda: formats.from_full_width(WIDE, WIDE[:4], repeated="halves", pairing="half"), "the same shape"),
        (lambda: formats.from_complex(WIDE), "turns must be a complex64 or complex128 tensor, got torch.float32"),
        (lambda: formats.from_complex(torch.ones(1, 1, 3, 4, 2, dtype=torch.complex64)), "the same shape"),
        (lambda: formats.from_cache(WIDE[None], pairing="half"), r"cache must have shape \[rows, rotary_dim\]"),
        (lambda: formats.from_cache(WIDE[:, :5], pairing="half"), r"cache must have shape \[rows, rotary_dim\]"),
        (lambda: formats.from_cache(WIDE.half(), pairing="half"), "16 bits have lost the angle"),
        (lambda: formats.to_cache(Rope(16, 1e4, "half").at(POSITIONS)), r"rope\.at\(torch\.arange\(rows\)\)"),
        (lambda: formats.to_cache(WIDE), "rotation must be a Rotation"),
        (lambda: formats.to_complex(None), "rotation must be a Rotation"),
        (lambda: formats.to_full_width(None, repeated="each"), "rotation must be a Rotation"),
        (lambda: formats.to_full_width(ROTATION, repeated=1), "repeated must be one of 'halves', 'each', got 1"),
    ],
)
def test_refusals(call: Callable[[], Rotation | Tensor], message: str) -> None:
    with pytest.raises(RopeError, match=message):
        call()


@pytest.mark.parametrize(
    ("columns", "width"),
    [("0101", "halves"), ("0011", "each"), ("01", "half"), ("0110", None), ("010", None)],
)
def test_the_width_of_a_table(columns: str, width: Any) -> None:
    pairs = torch.randn(3, 2)
    table = pairs[:, [int(column) for column in columns]]
    assert formats.width_of(table, 2) == width
    if width is not None:
        assert torch.equal(formats.widen(pairs, width), table)
        assert torch.equal(formats.narrow(table, width), pairs)
    complex_ = torch.complex(table, table)
    assert formats.width_of(complex_, 2) == ("complex" if width == "half" else None)


class TestDifference:
    """Frequencies of float32 code, which round the exponent and four results, and of wrong code."""

    @pytest.mark.parametrize("base", [100.0, 1e4, 5e5, 1e8])
    def test_of_float32_code(self, base: float) -> None:
        scaled = Rope(128, base, "half", scaling=YaRN(40.0, 4096, attention_factor=1.0))
        exact = torch.from_numpy(np.array([float(w) for w in oracle.inv_freq(base, 128)]))
        plain = Rope(128, base, "half")
        for found in (
            1.0 / base ** (torch.arange(0, 128, 2).float() / 128),
            torch.exp(-np.log(base) * (torch.arange(0, 128, 2).float() / 128)),
            exact,
        ):
            assert formats.difference(plain, found, 1.0) == ""
            assert formats.difference(plain, found.bfloat16().float(), 1.0) == ""
            assert formats.difference(scaled, found, 1.0).startswith("inv_freq[")

    @pytest.mark.parametrize(
        "scaling", [Llama3(32.0, 1.0, 2.0, 8192), Llama3(128.0, 1.0, 4.0, 8192), YaRN(256.0, 8192)], ids=str
    )
    def test_of_float32_code_on_a_ramp(self, scaling: Any) -> None:
        """Where two frequencies are mixed, the rounding of their weights is that of the larger one."""
        rope = Rope(192, 1e5, "half", scaling=scaling)
        stated = dict(vars(scaling), rope_type=scaling.rope_type, rope_theta=1e5)
        _, rotary = peer("llama", "Llama", head_dim=192, rope_parameters=stated)
        assert formats.difference(rope, rotary.inv_freq, rope.attention_factor) == ""
        for pair, error in ((0, 1e-6), (50, 2e-4), (95, 2e-6)):  # fast, on the ramp, slow
            wrong = rotary.inv_freq.double()
            wrong[pair] *= 1 + error
            assert formats.difference(rope, wrong, rope.attention_factor).startswith(f"inv_freq[{pair}] ")

    @pytest.mark.parametrize("pair", [0, 7])
    def test_the_first_wrong_pair_is_named(self, pair: int) -> None:
        found = torch.from_numpy(Rope(16, 1e4, "half").inv_freq.copy())
        found[pair] *= 1 + 1.5e-6
        assert formats.difference(Rope(16, 1e4, "half"), found, 1.0).startswith(f"inv_freq[{pair}] ")
        found[pair] = torch.nan
        assert formats.difference(Rope(16, 1e4, "half"), found, 1.0).startswith(f"inv_freq[{pair}] nan instead of ")

    def test_numbers_and_factors(self) -> None:
        rope = Rope(16, 1e4, "half", scaling=YaRN(4.0, 512))
        found = torch.from_numpy(rope.inv_freq)
        assert formats.difference(rope, found, rope.attention_factor * (1 + 1e-7)) == ""
        assert formats.difference(rope, found, 1.0) == "attention factor 1 instead of 1.13862944"
        assert formats.difference(rope, found[:4], rope.attention_factor) == "4 frequencies instead of 8"

    def test_axes_may_share_frequencies_in_any_order(self) -> None:
        rope = Rope(16, 1e4, "half", axes=Axes.axial((8, 8)))
        shared = torch.tensor([float(w) for w in oracle.inv_freq(1e4, 8)])
        assert formats.difference(rope, shared.flip(0), 1.0) == ""
        assert formats.difference(rope, shared.repeat(2), 1.0) == ""
        assert formats.difference(rope, shared * 1.1, 1.0).startswith("inv_freq[0] 1.1")


class TestPermute:
    """tests/checkpoints/test_rules.py compares it with the permutations of other projects."""

    @pytest.mark.parametrize("heads", [1, 3])
    def test_as_transformers_reads_gguf(self, heads: int) -> None:
        gguf = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
        weight = torch.randn(heads * 8, 5)
        theirs = gguf.LlamaTensorProcessor()._reverse_permute_weights(weight.numpy(), heads)
        assert torch.equal(formats.permute(weight, 8, to="half"), torch.from_numpy(theirs))

    def test_channels_that_do_not_rotate_stay(self) -> None:
        rows = torch.arange(24).bfloat16()
        moved = formats.permute(rows, 12, to="half", rotary_dim=8, rotary_offset=3)
        assert moved[:12].tolist() == [0, 1, 2, 3, 5, 7, 9, 4, 6, 8, 10, 11]
        assert torch.equal(moved[12:], moved[:12] + 12)
        assert torch.equal(formats.permute(moved, 12, to="interleaved", rotary_dim=8, rotary_offset=3), rows)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"weight": torch.zeros(20, 4)}, "weight must have whole heads of 8 rows along its first axis, got"),
            ({"to": "neox"}, "to must be one of 'half', 'interleaved', got 'neox'"),
            ({"rotary_dim": 5}, "rotary_dim must be even"),
            ({"rotary_offset": 4, "rotary_dim": 6}, "rotary_dim must be an integer from 2 to 4, got 6"),
            ({"head_dim": 8.0}, "head_dim must be an integer of at least 2"),
        ],
    )
    def test_refused(self, wrong: dict[str, Any], message: str) -> None:
        with pytest.raises(RopeError, match="formats.permute: " + message):
            formats.permute(**({"weight": torch.zeros(16, 4), "head_dim": 8, "to": "half"} | wrong))
