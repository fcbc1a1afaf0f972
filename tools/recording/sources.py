"""peers/: known q and k, rotated by functions of repositories that are not packages.

A file is read from the commit that the golden file names, which need not be checked out in the clone. Only the named
functions of the file are run, so nothing of the repository has to be installed.
"""

from __future__ import annotations

import ast
import ctypes
import math
import numbers
import subprocess
import tempfile
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import files
from .model import CannotRecordError
from .peers import package, record


def text(peer: str, file: str, source: Path | None) -> str:
    """Read a file from the commit that a golden file names.

    Raises:
        CannotRecordError: no clone was passed, or it lacks the commit.
    """
    peer_info = files.load(files.FOLDER / "peers" / f"{peer}.json")["peer"]
    if source is None:
        raise CannotRecordError(f"pass a clone of github.com/{peer_info['repo']} as --source")
    commit = peer_info["commit"].split()[0]
    command = ["git", "-C", str(source), "show", f"{commit}:{file}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    if shown.returncode:
        raise CannotRecordError(f"{source} has no {file} at {commit}")
    return shown.stdout


def run(code: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Execute the functions and classes with these names, and return the resulting namespace."""
    tree = ast.parse(code)
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    # The names in their annotations must exist, because annotations are evaluated.
    scope: dict[str, Any] = {"math": math, "torch": torch, "Tensor": Tensor, "Real": numbers.Real}
    scope |= {name: getattr(typing, name) for name in ("List", "Optional", "Tuple", "Union")}
    if "rearrange(" in code:
        scope |= {name: getattr(package("einops"), name) for name in ("rearrange", "repeat")}
    exec(compile(tree, "<source>", "exec"), scope)
    return scope


class RecordOuter(TorchFunctionMode):
    """Records the frequencies that `torch.outer` multiplies with positions."""

    inv_freq: Tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.outer:
            self.inv_freq = args[1]
        return func(*args, **(kwargs or {}))


def heads_last(rotate: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a function that rotates tensors [1, tokens, heads, head_dim]."""
    return lambda x: rotate(x.transpose(1, 2)).transpose(1, 2)


def meta_llama(case: dict[str, Any], source: Path | None = None) -> dict[str, Any]:
    """Record a case of Meta's Llama 3."""
    code = text("meta_llama", "models/llama3/model.py", source)
    functions = run(code, ("apply_scaling", "precompute_freqs_cis", "reshape_for_broadcast", "apply_rotary_emb"))
    params = case["params"]
    with RecordOuter() as outer:
        end = max(case["positions"]) + 1
        table = functions["precompute_freqs_cis"](params["dim"], end, params["theta"], params["use_scaled"])
    table = table[case["positions"]]
    return record(case, heads_last(lambda x: functions["apply_rotary_emb"](x, x, table)[0]), outer.inv_freq)


def gpt_fast(case: dict[str, Any], source: Path | None = None) -> dict[str, Any]:
    """Record a case of gpt-fast."""
    functions = run(
        text("gpt_fast", "model.py", source), ("apply_rope_scaling", "precompute_freqs_cis", "apply_rotary_emb")
    )
    params = case["params"]
    dtype = getattr(torch, params["dtype"].removeprefix("torch."))
    table = functions["precompute_freqs_cis"](
        max(case["positions"]) + 1, case["q_shape"][-1], params["theta"], dtype, params["rope_scaling"]
    )[case["positions"]]
    return record(case, heads_last(lambda x: functions["apply_rotary_emb"](x, table)))


def jquesnelle_yarn(case: dict[str, Any], source: Path | None = None) -> dict[str, Any]:
    """Record a case of the YaRN authors' repository."""
    kind = "Linear" if "linear" in case["id"] else "DynamicYaRN" if "dynamic" in case["id"] else "YaRN"
    name = f"Llama{kind}ScaledRotaryEmbedding"
    helpers = ("find_correction_dim", "find_correction_range", "linear_ramp_mask", "get_mscale")
    functions = run(text("jquesnelle_yarn", f"scaled_rope/{name}.py", source), (*helpers, name))
    rotary = functions[name](case["q_shape"][-1], **case["params"])
    cos, sin = (table[0, 0, case["positions"]] for table in rotary(torch.zeros(1), seq_len=max(case["positions"]) + 1))

    def rotate(x: Tensor) -> Tensor:  # as apply_rotary_pos_emb of Llama in transformers, for which the class is written
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return record(
        {**case, "mscale": getattr(rotary, "mscale", None)} if "mscale" in case else case, rotate, rotary.inv_freq
    )


def flash_attn_torch(case: dict[str, Any], source: Path | None = None) -> dict[str, Any]:
    """Record a case of the PyTorch code of flash-attention."""
    code = text("flash_attn_torch", "flash_attn/layers/rotary.py", source)
    functions = run(code, ("rotate_half", "apply_rotary_emb_torch", "RotaryEmbedding"))
    params = case["params"]
    rotary = functions["RotaryEmbedding"](params["rotary_dim"], params["base"], params["interleaved"])
    rotary._update_cos_sin_cache(max(case["positions"]) + 1, dtype=torch.float32)
    cos, sin = rotary._cos_cached[case["positions"]], rotary._sin_cached[case["positions"]]
    rotate = heads_last(lambda x: functions["apply_rotary_emb_torch"](x, cos, sin, params["interleaved"]))
    return record(case, rotate, rotary.inv_freq)


def llama2c(case: dict[str, Any], source: Path | None = None) -> dict[str, Any]:
    """Record a case of llama2.c. Its loop is a part of a long function, and is compiled as a function of its own."""
    lines = text("llama2c", "run.c", source).split("// RoPE relative", 1)[1].split("// multihead attention", 1)[0]
    size = case["params"]["head_size"]
    with tempfile.TemporaryDirectory() as folder:
        library = _compile(
            "#include <math.h>\nstruct state { float *q, *k; };\n"
            "void turn(struct state *s, int pos, int dim, int kv_dim, int head_size) {\n//" + lines + "}\n",
            Path(folder),
        )

    class State(ctypes.Structure):
        _fields_ = [("q", ctypes.POINTER(ctypes.c_float)), ("k", ctypes.POINTER(ctypes.c_float))]

    def rotate(x: Tensor) -> Tensor:
        tokens = x[0].transpose(0, 1).reshape(x.shape[2], -1).clone()
        for token, position in zip(tokens, case["positions"], strict=True):
            values = ctypes.cast(token.data_ptr(), ctypes.POINTER(ctypes.c_float))
            library.turn(ctypes.byref(State(values, values)), position, len(token), 0, size)
        return tokens.view(x.shape[2], x.shape[1], -1).transpose(0, 1).unsqueeze(0)

    return record(case, rotate)


def _compile(code: str, folder: Path) -> ctypes.CDLL:
    """Compile C code with gcc and load it.

    Raises:
        CannotRecordError: gcc fails.
    """
    (folder / "turn.c").write_text(code)
    command = ["gcc", "-O3", "-shared", "-fPIC", "-o", "turn.so", "turn.c", "-lm"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotRecordError(f"gcc does not compile it: {error}") from error
    return ctypes.CDLL(str(folder / "turn.so"))


GOLDEN = [
    files.Golden(
        f"peers/{recorder.__name__}.json", lambda case: str(case["id"]), recorder, "torch", "cases", source=True
    )
    for recorder in (meta_llama, gpt_fast, jquesnelle_yarn, flash_attn_torch, llama2c)
]
