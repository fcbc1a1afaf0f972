"""Memory of attention with windows, sinks, Self-Extend and padding: no mask of all pairs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ropewalk import KVCache, Rope, RotaryAttention, SelfExtend

HIDDEN, HEADS, HEAD_DIM = 16, 2, 8
ROPE = Rope(HEAD_DIM, 1e4, "half")


class Peak(TorchDispatchMode):
    """The largest number of bytes of the tensors that exist at one time, of those that were created under it."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self.live:
                    self.live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage._cdata)
        self.bytes = max(self.bytes, sum(self.live.values()))
        return result


def peak(use: Callable[[int], object], seq: int) -> int:
    with Peak() as measured:
        use(seq)
    return measured.bytes


def in_a_layer(seq: int, *, extended: bool = False, trains: bool = False, **how: Any) -> None:
    made, x = RotaryAttention(HIDDEN, HEADS, **how), torch.randn(1, seq, HIDDEN)
    with torch.set_grad_enabled(trains):
        out = made(x, (SelfExtend(ROPE, 4, 64) if extended else ROPE).at(torch.arange(seq)))
    if trains:
        out.sum().backward()


def in_a_cache(seq: int, *, ragged: bool = False, extended: bool = False, then: bool = False, **how: Any) -> None:
    size = {name: how[name] for name in ("window", "sinks", "store") if name in how} or {"capacity": 2 * seq}
    cache, x = KVCache(1, 2, HEADS, HEAD_DIM, **size), torch.randn(2, seq, HEADS, HEAD_DIM)
    mask = torch.arange(seq) < torch.tensor([[seq], [seq - 1]]) if ragged else None
    for _ in range(1 + then):
        step = cache.step(seq, attention_mask=mask)
        rotation = step.rotation(ROPE)
        if extended:
            rotation = SelfExtend(ROPE, 4, 64).at(step.positions, step.key_positions)
        step.layer(0).attend(x, x, x, rotation=rotation, window=how.get("of_layer"))


@pytest.mark.parametrize(
    "use",
    [
        lambda seq: in_a_layer(seq, window=64),
        lambda seq: in_a_layer(seq, window=64, causal=False),
        lambda seq: in_a_layer(seq, window=64, trains=True),
        lambda seq: in_a_layer(seq, extended=True),
        lambda seq: in_a_cache(seq, of_layer=64),
        lambda seq: in_a_cache(seq, ragged=True),
        lambda seq: in_a_cache(seq, then=True),
        lambda seq: in_a_cache(seq, extended=True),
        lambda seq: in_a_cache(seq, window=64, then=True),
        lambda seq: in_a_cache(seq, window=64, store="int8", ragged=True),
        lambda seq: in_a_cache(seq, window=64, sinks=4, then=True),
    ],
)
def test_memory_is_linear_in_tokens(use: Callable[[int], object]) -> None:
    """For twice the tokens, linear memory is twice as much, and a mask of all pairs is four times as much."""
    assert peak(use, 4096) < 2.2 * peak(use, 2048)
