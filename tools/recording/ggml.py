"""peers/ggml.json: known q and k, rotated by ggml, which must be built in a clone of its repository:

git checkout COMMIT && cmake -B build -DBUILD_SHARED_LIBS=ON && cmake --build build --target ggml-cpu
"""

from __future__ import annotations

import ctypes
import subprocess
from ctypes import c_bool, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import files
from .model import CannotRecordError
from .peers import record

FLOATS, INTEGERS = 0, 26  # GGML_TYPE_F32, GGML_TYPE_I32


class InitParams(ctypes.Structure):
    """The C struct ggml_init_params."""

    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


SIGNATURES: dict[str, Any] = {
    "ggml_init": ([InitParams], c_void_p),
    "ggml_free": ([c_void_p], None),
    "ggml_new_tensor_1d": ([c_void_p, c_int, c_int64], c_void_p),
    "ggml_new_tensor_3d": ([c_void_p, c_int, c_int64, c_int64, c_int64], c_void_p),
    "ggml_get_data": ([c_void_p], c_void_p),
    "ggml_rope_ext": ([c_void_p] * 4 + [c_int] * 3 + [c_float] * 6, c_void_p),
    "ggml_rope_set_offset": ([c_void_p, c_int], c_void_p),
    "ggml_new_graph": ([c_void_p], c_void_p),
    "ggml_build_forward_expand": ([c_void_p, c_void_p], None),
    "ggml_graph_compute_with_ctx": ([c_void_p, c_void_p, c_int], c_int),
}


class Library:
    """The functions of ggml that a rotation needs, without the prefix ggml_."""

    def __init__(self, source: Path) -> None:
        parts = [ctypes.CDLL(str(source / "build" / "src" / f"libggml-{part}.so")) for part in ("base", "cpu")]
        for name, (argument_types, result_type) in SIGNATURES.items():
            function = next(getattr(part, name) for part in reversed(parts) if hasattr(part, name))
            function.argtypes, function.restype = argument_types, result_type
            setattr(self, name.removeprefix("ggml_"), function)


def library(source: Path | None) -> Any:
    """Load ggml of the commit that the golden file names.

    Raises:
        CannotRecordError: no clone was passed, another commit is checked out, or ggml is not built.
    """
    commit = files.load(files.FOLDER / "peers" / "ggml.json")["peer"]["mirror_commit"].split()[0]
    if source is None:
        raise CannotRecordError("pass a built clone of github.com/ggml-org/ggml as --source")
    command = ["git", "-C", str(source), "rev-parse", "--verify", "-q", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if head != commit:
        raise CannotRecordError(f"{source} is at {head or 'no commit'} instead of {commit}")
    try:
        return Library(source)
    except OSError as error:
        raise CannotRecordError(f"ggml is not built: {error}") from error


def ggml(case: dict[str, Any], source: Path | None = None) -> dict[str, Any]:
    """Record a case again."""
    params, functions = case["params"], library(source)
    if params["back"] or any(params["sections"]):
        raise CannotRecordError("only forward rotations with one axis can be recorded")

    def rotate(x: Tensor) -> Tensor:
        """Rotate x [1, heads, tokens, head_dim]. In ggml, tokens precede heads."""
        tokens_first = x[0].transpose(0, 1).contiguous()
        context = functions.init(InitParams(16 * tokens_first.numel() + 2**24, None, False))
        q = functions.new_tensor_3d(context, FLOATS, *reversed(tokens_first.shape))
        ctypes.memmove(functions.get_data(q), tokens_first.data_ptr(), 4 * tokens_first.numel())
        positions = _vector(functions, context, INTEGERS, torch.tensor(case["positions"], dtype=torch.int32))
        factors = params["freq_factors"]
        per_pair = None if factors is None else _vector(functions, context, FLOATS, torch.tensor(factors))
        names = ("freq_base", "freq_scale", "ext_factor", "attn_factor", "beta_fast", "beta_slow")
        numbers = (params["n_dims"], params["mode"], params["n_ctx_orig"], *(params[name] for name in names))
        out = functions.rope_ext(context, q, positions, per_pair, *numbers)
        if params["offset"]:
            out = functions.rope_set_offset(out, params["offset"])
        graph = functions.new_graph(context)
        functions.build_forward_expand(graph, out)
        functions.graph_compute_with_ctx(context, graph, 1)
        rotated = torch.empty_like(tokens_first)
        ctypes.memmove(rotated.data_ptr(), functions.get_data(out), 4 * tokens_first.numel())
        functions.free(context)
        return rotated.transpose(0, 1).unsqueeze(0)

    return record(case, rotate)


def _vector(functions: Any, context: Any, kind: int, values: Tensor) -> Any:
    """Create a ggml tensor with one axis."""
    tensor = functions.new_tensor_1d(context, kind, len(values))
    ctypes.memmove(functions.get_data(tensor), values.data_ptr(), 4 * len(values))
    return tensor


GOLDEN = files.Golden("peers/ggml.json", lambda case: str(case["id"]), ggml, "torch", "cases", source=True)
