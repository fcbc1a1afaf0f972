"""Attention over a sequence that is sharded over ranks: processes with gloo, one process, and fake groups."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as engine
from torch.testing._internal.distributed.fake_pg import FakeStore

import processes
from cache_model import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MODEL
from each import each
from ropewalk import Rope, RopeError, SelfExtend, masks
from ropewalk.parallel import ContextParallel
from ropewalk.parallel.ring import _Kernel

ROPE = Rope(HEAD_DIM, 1e4, "half")
WORKER = Path(__file__).parents[1] / "support" / "context_parallel_worker.py"


@pytest.mark.parametrize("size", [2, 4])
def test_equals_the_whole(size: int, tmp_path: Path) -> None:
    """Outputs and gradients equal those of the whole sequence; what is kept and sent is what the page says."""
    rows = []
    for rank, (status, output) in enumerate(processes.run(WORKER, size, tmp_path)):
        assert status == 0, output
        rows += [(f"rank {rank}: {name}", wrong) for name, wrong in json.loads(output.split("\n")[-2]).items()]
    assert len(rows) == 14 * size

    def check(wrong: str) -> None:
        assert not wrong, wrong

    each(rows, check)


@contextmanager
def rank_of(rank: int, size: int) -> Iterator[None]:
    """Be one rank of a group in which only this process exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    yield
    dist.destroy_process_group()


