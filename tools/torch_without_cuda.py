"""Make an installed CUDA build of PyTorch work without CUDA's libraries, which take gigabytes. matrix.py runs this.

    pip install --no-deps torch==2.11.* && python tools/torch_without_cuda.py && pip install ropewalk

PyPI has no CPU builds for Linux on x86-64. A CUDA build also runs on the CPU, but `import torch` fails if CUDA's
libraries are missing. This script writes stubs of them, with which PyTorch finds no GPU, and removes them from the
requirements of the installed package. It needs a C compiler, readelf and nm. It does not change a CPU build.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

OF_CUDA = r"(cuda|nvidia)-"
LIBRARY = re.compile(r"lib(cu|nv|nccl).*\.so\.")
FUNCTION = re.compile(r"_*(cu|nv|nccl)\w+")
# What PyTorch calls when it is loaded, and when it looks for GPUs. 100 is cudaErrorNoDevice.
CALLED = {
    "__cudaRegisterFatBinary": "void *{}(void) {{ static void *handle; return &handle; }}",
    "cudaGetErrorName": 'const char *{}(void) {{ return "stub"; }}',
    "cudaGetErrorString": 'const char *{}(void) {{ return "a stub of CUDA"; }}',
    "cudaGetLastError": "int {}(void) {{ return 0; }}",
    "cudaPeekAtLastError": "int {}(void) {{ return 0; }}",
}
OTHER = "int {}(void) {{ return 100; }}"


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def write_stubs(folder: Path) -> list[str]:
    """Write stubs of the missing libraries beside PyTorch's own, in `folder`. Return the names of these libraries.

    One library has all functions. The others are empty and load it: if they had the functions that they are named
    after, they would have to have the right versions of them, too.
    """
    own = [path for path in folder.glob("lib*.so*") if not path.is_symlink()]
    needed = {name for path in own for name in re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-dW", path))}
    missing = sorted(name for name in needed if LIBRARY.match(name) and not (folder / name).exists())
    if not missing:
        return []
    undefined = {line.split()[-1] for path in own for line in output("nm", "-D", "-u", path).splitlines()}
    names = {name.partition("@")[0] for name in undefined}
    functions = sorted(name for name in names if FUNCTION.fullmatch(name))
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "stubs.c"
        source.write_text("\n".join(CALLED.get(name, OTHER).format(name) for name in functions) + "\n")
        compiler = [os.environ.get("CC") or "cc", "-w", "-fno-builtin", "-shared", "-fPIC"]
        output(*compiler, "-Wl,-soname,libcuda_stubs.so", "-o", folder / "libcuda_stubs.so", source)
        source.write_text("")
        for name in missing:
            linked = ["-Wl,--no-as-needed", "-L", folder, "-lcuda_stubs", "-Wl,-rpath,$ORIGIN"]
            output(*compiler, f"-Wl,-soname,{name}", "-o", folder / name, source, *linked)
    return missing


def remove_requirements(file: Path) -> None:
    """Remove CUDA's libraries from the requirements, so that pip does not install them later."""
    file.write_text(re.sub(rf"(?m)^Requires-Dist: {OF_CUDA}.*\n", "", file.read_text("utf-8")), "utf-8")


def main() -> int:
    installed = metadata.distribution("torch")
    stubs = write_stubs(Path(str(installed.locate_file("torch/lib"))))
    if stubs:
        (file,) = (path for path in installed.files or () if path.name == "METADATA")
        remove_requirements(Path(str(installed.locate_file(file))))
    print(f"torch {installed.version}: {len(stubs)} libraries of CUDA are stubs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
