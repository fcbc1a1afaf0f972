"""SelfExtend, compared with the rule of the paper, applied to each pair in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attention_oracle as written_out
import oracle
from attention_oracle import Rotary
from ropewalk import DynamicNTK, Rope, RopeError, RotaryAttention, SelfExtend, YaRN

SEQ, HEAD_DIM = 11, 8
YARN = Rope(HEAD_DIM, 1e4, "half", scaling=YaRN(4, 64))
YARN_TURN = Rotary(oracle.yarn(1e4, HEAD_DIM, 4, 64), "half", factor=0.1 * 1.3862943611198906 + 1)
PARTIAL = Rope(HEAD_DIM, 1e3, "interleaved", rotary_dim=4, rotary_offset=2)
PARTIAL_TURN = Rotary(oracle.inv_freq(1e3, 4), "interleaved", offset=2)

# As in test_attention.py, plus one rotation that shifts the keys. Measured: 4e-15, and 3e-14 in gradients of size 30.
EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-13}


@pytest.fixture(autouse=True, params=["few tokens", "many", "pieces of 4"])
def number_of_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the way for few tokens, the one for many, and that for pieces of them, whatever their number is."""
    monkeypatch.setattr("ropewalk.attention.attend._FEW", 64 if request.param == "few tokens" else 0)
    monkeypatch.setattr("ropewalk.attention.pairs.PIECE", 4 if request.param == "pieces of 4" else 256)


def layer() -> RotaryAttention:
    torch.manual_seed(0)
    made = RotaryAttention(16, 4, num_kv_heads=2, head_dim=HEAD_DIM, qk_norm=1e-6, softmax_factor=1.3).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def hidden(batch: int = 2) -> Tensor:
    return torch.randn(batch, SEQ, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("rope", "rotary"), [(YARN, YARN_TURN), (PARTIAL, PARTIAL_TURN)], ids=["YaRN", "partial"])
@pytest.mark.parametrize(("group", "window"), [(1, 3), (3, 4), (4, 0), (2, 5), (100, 2), (3, 100)])
def test_values_and_gradients(rope: Rope, rotary: Rotary, group: int, window: int) -> None:
    made, x = layer(), hidden().requires_grad_()
    extended = SelfExtend(rope, group=group, window=window)
    ours = made(x, extended.at(torch.arange(SEQ), dtype=torch.float64))
    theirs = written_out.of_layer(made, x, rotary, written_out.self_extend(range(SEQ), group, window))
    torch.testing.assert_close(ours, theirs, **EXACT)
    wanted = [x, *made.parameters()]
    mine, right = (torch.autograd.grad(out, wanted, torch.ones_like(out)) for out in (ours, theirs))
    for one, other in zip(mine, right, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


def test_rows_with_different_positions() -> None:
    places = [[0, 1, 2, 3, 5, 6, 8, 13, 14, 15, 40], [-9, -8, -7, -6, -5, -4, -3, -2, -1, 0, 1]]
    made, x = layer(), hidden()
    pairs = [written_out.self_extend(row, 3, 4) for row in places]
    theirs = written_out.of_layer(
        made, x, YARN_TURN, (torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs]))
    )
    ours = made(x, SelfExtend(YARN, 3, 4).at(torch.tensor(places), dtype=torch.float64))
    torch.testing.assert_close(ours, theirs, **EXACT)


def test_with_a_mask() -> None:
    made, x = layer(), hidden()
    seen = (torch.arange(SEQ) != 2)[None].expand(SEQ, SEQ) | torch.eye(SEQ, dtype=torch.bool)
    bias = torch.randn(1, 4, SEQ, SEQ, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    rotation, at = (
        SelfExtend(YARN, 3, 4).at(torch.arange(SEQ), dtype=torch.float64),
        written_out.self_extend(range(SEQ), 3, 4),
    )
    theirs = written_out.of_layer(made, x, YARN_TURN, at, seen=written_out.causal(SEQ) & seen)
    torch.testing.assert_close(made(x, rotation, mask=seen[None, None]), theirs, **EXACT)
    theirs = written_out.of_layer(made, x, YARN_TURN, at, bias=bias)
    torch.testing.assert_close(made(x, rotation, mask=bias), theirs, **EXACT)


@pytest.mark.parametrize("additive", [False, True])
def test_a_fully_masked_token_gets_zero(additive: bool) -> None:
    """As in PyTorch's attention, the result is 0, without NaN in the gradients."""
    made, x = layer(), hidden(1).requires_grad_()
    mask = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool)
    mask[..., 4, :] = False
    if additive:
        mask = torch.zeros(1, 1, SEQ, SEQ, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    out = made(x, SelfExtend(YARN, 3, 4).at(torch.arange(SEQ), dtype=torch.float64), mask=mask)
    assert torch.equal(out[0, 4], torch.zeros(16, dtype=torch.float64))
    assert torch.equal(out[0, 4], made(x, YARN.at(torch.arange(SEQ), dtype=torch.float64), mask=mask)[0, 4])
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


def test_half_precision() -> None:
    """All but the softmax is in bfloat16: 4 roundings of 2⁻⁹ on scores of size 1 and values of size 2."""
    made, x = layer(), hidden()
    theirs = written_out.of_layer(made, x, YARN_TURN, written_out.self_extend(range(SEQ), 3, 4))
    ours = made.bfloat16()(x.bfloat16(), SelfExtend(YARN, 3, 4).at(torch.arange(SEQ)))
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=4 * 2**-9 * 4)


def test_no_distance_is_longer_than_the_trained_ones() -> None:
    """The bound in the docstring is tight: (L − window) · group + window tokens, and not one more."""
    trained, group, window = 32, 4, 8
    longest = (trained - window) * group + window
    of_query, of_key = written_out.self_extend(range(longest), group, window)
    assert int((of_query - of_key)[written_out.causal(longest)].max()) < trained
    of_query, of_key = written_out.self_extend(range(longest + 1), group, window)
    assert int((of_query - of_key)[written_out.causal(longest + 1)].max()) == trained


def test_refusals() -> None:
    with pytest.raises(RopeError, match="SelfExtend: rope must be a Rope, got 64"):
        SelfExtend(64, 2, 2)  # type: ignore[arg-type]
    with pytest.raises(RopeError, match="SelfExtend: group must be an integer of at least 1, got 0"):
        SelfExtend(YARN, 0, 2)
    with pytest.raises(RopeError, match="SelfExtend: window must be an integer of at least 0, got -1"):
        SelfExtend(YARN, 2, -1)
    with pytest.raises(RopeError, match=r"SelfExtend\.at: positions must be int32 or int64 .*, got torch.float32"):
        SelfExtend(YARN, 2, 2).at(torch.arange(3.0))
    with pytest.raises(RopeError, match=r"SelfExtend\.at: key_positions must be .* of shape \(1, 1, 3\)"):
        SelfExtend(YARN, 2, 2).at(torch.arange(3), torch.arange(3)[None, None])
    with pytest.raises(RopeError, match=r"Rope.at: positions must be a tensor, got \[1\]"):
        SelfExtend(YARN, 2, 2).at([1])  # type: ignore[arg-type]


def test_rope_must_be_static() -> None:
    rope = Rope(4, 1e4, "half", scaling=DynamicNTK(2.0, 64))
    with pytest.raises(RopeError, match=r"SelfExtend: rope must be static, got Rope\(.* Use rope.at_length\(n\)"):
        SelfExtend(rope, group=2, window=4)
    SelfExtend(rope.at_length(128), group=2, window=4)
