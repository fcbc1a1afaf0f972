"""Write the folder that Hugging Face's `kernels` loads: python tools/hub_kernel.py FOLDER [WHEEL ...]

FOLDER must be empty or missing. It gets the `build/` layout of kernels 0.17, a card and the license, and is what is
uploaded to the hub. The code is the closure of the imports of src/ropewalk/integrations/hub.py, with imports of
ropewalk made relative. So it depends on torch alone, and may be loaded beside an installed ropewalk.

The compiled modules for CPUs are taken from the wheels, or without wheels from the installed ropewalk, which serves
only this Python. One variant in `build/` serves each platform of these modules, and pure Python the others.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import inspect
import json
import platform
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ropewalk.integrations import hub

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "ropewalk"
ENTRY = "integrations.hub"
VERSION = 1  # of the kernel on the hub. A change that breaks callers increases it.
OLDEST_TORCH = "210"  # as pyproject.toml says. The compiled module itself uses nothing of torch.
TRITON = ("cuda", "rocm")  # The others use PyTorch's operators.
NOARCH = (*TRITON, "cpu", "metal", "xpu")
COMPILED = re.compile(r"(?:.*/)?(_cpu\.(?:.+\.)?(?:so|pyd))")
INIT = f'''"""Rotary position embeddings for q and k, with backward. Written by tools/hub_kernel.py of ropewalk."""

from .{ENTRY.rpartition(".")[0]} import hub as layers
from .{ENTRY} import apply_rotary_pos_emb

__all__ = ["apply_rotary_pos_emb", "layers"]
'''
IMPORT = re.compile(r"^( *from )ropewalk\b\.?", re.M)


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the names that code imports from ropewalk, except for type checkers, and the packages that contain them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("ropewalk."):
            for alias in node.names:
                parts = f"{node.module}.{alias.name}".split(".")[1:]
                yield from (".".join(parts[:n]) for n in range(1, len(parts) + 1))
        yield from imports(node)


def sources() -> dict[str, bytes]:
    """Return the files that the entry imports, directly and indirectly, by their paths in a variant."""
    licenses = {path.name: path.read_bytes() for path in (ROOT / "LICENSE", ROOT / "csrc" / "THIRD_PARTY_LICENSES")}
    found = {"__init__.py": INIT.encode(), **licenses}
    waiting = [ENTRY]
    while waiting:
        name = waiting.pop()
        paths = (f"{name.replace('.', '/')}{end}" for end in (".py", "/__init__.py"))
        relative = next((path for path in paths if (SOURCE / path).is_file()), None)
        if relative is not None and relative not in found:
            text = (SOURCE / relative).read_text("utf-8")
            found[relative] = IMPORT.sub(rf"\1{'.' * (relative.count('/') + 1)}", text).encode()
            waiting += imports(ast.parse(text))
    return found


def compiled(wheels: list[Path]) -> dict[str, dict[str, bytes]]:
    """Return the compiled modules of each platform, such as x86_64-linux, by their file names."""
    found: dict[str, dict[str, bytes]] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if file := COMPILED.fullmatch(name):
                    found.setdefault(platform_of(wheel.stem.rpartition("-")[2]), {})[file[1]] = archive.read(name)
    installed = importlib.util.find_spec("ropewalk") and importlib.util.find_spec("ropewalk.kernels._cpu")
    if not wheels and installed and installed.origin:
        file = Path(installed.origin)
        found[platform_of(f"{platform.system()}_{platform.machine()}")] = {file.name: file.read_bytes()}
    if not found:
        raise SystemExit("No compiled module was found. Install ropewalk with a C++ compiler, or pass wheels.")
    return found


def platform_of(tag: str) -> str:
    """Return the platform as a variant names it, of the platform tag of a wheel or the names of this system."""
    tag = tag.lower()
    system = "darwin" if tag.startswith(("macosx", "darwin")) else "windows" if tag.startswith("win") else "linux"
    for ends, machine in ((("x86_64", "amd64"), "x86_64"), (("aarch64", "arm64"), "aarch64")):
        if tag.endswith(ends):
            return f"{machine}-{system}"
    raise SystemExit(f"The hub has no variant for {tag}.")


def write_variant(folder: Path, backend: str, files: dict[str, bytes]) -> None:
    """Write a variant. Its id names the module that Python loads, so each content has its own."""
    digest = hashlib.sha256(b"".join(name.encode() + b"\0" + files[name] for name in sorted(files))).hexdigest()
    metadata = {
        "name": "ropewalk",
        "id": f"_ropewalk_{backend}_{digest[:8]}",
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }
    for name, content in {**files, "metadata.json": f"{json.dumps(metadata, indent=2)}\n".encode()}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def layers() -> str:
    """Return a table of the layers and their docstrings."""
    classes = [value for value in vars(hub).values() if isinstance(value, type) and value.__module__ == hub.__name__]
    rows = [f"| `{layer.__name__}` | {' '.join((inspect.getdoc(layer) or '').split())} |" for layer in classes]
    return "\n".join(["| layer | rotates |", "|---|---|", *rows])


CARD = """---
library_name: kernels
license: apache-2.0
tags:
- kernel
---

