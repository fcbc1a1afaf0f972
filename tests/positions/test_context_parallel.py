"""The tokens of each rank, compared with lists that plain Python shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

from ropewalk import RopeError
from ropewalk.positions import context_parallel


def dealt(tokens: list[int], size: int, order: str) -> list[list[int]]:
    """Return the tokens of each rank, computed in plain Python."""
    ranks: list[list[int]] = [[] for _ in range(size)]
    if order == "striped":
        for i, token in enumerate(tokens):
            ranks[i % size].append(token)
        return ranks
    runs = 2 * size if order == "head-tail" else size
    length = len(tokens) // runs
    pieces = [tokens[i * length : (i + 1) * length] for i in range(runs)]
    for rank in range(size):
        ranks[rank] += pieces.pop(0)
    for rank in range(len(pieces)):  # the second half of the chunks, in reverse order of the ranks
        ranks[size - 1 - rank] += pieces.pop(0)
    return ranks


orders = st.sampled_from(["contiguous", "head-tail", "striped"])


@given(st.integers(0, 4), st.integers(1, 5), orders)
def test_each_rank(runs: int, size: int, order: Any) -> None:
    seq = 2 * size * runs
    made = [context_parallel(seq, rank, size, order) for rank in range(size)]
    assert [p.tolist() for p in made] == dealt(list(range(seq)), size, order)
    assert all(p.dtype == torch.int64 and p.is_contiguous() for p in made)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(1, 4), orders, st.sampled_from([4, 8]))
def test_packed(documents: list[int], size: int, order: Any, width: int) -> None:
    """Positions restart in each document, and in the padding after the last one."""
    ends = [sum(documents[:i]) for i in range(len(documents) + 1)]
    padding = -ends[-1] % (2 * size)
    row = [i for n in [*documents, padding] for i in range(n)]
    cu_seqlens = torch.tensor(ends, dtype=torch.int32 if width == 4 else torch.int64)
    made = [context_parallel(len(row), rank, size, order, cu_seqlens) for rank in range(size)]
    assert [p.tolist() for p in made] == dealt(row, size, order)
    assert all(p.dtype == torch.int64 for p in made)


def test_written_out() -> None:
    """12 tokens over 3 ranks; 9 tokens, which cannot form six equal chunks; one rank with all tokens."""
    assert context_parallel(12, 1, 3, "contiguous").tolist() == [4, 5, 6, 7]
    assert context_parallel(12, 1, 3, "head-tail").tolist() == [2, 3, 8, 9]
    assert context_parallel(12, 1, 3, "striped").tolist() == [1, 4, 7, 10]
    assert context_parallel(9, 2, 3, "contiguous").tolist() == [6, 7, 8]
    assert context_parallel(9, 2, 3, "striped").tolist() == [2, 5, 8]
    assert context_parallel(6, 0, 1, "head-tail").tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("size", [2, 4])
def test_head_tail_equals_torch(size: int) -> None:
    theirs = _HeadTailLoadBalancer(16, size, torch.device("cpu"))._generate_indices(restore=False)
    ours = [context_parallel(16, rank, size, "head-tail").tolist() for rank in range(size)]
    assert ours == theirs.view(size, -1).tolist()


def test_documents_sharded_separately() -> None:
    """Documents of 8 and 4 tokens and padding of 4 tokens, each sharded separately over two ranks."""
    ends = torch.tensor([0, 8, 8, 12])
    rows = [context_parallel(16, rank, 2, "per-document", ends).tolist() for rank in range(2)]
    assert rows == [[0, 1, 6, 7, 0, 3, 0, 3], [2, 3, 4, 5, 1, 2, 1, 2]]


def test_on_a_device() -> None:
    assert context_parallel(4, 0, 2, "striped", device="meta").device.type == "meta"
    assert context_parallel(4, 0, 2, "striped", torch.tensor([0, 4], device="meta")).device.type == "meta"


def test_the_result_has_its_own_memory() -> None:
    for order in ("contiguous", "head-tail", "striped"):
        made = context_parallel(4096, 1, 4, order)  # type: ignore[arg-type]
        assert made.untyped_storage().nbytes() == 8 * 1024


def test_compiles_to_one_graph_for_all_lengths() -> None:
    counter = CompileCounter()
    compiled = torch.compile(
        lambda x: context_parallel(x.shape[0], 1, 2, "head-tail"), fullgraph=True, dynamic=True, backend=counter
    )
    for seq in (8, 12, 16):
        assert compiled(torch.empty(seq)).tolist() == dealt(list(range(seq)), 2, "head-tail")[1]
    assert counter.frame_count == 1


CU = torch.tensor([0, 8])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: context_parallel(8, 0, 2, "zigzag"),
            "order must be one of 'contiguous', 'head-tail', 'per-document', 'striped'",
        ),
        (lambda: context_parallel(8, 2, 2, "striped"), "rank must be an integer from 0 to 1, got 2"),
        (lambda: context_parallel(8, -1, 2, "striped"), "rank must be an integer from 0 to 1, got -1"),
        (lambda: context_parallel(8, 0, 0, "striped"), "size must be an integer of at least 1, got 0"),
        (lambda: context_parallel(-8, 0, 2, "striped"), "seq must be an integer of at least 0, got -8"),
        (lambda: context_parallel(8.0, 0, 2, "striped"), "seq must be an integer of at least 0, got 8.0"),
        (
            lambda: context_parallel(9, 0, 2, "striped"),
            "seq must be a multiple of 2 to be sharded over 2 ranks in the order 'striped', got 9. "
            "Pad the sequence to 10",
        ),
        (
            lambda: context_parallel(10, 0, 2, "head-tail"),
            "seq must be a multiple of 4 to be sharded over 2 ranks in the order 'head-tail', got 10. "
            "Pad the sequence to",
        ),
        (lambda: context_parallel(8, 0, 2, "per-document"), "cu_seqlens must be a non-empty int32 or int64 tensor"),
        (
            lambda: context_parallel(8, 0, 2, "per-document", torch.tensor([0, 8, 6])),
            "cu_seqlens must start with 0, must not decrease and must not exceed total=8, got [0, 8, 6]",
        ),
        (
            lambda: context_parallel(8, 0, 2, "per-document", torch.tensor([0, 2])),
            "each document must be a multiple of 4 to be sharded over 2 ranks in the order 'per-document', got 2 "
            "tokens from 0 to 2. Pad the document to 4 tokens.",
        ),
        (lambda: context_parallel(8, 0, 2, "striped", [0, 8]), "cu_seqlens must be a non-empty int32 or int64 tensor"),
        (
            lambda: context_parallel(8, 0, 2, "striped", CU, device="cpu"),
            "device must be None with cu_seqlens, got 'cpu'",
        ),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises(RopeError) as raised:
        call()
    assert message in str(raised.value)
    assert str(raised.value).startswith("positions.")
