"""Count what one training step sends and holds on each rank of 8, 64 or 1,024 ranks, on one machine without a GPU.

    python tools/scale.py                                           three meshes, and the table of context-parallel.md
    python tools/scale.py --tokens 1048576 --context 64 --rank 63   one mesh, as one of its ranks

One layer of examples/train_many_gpus.py, with the sizes of an 8B model, runs forward and backward as one rank of a fake
process group, on tensors without memory: FSDP2 over data × context, HeadwiseParallel over tensor, ContextParallel over
context. Every collective that this rank starts is counted, also those inside of the ring's operator, and every
tensor that autograd keeps. `formulas` computes the same numbers from the sizes alone; the exit status is 1 if one
differs. Not included: the embedding, the head and the loss, and what exists only while an operator runs.

A rank sends of its data, if it takes part with P ranks in an all-gather: P − 1 times; in a reduce-scatter: (P − 1) / P;
in an all-reduce: twice that. The ring sends to one rank at a time.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ropewalk
from ropewalk.parallel import ContextParallel

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import train_many_gpus as example


@dataclass(frozen=True)
class Plan:
    """A mesh data × context × tensor, and sizes of a model. Each rank along `data` has one row of `tokens` tokens."""

    tokens: int = 2**20
    data: int = 1
    context: int = 64
    tensor: int = 1
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8

    @property
    def ranks(self) -> int:
        return self.data * self.context * self.tensor

    def __str__(self) -> str:
        axes = f"{self.data} data × {self.context} context × {self.tensor} tensor"
        return f"{self.tokens:,} tokens on {self.ranks:,} ranks: {axes}"


PLANS = (Plan(tokens=2**17, context=8), Plan(), Plan(data=2, tensor=8))


def formulas(plan: Plan, *, recompute: bool, fused_norm: bool = True) -> dict[str, int]:
    """Return the bytes that a rank sends and holds for one layer. bfloat16 has 2 bytes, and float32 has 4.

    Args:
        recompute: whether activation checkpointing computes each layer again in the backward pass.
        fused_norm: whether an RMSNorm keeps only its input and one number for each token, as PyTorch's kernel for GPUs
            does. On the CPU, where this script counts, it keeps two copies of the input in float32 instead.
    """
    tokens = plan.tokens // plan.context  # of this rank in attention and in the MLP
    between = tokens // plan.tensor  # of this rank between the two, because the plan is sequence parallel
    q, inner, head_dim = plan.hidden // plan.tensor, 4 * plan.hidden // plan.tensor, plan.hidden // plan.heads
    kv = plan.kv_heads * head_dim // plan.tensor
    fsdp, norms = plan.data * plan.context, 2 * plan.hidden + 2 * head_dim
    parameters = 2 * plan.hidden * (q + kv + inner) + norms
    ring = 2 * tokens * kv * (plan.context - 1)  # k and v, to all other ranks
    ring_home = 2 * tokens * kv * plan.context  # their gradients, to all other ranks and back
    sequence = 4 * between * plan.hidden * (plan.tensor - 1)  # two all-gathers and two reduce-scatters
    of_norms = 2 * norms * (plan.tensor - 1) // plan.tensor  # the all-reduce of their gradients
    in_norms = between * (2 * plan.hidden * (2 if fused_norm else 8) + 2 * 4)
    in_attention = 2 * tokens * (plan.hidden + 3 * q + 3 * kv) + 4 * tokens * plan.heads // plan.tensor
    in_mlp = 2 * tokens * (plan.hidden + 2 * inner)
    return {
        "context forward": 2 * ring,
        "context backward": 2 * ring + 4 * ring_home + recompute * 2 * ring,
        "fsdp forward": 2 * parameters * (fsdp - 1) // fsdp,
        "fsdp backward": (2 + 4) * parameters * (fsdp - 1) // fsdp,
        "tensor forward": 2 * sequence,
        # PyTorch recomputes all but the last reduce-scatter, whose result nothing needs.
        "tensor backward": 2 * sequence + 2 * of_norms + recompute * 2 * sequence * 3 // 4,
        "held": 2 * between * plan.hidden if recompute else in_norms + in_attention + in_mlp,
        "parameters": 4 * parameters // fsdp,
    }


def table() -> str:
    """Return the table of docs/context-parallel.md, in MiB."""
    plain, again = ([formulas(plan, recompute=recompute) for plan in PLANS] for recompute in (False, True))
    rows = (
        ("keys and values sent, forward", again, ["context forward"]),
        ("with their gradients, backward", again, ["context backward"]),
        ("sent by FSDP2", again, ["fsdp forward", "fsdp backward"]),
        ("sent by tensor parallel", again, ["tensor forward", "tensor backward"]),
        ("kept for the backward pass", again, ["held"]),
        ("without checkpointing", plain, ["held"]),
        ("parameters, gradients, AdamW", again, 4 * ["parameters"]),
    )
    lines = [
        ["MiB", *(f"{plan.tokens:,} tokens, {plan.ranks:,} ranks" for plan in PLANS)],
        ["---", *len(PLANS) * ["---:"]],
    ]
    for name, columns, keys in rows:
        lines.append([name, *[f"{sum(one[key] for key in keys) / 2**20:,.0f}" for one in columns]])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@dataclass
class Counted(TorchDispatchMode):
    """Count the bytes that this rank sends along each axis of the mesh, and note collectives and the largest tensor.

    Attributes:
        axes: the axis of each process group, by the group's name.
        bytes: those sent and held, with the keys of `formulas`.
        collectives: operator, axis and shape of each collective, in their order.
        largest: elements of the largest tensor that an operator returned.
        direction: the pass that is counted now.
        parameters: shape on this rank and placements of each parameter.
    """

    axes: dict[str, str]
    bytes: Counter[str] = field(default_factory=Counter)
    collectives: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)
    largest: int = 0
    direction: str = "forward"
    parameters: dict[str, str] = field(default_factory=dict)

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
        self.collectives.append((name, axis, tuple(data.shape)))


def count(
    plan: Plan, mesh: DeviceMesh, fsdp: DeviceMesh, mode: AbstractContextManager[Any], *, recompute: bool
) -> Counted:
    """Run one layer as this rank of the mesh, forward and backward, in a mode such as FakeTensorMode."""
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

    with mode, Counted({mesh[axis].get_group().group_name: axis for axis in ("context", "tensor")}) as counted:
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
    local = {name: tuple(x.to_local().shape) for name, x in block.named_parameters()}
    counted.parameters = {name: f"{local[name]} {x.placements}" for name, x in block.named_parameters()}
    return counted


def simulate(plan: Plan, rank: int, *, recompute: bool) -> Counted:
    """Count as one rank of a group that does not exist, with tensors that have no memory."""
    _clear_sharding_prop_cache()  # it names the groups of the rank before
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.ranks)
    try:
        meshes = example.build_mesh("cpu", plan.tensor, plan.context)
        return count(plan, *meshes, FakeTensorMode(allow_non_fake_inputs=True), recompute=recompute)
    finally:
        dist.destroy_process_group()


def find_problem(plan: Plan, rank: int) -> str | None:
    """Return the error message for options that do not fit each other, or None."""
    if plan.kv_heads % plan.tensor:
        return f"--tensor {plan.tensor} must divide the {plan.kv_heads} key heads"
    if plan.tokens % (parts := 2 * plan.context * plan.tensor):
        return f"--tokens {plan.tokens} must be a multiple of {parts}, which is 2 times --context times --tensor"
    if not 0 <= rank < plan.ranks:
        return f"--rank must be from 0 to {plan.ranks - 1}, got {rank}"
    return None


def main() -> int:
    parser = example.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("tokens", "data", "context", "tensor"):
        parser.add_argument(f"--{name}", type=example.positive)
    parser.add_argument("--rank", type=int, default=0, help="the rank that is simulated [0]")
    options = vars(parser.parse_args())
    rank = options.pop("rank")
    sizes = {name: size for name, size in options.items() if size is not None}
    wrong, plans = False, [Plan(**sizes)] if sizes else PLANS
    for plan in plans:
        if problem := find_problem(plan, rank):
            parser.error(problem)
    for plan in plans:
        print(f"{plan}, rank {rank}")
        for recompute in (False, True):
            counted = simulate(plan, rank, recompute=recompute)
            print(f"  bytes of one layer{' with activation checkpointing' * recompute}: formula, counted")
            for name, number in formulas(plan, recompute=recompute, fused_norm=False).items():
                wrong |= number != counted.bytes[name]
                print(f"    {name:16} {number:15,} {counted.bytes[name]:15,}")
        for (name, axis, shape), times in Counter(counted.collectives).items():
            print(f"  {times:4} × {name} of {list(shape)} along {axis}")
        print("".join(f"  {name}: {shards}\n" for name, shards in counted.parameters.items()))
    if not sizes:
        print(table())
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
