"""KVCache: in whatever pieces tokens come, each sees what it would in one piece, which is written out in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import attention_oracle as written_out
import oracle
from attention_oracle import Turn
from ropewalk import DynamicNTK, KVCache, Rope, RopeError, RotaryAttention, SelfExtend, YaRN

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 12, 4, 2, 6, 2
YARN_FACTOR = 0.1 * 1.3862943611198906 + 1
ROPES: dict[str, tuple[Rope | None, Turn | None]] = {
    "default": (Rope(HEAD_DIM, 1e4, "half"), Turn(oracle.inv_freq(1e4, HEAD_DIM), "half")),
    "YaRN, partial": (
        Rope(HEAD_DIM, 1e2, "interleaved", rotary_dim=4, rotary_offset=2, scaling=YaRN(4, 32)),
        Turn(oracle.yarn(1e2, 4, 4, 32), "interleaved", offset=2, factor=YARN_FACTOR),
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
    """One forward pass of the new tokens x."""
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
def in_one_piece(x: Tensor, turn: Turn | None, at: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
    """The same of one row [seq, hidden], without ropewalk."""
    x = x[None]
    for layer in MODEL:
        weights = dict(layer.named_parameters())
        x = x + written_out.attention(x, weights, heads=HEADS, kv_heads=KV_HEADS, turn=turn, at=at, seen=seen)
    return x[0]


def distances(seq: int, size: dict[str, int]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Positions and visibility of each pair in a cache of such a size."""
    if "capacity" in size:
        return written_out.pairs(torch.arange(seq)), written_out.causal(seq)
    if "sinks" in size:
        return written_out.streaming(seq, size["window"], size["sinks"])
    seen = [[0 <= i - j < size["window"] for j in range(seq)] for i in range(seq)]
    return written_out.pairs(torch.arange(seq)), torch.tensor(seen)


def check_rows(outputs: list[Tensor], inputs: list[Tensor], real: list[Tensor], turn: Turn | None, how: Any) -> None:
    """Each row's real tokens, put together from the pieces, against the row in one piece."""
    out, x, kept = (torch.cat(pieces, dim=1) for pieces in (outputs, inputs, real))
    assert out.isfinite().all()  # padding too: nan would spread
    for row in range(x.shape[0]):
        tokens = x[row, kept[row]]
        if len(tokens):
            torch.testing.assert_close(out[row, kept[row]], in_one_piece(tokens, turn, *how(len(tokens))), **EXACT)


SIZES = st.one_of(
    st.just({"capacity": 30}),
    st.builds(lambda w: {"window": w}, st.integers(1, 8)),
    st.builds(lambda w, s: {"window": w, "sinks": s}, st.integers(1, 8), st.integers(1, 4)),
)


@given(data=st.data(), batch=st.integers(1, 3), size=SIZES, name=st.sampled_from(sorted(ROPES)))
def test_pieces_equal_the_whole(data: st.DataObject, batch: int, size: dict[str, int], name: str) -> None:
    """prefill(n) = prefill(k) + decode(n − k): rows of their own lengths, padding anywhere, shifts in between."""
    rope, turn = ROPES[name]
    torch.manual_seed(data.draw(st.integers(0, 99)))
    cache = cache_of(batch, **size)
    outputs, inputs, real = [], [], []
    lengths = data.draw(st.lists(st.sampled_from([1, 1, 1, 2, 3, 9]), min_size=1, max_size=5))
    for seq in lengths:
        x = torch.randn(batch, seq, HIDDEN, dtype=torch.float64)
        mask = torch.ones(batch, seq, dtype=torch.bool)
        if data.draw(st.booleans()):
            mask = torch.rand(batch, seq) < 0.6
        if int((cache.length + mask.sum(1)).max()) > size.get("capacity", 99):
            break
        outputs.append(run(cache, x, rope, attention_mask=None if mask.all() else mask.long()))
        inputs.append(x)
        real.append(mask)
        shift = data.draw(st.sampled_from(["none", "all", "each"]))
        if shift != "none":
            delta = torch.randint(-300, 300, (batch,))
            cache.shift([rope] * LAYERS if rope is None else rope, int(delta[0]) if shift == "all" else delta)
    check_rows(outputs, inputs, real, turn, lambda seq: distances(seq, size))
    assert torch.equal(cache.length, torch.cat(real, dim=1).sum(1))


