"""Kept launches: each must be the one that Triton itself would make, with the same compiled kernel and arguments.

Triton's driver, compiler and launcher are replaced. Its choice of the compiled kernel is real.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk._layout import Options
from ropewalk.kernels import gpu
from ropewalk.kernels.visible import StoreArguments, VisibleKeys

triton = pytest.importorskip("triton", reason="Triton is not installed")

PLANS = (gpu._rotation_plan, gpu._gradient_plan, gpu._angles_plan, gpu._step_plan, gpu._attention_plans)


class Compiled:
    """What Triton's compiler returns."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *arguments: Any) -> None:
        programs, stream, (function, metadata), hooks = arguments[:3], arguments[3], arguments[4:6], arguments[7:9]
        assert (function, metadata) == (self.function, self.packed_metadata)
        addresses = tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in arguments[9:])
        self.machine.launches.append((self, programs, stream, addresses))
        self.machine.by_triton.append(hooks != (None, None))


class Machine:
    """A machine with GPUs: which one is current, and what was launched on it."""

    def __init__(self) -> None:
        self.current = 0
        self.launches: list[tuple[Any, ...]] = []
        self.by_triton: list[bool] = []

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, device: int) -> str:
        return f"stream of {device}"

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    @contextmanager
    def device(self, device: int) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before

    def compile(self, kernel: Any, key: Any, _: Any, device: int, *__: Any) -> Compiled:
        compiled = kernel.device_caches[device][0][key] = Compiled(self)
        return compiled


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine, kernels = Machine(), gpu.kernels()
    monkeypatch.setattr(triton.runtime.driver, "_active", machine)
    monkeypatch.setattr(triton.JITFunction, "_do_compile", lambda *arguments: machine.compile(*arguments))
    for name in ("rotate", "table_gradient", "angles", "step", "attend"):
        kernel = getattr(kernels, name)
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    monkeypatch.setattr(Tensor, "get_device", lambda _: 0)
    for plans in PLANS:
        plans.cache_clear()
    yield machine
    for plans in PLANS:
        plans.cache_clear()


Make = Callable[[], gpu.Launch]


def both_ways(machine: Machine, make: Make) -> bool:
    """Launch through a plan, and through Triton with a new plan. Return whether the first was a kept launch.

    Both must start the same compiled kernel with the same arguments.
    """
    machine.launches.clear()
    machine.by_triton.clear()
    gpu._launch(*make())
    with pytest.MonkeyPatch.context() as patch:
        for plans in PLANS:
            patch.setattr(gpu, plans.__name__, plans.__wrapped__)
        gpu._launch(*make())
    ours, triton_s = machine.launches
    assert ours == triton_s
    assert machine.by_triton[1]
    return not machine.by_triton[0]


