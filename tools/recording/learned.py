"""learned.json: q and k of known inputs, rotated by models whose frequencies are learned, for each head its own.

Only the named functions and classes are run: those of rope-vit from a commit in a clone, those of timm and diffusers
from the file of an installed package, of the version that the row names.
"""

from __future__ import annotations

import ast
import importlib.util
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

Turn = Callable[[Tensor], Tensor]
"""From [1, heads, tokens, head_dim] to the same, rotated."""


def run(code: str, names: tuple[str, ...]) -> dict[str, Any]:
    """The functions and classes of these names, wherever in the file, without what decorates them."""
    found = [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in names
    ]
    for node in found:
        node.decorator_list = []
    scope: dict[str, Any] = {"torch": torch, "nn": torch.nn, **{name: getattr(typing, name) for name in typing.__all__}}
    exec(compile(ast.Module(found, []), "<source>", "exec"), scope)
    return scope


def text(of: dict[str, str], source: Path | None) -> str:
    """The file that a row names.

    Raises:
        CannotRecordError: no clone is given, or the package is not there in that version.
    """
    if "commit" in of:
        if source is None:
            raise CannotRecordError(f"give a clone of github.com/{of['repo']} as --source")
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
        raise CannotRecordError(f"{of['package']} {of['version']} is needed, and {installed} is installed")
    return (Path(spec.submodule_search_locations[0]) / of["file"]).read_text()


def rope_vit(code: str, params: dict[str, Any]) -> tuple[Tensor, Tensor, Turn]:
    its = run(
        code, ("init_random_2d_freqs", "compute_mixed_cis", "init_t_xy", "reshape_for_broadcast", "apply_rotary_emb")
    )
    torch.manual_seed(0)
    inv_freq = its["init_random_2d_freqs"](params["head_dim"], params["heads"], params["base"])
    x, y = its["init_t_xy"](params["width"], params["height"])
    # Depth is one, and heads and pairs are one axis, as in its model.
    turns = its["compute_mixed_cis"](inv_freq.flatten(1).unsqueeze(1), x, y, params["heads"])[0]
    return inv_freq, torch.stack((x, y)), lambda q: its["apply_rotary_emb"](q, q, turns)[0]


def timm(code: str, params: dict[str, Any]) -> tuple[Tensor, Tensor, Turn]:
    names = ("init_random_2d_freqs", "get_mixed_freqs", "_rope_layout", "apply_rot_embed", "apply_rot_embed_cat", "rot")
    its = run(code, names)
    torch.manual_seed(1)
    inv_freq = its["init_random_2d_freqs"](params["head_dim"], 1, params["heads"], params["base"])[:, 0]
    places = [torch.arange(float(params[name])) for name in ("width", "height")]
    x, y = (grid.flatten() for grid in torch.meshgrid(*places, indexing="xy"))
    table = its["get_mixed_freqs"](inv_freq, x, y)
    return inv_freq, torch.stack((x, y)), lambda q: its["apply_rot_embed_cat"](q, table)


def mochi(code: dict[str, str], params: dict[str, Any]) -> tuple[Tensor, Tensor, Turn]:
    rope = run(code["rope"], ("MochiRoPE",))["MochiRoPE"]()
    inv_freq = golden("q", [3, params["heads"], params["head_dim"] // 2]) / 4
    grid = params["frames"], params["height"], params["width"]
    cos, sin = rope(inv_freq, *grid, dtype=torch.float32)
    attention = ast.parse(code["attention"])
    processor = next(node for node in attention.body if getattr(node, "name", "") == "MochiAttnProcessor2_0")
    turn = run(ast.unparse(processor), ("apply_rotary_emb",))["apply_rotary_emb"]
    positions = rope._get_positions(*grid, dtype=torch.float32).T
    return inv_freq, positions, lambda q: turn(q.transpose(1, 2), cos, sin).transpose(1, 2)


def learned(case: dict[str, Any], source: Path | None = None) -> dict[str, Any]:
    of, params = case["of"], case["params"]
    if of.get("package") == "diffusers":
        both = {name: text({**of, "file": of[name]}, source) for name in ("rope", "attention")}
        inv_freq, positions, turn = mochi(both, params)
    else:
        inv_freq, positions, turn = (timm if "package" in of else rope_vit)(text(of, source), params)
    made = {"inv_freq": shortest(inv_freq), "positions": [shortest(axis) for axis in positions]}
    for name, kept in (("q", 2), ("k", 1)):
        x = golden(name, [1, params["heads"], positions.shape[1], params["head_dim"]])
        made[f"{name}_rot"] = shortest(turn(x)[:, -kept:])
    return {**case, **made}


GOLDEN = files.Golden("learned.json", lambda case: str(case["id"]), learned, "torch", "cases", source=True)
