"""`move_keys` on the pools of other programs, compared with keys that the oracle rotates to the new positions."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from cache_model import is_interrupted
from ropewalk import Axes, DynamicNTK, Llama3, LongRoPE, Rope, RopeError, YaRN, move_keys
from ropewalk.schemes import Linear

HEADS, DIM, BLOCKS, SIZE = 3, 8, 7, 4
SLOTS = BLOCKS * SIZE
GUARD = -7.0
ROPES = {
    "default": Rope(DIM, 1e4, "half"),
    "interleaved": Rope(DIM, 1e4, "interleaved"),
    "YaRN, partial": Rope(DIM, 1e2, "interleaved", rotary_dim=4, rotary_offset=2, scaling=YaRN(4, 32)),
    "Llama 3": Rope(DIM, 5e5, "half", scaling=Llama3(8, 1, 4, 8192)),
    "linear": Rope(DIM, 1e4, "half", rotary_dim=4, scaling=Linear(4)),
    "dynamic": Rope(DIM, 1e4, "half", scaling=DynamicNTK(2, 4096)).at_length(8192),
}
# One unit in the last place, relative to the largest number.
ROUNDING = {torch.float64: 1e-15, torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def fresh(rope: Rope, raw: np.ndarray, positions: Tensor) -> np.ndarray:
    """Rotate raw keys [tokens, heads, dim] to positions [tokens] or [axes, tokens], with the attention factor."""
    rows = positions.numpy()
    axis = None if rope.axes is None else list(rope.axes.axis)
    of_pairs = rows[:, None] if rows.ndim == 1 else rows[axis].T
    frequencies = [float(w) for w in rope.inv_freq]
    angles = np.stack(
        [
            oracle.reduced(np.broadcast_to(of_pairs, (len(of_pairs), len(frequencies)))[:, i], [w])[:, 0]
            for i, w in enumerate(frequencies)
        ],
        axis=-1,
    )
    return oracle.rotate(raw, angles[:, None], rope.pairing, rope.rotary_offset, rope.attention_factor)


def pool_of(kind: str, dtype: torch.dtype, heads: int = HEADS, dim: int = DIM) -> Tensor:
    """Return a view that is filled with guards, of shape [blocks, size, heads, dim] or [slots, heads, dim]."""
    if kind == "flat":
        return torch.full((SLOTS, heads, dim), GUARD, dtype=dtype)
    if kind == "heads first":
        return torch.full((BLOCKS, heads, SIZE, dim), GUARD, dtype=dtype).transpose(1, 2)
    if kind == "K and V":
        return torch.full((BLOCKS, SIZE, heads, 2 * dim), GUARD, dtype=dtype)[..., :dim]
    if kind == "channels apart":
        return torch.full((SLOTS, heads, 2 * dim), GUARD, dtype=dtype)[..., ::2]
    return torch.full((BLOCKS, SIZE, heads, dim), GUARD, dtype=dtype)


def by_slot(pool: Tensor) -> Tensor:
    return pool.reshape(SLOTS, *pool.shape[-2:])


def put(pool: Tensor, slots: Tensor, x: np.ndarray) -> None:
    index = (slots,) if pool.ndim == 3 else (slots // SIZE, slots % SIZE)
    pool[index] = torch.from_numpy(x).to(pool.dtype)


def random_moves(seed: int, count: int = 9, span: int = 100_000) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    slots = torch.randperm(SLOTS, generator=made)
    old, new = (torch.randint(-span, span, (count,), generator=made) for _ in range(2))
    return slots[:count], slots[count : 2 * count], old, new


@pytest.mark.parametrize("kind", ["vLLM", "flat", "heads first", "K and V", "channels apart"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", ROPES)
def test_moved_keys_equal_keys_rotated_to_the_new_positions(name: str, dtype: torch.dtype, kind: str) -> None:
    """Also: the donors, all other slots and the memory between them keep their bits, and values are copied."""
    rope, pool = ROPES[name], pool_of(kind, dtype)
    source, target, old, new = random_moves(len(name))
    raw = np.random.default_rng(0).standard_normal((len(old), HEADS, DIM))
    put(pool, source, fresh(rope, raw, old))
    values = torch.arange(SLOTS * 5, dtype=torch.int16).view(*pool.shape[:-2], 5)
    memory = pool._base if pool._base is not None else pool
    before, kept = memory.clone(), values.clone().view(SLOTS, 5)
    donors = by_slot(pool).clone()
    move_keys(pool, source, target, rope, old, new, values=values)
    wanted = fresh(rope, raw, new)
    error = (by_slot(pool)[target].double() - torch.from_numpy(wanted)).abs().max()
    # The key is rounded before and after, each by half a unit, rotation mixes two channels of the first error, and an
    # angle has an error of 2π · 2⁻⁶⁵ for each position.
    angles = 2 * np.pi * 2**-65 * float((new - old).abs().max())
    assert error <= 2 * (ROUNDING[dtype] + angles) * np.abs(wanted).max(), float(error)
    others = torch.ones(SLOTS, dtype=torch.bool).index_fill(0, target, False)
    assert torch.equal(by_slot(pool)[others], donors[others])
    assert torch.equal(values.view(SLOTS, 5)[others], kept[others])
    assert torch.equal(values.view(SLOTS, 5)[target], kept[source])
    put(pool, target, np.full((len(old), HEADS, DIM), GUARD))
    assert torch.equal(memory, before)


@pytest.mark.parametrize("positions", ["of each axis", "of text"])
def test_several_axes(positions: str) -> None:
    rope = Rope(DIM, 1e4, "half", axes=Axes.sections((2, 1, 1)))
    source, target, old, new = random_moves(3, span=3000)
    if positions == "of each axis":
        old, new = (torch.stack([x, x.flip(0), x // 3]) for x in (old, new))
    raw = np.random.default_rng(1).standard_normal((len(source), HEADS, DIM))
    pool = pool_of("vLLM", torch.float64)
    put(pool, source, fresh(rope, raw, old))
    move_keys(pool, source, target, rope, old.int(), new.int())
    assert np.abs(by_slot(pool)[target].numpy() - fresh(rope, raw, new)).max() < 1e-14


def test_latent_rows() -> None:
    """Rows of DeepSeek: 12 latent channels, which keep their bits, and 4 rotated ones at the end."""
    rope = Rope(4, 1e4, "interleaved", scaling=YaRN(4, 32))
    in_row = dataclasses.replace(rope, head_dim=16, rotary_dim=4, rotary_offset=12)
    source, target, old, new = random_moves(4, span=3000)
    raw = np.random.default_rng(2).standard_normal((len(source), 1, 16))
    rows = torch.zeros(BLOCKS, SIZE, 16, dtype=torch.float64)
    put(rows.unsqueeze(-2), source, fresh(in_row, raw, old))
    move_keys(rows.unsqueeze(-2), source, target, in_row, old, new)
    moved = rows.view(SLOTS, 16)[target].numpy()
    assert np.array_equal(moved[:, :12], raw[:, 0, :12])
    assert np.abs(moved - fresh(in_row, raw, new)[:, 0]).max() < 1e-14


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_slots_that_are_exchanged_skipped_and_read_twice(seed: int, compiled: bool) -> None:
    """A permutation in place with −1 on both sides: every token is read before one is written."""
    move = torch.compile(move_keys, fullgraph=True, backend="eager") if compiled else move_keys
    draw, rope = np.random.default_rng(seed), ROPES["default"]
    raw = draw.standard_normal((SLOTS, HEADS, DIM))
    positions = torch.from_numpy(draw.integers(0, 5000, SLOTS))
    pool = pool_of("heads first", torch.float64)
    put(pool, torch.arange(SLOTS), fresh(rope, raw, positions))
    source = torch.from_numpy(draw.integers(0, SLOTS, SLOTS))  # some donors several times
    target, new = torch.from_numpy(draw.permutation(SLOTS)), torch.from_numpy(draw.integers(0, 5000, SLOTS))
    source[draw.random(SLOTS) < 0.2], target[draw.random(SLOTS) < 0.2] = -1, -1
    before, moves = by_slot(pool).clone(), (source >= 0) & (target >= 0)
    move(pool, source, target, rope, positions[source], new)
    wanted = before.clone()
    wanted[target[moves]] = torch.from_numpy(fresh(rope, raw[source[moves]], new[moves]))
    untouched = torch.ones(SLOTS, dtype=torch.bool).index_fill(0, target[moves], False)
    assert (by_slot(pool) - wanted).abs().max() < 1e-14
    assert torch.equal(by_slot(pool)[untouched], before[untouched])
    kept = pool.clone()
    move(pool, source, torch.full_like(target, -1), rope, positions[source], new)
    assert torch.equal(pool, kept)


def test_all_layers_at_once_and_no_tokens() -> None:
    rope, pools = ROPES["default"], [torch.randn(SLOTS, HEADS, DIM) for _ in range(3)]
    alone, (source, target, old, new) = [x.clone() for x in pools], random_moves(0)
    move_keys(pools, source, target, rope, old, new)
    for pool in alone:
        move_keys(pool, source, target, rope, old, new)
        move_keys(pool, source[:0], target[:0], rope, old[:0], new[:0])
    assert all(map(torch.equal, pools, alone))


def quantized(x: np.ndarray, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys in 8 bits and the factor of each token and head."""
    largest = {torch.int8: 127, torch.float8_e4m3fn: 448, torch.float8_e5m2: 57344}[dtype]
    factor = torch.from_numpy(np.abs(x).max(-1) / largest).float()
    whole = torch.from_numpy(x) / factor.double()[..., None]
    return (whole if dtype.is_floating_point else whole.round()).clamp(-largest, largest).to(dtype), factor


