"""Calls of PyTorch's attention kernels: folded heads, causality without a mask, windows, encoders and dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attention_oracle as written_out
import oracle
from attention_oracle import Rotary
from ropewalk import KVCache, Rope, RopeError, RotaryAttention, SelfExtend, masks
from ropewalk.attention.attend import attend

HIDDEN, HEAD_DIM = 24, 8
ROPE = Rope(HEAD_DIM, 1e4, "half")
TURN = Rotary(oracle.inv_freq(1e4, HEAD_DIM), "half")
EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-13}
ROUNDING = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool = True) -> Tensor:
    """Compute softmax attention in float64, head by head. The last query belongs to the last key."""
    q, k, v = (x.double() for x in (q, k, v))
    (batch, seq, heads, _), keys, group = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    out = torch.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            scores = q[b, :, h] @ k[b, :, h // group].T
            if mask is None:
                seen = torch.ones(seq, keys, dtype=torch.bool).tril(keys - seq if causal else keys)
            else:
                seen = mask.expand(batch, heads, seq, keys)[b, h]
            scores = scores.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else scores + seen.double()
            out[b, :, h] = scores.softmax(-1) @ v[b, :, h // group]
    return out


def tensors(seq: int, heads: int, kv_heads: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seq + 10 * heads + kv_heads)
    q = torch.randn(2, seq, heads, 16, generator=draw, dtype=torch.float64).div(4).to(dtype)
    k, v = (torch.randn(2, keys + 1, kv_heads, 16, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2))
    return q, k[:, :keys], v[:, :keys]  # as a cache holds them


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (4, 4)])
@pytest.mark.parametrize("seq", [1, 3, 17])
class TestRows:
    """One or a few queries, with and without groups: folded into rows of the key head, or as separate heads."""

    def same(self, seq: int, heads: int, kv_heads: int, dtype: torch.dtype, mask: Tensor | None) -> None:
        q, k, v = tensors(seq, heads, kv_heads, 20, dtype)
        ours = attend(q, k, v, mask=mask, scale=1.0)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), by_hand(q, k, v, mask), rtol=0, atol=ROUNDING[dtype])

    def test_causal(self, seq: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
        self.same(seq, heads, kv_heads, dtype, None)

    @pytest.mark.parametrize("axes", [(1, 1, 1), (2, 1, 1), (2, 1, 0), (1, 4, 1), (2, 4, 0), (1, 4, 0)])
    def test_masks(self, seq: int, heads: int, kv_heads: int, dtype: torch.dtype, axes: tuple[int, int, int]) -> None:
        draw = torch.Generator().manual_seed(5)
        mask = torch.rand(axes[0], axes[1], axes[2] or seq, 20, generator=draw) < 0.6
        mask[..., 0] = True
        self.same(seq, heads, kv_heads, dtype, mask)
        self.same(seq, heads, kv_heads, dtype, torch.randn(mask.shape, generator=draw).to(dtype))


@pytest.mark.parametrize("seq", [1, 3, 20])
def test_not_causal(seq: int) -> None:
    q, k, v = tensors(seq, 4, 2, 20, torch.float64)
    torch.testing.assert_close(
        attend(q, k, v, mask=None, scale=1.0, causal=False), by_hand(q, k, v, None, causal=False), **EXACT
    )


def test_gradients_of_rows() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(2, 4, 2, 5, torch.float64))
    direction = torch.randn(q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ours = torch.autograd.grad(attend(q, k, v, mask=None, scale=1.0), (q, k, v), direction)
    copies = [x.detach().requires_grad_() for x in (q, k, v)]
    theirs = torch.autograd.grad(by_hand_in_one(*copies), copies, direction)
    torch.testing.assert_close(ours, theirs, **EXACT)


def by_hand_in_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the same as `by_hand`, without writing into a tensor, so that it can be differentiated."""
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    heads = []
    for h in range(q.shape[2]):
        scores = q[:, :, h] @ k[:, :, h // 2].mT
        heads.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, :, h // 2])
    return torch.stack(heads, dim=2)


def test_compiled_rows() -> None:
    q, k, v = tensors(1, 4, 2, 20, torch.float64)
    mask = torch.arange(20).lt(7)[None, None, None]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, mask=mask, scale=1.0), by_hand(q, k, v, mask), **EXACT)


