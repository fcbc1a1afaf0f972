"""`AttendingCache`: attention by `LayerCache.attend`, and by a cache of pages that is defined here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attention_oracle as written_out
from attention_oracle import Rotary
from cache_model import (
    EXACT,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MODEL,
    ROPES,
    cache_of,
    distances,
    run,
    run_whole_row,
    state,
    unchanged,
)
from ropewalk import AttendingCache, KVCache, Rope, RopeError, Rotation, SelfExtend, TwoPass, masks


class Pages:
    """One layer's keys and values as a list of pages of three tokens, which are never concatenated.

    Attention processes one page after another. For each page, it updates the largest score, the sum of exponentials and
        the weighted sum of values (the online softmax of FlashAttention).
    """

    SIZE = 3

    def __init__(self) -> None:
        self.pages: list[tuple[Tensor, Tensor]] = []
        self.length = 0

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rotation: Rotation | TwoPass | None,
        mask: Any,
        scale: float,
    ) -> Tensor:
        assert mask is None
        assert not isinstance(rotation, TwoPass)
        if rotation is not None:
            q, k = rotation(q, k, layout="bshd")
        first = self.length
        for i in range(k.shape[1]):
            self.store(k[:, i : i + 1], v[:, i : i + 1])
        batch, seq, heads, head_dim = q.shape
        q = q.unflatten(2, (k.shape[2], -1)) * scale
        query = torch.arange(first, first + seq)[:, None]
        greatest = torch.full((*q.shape[:-1], 1), -math.inf, dtype=q.dtype)
        total, out = torch.zeros_like(greatest), torch.zeros_like(q)
        for number, (keys, values) in enumerate(self.pages):
            scores = torch.einsum("bshgd,bkhd->bshgk", q, keys)
            later = number * self.SIZE + torch.arange(keys.shape[1]) > query
            scores = scores.masked_fill(later[None, :, None, None], -math.inf)
            greater = torch.maximum(greatest, scores.amax(-1, keepdim=True))
            weights, kept = (scores - greater).exp(), (greatest - greater).exp()
            total = total * kept + weights.sum(-1, keepdim=True)
            out = out * kept + torch.einsum("bshgk,bkhd->bshgd", weights, values)
            greatest = greater
        return (out / total).reshape(batch, seq, heads, head_dim)

    def store(self, k: Tensor, v: Tensor) -> None:
        if self.length % self.SIZE:
            keys, values = self.pages.pop()
            k, v = torch.cat([keys, k], dim=1), torch.cat([values, v], dim=1)
        self.pages.append((k, v))
        self.length += 1


@pytest.mark.parametrize("name", sorted(ROPES))
@pytest.mark.parametrize("places", [list(range(9)), [0, 1, 2, 2, 2, 2, 3, 4, 1]], ids=["consecutive", "shared"])
@torch.no_grad()
def test_a_cache_of_pages(name: str, places: list[int]) -> None:
    """`RotaryAttention` calls only `attend`. The results are those of a KVCache and of the formulas."""
    rope, rotary = ROPES[name]
    x, at = torch.randn(2, 9, HIDDEN, dtype=torch.float64), torch.tensor(places)
    layers: list[AttendingCache] = [Pages() for _ in range(LAYERS)]
    cache, ours, theirs = cache_of(2, capacity=9), [], []
    for start, stop in ((0, 5), (5, 6), (6, 9)):
        rotation = None if rope is None else rope.at(at[start:stop].expand(2, -1), dtype=torch.float64)
        out = x[:, start:stop]
        for layer, pages in zip(MODEL, layers, strict=True):
            out = out + layer(out, rotation, cache=pages)
        ours.append(out)
        theirs.append(run(cache, x[:, start:stop], rope, positions=at[start:stop]))
    torch.testing.assert_close(torch.cat(ours, dim=1), torch.cat(theirs, dim=1), **EXACT)
    for row in range(2):
        wanted = run_whole_row(x[row], rotary, *distances(9, {"capacity": 9}, at))
        torch.testing.assert_close(torch.cat(ours, dim=1)[row], wanted, **EXACT)


class Returning:
    """A cache whose `attend` returns the value that was passed to its constructor."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Any:
        return self.returned


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (None, "None"),
        (torch.zeros(2, HEADS, 3, HEAD_DIM, dtype=torch.float64), rf"torch.float64 of shape \(2, {HEADS}, 3, "),
        (
            torch.zeros(2, 3, HEADS * HEAD_DIM, dtype=torch.float64),
            rf"torch.float64 of shape \(2, 3, {HEADS * HEAD_DIM}",
        ),
        (torch.zeros(2, 3, HEADS, HEAD_DIM), rf"torch.float32 of shape \(2, 3, {HEADS}, "),
        ((torch.zeros(2, 3, HEADS, HEAD_DIM, dtype=torch.float64), None), r"\(tensor"),
    ],
)
def test_the_result_of_attend_is_checked(returned: Any, got: str) -> None:
    must = (
        rf"attend of Returning must return \[batch, seq, heads, head_dim\] = \[2, 3, {HEADS}, {HEAD_DIM}\] in torch.f"
    )
    with pytest.raises(RopeError, match=rf"RotaryAttention: {must}loat64, got {got}"):
        MODEL[0](torch.randn(2, 3, HIDDEN, dtype=torch.float64), None, cache=Returning(returned))