@given(data=st.data(), batch=st.integers(1, 3), group=st.integers(1, 4), window=st.integers(0, 6))
@settings(max_examples=40)
def test_pieces_equal_the_whole_with_self_extend(data: st.DataObject, batch: int, group: int, window: int) -> None:
    rope, turn = ROPES["YaRN, partial"]
    assert rope is not None
    torch.manual_seed(data.draw(st.integers(0, 99)))
    cache = cache_of(batch, capacity=20)
    outputs, inputs, real = [], [], []
    for seq in data.draw(st.lists(st.sampled_from([1, 1, 2, 6]), min_size=1, max_size=3)):
        inputs.append(torch.randn(batch, seq, HIDDEN, dtype=torch.float64))
        real.append(torch.rand(batch, seq) < 0.7)
        outputs.append(run(cache, inputs[-1], SelfExtend(rope, group, window), attention_mask=real[-1]))
    check_rows(
        outputs,
        inputs,
        real,
        turn,
        lambda seq: (written_out.self_extend(range(seq), group, window), written_out.causal(seq)),
    )


@given(data=st.data(), batch=st.integers(1, 3))
@settings(max_examples=40)
def test_a_rejected_draft_is_forgotten(data: st.DataObject, batch: int) -> None:
    """Tokens are appended at any position: those after it, drafts that were not accepted, are gone."""
    rope, turn = ROPES["YaRN, partial"]
    torch.manual_seed(data.draw(st.integers(0, 99)))
    cache = cache_of(batch, capacity=9)
    x = torch.randn(batch, 5, HIDDEN, dtype=torch.float64)
    run(cache, x, rope)
    assert rope is not None
    cache.shift(rope, -70)
    accepted = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=batch, max_size=batch)))
    more = torch.randn(batch, 4, HIDDEN, dtype=torch.float64)
    out = torch.cat([run(cache, more[:, :3], rope, at=accepted - 70), run(cache, more[:, 3:], rope)], dim=1)
    assert torch.equal(cache.length, accepted + 4)
    for row in range(batch):
        tokens = torch.cat([x[row, : accepted[row]], more[row]])
        wanted = in_one_piece(tokens, turn, *distances(len(tokens), {"capacity": 9}))
        torch.testing.assert_close(out[row], wanted[-4:], **EXACT)


def test_positions_may_have_gaps() -> None:
    rope, turn = ROPES["default"]
    cache, x = cache_of(1, capacity=5), torch.randn(1, 4, HIDDEN, dtype=torch.float64)
    run(cache, torch.randn(1, 5, HIDDEN, dtype=torch.float64), rope)  # a draft, all of it rejected
    at = torch.tensor([0]), torch.tensor([50])
    out = torch.cat([run(cache, x[:, :2], rope, at=at[0]), run(cache, x[:, 2:], rope, at=at[1])], dim=1)
    wanted = in_one_piece(x[0], turn, written_out.pairs(torch.tensor([0, 1, 50, 51])), written_out.causal(4))
    torch.testing.assert_close(out[0], wanted, **EXACT)
    assert cache.position.tolist() == [52]
    assert cache.length.tolist() == [4]


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "thd"])
def test_keys_of_every_layout(layout: str) -> None:
    """Turned in any layout and brought to the cache's order, in pieces: the keys of one piece, written out."""
    rope, turn = ROPES["YaRN, partial"]
    assert rope is not None
    assert turn is not None
    batch = 1 if layout == "thd" else 2
    cache, k = cache_of(batch, capacity=5), torch.randn(batch, 5, KV_HEADS, HEAD_DIM, dtype=torch.float64)
    order = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}
    for start, stop in ((0, 3), (3, 4), (4, 5)):
        step, piece = cache.step(stop - start), k[:, start:stop]
        at = step.positions[0]
        if layout == "thd":
            turned = rope.at(at, dtype=torch.float64)(piece[0], layout="thd")[None]
        else:
            turned = rope.at(at, dtype=torch.float64)(piece.permute(order[layout]), layout=layout)
            turned = turned.permute(order[layout])  # each of these orders undoes itself
        keys, values = step.layer(0).append(turned, piece)
    angles = np.arange(5)[:, None, None] * np.array([float(w) for w in turn.speeds])
    wanted = oracle.rotate(k.numpy(), angles, turn.pairing, turn.offset, turn.factor)
    np.testing.assert_allclose(keys.numpy(), wanted, rtol=0, atol=1e-14)
    assert torch.equal(values, k)


