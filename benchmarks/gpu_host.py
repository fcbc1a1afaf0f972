"""Measure what an eager call costs the host of a GPU, without one. Run from the root: python benchmarks/gpu_host.py

Tensors on the CPU take the road of GPU tensors, and kernels are compiled for sm_90. Only Triton's driver is replaced,
so the times do not include its C launcher, `cuLaunchKernel` and other calls of CUDA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import harness
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

import ropewalk
from ropewalk.kernels import backend, gpu
from ropewalk.rotation.qk_norm import QKNorm, StoreArguments, run_fused
from ropewalk.tools import bench


class Driver:
    """A driver of Triton for a device that is not there: kernels are compiled, and not loaded or launched."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


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


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.set_defaults(threads=1, rounds=15)
    options = parser.parse_args(arguments)
    out = harness.Results(options, rows=[])
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
    print(f"Triton {triton.__version__}, Python {sys.version.split()[0]}; µs, with the 10th and 90th percentile")
    for name in harness.select(list(calls), options.only):
        call = calls[name]
        torch.set_grad_enabled("gradients" in name or "backward" in name)
        for _ in range(50):
            call()
        launched.clear()
        entered = frames(call)
        launches, sample = len(launched), bench.OnCpu().prepare([call])
        times = bench.summary([sample() for _ in range(options.rounds)])
        of_times = f"{1e6 * times['median']:6.1f} ({1e6 * times['p10']:5.1f} to {1e6 * times['p90']:5.1f})"
        out.found["rows"].append({"call": name, "frames": entered, "launches": launches, **times})
        out.write()
        print(f"{name:<36} {of_times}  frames {entered:3}  launches {launches}")


if __name__ == "__main__":
    main()
