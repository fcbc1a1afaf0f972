"""peers/: q and k of known inputs, rotated by code that is no package: functions of a commit in a clone.

A file is read from the commit that the golden file names, whatever is checked out, and only the named functions of it
are run, so that nothing else of the repository has to be installed.
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
    """A file of the commit that a golden file names.

    Raises:
        CannotRecordError: no clone is given, or it has no such commit.
    """
    said = files.load(files.FOLDER / "peers" / f"{peer}.json")["peer"]
    if source is None:
        raise CannotRecordError(f"give a clone of github.com/{said['repo']} as --source")
    commit = said["commit"].split()[0]
    command = ["git", "-C", str(source), "show", f"{commit}:{file}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    if shown.returncode:
        raise CannotRecordError(f"{source} has no {file} at {commit}")
    return shown.stdout


def run(code: str, names: tuple[str, ...]) -> dict[str, Any]:
    """What the functions and classes of these names in a file become, with the imports that they need."""
    tree = ast.parse(code)
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    # Their annotations are evaluated as they are written.
    scope: dict[str, Any] = {"math": math, "torch": torch, "Tensor": Tensor, "Real": numbers.Real}
    scope |= {name: getattr(typing, name) for name in ("List", "Optional", "Tuple", "Union")}
    if "rearrange(" in code:
        scope |= {name: getattr(package("einops"), name) for name in ("rearrange", "repeat")}
    exec(compile(tree, "<source>", "exec"), scope)
    return scope


class Outer(TorchFunctionMode):
    """Keeps the frequencies with which a table multiplies its positions."""

    inv_freq: Tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.outer:
            self.inv_freq = args[1]
        return func(*args, **(kwargs or {}))


def heads_last(turn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """For a function of [1, tokens, heads, head_dim]."""
    return lambda x: turn(x.transpose(1, 2)).transpose(1, 2)


def meta_llama(case: dict[str, Any], source: Path | None = None) -> dict[str, Any]:
    code = text("meta_llama", "models/llama3/model.py", source)
    its = run(code, ("apply_scaling", "precompute_freqs_cis", "reshape_for_broadcast", "apply_rotary_emb"))
    params = case["params"]
    with Outer() as outer:
        end = max(case["positions"]) + 1
        table = its["precompute_freqs_cis"](params["dim"], end, params["theta"], params["use_scaled"])
    table = table[case["positions"]]
    return record(case, heads_last(lambda x: its["apply_rotary_emb"](x, x, table)[0]), outer.inv_freq)


def gpt_fast(case: dict[str, Any], source: Path | None = None) -> dict[str, Any]:
    its = run(text("gpt_fast", "model.py", source), ("apply_rope_scaling", "precompute_freqs_cis", "apply_rotary_emb"))
    params = case["params"]
    dtype = getattr(torch, params["dtype"].removeprefix("torch."))
    table = its["precompute_freqs_cis"](
        max(case["positions"]) + 1, case["q_shape"][-1], params["theta"], dtype, params["rope_scaling"]
    )[case["positions"]]
    return record(case, heads_last(lambda x: its["apply_rotary_emb"](x, table)))


def jquesnelle_yarn(case: dict[str, Any], source: Path | None = None) -> dict[str, Any]:
    kind = "Linear" if "linear" in case["id"] else "DynamicYaRN" if "dynamic" in case["id"] else "YaRN"
    name = f"Llama{kind}ScaledRotaryEmbedding"
    helpers = ("find_correction_dim", "find_correction_range", "linear_ramp_mask", "get_mscale")
    its = run(text("jquesnelle_yarn", f"scaled_rope/{name}.py", source), (*helpers, name))
    rotary = its[name](case["q_shape"][-1], **case["params"])
    cos, sin = (each[0, 0, case["positions"]] for each in rotary(torch.zeros(1), seq_len=max(case["positions"]) + 1))

    def turn(x: Tensor) -> Tensor:  # apply_rotary_pos_emb of Llama in transformers, which the class is made for
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return record(
        {**case, "mscale": getattr(rotary, "mscale", None)} if "mscale" in case else case, turn, rotary.inv_freq
    )


def flash_attn_torch(case: dict[str, Any], source: Path | None = None) -> dict[str, Any]:
    code = text("flash_attn_torch", "flash_attn/layers/rotary.py", source)
    its = run(code, ("rotate_half", "apply_rotary_emb_torch", "RotaryEmbedding"))
    params = case["params"]
    rotary = its["RotaryEmbedding"](params["rotary_dim"], params["base"], params["interleaved"])
    rotary._update_cos_sin_cache(max(case["positions"]) + 1, dtype=torch.float32)
    cos, sin = rotary._cos_cached[case["positions"]], rotary._sin_cached[case["positions"]]
    turn = heads_last(lambda x: its["apply_rotary_emb_torch"](x, cos, sin, params["interleaved"]))
    return record(case, turn, rotary.inv_freq)


def llama2c(case: dict[str, Any], source: Path | None = None) -> dict[str, Any]:
    """The loop stands inside of a longer function, so that its lines are compiled as one of their own."""
    lines = text("llama2c", "run.c", source).split("// RoPE relative", 1)[1].split("// multihead attention", 1)[0]
    size = case["params"]["head_size"]
    with tempfile.TemporaryDirectory() as folder:
        library = _compiled(
            "#include <math.h>\nstruct state { float *q, *k; };\n"
            "void turn(struct state *s, int pos, int dim, int kv_dim, int head_size) {\n//" + lines + "}\n",
            Path(folder),
        )

    class State(ctypes.Structure):
        _fields_ = [("q", ctypes.POINTER(ctypes.c_float)), ("k", ctypes.POINTER(ctypes.c_float))]

    def turn(x: Tensor) -> Tensor:
        tokens = x[0].transpose(0, 1).reshape(x.shape[2], -1).clone()
        for token, position in zip(tokens, case["positions"], strict=True):
            values = ctypes.cast(token.data_ptr(), ctypes.POINTER(ctypes.c_float))
            library.turn(ctypes.byref(State(values, values)), position, len(token), 0, size)
        return tokens.view(x.shape[2], x.shape[1], -1).transpose(0, 1).unsqueeze(0)

    return record(case, turn)


def _compiled(code: str, folder: Path) -> ctypes.CDLL:
    (folder / "turn.c").write_text(code)
    command = ["gcc", "-O3", "-shared", "-fPIC", "-o", "turn.so", "turn.c", "-lm"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotRecordError(f"gcc does not compile it: {error}") from error
    return ctypes.CDLL(str(folder / "turn.so"))


GOLDEN = [
    files.Golden(f"peers/{each.__name__}.json", lambda case: str(case["id"]), each, "torch", "cases", source=True)
    for each in (meta_llama, gpt_fast, jquesnelle_yarn, flash_attn_torch, llama2c)
]
