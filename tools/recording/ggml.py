"""peers/ggml.json: q and k of known inputs, rotated by ggml, from a clone of its repository that is built.

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
    """ggml_init_params."""

    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


RESULTS: dict[str, Any] = {
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
    """The functions of ggml that a rotation needs."""

    def __init__(self, source: Path) -> None:
        parts = [ctypes.CDLL(str(source / "build" / "src" / f"libggml-{part}.so")) for part in ("base", "cpu")]
        for name, (taken, given) in RESULTS.items():
            function = next(getattr(part, name) for part in reversed(parts) if hasattr(part, name))
            function.argtypes, function.restype = taken, given
            setattr(self, name.removeprefix("ggml_"), function)


def library(source: Path | None) -> Any:
    """ggml of the commit that the golden file names.

    Raises:
        CannotRecordError: no clone is given, it has another commit checked out, or it is not built.
    """
    commit = files.load(files.FOLDER / "peers" / "ggml.json")["peer"]["mirror_commit"].split()[0]
    if source is None:
        raise CannotRecordError("give a clone of github.com/ggml-org/ggml that is built as --source")
    command = ["git", "-C", str(source), "rev-parse", "--verify", "-q", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if head != commit:
        raise CannotRecordError(f"{source} is at {head or 'no commit'}, and not at {commit}")
    try:
        return Library(source)
    except OSError as error:
        raise CannotRecordError(f"ggml is not built: {error}") from error


def ggml(case: dict[str, Any], source: Path | None = None) -> dict[str, Any]:
    params, its = case["params"], library(source)
    if params["back"] or any(params["sections"]):
        raise CannotRecordError("only rotations forward and of one axis are recorded")

    def turn(x: Tensor) -> Tensor:
        """[1, heads, tokens, head_dim]; inside of ggml the heads stand after the tokens."""
        given = x[0].transpose(0, 1).contiguous()
        context = its.init(InitParams(16 * given.numel() + 2**24, None, False))
        q = its.new_tensor_3d(context, FLOATS, *reversed(given.shape))
        ctypes.memmove(its.get_data(q), given.data_ptr(), 4 * given.numel())
        positions = _vector(its, context, INTEGERS, torch.tensor(case["positions"], dtype=torch.int32))
        factors = params["freq_factors"]
        per_pair = None if factors is None else _vector(its, context, FLOATS, torch.tensor(factors))
        names = ("freq_base", "freq_scale", "ext_factor", "attn_factor", "beta_fast", "beta_slow")
        numbers = (params["n_dims"], params["mode"], params["n_ctx_orig"], *(params[name] for name in names))
        out = its.rope_ext(context, q, positions, per_pair, *numbers)
        if params["offset"]:
            out = its.rope_set_offset(out, params["offset"])
        graph = its.new_graph(context)
        its.build_forward_expand(graph, out)
        its.graph_compute_with_ctx(context, graph, 1)
        turned = torch.empty_like(given)
        ctypes.memmove(turned.data_ptr(), its.get_data(out), 4 * given.numel())
        its.free(context)
        return turned.transpose(0, 1).unsqueeze(0)

    return record(case, turn)


def _vector(its: Any, context: Any, kind: int, values: Tensor) -> Any:
    tensor = its.new_tensor_1d(context, kind, len(values))
    ctypes.memmove(its.get_data(tensor), values.data_ptr(), 4 * len(values))
    return tensor


GOLDEN = files.Golden("peers/ggml.json", lambda case: str(case["id"]), ggml, "torch", "cases", source=True)
