"""Graphs that torch.compile makes for a GPU. They are traced with fake tensors, so no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import oracle
import ropewalk.angles.exact  # noqa: F401  importing it registers the operator
from kernel_cases import OPCHECKS
from ropewalk import Axes, Rope, RopeError, YaRN

ROPE = Rope(128, 1e6, "half", scaling=YaRN(factor=4.0, original_max_position_embeddings=32_768))
ANGLES = torch.ops.ropewalk.angles.default


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs(function: Callable[..., Any], *calls: tuple[Any, ...], **options: Any) -> list[torch.fx.GraphModule]:
    """Return the graphs that torch.compile makes of a function, one for each compilation."""
    made: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        made.append(graph)
        (outputs,) = next(node.args for node in graph.graph.nodes if node.op == "output")
        # Return the traced results instead of running: some builds for CUDA require the driver in a run.
        return lambda *_: tuple(node.meta["example_value"] for node in outputs)

    compiled = torch.compile(function, backend=keep, fullgraph=True, **options)
    for arguments in calls:
        compiled(*arguments)
    return made


def rotate_at(positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return ROPE.at(positions)(q, k, layout="bshd")


def fake(*lengths: int) -> list[tuple[Any, ...]]:
    with FakeTensorMode(shape_env=ShapeEnv()):
        return [
            (
                torch.empty(n, device="cuda", dtype=torch.int64),
                torch.empty(2, n, 4, 128, device="cuda", dtype=torch.bfloat16),
                torch.empty(2, n, 1, 128, device="cuda", dtype=torch.bfloat16),
            )
            for n in lengths
        ]


def test_steps_are_not_a_constant_copied_at_each_call() -> None:
    (graph,) = graphs(rotate_at, *fake(5))
    check_called(graph)


def test_several_axes_use_one_operator() -> None:
    rope = Rope(128, 1e6, "half", axes=Axes.interleaved((24, 20, 20)))
    ((of_tokens, q, k),) = fake(5)
    with of_tokens.fake_mode:
        positions = torch.empty(3, 2, 5, device="cuda", dtype=torch.int64)
    (graph,) = graphs(lambda p, q, k: rope.at(p)(q, k, layout="bshd"), (positions, q, k))
    check_called(graph)


def check_called(graph: torch.fx.GraphModule) -> None:
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert ANGLES in called or torch.ops.ropewalk.angles in called
    # A constant on the CPU would be an attribute of the graph, or a call of torch.tensor.
    assert not [node for node in graph.graph.nodes if node.op == "get_attr"]
    assert torch.tensor not in called
    names = {getattr(target, "__name__", "") for target in called}
    names |= {str(node.target) for node in graph.graph.nodes if node.op == "call_method"}
    assert not {"tensor", "lift_fresh_copy", "_to_copy", "index_select"} & names


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_needs_only_pytorch(strict: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            return rotate_at(positions, q, k)

    (inputs,) = fake(5)
    exported = torch.export.export(Layer(), inputs, strict=strict)
    called = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert torch.ops.aten.cos.default in called
    assert not [target for target in called if "ropewalk" in str(target)]


def test_the_cpu_uses_no_operator() -> None:
    (graph,) = graphs(rotate_at, (torch.arange(5), torch.randn(1, 5, 4, 128), torch.randn(1, 5, 1, 128)))
    assert ANGLES not in [node.target for node in graph.graph.nodes]


def test_no_new_graph_as_the_length_changes() -> None:
    assert len(graphs(rotate_at, *fake(5, 6, 17, 4096), dynamic=True)) == 1


class TestOperator:
    """`ropewalk::angles` gives the same result on every device."""

    def arguments(self) -> tuple[Any, ...]:
        return torch.tensor([[0, 1, -7], [2**31 - 1, -(2**31), 131_071]]), ROPE._phase_steps, 1.25, torch.float64

    def test_opcheck(self) -> None:
        positions, *rest = self.arguments()
        for given in (positions, positions[0].to(torch.int32), positions[:, :0], positions.T):
            torch.library.opcheck(ANGLES, (given, *rest), test_utils=OPCHECKS)

    def test_is_exact(self, used: None) -> None:
        positions, steps, factor, dtype = self.arguments()
        exact = oracle.cos_sin_of_steps(positions.flatten().tolist(), steps)
        for table, truth in zip(ANGLES(positions, steps, factor, dtype), exact, strict=True):
            assert table.dtype == dtype
            assert (table.reshape(6, 64) - torch.from_numpy(truth) * factor).abs().max() <= 4e-16

    def test_vmap(self) -> None:
        positions, *rest = self.arguments()
        for axis in (0, 1):
            mapped = torch.func.vmap(lambda p: ANGLES(p, *rest), in_dims=axis)(positions)
            for table, wanted in zip(mapped, ANGLES(positions.movedim(axis, 0), *rest), strict=True):
                assert torch.equal(table, wanted)

    def of_axes(self) -> tuple[Any, ...]:
        positions, *rest = self.arguments()
        return torch.stack((positions, positions + 1, positions * 3)), *rest, [pair % 3 for pair in range(64)]

    def test_opcheck_with_axes(self) -> None:
        everything = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        positions, *rest = self.of_axes()
        for given in (positions, positions[:, 0].to(torch.int32), positions[:, :, :0]):
            torch.library.opcheck(ANGLES, (given, *rest), test_utils=everything)

    def test_axes_are_exact(self) -> None:
        positions, steps, factor, dtype, axis = self.of_axes()
        made = ANGLES(positions, steps, factor, dtype, axis)
        for a in range(3):
            for table, one in zip(made, ANGLES(positions[a], steps, factor, dtype), strict=True):
                assert table.shape == (2, 3, 64)
                assert torch.equal(table[..., a::3], one[..., a::3])

    def test_vmap_with_axes(self) -> None:
        positions, *rest = self.of_axes()
        for place in (1, 2):
            mapped = torch.func.vmap(lambda p: ANGLES(p, *rest), in_dims=place)(positions)
            for table, wanted in zip(mapped, ANGLES(positions.movedim(place, 1), *rest), strict=True):
                assert torch.equal(table, wanted)

    @pytest.mark.parametrize("axis", [[0], [0] * 63 + [3], [-1] * 64])
    def test_axes_that_do_not_fit(self, axis: list[int]) -> None:
        positions, *rest, _ = self.of_axes()
        with pytest.raises(RopeError, match="axis must name a row of positions for each phase step"):
            ANGLES(positions, *rest, axis)
