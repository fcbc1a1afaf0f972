"""Tests that need a GPU: operators, gradients, compilation, CUDA graphs, and no synchronization with the host."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import attention_cases
import oracle
from kernel_cases import DTYPES, LAYOUTS, OPCHECKS, PAIRINGS, by_reference, check, expected, record_calls, same, shape
from ropewalk import Axes, KVCache, Llama3, QKNorm, Rope, Rotation, backends, rotate_and_store
from ropewalk.angles import phase_steps
from ropewalk.attention.few_tokens import attend_cached
from ropewalk.kernels import gpu as kernels

pytestmark = [
    pytest.mark.usefixtures("gpu"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

ROPE = Rope(128, 500_000.0, "half", scaling=Llama3(8.0, 1.0, 4.0, 8192))


def queries(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, device="cuda").to(dtype)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the kernels that the test calls, in order."""
    return record_calls(kernels, monkeypatch)


@pytest.fixture
def forbid_synchronization() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_is_used_and_reported(calls: list[str]) -> None:
    assert backends()["gpu kernel"].startswith("usable: Triton ")
    rotation = ROPE.at(torch.arange(7, device="cuda"))
    q, k = queries(2, 7, 4, 128), queries(2, 7, 1, 128)
    rotation(q, k, layout="bshd")
    rotation.apply_(q, k, layout="bshd")
    assert calls == ["angles", "rotate", "rotate"]  # q and k in one launch


def test_angles_at_a_million() -> None:
    positions = torch.tensor([0, 1, 131_071, 1_048_575, 1_048_576, 2**31 - 1, -(2**31)], device="cuda")
    rotation = ROPE.at(positions)
    cos, sin = oracle.cos_sin(positions.tolist(), ROPE.inv_freq)
    assert (rotation.cos.cpu().double() - torch.from_numpy(cos)).abs().max() <= 3.1e-8
    assert (rotation.sin.cpu().double() - torch.from_numpy(sin)).abs().max() <= 3.1e-8


def test_several_axes_in_one_launch(calls: list[str]) -> None:
    axes = Axes.interleaved((24, 20, 20))
    several = Rope(128, 500_000.0, "half", scaling=ROPE.scaling, axes=axes)
    positions = torch.randint(-(2**31), 2**31, (3, 2, 50), device="cuda")
    rotation = several.at(positions)
    assert calls == ["angles"]
    compiled = torch.compile(lambda p: several.at(p).cos, fullgraph=True)(positions)
    assert torch.equal(compiled, rotation.cos)
    for a in range(3):
        which = [pair for pair in range(64) if axes.axis[pair] == a]
        assert torch.equal(rotation.cos[..., which], ROPE.at(positions[a]).cos[..., which])


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_inputs_equal_the_reference(dtype: torch.dtype, pairing: str) -> None:
    """The same bits as the reference in every layout, for a prefill of 4 × 1,024 tokens."""
    torch.manual_seed(0)
    for layout in LAYOUTS:
        q, k = (torch.randn(shape(layout, 4, 1024, heads, 128)).to(dtype) for heads in (32, 8))
        cos, sin = torch.randn(1024, 64), torch.randn(1024, 64)
        rotation = Rotation(cos.cuda(), sin.cuda(), pairing=pairing)
        for x, wanted in zip(
            rotation(q.cuda(), k.cuda(), layout=layout),
            by_reference([q, k], cos, sin, layout, pairing, 0, False),
            strict=True,
        ):
            assert same(x.cpu(), wanted, "")


