"""Norm, rotation and cache writes in one call give the same bits as separate calls, for every implementation."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_cases import DTYPES, LAYOUTS, PAIRINGS, bits, same, shape
from ropewalk import KVCache, QKNorm, Rope, RopeError, RotaryAttention, Rotation, SelfExtend, rotate_and_store
from ropewalk.attention.layer import HeadNorm
from ropewalk.kernels import backend, cpu

BATCH, SEQ, HEADS, KV_HEADS, HEAD_DIM = 2, 3, 4, 2, 24
BLOCKS, BLOCK = 5, 4
SLOTS = [[3, 19, -1], [0, -1, 7]]
ROPE = Rope(HEAD_DIM, 1e4, "half", rotary_dim=16, rotary_offset=4)


def best() -> str:
    return cpu.version() if backend.FAST_PATH else ""


@pytest.fixture(params=["as it is", "separate"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test with the fused kernel, if it is available, and with separate calls."""
    if request.param == "separate":
        monkeypatch.setattr(backend, "FAST_PATH", False)
    return str(request.param)


def drawn(layout: str = "bshd", dtype: torch.dtype = torch.float32, v_dim: int = HEAD_DIM) -> list[Tensor]:
    """Draw random q, k and v."""
    sizes = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, v_dim))
    return [torch.randn(shape(layout, BATCH, SEQ, *size)).to(dtype) for size in sizes]


def a_norm(dtype: torch.dtype = torch.float32, **how: Any) -> QKNorm:
    return QKNorm(torch.randn(HEAD_DIM).to(dtype), torch.randn(HEAD_DIM).to(dtype), eps=1e-6, **how)


