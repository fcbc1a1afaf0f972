"""Checks of sizes and bounds, which are symbols while torch.compile or torch.export traces."""

from __future__ import annotations

import torch

from ropewalk import _checks


def check_size(who: str, name: str, value: int | torch.SymInt, *, at_least: int = 0) -> None:
    """`value` is an integer, or the length of a tensor in a graph, whose value is not known."""
    if not isinstance(value, torch.SymInt):
        _checks.integer(who, name, value, at_least=at_least)


def check_bound(who: str, name: str, value: float) -> None:
    """`value` is a finite number; while a graph is traced it may be made of lengths, and is not looked at."""
    if not torch.compiler.is_compiling():
        _checks.number(who, name, value)