def test_opcheck() -> None:
    tables = torch.randn(5, 32, device="cuda"), torch.randn(5, 32, device="cuda")
    for operator in (torch.ops.ropewalk.rotate.default, torch.ops.ropewalk.rotate_.default):
        for tensors in ([queries(2, 5, 3, 64), queries(2, 5, 1, 64)], [queries(2, 5, 3, 64)]):
            torch.library.opcheck(operator, (tensors, *tables, "bshd", True, 0, False), test_utils=OPCHECKS)
    positions = torch.arange(5, device="cuda")
    torch.library.opcheck(
        torch.ops.ropewalk.angles.default, (positions, ROPE._phase_steps, 1.0, torch.float32), test_utils=OPCHECKS
    )
    axis = [pair % 3 for pair in range(64)]
    torch.library.opcheck(
        torch.ops.ropewalk.angles.default,
        (positions.expand(3, -1), ROPE._phase_steps, 1.0, torch.float32, axis),
        test_utils=OPCHECKS,
    )


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("learned", [False, True])
def test_gradients(calls: list[str], pairing: str, learned: bool) -> None:
    torch.manual_seed(1)
    cos, sin = (torch.randn(5, 32, device="cuda").requires_grad_(learned) for _ in range(2))
    rotation = Rotation(cos, sin, pairing=pairing)
    q, k = queries(2, 5, 3, 64).requires_grad_(), queries(2, 5, 1, 64).requires_grad_()
    incoming = queries(2, 5, 3, 64), queries(2, 5, 1, 64)
    torch.autograd.backward(rotation(q, k, layout="bshd"), incoming)
    assert calls == ["rotate", "rotate"] + ["table_gradient"] * learned
    for x, grad in zip((q, k), incoming, strict=True):
        check(x.grad, *expected(grad, cos, sin, "bshd", pairing, 0, True), "bshd", "gradient")
    if learned:
        given = [x.detach().double().requires_grad_() for x in (cos, sin)]
        exact = Rotation(*given, pairing=pairing)(q.detach().double(), k.detach().double(), layout="bshd")
        torch.autograd.backward(exact, [grad.double() for grad in incoming])
        for table, wanted in zip((cos, sin), given, strict=True):
            torch.testing.assert_close(table.grad.double(), wanted.grad, rtol=1e-5, atol=1e-5)
        small = queries(1, 3, 2, 8, dtype=torch.float64).requires_grad_()
        tables = [queries(3, 4, dtype=torch.float64).requires_grad_() for _ in range(2)]
        assert torch.autograd.gradcheck(
            lambda x, c, s: Rotation(c, s, pairing=pairing)(x, layout="bshd"), (small, *tables)
        )


def test_no_call_waits_for_the_host(forbid_synchronization: None) -> None:
    """After the first call of each kind, the steps are on the device and the kernels are compiled."""
    q, k, positions = queries(2, 9, 4, 128), queries(2, 9, 1, 128), torch.arange(9, device="cuda")
    q.requires_grad_()
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        rotation = ROPE.at(positions + 3)
        rotate_at, _ = rotation(q, k, layout="bshd")
        rotate_at.sum().backward()
        rotation.apply_(k, layout="bshd")
        ROPE.shift(-3, device="cuda").apply_(k, layout="bshd")
        ROPE.at(positions)[positions](k, layout="bshd")


def test_graph_capture() -> None:
    """Capture angles and rotation of one token, and replay the graph with other positions."""
    positions = torch.zeros(4, 1, dtype=torch.int64, device="cuda")
    q, k = queries(4, 1, 8, 128), queries(4, 1, 2, 128)

    def step() -> tuple[Tensor, Tensor]:
        return ROPE.at(positions)(q, k, layout="bshd")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for where in (0, 1, 131_071):
        positions.fill_(where)
        graph.replay()
        torch.cuda.synchronize()
        for x, wanted in zip(captured, step(), strict=True):
            assert torch.equal(x, wanted)


@pytest.fixture
def forbid_recompilation() -> Iterator[Callable[[], None]]:
    """Make any later compilation, and any synchronization with the device, an error."""

    def strict() -> None:
        torch._dynamo.config.error_on_recompile = True
        torch.cuda.set_sync_debug_mode("error")

    torch._dynamo.reset()
    yield strict
    torch._dynamo.config.error_on_recompile = False
    torch.cuda.set_sync_debug_mode("default")


