"""Check sizes, bounds and values, which may be unknown while torch.compile or torch.export traces."""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk import _checks


def can_read(x: Tensor) -> bool:
    """Return whether reading the values of x is free: on the CPU, outside of transforms, compilation and export."""
    return (
        type(x) is Tensor
        and x.is_cpu
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def check_size(who: str, name: str, value: int | torch.SymInt, *, at_least: int = 0) -> None:
    """Raise unless `value` is a number of tokens. Symbolic sizes of a traced graph are not checked."""
    if not isinstance(value, torch.SymInt):
        _checks.length(who, name, value, at_least=at_least)


def check_bound(who: str, name: str, value: float) -> None:
    """Raise unless `value` is a finite number. While torch.compile traces, it may be symbolic and is not checked."""
    if not torch.compiler.is_compiling():
        _checks.number(who, name, value)