class TestPlan:
    """The places of all ranks, and the rectangles that they compute."""

    @pytest.mark.parametrize("order", ["contiguous", "head-tail", "per-document"])
    @pytest.mark.parametrize("size", [1, 2, 3, 8])
    def test_computes_each_visible_pair_once(self, size: int, order: Any) -> None:
        drawn = random.Random(size)
        for _ in range(20):
            lengths = [drawn.choice((0, 1, 2, 7)) * (2 * size if order == "per-document" else 1) for _ in range(6)]
            seq = -(-(sum(lengths) + drawn.randrange(9)) // (2 * size)) * 2 * size or 2 * size
            ends = [sum(lengths[:i]) for i in range(7)]
            document = [sum(end <= token for end in ends) for token in range(seq)]
            plans: list[tuple[list[int], Tensor]] = []
            for rank in range(size):
                with rank_of(rank, size):
                    context = ContextParallel(seq, order=order, cu_seqlens=ends)
                    plans.append((context.places.tolist(), context._visible))
                    starts = [document.index(document[place]) for place in context.places.tolist()]
                    assert (context.places - context.positions).tolist() == starts
            computed = torch.zeros(seq, seq, dtype=torch.int64)
            for rank, (places, visible) in enumerate(plans):
                for step, q_begin, q_end, k_begin, k_end, is_causal in visible.tolist():
                    keys = torch.tensor(plans[(rank - step) % size][0][k_begin:k_end])
                    block = torch.ones(q_end - q_begin, len(keys), dtype=torch.int64)
                    computed[torch.tensor(places[q_begin:q_end])[:, None], keys] += block.tril() if is_causal else block
            wanted = [[int(j <= i and document[i] == document[j]) for j in range(seq)] for i in range(seq)]
            assert computed.tolist() == wanted

    def test_a_million_tokens_on_1024_ranks(self) -> None:
        """One kernel call for each step, on a rank of any number, and the same work on each."""
        work = set()
        for rank in (0, 1, 511, 1023):
            with rank_of(rank, 1024):
                context = ContextParallel(2**20)
                rows = context._visible.tolist()
                assert [row[0] for row in rows] == list(range(1024))
                work.add(sum((b - a) * (d - c) // (1 + causal) for _, a, b, c, d, causal in rows))
                head, tail = 512 * rank, 2**20 - 512 * (rank + 1)
                assert context.places.tolist() == [*range(head, head + 512), *range(tail, tail + 512)]
        assert len(work) == 1

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (
                lambda: ContextParallel(12),
                "seq must be a multiple of 8 to be sharded over 4 ranks in the order 'head-t",
            ),
            (lambda: ContextParallel(10, order="contiguous"), "seq must be a multiple of 4 to be sharded over 4 ranks"),
            (lambda: ContextParallel(0), "seq must be an integer of at least 1, got 0"),
            (lambda: ContextParallel(torch.arange(4)), "seq must be an integer of at least 1, got"),  # type: ignore[arg-type]
            (lambda: ContextParallel(8, order="zigzag"), "order must be one of"),  # type: ignore[arg-type]
            (lambda: ContextParallel(8, order="striped"), "order must give each rank runs of tokens, for which ring"),
            (lambda: ContextParallel(8, order="per-document"), "cu_seqlens must be a non-empty int32 or int64 tensor"),
            (
                lambda: ContextParallel(16, order="per-document", cu_seqlens=[0, 6, 16]),
                "each document must be a multiple of 8 to be sharded over 4 ranks in the order 'per-document', got "
                "6 tokens from 0 to 6. Pad the document to 8 tokens.",
            ),
            (lambda: ContextParallel(8, cu_seqlens=[3, 3]), "cu_seqlens must start with 0, must not decrease and"),
            (lambda: ContextParallel(8, cu_seqlens=[0, 4, 2, 8]), "cu_seqlens must start with 0, must not decrease"),
            (lambda: ContextParallel(8, cu_seqlens=torch.tensor([0, 9])), "must not exceed total=8, got [0, 9]."),
            (lambda: ContextParallel(8, cu_seqlens=[]), "cu_seqlens must be a non-empty int32 or int64 tensor"),
            (lambda: ContextParallel(8, cu_seqlens=[0, 1.5]), "cu_seqlens must be a non-empty int32 or int64 tensor"),  # type: ignore[list-item]
            (lambda: ContextParallel(8, torch.nn), "group must be a process group of this process, or None if"),  # type: ignore[arg-type]
            (lambda: ContextParallel(8, dist.GroupMember.NON_GROUP_MEMBER), "group must be a process group of this"),  # type: ignore[arg-type]
        ],
    )
    def test_every_rank_raises_the_same_error(self, call: Callable[[], object], message: str) -> None:
        said = set()
        for rank in range(4):
            with rank_of(rank, 4), pytest.raises(RopeError) as raised:
                call()
            said.add(str(raised.value))
        (only,) = said
        assert only.startswith("ContextParallel: ")
        assert message in only


@pytest.fixture
def alone() -> Iterator[None]:
    """Create a group that has only this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
class TestOneProcess:
    def test_needs_no_other_process(self) -> None:
        x, places = torch.randn(1, 6, HIDDEN, dtype=torch.float64), torch.arange(6)
        context, before = ContextParallel(6, dist.group.WORLD), vars(engine._cp_options).copy()
        rotation = ROPE.at(context.positions, dtype=torch.float64)
        ours = MODEL[0](x, rotation, cache=context)
        torch.testing.assert_close(ours, MODEL[0](x, rotation), rtol=0, atol=3e-14)
        assert context.places.tolist() == context.positions.tolist() == places.tolist()
        assert vars(engine._cp_options) == before  # PyTorch's own context parallelism uses them too

    def test_scale(self) -> None:
        """The scale is that of the model, or head_dim^(−1/2)."""
        q, k = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4)
        for scale, options in ((0.5, {}), (3.0, {"scale": 3.0})):
            share = (scale * q[0, 1, 0] @ k[0, :, 0].T).softmax(-1)
            out = ContextParallel(2).attend(q, k, k, **options)
            torch.testing.assert_close(out[0, 1, 0], share @ k[0, :, 0])

    def test_device(self) -> None:
        context = ContextParallel(4, cu_seqlens=[0, 3], device="meta")
        assert context.places.is_meta
        assert context.positions.is_meta
        with torch.device("meta"):
            assert ContextParallel(4, cu_seqlens=[0, 3]).positions.is_meta

    def test_the_operators_keep_the_rules_of_operators(self) -> None:
        q, k, v = (torch.randn(1, n, 6, 8, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2))
        visible = ContextParallel(6, cu_seqlens=[0, 2])._visible
        arguments = (q, k, v, visible, 0.5, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        torch.library.opcheck(torch.ops.ropewalk.ring_attention.default, arguments)

    def test_the_kernels_of_a_gpu_get_their_arguments(self) -> None:
        """On the meta device, PyTorch checks the arguments of the operators that a GPU runs."""
        q, k = (torch.empty(1, n, 16, 64, device="meta", dtype=torch.bfloat16) for n in (8, 2))
        kernel = _Kernel(torch.tensor([[0, 0, 16, 0, 16, 1], [1, 4, 8, 0, 16, 0]]), 0.1)
        out, sums = kernel.forward(q, k, k)
        assert (out.shape, sums.shape, sums.dtype) == (q.shape, q.shape[:3], torch.float32)
        grads = kernel.backward(q, k, k, grad=out, out=out, logsumexp=sums)
        assert [(x.shape, x.dtype) for x in grads] == [(x.shape, torch.float32) for x in (q, k, k)]

    @pytest.mark.parametrize(
        ("seq", "options", "message"),
        [
            (
                2,
                {},
                "q must have shape [batch, seq / ranks = 4, heads, head_dim], a token for each of places, got shape",
            ),
            (4, {"rotation": SelfExtend(ROPE, 2, 2).at(torch.arange(4))}, "rotation must have one pass"),
            (
                4,
                {"mask": masks.sliding_window(4, 2)},
                "mask must be None or a BlockMask of 4 queries and 4 keys, got a d",
            ),
            (
                4,
                {"mask": masks.packed_blocks(torch.tensor([0, 3]), 3)},
                "mask must be None or a BlockMask of 4 queries and 4 keys",
            ),
        ],
    )
    def test_refuses_to_attend(self, seq: int, options: dict[str, Any], message: str) -> None:
        q, k = torch.randn(1, seq, HEADS, HEAD_DIM), torch.randn(1, seq, KV_HEADS, HEAD_DIM)
        with pytest.raises(RopeError) as raised:
            ContextParallel(4).attend(q, k, k, **options)
        assert str(raised.value).startswith(f"ContextParallel: {message}")


def test_needs_a_group() -> None:
    with pytest.raises(RopeError, match=r"got None. Call torch.distributed.init_process_group, or pass mesh\['cp'\]"):
        ContextParallel(4)
