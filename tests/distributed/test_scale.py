"""The formulas of tools/scale.py equal what one of 1,024 ranks sends and holds while it runs the layer.

Every collective that the rank starts is counted, also those inside of the ring's operator, and every tensor that
autograd keeps.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ropewalk
from ropewalk.parallel import ContextParallel

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "examples"), str(ROOT / "tools")]
import scale  # noqa: E402
import train_many_gpus as example  # noqa: E402


@dataclass
class Counted(TorchDispatchMode):
    """Count the bytes that this rank sends along each axis of the mesh, and note the largest tensor.

    Attributes:
        axes: the axis of each process group, by the group's name.
        bytes: those sent and held, with the keys of `formulas`.
        largest: elements of the largest tensor that an operator returned.
        direction: the pass that is counted now.
    """

    axes: dict[str, str]
    bytes: Counter[str] = field(default_factory=Counter)
    largest: int = 0
    direction: str = "forward"

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("ropewalk::ring_attention"):
            with unset_fake_temporarily():  # its only integers say which keys each step needs, and must have values
                args = [x.tolist() if isinstance(x, Tensor) and x.dtype == torch.int64 else x for x in args]
            args = [SimpleNamespace(tolist=partial(list, x)) if isinstance(x, list) else x for x in args]
            with self:  # count inside of the operator
                return OPDEFS[name]._init_fn(*args)
        if func in collective_ops and func not in sync_ops:
            self._add(name.partition("::")[2].removesuffix("_"), func, args)
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(out) if isinstance(x, Tensor) and not isinstance(x, DTensor)]
        self.largest = max([self.largest, *(x.numel() for x in tensors)])
        return out

    def _add(self, name: str, func: Any, args: Any) -> None:
        group, of_fsdp = CollectiveOp.get_process_group(func, args), name.endswith("_base")
        data = args[1] if of_fsdp else args[0]
        size, ranks = data.numel() * data.itemsize, group.size()
        sent = {
            "_allgather_base": size * (ranks - 1),
            "_reduce_scatter_base": size * (ranks - 1) // ranks,
            "all_gather_into_tensor": size * (ranks - 1),
            "reduce_scatter_tensor": size * (ranks - 1) // ranks,
            "all_reduce": 2 * size * (ranks - 1) // ranks,
            "all_to_all_single": size if ranks > 1 else 0,  # to the next rank of the ring
        }[name]
        axis = "fsdp" if of_fsdp else self.axes[group.group_name]
        self.bytes[f"{axis} {self.direction}"] += sent


def count(plan: scale.Plan, recompute: bool) -> Counted:
    """Run one layer forward and backward as this rank of a group that does not exist, on tensors without memory."""
    mesh, fsdp = example.build_mesh("cpu", plan.tensor, plan.context)
    context = ContextParallel(plan.tokens, mesh["context"].get_group(), device="cpu")
    rope = ropewalk.Rope(head_dim=plan.hidden // plan.heads, base=500_000.0, pairing="half")
    with torch.device("meta"):
        model = example.LanguageModel(1, plan.hidden, plan.heads, plan.kv_heads)
    example.parallelize(model, mesh, fsdp, torch.bfloat16, recompute=recompute, compiled=False)
    (block,) = model.blocks
    block.set_reshard_after_forward(True)  # as in a model, where another module runs before and after it
    held: dict[int, torch.UntypedStorage] = {}

    def hold(saved: Tensor) -> Tensor:
        storage = (saved.to_local() if isinstance(saved, DTensor) else saved).untyped_storage()
        held[storage._cdata] = storage
        return saved

    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        Counted({mesh[axis].get_group().group_name: axis for axis in ("context", "tensor")}) as counted,
    ):
        block.to_empty(device="cpu")
        rotation = rope.at(context.positions)
        between = plan.tokens // plan.context // plan.tensor
        x = torch.zeros(1, between, plan.hidden, dtype=torch.bfloat16, requires_grad=True)
        with saved_tensors_hooks(hold, lambda saved: saved):
            out = block(x, rotation, context)
        for shared in (rotation.cos, rotation.sin, context._visible):  # by all layers
            held.pop(shared.untyped_storage()._cdata, None)
        # FSDP2 has freed the memory of the gathered parameters, so they do not count.
        counted.bytes["held"] = sum(storage.nbytes() for storage in held.values())
        counted.direction = "backward"
        out.backward(torch.zeros_like(out))
    counted.bytes["parameters"] = sum(x.to_local().nbytes for x in block.parameters())
    return counted


@pytest.mark.parametrize("recompute", [False, True])
def test_formulas(recompute: bool) -> None:
    plan = scale.PLANS[-1]
    _clear_sharding_prop_cache()  # it names the groups of an earlier rank
    dist.init_process_group("fake", store=FakeStore(), rank=plan.ranks // 2, world_size=plan.ranks)
    try:
        counted = count(plan, recompute)
    finally:
        dist.destroy_process_group()
    assert counted.bytes == scale.formulas(plan, recompute=recompute, fused_norm=False)
    # So no tensor has a number for each pair of tokens, or the keys of all ranks.
    assert counted.largest == plan.tokens // plan.context * plan.hidden


def test_the_page_has_the_table() -> None:
    assert scale.table() in (ROOT / "docs" / "context-parallel.md").read_text("utf-8")
