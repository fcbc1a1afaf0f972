"""A model of two layers with a KVCache, and the same model written out in float64, for the tests of the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attention_oracle as written_out
import oracle
from attention_oracle import Rotary
from ropewalk import KVCache, Rope, RotaryAttention, SelfExtend, YaRN

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 12, 4, 2, 6, 2
YARN_FACTOR = 0.1 * 1.3862943611198906 + 1
ROPES: dict[str, tuple[Rope | None, Rotary | None]] = {
    "default": (Rope(HEAD_DIM, 1e4, "half"), Rotary(oracle.inv_freq(1e4, HEAD_DIM), "half")),
    "YaRN, partial": (
        Rope(HEAD_DIM, 1e2, "interleaved", rotary_dim=4, rotary_offset=2, scaling=YaRN(4, 32)),
        Rotary(oracle.yarn(1e2, 4, 4, 32), "interleaved", offset=2, factor=YARN_FACTOR),
    ),
    "none": (None, None),
}
# Measured: 2e-15 in values of size 5, and with five shifts 5e-15.
EXACT: dict[str, Any] = {"rtol": 0, "atol": 3e-14}


def model() -> list[RotaryAttention]:
    torch.manual_seed(0)
    layers = [RotaryAttention(HIDDEN, HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM).double() for _ in range(LAYERS)]
    for layer in layers:
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return layers


MODEL = model()


def cache_of(batch: int, **size: Any) -> KVCache:
    return KVCache(LAYERS, batch, KV_HEADS, HEAD_DIM, dtype=torch.float64, **size)


@torch.no_grad()
def run(cache: KVCache, x: Tensor, rope: Rope | SelfExtend | None, **options: Any) -> Tensor:
    """Run one forward pass of the new tokens x."""
    step = cache.step(x.shape[1], **options)
    if rope is None:
        rotation = None
    elif isinstance(rope, SelfExtend):
        rotation = rope.at(step.positions, step.key_positions, dtype=torch.float64)
    else:
        rotation = step.rotation(rope, dtype=torch.float64)
    for i, layer in enumerate(MODEL):
        x = x + layer(x, rotation, cache=step.layer(i))
    return x


@torch.no_grad()
def run_whole_row(x: Tensor, rotary: Rotary | None, at: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
    """Compute the model for one whole row [seq, hidden], without ropewalk."""
    x = x[None]
    for layer in MODEL:
        weights = dict(layer.named_parameters())
        x = x + written_out.attention(x, weights, heads=HEADS, kv_heads=KV_HEADS, rotary=rotary, at=at, seen=seen)
    return x[0]


def distances(seq: int, size: dict[str, int], positions: Tensor | None = None) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return positions and mask of each pair in a cache of this size. Default positions are 0, 1, 2, …"""
    if "sinks" in size:
        assert positions is None
        return written_out.streaming(seq, size["window"], size["sinks"])
    window = size.get("window", seq)
    seen = [[0 <= i - j < window for j in range(seq)] for i in range(seq)]
    return written_out.pairs(torch.arange(seq) if positions is None else positions), torch.tensor(seen).view(seq, seq)


def check_rows(
    outputs: list[Tensor], inputs: list[Tensor], real: list[Tensor], rotary: Rotary | None, how: Any
) -> None:
    """Concatenate the outputs of all steps, and compare the real tokens of each row with one pass over the row.

    how(row, tokens) returns positions and mask of that pass.
    """
    out, x, kept = (torch.cat(pieces, dim=1) for pieces in (outputs, inputs, real))
    assert out.isfinite().all()  # including padding, because NaN would spread
    for row in range(x.shape[0]):
        tokens = x[row, kept[row]]
        if len(tokens):
            torch.testing.assert_close(
                out[row, kept[row]], run_whole_row(tokens, rotary, *how(row, len(tokens))), **EXACT
            )


def state(cache: KVCache) -> list[Tensor]:
    return [x.clone() for x in (*cache.keys, *cache.values, cache.length, cache.position, cache._key_positions)]


def unchanged(cache: KVCache, before: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(before, state(cache), strict=True))


class StoppedError(Exception):
    pass


@torch.no_grad()
def forward_until(cache: KVCache, x: Tensor, after: int, **options: Any) -> None:
    """Run a forward pass that raises once `after` layers have stored their keys."""
    rope, _ = ROPES["default"]
    assert rope is not None
    step = cache.step(x.shape[1], **options)
    rotation = step.rotation(rope, dtype=torch.float64)
    for i in range(after):
        x = x + MODEL[i](x, rotation, cache=step.layer(i))
    raise StoppedError


def stopped(cache: KVCache, x: Tensor, after: int, **options: Any) -> None:
    with pytest.raises(StoppedError):
        forward_until(cache, x, after, **options)
