"""Validate the fields of a Rotation other than its tables. They come from a caller, a pickle or an exported program."""

from __future__ import annotations

from typing import Any

from ropewalk._checks import MAX_HEAD_DIM, attention_factor, boolean, check_pairing, error, integer, shown
from ropewalk._layout import Pairing

_WHO = "Rotation"
NAMES = ("cos", "sin", "pairing", "head_dim", "rotary_dim", "rotary_offset", "attention_factor", "per_head")
"""All fields, in the order of a pickle: the two tables, then the context of the pytree."""


def validate(*context: Any) -> tuple[Pairing, int, int, int, float, bool]:
    """Check and return pairing, head_dim, rotary_dim, rotary_offset, attention_factor and per_head."""
    if len(context) == len(NAMES) - 3:
        context = (*context, False)  # saved by a version without tables per head
    if len(context) != len(NAMES) - 2:
        must = f"a saved rotation must have the fields {', '.join(NAMES)}"
        raise error(_WHO, must, shown(context), "Save it again with this version.")
    pairing, head_dim, rotary_dim, rotary_offset, factor, per_head = context
    check_pairing(_WHO, pairing)
    rotary_dim = integer(_WHO, "rotary_dim", rotary_dim, at_least=2, at_most=MAX_HEAD_DIM)
    if rotary_dim % 2:
        raise error(_WHO, "rotary_dim must be even", str(rotary_dim), "Pass two channels for each pair.")
    rotary_offset = integer(_WHO, "rotary_offset", rotary_offset, at_least=0, at_most=MAX_HEAD_DIM)
    end = rotary_offset + rotary_dim
    head_dim = end if head_dim is None else integer(_WHO, "head_dim", head_dim, at_least=end, at_most=MAX_HEAD_DIM)
    return pairing, head_dim, rotary_dim, rotary_offset, attention_factor(_WHO, factor), check_per_head(per_head)


def check_per_head(per_head: Any) -> bool:
    return boolean(_WHO, "per_head", per_head, "Pass a flag, not the number of heads, which is read from cos and sin.")
