"""RotaryAttention against attention written out in float64: values and gradients, every variant and mask."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import attention_oracle as written_out
import oracle
from attention_oracle import Rotary
from ropewalk import KVCache, Rope, RopeError, RotaryAttention, SelfExtend, YaRN, masks, positions

HIDDEN, SEQ, HEAD_DIM = 24, 7, 8
ROPE = Rope(HEAD_DIM, 1e4, "half")
TURN = Rotary(oracle.inv_freq(1e4, HEAD_DIM), "half")
YARN = Rope(HEAD_DIM, 1e4, "half", scaling=YaRN(4, 64))
YARN_TURN = Rotary(oracle.yarn(1e4, HEAD_DIM, 4, 64), "half", factor=0.1 * 1.3862943611198906 + 1)
PARTIAL = Rope(HEAD_DIM, 1e3, "interleaved", rotary_dim=4, rotary_offset=2)
PARTIAL_TURN = Rotary(oracle.inv_freq(1e3, 4), "interleaved", offset=2)

# Measured: 5e-15 in values of size 10, 4e-14 in gradients of size 40, which are sums of some hundred products.
EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-13}

VARIANTS: dict[str, tuple[dict[str, Any], Rope | None, Rotary | None]] = {
    "MHA": ({}, ROPE, TURN),
    "GQA": ({"num_kv_heads": 2}, ROPE, TURN),
    "MQA": ({"num_kv_heads": 1}, ROPE, TURN),
    "bias": ({"bias": True}, ROPE, TURN),
    "bias of all": ({"bias": True, "o_bias": True}, ROPE, TURN),
    "QK-norm": ({"qk_norm": 1e-6, "num_kv_heads": 2}, ROPE, TURN),
    "softmax factor": ({"softmax_factor": 1.7}, ROPE, TURN),
    "attention factor": ({"num_kv_heads": 2}, YARN, YARN_TURN),
    "partial, interleaved": ({}, PARTIAL, PARTIAL_TURN),
    "interleaved": ({}, Rope(HEAD_DIM, 1e4, "interleaved"), Rotary(oracle.inv_freq(1e4, HEAD_DIM), "interleaved")),
    "no rope": ({"num_kv_heads": 2}, None, None),
}


def layer(**options: Any) -> RotaryAttention:
    torch.manual_seed(0)
    made = RotaryAttention(HIDDEN, 4, head_dim=HEAD_DIM, **options).double()
    for parameter in made.parameters():  # also the biases and norms, which are initialized to 0 and 1
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def hidden(batch: int = 2, seq: int = SEQ) -> Tensor:
    return torch.randn(batch, seq, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def reference(made: RotaryAttention, x: Tensor, rotary: Rotary | None, at: Tensor, **options: Any) -> Tensor:
    return written_out.of_layer(made, x, rotary, written_out.pairs(at), **options)


def gradients(made: RotaryAttention, x: Tensor, out: Tensor) -> dict[str, Tensor]:
    wanted = dict(made.named_parameters()) | {"x": x}
    direction = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
    return dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), direction), strict=True))


def same(made: RotaryAttention, x: Tensor, ours: Tensor, theirs: Tensor) -> None:
    """Values, and gradients to x and every parameter."""
    torch.testing.assert_close(ours, theirs, **EXACT)
    mine, wanted = gradients(made, x, ours), gradients(made, x, theirs)
    for name in wanted:
        torch.testing.assert_close(mine[name], wanted[name], **EXACT, msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("at", [torch.arange(SEQ), torch.stack([torch.arange(SEQ) + 90, torch.arange(SEQ) * 5])])
def test_variants(variant: str, at: Tensor) -> None:
    options, rope, rotary = VARIANTS[variant]
    made, x = layer(**options), hidden().requires_grad_()
    rotation = None if rope is None else rope.at(at, dtype=torch.float64)
    same(made, x, made(x, rotation), reference(made, x, rotary, at))


def test_float32() -> None:
    made, x = layer(num_kv_heads=2, qk_norm=1e-6), hidden()
    wanted = reference(made, x, TURN, torch.arange(SEQ))
    ours = made.float()(x.float(), ROPE.at(torch.arange(SEQ)))
    # Two sums of 24 products of size 1, and 7 attention weights. 1e-6 was measured.
    torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=5e-6)


class TestMasks:
    def check(self, mask: Tensor, *, seen: Tensor | None = None, bias: Tensor | None = None) -> None:
        made, x = layer(num_kv_heads=2), hidden().requires_grad_()
        at = torch.arange(SEQ)
        allowed = written_out.causal(SEQ) if seen is None else written_out.causal(SEQ) & seen
        theirs = reference(made, x, YARN_TURN, at, seen=allowed, bias=bias)
        same(made, x, made(x, YARN.at(at, dtype=torch.float64), mask=mask), theirs)

    def test_bool(self) -> None:
        mask = torch.rand(1, 1, SEQ, SEQ, generator=torch.Generator().manual_seed(3)) < 0.5
        mask |= torch.eye(SEQ, dtype=torch.bool)
        self.check(mask, seen=mask)

    def test_bool_for_each_head(self) -> None:
        mask = torch.rand(1, 4, SEQ, SEQ, generator=torch.Generator().manual_seed(3)) < 0.5
        mask |= torch.eye(SEQ, dtype=torch.bool)
        self.check(mask, seen=mask)

    def test_additive(self) -> None:
        mask = torch.randn(2, 1, SEQ, SEQ, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        mask[0, 0, 5, 2] = -torch.inf
        self.check(mask, bias=mask)

    def test_additive_gets_its_gradient(self) -> None:
        made, x, at = layer(), hidden(), torch.arange(SEQ)
        bias = torch.randn(1, 4, SEQ, SEQ, dtype=torch.float64, requires_grad=True)
        ours = made(x, ROPE.at(at, dtype=torch.float64), mask=bias)
        theirs = reference(made, x, TURN, at, bias=bias)
        mine, wanted = (torch.autograd.grad(out.square().sum(), bias)[0] for out in (ours, theirs))
        torch.testing.assert_close(mine, wanted, **EXACT)


class TestPacked:
    """Packed documents, with padding as the last two tokens. The third document is empty (its start and end are 5)."""

    CU_SEQLENS = torch.tensor([0, 3, 4, 4, 9])
    TOTAL = 11
    DOCUMENTS = (0, 0, 0, 1, 3, 3, 3, 3, 3, 4, 4)
    PLACES = (0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 1)

    def seen(self) -> Tensor:
        of = self.DOCUMENTS
        return torch.tensor([[j <= i and of[i] == of[j] for j in range(self.TOTAL)] for i in range(self.TOTAL)])

    def test_dense(self) -> None:
        made, x = layer(num_kv_heads=2), hidden(1, self.TOTAL).requires_grad_()
        at = positions.packed(self.CU_SEQLENS, self.TOTAL)
        ours = made(x, ROPE.at(at, dtype=torch.float64), mask=masks.packed(self.CU_SEQLENS, self.TOTAL))
        same(made, x, ours, reference(made, x, TURN, torch.tensor(self.PLACES), seen=self.seen()))

    def test_flex_attention(self) -> None:
        made, x = layer(num_kv_heads=2, softmax_factor=1.7), hidden(2, self.TOTAL)
        at = positions.packed(self.CU_SEQLENS, self.TOTAL)
        blocks = masks.packed_blocks(self.CU_SEQLENS, self.TOTAL)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            ours = made(x, ROPE.at(at, dtype=torch.float64), mask=blocks)
        theirs = reference(made, x, TURN, torch.tensor(self.PLACES), seen=self.seen())
        torch.testing.assert_close(ours, theirs, **EXACT)

    def test_mask(self) -> None:
        assert torch.equal(masks.packed(self.CU_SEQLENS, self.TOTAL), self.seen()[None, None])
        with pytest.raises(RopeError, match="cu_seqlens must be a non-empty int32 or int64 tensor with one axis"):
            masks.packed(torch.tensor([0.0, 3.0]), 3)


class TestCompiled:
    def run(self, function: Any, *arguments: Any) -> None:
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*arguments), function(*arguments), **EXACT)

    def test_layer(self) -> None:
        made = layer(num_kv_heads=2, qk_norm=1e-6, bias=True)
        self.run(lambda x: made(x, YARN.at(torch.arange(SEQ), dtype=torch.float64)), hidden())

    def test_gradients(self) -> None:
        made = layer(num_kv_heads=2)

        def loss(x: Tensor, rotation: Any) -> Tensor:
            return made(x, rotation).square().sum()

        x, rotation = hidden().requires_grad_(), YARN.at(torch.arange(SEQ), dtype=torch.float64)
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        mine, wanted = (torch.autograd.grad(f(x, rotation), x)[0] for f in (compiled, loss))
        torch.testing.assert_close(mine, wanted, **EXACT)

    def test_packed(self) -> None:
        made = layer()

        def packed(x: Tensor, cu_seqlens: Tensor) -> Tensor:
            at = positions.packed(cu_seqlens, x.shape[1])
            return made(x, ROPE.at(at, dtype=torch.float64), mask=masks.packed(cu_seqlens, x.shape[1]))

        self.run(packed, hidden(1, 11), TestPacked.CU_SEQLENS)

    def test_packed_in_blocks(self) -> None:
        made, blocks = layer(), masks.packed_blocks(TestPacked.CU_SEQLENS, 11)
        rotation = ROPE.at(positions.packed(TestPacked.CU_SEQLENS, 11), dtype=torch.float64)
        dense = masks.packed(TestPacked.CU_SEQLENS, 11)
        with torch.no_grad():
            ours = torch.compile(made, fullgraph=True, backend="aot_eager")(hidden(1, 11), rotation, mask=blocks)
            torch.testing.assert_close(ours, made(hidden(1, 11), rotation, mask=dense), **EXACT)

    def test_self_extend(self) -> None:
        made, extended = layer(num_kv_heads=2), SelfExtend(YARN, group=3, window=2)
        self.run(lambda x: made(x, extended.at(torch.arange(SEQ), dtype=torch.float64)), hidden())


def test_parameters_have_the_names_of_llama() -> None:
    """Names and shapes are those of Qwen 3 with 4 query and 2 key heads, and of the biases of Llama and Qwen 2."""
    assert {name: tuple(p.shape) for name, p in layer(num_kv_heads=2, qk_norm=1e-6).named_parameters()} == {
        "q_proj.weight": (32, 24),
        "k_proj.weight": (16, 24),
        "v_proj.weight": (16, 24),
        "o_proj.weight": (24, 32),
        "q_norm.weight": (8,),
        "k_norm.weight": (8,),
    }
    biases = {name for name, _ in layer(bias=True, o_bias=True).named_parameters() if "bias" in name}
    assert biases == {"q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"}
    assert "o_proj.bias" not in layer(bias=True).state_dict()


def test_repr() -> None:
    assert "(num_heads=4, num_kv_heads=2, head_dim=8" in repr(layer(num_kv_heads=2)).replace("\n", "").replace("  ", "")


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 4), {}, "hidden_size must be an integer of at least 1, got 0"),
        ((24, 0), {}, "num_heads must be an integer of at least 1, got 0"),
        ((24, 4), {"num_kv_heads": 3}, "num_kv_heads must divide num_heads.*got 3 for 4"),
        ((24, 4), {"num_kv_heads": 0}, "num_kv_heads must be an integer of at least 1"),
        ((24, 5), {}, "num_heads must divide hidden_size, unless head_dim is given, got 5 for 24"),
        ((24, 4), {"head_dim": 0}, "head_dim must be an integer"),
        ((24, 4), {"softmax_factor": 0}, "softmax_factor must be a finite number greater than 0"),
        ((24, 4), {"qk_norm": True}, "qk_norm must be a finite number greater than 0, got True"),
    ],
)
def test_refuses_numbers(arguments: tuple[int, int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeError, match=f"RotaryAttention: {message}"):
        RotaryAttention(*arguments, **options)


def test_refuses_arguments() -> None:
    made, x, rotation = layer(), hidden(), ROPE.at(torch.arange(SEQ), dtype=torch.float64)
    cache = KVCache(1, 2, 4, HEAD_DIM, capacity=SEQ, dtype=torch.float64)
    blocks = masks.packed_blocks(torch.tensor([0, SEQ]), SEQ)
    wrong: list[tuple[str, tuple[Any, Any], dict[str, Any]]] = [
        (r"x must have shape \[batch, seq, hidden_size=24\], got shape \(2, 7, 8\)", (x[..., :8], rotation), {}),
        (r"x must have shape", (x[0], rotation), {}),
        ("rotation must be a Rotation, the result of SelfExtend.at, or None, got Rope", (x, ROPE), {}),
        (
            "cache must be one layer of a step of a KVCache, .* or None, got <ropewalk.cache.kv_cache.KV",
            (x, rotation),
            {"cache": cache},
        ),
        ("mask must be a tensor, a BlockMask or None, got 'causal'", (x, rotation), {"mask": "causal"}),
        (
            "mask must be bool .* or torch.float64 .*, got torch.int64",
            (x, rotation),
            {"mask": torch.ones(1, 1, SEQ, SEQ).long()},
        ),
        ("mask must be bool", (x, rotation), {"mask": torch.zeros(1, 1, SEQ, SEQ)}),
        (r"four axes \[batch, heads, seq, keys\] = \[2, 4, 7, 7\], .* \(2, 7\)", (x, rotation), {"mask": x[..., 0]}),
        (r"got shape \(7,\)", (x, rotation), {"mask": x[0, :, 0]}),
    ]
    for message, given, options in wrong:
        with pytest.raises(RopeError, match=f"RotaryAttention: .*{message}"):
            made(*given, **options)
    with pytest.raises(RopeError, match="RotaryAttention: cache must be one layer of a step of a KVCache"):
        layer(window=3)(x, rotation, cache=cache)
    with pytest.raises(
        RopeError, match=r"attend: with a rotation in two passes, mask must be a tensor or None, got a BlockMask"
    ):
        made(x, SelfExtend(ROPE, 2, 2).at(torch.arange(SEQ), dtype=torch.float64), mask=blocks)
    step = cache.step(SEQ)
    message = r"KVCache: with a cache, mask must be a tensor or None, got BlockMask\. .* the keys of step.key_positions"
    with torch.no_grad(), pytest.raises(RopeError, match=message):
        made(x, step.rotation(ROPE, dtype=torch.float64), mask=blocks, cache=step.layer(0))
