"""The fused step in compiled code, with every instruction set, and fallback to Python for uncommon calls."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kernel_cases import DTYPES, PAIRINGS, bits, by_reference, same, same_in_8_bits
from ropewalk.kernels import backend, cpu
from ropewalk.rotation import reference
from unusual import OBSERVERS, TENSORS, resized

pytestmark = pytest.mark.skipif(not backend.FAST_PATH, reason="no kernels, or not to be used")

HEAD_DIM, KV_HEADS = 24, 1


def tables(*axes: int, dtype: torch.dtype = torch.float32, pairs: int = 8) -> tuple[Tensor, Tensor]:
    angle = torch.randn(*axes, pairs, dtype=torch.float64)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def usual() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.randn(2, 5, 3, HEAD_DIM), torch.randn(2, 5, KV_HEADS, HEAD_DIM), *tables(5)


def step(**given: Any) -> Any:
    """Call the step with all optional parts and with plain tensors by default."""
    q, k, cos, sin = usual()
    how: dict[str, Any] = {"q": q, "k": k, "cos": cos, "sin": sin, "layout": "bshd", "head_dim": HEAD_DIM}
    how |= {"rotary_dim": 16, "interleaved": False, "offset": 4, "per_head": False}
    how |= {"q_weight": torch.randn(HEAD_DIM), "k_weight": torch.randn(HEAD_DIM), "eps": 1e-6, "add_one": False}
    how |= {"v": torch.randn_like(k), "k_cache": memory(), "v_cache": memory(), "slots": torch.arange(10).view(2, 5)}
    how |= {"k_scales": None, "v_scales": None}
    return cpu.step_plain(*(how | {"profiled": False} | given).values())


def memory() -> Tensor:
    return torch.full((3, 4, KV_HEADS, HEAD_DIM), math.nan)


def in_8_bits(dtype: torch.dtype = torch.int8) -> dict[str, Tensor]:
    """Return caches for numbers of 8 bits, and their scales."""
    caches = {name: torch.full((3, 4, KV_HEADS, HEAD_DIM), 7.0).to(dtype) for name in ("k_cache", "v_cache")}
    return caches | {name: torch.full((3, 4, KV_HEADS), 7.0) for name in ("k_scales", "v_scales")}


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_level(dtype: torch.dtype, pairing: str, level: str, poisoned: None) -> None:
    """The bits equal norm and rotation of the reference, for heads of several vectors and with a remainder."""
    torch.manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sizes = [1, 2, 3, 8, 12, 31, 32, 40, 48, 64, 100, 128, 129, 130, 256, 257, 520]
    for i, (pairs, strided) in enumerate(itertools.product(sizes, (1, 2))):
        head_dim = 2 * pairs + 3 * (i % 3)
        q, k, v = (torch.randn(2, 3, heads, strided * head_dim).to(dtype)[..., ::strided] for heads in (3, 2, 2))
        of_weights = wide if i % 2 else dtype
        weights = [torch.randn(head_dim).to(of_weights) for _ in range(2)]
        cos, sin = tables(3, pairs=pairs, dtype=(torch.float32, torch.float64)[i % 2])
        add_one, offset = i % 4 == 0, 3 * (i % 3) // 2
        slots = torch.tensor([[4, -1, 0], [1, 5, -1]])
        caches = [torch.full((2, 3, 2, head_dim), 7.0).to(dtype) for _ in range(2)]
        how = (cos, sin, "bshd", head_dim, 2 * pairs, pairing == "interleaved", offset, False)
        made = cpu.step_plain(q, k, *how, *weights, 1e-5, add_one, *[None] * 6, False)
        stored = cpu.step_plain(q, k, *how, *weights, 1e-5, add_one, v, *caches, slots, None, None, False)
        normed = [
            reference.rms_norm(x, weight, eps=1e-5, add_one=add_one) for x, weight in zip((q, k), weights, strict=True)
        ]
        wanted = by_reference(normed, cos, sin, "bshd", pairing, offset, False)
        assert all(same(x, y, level) for x, y in zip((*made, stored), (*wanted, wanted[0]), strict=True)), head_dim
        others = [torch.full((6, 2, head_dim), 7.0).to(dtype) for _ in range(2)]
        for token, slot in enumerate(slots.flatten().tolist()):
            if slot >= 0:
                others[0][slot], others[1][slot] = wanted[1].flatten(0, 1)[token], v.flatten(0, 1)[token]
        assert all(same(x.flatten(0, 1), y, level) for x, y in zip(caches, others, strict=True)), head_dim


@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_8_bits_at_every_level(dtype: torch.dtype, kept: torch.dtype, level: str, poisoned: None) -> None:
    """k is rounded to its dtype after the rotation, and then k and v are quantized. Each head has its scale."""
    torch.manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for i, pairs in enumerate([1, 2, 3, 8, 12, 31, 64, 65, 128, 520]):
        head_dim, v_dim, strided = 2 * pairs + i % 3, 2 * pairs + i % 2, 1 + i % 2
        sizes = torch.randn(2, 3, 2, 1).mul(9).exp2()
        q = torch.randn(2, 3, 2, head_dim).to(dtype)
        k, v = ((torch.randn(2, 3, 2, n * strided) * sizes).to(dtype)[..., ::strided] for n in (head_dim, v_dim))
        for x in (k, v):  # a head of 0, of tiny numbers, and two that are not finite
            x[0, 1, 0], x[0, 2, 0] = 0, 1e-36
            x[1, 0, 0, -1], x[1, 1, 1, 1] = math.inf, math.nan
        weights = [None, None] if i % 2 else [torch.randn(head_dim).to(wide) for _ in range(2)]
        cos, sin = tables(2, 3, pairs=pairs) if i % 3 else tables(2, 2, 3, pairs=pairs)
        slots = torch.tensor([[4, -1, 0], [1, 5, 2]])
        caches = [torch.full((3, 2, 2, n), 7.0).to(kept) for n in (head_dim, v_dim)]
        scales = [torch.full((3, 2, 2), 7.0) for _ in caches]
        how = (cos, sin, "bshd", head_dim, 2 * pairs, bool(i % 2), i % 2, i % 3 == 0)
        if i % 2 > head_dim - 2 * pairs:
            how = (*how[:6], 0, how[7])
        made = cpu.step_plain(q, k, *how, *weights, 1e-5, False, v, *caches, slots, *scales, False)
        normed = [x if w is None else reference.rms_norm(x, w, eps=1e-5) for x, w in zip((q, k), weights, strict=True)]
        wanted = by_reference(normed, cos, sin, "bshd", "interleaved" if how[5] else "half", how[6], False)
        assert same(made, wanted[0], level), head_dim
        flat = slots.flatten()
        for cache, scale, x in zip(caches, scales, (wanted[1], v), strict=True):
            x = x.flatten(0, 1)[flat >= 0]
            numbers, scale = cache.flatten(0, 1), scale.flatten(0, 1)
            assert same_in_8_bits(numbers[flat[flat >= 0]], scale[flat[flat >= 0]], x), head_dim
            assert (numbers[3].float() == 7).all(), head_dim  # no token has this slot
            assert (scale[3] == 7).all(), head_dim


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latent_rows_at_every_level(dtype: torch.dtype, level: str, poisoned: None) -> None:
    """The last channels are rotated, and nothing but k is written."""
    torch.manual_seed(0)
    q, rows, (cos, sin) = torch.randn(2, 3, 4, 40).to(dtype), torch.randn(2, 3, 1, 40).to(dtype), tables(3, pairs=4)
    cache, slots = torch.full((3, 2, 1, 40), 7.0).to(dtype), torch.tensor([[4, -1, 0], [1, 5, 2]])
    how = (cos, sin, "bshd", 40, 8, True, 32, False, None, None, 0.0, False)
    made = cpu.step_plain(q, rows, *how, None, cache, None, slots, None, None, False)
    wanted = by_reference([q, rows], cos, sin, "bshd", "interleaved", 32, False)
    assert same(made, wanted[0], level)
    expected = torch.full((6, 1, 40), 7.0).to(dtype)
    expected[slots[slots >= 0]] = wanted[1].flatten(0, 1)[slots.flatten() >= 0]
    assert same(cache.flatten(0, 1), expected, level)


UNUSUAL: dict[str, dict[str, Any]] = {
    "no k": {"k": None},
    "a weight of k alone": {"k_weight": None},
    "no weight": {"q_weight": [1.0] * HEAD_DIM},
    "a weight too short": {"q_weight": torch.ones(HEAD_DIM - 1)},
    "a weight too long": {"k_weight": torch.ones(HEAD_DIM + 1)},
    "a weight with channels apart": {"k_weight": torch.ones(2 * HEAD_DIM)[::2]},
    "a weight of two axes": {"q_weight": torch.ones(1, HEAD_DIM)},
    "weights of 16 bits": {"q_weight": torch.ones(HEAD_DIM).half(), "k_weight": torch.ones(HEAD_DIM).half()},
    "weights of two dtypes": {"k_weight": torch.ones(HEAD_DIM).double()},
    "a weight without memory": {"q_weight": resized(torch.ones(HEAD_DIM))},
    "a weight with a gradient": {"q_weight": nn.Parameter(torch.ones(HEAD_DIM))},
    "no cache": {"k_cache": None},
    "slots alone": {"v": None, "k_cache": None, "v_cache": None},
    "v without a cache": {"v_cache": None},
    "a cache without v": {"v": None},
    "scales of a cache of more bits": {"k_scales": torch.ones(3, 4, KV_HEADS), "v_scales": torch.ones(3, 4, KV_HEADS)},
    "a cache with a gradient": {"v_cache": memory().requires_grad_()},
    "a cache of another dtype": {"k_cache": memory().half()},
    "a cache of other heads": {"k_cache": memory().expand(-1, -1, 2, -1).clone()},
    "a cache of another head_dim": {"v_cache": memory()[..., :20]},
    "a cache of three axes": {"v_cache": memory()[0]},
    "a cache that repeats": {"k_cache": torch.zeros(1, 4, 1, HEAD_DIM).expand(3, -1, -1, -1)},
    "an empty cache": {"k_cache": memory()[:0], "v_cache": memory()[:0]},
    "a cache without memory": {"v_cache": resized(memory())},
    "caches of two sizes": {"v_cache": memory()[:2]},
    "caches of two sizes of blocks": {"v_cache": memory()[:, :3]},
    "no v": {"v": 1},
    "v with a gradient": {"v": torch.ones(2, 5, KV_HEADS, HEAD_DIM, requires_grad=True)},
    "v of another dtype": {"v": torch.ones(2, 5, KV_HEADS, HEAD_DIM).half()},
    "v of other heads": {"v": torch.ones(2, 5, 3, HEAD_DIM)},
    "v of other tokens": {"v": torch.ones(2, 4, KV_HEADS, HEAD_DIM)},
    "v of three axes": {"v": torch.ones(5, KV_HEADS, HEAD_DIM)},
    "no slots": {"slots": None},
    "slots of 32 bits": {"slots": torch.arange(10, dtype=torch.int32).view(2, 5)},
    "flat slots": {"slots": torch.arange(10)},
    "slots of other tokens": {"slots": torch.arange(8).view(2, 4)},
    "slots of another batch": {"slots": torch.arange(5).view(1, 5)},
    "a slot below": {"slots": torch.arange(10).view(2, 5) - 2},
    "a slot above": {"slots": torch.arange(10).view(2, 5) + 3},
    "slots without memory": {"slots": resized(torch.arange(10).view(2, 5))},
    "tables of other tokens": {"cos": tables(4)[0], "sin": tables(4)[1]},
    "another layout": {"layout": "bhsd"},
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_uncommon_calls_are_left_to_python(case: str) -> None:
    caches = {"k_cache": memory(), "v_cache": memory()}
    assert step() is not None
    assert step(**caches | UNUSUAL[case]) is None
    assert all(cache.isnan().all() for cache in caches.values())


OF_8_BITS: dict[str, dict[str, Any]] = {
    "no scales": {"k_scales": None, "v_scales": None},
    "no scales of v": {"v_scales": None},
    "scales of more bits": {"k_scales": torch.ones(3, 4, KV_HEADS, dtype=torch.float64)},
    "scales of other slots": {"v_scales": torch.ones(3, 3, KV_HEADS)},
    "scales of two axes": {"v_scales": torch.ones(3, 4)},
    "scales that repeat": {"v_scales": torch.ones(3, 1, KV_HEADS).expand(3, 4, KV_HEADS)},
    "scales with a gradient": {"k_scales": torch.ones(3, 4, KV_HEADS, requires_grad=True)},
    "scales without memory": {"k_scales": resized(torch.ones(3, 4, KV_HEADS))},
    "shared scales": dict.fromkeys(("k_scales", "v_scales"), torch.ones(3, 4, KV_HEADS)),
    "caches of two dtypes": {"v_cache": memory()},
    "caches of two dtypes of 8 bits": {"v_cache": torch.ones(3, 4, KV_HEADS, HEAD_DIM, dtype=torch.float8_e4m3fn)},
    "another dtype of 8 bits": in_8_bits(torch.float8_e5m2),
    "channels apart": {"k_cache": torch.ones(3, 4, KV_HEADS, 2 * HEAD_DIM, dtype=torch.int8)[..., ::2]},
    "no v": {"v": None, "v_cache": None, "v_scales": None},
    "more than 16,384 channels of k": {
        "k": torch.ones(2, 5, 700, HEAD_DIM), "v": torch.ones(2, 5, 700, 1),
        "k_cache": torch.ones(3, 4, 700, HEAD_DIM, dtype=torch.int8), "k_scales": torch.ones(3, 4, 700),
        "v_cache": torch.ones(3, 4, 700, 1, dtype=torch.int8), "v_scales": torch.ones(3, 4, 700),
    },
    "more than 16,384 channels of v": {
        "v": torch.ones(2, 5, KV_HEADS, 16_385),
        "v_cache": torch.ones(3, 4, KV_HEADS, 16_385, dtype=torch.int8),
    },
}  # fmt: skip


@pytest.mark.parametrize("case", OF_8_BITS)
def test_uncommon_calls_with_8_bits_are_left_to_python(case: str) -> None:
    given = in_8_bits()
    assert step(**in_8_bits()) is not None
    assert step(**given | OF_8_BITS[case]) is None
    assert all((x == 7).all() for x in given.values())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("which", ["v", "k_cache", "q_weight"])
@pytest.mark.parametrize("case", [case for case, (of, _) in TENSORS.items() if of == "q"])
def test_tensors_that_are_not_plain(case: str, which: str) -> None:
    usual_ones = {"v": torch.randn(2, 5, KV_HEADS, HEAD_DIM), "k_cache": memory(), "q_weight": torch.ones(HEAD_DIM)}
    if case in ("a token too many", "another head_dim", "three axes", "no tokens", "nested") and which == "q_weight":
        return  # not aligned to a vector
    if (case, which) in {("three axes", "k_cache"), ("no tokens", "k_cache")}:
        return  # memory() then has fewer axes or slots, which the cases above cover
    try:
        other = TENSORS[case][1](usual_ones[which])
    except IndexError:
        return  # memory() has no such slot
    assert step(**{which: other}) is None


@pytest.mark.parametrize("who", OBSERVERS)
def test_observers_see_every_operator(who: str) -> None:
    (q, k, cos, sin), caches = usual(), (memory(), memory())
    v, slots, weights = torch.randn_like(k), torch.arange(10).view(2, 5), (torch.ones(HEAD_DIM), torch.ones(HEAD_DIM))
    how = ("bshd", HEAD_DIM, 16, False, 4, False, *weights, 1e-6, False, v, *caches, slots, None, None)
    with OBSERVERS[who]():
        untold = cpu.step_plain(q, k, cos, sin, *how, False)
    assert untold is None
    assert all(cache.isnan().all() for cache in caches)
    with OBSERVERS[who]():
        told = cpu.step_plain(q, k, cos, sin, *how, True)
    assert (told is not None) is (who == "a profiler")


def test_parameters_may_be_weights_without_gradients() -> None:
    given = {"q_weight": nn.Parameter(torch.ones(HEAD_DIM)), "k_weight": nn.Parameter(torch.ones(HEAD_DIM))}
    with torch.no_grad():
        assert step(**given) is not None
    assert step(**given) is None


def test_caches_of_inference_mode() -> None:
    """Outside of inference mode, autograd cannot count changes of such tensors."""
    with torch.inference_mode():
        cache = memory()
        assert step(k_cache=cache) is not None
    assert step(k_cache=cache) is None
    versions = (mine := memory())._version
    assert step(v_cache=mine) is not None
    assert mine._version == versions + 1


def pool(*shape: int) -> Tensor:
    return torch.full(shape, math.nan)


LEGAL: dict[str, Any] = {
    "rows of one tensor": lambda: pool(2, 3, 4, 2, HEAD_DIM).unbind(0),
    "side by side in a block": lambda: pool(3, 2, 4, 2, HEAD_DIM).unbind(1),
    "side by side in a slot": lambda: pool(3, 4, 2, 2, HEAD_DIM).unbind(2),
    "side by side in a head": lambda: pool(3, 4, 2, 2 * HEAD_DIM).split(HEAD_DIM, -1),
    "alternating channels": lambda: pool(3, 4, 2, HEAD_DIM, 2).unbind(-1),
    "alternating blocks": lambda: (whole := pool(6, 4, 2, HEAD_DIM), (whole[::2], whole[1::2]))[1],
    "heads before slots": lambda: [x.transpose(1, 2) for x in pool(3, 2, 4, 2 * HEAD_DIM).split(HEAD_DIM, -1)],
    "heads, keys and values before slots": lambda: [x.transpose(1, 2) for x in pool(3, 2, 2, 4, HEAD_DIM).unbind(2)],
}


@pytest.mark.parametrize("case", LEGAL)
def test_parts_of_one_tensor_use_the_fast_path(case: str) -> None:
    k_cache, v_cache = LEGAL[case]()
    q, k, v = torch.randn(2, 5, 7 * HEAD_DIM).unflatten(-1, (7, HEAD_DIM)).split((3, 2, 2), 2)
    assert step(q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache) is not None
    assert torch.equal(bits(v_cache.flatten(0, 1)[:10]), bits(v.flatten(0, 1)))


def test_shared_memory_is_never_written() -> None:
    """Random parts of one buffer. NumPy determines whether a cache shares an element with another tensor."""
    draw, taken, shared = random.Random(0), 0, 0
    cos, sin = tables(2, pairs=1)
    how: dict[str, Any] = {"q_weight": None, "k_weight": None, "slots": torch.tensor([[0, 1]]), "head_dim": 2}
    how |= {"cos": cos, "sin": sin, "rotary_dim": 2, "offset": 0}
    for _ in range(6000):
        buffer, block, slot = torch.zeros(600), draw.choice([4, 6, 12, 24, 40]), draw.choice([2, 4, 6, 12, 80])
        head, channel = draw.choice([2, 3, 4, 24, 48]), draw.choice([1, 1, 1, 2])
        given: dict[str, Any] = {"q": torch.ones(1, 2, 2, 2), "k": torch.ones(1, 2, 2, 2), "v": torch.ones(1, 2, 2, 2)}
        for name in ("k_cache", "v_cache"):
            strides = (block, slot, head + draw.choice([0, 0, 0, 2]), channel)
            given[name] = buffer.as_strided((3, 2, 2, 2), strides, draw.choice([0, 1, 2, 4, 6, 12, 20, 90, 200]))
        written = ["k_cache", "v_cache"]
        if draw.random() < 0.4:
            numbers = buffer.view(torch.int8)
            for name in ("k", "v"):
                strides = (block, slot, head + draw.choice([0, 0, 0, 2]), 1)
                first = draw.choice([0, 1, 2, 4, 6, 12, 20, 90, 200, 900, 1600])
                given[f"{name}_cache"] = numbers.as_strided((3, 2, 2, 2), strides, first)
                first = draw.choice([0, 1, 2, 4, 30, 90, 200, 240])
                given[f"{name}_scales"] = buffer.as_strided((3, 2, 2), (block, slot, draw.choice([1, 2])), first)
            written += ["k_scales", "v_scales"]
        if draw.random() < 0.3:
            name = draw.choice("qkv")
            given[name] = buffer.as_strided((1, 2, 2, 2), (40, 4, 2, 1), draw.choice([0, 100, 300, 390]))
        pairs = [(a, b) for i, a in enumerate(written) for b in (*written[:i], *"qkv")]
        overlap = any(np.shares_memory(given[a].numpy(), given[b].numpy()) for a, b in pairs)
        done = step(**how | given) is not None
        taken, shared = taken + done, shared + overlap
        assert not (overlap and done), [(x.stride(), x.storage_offset()) for x in given.values()]
    assert taken > 300
    assert shared > 1000


def test_v_with_another_number_of_channels() -> None:
    v, v_cache = torch.randn(2, 5, KV_HEADS, 7), torch.full((3, 4, KV_HEADS, 7), math.nan)
    assert step(v=v, v_cache=v_cache) is not None
    assert torch.equal(bits(v_cache.flatten(0, 1)[:10]), bits(v.flatten(0, 1)))