@pytest.mark.parametrize("delta", [-7, torch.tensor([40, -3])])
def test_shift_turns_keys_and_nothing_else(delta: int | Tensor) -> None:
    """The attention factor stays the one it was, in every key, in the cells that move by 0 and in the layers alike."""
    rope, turn = ROPES["YaRN, partial"]
    assert rope is not None
    assert turn is not None
    cache, k = cache_of(2, capacity=3), torch.randn(2, 3, KV_HEADS, HEAD_DIM, dtype=torch.float64)
    step = cache.step(3)
    rotation = rope.at(step.positions, dtype=torch.float64)
    for index in range(LAYERS):
        step.layer(index).append(rotation(k, layout="bshd"), k)
    cache.shift([rope, None], delta)
    moved = (torch.arange(3) + (delta[:, None] if isinstance(delta, Tensor) else delta)).expand(2, 3).numpy()
    speeds = np.array([float(w) for w in turn.speeds])
    for index, places in ((0, moved), (1, np.arange(3)[None].repeat(2, 0))):
        wanted = oracle.rotate(k.numpy(), places[..., None, None] * speeds, turn.pairing, turn.offset, turn.factor)
        np.testing.assert_allclose(cache.keys[index][:, :3].numpy(), wanted, rtol=0, atol=1e-14)
        assert torch.equal(cache.values[index][:, :3], k)
    following = cache.step(1, at=None, attention_mask=torch.zeros(2, 1, dtype=torch.bool))
    assert torch.equal(following.positions[:, 0], torch.as_tensor(moved[:, -1] + 1))
    assert torch.equal(following.key_positions, torch.as_tensor(moved))


def test_what_a_step_says() -> None:
    cache = KVCache(1, 2, 1, 2, window=3, sinks=1)
    padded = cache.step(2, attention_mask=torch.tensor([[0, 1], [1, 1]]))
    assert padded.mask[0, 0, 0].all()  # padding sees everything: in some kernels a query that sees nothing gives nan
    step = cache.step(3)
    assert step.positions.tolist() == [[1, 2, 3], [2, 3, 4]]
    # What was cached, slot by slot, then the new tokens.
    none = 2**62
    assert step.key_positions.tolist() == [[0, none, none, none, 1, 2, 3], [0, 1, none, none, 2, 3, 4]]
    assert step.mask[1, 0].int().tolist() == [[1, 1, 0, 0, 1, 0, 0], [1, 1, 0, 0, 1, 1, 0], [1, 0, 0, 0, 1, 1, 1]]
    one = cache.step(1)
    assert one.key_positions.tolist() == [[0, 4, 2, 3], [0, 4, 5, 3]]
    assert one.mask[:, 0, 0].all()


def test_no_slot_is_written_twice() -> None:
    """Which of two writes to one place is the last is not defined on a GPU."""
    step = KVCache(1, 2, 1, 2, window=3, sinks=2).step(9, attention_mask=torch.tensor([[1] * 9, [1] * 7 + [0] * 2]))
    for slots in step._slot.tolist():
        assert sorted(slot for slot in slots if slot < 5) == [0, 1, 2, 3, 4]


def test_reset() -> None:
    rope, _ = ROPES["default"]
    cache, x = cache_of(2, window=3), torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    first = run(cache, x, rope)
    assert torch.equal(cache.position, torch.tensor([5, 5]))
    cache.reset()
    assert torch.equal(run(cache, x, rope), first)


def test_in_inference_mode() -> None:
    rope, _ = ROPES["YaRN, partial"]
    assert rope is not None
    one, other, x = cache_of(2, window=3, sinks=1), cache_of(2, window=3, sinks=1), torch.randn(2, 5, HIDDEN).double()
    outputs = []
    for cache in (one, other):
        with torch.inference_mode(cache is one):
            run(cache, x[:, :4], rope)
            cache.shift(rope, 9)
            outputs.append(run(cache, x[:, 4:], rope))
    assert torch.equal(*outputs)


