"""Measure what an eager call costs the host of a GPU, without one. Run from the root: python benchmarks/gpu_host.py

Tensors on the CPU take the road of GPU tensors, and kernels are compiled for sm_90. Only Triton's driver is replaced,
so the times do not include its C launcher, `cuLaunchKernel` and other calls of CUDA.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

import ropewalk
from ropewalk.kernels import backend, gpu
from ropewalk.rotation.qk_norm import QKNorm, StoreArguments, run_fused


class Driver:
    """A driver of Triton for a device that is not there: kernels are compiled, and not loaded or launched."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def measure(call: Callable[[], Any], count: int = 300, repetitions: int = 15) -> list[float]:
    """Return the microseconds of a call, once for each repetition."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count * 1e6)
    return times


def frames(call: Callable[[], Any]) -> int:
    """Count the Python functions that a call enters."""
    entered = 0

    def trace(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal entered
        entered += event == "call"

    sys.setprofile(trace)
    call()
    sys.setprofile(None)
    return entered - 1  # without `call`


def main() -> None:
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(Driver())
    launched = []
    CompiledKernel._init_handles = lambda _: None
    CompiledKernel.run = property(lambda _: lambda *_: launched.append(1))
    backend.FAST_PATH, backend.KERNELS["cpu"], gpu._reasons[None] = False, gpu, None

    dtype, batch, heads, kv_heads, head_dim = torch.bfloat16, 8, 32, 8, 128
    q, k, v = (torch.randn(batch, 1, h, head_dim).to(dtype) for h in (heads, kv_heads, kv_heads))
    changed = q.clone(), k.clone()
    leaves = [x.clone().requires_grad_() for x in (q, k)]
    positions = torch.arange(batch)[:, None]
    rope = ropewalk.Rope(head_dim, 5e5, "half")
    rotation = rope.at(positions)
    learned = ropewalk.Rotation(*(x.clone().requires_grad_() for x in (rotation.cos, rotation.sin)), pairing="half")
    weight = torch.ones(head_dim, dtype=dtype)
    pages = [torch.empty(64, 16, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    norm, store = QKNorm(weight, weight, 1e-6), StoreArguments(v, *pages, positions)
    ones = [torch.ones_like(q), torch.ones_like(k)]
    recorded = rotation(*leaves, layout="bshd")
    of_tables = learned(q, k, layout="bshd")
    calls = {
        "rotation(q, k)": lambda: rotation(q, k, layout="bshd"),
        "rotation.apply_(q, k)": lambda: rotation.apply_(*changed, layout="bshd"),
        "rotation(q, k), with gradients": lambda: rotation(*leaves, layout="bshd"),
        "backward": lambda: torch.autograd.grad(recorded, leaves, ones, retain_graph=True),
        "backward to learned tables": lambda: torch.autograd.grad(
            of_tables, (learned.cos, learned.sin), ones, retain_graph=True
        ),
        "rope.at(positions)": lambda: rope.at(positions),
        "fused step with norm and cache": lambda: run_fused(rotation, q, k, layout="bshd", norm=norm, store=store),
        "torch.empty_like(q), for comparison": lambda: torch.empty_like(q),
    }
    print(f"torch {torch.__version__}, Triton {triton.__version__}, Python {sys.version.split()[0]}; µs")
    for name, call in calls.items():
        torch.set_grad_enabled("gradients" in name or "backward" in name)
        for _ in range(50):
            call()
        launched.clear()
        entered = frames(call)
        launches, times = len(launched), measure(call)
        of_times = f"{statistics.median(times):6.1f} (min {min(times):5.1f})"
        print(f"{name:<36} {of_times}  frames {entered:3}  launches {launches}")


if __name__ == "__main__":
    main()