def rotate_at(positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return ROPE.at(positions)(q, k, layout="bshd")


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled(dynamic: bool | None, forbid_recompilation: Callable[[], None]) -> None:
    """One graph gives the eager results for every length, without recompilation or copies to the device."""
    compiled = torch.compile(rotate_at, fullgraph=True, dynamic=dynamic)
    inputs = [
        (torch.arange(n, device="cuda"), queries(2, n, 4, 128).requires_grad_(), queries(2, n, 1, 128))
        for n in (5, 6, 7, 33, 34)
    ]
    made = [compiled(*given) for given in inputs[:3]]
    forbid_recompilation()
    made += [compiled(*given) for given in inputs[3:]]
    torch.cuda.set_sync_debug_mode("default")
    for given, ours in zip(inputs, made, strict=True):
        for x, wanted in zip(ours, rotate_at(*given), strict=True):
            torch.testing.assert_close(x, wanted, rtol=1e-5, atol=1e-5)
        (grad,) = torch.autograd.grad(ours[0].square().sum(), given[1])
        torch.testing.assert_close(grad, 2 * given[1].detach(), rtol=1e-4, atol=1e-4)


def test_compiled_to_graphs() -> None:
    """With "reduce-overhead", the steps of a rope in its first use must not be in the memory of the graph."""
    torch._dynamo.reset()
    fresh = Rope(128, 123_456.0, "half")

    def rotate_at(positions: Tensor, q: Tensor) -> Tensor:
        return fresh.at(positions)(q, layout="bshd")

    compiled = torch.compile(rotate_at, fullgraph=True, mode="reduce-overhead")
    q = queries(2, 9, 4, 128)
    for first in (0, 1, 2, 3, 131_071):
        positions = torch.arange(first, first + 9, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        made = compiled(positions, q).clone()
        torch.testing.assert_close(made, rotate_at(positions, q), rtol=1e-5, atol=1e-5)


def test_a_captured_graph_keeps_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many other ropes evict cached steps, but not those that a captured graph reads."""
    monkeypatch.setattr(phase_steps, "_MAX_COPIES", 4)
    positions = torch.arange(9, device="cuda")
    ROPE.at(positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ROPE.at(positions).cos
    others = [Rope(128, 1000.0 + i, "half").at(positions).cos for i in range(64)]
    graph.replay()
    torch.cuda.synchronize()
    cos, _ = oracle.cos_sin(list(range(9)), ROPE.inv_freq)
    assert (captured.cpu().double() - torch.from_numpy(cos)).abs().max() <= 3.1e-8
    assert len(others) == 64


@pytest.mark.parametrize("transform", [torch.func.vmap, copy.copy])
def test_transforms_get_the_reference(calls: list[str], transform: Callable[..., Any]) -> None:
    rotation = ROPE.at(torch.arange(7, device="cuda"))
    q = queries(3, 7, 2, 128)
    function = transform(lambda x: rotation(x, layout="thd" if x.ndim == 3 else "bshd"))
    wanted = by_reference([q.cpu()], rotation.cos.cpu(), rotation.sin.cpu(), "bshd", "half", 0, False)[0]
    torch.testing.assert_close(function(q).cpu(), wanted)
    assert ("rotate" in calls) is (transform is copy.copy)


def test_other_devices_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    rotation = ROPE.at(torch.arange(7, device="cuda:1"))
    x = torch.randn(1, 7, 2, 128, device="cuda:1")
    wanted = by_reference([x.cpu()], rotation.cos.cpu(), rotation.sin.cpu(), "bshd", "half", 0, False)[0]
    assert same(rotation(x, layout="bshd").cpu(), wanted, "")


def test_fused_step() -> None:
    """The public calls give the same bits as separate calls."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (5, 2, 2))
    norm = QKNorm(torch.randn(64, device="cuda"), torch.randn(64, device="cuda"), 1e-6)
    rotation = Rope(64, 1e4, "half").at(torch.arange(3, device="cuda"))
    exact = rotation(*norm(q, k), layout="bshd")
    assert all(torch.equal(x, y) for x, y in zip(norm.rotate(rotation, q, k, layout="bshd"), exact, strict=True))
    caches = [torch.zeros(3, 4, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    slots = torch.tensor([[9, -1, 0], [4, 5, 11]], device="cuda")
    made = rotate_and_store(
        q, k, v, rotation=rotation, k_cache=caches[0], v_cache=caches[1], slot_mapping=slots, norm=norm
    )
    assert torch.equal(made, exact[0])
    for cache, x in zip(caches, (exact[1], v), strict=True):
        assert torch.equal(cache.flatten(0, 1)[[9, 0, 4, 5, 11]], x.flatten(0, 1)[[0, 2, 3, 4, 5]])


def cases_of_attention() -> list[attention_cases.Case]:
    """A cache with one block for each row, and others with pages, 8 bits or sinks, whose lengths change in place."""
    cases = [attention_cases.long_rows([1000, 3000]), *map(attention_cases.draw, (0, 2, 3, 5, 11))]
    cases += [attention_cases.in_8_bits(cases[i], kept) for i, kept in enumerate(attention_cases.EIGHT_BITS)]
    return [*cases, attention_cases.draw(38)]


@pytest.mark.parametrize("index", range(9))
def test_attention_over_a_cache_in_a_graph(index: int, forbid_synchronization: None) -> None:
    """The kernel is used, waits for nothing, and a captured graph reads queries, keys, orders and lengths again."""
    case = cases_of_attention()[index]
    moved = dataclasses.replace(
        case, **{name: on_gpu(getattr(case, name)) for name in ("q", "far_q", "keys", "values")}
    )
    moved.visible = case.visible._replace(
        **{name: on_gpu(x) for name, x in case.visible._asdict().items() if isinstance(x, Tensor)}
    )

    def attend() -> Tensor:
        attended = attend_cached(moved.q, moved.far_q, moved.keys, moved.values, moved.visible, scale=moved.scale)
        assert attended is not None
        return attended

    with torch.no_grad():
        attention_cases.check(case, attend().cpu())
        torch.cuda.set_sync_debug_mode("error")
        attend()
        torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = attend()
        changed = [(case.q, moved.q, case.q.flip(0))]
        if case.visible.window is None:  # otherwise, a key before the window is NaN
            order = case.visible.order
            changed.append((order, moved.visible.order, (order - 1).clamp(min=0)))
        for x, here, new in changed:
            x.copy_(new)
            here.copy_(new)
        graph.replay()
        attention_cases.check(case, captured.cpu())


def on_gpu(x: Tensor | None) -> Tensor | None:
    """Copy a tensor to the GPU, with its strides."""
    return None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda").copy_(x)


@pytest.mark.parametrize("store", [None, "fp8"])
def test_decode_calls_the_kernel(store: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight layers of a step each attend in one call, and gather nothing."""
    calls: list[int] = []
    attend = kernels.attend
    monkeypatch.setattr(kernels, "attend", lambda *arguments: (calls.append(1), attend(*arguments))[1])
    cache = KVCache(8, 2, 2, 64, capacity=40, dtype=torch.bfloat16, device="cuda", store=store)
    with torch.no_grad():
        for seq in (20, 1, 3):
            step = cache.step(seq)
            kept = [(queries(2, seq, 4, 64), queries(2, seq, 2, 64), queries(2, seq, 2, 64)) for _ in range(8)]
            for i, tensors in enumerate(kept):
                with monkeypatch.context() as patch:
                    if seq <= 8:
                        patch.setattr(step._plan, "read", None)
                    step.layer(i).attend(*(x.to(torch.bfloat16) for x in tensors), rotation=step.rotation(ROPE_64))
    assert len(calls) == 16


ROPE_64 = Rope(64, 1e4, "half")
