"""`RotaryAttention` whose projections return some of the heads, as on one rank of tensor parallelism."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import attention_oracle as written_out
import oracle
from attention_oracle import Rotary
from ropewalk import Rope, RopeError, RotaryAttention

HIDDEN, HEADS, HEAD_DIM, SEQ, EPS = 12, 8, 4, 5, 1e-6
ROPE, TURN = Rope(HEAD_DIM, 1e4, "half"), Rotary(oracle.inv_freq(1e4, HEAD_DIM), "half")


def layer(kv_heads: int) -> RotaryAttention:
    torch.manual_seed(0)
    return RotaryAttention(HIDDEN, HEADS, num_kv_heads=kv_heads, head_dim=HEAD_DIM, qk_norm=EPS).double()


def part(whole: RotaryAttention, **channels: slice) -> RotaryAttention:
    """Return a copy whose projections have these output channels. o_proj has the input channels of q."""
    attention = copy.deepcopy(whole)
    for name, kept in channels.items():
        projection = attention.get_submodule(f"{name}_proj")
        projection.weight = nn.Parameter(projection.weight[kept])
    attention.o_proj.weight = nn.Parameter(attention.o_proj.weight[:, channels["q"]])
    return attention


def heads(first: int, last: int) -> slice:
    return slice(first * HEAD_DIM, last * HEAD_DIM)


def run(attention: RotaryAttention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    return attention(x, ROPE.at(torch.arange(SEQ), dtype=torch.float64), mask=mask)


@pytest.mark.parametrize(("kv_heads", "ranks"), [(8, 2), (4, 4), (2, 2), (2, 4), (1, 2), (2, 8)])
def test_outputs_of_parts_add_up_to_the_whole(kv_heads: int, ranks: int) -> None:
    whole, x = layer(kv_heads), torch.randn(2, SEQ, HIDDEN, dtype=torch.float64)
    total, count = torch.zeros_like(x), max(1, kv_heads // ranks)
    for rank in range(ranks):
        of_q, first = heads(rank * HEADS // ranks, (rank + 1) * HEADS // ranks), rank * kv_heads // ranks
        of_k = heads(first, first + count)
        every_head = torch.ones(1, HEADS // ranks, 1, 1) > 0  # a mask has the heads of its rank
        total += run(part(whole, q=of_q, k=of_k, v=of_k), x, mask=every_head if rank else None)
    exact = written_out.of_layer(whole, x, TURN)
    torch.testing.assert_close(total, exact, rtol=0, atol=3e-14)


@pytest.mark.parametrize(
    ("kv_heads", "channels", "message"),
    [
        (4, {"q": slice(6)}, "q_proj must return whole heads, a multiple of head_dim=4 channels, got 6."),
        (4, {"q": slice(0)}, "q_proj must return whole heads, a multiple of head_dim=4 channels, got 0."),
        (1, {"q": heads(0, 4), "k": slice(2), "v": slice(2)}, "k_proj must return whole heads, a multiple of"),
        (4, {"q": heads(0, 4), "k": heads(0, 2), "v": slice(6)}, "v_proj must return whole heads, a multiple of"),
        (
            4,
            {"q": heads(0, 4), "k": heads(0, 2)},
            "k_proj and v_proj must return the same number of heads, got 2 and 4",
        ),
        (4, {"q": heads(0, 4)}, "2 query heads for each key head, got 4 query heads and 4 key heads."),
        (4, {"q": heads(0, 3), "k": heads(0, 2), "v": heads(0, 2)}, "got 3 query heads and 2 key heads"),
        (4, {"q": heads(0, 4), "k": heads(0, 1), "v": heads(0, 1)}, "got 4 query heads and 1 key heads"),
    ],
)
def test_refuses_parts_that_do_not_belong_together(kv_heads: int, channels: dict[str, slice], message: str) -> None:
    with pytest.raises(RopeError) as raised:
        run(part(layer(kv_heads), **channels), torch.zeros(1, SEQ, HIDDEN, dtype=torch.float64))
    assert message in str(raised.value)
    assert str(raised.value).startswith("RotaryAttention: ")
    assert str(raised.value).endswith("Shard whole heads, e.g. with ropewalk.parallel.HeadwiseParallel.")
