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


def check_mask(who: str, mask: Tensor, axes: str = "[batch, seq]", shape: tuple[int, int] | None = None) -> None:
    """Raise unless an attention mask is a bool or integer tensor with two axes, and of this shape if it is given."""
    fits = isinstance(mask, Tensor) and mask.ndim == 2 and not (mask.is_floating_point() or mask.is_complex())
    if not fits or shape not in (None, mask.shape):
        must = f"attention_mask must be a bool or integer tensor {axes}"
        fix = "Pass the mask of real tokens, not the additive or four-dimensional mask of attention."
        raise _checks.error(who, must, _checks.describe(mask), fix)


def real_tokens(who: str, mask: Tensor, packed: str = "Pass packed documents in rows of their own.") -> Tensor:
    """Return which tokens are real. Raise if a value can be read and is not 0 or 1; `packed` is a part of the fix."""
    if can_read(mask) and len(other := mask[(mask != 0) & (mask != 1)]):
        must = "attention_mask must have 1 for real tokens and 0 for padding"
        raise _checks.error(who, must, str(other[0].item()), f"Pass attention_mask != 0 if a row is one text. {packed}")
    return mask != 0
