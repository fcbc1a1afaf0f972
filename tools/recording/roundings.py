"""engine_rules/rounding_of_transformers.json: in which dtypes the models of transformers rotate bfloat16 q and k.

The rotary class of a model computes cos and sin of five positions on the CPU, and the rotating function of its file
rotates random bfloat16 q with them. A row has the dtypes of cos and sin and of the arithmetic with which float32
products of positions and the frequencies of the class give the same bits. Models with tables of another shape, several
positions or functions of other names are left out.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
from typing import Any

import torch
from torch import Tensor

from . import files
from .model import CannotRecordError
from .peers import package

_POSITIONS = torch.tensor([[0, 1, 17, 4095, 100_000]])
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def record(row: dict[str, Any]) -> dict[str, Any]:
    """Record a row again: the model_type, and the dtypes of the table and of the rotation."""
    library = package("transformers")
    config = library.AutoConfig.for_model(row["model_type"])
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    inside = [
        (name, found) for name, found in vars(module).items() if getattr(found, "__module__", "") == module.__name__
    ]
    classes = [found for name, found in inside if re.search(r"^(?!.*(Vision|Audio|Encoder)).*RotaryEmbedding$", name)]
    functions = [found for name, found in inside if re.match(r"apply_rotary_(pos_)?emb(_interleave)?$", name)]
    if not classes or not functions:
        raise CannotRecordError("no rotary class or function")
    rotary = classes[0](config)
    kinds = (
        [next(iter(set(config.layer_types)))] if "layer_type" in inspect.signature(rotary.forward).parameters else []
    )
    prefix = f"{kinds[0]}_" if kinds else ""
    inv_freq = getattr(rotary, f"{prefix}inv_freq")
    factor = getattr(rotary, f"{prefix}attention_scaling", 1.0)
    torch.manual_seed(0)
    q = torch.randn(1, 2, _POSITIONS.numel(), 2 * inv_freq.numel()).to(torch.bfloat16)
    try:
        table = rotary(q, _POSITIONS, *kinds)
    except (IndexError, RuntimeError):  # three positions for each token
        table = rotary(q, _POSITIONS.expand(3, 1, -1), *kinds)
    rotated, dtype = _rotate(functions[-1], q, table)
    angles = _POSITIONS[0][:, None].float() * inv_freq
    cos, sin = angles.cos() * factor, angles.sin() * factor
    same = [name for name in _DTYPES if any(torch.equal(rotated, one) for one in _by(q, cos, sin, dtype, name))]
    if len(same) != 1:
        raise CannotRecordError("its bits are not those of float32 products")
    return {"model_type": row["model_type"], "table": dtype, "rotation": same[0]}


def _rotate(function: Any, q: Tensor, table: Any) -> tuple[Tensor, str]:
    """Return q as the model rotates it, and the dtype of its table."""
    if isinstance(table, Tensor):  # complex
        return function(q.transpose(1, 2), q.transpose(1, 2), table)[0].transpose(1, 2), "float32"
    try:
        rotated = function(q, q, *table)[0]
    except TypeError:  # one tensor at a time
        rotated = function(q, *table)
    return rotated, str(table[0].dtype).removeprefix("torch.")


def _by(q: Tensor, cos: Tensor, sin: Tensor, table: str, rotation: str) -> list[Tensor]:
    """Return q rotated in these dtypes, with both pairings and both orders of the channels."""
    x = q.to(_DTYPES[rotation])
    cos, sin = (part.to(_DTYPES[table]).to(x.dtype) for part in (cos, sin))
    found = []
    for (a, b), join in itertools.product((x.chunk(2, -1), (x[..., ::2], x[..., 1::2])), (torch.cat, _interleave)):
        found.append(join(((a * cos - b * sin).to(q.dtype), (b * cos + a * sin).to(q.dtype)), -1))
    return found


def _interleave(halves: tuple[Tensor, Tensor], dim: int) -> Tensor:
    return torch.stack(halves, dim).flatten(-2)


GOLDEN = files.Golden("engine_rules/rounding_of_transformers.json", lambda row: str(row["model_type"]), record)
