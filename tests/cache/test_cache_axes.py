"""KVCache with several positions per token: several steps equal one pass, and generation continues after images."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import attention_oracle as written_out
import oracle
from cache_model import EXACT, HEAD_DIM, HIDDEN, MODEL, cache_of, run, run_whole_row
from ropewalk import Axes, KVCache, LearnedRope, Rope, RopeError, SelfExtend

AXES = Axes.sections((1, 1, 1))
ROPE = Rope(HEAD_DIM, 1e2, "half", axes=AXES)


@dataclass(frozen=True)
class OfTokens(written_out.Rotary):
    """Rotates token i to its positions in `places`, [axes, tokens]. Each pair uses the position on its axis."""

    places: Tensor = None  # type: ignore[assignment]

    def angles(self, positions: Tensor) -> Tensor:
        speeds = torch.tensor([float(w) for w in self.speeds], dtype=torch.float64)
        return self.places[list(AXES.axis)].T[positions].double() * speeds


def text(start: int, count: int) -> list[tuple[int, int, int]]:
    return [(p, p, p) for p in range(start, start + count)]


def image(start: int, height: int, width: int) -> list[tuple[int, int, int]]:
    return [(start, start + row, start + column) for row in range(height) for column in range(width)]


# A prompt of text, an image, text, and an image of another shape: time, row and column of each token.
FIRST = text(0, 3) + image(3, 2, 4) + text(7, 2) + image(9, 3, 1)
# Another prompt of the same length, which begins with an image.
SECOND = image(0, 4, 2) + text(4, 8)
PROMPTS = torch.tensor([FIRST, SECOND]).permute(2, 0, 1)  # [axes, batch, seq]


def assert_equals_one_pass(
    outputs: list[Tensor], inputs: list[Tensor], places: Tensor, window: int | None = None
) -> None:
    out, x = torch.cat(outputs, 1), torch.cat(inputs, 1)
    seq = x.shape[1]
    seen = torch.tensor([[0 <= i - j < (window or seq) for j in range(seq)] for i in range(seq)])
    for row in range(x.shape[0]):
        rotary = OfTokens(oracle.inv_freq(1e2, HEAD_DIM), "half", places=places[:, row])
        whole = run_whole_row(x[row], rotary, written_out.pairs(torch.arange(seq)), seen)
        torch.testing.assert_close(out[row], whole, **EXACT)


@pytest.mark.parametrize("size", [{"capacity": 40}, {"window": 4}], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_several_steps_equal_one_pass_and_generation_continues(seed: int, size: dict[str, int]) -> None:
    draw, cache = random.Random(seed), cache_of(2, **size)
    torch.manual_seed(seed)
    outputs, inputs, places = [], [], PROMPTS
    done = 0
    while done < 16:
        seq = min(draw.choice([1, 2, 5, 16]), 16 - done)
        x = torch.randn(2, seq, HIDDEN, dtype=torch.float64)
        outputs.append(run(cache, x, ROPE, positions=PROMPTS[..., done : done + seq]))
        inputs.append(x)
        done += seq
    assert cache.position.tolist() == [12, 12]  # after the largest position on any axis
    if seed % 2:
        delta = torch.tensor([-5, 700])
        cache.shift(ROPE, delta if seed % 4 == 1 else 33)
        places = places + (delta[:, None] if seed % 4 == 1 else 33)
    following = cache.position[:, None].clone()
    for seq in (1, 3, 1):  # text has the same position on every axis, which is the default
        x = torch.randn(2, seq, HIDDEN, dtype=torch.float64)
        outputs.append(run(cache, x, ROPE))
        inputs.append(x)
        new = following + torch.arange(seq)
        places, following = torch.cat((places, new.expand(3, -1, -1)), -1), following + seq
    assert_equals_one_pass(outputs, inputs, places, size.get("window"))


def test_padding_may_have_any_positions() -> None:
    cache, real = cache_of(2, capacity=20), torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0]])
    places = torch.randint(0, 50, (3, 2, 4))
    x = torch.randn(2, 4, HIDDEN, dtype=torch.float64)
    out = run(cache, x, ROPE, positions=places, attention_mask=real)
    for row, tokens in enumerate(real.bool()):
        assert_equals_one_pass(
            [out[row : row + 1, tokens]], [x[row : row + 1, tokens]], places[:, row : row + 1, tokens]
        )
        assert cache.position[row] == places[:, row, tokens].max() + 1


def test_attributes_of_a_step() -> None:
    step = cache_of(2, capacity=20).step(16, positions=PROMPTS)
    assert torch.equal(step.positions, PROMPTS)
    assert torch.equal(step.key_positions[:, :16], PROMPTS.amax(0))
    assert torch.equal(step.order[0], torch.arange(16))
    assert torch.equal(step.rotation(ROPE).cos, ROPE.at(PROMPTS).cos)


def test_sinks_count_text() -> None:
    """For text, a rope with axes gives the result of a rope with one axis."""
    torch.manual_seed(0)
    one, several = (cache_of(2, window=3, sinks=2) for _ in range(2))
    plain = Rope(HEAD_DIM, 1e2, "half")
    for seq in (4, 1, 5, 1):
        x = torch.randn(2, seq, HIDDEN, dtype=torch.float64)
        assert torch.equal(run(several, x, ROPE), run(one, x, plain))


@pytest.mark.parametrize("shape", [(3, 2, 3), (3, 1, 4), (2, 4, 3), (1, 3, 2, 4), ()])
def test_positions_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        RopeError,
        match=r"positions must be an int64, float32 or float64 tensor \[axes, batch, seq\], \[batch, seq\] = \[2, 4",
    ):
        cache_of(2, capacity=20).step(4, positions=torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_positions_between_integers(dtype: torch.dtype) -> None:
    """Generated tokens continue after the largest position, with its fraction, also after integers and a shift."""
    torch.manual_seed(0)
    places, cache = (PROMPTS + 0.375).to(dtype), cache_of(2, capacity=30)
    inputs = [torch.randn(2, seq, HIDDEN, dtype=torch.float64) for seq in (5, 10, 1, 2, 1)]
    outputs, done = [], 0
    for x in inputs[:3]:
        outputs.append(run(cache, x, ROPE, positions=places[..., done : done + x.shape[1]]))
        done += x.shape[1]
    assert cache.position.tolist() == [12.375, 12.375]
    cache.shift(ROPE, torch.tensor([-5, 7]))
    places = places + torch.tensor([[-5], [7]])
    integers = torch.tensor([[20, 21], [3, 2]])
    outputs.append(run(cache, inputs[3], ROPE, positions=integers.expand(3, 2, 2)))
    assert cache.position.tolist() == [22, 4]
    outputs.append(run(cache, inputs[4], ROPE))
    places = torch.cat((places, integers.expand(3, 2, 2), torch.tensor([[22], [4]]).expand(3, 2, 1)), dim=-1)
    assert_equals_one_pass(outputs, inputs, places)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.0**32])
def test_positions_out_of_range(value: float) -> None:
    with pytest.raises(RopeError, match=r"every position must stay within ±2\*\*31"):
        cache_of(2, capacity=20).step(1, positions=torch.full((3, 2, 1), value))


@pytest.mark.parametrize("delta", [(4, -2, 0), torch.tensor([[4, 0], [-2, 9], [0, 1]])], ids=["tuple", "tensor"])
def test_shift_by_a_distance_on_each_axis(delta: Any) -> None:
    torch.manual_seed(0)
    cache, x, last = cache_of(2, capacity=20), *(torch.randn(2, n, HIDDEN, dtype=torch.float64) for n in (16, 1))
    before = run(cache, x, ROPE, positions=PROMPTS)
    key_positions = cache._key_positions[:, :16].clone()
    cache.shift(ROPE, delta)
    by = delta[..., None] if isinstance(delta, Tensor) else torch.tensor(delta)[:, None, None].expand(3, 2, 1)
    assert cache.position.tolist() == (12 + by.amax(0)[:, 0]).tolist()
    assert torch.equal(cache._key_positions[:, :16], key_positions + by.amax(0))
    after = run(cache, last, ROPE)
    places = torch.cat((PROMPTS + by, (12 + by.amax(0)).expand(3, 2, 1)), dim=-1)
    assert_equals_one_pass([before, after], [x, last], places)


@pytest.mark.parametrize(
    ("delta", "message"),
    [
        ((1, 2), "delta of a rope with 3 axes must be a tuple of 3 ints"),
        ((1, 2, 0.5), "KVCache.shift: delta must be an integer"),
        (torch.zeros(2, 2, dtype=torch.int64), "Rope.shift: delta"),
        (torch.zeros(3, 3, dtype=torch.int64), r"KVCache.shift: delta must be an int64 tensor \[batch\] = \[2\]"),
        (torch.zeros(0, 2, dtype=torch.int64), r"KVCache.shift: delta must be an int64 tensor"),
    ],
    ids=str,
)
def test_wrong_distances(delta: Any, message: str) -> None:
    cache = cache_of(2, capacity=20)
    run(cache, torch.randn(2, 16, HIDDEN, dtype=torch.float64), ROPE, positions=PROMPTS)
    before = [cache.position.clone(), cache._key_positions.clone(), cache.keys[0].clone()]
    with pytest.raises(RopeError, match=message):
        cache.shift(ROPE, delta)
    assert all(map(torch.equal, before, [cache.position, cache._key_positions, cache.keys[0]]))


def test_a_rope_of_another_number_of_axes() -> None:
    step = cache_of(2, capacity=20).step(16, positions=PROMPTS)
    with pytest.raises(RopeError, match=r"must have shape \[2, seq\] or \[2, batch, seq\], got shape \(3, 2, 16\)"):
        step.rotation(Rope(HEAD_DIM, 1e2, "half", axes=Axes.sections((1, 2))))
    with pytest.raises(RopeError, match="build the Rope with axes"):
        step.rotation(Rope(HEAD_DIM, 1e2, "half"))


@torch.no_grad()
def test_a_step_rotates_by_a_rope() -> None:
    step = cache_of(2, capacity=20).step(16)
    learned = LearnedRope.from_rope(ROPE)
    for rope in (learned, SelfExtend(Rope(HEAD_DIM, 1e2, "half"), group=4, window=8), None):
        with pytest.raises(
            RopeError, match=r"CacheStep\.rotation: rope must be a Rope, got .*learned\(step\.positions\)"
        ):
            step.rotation(rope)  # type: ignore[arg-type]
    rotation, x = learned(step.positions.expand(3, -1, -1), dtype=torch.float64), torch.randn(2, 16, HIDDEN).double()
    ours = MODEL[0](x, rotation, cache=step.layer(0))
    theirs = MODEL[0](x, step.rotation(ROPE, dtype=torch.float64), cache=cache_of(2, capacity=20).step(16).layer(0))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_rows_are_not_mistaken_for_axes() -> None:
    """Positions of three rows of text could be read as three axes. The rotation then does not match the step."""
    step = cache_of(3, capacity=20).step(4)
    wrong = ROPE.at(step.positions)
    with pytest.raises(RopeError, match=r"must be computed for the positions of the step, \[batch, seq\] = \[3, 4\]"):
        MODEL[0](torch.randn(3, 4, HIDDEN, dtype=torch.float64), wrong, cache=step.layer(0))


def test_self_extend_is_for_text() -> None:
    with pytest.raises(RopeError, match="SelfExtend: rope must have one axis"):
        SelfExtend(ROPE, group=4, window=8)


@torch.no_grad()
def test_compiles_once_for_all_tokens() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    eager, cache = cache_of(2, capacity=20), cache_of(2, capacity=20)

    def decode(cache: KVCache, x: Tensor, **options: Any) -> Tensor:
        step = cache.step(1, **options)
        rotation = step.rotation(ROPE, dtype=torch.float64)
        for i, layer in enumerate(MODEL):
            x = x + layer(x, rotation, cache=step.layer(i))
        return x

    compiled = torch.compile(decode, backend=counter, fullgraph=True)
    for i in range(4):
        x, at = torch.randn(2, 1, HIDDEN, dtype=torch.float64), PROMPTS[..., i : i + 1].contiguous()
        torch.testing.assert_close(compiled(cache, x, positions=at), decode(eager, x, positions=at), **EXACT)
    assert counter.frame_count == 1
    assert torch.equal(cache.position, eager.position)
