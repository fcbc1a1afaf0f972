"""learned.json: known q and k, rotated by models whose frequencies are learned separately for each head.

Only the named functions and classes are run. Those of rope-vit come from a commit in a clone, and those of timm and
diffusers from an installed package of the version that the row names.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import numbers
import subprocess
import typing
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import files
from .model import CannotRecordError
from .rotated import golden, shortest

Rotate = Callable[[Tensor], Tensor]
"""A function that rotates a tensor [1, heads, tokens, head_dim]."""


def run(code: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Execute the functions and classes with these names, nested ones included, without decorators.

    Return the resulting namespace.
    """
    found = [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in names
    ]
    for node in found:
        node.decorator_list = []
    scope: dict[str, Any] = {"math": math, "torch": torch, "nn": torch.nn, "Real": numbers.Real}
    scope |= {name: getattr(typing, name) for name in typing.__all__}
    exec(compile(ast.Module(found, []), "<source>", "exec"), scope)
    return scope


def text(of: dict[str, str], source: Path | None) -> str:
    """Read the file that a row names.

    Raises:
        CannotRecordError: no clone was passed, or the package is not installed in that version.
    """
    if "commit" in of:
        if source is None:
            raise CannotRecordError(f"pass a clone of github.com/{of['repo']} as --source")
        command = ["git", "-C", str(source), "show", f"{of['commit']}:{of['file']}"]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        if shown.returncode:
            raise CannotRecordError(f"{source} has no {of['file']} at {of['commit']}")
        return shown.stdout
    try:
        installed = version(of["package"])
    except PackageNotFoundError:
        installed = "none"
    spec = importlib.util.find_spec(of["package"])
    if installed != of["version"] or spec is None or not spec.submodule_search_locations:
        raise CannotRecordError(f"{of['package']} {of['version']} is required, and {installed} is installed")
    return (Path(spec.submodule_search_locations[0]) / of["file"]).read_text()


def rope_vit(code: str, params: dict[str, Any]) -> tuple[Tensor, Tensor, Rotate]:
    """Return inv_freq, positions and the rotation of rope-vit."""
    functions = run(
        code, ("init_random_2d_freqs", "compute_mixed_cis", "init_t_xy", "reshape_for_broadcast", "apply_rotary_emb")
    )
    torch.manual_seed(0)
    inv_freq = functions["init_random_2d_freqs"](params["head_dim"], params["heads"], params["base"])
    x, y = functions["init_t_xy"](params["width"], params["height"])
    # As in the model, the depth is 1, and heads and pairs form one axis.
    angles = functions["compute_mixed_cis"](inv_freq.flatten(1).unsqueeze(1), x, y, params["heads"])[0]
    return inv_freq, torch.stack((x, y)), lambda q: functions["apply_rotary_emb"](q, q, angles)[0]


def timm(code: str, params: dict[str, Any]) -> tuple[Tensor, Tensor, Rotate]:
    """Return inv_freq, positions and the rotation of timm."""
    names = ("init_random_2d_freqs", "get_mixed_freqs", "_rope_layout", "apply_rot_embed", "apply_rot_embed_cat", "rot")
    functions = run(code, names)
    torch.manual_seed(1)
    inv_freq = functions["init_random_2d_freqs"](params["head_dim"], 1, params["heads"], params["base"])[:, 0]
    places = [torch.arange(float(params[name])) for name in ("width", "height")]
    x, y = (grid.flatten() for grid in torch.meshgrid(*places, indexing="xy"))
    table = functions["get_mixed_freqs"](inv_freq, x, y)
    return inv_freq, torch.stack((x, y)), lambda q: functions["apply_rot_embed_cat"](q, table)


def mochi(code: dict[str, str], params: dict[str, Any]) -> tuple[Tensor, Tensor, Rotate]:
    """Return inv_freq, positions and the rotation of Mochi in diffusers."""
    rope = run(code["rope"], ("MochiRoPE",))["MochiRoPE"]()
    inv_freq = golden("q", [3, params["heads"], params["head_dim"] // 2]) / 4
    grid = params["frames"], params["height"], params["width"]
    cos, sin = rope(inv_freq, *grid, dtype=torch.float32)
    attention = ast.parse(code["attention"])
    processor = next(node for node in attention.body if getattr(node, "name", "") == "MochiAttnProcessor2_0")
    rotate = run(ast.unparse(processor), ("apply_rotary_emb",))["apply_rotary_emb"]
    positions = rope._get_positions(*grid, dtype=torch.float32).T
    return inv_freq, positions, lambda q: rotate(q.transpose(1, 2), cos, sin).transpose(1, 2)


def record(case: dict[str, Any], source: Path | None = None) -> dict[str, Any]:
    """Record a case again."""
    of, params = case["of"], case["params"]
    if of.get("package") == "diffusers":
        both = {name: text({**of, "file": of[name]}, source) for name in ("rope", "attention")}
        inv_freq, positions, rotate = mochi(both, params)
    else:
        inv_freq, positions, rotate = (timm if "package" in of else rope_vit)(text(of, source), params)
    recorded = {"inv_freq": shortest(inv_freq), "positions": [shortest(axis) for axis in positions]}
    for name, kept in (("q", 2), ("k", 1)):
        x = golden(name, [1, params["heads"], positions.shape[1], params["head_dim"]])
        recorded[f"{name}_rot"] = shortest(rotate(x)[:, -kept:])
    return {**case, **recorded}


GOLDEN = files.Golden("learned.json", lambda case: str(case["id"]), record, "torch", "cases", source=True)