def test_a_mask_is_joined() -> None:
    """Its keys are those of key_positions: here the token at 1 is hidden from the second piece."""
    rope, turn = ROPES["default"]
    assert rope is not None
    cache, x = KVCache(1, 1, KV_HEADS, HEAD_DIM, capacity=6, dtype=torch.float64), torch.randn(1, 4, HIDDEN).double()
    with torch.no_grad():
        step = cache.step(2)
        MODEL[0](x[:, :2], step.rotation(rope, dtype=torch.float64), cache=step.layer(0))
        step = cache.step(2)
        rotation, hidden = step.rotation(rope, dtype=torch.float64), step.key_positions[:, None, None, :] != 1
        out = MODEL[0](x[:, 2:], rotation, mask=hidden, cache=step.layer(0))
        seen = written_out.causal(4)
        seen[2:, 1] = False
        weights, at = dict(MODEL[0].named_parameters()), written_out.pairs(torch.arange(4))
        how: dict[str, Any] = {"heads": HEADS, "kv_heads": KV_HEADS, "turn": turn, "at": at, "seen": seen}
        torch.testing.assert_close(out, written_out.attention(x, weights, **how)[:, 2:], **EXACT)


@pytest.mark.parametrize("size", [{"capacity": 12}, {"window": 3, "sinks": 2}])
def test_compiles_once_for_all_tokens(size: dict[str, int]) -> None:
    rope, _ = ROPES["YaRN, partial"]
    x = torch.randn(2, 10, HIDDEN, dtype=torch.float64)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    plain, traced = cache_of(2, **size), cache_of(2, **size)
    for start, stop in ((0, 5), *((i, i + 1) for i in range(5, 10))):
        wanted = run(plain, x[:, start:stop], rope)
        torch.testing.assert_close(compiled(traced, x[:, start:stop], rope), wanted, **EXACT)
    assert counter.frame_count == 2  # the prompt and one token


def test_overflow_that_only_the_device_knows() -> None:
    """While compiling nothing is read back: what is too much is not kept, and length tells."""
    rope, _ = ROPES["default"]
    cache, x = cache_of(1, capacity=3), torch.randn(1, 2, HIDDEN, dtype=torch.float64)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    compiled(cache, x, rope)
    kept = cache.keys[0][:, :2].clone()
    compiled(cache, x, rope)
    assert cache.length.tolist() == [4]
    assert torch.equal(cache.keys[0][:, :2], kept)
    with pytest.raises(RopeError, match=r"KVCache\.step: no row may become longer than capacity=3, got 6 tokens"):
        run(cache, x, rope)


