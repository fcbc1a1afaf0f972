"""litgpt.json: cos and sin of position 3 for configs of litgpt, computed by its own code.

The commit of a clone is in each row. Each config is what litgpt saves beside a checkpoint.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from . import files
from .learned import text
from .rotated import shortest

_TOKENS = 4


def run(of: dict[str, str], source: Path | None, names: tuple[str, ...]) -> dict[str, Any]:
    """Execute the functions, methods and classes with these names, and return the namespace."""
    nodes = [node for node in ast.walk(ast.parse(text(of, source))) if getattr(node, "name", None) in names]
    scope: dict[str, Any] = {"torch": torch, "math": math, "field": dataclasses.field, "Literal": typing.Literal}
    scope |= {"dataclass": dataclasses.dataclass, "__name__": __name__}
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *nodes], []), "litgpt", "exec"), scope)  # type: ignore[list-item]
    return scope


def record(row: dict[str, Any], source: Path | None = None) -> dict[str, Any]:
    """Record a row again."""
    of = {"repo": row["repo"], "commit": row["commit"]}
    config = run({**of, "file": "litgpt/config.py"}, source, ("Config", "find_multiple", "check_indicator_and_length"))
    own = config["Config"](**row["config"])
    names = ("rope_cache", "build_rope_cache", "yarn_get_mscale")
    model = run({**of, "file": "litgpt/model.py"}, source, names)
    cos, sin = model["rope_cache"](SimpleNamespace(config=own, max_seq_length=_TOKENS))
    local = own.rope_indices is not None
    pairs = zip(cos[-1].T, sin[-1].T, strict=True) if local else [(cos[-1], sin[-1])]
    return {**row, "tables": [shortest(table) for pair in pairs for table in pair]}


GOLDEN = files.Golden("litgpt.json", lambda row: row["config"]["name"], record, "torch", source=True)
