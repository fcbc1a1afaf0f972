"""The attention of one layer over each cache, the output that it must give, and the reading of all keys and values."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import ropewalk
from ropewalk.tools.bench.decode_caches import KV, LATENT, OURS, STATIC, Fill

READ = "read keys and values"  # the contender with which all others are compared
Attend = Callable[[list[float]], tuple[float, Tensor]]
"""One call of attention, which appends the seconds of planning the step to a list.

It returns the seconds of the call and the output `[batch, 1, heads, head_dim]`, or `[batch, 1, heads, latent]`.
"""


def build_attention(
    fill: Fill, names: Sequence[str]
) -> tuple[dict[str, Attend], Callable[[], float], dict[str, Tensor]]:
    """Build a call of attention over each of the named caches, of a size with one layer.

    A call adds one token to the cache. For ropewalk, it includes the rotation of this token, for transformers it does
    not. What a model does once for all layers is not part of it: the plan of the step, cos and sin, and the mask of the
    StaticCache.

    Returns:
        The calls, a function that returns the seconds of reading the held keys and values once, and the outputs
        that the calls must give at first, float64.
    """
    size, draw = fill.size, torch.Generator().manual_seed(0)
    rope = ropewalk.Rope(head_dim=size.head_dim, base=10_000.0, pairing="half")
    q, k, v = (
        torch.randn(fill.batch, 1, heads, size.head_dim, generator=draw).to(fill.dtype)
        for heads in (size.heads, size.kv_heads, size.kv_heads)
    )
    row, row_q = fill.latent_row(k), torch.randn(fill.batch, 1, size.heads, size.row, generator=draw).to(fill.dtype)
    rotated_part: Any = {"rotary_dim": size.row - size.latent, "rotary_offset": size.latent}
    row_rope = ropewalk.Rope(size.row, 10_000.0, "interleaved", **rotated_part)

    def with_ropewalk(cache: Any, rope: ropewalk.Rope, *inputs: Tensor, scale: float | None = None) -> Attend:
        def attend(planning: list[float]) -> tuple[float, Tensor]:
            begun = time.perf_counter()
            step = cache.step(1)
            planning.append(time.perf_counter() - begun)
            rotation, layer = step.rotation(rope), step.layer(0)
            start = time.perf_counter()
            output = layer.attend(*inputs, rotation=rotation, scale=scale)
            return time.perf_counter() - start, output

        return attend

    def with_transformers(cache: Any, capacity: int | None) -> Attend:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        attention: Any = sdpa_attention_forward
        groups = SimpleNamespace(num_key_value_groups=size.heads // size.kv_heads, is_causal=True)

        def attend(planning: list[float]) -> tuple[float, Tensor]:
            position = int(cache.get_seq_length())
            q1, k1 = (x.transpose(1, 2) for x in rope.at(torch.tensor([position]))(q, k, layout="bshd"))
            mask = None if capacity is None else (torch.arange(capacity) <= position)[None, None, None]
            start = time.perf_counter()
            keys, values = cache.update(k1, v.transpose(1, 2), 0)
            output: Tensor = attention(groups, q1, keys, values, mask, scaling=size.head_dim**-0.5)[0]
            return time.perf_counter() - start, output

        return attend

    content = fill.draw()
    ((keys, values),) = content
    position = torch.tensor([fill.held])
    rotated = rope.at(position)(q, k, layout="bshd")
    expected = dict.fromkeys(names, _attend(*rotated, v, keys, values))
    rotated, rows = row_rope.at(position)(row_q, row, layout="bshd"), fill.latent_row(keys)
    expected[LATENT] = _attend(*rotated, row[..., : size.latent], rows, rows[..., : size.latent])
    calls: dict[str, Attend] = {}
    memory: list[Tensor] = []
    for name in names:
        cache = fill.build(name, content)
        if name == LATENT:
            calls[name] = with_ropewalk(cache, row_rope, row_q, row, scale=size.row**-0.5)
        elif name in OURS:
            if name == KV:
                memory = memory or [cache.keys[0], cache.values[0]]
            calls[name] = with_ropewalk(cache, rope, q, k, v)
        else:
            memory = memory or [cache.layers[0].keys, cache.layers[0].values]
            calls[name] = with_transformers(cache, fill.held + fill.room if name == STATIC else None)
    memory = memory or [x.repeat(fill.batch, 1, 1, 1) for x in (keys, values)]
    numbers = [x.flatten()[: keys.numel() * fill.batch].view(torch.int64) for x in memory]

    def read() -> float:
        start = time.perf_counter()
        for x in numbers:
            x.sum()
        return time.perf_counter() - start

    return calls, read, expected


def _attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute attention of one token of each row over the held keys and values and its own, in float64.

    q is `[batch, 1, heads, head_dim]`, k and v are `[batch, 1, kv_heads, ...]`, and keys and values, which are the same
    in every row, `[1, held, kv_heads, ...]`. The result is `[batch, 1, heads, channels of v]`.
    """
    rows = []
    for q1, k1, v1 in zip(q, k, v, strict=True):
        all_keys, all_values = (torch.cat(pair).double() for pair in ((keys[0], k1), (values[0], v1)))
        grouped = q1.double().view(k.shape[2], -1, q.shape[-1])
        weights = (torch.einsum("hgd,khd->hgk", grouped, all_keys) * q.shape[-1] ** -0.5).softmax(-1)
        rows.append(torch.einsum("hgk,khd->hgd", weights, all_values).reshape(1, q.shape[2], -1))
    return torch.stack(rows)