# Largest error of rounding, relative to the largest number of a head: half a step of int8, half a unit of 4 or 3 bits.
STEP = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}


@pytest.mark.parametrize("kind", ["vLLM", "flat"])
@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("name", ["default", "YaRN, partial"])
def test_keys_in_8_bits(name: str, dtype: torch.dtype, kind: str) -> None:
    rope, pool = ROPES[name], pool_of(kind, torch.float32).to(dtype)
    source, target, old, new = random_moves(6)
    raw = np.random.default_rng(3).standard_normal((len(source), HEADS, DIM))
    scales = torch.full(pool.shape[:-1], GUARD)
    keys, factor = quantized(fresh(rope, raw, old), dtype)
    index = (source,) if pool.ndim == 3 else (source // SIZE, source % SIZE)
    pool[index], scales[index] = keys, factor
    donors, old_scales = by_slot(pool).float(), scales.clone().view(SLOTS, HEADS)
    move_keys(pool, source, target, rope, old, new, scales=scales)
    new_scales = scales.view(SLOTS, HEADS)
    moved = by_slot(pool)[target].double() * new_scales[target].double()[..., None]
    wanted = fresh(rope, raw, new)
    # The first rounding of two channels is rotated, at most √2 of one, and the second adds one more.
    bound = (1 + 2**0.5) * STEP[dtype] * 1.01
    largest = np.maximum(np.abs(fresh(rope, raw, old)).max(-1), np.abs(wanted).max(-1))[..., None]
    assert (np.abs(moved.numpy() - wanted) / largest).max() <= bound
    others = torch.ones(SLOTS, dtype=torch.bool).index_fill(0, target, False)
    assert torch.equal(by_slot(pool)[others].float(), donors[others])
    assert torch.equal(new_scales[others], old_scales[others])


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_many_large_keys_in_8_bits_exchange_their_slots(pairing: Literal["half", "interleaved"], dtype: Any) -> None:
    """More numbers than are rotated at once, so the last part is smaller, in slots that are donors and targets."""
    rope = Rope(250, 1e4, pairing, rotary_dim=126, rotary_offset=3)
    draw, tokens = np.random.default_rng(8), 2 * 2**19 // (64 * 250) + 3
    raw = draw.standard_normal((tokens, 64, 250))
    old, new = (torch.from_numpy(draw.integers(0, 5000, tokens)) for _ in range(2))
    pool, scales = quantized(fresh(rope, raw, old), dtype)
    target = torch.from_numpy(draw.permutation(tokens))
    move_keys(pool, torch.arange(tokens), target, rope, old, new, scales=scales)
    moved, wanted = pool[target].double() * scales[target].double()[..., None], fresh(rope, raw, new)
    largest = np.maximum(np.abs(fresh(rope, raw, old)).max(-1), np.abs(wanted).max(-1))[..., None]
    assert (np.abs(moved.numpy() - wanted) / largest).max() <= (1 + 2**0.5) * STEP[dtype] * 1.01


@pytest.mark.parametrize("shape", [(), (HEADS,)])
def test_scales_that_stay(shape: tuple[int, ...]) -> None:
    """One factor for all keys, or for each head, as vLLM has them. What leaves the range becomes its end."""
    rope, factor = Rope(2, 1e4, "half"), torch.full(shape, 0.5)
    pool = torch.tensor([240.0, 320.0]).expand(2, HEADS, 2).clone().to(torch.float8_e4m3fn)
    kept = factor.clone()
    quarter = torch.tensor([0, 1])  # in radians 0 and 1
    move_keys(pool, torch.tensor([0, 1]), torch.tensor([0, 1]), rope, torch.tensor([0, 0]), -quarter, scales=factor)
    assert torch.equal(factor, kept)
    assert torch.equal(pool[0].float(), torch.tensor([240.0, 320.0]).expand(HEADS, 2))
    # 240 cos 1 + 320 sin 1 = 398.9 is nearest to 384 + 16, and 320 cos 1 − 240 sin 1 = −29.06 to −28 or −30.
    assert torch.equal(pool[1].float(), torch.tensor([384.0, -30.0]).expand(HEADS, 2))
    large = torch.full((1, HEADS, 2), 440.0).to(torch.float8_e4m3fn)
    first = torch.tensor([0])
    move_keys(large, first, first, rope, first, first - 1, scales=factor)  # 448 (cos 1 + sin 1) = 619
    assert (large.float()[..., 0] == 448).all()


def test_a_zero_key_in_8_bits_stays_zero() -> None:
    pool, scales, first = torch.zeros(1, 1, DIM, dtype=torch.int8), torch.zeros(1, 1), torch.tensor([0])
    move_keys(pool, first, first, ROPES["default"], first, first + 5, scales=scales)
    assert not pool.any()
    assert scales.isfinite().all()


def test_other_frequencies_through_position_0() -> None:
    """No rope rotates position 0, so two moves take keys from one set of frequencies to another."""
    rope = Rope(DIM, 1e4, "half", scaling=LongRoPE([1.0] * 4, [4.0] * 4, 64, 4.0, attention_factor=1.0))
    short, long = rope.at_length(64), rope.at_length(256)
    source, target, old, new = random_moves(7, span=3000)
    raw = np.random.default_rng(4).standard_normal((len(source), HEADS, DIM))
    pool = pool_of("flat", torch.float64)
    put(pool, source, fresh(short, raw, old))
    move_keys(pool, source, target, short, old, torch.zeros_like(old))
    move_keys(pool, target, target, long, torch.zeros_like(old), new)
    assert np.abs(pool[target].numpy() - fresh(long, raw, new)).max() < 1e-14
    with pytest.raises(RopeError, match="the length must be resolved"):
        move_keys(pool, source, target, rope, old, new)


def test_an_interruption_says_where_it_came() -> None:
    """The tensors before the one that the note names have moved, and those after it have not."""
    slots, rope, named = torch.arange(5), ROPES["default"], set()
    raw = np.random.default_rng(6).standard_normal((3, 5, HEADS, DIM))
    keys, values = list(torch.from_numpy(raw)), [torch.randn(5, 2), torch.randn(5)]
    wanted = [fresh(rope, x[::-1], torch.full((5,), 9)) for x in raw] + [x.flip(0).numpy() for x in values]
    for at in itertools.count(1, 7):
        new = [x.clone() for x in (*keys, *values)]
        e = is_interrupted(
            lambda: move_keys(new[:3], slots, slots.flip(0), rope, slots * 0, slots * 0 + 9, values=new[3:]),  # noqa: B023
            at,
        )
        if e is None:
            break
        moved = [np.abs(x.numpy() - y).max() < 1e-14 for x, y in zip(new, wanted, strict=True)]
        assert all(x or torch.equal(y, z) for x, y, z in zip(moved, new, (*keys, *values), strict=True))
        name = "".join(getattr(e, "__notes__", ())).partition("stopped it at ")[2].partition(",")[0]
        number = ["keys[0]", "keys[1]", "keys[2]", "values[0]", "values[1]"].index(name) if name else 0
        assert moved in ([i < number for i in range(5)], [i <= number for i in range(5)])
        named.add(name)
    assert len(named) == 6


POOL, FEW, ZERO = torch.zeros(4, 2, DIM), torch.tensor([0, 1]), torch.tensor([0])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([], FEW, FEW, ROPES["default"], FEW, FEW), {}, "keys, values and scales must be tensors"),
        ((POOL, FEW, FEW, "rope", FEW, FEW), {}, "rope a Rope"),
        ((POOL, FEW, FEW, Rope(16, 1e4, "half"), FEW, FEW), {}, "with the head_dim of rope, 16"),
        ((POOL[0], FEW, FEW, ROPES["default"], FEW, FEW), {}, "keys must be .blocks"),
        ((POOL.to(torch.int8), FEW, FEW, ROPES["default"], FEW, FEW), {}, "int8 without scales"),
        ((POOL, FEW, FEW, ROPES["default"], FEW, FEW), {"scales": torch.ones(())}, "float32 with scales"),
        ((POOL.to(torch.int8), FEW, FEW, ROPES["default"], FEW, FEW), {"scales": torch.ones(3)}, "and scales must be"),
        (([POOL, POOL[:2]], FEW, FEW, ROPES["default"], FEW, FEW), {}, "all keys must have one shape"),
        ((POOL, FEW, FEW, ROPES["default"], FEW, FEW), {"values": POOL[:2]}, "values must begin with their axes"),
        ((POOL[:, :1].expand(4, 2, DIM), FEW, FEW, ROPES["default"], FEW, FEW), {}, "memory of its own"),
        ((POOL.as_strided((4, 2, DIM), (8, 4, 1)), FEW, FEW, ROPES["default"], FEW, FEW), {}, "memory of its own"),
        ((POOL.clone().requires_grad_(), FEW, FEW, ROPES["default"], FEW, FEW), {}, "gradients cannot pass"),
        ((POOL, FEW.int(), FEW, ROPES["default"], FEW, FEW), {}, "slots_from and slots_to must be int64"),
        ((POOL, FEW, FEW, ROPES["default"], FEW, ZERO), {}, "slots_from and slots_to must be int64"),
        ((POOL, FEW, FEW, ROPES["default"], FEW.float(), FEW), {}, "old and new integers"),
        ((POOL, FEW, FEW + 3, ROPES["default"], FEW, FEW), {}, "from 0 to 3, the slots of the pool, got 4"),
        ((POOL, FEW - 2, FEW, ROPES["default"], FEW, FEW), {}, "got -2. .* -1 in a table is no block"),
        ((POOL, FEW, FEW * 0, ROPES["default"], FEW, FEW), {}, "no two tokens may share a slot"),
        ((POOL, FEW, FEW, ROPES["default"], FEW, FEW + 2**31), {}, r"within ±2\*\*31"),
    ],
)
def test_refusals(arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeError, match=message):
        move_keys(*arguments, **options)
    assert not POOL.any()


MOVED = json.loads((Path(__file__).parents[1] / "golden" / "moved_keys.json").read_text())["cases"]


@pytest.mark.parametrize("case", MOVED, ids=[case["id"] for case in MOVED])
def test_keys_that_lmcache_moved(case: dict[str, Any]) -> None:
    """As its FusedRope: keys [tokens, heads · head_dim], moved in place."""
    tokens, heads, dim = case["k_shape"]
    keys = torch.from_numpy(oracle.golden_k(case["k_shape"])).view(tokens, heads * dim)
    rope, every = Rope(dim, case["base"], case["pairing"]), torch.arange(tokens)
    old, new = torch.tensor(case["old"]), torch.tensor(case["new"])
    move_keys(keys.view(tokens, heads, dim), every, every, rope, old, new)
    # LMCache rotates back and forth by float32 angles, products of a position and a frequency.
    angles = (old + new)[:, None] * torch.from_numpy(rope.inv_freq) * 2**-23
    bound = (4e-7 + angles.amax(-1))[:, None, None] * 2**0.5
    assert ((keys.view(tokens, heads, dim) - torch.tensor(case["moved"]).view(tokens, heads, dim)).abs() <= bound).all()