def some_tensor(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor without values: dense, transposed, with gaps, not aligned, repeated, or with strides over 2³¹."""
    wide, step = (*shape[:-1], 3 * shape[-1]), draw.choice((1, 2, 3))
    far = [draw.choice((1, 16, 2**31 - 1, 2**31, 2**40)) for _ in shape]
    views: list[Callable[[], Tensor]] = [
        lambda: torch.empty(shape[::-1], dtype=dtype).permute(*range(len(shape))[::-1]),
        lambda: torch.empty(wide, dtype=dtype)[..., ::step][..., : shape[-1]],
        lambda: torch.empty(wide, dtype=dtype)[..., step : step + shape[-1]],
        lambda: torch.empty(shape[-1], dtype=dtype).expand(shape),
        lambda: torch.empty_strided(shape, far, dtype=dtype, device="meta"),
    ]
    return torch.empty(shape, dtype=dtype) if draw.random() < 0.8 else draw.choice(views)()


def some_launch(draw: random.Random) -> Make:
    """Choose a launch. The few sizes are chosen again and again, with other dtypes, strides and options."""
    batch, tokens, heads, k_heads, pairs = (draw.choice(sizes) for sizes in ((1, 2), (1, 16), (2, 16), (1, 2), (1, 16)))
    of_x, of_table = draw.choice((torch.bfloat16, torch.float32)), draw.choice((torch.float32, torch.float64))
    offset, count, in_place = draw.choice((0, 16)), draw.choice((1, 2)), draw.random() < 0.3
    options = Options("bshd", draw.random() < 0.5, offset, draw.random() < 0.5)
    q, k = ((batch, tokens, n, 2 * pairs + offset) for n in (heads, k_heads))
    x = [some_tensor(draw, shape, of_x) for shape in (q, k)]
    y = x if in_place else [some_tensor(draw, shape, of_x) for shape in (q, k)]
    table = (batch, tokens, pairs)
    cos, sin = (some_tensor(draw, table, of_table) for _ in range(2))
    kind = draw.choice(
        (gpu.rotation_launch, gpu.gradient_launch, gpu.angles_launch, gpu.step_launch, gpu.attention_launches)
    )
    if kind == gpu.rotation_launch:
        return lambda: gpu.rotation_launch(x[:count], y[:count], cos, sin, options)
    if kind == gpu.gradient_launch:
        to_table = torch.empty(table)
        return lambda: gpu.gradient_launch(x[:count], y[:count], to_table, to_table, options)
    if kind == gpu.angles_launch:
        dtype, factor = draw.choice((torch.int32, torch.int64)), draw.choice((1.0, 2.0))
        positions, steps = torch.empty(table[:2], dtype=dtype), some_tensor(draw, (pairs,), torch.int64)
        axis = draw.choice((None, steps))
        return lambda: gpu.angles_launch(positions, steps, cos, sin, factor, axis)
    if kind == gpu.attention_launches:
        kept = draw.choice((of_x, torch.int8, torch.float8_e4m3fn))
        pool = torch.empty(batch, 64, *k[2:], dtype=kept)
        scales = draw.choice((torch.empty(pool.shape[:3]), torch.empty(64, batch, k[2]).mT)) if kept != of_x else None
        x[0] = x[0] if x[0].stride(-1) == 1 else x[0].contiguous()  # otherwise, each launch would do it
        far_q, order = draw.choice((None, x[0])), torch.empty(table[:2], dtype=torch.int64)
        blocks = draw.choice((None, torch.empty(batch, 1, dtype=torch.int32)))
        first, counts = (draw.choice((None, order[:, 0])) for _ in range(2))
        window, sinks, scale = draw.choice((None, 8)), draw.choice((0, 4)), draw.choice((1.0, 0.25))
        visible = VisibleKeys(order, draw.choice((63, 64)), blocks, first, counts, window, sinks, scales, scales)
        out = torch.empty_like(x[0])
        return lambda: gpu.attention_launches(x[0], far_q, pool, pool, visible, scale, out)[0]
    weight = torch.empty(q[-1], dtype=draw.choice((torch.bfloat16, torch.float32)))
    kept, slots = draw.choice((of_x, torch.int8, torch.float8_e4m3fn)), torch.empty(table[:2], dtype=torch.int64)
    pages = torch.empty(draw.choice((1, 5)), 16, *k[2:], dtype=kept)
    scales = draw.choice((torch.empty(pages.shape[:3]), torch.empty(16, 5, k[2]).mT)) if kept != of_x else None
    norm = draw.choice(
        (None, (weight, weight, 1e-6, False), (weight, weight, 1e-6, True), (weight, weight, 1e-5, True))
    )
    v = some_tensor(draw, k, of_x)
    rows = (
        (None, pages, None, slots) if kept == of_x and draw.random() < 0.3 else (v, pages, pages, slots, *[scales] * 2)
    )
    store = draw.choice((None, StoreArguments(*rows)))
    outputs = y[0], pages if store else y[1]
    return lambda: gpu.step_launch((x[0], x[1]), outputs, cos, sin, options, norm, store)


def test_triton_chooses_the_same_kernel(machine: Machine) -> None:
    draw = random.Random(0)
    makes = [some_launch(draw) for _ in range(800)]
    for make in makes:  # the first of each plan is Triton's
        both_ways(machine, make)
    kept = sum(both_ways(machine, make) for make in makes)
    assert 600 < kept < 790, "not aligned, so through Triton"


def test_other_addresses(machine: Machine) -> None:
    """A plan is kept for aligned tensors only, also if it was made for others."""
    aligned, not_aligned = torch.empty(1, 1, 2, 8), torch.empty(17)[1:].view(1, 1, 2, 8)
    for x, kept in ((not_aligned, False), (aligned, False), (aligned, True), (not_aligned, False), (aligned, True)):
        assert both_ways(machine, rotation_of(x)) is kept
    assert rotation_of(aligned)()[0] is rotation_of(not_aligned)()[0]


def rotation_of(x: Tensor) -> Make:
    table = torch.empty(1, 4)
    return lambda: gpu.rotation_launch([x], [x], table, table, Options("bshd", False, 0))


X = torch.empty(1, 1, 2, 8)


class OnSecondGpu(Tensor):
    def get_device(self) -> int:
        return 1


def test_another_device(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device has its compiled kernels and streams, and is the current device while a kernel is launched on it."""
    monkeypatch.setattr(gpu, "_has_several_gpus", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: machine.current)
    monkeypatch.setattr(torch.cuda, "device", machine.device)
    for kept in (False, True, True):
        for device, x in enumerate((X, X.as_subclass(OnSecondGpu))):
            assert both_ways(machine, rotation_of(x)) is kept
            compiled, _, stream, _ = machine.launches[0]
            assert stream == f"stream of {device}"
            assert [*gpu.kernels().rotate.device_caches[device][0].values()] == [compiled]
    assert machine.current == 0


def test_hooks_see_every_launch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's profiler hooks into launches. Then Triton makes them, also those that were kept before."""
    both_ways(machine, rotation_of(X))
    assert both_ways(machine, rotation_of(X))
    for name in ("launch_enter_hook", "launch_exit_hook"):
        hooks = getattr(triton.knobs.runtime, name)
        hooks.add(print)
        assert not both_ways(machine, rotation_of(X))
        hooks.remove(print)
        assert both_ways(machine, rotation_of(X))


def test_amd_keeps_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, Triton also compiles for tensors below 2 GiB, whatever view of them is passed."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert [both_ways(machine, rotation_of(X)) for _ in range(3)] == [False] * 3


@pytest.mark.parametrize("version", ["3.10.0", "4.0.0"])
def test_unknown_versions_keep_nothing(machine: Machine, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert [both_ways(machine, rotation_of(X)) for _ in range(3)] == [False] * 3
