"""Attention over a PagedKVCache equals that over a KVCache with the same tokens, and that of each row in one pass."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import attention_oracle as written_out
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
    check_rows,
    distances,
    run,
    run_whole_row,
)
from ropewalk import Axes, KVCache, PagedKVCache, Rope, RopeError, SelfExtend
from ropewalk.kernels import backend

ROPE, TURN = Rope(HEAD_DIM, 1e4, "half"), ROPES["default"][1]


def paged(rows: int, **options: Any) -> PagedKVCache:
    """Return a cache with this number of rows, in memory filled with values that must not be read."""
    options = {"blocks": 40, "block_size": 4, "dtype": torch.float64} | options
    cache = PagedKVCache(LAYERS, KV_HEADS, HEAD_DIM, **options)
    for pool in cache.keys + cache.values:
        pool.fill_(torch.nan)
    for _ in range(rows):
        cache.admit()
    return cache


@given(
    data=st.data(),
    batch=st.integers(1, 3),
    block_size=st.integers(1, 6),
    size=st.one_of(
        st.just({"capacity": 30}),
        st.builds(lambda w, s: {"window": w} | ({"sinks": s} if s else {}), st.integers(1, 8), st.integers(0, 5)),
    ),
    name=st.sampled_from(sorted(ROPES)),
)
@settings(max_examples=40)
def test_equals_a_contiguous_cache(
    data: st.DataObject, batch: int, block_size: int, size: dict[str, int], name: str
) -> None:
    """Rows of different lengths, with padding anywhere, explicit positions, shifts, restarts and rejected drafts."""
    rope, _ = ROPES[name]
    torch.manual_seed(data.draw(st.integers(0, 99)))
    whole, pages = (
        cache_of(batch, **size),
        paged(batch, blocks=90, block_size=block_size, window=size.get("window"), sinks=size.get("sinks", 0)),
    )
    for seq in data.draw(st.lists(st.sampled_from([1, 1, 1, 2, 3, 9]), min_size=1, max_size=5)):
        x, options = torch.randn(batch, seq, HIDDEN, dtype=torch.float64), {}
        if data.draw(st.booleans()):
            options["attention_mask"] = torch.rand(batch, seq) < 0.6
        if "sinks" not in size and data.draw(st.integers(0, 3)) == 0:
            options["positions"] = torch.randint(-9, 9, (batch, seq))
        if "capacity" in size and data.draw(st.integers(0, 3)) == 0:
            options["at"] = whole.position - torch.randint(0, 4, (batch,))
        if int(whole.length.max()) + seq > 30 and "capacity" in size:
            break
        real = options.get("attention_mask", torch.ones(batch, seq, dtype=torch.bool))
        wanted, got = run(whole, x, rope, **options), run(pages, x, rope, **options)
        assert got.isfinite().all()  # padding too
        torch.testing.assert_close(got[real], wanted[real], **EXACT)
        what = data.draw(st.sampled_from(["go on", "shift", "shift each", "reset"]))
        if what == "reset":
            chosen = data.draw(st.lists(st.integers(0, batch - 1), unique=True))
            whole.reset(chosen)
            pages.reset(chosen)
        elif what != "go on":
            delta = torch.randint(-300, 300, (batch,)) if what == "shift each" else -17
            whole.shift([rope] * LAYERS if rope is None else rope, delta)
            pages.shift([rope] * LAYERS if rope is None else rope, delta)
        assert torch.equal(pages.length, whole.length)
        assert torch.equal(pages.position, whole.position)


@pytest.mark.skipif(not backend.FAST_PATH, reason="no compiled kernel")
@pytest.mark.parametrize(
    "size", [{"window": 3, "sinks": 2}, {"window": 7, "sinks": 5}, {"window": 1, "sinks": 4}], ids=str
)
@pytest.mark.parametrize("store", [None, "int8"])
def test_few_tokens_attend_to_sinks_in_the_kernel(
    size: dict[str, int], store: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows, before and after the window has left the blocks of the sinks. No keys are gathered."""
    torch.manual_seed(0)
    cache = PagedKVCache(LAYERS, KV_HEADS, HEAD_DIM, blocks=20, block_size=3, store=store, **size)
    rows, layers = [cache.admit(), cache.admit()], [copy.deepcopy(layer).float() for layer in MODEL]
    monkeypatch.setattr(type(cache._stores[0]), "read", None)
    x, outputs = torch.randn(2, 21, HIDDEN), []
    for start, stop in ((0, 3), *((i, i + 1) for i in range(3, 9)), (9, 12), (12, 20), (20, 21)):
        step, y = cache.step(stop - start, rows=rows), x[:, start:stop]
        rotation = step.rotation(ROPE)
        for i, layer in enumerate(layers):
            with torch.no_grad():
                y = y + layer(y, rotation, cache=step.layer(i))
        outputs.append(y)
    for row, found in enumerate(torch.cat(outputs, 1)):
        wanted = run_whole_row(x[row].double(), TURN, *distances(21, size))
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=3e-2 if store else 3e-6)


