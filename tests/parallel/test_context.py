"""Attention over a sequence that is sharded over ranks: several processes with gloo, and a single process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import processes
from cache_model import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MODEL
from each import each
from ropewalk import Rope, RopeError, RotaryAttention, SelfExtend, masks
from ropewalk.parallel import ContextParallel

ROPE = Rope(HEAD_DIM, 1e4, "half")
WORKER = Path(__file__).parents[1] / "context_parallel_worker.py"


@pytest.mark.parametrize("size", [2, 4])
def test_equals_the_whole(size: int, tmp_path: Path) -> None:
    """Outputs and gradients equal those of the whole sequence, for each order, packed or not."""
    rows = []
    for rank, (status, output) in enumerate(processes.run(WORKER, size, tmp_path)):
        assert status == 0, output
        rows += [(f"rank {rank}: {name}", wrong) for name, wrong in json.loads(output.split("\n")[-2]).items()]
    assert len(rows) == (19 if size == 2 else 18) * size

    def check(wrong: str) -> None:
        assert not wrong, wrong

    each(rows, check)


@pytest.fixture
def alone() -> Iterator[None]:
    """Create a group that has only this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
class TestOneProcess:
    def test_needs_no_other_process(self) -> None:
        x, places = torch.randn(1, 6, HIDDEN, dtype=torch.float64), torch.tensor([3, 0, 5, 1, 2, 4])
        rotation = ROPE.at(torch.arange(6), dtype=torch.float64)
        context = ContextParallel(places, dist.group.WORLD)
        ours = MODEL[0](x[:, places], rotation[places], cache=context)
        torch.testing.assert_close(ours, MODEL[0](x, rotation)[:, places], rtol=0, atol=3e-14)
        assert context.places.tolist() == context.key_places.tolist() == places.tolist()

    def test_rows_of_keys_may_be_masked_additively(self) -> None:
        q, k = torch.randn(2, 3, HEADS, HEAD_DIM), torch.randn(2, 3, KV_HEADS, HEAD_DIM)
        only_itself = torch.full((3, 3), -torch.inf).fill_diagonal_(0)[None, None]
        out = ContextParallel(torch.tensor([2, 0, 1])).attend(q, k, k, mask=only_itself)
        torch.testing.assert_close(out, k.repeat_interleave(HEADS // KV_HEADS, dim=2))

    @pytest.mark.parametrize("cu_seqlens", [[3, 3], [0, 4, 2, 6], [0, 7]])
    def test_boundaries_must_be_those_of_the_sequence(self, cu_seqlens: list[int]) -> None:
        with pytest.raises(RopeError, match="cu_seqlens must start with 0, must not decrease and must not exceed"):
            ContextParallel(torch.arange(6), cu_seqlens=torch.tensor(cu_seqlens))

    def test_scale(self) -> None:
        """The scale is that of the model, or head_dim^(−1/2)."""
        q, k = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4)
        for scale, options in ((0.5, {}), (3.0, {"scale": 3.0})):
            share = (scale * q[0, 1, 0] @ k[0, :, 0].T).softmax(-1)
            out = ContextParallel(torch.arange(2)).attend(q, k, k, **options)
            torch.testing.assert_close(out[0, 1, 0], share @ k[0, :, 0])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_all_layers_keep_one_mask_for_the_backward_pass(self, dtype: torch.dtype) -> None:
        """PyTorch converts a bool mask to the dtype of q in each call, and each layer would keep this copy."""
        seq, masks_kept = 96, {}
        layers = [RotaryAttention(HIDDEN, HEADS, head_dim=HEAD_DIM).to(dtype) for _ in range(3)]
        rotation, context = ROPE.at(torch.arange(seq)), ContextParallel(torch.arange(seq))

        def keep(saved: Tensor) -> Tensor:
            if saved.numel() == seq * seq:
                masks_kept[saved.data_ptr()] = saved.dtype
            return saved

        x = torch.randn(1, seq, HIDDEN, dtype=dtype, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            for layer in layers:
                x = layer(x, rotation, cache=context)
        assert list(masks_kept.values()) == [dtype]

    @pytest.mark.parametrize(
        ("places", "message"),
        [
            ([0, 1], "places must be an int32 or int64 tensor [seq], got [0, 1]. Pass positions.context_parallel("),
            (torch.tensor([0.0]), "got torch.float32 of shape (1,)"),
            (torch.tensor([[0]]), "got torch.int64 of shape (1, 1)"),
        ],
    )
    def test_refuses_places(self, places: Any, message: str) -> None:
        with pytest.raises(RopeError) as raised:
            ContextParallel(places)
        assert message in str(raised.value)

    def test_refuses_documents(self) -> None:
        with pytest.raises(RopeError, match="cu_seqlens must be a non-empty int32 or int64 tensor with one axis"):
            ContextParallel(torch.arange(3), cu_seqlens=[0, 3])  # type: ignore[arg-type]

    @pytest.mark.parametrize("group", [[0], dist.GroupMember.NON_GROUP_MEMBER])
    def test_refuses_other_groups(self, group: Any) -> None:
        with pytest.raises(RopeError, match="group must be a process group of this process, or None if"):
            ContextParallel(torch.arange(3), group)

    @pytest.mark.parametrize(
        ("seq", "options", "message"),
        [
            (2, {}, "q must have shape [batch, seq=3, heads, head_dim], a token for each of places, got shape (1, 2,"),
            (3, {"rotation": SelfExtend(ROPE, 2, 2).at(torch.arange(3))}, "rotation must have one pass"),
            (3, {"mask": masks.sliding_window_blocks(3, 2)}, "mask must be a tensor or None, got BlockMask"),
            (
                3,
                {"mask": torch.ones(1, 1, 3, 2) > 0},
                f"mask must be broadcastable to [batch, heads, seq, keys] = [1, {HEADS}, 3, 3]",
            ),
        ],
    )
    def test_refuses_to_attend(self, seq: int, options: dict[str, Any], message: str) -> None:
        q, k = torch.randn(1, seq, HEADS, HEAD_DIM), torch.randn(1, seq, KV_HEADS, HEAD_DIM)
        with pytest.raises(RopeError) as raised:
            ContextParallel(torch.arange(3)).attend(q, k, k, **options)
        assert str(raised.value).startswith(f"ContextParallel: {message}")


def test_needs_a_group() -> None:
    with pytest.raises(RopeError, match=r"got None. Call torch.distributed.init_process_group, or pass mesh\['cp'\]"):
        ContextParallel(torch.arange(3))