# ropewalk: rotary position embeddings with a backward

This kernel replaces `apply_rotary_pos_emb` of transformers in inference and training. It computes in float32 and
rounds each result once. One launch rotates q and k, and one their gradients. It needs PyTorch 2.10 and Python 3.11,
or newer ones.

```python
import torch
from transformers import AutoModelForCausalLM, KernelConfig

kernel = ("OWNER/ropewalk:RotaryPosEmb", {"version": VERSION, "trust_remote_code": True})
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, device_map="cuda")
model.set_use_kernels(True, KernelConfig({"rotary_pos_emb": kernel}))
```

For training, call `model.train()` first, because transformers chooses the kernel for the mode of the model.
transformers does not accept the device "cpu" in a `KernelConfig`. Use the mapping of `kernels` there:

```python
from kernels import LayerRepository, use_kernel_mapping

layer = LayerRepository("OWNER/ropewalk", layer_name="RotaryPosEmb", version=VERSION, trust_remote_code=True)
with use_kernel_mapping({"rotary_pos_emb": {"cpu": layer}}):
    model.set_use_kernels(True)
```

## Layers

LAYERS

All have `has_backward` and `can_torch_compile`, accept `k=None`, and rotate each row of a batch by its own row of cos
and sin. The function `apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim, *, pairing, width)` has all their cases.

In transformers 5.23, only functions for the first layer have a name for kernels, `rotary_pos_emb`. Do not use the
layer for Hunyuan VL: the two halves of its cos and sin differ, which is not a rotation, and the layer reads only one
of them.

## Where it runs

| Variant | Kernel |
|---|---|
VARIANTS

The Triton kernels give correct results in Triton's interpreter, but have not run on a GPU. In the variants for GPUs,
PyTorch's operators rotate tensors on the CPU.
"""


def card(platforms: list[str]) -> str:
    """Return the card."""
    kernels = {name: f"torch-{name}" for name in NOARCH}
    triton = " and ".join(f"`{kernels.pop(name)}`" for name in TRITON)
    variants = [f"| `{abi_variant(name)}` | C++ for the CPU |" for name in platforms]
    variants += [
        f"| {triton} | Triton |",
        f"| {', '.join(f'`{name}`' for name in kernels.values())} | PyTorch's operators |",
    ]
    parts = {"LAYERS": layers(), "VARIANTS": "\n".join(variants), "VERSION": str(VERSION)}
    return re.sub("|".join(parts), lambda found: parts[found[0]], CARD)


def abi_variant(name: str) -> str:
    """Return the variant of a platform's compiled module: the name stands for PyTorch of OLDEST_TORCH and newer."""
    return f"torch-stable-abi{OLDEST_TORCH}-cpu-{name}"


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description="Write the folder of the kernel for Hugging Face's hub.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("wheels", type=Path, nargs="*", help="wheels of ropewalk, which contain the compiled modules")
    arguments = parser.parse_args()
    if arguments.folder.exists() and any(arguments.folder.iterdir()):
        raise SystemExit(f"{arguments.folder} is not empty.")
    files, platforms = sources(), compiled(arguments.wheels)
    build = arguments.folder / "build"
    for backend in NOARCH:
        write_variant(build / f"torch-{backend}", backend, files)
    for name, modules in platforms.items():
        inner = {f"kernels/{file}": content for file, content in modules.items()}
        write_variant(build / abi_variant(name), "cpu", files | inner)
    (arguments.folder / "README.md").write_text(card(sorted(platforms)), "utf-8")
    (arguments.folder / "LICENSE").write_bytes(files["LICENSE"])
    print(f"{arguments.folder}: {', '.join(sorted(path.name for path in build.iterdir()))}")


if __name__ == "__main__":
    main()