def filled(caches: tuple[Tensor, Tensor], k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Fill a cache in a loop over tokens; k and v are [tokens, heads, channels]."""
    for n, slot in enumerate(slots.flatten().tolist()):
        if slot >= 0:
            for cache, x in zip(caches, (k, v), strict=True):
                cache[slot // cache.shape[1], slot % cache.shape[1]] = x[n]


def check(
    q: Tensor, k: Tensor, v: Tensor, caches: tuple[Tensor, Tensor], slots: Tensor, rotation: Rotation,
    norm: QKNorm | None, layout: Any = "bshd",
) -> None:  # fmt: skip
    wanted = tuple(cache.clone() for cache in caches)
    before, versions = [x.clone() for x in (q, k, v)], [cache._version for cache in caches]
    normed = (q, k) if norm is None else norm(q, k)
    exact_q, exact_k = rotation(*normed, layout=layout)
    letters = layout.replace("t", "s")
    first = [x.permute([letters.index(axis) for axis in "bshd" if axis in letters]) for x in (exact_k, v)]
    filled(wanted, *(x.reshape(-1, *x.shape[-2:]) for x in first), slots)  # type: ignore[arg-type]
    made = rotate_and_store(
        q, k, v, rotation=rotation, k_cache=caches[0], v_cache=caches[1], slot_mapping=slots, norm=norm, layout=layout
    )
    assert same(made, exact_q, best())
    assert (made.dtype, made.shape) == (q.dtype, q.shape)
    for cache, other in zip(caches, wanted, strict=True):
        assert same(cache, other, best())
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip((q, k, v), before, strict=True))
    assert all(cache._version > version for cache, version in zip(caches, versions, strict=True))


def memory(dtype: torch.dtype = torch.float32, channels: int = HEAD_DIM) -> Tensor:
    return torch.full((BLOCKS, BLOCK, KV_HEADS, channels), math.nan, dtype=dtype)


def keys_and_values_in_one_tensor() -> tuple[Tensor, Tensor]:
    """Return K and V as parts of one tensor with the heads first, as vLLM stores them."""
    whole = torch.full((BLOCKS, KV_HEADS, BLOCK, 2 * HEAD_DIM), math.nan)
    k, v = whole.transpose(1, 2).split(HEAD_DIM, -1)
    return k, v


CACHES: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "NHD": lambda: (memory(), memory()),
    "HND": lambda: tuple(torch.full((BLOCKS, KV_HEADS, BLOCK, HEAD_DIM), math.nan).transpose(1, 2) for _ in range(2)),  # type: ignore[return-value]
    "side by side": keys_and_values_in_one_tensor,
    "five axes": lambda: torch.full((BLOCKS, 2, BLOCK, KV_HEADS, HEAD_DIM), math.nan).unbind(1),  # type: ignore[return-value]
    "channels apart": lambda: (memory(channels=3 * HEAD_DIM)[..., ::3], memory()),
    "blocks apart": lambda: (torch.full((2 * BLOCKS, BLOCK, KV_HEADS, HEAD_DIM), math.nan)[::2], memory()),
    "one block": lambda: tuple(memory().view(1, BLOCKS * BLOCK, KV_HEADS, HEAD_DIM) for _ in range(2)),  # type: ignore[return-value]
    "one slot a block": lambda: tuple(memory().view(BLOCKS * BLOCK, 1, KV_HEADS, HEAD_DIM) for _ in range(2)),  # type: ignore[return-value]
}


class TestSeparateCalls:
    @pytest.mark.parametrize("pairing", PAIRINGS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_dtypes(self, dtype: torch.dtype, pairing: Any, way: str) -> None:
        torch.manual_seed(0)
        for rope in (Rope(HEAD_DIM, 1e4, pairing), Rope(HEAD_DIM, 1e4, pairing, rotary_dim=16, rotary_offset=4)):
            for norm in (None, a_norm(dtype), a_norm(add_one=True), a_norm(torch.float64)):
                for positions in (torch.tensor([5, 6, 7]), torch.tensor([[5, 6, 7], [90, 1, 2]])):
                    caches = memory(dtype), memory(dtype, 10)
                    check(*drawn(dtype=dtype, v_dim=10), caches, torch.tensor(SLOTS), rope.at(positions), norm)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("case", CACHES)
    def test_layouts_and_caches(self, case: str, layout: str, way: str) -> None:
        torch.manual_seed(1)
        slots = torch.tensor(SLOTS)
        slots = slots[1] if layout == "thd" else slots
        for norm in (None, a_norm()):
            check(*drawn(layout), CACHES[case](), slots, ROPE.at(torch.arange(SEQ)), norm, layout)

    def test_no_token_has_a_slot(self, way: str) -> None:
        caches = memory(), memory()
        check(*drawn(), caches, torch.full((BATCH, SEQ), -1), ROPE.at(torch.arange(SEQ)), None)
        assert all(cache.isnan().all() for cache in caches)

    def test_no_tokens(self, way: str) -> None:
        q, k, v = (x[:, :0] for x in drawn())
        caches, slots = (memory(), memory()), torch.empty(BATCH, 0, dtype=torch.int64)
        made = rotate_and_store(
            q, k, v, rotation=ROPE.at(torch.arange(0)), k_cache=caches[0], v_cache=caches[1], slot_mapping=slots
        )
        assert made.shape == q.shape
        assert all(cache.isnan().all() for cache in caches)

    def test_many_threads(self) -> None:
        torch.manual_seed(3)
        batch, before = 60, torch.get_num_threads()
        q, k, v = (torch.randn(batch, 1, heads, 128) for heads in (16, 8, 8))
        norm, rotation = (
            QKNorm(torch.randn(128), torch.randn(128), 1e-6),
            Rope(128, 1e6, "half").at(torch.arange(batch)[:, None]),
        )
        torch.set_num_threads(2)
        try:
            caches = tuple(torch.zeros(batch, 3, 8, 128) for _ in range(2))
            check(q, k, v, caches, torch.randperm(3 * batch)[:batch, None], rotation, norm)  # type: ignore[arg-type]
        finally:
            torch.set_num_threads(before)


class TestOtherUses:
    def call(self, **how: Any) -> Tensor:
        torch.manual_seed(5)
        q, k, v = drawn()
        with_them = {"rotation": ROPE.at(torch.arange(SEQ)), "norm": a_norm(), "slot_mapping": torch.tensor(SLOTS)}
        return rotate_and_store(q, k, v, **{**with_them, "k_cache": memory(), "v_cache": memory(), **how})

    def test_inference_mode(self) -> None:
        usual = self.call()
        with torch.inference_mode():
            assert torch.equal(self.call(), usual)

    @pytest.mark.skipif(backend.BACKEND == "kernel", reason="compiled code has no kernel")
    def test_compiled(self) -> None:
        torch.manual_seed(5)
        q, k, v = drawn()
        norm, rotation, slots = a_norm(), ROPE.at(torch.arange(SEQ)), torch.tensor(SLOTS)

        @torch.compile(backend="aot_eager", fullgraph=True)
        def call(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
            return rotate_and_store(
                q, k, v, rotation=rotation, k_cache=k_cache, v_cache=v_cache, slot_mapping=slots, norm=norm
            )

        ours, theirs = (memory(), memory()), (memory(), memory())
        assert torch.equal(call(q, k, v, *ours), self.call(k_cache=theirs[0], v_cache=theirs[1]))
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(ours, theirs, strict=True))

    @pytest.mark.skipif(backend.BACKEND == "kernel", reason="there is no kernel for meta tensors")
    def test_meta(self) -> None:
        def of(*size: int) -> Tensor:
            return torch.empty(size, device="meta")

        q, k, v = (of(BATCH, SEQ, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        rotation = ROPE.at(torch.arange(SEQ), device="meta")
        slots = torch.empty(BATCH, SEQ, dtype=torch.int64, device="meta")
        norm = QKNorm(of(HEAD_DIM), of(HEAD_DIM), 1e-6)
        k_cache, v_cache = of(BLOCKS, BLOCK, KV_HEADS, HEAD_DIM), of(BLOCKS, BLOCK, KV_HEADS, HEAD_DIM)
        made = rotate_and_store(
            q, k, v, rotation=rotation, k_cache=k_cache, v_cache=v_cache, slot_mapping=slots, norm=norm
        )
        assert (made.shape, made.device.type) == (q.shape, "meta")


def of(*size: int) -> Tensor:
    return torch.ones(size)


def within(name: str, of_k: bool) -> tuple[str, tuple[Tensor, Tensor], dict[str, Tensor]]:
    """Return caches, and one of q, k and v that is a part of one of them."""
    heads = HEADS if name == "q" else KV_HEADS
    pool = memory(channels=2 * HEAD_DIM).nan_to_num_(0.5)
    part = pool.view(-1)[: BATCH * SEQ * heads * HEAD_DIM].view(BATCH, SEQ, heads, HEAD_DIM)
    caches = (pool[..., :HEAD_DIM], memory()) if of_k else (memory(), pool[..., :HEAD_DIM])
    return OVERLAP, caches, {name: part}


OVERLAP = "k_cache and v_cache must not share elements with each other or with q, k and v, got tensors that overlap"


def overlapping() -> tuple[Tensor, Tensor]:
    pool = memory(channels=2 * HEAD_DIM)
    return pool[..., :HEAD_DIM], pool[..., HEAD_DIM - 1 : -1]


def made_in_inference_mode() -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        return memory(), memory()


SHARED: dict[str, Callable[[], tuple[str, tuple[Tensor, Tensor], dict[str, Tensor]]]] = {
    "one cache": lambda: (OVERLAP, (cache := memory(), cache), {}),
    "one channel": lambda: (OVERLAP, overlapping(), {}),
    "expanded": lambda: (
        "each element must have memory of its own",
        (memory()[:1].expand(BLOCKS, -1, -1, -1), memory()),
        {},
    ),
    "windows": lambda: (
        "each element must have memory of its own",
        (memory(), torch.zeros(4000).as_strided(memory().shape, (8, 16, HEAD_DIM, 1))),
        {},
    ),
    "inference mode": lambda: ("outside inference mode, each tensor must be", made_in_inference_mode(), {}),
    **{f"{name} in k_cache": partial(within, name, True) for name in "qkv"},
    **{f"{name} in v_cache": partial(within, name, False) for name in "qkv"},
}


INT8 = {name: of(BLOCKS, BLOCK, KV_HEADS, HEAD_DIM).char() for name in ("k_cache", "v_cache")}
HEADS_FIRST = {name: x.transpose(1, 2).contiguous() for name, x in INT8.items()} | {
    name: of(BLOCKS, BLOCK, KV_HEADS) for name in ("k_scales", "v_scales")
}


class TestMisuse:
    @pytest.mark.parametrize(
        ("how", "message"),
        [
            ({"q": 1}, "q must be a tensor, got 1"),
            ({"v": None}, "v must be a tensor, got None"),
            ({"rotation": None}, "rotation must be a Rotation, got None"),
            ({"layout": "shbd"}, "layout must be one of"),
            ({"v": of(BATCH, SEQ, KV_HEADS)}, "v in layout 'bshd' must have 4 axes"),
            ({"k": of(SEQ, KV_HEADS, HEAD_DIM)}, "such as layout='thd' for .tokens, heads"),
            ({"v": of(BATCH, SEQ, HEADS, HEAD_DIM)}, "v must have the batch, tokens and heads of k"),
            ({"k_cache": of(BLOCKS, BLOCK, KV_HEADS, 20)}, r"k_cache must have shape \[blocks, block_size, 2, 24\]"),
            ({"k_cache": of(BLOCKS, BLOCK, HEADS, HEAD_DIM)}, "k_cache must have shape"),
            ({"v_cache": of(BLOCKS, 5, KV_HEADS, HEAD_DIM)}, "v_cache must have shape"),
            ({"v_cache": of(4, BLOCK, KV_HEADS, HEAD_DIM)}, "v_cache must have shape"),
            ({"v_cache": of(BLOCK, KV_HEADS, HEAD_DIM)}, "v_cache must have shape"),
            ({x: of(BLOCKS, 0, KV_HEADS, HEAD_DIM) for x in ("k_cache", "v_cache")}, "k_cache must have shape"),
            ({"v_cache": of(BLOCKS, BLOCK, KV_HEADS, HEAD_DIM).half()}, "must be torch.float32 on cpu, as q is"),
            ({"v": of(BATCH, SEQ, KV_HEADS, HEAD_DIM).double()}, "must be torch.float32 on cpu, as q is"),
            (INT8 | {"k_scales": of(BLOCKS, BLOCK, KV_HEADS)}, "got caches of torch.int8 and k_scales torch.float32"),
            ({x: of(BLOCKS, BLOCK, KV_HEADS) for x in ("k_scales", "v_scales")}, "caches int8 or float8_e4m3fn, got"),
            (INT8, "and k_cache torch.int8 on cpu. Pass k_scales and v_scales for int8"),
            (HEADS_FIRST, "k_cache must have shape .*k_cache.transpose"),
            ({"slot_mapping": torch.tensor(SLOTS).int()}, r"slot_mapping must be int64 of shape \(2, 3\) on cpu"),
            ({"slot_mapping": torch.tensor(SLOTS).flatten()}, "slot_mapping must be int64 of shape"),
            ({"slot_mapping": torch.tensor([[3, 19, -2], [0, -1, 7]])}, "must be -1 or from 0 to 19, .*, got -2"),
            ({"slot_mapping": torch.tensor([[3, 20, -1], [0, -1, 7]])}, "must be -1 or from 0 to 19, .*, got 20"),
            ({"slot_mapping": torch.tensor([[3, 2**62, -1], [0, -1, 7]])}, "each slot must be"),
            ({"k": of(BATCH, SEQ, KV_HEADS, HEAD_DIM).requires_grad_()}, "gradients cannot pass through a cache"),
            ({"norm": QKNorm(of(HEAD_DIM).requires_grad_(), of(HEAD_DIM), 1e-6)}, "gradients cannot pass"),
            ({"norm": torch.nn.RMSNorm(HEAD_DIM)}, "rotate_and_store: norm must be a QKNorm or None, got RMSNorm"),
            ({"norm": QKNorm(of(20), of(20), 1e-6)}, "q must be a tensor .*head_dim=20"),
            ({"rotation": ROPE.at(torch.arange(4))}, "must have 4 tokens"),
        ],
        ids=lambda x: x if isinstance(x, str) else ", ".join(x),
    )  # fmt: skip
    def test_nothing_is_written(self, how: dict[str, Any], message: str, way: str) -> None:
        q, k, v = drawn()
        caches = memory(), memory()
        usual = {"q": q, "k": k, "v": v, "rotation": ROPE.at(torch.arange(SEQ)), "slot_mapping": torch.tensor(SLOTS)}
        usual |= {"k_cache": caches[0], "v_cache": caches[1]}
        with pytest.raises(RopeError, match=message):
            rotate_and_store(**usual | how)  # type: ignore[arg-type]
        assert all(cache.isnan().all() for cache in caches)
        rotate_and_store(**usual)  # type: ignore[arg-type]

    @pytest.mark.parametrize("case", SHARED)
    def test_caches_need_memory_of_their_own(self, case: str, way: str) -> None:
        message, (k_cache, v_cache), which = SHARED[case]()
        given = dict(zip("qkv", drawn(), strict=True)) | which
        before = [x.clone() for x in (k_cache, v_cache)]
        with pytest.raises(RopeError, match=rf"rotate_and_store: {message}"):
            rotate_and_store(
                **given,
                rotation=ROPE.at(torch.arange(SEQ)),
                k_cache=k_cache,
                v_cache=v_cache,
                slot_mapping=torch.tensor(SLOTS),
            )
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip((k_cache, v_cache), before, strict=True))


# ---- RotaryAttention and KVCache

HIDDEN, LAYERS = 20, 2


def model(dtype: torch.dtype = torch.float32) -> list[RotaryAttention]:
    torch.manual_seed(6)
    layers = [
        RotaryAttention(HIDDEN, HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, qk_norm=1e-6 if i else None).to(dtype)
        for i in range(LAYERS)
    ]
    for parameter in (p for layer in layers for p in layer.parameters()):
        torch.nn.init.normal_(parameter, std=0.4)
    return layers


def decoded(size: dict[str, int], rope: Any, dtype: torch.dtype) -> tuple[list[Tensor], KVCache]:
    """Return the outputs of several passes, with padding in the first and a row that restarts."""
    layers = model(dtype)
    cache = KVCache(LAYERS, BATCH, KV_HEADS, HEAD_DIM, dtype=dtype, **size)
    outputs = []
    x = torch.randn(BATCH, 8, HIDDEN, generator=torch.Generator().manual_seed(7)).to(dtype)
    with torch.no_grad():
        for begin, end in ((0, 5), (5, 6), (6, 7), (7, 8)):
            mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]) if begin == 0 else None
            step = cache.step(end - begin, attention_mask=mask)
            now = x[:, begin:end]
            rotation = (
                rope.at(step.positions, step.key_positions) if isinstance(rope, SelfExtend) else step.rotation(rope)
            )
            for i, layer in enumerate(layers):
                now = now + layer(now, rotation, cache=step.layer(i))
            outputs.append(now)
            if begin == 6:
                cache.reset(rows=[1])
    return outputs, cache


ROPES: dict[str, tuple[dict[str, int], Any, int]] = {  # and the number of layers in the four passes that are one call
    "capacity": ({"capacity": 9}, ROPE, 8),
    "window": ({"window": 5}, ROPE, 8),
    "sinks": ({"window": 4, "sinks": 1}, ROPE, 2),
    "Self-Extend": ({"capacity": 9}, SelfExtend(ROPE, group=2, window=2), 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ROPES)
def test_cache_of_a_model(case: str, dtype: torch.dtype, fused: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    size, rope, layers = ROPES[case]
    monkeypatch.setattr(cpu, "attend_plain", lambda *arguments: None)  # attention in PyTorch both times
    outputs, cache = decoded(size, rope, dtype)
    if backend.FAST_PATH:
        assert fused == [True] * layers
    monkeypatch.setattr(backend, "FAST_PATH", False)
    separate, other = decoded(size, rope, dtype)
    for x, y in zip((*outputs, *cache.keys, *cache.values), (*separate, *other.keys, *other.values), strict=True):
        assert same(x, y, best())
    assert torch.equal(cache.length, other.length)


@pytest.mark.skipif(not backend.FAST_PATH, reason="separate calls run more functions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_decode_step_runs_at_most_40_functions_of_ropewalk(dtype: torch.dtype) -> None:
    """One token in each row: plan the step, compute the rotation, attend in one layer."""
    layer, cache = model(dtype)[0], KVCache(1, BATCH, KV_HEADS, HEAD_DIM, capacity=9, dtype=dtype)
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and str(frame.f_globals.get("__name__")).startswith("ropewalk."):
            called.append(frame.f_code.co_name)

    for seq in (4, 1, 1):
        x = torch.randn(BATCH, seq, HIDDEN).to(dtype)
        called.clear()
        sys.setprofile(note)
        try:
            step = cache.step(seq)
            layer(x, step.rotation(ROPE), cache=step.layer(0))
        finally:
            sys.setprofile(None)
    assert len(called) <= 40, called


def whole(layers: list[RotaryAttention], x: Tensor, rotation: Any) -> Tensor:
    for layer in layers:
        x = x + layer(x, rotation)
    return x


def test_training(fused: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cache, norm and rotation are one call. Its gradients are close to those of separate calls."""
    layers = model(torch.float64)
    x = torch.randn(BATCH, 5, HIDDEN, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    rotation = ROPE.at(torch.arange(5))

    def gradients() -> tuple[Tensor, list[Tensor]]:
        out = whole(layers, x, rotation)
        return out, [*torch.autograd.grad(out.sin().sum(), [p for layer in layers for p in layer.parameters()])]

    out, found = gradients()
    assert fused == ([True] if backend.FAST_PATH else [False])  # one of the two layers has norms
    for layer in layers[1:]:
        monkeypatch.setattr(layer, "_fusable_norm", lambda *_: None)
    other, wanted = gradients()
    assert same(out, other, best())
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)  # measured: 1.4e-13 in values of size 100


def test_norms_with_hooks_are_called(fused: list[bool]) -> None:
    layer, x, rotation = model()[1], torch.randn(BATCH, 5, HIDDEN), ROPE.at(torch.arange(5))
    usual, seen = layer(x, rotation), []
    with layer.q_norm.register_forward_hook(lambda *_: seen.append(1)):  # type: ignore[union-attr]
        assert same(layer(x, rotation), usual, best())
    assert seen == [1]
    assert len(fused) == 1
    layer.k_norm = torch.nn.Identity()
    assert not torch.equal(layer(x, rotation), usual)


def test_another_cache_gets_normalized_heads() -> None:
    layer, x = model()[1], torch.randn(BATCH, 5, HIDDEN)
    came: list[Tensor] = []

    class Cache:
        def attend(self, q: Tensor, k: Tensor, v: Tensor, *, rotation: Any, mask: Any, scale: float) -> Tensor:
            came.extend((q, k))
            return q

    layer(x, ROPE.at(torch.arange(5)), cache=Cache())
    norms, heads = (layer.q_norm, layer.k_norm), (HEADS, KV_HEADS)
    for got, norm, projection, count in zip(came, norms, (layer.q_proj, layer.k_proj), heads, strict=True):
        assert isinstance(norm, HeadNorm)
        assert torch.equal(got, norm(projection(x).unflatten(-1, (count, HEAD_DIM))))


def test_a_cache_that_takes_norms_gets_heads_as_projected() -> None:
    layer, x = model()[1], torch.randn(BATCH, 5, HIDDEN)
    came: list[Any] = []

    class Cache:
        takes_norm = True

        def attend(
            self, q: Tensor, k: Tensor, v: Tensor, *, rotation: Any, mask: Any, scale: float, norm: Any = None
        ) -> Tensor:
            came.append((q, k, norm))
            return q

    layer(x, ROPE.at(torch.arange(5)), cache=Cache())
    layer.q_norm.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
    layer(x, ROPE.at(torch.arange(5)), cache=Cache())
    (q, k, norm), (_, _, of_modules) = came
    assert torch.equal(q, layer.q_proj(x).unflatten(-1, (HEADS, HEAD_DIM)))
    assert torch.equal(k, layer.k_proj(x).unflatten(-1, (KV_HEADS, HEAD_DIM)))
    assert norm.q_weight is layer.q_norm.weight  # type: ignore[union-attr]
    assert norm.k_weight is layer.k_norm.weight  # type: ignore[union-attr]
    assert norm.eps == layer.q_norm.eps  # type: ignore[union-attr]
    assert of_modules is None  # a hook must run


@pytest.mark.parametrize("cached", [False, True])
def test_autocast(cached: bool) -> None:
    """Weights stay float32 and heads are bfloat16. The result has the same bits as calls of the norm modules."""
    layer, x = model()[1], torch.randn(BATCH, 5, HIDDEN)
    made = []
    for has_hook in (False, True):
        cache = KVCache(1, BATCH, KV_HEADS, HEAD_DIM, capacity=6, dtype=torch.bfloat16)
        hook = layer.q_norm.register_forward_hook(lambda *_: None) if has_hook else None  # type: ignore[union-attr]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            step = cache.step(5)
            made.append(layer(x, step.rotation(ROPE), cache=step.layer(0) if cached else None))
        if hook:
            hook.remove()
    assert made[0].dtype == torch.bfloat16
    assert same(*made, best())  # type: ignore[call-arg]
