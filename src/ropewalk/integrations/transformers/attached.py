"""Tables of cos and sin that carry the Rotations from which they were made.

The tables are ordinary tensors with the shape, width and dtype that the model expects. Code that slices, casts or
computes with them gets new tensors, which carry nothing, and goes on as it would with the model's own tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ropewalk.integrations.transformers.probe import COMPLEX, Form, Place, Width, repeat_columns
from ropewalk.rotation.api import Rotation

_COS, _SIN, _COMPLEX = "ropewalk_cos", "ropewalk_sin", "ropewalk_complex"  # attributes of the tensors


@dataclass(frozen=True, eq=False)
class Attached:
    """What tables carry.

    Args:
        rotations: one Rotation, or one for each part of a head that is rotated separately.
        forms: how each function of the model's code rotates by these tables.
    """

    rotations: tuple[Rotation, ...]
    forms: Mapping[Place, Form]


def make_tables(attached: Attached, width: Width, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Make the tables that a model expects in place of its own, and attach the Rotations to them.

    Args:
        attached: the Rotations.
        width: the format of the tables.
        shape: the shape of the tables without their last axis.
        dtype: dtype of the tables, unless they are complex.

    Returns:
        cos and sin, or one complex tensor, `[*shape, columns]`.
    """
    if width == "complex":
        [rotation] = attached.rotations
        return attach(torch.complex(rotation.cos, rotation.sin).reshape(*shape, -1), attached)
    cos, sin = (
        torch.cat([repeat_columns(getattr(part, name).to(dtype), width) for part in attached.rotations], dim=-1)
        for name in ("cos", "sin")
    )
    return attach((cos.reshape(*shape, -1), sin.reshape(*shape, -1)), attached)


def attach(tables: Any, attached: Attached) -> Any:
    """Attach Rotations to cos and sin, or to one complex tensor, and return these tables."""
    if isinstance(tables, Tensor):
        setattr(tables, _COMPLEX, attached)
    else:
        setattr(tables[0], _COS, attached)
        setattr(tables[1], _SIN, attached)
    return tables


def attached_to(arguments: Mapping[str, Any]) -> Attached | None:
    """Return what the tables among the arguments of a rotating function carry, or None.

    The result is None unless cos and sin are those of the same Rotations, each in its place.
    """
    if "cos" in arguments:
        found: Attached | None = getattr(arguments["cos"], _COS, None)
        return found if getattr(arguments.get("sin"), _SIN, None) is found else None
    return next((getattr(arguments[name], _COMPLEX, None) for name in COMPLEX if name in arguments), None)
