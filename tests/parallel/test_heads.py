"""Tests of `HeadwiseParallel` that need only one process. The others are in tests/distributed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, Shard, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from ropewalk import RopeError, RotaryAttention
from ropewalk.parallel import HeadwiseParallel, attention_plan


@pytest.fixture
def ranks() -> Iterator[DeviceMesh]:
    """Create a mesh of eight ranks, of which only this process exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    yield init_device_mesh("cpu", (8,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(8, 8), "the module must be a RotaryAttention, got Linear. Name the attention in the plan, e.g."),
        (
            RotaryAttention(24, 12),
            "the number of ranks must divide num_heads, got 8 ranks for 12 heads. Numbers of "
            "ranks that fit this attention: 1, 2, 3, 4, 6, 12.",
        ),
        (
            RotaryAttention(48, 24, num_kv_heads=6),
            "the number of ranks must divide num_kv_heads or be a multiple of it, got 8 ranks for 6 key heads. "
            "Numbers of ranks that fit this attention: 1, 2, 3, 6, 12, 24.",
        ),
    ],
)
def test_refuses_modules(ranks: DeviceMesh, module: nn.Module, message: str) -> None:
    before = [type(parameter.data) for parameter in module.parameters()]
    with pytest.raises(RopeError) as raised:
        parallelize_module(module, ranks, HeadwiseParallel())
    assert str(raised.value).startswith(f"HeadwiseParallel: {message}")
    assert [type(parameter.data) for parameter in module.parameters()] == before


@pytest.mark.usefixtures("ranks")
def test_refuses_a_mesh_of_two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "tensor"))
    with pytest.raises(
        RopeError, match=r"the mesh must have one axis, got 2 axes\. Pass a single axis, e\.g\. mesh\['te"
    ):
        parallelize_module(RotaryAttention(16, 8), mesh, HeadwiseParallel())


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_refuses_options(value: Any) -> None:
    with pytest.raises(RopeError, match="HeadwiseParallel: sequence_parallel must be True or False, got"):
        HeadwiseParallel(sequence_parallel=value)


def test_in_a_plan_of_a_model(ranks: DeviceMesh) -> None:
    """Select layers by a pattern of names. Their repr is right, and frozen weights stay frozen."""
    model = nn.ModuleDict(
        {"layers": nn.ModuleList(RotaryAttention(32, 16, num_kv_heads=2, qk_norm=1e-6) for _ in "ab")}
    )
    model.requires_grad_(False)
    style = HeadwiseParallel(sequence_parallel=True)
    parallelize_module(model, ranks, {"layers.*": style})
    assert repr(style) == "HeadwiseParallel(sequence_parallel=True)"
    for attention in model["layers"]:
        assert attention.num_heads == 16
        assert attention.q_proj.weight.placements == (Shard(0),)
        assert attention.o_proj.weight.placements == (Shard(1),)
        for module in (attention.k_proj, attention.v_proj, attention.q_norm, attention.k_norm):
            assert module.weight.placements[0].is_replicate()
            assert not module.weight.requires_grad
    assert torch.equal(attention.k_norm.weight.to_local(), torch.ones(2))


class TestAttentionPlan:
    def test_names_every_attention(self) -> None:
        """The names are those with which parallelize_module finds modules, and all heads are sharded."""
        layers = [
            torch.nn.ModuleDict({"self_attn": RotaryAttention(16, 4), "mlp": torch.nn.Linear(16, 16)}) for _ in "ab"
        ]
        model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})
        plan = attention_plan(model, sequence_parallel=True)
        assert list(plan) == ["layers.0.self_attn", "layers.1.self_attn"]
        for name, style in plan.items():
            assert isinstance(model.get_submodule(name), RotaryAttention)
            assert isinstance(style, HeadwiseParallel)
            assert style.sequence_parallel

    @pytest.mark.parametrize(
        ("model", "came"),
        [
            (
                RotaryAttention(16, 4),
                "got RotaryAttention. Pass the model, or for a single layer pass HeadwiseParallel()",
            ),
            (torch.nn.Linear(2, 2), "got Linear."),
            ("attention", "got str."),
        ],
    )
    def test_refuses(self, model: object, came: str) -> None:
        with pytest.raises(RopeError) as raised:
            attention_plan(model)  # type: ignore[arg-type]
        assert came in str(raised.value)
        assert str(raised.value).startswith(
            "attention_plan: model must be a module that contains RotaryAttention layers"
        )
