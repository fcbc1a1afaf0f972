"""Positions of text, compared with plain Python loops."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from ropewalk import KVCache, RopeError, masks, positions

DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64)
NUMBERED = torch.tensor([[1, 1, 2, 2, 2, 0]])
lengths = st.lists(st.integers(0, 6), min_size=1, max_size=6)


@given(st.lists(st.integers(-1000, 2**31), min_size=1, max_size=5), st.integers(0, 7))
def test_ragged(offsets: list[int], seq: int) -> None:
    made = positions.ragged(torch.tensor(offsets), seq)
    assert made.dtype == torch.int64
    assert made.tolist() == [[start + i for i in range(seq)] for start in offsets]


@given(lengths, st.integers(0, 3), st.sampled_from([torch.int32, torch.int64]))
def test_packed(documents: list[int], padding: int, dtype: torch.dtype) -> None:
    ends = [sum(documents[:i]) for i in range(len(documents) + 1)]
    made = positions.packed(torch.tensor(ends, dtype=dtype), sum(documents) + padding)
    assert made.dtype == torch.int64
    assert made.tolist() == [i for n in documents for i in range(n)] + list(range(padding))


@given(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=4), st.sampled_from(DTYPES))
def test_from_mask(rows: list[list[int]], dtype: torch.dtype) -> None:
    """Documents may be numbered, and padding may be anywhere. A number that begins two documents is refused."""
    mask = torch.tensor(rows).to(dtype)
    rows = mask.tolist()
    documents = [[number for number, _ in groupby(filter(None, row))] for row in rows]
    if any(len(set(row)) < len(row) for row in documents):
        with pytest.raises(
            RopeError, match=r"number of their document, got \d again after another number\. Number the"
        ):
            positions.from_mask(mask)
        return
    made = positions.from_mask(mask)
    assert made.dtype == torch.int64
    wanted = [[row[:i].count(row[i]) if row[i] else 0 for i in range(5)] for row in rows]
    assert made.tolist() == wanted
    assert torch.vmap(lambda of_batch: positions.from_mask(of_batch))(mask[None])[0].tolist() == wanted


def test_values_are_read_only_where_that_is_free() -> None:
    """Boundaries under torch.compile or vmap, or on other devices, are not read, so invalid ones pass."""
    lengths = torch.tensor([3, 2])
    compiled = torch.compile(lambda cu: positions.packed(cu, 5), fullgraph=True, backend="eager")
    assert compiled(lengths).shape == (5,)
    assert torch.vmap(lambda cu: positions.packed(cu, 5))(lengths[None]).shape == (1, 5)
    assert positions.packed(lengths.to("meta"), 5).shape == (5,)


def from_processor(attention_mask: Any) -> Any:
    config = {"model_type": "qwen2_vl", "vision_config": {"spatial_merge_size": 2}}
    return positions.from_processor(config, {"mm_token_type_ids": [[0] * 6], "attention_mask": attention_mask})


def test_packed_compiles_to_one_graph_for_all_lengths() -> None:
    counter = CompileCounter()
    compiled = torch.compile(
        lambda cu, x: positions.packed(cu, x.shape[0]), fullgraph=True, dynamic=True, backend=counter
    )
    for total in (5, 9, 12):
        assert compiled(torch.tensor([0, 3, 5]), torch.empty(total)).shape == (total,)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: positions.ragged([0, 1], 3), "positions.ragged: offsets must be a non-empty int32 or int64 tensor"),
        (lambda: positions.ragged(torch.tensor([0.5]), 3), "got torch.float32 of shape (1,)"),
        (lambda: positions.ragged(torch.tensor([0.5]), 3), "of each row's first token, e.g. torch.tensor([0, 7])."),
        (
            lambda: positions.packed(torch.tensor([0.0, 3.0]), 3),
            "e.g. torch.tensor([0, 3, 5]) for documents of 3 and 2",
        ),
        (lambda: positions.ragged(torch.tensor(3), 3), "got torch.int64 of shape ()"),
        (lambda: positions.ragged(torch.tensor([0]), -1), "seq must be an integer of at least 0, got -1"),
        (lambda: positions.ragged(torch.tensor([0]), 2.0), "seq must be an integer"),
        (lambda: positions.packed(torch.tensor([[0, 3]]), 3), "cu_seqlens must be a non-empty int32 or int64 tensor"),
        (lambda: positions.packed(torch.tensor([], dtype=torch.int32), 3), "non-empty"),
        (lambda: positions.packed(torch.tensor([0, 3]), torch.tensor(3)), "total must be an integer"),
        (lambda: positions.packed(torch.tensor([3, 2]), 5), "must start with 0, must not decrease and must not exceed"),
        (lambda: positions.packed(torch.tensor([3, 2]), 5), "torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"),
        (lambda: positions.packed(torch.tensor([0, 3, 2], dtype=torch.int32), 5), "total=5, got [0, 3, 2]"),
        (lambda: positions.packed(torch.tensor([0, 3, 6]), 5), "got [0, 3, 6]"),
        (lambda: masks.packed(torch.tensor([3, 2]), 5), "positions.packed: cu_seqlens must start with 0"),
        (
            lambda: positions.context_parallel(4, 0, 2, "striped", torch.tensor([0, 5])),
            "not exceed total=4, got [0, 5]",
        ),
        (lambda: positions.from_mask(torch.ones(3)), "attention_mask must be a bool or integer tensor [batch, seq]"),
        (lambda: positions.from_mask(torch.zeros(2, 3)), "got torch.float32 of shape (2, 3)"),
        (lambda: positions.from_mask(torch.ones(1, 1, 3, 3).bool()), "four-dimensional"),
        (lambda: positions.from_mask([[1, 0]]), "got [[1, 0]]"),
        (
            lambda: positions.from_mask(torch.tensor([[1, -1]])),
            "the number of their document, got -1. Number the docum",
        ),
        (lambda: positions.from_mask(torch.ones(1, 2).cfloat()), "got torch.complex64 of shape (1, 2)"),
        # Where the numbers of documents have no meaning, or another one than the caller may think.
        (
            lambda: masks.padding(NUMBERED),
            "masks.padding: attention_mask must have 1 for real tokens and 0 for padding",
        ),
        (lambda: masks.padding(-NUMBERED), "got -1. Pass attention_mask != 0 if a row is one text. For numbered docum"),
        (lambda: masks.padding(NUMBERED), "pass the mask m[:, None, :, None] == m[:, None, None, :] instead."),
        (
            lambda: KVCache(1, 1, 1, 2, capacity=6).step(6, attention_mask=NUMBERED),
            "KVCache.step: attention_mask must have 1 for",
        ),
        (
            lambda: from_processor(-NUMBERED),
            "positions.from_processor: attention_mask must have 0 for padding, and for",
        ),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises(RopeError) as raised:
        call()
    assert message in str(raised.value)