def test_the_protocol_is_for_type_checkers() -> None:
    """At run time, `isinstance` could compare only the name `attend`."""
    with pytest.raises(TypeError, match="runtime_checkable"):
        isinstance(Pages(), AttendingCache)  # type: ignore[misc]
    assert "isinstance" in (AttendingCache.__doc__ or "")


def new(seq: int, heads: int) -> Tensor:
    return torch.randn(2, seq, heads, HEAD_DIM, dtype=torch.float64)


CACHES: dict[str, dict[str, Any]] = {
    "plain": {"capacity": 12},
    "int8": {"capacity": 12, "store": "int8"},
    "fp8": {"capacity": 12, "store": "fp8"},
    "latent": {"capacity": 12, "latent": 2},
    "window": {"window": 5},
    "sinks": {"window": 4, "sinks": 2},
}


class TestLayerCache:
    """Direct calls of the method that `RotaryAttention` calls, with projected q, k and v."""

    def wanted(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, scale: float, seen: Tensor) -> Tensor:
        at = torch.arange(q.shape[1]).expand(2, -1)
        q, k = rotary(q, at), rotary(k, at).repeat_interleave(HEADS // KV_HEADS, dim=2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
        shares = scores.masked_fill(~seen, -math.inf).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", shares, v.repeat_interleave(HEADS // KV_HEADS, dim=2))

    @pytest.mark.parametrize("rotated", [False, True])
    @pytest.mark.parametrize("scale", [None, 0.3])
    def test_attends_in_several_steps(self, rotated: bool, scale: float | None) -> None:
        """With a rotation, or with q and k that are already rotated. The default scale is head_dim^(−1/2)."""
        rope, rotary = ROPES["YaRN, partial"]
        assert rope is not None
        assert rotary is not None
        q, k, v = new(5, HEADS), new(5, KV_HEADS), new(5, KV_HEADS)
        cache, out = KVCache(1, 2, KV_HEADS, HEAD_DIM, capacity=5, dtype=torch.float64), []
        for start, stop in ((0, 3), (3, 4), (4, 5)):
            step, piece = cache.step(stop - start), slice(start, stop)
            rotation = step.rotation(rope, dtype=torch.float64)
            assert isinstance(rotation, Rotation)
            given = rotation(q[:, piece], k[:, piece], layout="bshd") if rotated else (q[:, piece], k[:, piece])
            options: dict[str, Any] = {} if rotated else {"rotation": rotation}
            options |= {} if scale is None else {"scale": scale}
            out.append(step.layer(0).attend(*given, v[:, piece], **options))
        wanted = self.wanted(q, k, v, rotary, HEAD_DIM**-0.5 if scale is None else scale, written_out.causal(5))
        torch.testing.assert_close(torch.cat(out, dim=1), wanted, **EXACT)
        assert cache.length.tolist() == [5, 5]

    def test_a_mask_by_the_order_of_tokens(self) -> None:
        """A sliding window in a cache that keeps all tokens. It follows the order of tokens, not their positions."""
        rope, rotary = Rope(HEAD_DIM, 1e4, "half"), ROPES["default"][1]
        assert rotary is not None
        q, k, v = new(6, HEADS), new(6, KV_HEADS), new(6, KV_HEADS)
        cache = KVCache(1, 2, KV_HEADS, HEAD_DIM, capacity=6, dtype=torch.float64)
        out = []
        for start, stop in ((0, 4), (4, 6)):
            step = cache.step(stop - start, positions=torch.arange(start, stop) * 0)
            near = (step.order[:, :, None] - step.key_order[:, None, :] < 3)[:, None]
            rotation = step.rotation(rope, dtype=torch.float64)
            piece = slice(start, stop)
            out.append(step.layer(0).attend(q[:, piece], k[:, piece], v[:, piece], rotation=rotation, mask=near))
        still = Rotary([0.0] * (HEAD_DIM // 2), "half")  # all at position 0
        seen = written_out.causal(6) & masks.sliding_window(6, 3)[0, 0]
        torch.testing.assert_close(torch.cat(out, dim=1), self.wanted(q, k, v, still, HEAD_DIM**-0.5, seen), **EXACT)

    @pytest.mark.parametrize("seq", [1, 3, 12])
    @pytest.mark.parametrize("kind", list(CACHES))
    def test_refusals_are_the_same_for_every_store(self, kind: str, seq: int) -> None:
        """Nothing is stored then, so the step goes on with the right arguments."""
        rope, options = Rope(HEAD_DIM, 1e4, "half", rotary_dim=4, rotary_offset=2), CACHES[kind]
        cache = KVCache(1, 2, KV_HEADS, HEAD_DIM, **options)
        step = cache.step(seq)
        q, k = new(seq, HEADS).float(), new(seq, KV_HEADS).float()
        right = {"q": q, "k": k, "v": None if "latent" in options else k, "rotation": step.rotation(rope), "scale": 0.5}
        seen = torch.ones(1, 1, seq, step.mask.shape[-1]) > 0
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("q must have shape .* in torch.float32 on cpu, got .* in torch.bfloat16", {"q": q.bfloat16()}),
            ("q must have shape .* got .* in torch.float64", {"q": q.double()}),
            ("q must have shape .* got .* on meta", {"q": q.to("meta")}),
            ("q must have shape .* with a multiple of 2 heads", {"q": q[:, :, :0]}),
            ("k must have shape .* got .* in torch.bfloat16", {"k": k.bfloat16()}),
            ("mask must be on cpu, got meta", {"mask": seen.to("meta")}),
            ("mask must be bool .* got torch.float64", {"mask": seen.double()}),
            ("scale must be a finite number", {"scale": torch.tensor(0.5)}),
            ("window must be an integer of at least 1, got 0", {"window": 0}),
            ("window must be an integer of at least 1, got 1.5", {"window": 1.5, "mask": seen}),
        ]
        if "latent" not in options:
            wrong += [("v must have shape .* got .* on meta", {"v": k.to("meta")})]
        if cache.window:
            wrong += [("the window of a cache must not be shorter", {"window": 9, "mask": seen})]
        for message, given in wrong:
            with pytest.raises(RopeError, match=f"KVCache: {message}"):
                step.layer(0).attend(**right | given)
            assert cache.length.tolist() == [0, 0]
        step.layer(0).attend(**right)
        assert cache.length.tolist() == [seq, seq]

    def test_invalid_arguments_store_nothing(self) -> None:
        rope = Rope(HEAD_DIM, 1e4, "half")
        cache = KVCache(1, 2, KV_HEADS, HEAD_DIM, capacity=5, dtype=torch.float64)
        step, before = cache.step(3), state(cache)
        layer, q, k = step.layer(0), new(3, HEADS), new(3, KV_HEADS)
        shape = rf"q must have shape \(2, 3, heads, {HEAD_DIM}\), with a multiple of {KV_HEADS} heads, got"
        wrong: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
            (shape, (q[0], k, k), {}),
            (shape, (q[:1], k, k), {}),
            (shape, (q[:, :2], k, k), {}),
            (shape, (q[..., :4], k, k), {}),
            (shape, (q[:, :, :3], k, k), {}),
            ("k must have shape", (q, k[:, :2], k), {}),
            (
                "rotation must be a Rotation, the result of SelfExtend.at, or None, got Rope",
                (q, k, k),
                {"rotation": rope},
            ),
            (
                "with a cache, rotation must be computed for the positions",
                (q, k, k),
                {"rotation": rope.at(torch.arange(3))},
            ),
            ("with a cache, mask must be a tensor or None, got str", (q, k, k), {"mask": "causal"}),
            (
                r"mask must be broadcastable to \[batch, heads, seq, keys\] = \[2, 4, 3, 5\]",
                (q, k, k),
                {"mask": torch.ones(1, 1, 3, 3) > 0},
            ),
            (
                "with a cache, a rotation in two passes must be computed for all 5 keys, got one for 3",
                (q, k, k),
                {"rotation": SelfExtend(rope, 2, 2).at(step.positions, dtype=torch.float64)},
            ),
        ]
        for message, given, options in wrong:
            with pytest.raises(RopeError, match=f"KVCache: {message}"):
                layer.attend(*given, **options)
        assert unchanged(cache, before)
        layer.attend(q, k, k)
        assert cache.length.tolist() == [3, 3]