def test_a_full_cache_is_unharmed_by_the_refusal() -> None:
    rope, _ = ROPES["default"]
    cache, x = cache_of(2, capacity=3), torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    ragged = {"attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
    run(cache, x, rope, **ragged)
    with pytest.raises(RopeError, match="capacity=3, got 4 tokens"):
        run(cache, x[:, :1], rope)
    run(cache, x, rope, attention_mask=torch.tensor([[0, 0, 0], [1, 0, 1]]))  # rows that are full take padding
    assert cache.length.tolist() == [3, 3]


def state(cache: KVCache) -> list[Tensor]:
    return [x.clone() for x in (*cache.keys, *cache.values, cache.length, cache.position, cache._key_positions)]


def test_what_is_refused_leaves_the_cache_as_it_was() -> None:
    rope, _ = ROPES["default"]
    cache, x = cache_of(2, capacity=6), torch.randn(2, 6, HIDDEN, dtype=torch.float64)
    run(cache, x, rope)
    before = state(cache)
    with pytest.raises(RopeError, match="capacity=6, got 7 tokens"):
        cache.step(5, at=torch.tensor([2, 2]))
    for ropes, message in (
        ([rope, Rope(HEAD_DIM + 2, 1e4, "half")], f"head_dim={HEAD_DIM}, got head_dim={HEAD_DIM + 2}"),
        ([rope, Rope(HEAD_DIM, 1e4, "half", scaling=DynamicNTK(2.0, 4))], "the length must be said"),
    ):
        with pytest.raises(RopeError, match=message):
            cache.shift(ropes, 3)
    assert all(torch.equal(x, y) for x, y in zip(before, state(cache), strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool])
def test_keys_are_numbers_with_a_point(dtype: torch.dtype) -> None:
    with pytest.raises(RopeError, match="dtype must be float16, bfloat16, float32 or float64, got torch"):
        KVCache(1, 1, 1, 8, capacity=4, dtype=dtype)


@pytest.mark.parametrize(
    ("numbers", "options", "message"),
    [
        ((0, 1, 1, 8), {"capacity": 4}, "num_layers must be an integer at least 1"),
        ((1, 0, 1, 8), {"capacity": 4}, "batch must be an integer at least 1"),
        ((1, 1, 0, 8), {"capacity": 4}, "num_kv_heads must be an integer at least 1"),
        ((1, 1, 1, 0), {"capacity": 4}, "head_dim must be an integer from 1"),
        ((1, 1, 1, 8), {}, "either capacity or window must be given, .* got capacity=None, window=None, sinks=0"),
        ((1, 1, 1, 8), {"capacity": 4, "window": 4}, ".* got capacity=4, window=4, sinks=0"),
        ((1, 1, 1, 8), {"capacity": 4, "sinks": 1}, ".* got capacity=4, window=None, sinks=1"),
        ((1, 1, 1, 8), {"window": 4, "sinks": -1}, "sinks must be an integer at least 0"),
        ((1, 1, 1, 8), {"capacity": 0}, "capacity must be an integer at least 1"),
        ((1, 1, 1, 8), {"window": 0}, "window must be an integer at least 1"),
    ],
)
def test_refuses_numbers(numbers: tuple[int, int, int, int], options: dict[str, int], message: str) -> None:
    with pytest.raises(RopeError, match=f"KVCache: {message}"):
        KVCache(*numbers, **options)


def test_refuses_arguments() -> None:
    cache = KVCache(1, 2, 1, 2, capacity=8)
    with pytest.raises(RopeError, match=r"KVCache.step: seq must be an integer at least 1, got 0"):
        cache.step(0)
    with pytest.raises(RopeError, match=r"attention_mask must be .* \[2, 3\], got torch.int64 of shape \(2, 2\)"):
        cache.step(3, attention_mask=torch.ones(2, 2).long())
    with pytest.raises(RopeError, match=r"attention_mask must be .* got torch.float32 of shape \(2, 3\)"):
        cache.step(3, attention_mask=torch.ones(2, 3))
    with pytest.raises(RopeError, match=r"attention_mask must be .* got \[1, 1\]"):
        cache.step(1, attention_mask=[1, 1])  # type: ignore[arg-type]
    with pytest.raises(RopeError, match=r"at must be an int64 tensor \[batch\] = \[2\], got 5"):
        cache.step(1, at=5)  # type: ignore[arg-type]
    with pytest.raises(RopeError, match="at must be None in a cache with a window"):
        KVCache(1, 2, 1, 2, window=8).step(1, at=torch.tensor([0, 0]))
    rope = Rope(2, 1e4, "half")
    with pytest.raises(RopeError, match=r"delta must be an int64 tensor \[batch\] = \[2\], got .* shape \(3,\)"):
        cache.shift(rope, torch.tensor([1, 2, 3]))
    with pytest.raises(RopeError, match="delta must be an integer from"):
        cache.shift(rope, 1.5)  # type: ignore[arg-type]
    for wrong in ([rope, rope], ["half"], None):
        with pytest.raises(RopeError, match=r"KVCache\.shift: rope must be a Rope, or one or None for each"):
            cache.shift(wrong, 1)  # type: ignore[arg-type]
    with pytest.raises(RopeError, match=r"CacheStep\.layer: index must be an integer from 0 to 0, got 1"):
        cache.step(1).layer(1)
    layer, k = cache.step(1).layer(0), torch.ones(2, 1, 1, 2)
    for wrong_k in (k[:1], k[..., :1], k.double(), k.expand(2, 3, 1, 2), k.to("meta")):
        with pytest.raises(RopeError, match=r"KVCache: k must have shape \(2, 1, 1, 2\) in torch.float32 on cpu"):
            layer.append(wrong_k, k)
    with pytest.raises(RopeError, match="KVCache: v must have shape"):
        layer.append(k, k.half())
    with pytest.raises(RopeError, match="KVCache: gradients cannot pass through a cache"):
        layer.append(k.requires_grad_(), k)
