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

from kernel_cases import DTYPES, PAIRINGS, bits, by_reference, same
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
    return cpu.step_plain(*(how | {"profiled": False} | given).values())


def memory() -> Tensor:
    return torch.full((3, 4, KV_HEADS, HEAD_DIM), math.nan)


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
        made = cpu.step_plain(q, k, *how, *weights, 1e-5, add_one, None, None, None, None, False)
        stored = cpu.step_plain(q, k, *how, *weights, 1e-5, add_one, v, *caches, slots, False)
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
    how = ("bshd", HEAD_DIM, 16, False, 4, False, *weights, 1e-6, False, v, *caches, slots)
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
    for _ in range(3000):
        buffer, block, slot = torch.zeros(600), draw.choice([4, 6, 12, 24, 40]), draw.choice([2, 4, 6, 12, 80])
        head, channel = draw.choice([2, 3, 4, 24, 48]), draw.choice([1, 1, 1, 2])
        given: dict[str, Any] = {"q": torch.ones(1, 2, 2, 2), "k": torch.ones(1, 2, 2, 2), "v": torch.ones(1, 2, 2, 2)}
        for name in ("k_cache", "v_cache"):
            strides = (block, slot, head + draw.choice([0, 0, 0, 2]), channel)
            given[name] = buffer.as_strided((3, 2, 2, 2), strides, draw.choice([0, 1, 2, 4, 6, 12, 20, 90, 200]))
        if draw.random() < 0.3:
            name = draw.choice("qkv")
            given[name] = buffer.as_strided((1, 2, 2, 2), (40, 4, 2, 1), draw.choice([0, 100, 300, 390]))
        caches = given["k_cache"].numpy(), given["v_cache"].numpy()
        overlap = np.shares_memory(*caches)
        overlap |= any(np.shares_memory(given[name].numpy(), cache) for name in "qkv" for cache in caches)
        done = step(**how | given) is not None
        taken, shared = taken + done, shared + overlap
        assert not (overlap and done), [(x.stride(), x.storage_offset()) for x in given.values()]
    assert taken > 300
    assert shared > 1000


def test_v_with_another_number_of_channels() -> None:
    v, v_cache = torch.randn(2, 5, KV_HEADS, 7), torch.full((3, 4, KV_HEADS, 7), math.nan)
    assert step(v=v, v_cache=v_cache) is not None
    assert torch.equal(bits(v_cache.flatten(0, 1)[:10]), bits(v.flatten(0, 1)))
