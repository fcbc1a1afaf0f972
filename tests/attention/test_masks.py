"""Masks, compared with loops over pairs and with attention written out. Ambiguous masks are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attention_oracle as written_out
import oracle
from attention_oracle import Rotary
from ropewalk import KVCache, Rope, RopeError, RotaryAttention, SelfExtend, TwoPass, masks, positions
from ropewalk.attention import attend as attention

HIDDEN, HEADS, SEQ, HEAD_DIM = 12, 2, 9, 6
ROPE, TURN = Rope(HEAD_DIM, 1e4, "half"), Rotary(oracle.inv_freq(1e4, HEAD_DIM), "half")
EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-13}  # measured: 3e-15 in values of size 5

REAL = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 1, 1, 0, 1, 1]])
CU_SEQLENS = torch.tensor([0, 4, 9])


def layer() -> RotaryAttention:
    torch.manual_seed(0)
    made = RotaryAttention(HIDDEN, HEADS, head_dim=HEAD_DIM).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def hidden(batch: int, seq: int = SEQ) -> Tensor:
    return torch.randn(batch, seq, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def reference(made: RotaryAttention, x: Tensor, at: Tensor, seen: Tensor) -> Tensor:
    return written_out.of_layer(made, x, TURN, written_out.pairs(at), seen=seen)


def in_window(seq: int, window: int) -> Tensor:
    return torch.tensor([[0 <= i - j < window for j in range(seq)] for i in range(seq)])


@pytest.mark.parametrize("window", [1, 3, SEQ, SEQ + 5])
def test_sliding_window(window: int) -> None:
    mask = masks.sliding_window(SEQ, window)
    assert torch.equal(mask, in_window(SEQ, window)[None, None])
    made, x, at = layer(), hidden(2), torch.arange(SEQ)
    ours = made(x, ROPE.at(at, dtype=torch.float64), mask=mask)
    torch.testing.assert_close(ours, reference(made, x, at, in_window(SEQ, window)), **EXACT)


@pytest.mark.parametrize("real", [REAL, REAL.bool(), REAL.int()])
def test_padding_is_masked(real: Tensor) -> None:
    """With padding on the left, on the right or in the middle, real tokens get the result of a row without padding."""
    mask = masks.padding(real)
    assert mask.dtype == torch.bool
    assert mask.shape == (3, 1, 1, SEQ)
    made, x = layer(), hidden(3).requires_grad_()
    ours = made(x, ROPE.at(positions.from_mask(real), dtype=torch.float64), mask=mask)
    for row in range(3):
        tokens = x[row, real[row].bool()]
        count = len(tokens)
        theirs = reference(made, tokens[None], torch.arange(count), written_out.causal(count))
        torch.testing.assert_close(ours[row, real[row].bool()], theirs[0], **EXACT)
    assert torch.autograd.grad(ours.sum(), x)[0].isfinite().all()  # padding on the left attends to no key


def test_numbered_documents() -> None:
    """With the mask that `masks.padding` names, each document of a row gets the result of a row of its own."""
    numbers = torch.tensor([[1, 1, 1, 2, 2, 0, 3, 3, 3], [0, 0, 1, 1, 1, 1, 1, 2, 2]])
    made, x = layer(), hidden(2)
    mask = numbers[:, None, :, None] == numbers[:, None, None, :]
    ours = made(x, ROPE.at(positions.from_mask(numbers), dtype=torch.float64), mask=mask)
    for row, number in [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]:
        of_document = numbers[row] == number
        count = int(of_document.sum())
        theirs = reference(made, x[row, of_document][None], torch.arange(count), written_out.causal(count))
        torch.testing.assert_close(ours[row, of_document], theirs[0], **EXACT)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths(dtype: torch.dtype) -> None:
    wanted = [[j < n for j in range(5)] for n in (0, 3, 5)]
    assert masks.padding(torch.tensor([0, 3, 5], dtype=dtype), 5).tolist() == [[[row]] for row in wanted]


def test_masks_combine() -> None:
    """Packed documents, a window and padding: a token attends where all three masks allow it."""
    mask = masks.packed(CU_SEQLENS, SEQ) & masks.sliding_window(SEQ, 3) & masks.padding(REAL)
    of = [0, 0, 0, 0, 1, 1, 1, 1, 1]
    seen = torch.tensor(
        [
            [[j <= i and of[i] == of[j] and i - j < 3 and row[j] == 1 for j in range(SEQ)] for i in range(SEQ)]
            for row in REAL.tolist()
        ]
    )
    assert torch.equal(mask, seen[:, None])
    made, x, at = layer(), hidden(3), positions.packed(CU_SEQLENS, SEQ)
    ours = made(x, ROPE.at(at, dtype=torch.float64), mask=mask)
    theirs = reference(made, x, at, seen[:, None])
    some = seen.any(-1)  # the oracle does not define the output of a fully masked query
    torch.testing.assert_close(ours[some], theirs[some], **EXACT)
    assert torch.equal(ours[~some], torch.zeros_like(ours[~some]))


def test_documents_skip_blocks() -> None:
    blocks = masks.packed_blocks(torch.tensor([0, 256, 512]), 512)
    assert blocks.to_dense().squeeze().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def test_compiles_with_a_length_that_changes() -> None:
    def made(real: Tensor) -> Tensor:
        return masks.padding(real) & masks.sliding_window(real.shape[1], 3)

    compiled = torch.compile(made, fullgraph=True, dynamic=True, backend="aot_eager")
    for seq in (5, 9):
        assert torch.equal(compiled(REAL[:, :seq]), made(REAL[:, :seq]))


@pytest.mark.parametrize("dynamic", ["x", "mask"])
def test_compiles_where_only_one_shape_is_dynamic(dynamic: str) -> None:
    made, x, at = layer(), hidden(2), torch.arange(SEQ)
    mask = masks.sliding_window(SEQ, 3).expand(2, 1, SEQ, SEQ).clone()
    theirs = reference(made, x, at, mask[:, 0])
    changes, axes = (x, (0, 1)) if dynamic == "x" else (mask, (0, 2, 3))
    for axis in axes:
        torch._dynamo.maybe_mark_dynamic(changes, axis)
    with torch.no_grad():
        ours = torch.compile(made, fullgraph=True, backend="aot_eager")(x, ROPE.at(at, dtype=torch.float64), mask=mask)
    torch.testing.assert_close(ours, theirs, **EXACT)


class TestAutocast:
    """A float32 model and mask under autocast to bfloat16: 4 roundings of 2⁻⁹ on scores of size 3 and values of 2."""

    def bias(self) -> Tensor:
        bias = 3 * torch.randn(2, 1, SEQ, SEQ, generator=torch.Generator().manual_seed(3))
        return bias.masked_fill(torch.arange(SEQ)[:, None] == torch.arange(SEQ) + 2, torch.finfo(torch.float32).min)

    @pytest.mark.parametrize("compiled", [False, True])
    @pytest.mark.parametrize("rope", [ROPE, SelfExtend(ROPE, 2, SEQ)], ids=["one pass", "two passes"])
    def test_a_float32_mask(self, rope: Any, compiled: bool) -> None:
        made, x = layer().float(), hidden(2).float()
        run = torch.compile(made, fullgraph=True, backend="aot_eager") if compiled else made
        theirs = written_out.of_layer(made, x, TURN, bias=self.bias())
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            ours = run(x, rope.at(torch.arange(SEQ)), mask=self.bias())
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=4 * 2**-9 * 6)
        assert (theirs - reference(made, x, torch.arange(SEQ), written_out.causal(SEQ))).abs().max() > 0.5

    def test_gradients_reach_it(self) -> None:
        made, x, bias = layer().float(), hidden(2).float(), self.bias().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made(x, ROPE.at(torch.arange(SEQ)), mask=bias).sum().backward()
        assert bias.grad is not None
        assert bias.grad.dtype == torch.float32
        assert bias.grad.abs().max() > 0

    def test_without_autocast_the_dtypes_must_agree(self) -> None:
        with pytest.raises(RopeError, match=r"mask must be bool .* or torch.bfloat16 .*, got torch.float32"):
            layer().bfloat16()(hidden(2).bfloat16(), ROPE.at(torch.arange(SEQ)), mask=self.bias())


TWO_AXES = (
    r"mask must have four axes \[batch, heads, seq, keys\] .* \(3, 3\)\. "
    r"Write mask\[None, None\] .*\[seq, keys\]; masks.padding\(mask\) or mask\[:, None, None, :\] .*\[batch, keys\]"
)
THREE_AXES = (
    r"mask must have four axes .* \(2, 3, 3\)\. "
    r"Write mask\[None\] .*\[heads, seq, keys\]; mask\[:, None\] .*\[batch, seq, keys\]"
)


class TestAmbiguousMasks:
    """If the batch size equals the number of tokens, [batch, keys] has the shape of [seq, keys]."""

    X = hidden(3, 3)

    def refuses(self, rotation: Any, mask: Tensor, message: str, who: str = "RotaryAttention", **options: Any) -> None:
        with pytest.raises(RopeError, match=f"{who}: {message}"), torch.no_grad():
            layer()(self.X, rotation, mask=mask, **options)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.float64, torch.int64])
    def test_a_layer(self, dtype: torch.dtype) -> None:
        rotation = ROPE.at(torch.arange(3), dtype=torch.float64)
        self.refuses(rotation, torch.ones(3, 3, dtype=dtype), TWO_AXES)
        self.refuses(rotation, torch.ones(2, 3, 3, dtype=dtype), THREE_AXES)
        self.refuses(rotation, torch.ones(3, dtype=dtype), r"mask must have four axes .* \(3,\)\. Add")
        self.refuses(
            rotation, torch.ones(1, 1, 2, 3) > 0, r"mask must be broadcastable to .*= \[3, 2, 3, 3\], got .*\(1, 1, 2"
        )

    def test_self_extend(self) -> None:
        self.refuses(SelfExtend(ROPE, 2, 2).at(torch.arange(3), dtype=torch.float64), torch.ones(3, 3) > 0, TWO_AXES)

    def test_a_cache(self) -> None:
        cache = KVCache(1, 3, HEADS, HEAD_DIM, capacity=3, dtype=torch.float64)
        step = cache.step(3)
        rotation = step.rotation(ROPE, dtype=torch.float64)
        self.refuses(rotation, torch.ones(3, 3) > 0, TWO_AXES, who="KVCache", cache=step.layer(0))
        assert not cache.keys[0].any()  # and nothing is stored

    def test_the_functions_below(self) -> None:
        q = torch.zeros(3, 3, HEADS, HEAD_DIM)
        both = torch.cat([q, q], dim=1)  # queries of both passes
        with pytest.raises(RopeError, match=f"attend: {TWO_AXES}"):
            attention.attend(q, q, q, mask=torch.ones(3, 3) > 0, scale=1.0)
        near = ROPE.at(torch.arange(3))
        two = TwoPass(near, near, None, torch.ones(3, 3) > 0)
        with pytest.raises(RopeError, match=f"attend: {TWO_AXES}"):
            attention.attend(both, q, q, rotation=two, mask=torch.ones(3, 3) > 0, scale=1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: masks.padding(torch.ones(2, 3)), "must be a bool or integer tensor [batch, keys], or integer lengths"),
        (lambda: masks.padding(torch.ones(2, 1, 1, 3).bool()), "got torch.bool of shape (2, 1, 1, 3)"),
        (lambda: masks.padding([[1, 0]]), "got [[1, 0]]"),
        (lambda: masks.padding(torch.tensor([True, False]), 2), "got torch.bool of shape (2,)"),
        (lambda: masks.padding(torch.tensor([2, 3])), "keys must be passed with lengths, and only then, got None"),
        (lambda: masks.padding(REAL, SEQ), "keys must be passed with lengths, and only then, got 9"),
        (
            lambda: masks.padding(torch.tensor([2, 3]), 3.0),
            "masks.padding: keys must be an integer of at least 0, got 3.0",
        ),
        (lambda: masks.sliding_window(5, 0), "masks.sliding_window: window must be an integer of at least 1, got 0"),
        (lambda: masks.sliding_window(2.0, 1), "masks.sliding_window: seq must be an integer of at least 0, got 2.0"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises(RopeError) as raised:
        call()
    assert message in str(raised.value)