def layer(**options: Any) -> RotaryAttention:
    torch.manual_seed(0)
    return RotaryAttention(HIDDEN, 4, num_kv_heads=2, head_dim=HEAD_DIM, **options).double()


def reference(made: RotaryAttention, x: Tensor, seen: Tensor) -> Tensor:
    return written_out.of_layer(made, x, TURN, seen=seen)


def hidden(seq: int) -> Tensor:
    return torch.randn(2, seq, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def mask_of_window(seq: int, window: int, *, causal: bool = True) -> Tensor:
    return torch.tensor([[abs(i - j) < window and (j <= i or not causal) for j in range(seq)] for i in range(seq)])


class TestEncoder:
    def test_attends_to_all_tokens(self) -> None:
        made, x = layer(causal=False), hidden(6)
        ours = made(x, ROPE.at(torch.arange(6)[None], dtype=torch.float64))
        torch.testing.assert_close(ours, reference(made, x, torch.ones(6, 6, dtype=torch.bool)), **EXACT)

    def test_a_mask_replaces_causality(self) -> None:
        made, x = layer(causal=False), hidden(6)
        real = torch.tensor([[1, 1, 1, 1, 0, 1]] * 2)
        ours = made(x, ROPE.at(torch.arange(6)[None], dtype=torch.float64), mask=masks.padding(real))
        torch.testing.assert_close(ours, reference(made, x, (real[0] > 0).expand(6, 6)), **EXACT)

    def test_two_passes(self) -> None:
        """All tokens are within the window of Self-Extend, so no position is grouped and attention is plain."""
        made, x = layer(causal=False), hidden(6)
        ours = made(x, SelfExtend(ROPE, 2, 12).at(torch.arange(6)[None], dtype=torch.float64))
        torch.testing.assert_close(ours, reference(made, x, torch.ones(6, 6, dtype=torch.bool)), **EXACT)

    def test_has_no_cache(self) -> None:
        step = KVCache(1, 2, 2, HEAD_DIM, capacity=6, dtype=torch.float64).step(2)
        with torch.no_grad(), pytest.raises(RopeError, match=r"must be causal and without dropout, got causal=False\."):
            layer(causal=False)(hidden(2), step.rotation(ROPE), cache=step.layer(0))


@pytest.mark.parametrize("piece", [2, 256])
class TestWindow:
    @pytest.fixture(autouse=True)
    def set_queries_of_a_piece(self, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ropewalk.attention.pairs.PIECE", piece)

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("window", [1, 3, 6, 9])
    def test_without_a_cache(self, window: int, causal: bool) -> None:
        made, x = layer(window=window, causal=causal), hidden(6).requires_grad_()
        ours = made(x, ROPE.at(torch.arange(6)[None], dtype=torch.float64))
        theirs = reference(made, x, mask_of_window(6, window, causal=causal))
        torch.testing.assert_close(ours, theirs, **EXACT)
        both = [torch.autograd.grad(out.square().sum(), [x, *made.parameters()]) for out in (ours, theirs)]
        for one, other in zip(*both, strict=True):  # up to 60; measured: 5e-14
            torch.testing.assert_close(one, other, rtol=0, atol=5e-13)

    @pytest.mark.parametrize(
        "size", [{"capacity": 9}, {"window": 3}, {"window": 5}, {"window": 5, "sinks": 2}], ids=str
    )
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_with_a_cache(self, size: dict[str, int], dtype: torch.dtype) -> None:
        """The window of the layer applies, even if the cache keeps more tokens, also in the kernel for few tokens."""
        made, x = layer(window=3), hidden(9)
        wanted = reference(made, x, mask_of_window(9, 3))
        cache, pieces, made = KVCache(1, 2, 2, HEAD_DIM, dtype=dtype, **size), [], made.to(dtype)
        with torch.no_grad():
            for start, stop in ((0, 5), (5, 6), (6, 8), (8, 9)):
                step = cache.step(stop - start)
                rotation = step.rotation(ROPE, dtype=dtype)
                pieces.append(made(x[:, start:stop].to(dtype), rotation, cache=step.layer(0)).double())
        torch.testing.assert_close(torch.cat(pieces, dim=1), wanted, rtol=0, atol=ROUNDING[dtype])

    def test_with_a_cache_and_a_mask(self) -> None:
        made, x = layer(window=3), hidden(6)
        cache = KVCache(1, 2, 2, HEAD_DIM, dtype=torch.float64, capacity=6)
        step = cache.step(6)
        second = torch.arange(6).ne(1)[None, None, None]
        with torch.no_grad():
            ours = made(x, step.rotation(ROPE, dtype=torch.float64), cache=step.layer(0), mask=second)
        seen = mask_of_window(6, 3) & second[0, 0]
        rows = [0, 2, 3, 4, 5]  # query 1 would also attend to key 0
        torch.testing.assert_close(ours[:, rows], reference(made, x, seen)[:, rows], **EXACT)

    def test_a_shorter_cache_is_refused(self) -> None:
        step = KVCache(1, 2, 2, HEAD_DIM, window=2, dtype=torch.float64).step(2)
        with torch.no_grad(), pytest.raises(RopeError, match=r"must not be shorter than .* layer, 3, got window=2\."):
            layer(window=3)(hidden(2), step.rotation(ROPE), cache=step.layer(0))

    def test_another_cache_takes_it_or_is_refused(self) -> None:
        given: list[dict[str, Any]] = []

        class Own:
            def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
                given.append(options)
                return q

        class Taking(Own):
            takes_window = True

        layer(window=3)(hidden(2), None, cache=Taking())
        assert given[0]["window"] == 3

        with pytest.raises(
            RopeError, match=r"window must be None with a cache of your own, .* got window=3 and a Own\."
        ):
            layer(window=3)(hidden(2), None, cache=Own())

    @pytest.mark.parametrize("window", [0, 1.5, True])
    def test_refused(self, window: Any) -> None:
        with pytest.raises(RopeError, match="RotaryAttention: window must be"):
            layer(window=window)


class TestDropout:
    """With v = 1, the output is the sum of the attention weights that are not dropped, divided by 1 − p."""

    def outputs(self, made: RotaryAttention, rotation: Any) -> Tensor:
        torch.nn.init.zeros_(made.v_proj.weight)
        torch.nn.init.ones_(made.v_proj.bias)
        torch.nn.init.eye_(made.o_proj.weight)
        torch.manual_seed(2)
        return made(hidden(64), rotation)[..., 0].detach()

    @pytest.mark.parametrize("window", [None, 16])
    @pytest.mark.parametrize("extended", [False, True])
    def test_in_training(self, extended: bool, window: int | None) -> None:
        made = layer(dropout=0.5, bias=True, window=window)
        rope = SelfExtend(ROPE, 2, 4) if extended else ROPE
        rotation = rope.at(torch.arange(64)[None], dtype=torch.float64)
        out = self.outputs(made, rotation)
        assert (out[:, 0] == 0).any() or (out[:, 0] == 2).any()  # the first token attends only to itself
        assert 0.8 < float(out.mean()) < 1.2
        assert float(out.std()) > 0.05
        torch.testing.assert_close(self.outputs(made.eval(), rotation), torch.ones_like(out), rtol=0, atol=1e-12)

    def test_refused(self) -> None:
        step = KVCache(1, 2, 2, HEAD_DIM, capacity=6, dtype=torch.float64).step(2)
        made = layer(dropout=0.1)
        with torch.no_grad(), pytest.raises(RopeError, match=r"without dropout, got dropout=0.1 in training mode\."):
            made(hidden(2), step.rotation(ROPE), cache=step.layer(0))
        with torch.no_grad():
            made.eval()(hidden(2), step.rotation(ROPE, dtype=torch.float64), cache=step.layer(0))
        blocks = masks.packed_blocks(torch.tensor([0, 2]), 2)
        with pytest.raises(RopeError, match=r"attend: dropout must be 0 with a BlockMask, got 0.1\."):
            made.train()(hidden(2), ROPE.at(torch.arange(2)[None]), mask=blocks)
        with pytest.raises(
            RopeError, match="RotaryAttention: dropout must be a finite number of at least 0 and at most 1"
        ):
            layer(dropout=1.5)


class TestReadsFilledSlotsOnly:
    """On the CPU, attention reads only slots that some row has filled. The other slots may contain NaN."""

    @pytest.mark.parametrize("size", [{"capacity": 50}, {"window": 20}, {"window": 20, "sinks": 2}])
    @pytest.mark.parametrize("ragged", [False, True])
    def test_empty_slots_are_not_read(self, size: dict[str, int], ragged: bool) -> None:
        cache = KVCache(1, 2, 2, HEAD_DIM, dtype=torch.float64, **size)
        for tensor in (*cache.keys, *cache.values):
            tensor[:, 9:] = torch.nan
        made, x = layer(), hidden(9)
        real = torch.ones(2, 5, dtype=torch.int64)
        real[0, 0] = 0 if ragged else 1
        with torch.no_grad():
            for start, stop in ((0, 5), (5, 6), (6, 9)):
                if start == 6 and "window" in size:  # with several tokens, the whole ring is read and masked
                    break
                step = cache.step(stop - start, attention_mask=real if start == 0 else None)
                rotation = step.rotation(ROPE, dtype=torch.float64)
                out = made(x[:, start:stop], rotation, cache=step.layer(0))
                assert not out[1].isnan().any()
                assert not out[0, int(start == 0 and ragged) :].isnan().any()

    @pytest.mark.parametrize("size", [{"capacity": 50}, {"window": 4}])
    def test_first_tokens_need_no_mask(self, size: dict[str, int]) -> None:
        cache = KVCache(1, 2, 2, HEAD_DIM, dtype=torch.float64, **size)
        step = cache.step(4)
        assert step._plan.causal
        assert step.mask.shape[-1] == step.key_positions.shape[1]  # shapes do not depend on the number of cached tokens
        made, x = layer(), hidden(4)
        with torch.no_grad():
            out = made(x, step.rotation(ROPE, dtype=torch.float64), cache=step.layer(0))
        torch.testing.assert_close(out, reference(made, x, written_out.causal(4)), **EXACT)
        assert cache.step(1)._plan.causal == ("capacity" in size)  # one more than the window
        assert not cache.step(2)._plan.causal
        assert not cache.step(1, attention_mask=torch.tensor([[1], [0]]))._plan.causal


class Exported(torch.nn.Module):
    def __init__(self, made: RotaryAttention) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor, at: Tensor, mask: Tensor | None) -> Tensor:
        out: Tensor = self.made(x, ROPE.at(at, dtype=torch.float64), mask=mask)
        return out


@pytest.mark.parametrize("kind", ["causal", "mask", "window"])
def test_one_graph_for_any_number_of_tokens(kind: str) -> None:
    """A graph with a dynamic length must not specialize on the numbers of tokens at which another kernel is used."""

    def arguments(seq: int) -> tuple[Tensor, Tensor, Tensor | None]:
        mask = torch.ones(2, 1, seq, seq, dtype=torch.bool) if kind == "mask" else None
        return hidden(seq), torch.arange(seq).expand(2, -1).contiguous(), mask

    made = Exported(layer(window=5 if kind == "window" else None))
    length = torch.export.Dim("length", min=2, max=4096)
    shapes = {"x": {1: length}, "at": {1: length}, "mask": {2: length, 3: length} if kind == "mask" else None}
    graph = torch.export.export(made, arguments(20), dynamic_shapes=shapes).module()
    for seq in (3, 40):
        torch.testing.assert_close(graph(*arguments(seq)), made(*arguments(seq)), **EXACT)


class TestDroppedValues:
    """Dropped values of a row must not affect its next text. A mask does not hide NaN, because 0 · NaN is NaN."""

    def run(self, cache: KVCache, x: Tensor, **options: Any) -> Tensor:
        with torch.no_grad():
            step = cache.step(x.shape[1], **options)
            return layer()(x, step.rotation(ROPE, dtype=torch.float64), cache=step.layer(0))

    def poisoned(self, seq: int) -> Tensor:
        x = hidden(seq)
        x[1] = torch.nan
        return x

    @pytest.mark.parametrize("size", [{"capacity": 20}, {"window": 6}, {"window": 4, "sinks": 1}])
    def test_reset(self, size: dict[str, int]) -> None:
        cache = KVCache(1, 2, 2, HEAD_DIM, dtype=torch.float64, **size)
        self.run(cache, self.poisoned(9))
        cache.reset(range(1, 2))
        for seq in (1, 3):
            assert self.run(cache, hidden(seq))[1].isfinite().all()

    def test_reset_before_a_compiled_step(self) -> None:
        cache = KVCache(1, 2, 2, HEAD_DIM, capacity=20, dtype=torch.float64)
        self.run(cache, self.poisoned(9))
        cache.reset()
        compiled = torch.compile(self.run, backend="aot_eager")
        assert compiled(cache, hidden(2)).isfinite().all()

    def test_at(self) -> None:
        cache = KVCache(1, 2, 2, HEAD_DIM, capacity=20, dtype=torch.float64)
        self.run(cache, hidden(2))
        self.run(cache, self.poisoned(5))
        assert self.run(cache, hidden(1), at=torch.tensor([7, 2])).isfinite().all()

    def test_rollback(self) -> None:
        cache = KVCache(2, 2, 2, HEAD_DIM, capacity=20, dtype=torch.float64)
        bad = torch.full((2, 2, 2, HEAD_DIM), torch.nan, dtype=torch.float64)
        cache.step(2).layer(0).append(bad, bad)
        cache.rollback()
        step = cache.step(2, attention_mask=torch.tensor([[1, 1], [1, 0]]))
        with torch.no_grad():
            out = layer()(hidden(2), step.rotation(ROPE, dtype=torch.float64), cache=step.layer(0))
        assert out[0].isfinite().all()
        assert out[1, 0].isfinite().all()

    def test_padding_with_a_ring(self) -> None:
        cache = KVCache(1, 2, 2, HEAD_DIM, window=4, dtype=torch.float64)
        x = hidden(3)
        x[1, 0] = torch.nan
        out = self.run(cache, x, attention_mask=torch.tensor([[1, 1, 1], [0, 1, 1]]))
        assert out[1, 1:].isfinite().all()


def test_the_rotation_of_an_outdated_step() -> None:
    cache, k = KVCache(1, 1, 1, HEAD_DIM, capacity=8), torch.ones(1, 2, 1, HEAD_DIM)
    old = cache.step(2, attention_mask=torch.ones(1, 2, dtype=torch.int64))
    rotation = old.rotation(ROPE)
    with torch.no_grad():
        old.layer(0).attend(k, k, k, rotation=rotation)
    step = cache.step(2)
    with pytest.raises(RopeError, match=r"CacheStep.rotation: a step must be the newest of its cache"):
        old.rotation(ROPE)
    with pytest.raises(RopeError, match="each step needs its own rotation"), torch.no_grad():
        step.layer(0).attend(k, k, k, rotation=rotation)


def test_causal_is_true_or_false() -> None:
    with pytest.raises(RopeError, match=r"RotaryAttention: causal must be True or False, got 'no'\."):
        layer(causal="no")