def test_selected_rows() -> None:
    """Each pass selects other rows, in any order. Every row gets the result that it gets alone."""
    cache = paged(3)
    x = torch.randn(3, 9, HIDDEN, dtype=torch.float64)
    done, outputs = [0, 0, 0], [[], [], []]
    for rows, seq in (([2], 4), ([0, 1], 3), ([2, 0], 1), (torch.tensor([1, 2, 0]), 2), ((1,), 4), (range(2), 0)):
        new = torch.stack([x[row, done[row] : done[row] + seq] for row in rows])
        if seq == 0:
            break
        out = run(cache, new, ROPE, rows=rows)
        for i, row in enumerate(rows):
            outputs[row].append(out[i])
            done[row] += seq
    assert cache.length.tolist() == done == [6, 9, 7]
    for row in range(3):
        wanted = run_whole_row(x[row, : done[row]], TURN, *distances(done[row], {"capacity": 9}))
        torch.testing.assert_close(torch.cat(outputs[row]), wanted, **EXACT)


@pytest.mark.parametrize("length", [None, 8, 6, 0])
@pytest.mark.parametrize("forked_first", [True, False])
def test_a_shared_prefix(length: int | None, forked_first: bool) -> None:
    """Both rows continue as if alone. Of the shared prefix, only the last block is stored twice."""
    cache = paged(1)
    x = torch.randn(1, 10, HIDDEN, dtype=torch.float64)
    first = run(cache, x, ROPE)
    free = cache.free_blocks
    other = cache.fork(0) if length is None else cache.fork(0, length)
    assert cache.free_blocks == free
    kept = 10 if length is None else length
    more = {row: torch.randn(1, 3, HIDDEN, dtype=torch.float64) for row in (0, other)}
    out = {row: run(cache, more[row], ROPE, rows=[row]) for row in ((other, 0) if forked_first else (0, other))}
    for row, start in ((0, 10), (other, kept)):
        seq = start + 3
        tokens, outputs = torch.cat([x[0, :start], more[row][0]]), torch.cat([first[0, :start], out[row][0]])
        torch.testing.assert_close(outputs, run_whole_row(tokens, TURN, *distances(seq, {"capacity": 20})), **EXACT)
    alone = 4 + -(-(kept + 3) // 4)
    assert 40 - cache.free_blocks == alone - kept // 4
    cache.free(0)
    again = torch.randn(1, 1, HIDDEN, dtype=torch.float64)
    out = run(cache, again, ROPE)
    tokens = torch.cat([x[0, :kept], more[other][0], again[0]])
    wanted = run_whole_row(tokens, TURN, *distances(kept + 4, {"capacity": 20}))
    torch.testing.assert_close(out[0, -1], wanted[-1], **EXACT)


def test_rows_that_share_keys_and_move_together() -> None:
    """Shared keys move once, in place."""
    cache = paged(1)
    run(cache, torch.randn(1, 9, HIDDEN, dtype=torch.float64), ROPE)
    cache.fork(0)
    cache.fork(0, 6)
    keys, free = cache.keys[0][:3].flatten(0, 1)[:9].clone(), cache.free_blocks
    cache.shift(ROPE, 11)
    assert cache.free_blocks == free
    moved = TURN(keys, torch.full((9,), 11)) if TURN is not None else keys
    torch.testing.assert_close(cache.keys[0][:3].flatten(0, 1)[:9], moved, **EXACT)
    assert cache.position.tolist() == [20, 20, 17]


def test_rows_that_share_keys_and_move_apart() -> None:
    cache, whole = paged(1), cache_of(3, capacity=20)
    x = torch.randn(1, 9, HIDDEN, dtype=torch.float64)
    run(cache, x, ROPE)
    run(whole, x.expand(3, -1, -1), ROPE)
    cache.fork(cache.fork(0))
    delta = torch.tensor([3, -5, 3])
    cache.shift(ROPE, delta)
    whole.shift(ROPE, delta)
    assert cache.free_blocks == 34  # three blocks for the two rows with the same distance, three for the other row
    new = torch.randn(3, 1, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(run(cache, new, ROPE), run(whole, new, ROPE), **EXACT)


def test_nan_stays_in_its_row() -> None:
    """NaN in a row affects neither other rows nor rows that get its blocks later."""
    cache = paged(2)
    x = torch.randn(2, 9, HIDDEN, dtype=torch.float64)
    x[0, 3] = torch.nan
    real = torch.tensor([[1] * 9, [1, 1, 1, 0, 0, 0, 0, 0, 0]])
    out = run(cache, x, ROPE, attention_mask=real)
    torch.testing.assert_close(out[1, :3], run_whole_row(x[1, :3], TURN, *distances(3, {"capacity": 3})), **EXACT)
    cache.free(0)
    later = cache.admit()
    x = torch.randn(1, 6, HIDDEN, dtype=torch.float64)
    out = run(cache, x, ROPE, rows=[later])
    torch.testing.assert_close(out[0], run_whole_row(x[0], TURN, *distances(6, {"capacity": 6})), **EXACT)


def test_self_extend() -> None:
    rope, rotary = ROPES["YaRN, partial"]
    assert rope is not None
    cache, outputs, inputs, real = paged(2), [], [], []
    for seq in (5, 1, 2):
        inputs.append(torch.randn(2, seq, HIDDEN, dtype=torch.float64))
        real.append(torch.rand(2, seq) < 0.7)
        outputs.append(run(cache, inputs[-1], SelfExtend(rope, 3, 4), attention_mask=real[-1]))

    def how(row: int, seq: int) -> Any:
        return written_out.self_extend(range(seq), 3, 4), written_out.causal(seq)

    check_rows(outputs, inputs, real, rotary, how)


def test_several_axes() -> None:
    rope = Rope(HEAD_DIM, 1e2, "half", axes=Axes.sections((1, 1, 1)))
    pages, whole = paged(2), cache_of(2, capacity=20)
    for seq in (7, 1):
        x, places = torch.randn(2, seq, HIDDEN, dtype=torch.float64), torch.randint(0, 9, (3, 2, seq))
        got, wanted = run(pages, x, rope, positions=places), run(whole, x, rope, positions=places)
        torch.testing.assert_close(got, wanted, **EXACT)
        assert torch.equal(pages.position, whole.position)
        pages.shift(rope, 4)
        whole.shift(rope, 4)
    x = torch.randn(2, 1, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(run(pages, x, rope), run(whole, x, rope), **EXACT)


def pools(layout: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Create pools of keys and values for two layers, in the memory layouts of engines."""
    blocks, size = 9, 4
    if layout == "one tensor of all layers":
        both = torch.zeros(blocks, 2, LAYERS, size, KV_HEADS, HEAD_DIM, dtype=dtype)
        return [both[:, 0, i] for i in range(LAYERS)], [both[:, 1, i] for i in range(LAYERS)]
    if layout == "side by side":  # vLLM 0.32: [blocks, kv_heads, block_size, 2 * head_dim]
        sides = [torch.zeros(blocks, KV_HEADS, size, 2 * HEAD_DIM, dtype=dtype) for _ in range(LAYERS)]
        parts = [side.transpose(1, 2).split(HEAD_DIM, -1) for side in sides]
        return [k for k, _ in parts], [v for _, v in parts]
    shape = (blocks, KV_HEADS, size, HEAD_DIM) if layout == "HND" else (blocks, size, KV_HEADS, HEAD_DIM)
    both = [torch.zeros(shape, dtype=dtype) for _ in range(2 * LAYERS)]
    both = [pool.transpose(1, 2) for pool in both] if layout == "HND" else both
    return both[:LAYERS], both[LAYERS:]


@pytest.mark.parametrize("layout", ["NHD", "HND", "side by side", "one tensor of all layers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_bits(layout: str, dtype: torch.dtype) -> None:
    """Keys and values have the same bits as in a KVCache, in every memory layout, also after shifts and copies."""
    torch.manual_seed(0)
    k_cache, v_cache = pools(layout, dtype)
    cache = PagedKVCache.from_pools(k_cache, v_cache)
    whole = KVCache(LAYERS, 3, KV_HEADS, HEAD_DIM, capacity=20, dtype=dtype)
    first, second = cache.admit(), cache.admit()

    def store(rows: list[int], real: list[list[int]]) -> None:
        k, v = torch.randn(2, LAYERS, 3, len(real[0]), KV_HEADS, HEAD_DIM).to(dtype)
        mask = torch.tensor(real)
        step, other = (
            cache.step(len(real[0]), rows=rows, attention_mask=mask[: len(rows)]),
            whole.step(len(real[0]), attention_mask=mask),
        )
        for i in range(LAYERS):
            rotation, same = step.rotation(ROPE), other.rotation(ROPE)
            got = step.layer(i).append(rotation(k[i, : len(rows)], layout="bshd"), v[i, : len(rows)])
            wanted = other.layer(i).append(same(k[i], layout="bshd"), v[i])
            for row in range(len(rows)):
                length = int(whole.length[row] + mask[row].sum()) if i + 1 < LAYERS else int(whole.length[row])
                for a, b in zip(got, wanted, strict=True):
                    assert torch.equal(a[row, :length], b[row, :length])

    store([first, second], [[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 1, 0], [0] * 6])
    cache.shift(ROPE, -1234)
    whole.shift(ROPE, -1234)
    store([first, second], [[1], [1], [0]])
    third = cache.fork(second)
    for pool in whole.keys + whole.values:
        pool[2] = pool[1]
    for state in (whole.length, whole.position, whole._key_positions):
        state[2] = state[1]
    cache.shift(ROPE, torch.tensor([3, 70, 0]))
    whole.shift(ROPE, torch.tensor([3, 70, 0]))
    store([first, second, third], [[1, 1], [0, 1], [1, 1]])
    assert cache.keys[0].data_ptr() == k_cache[0].data_ptr()


def rows_of_pages(cache: PagedKVCache, step: Any, layer: int) -> tuple[list[Tensor], list[Tensor]]:
    """Read the keys of each row token by token, through the tables of FlashInfer and through those of vLLM."""
    size, by_indices, by_table = cache.block_size, [], []
    for row in range(len(step.rows)):
        blocks = step.kv_indices[step.kv_indptr[row] : step.kv_indptr[row + 1]].tolist()
        tokens = [(block, place) for block in blocks for place in range(size)]
        last = int(step.kv_last_page_len[row])
        tokens = tokens[: len(tokens) - size + last] if tokens else []
        by_indices.append([cache.keys[layer][token] for token in tokens])
        places = range(int(step.seq_lens[row]))
        by_table.append([cache.keys[layer][int(step.block_table[row, n // size]), n % size] for n in places])
    return by_indices, by_table  # type: ignore[return-value]


@pytest.mark.parametrize("window", [None, 6])
def test_tables_for_kernels(window: int | None) -> None:
    """Keys that are written by slot or by `write`, and read through the tables, are the tokens of each row."""
    cache = paged(4, window=window)
    tokens: list[list[Tensor]] = [[], [], [], []]
    steps = [(5, None), (3, [[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 0, 0]]), (1, None), (8, None)]
    for number, (seq, real) in enumerate(steps):
        mask = torch.ones(4, seq, dtype=torch.int64) if real is None else torch.tensor(real)
        mask[3] = 0  # an empty row
        step = cache.step(seq, attention_mask=mask)
        k, v = torch.randn(2, 4, seq, KV_HEADS, HEAD_DIM, dtype=torch.float64)
        if number % 2:
            for i in range(LAYERS):
                step.layer(i).write(k, v)
        else:  # as vLLM's reshape_and_cache_flash does
            for i in range(LAYERS):
                for token, slot in enumerate(step.slot_mapping.tolist()):
                    if slot >= 0:
                        cache.keys[i][slot // 4, slot % 4] = k.flatten(0, 1)[token]
                        cache.values[i][slot // 4, slot % 4] = v.flatten(0, 1)[token]
            step.mark_written()
        for row in range(4):
            tokens[row] += [k[row, i] for i in range(seq) if mask[row, i]]
        for keys in rows_of_pages(cache, step, 1):
            for row, wanted in enumerate(tokens):
                got = torch.stack(keys[row]) if len(keys[row]) else torch.zeros(0)
                if window is None:
                    assert len(got) == len(wanted)
                assert len(got) >= min(len(wanted), (window or 0) + int(mask[row].sum()) - 1)
                assert all(torch.equal(a, b) for a, b in zip(got, wanted[len(wanted) - len(got) :], strict=True))
        assert step.qo_indptr.tolist() == [0, *mask.sum(1).cumsum(0).tolist()]
        packed = k.flatten(0, 1)[step.slot_mapping >= 0]
        assert torch.equal(packed, k[mask.bool()])
        for table in (step.block_table, step.seq_lens, step.kv_indptr, step.kv_indices, step.kv_last_page_len):
            assert table.dtype == torch.int32
        assert step.slot_mapping.dtype == torch.int64
    assert cache.length.tolist() == [len(row) for row in tokens]


@pytest.mark.parametrize("size", [{"window": 7}, {"window": 7, "sinks": 2}])
def test_a_window_frees_blocks(size: dict[str, int]) -> None:
    """The number of blocks in use stays bounded by sinks, window and a step, however long the text."""
    cache = paged(1, blocks=5 if "sinks" in size else 4, **size)
    x = torch.randn(1, 60, HIDDEN, dtype=torch.float64)
    out = torch.cat([run(cache, x[:, i : i + 3], ROPE) for i in range(0, 60, 3)], dim=1)
    torch.testing.assert_close(out[0], run_whole_row(x[0], TURN, *distances(60, size)), **EXACT)
    assert cache.length.tolist() == [60]


@torch.no_grad()
def test_a_step_runs_as_many_functions_for_many_rows_and_blocks_as_for_few() -> None:
    counts = []
    for rows, tokens in ((2, 7), (2, 7), (40, 159)):  # the first time, modules may be imported
        cache, called = PagedKVCache(1, 1, 2, blocks=rows * 41, block_size=4), []
        for _ in range(rows):
            cache.admit()
        for seq in (tokens, 1, 1):  # then a token in the last block of each row, and a token in a new block
            k = torch.zeros(rows, seq, 1, 2)
            sys.setprofile(lambda _, event, function, called=called: called.append((event, function)))  # type: ignore[misc]
            try:
                step = cache.step(seq)
            finally:
                sys.setprofile(None)
            step.layer(0).write(k, k)
        counts.append(sum(event in ("call", "c_call") for event, _ in called))
        assert cache.length.tolist() == [tokens + 2] * rows
    assert counts[1] == counts[2]


def test_append_returns_new_tensors() -> None:
    """`append` does not return the scratch memory that the next layer reuses."""
    cache, kept = paged(2), []
    for _ in range(2):
        step = cache.step(2)
        for i in range(LAYERS):
            k, v = torch.randn(2, 2, 2, KV_HEADS, HEAD_DIM, dtype=torch.float64)
            kept += [tensor for pair in (step.layer(i).append(k, v),) for tensor in pair]
    copies = [tensor.clone() for tensor in kept]
    run(cache, torch.randn(2, 3, HIDDEN, dtype=torch.float64), ROPE)
    assert len({tensor.data_ptr() for tensor in kept}) == len(kept)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(kept, copies, strict=True))


def test_in_and_out_of_inference_mode() -> None:
    cache, whole = paged(2), cache_of(2, capacity=40)
    for inside in (True, False, True):
        for seq in (5, 1):  # more blocks each time
            x = torch.randn(2, seq, HIDDEN, dtype=torch.float64)
            with torch.inference_mode(inside):
                got, wanted = run(cache, x, ROPE), run(whole, x, ROPE)
                torch.testing.assert_close(got, wanted, **EXACT)


def test_attributes_of_a_step() -> None:
    cache, none = paged(2, block_size=2), 2**62
    run(
        cache, torch.randn(2, 3, HIDDEN, dtype=torch.float64), ROPE, attention_mask=torch.tensor([[1, 1, 1], [0, 1, 0]])
    )
    step = cache.step(2, rows=[1, 0], positions=torch.tensor([8, 9]))
    assert step.rows == [1, 0]
    assert step.positions.tolist() == [[8, 9], [8, 9]]
    assert step.order.tolist() == [[1, 2], [3, 4]]
    assert step.key_positions.tolist() == [[0, 8, 9, none, none, none], [0, 1, 2, 8, 9, none]]
    assert step.key_order.tolist() == [[0, 1, 2, none, none, none], [0, 1, 2, 3, 4, none]]
    assert step.mask[0, 0].int().tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
    assert step.mask.shape == (2, 1, 2, 6)


@pytest.mark.parametrize("layout", ["HND", "side by side", "one tensor of all layers"])
def test_layouts_for_flex_attention(layout: str) -> None:
    """FlexAttention needs evenly spaced tokens, which only the layout NHD has."""
    k_cache, v_cache = pools(layout, torch.float64)
    message = r"from_pools: with flex, the tokens of all blocks must be evenly spaced in memory, got strides"
    with pytest.raises(RopeError, match=message):
        PagedKVCache.from_pools(k_cache, v_cache, flex=True)
    with pytest.raises(RopeError, match="flex must be True or False, got 1"):
        PagedKVCache.from_pools(k_cache, v_cache, flex=1)  # type: ignore[arg-type]
    both = torch.zeros(
        9, 4, KV_HEADS, 2 * HEAD_DIM, dtype=torch.float64
    )  # keys and values in one tensor, tokens before heads
    keys, values = both.split(HEAD_DIM, -1)
    assert PagedKVCache.from_pools([keys], [values], flex=True).flex


def attend(q: Tensor, k: Tensor, v: Tensor, rotation: Any, layer: Any, mask: Tensor | None = None) -> Tensor:
    attended: Tensor = layer.attend(q, k, v, rotation=rotation, mask=mask)
    return attended


def projected(batch: int, seq: int) -> list[Tensor]:
    """q, k and v."""
    return [torch.randn(batch, seq, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def two_ways(**options: Any) -> list[PagedKVCache]:
    """Return two caches with one layer. The second attends directly over the blocks."""
    return [PagedKVCache(1, KV_HEADS, HEAD_DIM, blocks=20, block_size=4, flex=how, **options) for how in (False, True)]


class TestFlexAttention:
    """Attention directly over the blocks gives the result of attention over gathered keys."""

    @pytest.mark.parametrize("window", [None, 5])
    @torch.no_grad()
    def test_equals_gathering(self, window: int | None) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        compiled, caches = (
            torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=False),
            two_ways(window=window),
        )
        for cache in caches:
            cache.fork(cache.fork(cache.admit()))
        for count, seq in enumerate((6, 1, 1, 3)):
            new, real, outputs = projected(3, seq), torch.rand(3, seq) < 0.7, []
            for cache, way in zip(caches, (attend, compiled), strict=True):
                step = cache.step(seq, attention_mask=real)
                outputs.append(way(*new, step.rotation(ROPE), step.layer(0)))
                cache.shift(ROPE, torch.tensor([1, 0, -4]))
                if count == 2:
                    cache.free(1)
                    cache.fork(0)
            torch.testing.assert_close(outputs[0][real], outputs[1][real], rtol=0, atol=2e-6)
            assert outputs[1].isfinite().all()

    @torch.no_grad()
    def test_masks_and_two_passes_gather(self) -> None:
        torch._dynamo.reset()
        compiled, caches = torch.compile(attend, fullgraph=True, backend="aot_eager"), two_ways()
        for cache in caches:
            cache.admit()
        for mask in (None, torch.rand(1, 1, 3, 8) < 0.8):
            new, outputs = projected(1, 3), []
            for cache in caches:
                step = cache.step(3)
                rotation = SelfExtend(ROPE, 2, 3).at(step.positions, step.key_positions)
                outputs.append(compiled(*new, rotation if mask is None else step.rotation(ROPE), step.layer(0), mask))
            assert torch.equal(*outputs)


def one_layer(x: Tensor, rotation: Any, layer: Any) -> Tensor:
    out: Tensor = x + MODEL[0](x, rotation, cache=layer)
    return out


class TestCompiled:
    """The step is planned in eager mode."""

    @torch.no_grad()
    def test_layer_by_layer(self) -> None:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(one_layer, fullgraph=True, backend=counter)
        plain, traced = paged(2), paged(2)
        for count in range(20):
            x = torch.randn(2, 1, HIDDEN, dtype=torch.float64)
            outputs = []
            for cache, layer in ((plain, one_layer), (traced, compiled)):
                out, step = x, cache.step(1)
                for i in range(LAYERS):
                    out = layer(out, step.rotation(ROPE, dtype=torch.float64), step.layer(i))
                outputs.append(out)
            torch.testing.assert_close(*outputs, **EXACT)
            # The last layer and the others, for one block in each row and for any number of them.
            assert counter.frame_count == (2 if count < 4 else 4)
        assert traced.length.tolist() == [20, 20]

    @pytest.mark.usefixtures("compiler")
    @pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="PyTorch compiles it only with AVX2"
    )
    @torch.no_grad()
    def test_flex_attention(self) -> None:
        """One graph serves all single-token steps, for any blocks."""
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("inductor")
        compiled = torch.compile(attend, fullgraph=True, backend=counter, dynamic=False)
        caches = two_ways()
        for cache in caches:
            cache.fork(cache.admit())
            cache.keys[0].fill_(torch.nan)
            cache.values[0].fill_(torch.nan)
        for _ in range(10):
            new, outputs = projected(2, 1), []
            for cache, way in zip(caches, (attend, compiled), strict=True):
                step = cache.step(1)
                outputs.append(way(*new, step.rotation(ROPE), step.layer(0)))
            torch.testing.assert_close(*outputs, rtol=0, atol=1e-6)
        assert counter.frame_count == 1
