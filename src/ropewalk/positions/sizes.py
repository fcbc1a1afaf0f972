"""Check sizes and bounds, which may be symbolic while torch.compile or torch.export traces."""

from __future__ import annotations

import torch

from ropewalk import _checks


def check_size(who: str, name: str, value: int | torch.SymInt, *, at_least: int = 0) -> None:
    """Raise unless `value` is an integer of at least `at_least`. Symbolic sizes of a traced graph are not checked."""
    if not isinstance(value, torch.SymInt):
        _checks.integer(who, name, value, at_least=at_least)


def check_bound(who: str, name: str, value: float) -> None:
    """Raise unless `value` is a finite number. While torch.compile traces, it may be symbolic and is not checked."""
    if not torch.compiler.is_compiling():
        _checks.number(who, name, value)
