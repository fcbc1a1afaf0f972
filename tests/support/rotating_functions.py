"""Functions that rotate q and k, in all the forms that modeling files use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def rotating_function(
    pairing: str, order: str = "same", whole: str | None = None, wide: bool = True, sign: float = 1.0
) -> Callable[..., Any]:
    """Return a function that rotates in this way, written out.

    From tables of full width it uses only the first half.
    """

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pairs = cos.shape[-1] // 2 if wide else cos.shape[-1]
        cos, sin, rest = cos[..., :pairs], sign * sin[..., :pairs], x.shape[-1] - 2 * pairs
        if rest and whole is None:
            raise ValueError("the tables do not fit")
        offset = rest if whole == "last" else 0
        head, part, tail = x[..., :offset], x[..., offset : offset + 2 * pairs], x[..., offset + 2 * pairs :]
        if pairing == "half":
            a, b = part[..., :pairs], part[..., pairs:]
        else:
            a, b = part[..., ::2], part[..., 1::2]
        first, second = a * cos - b * sin, a * sin + b * cos
        if pairing == "half" or order == "half":
            rotated = torch.cat((first, second), dim=-1)
        else:
            rotated = torch.stack((first, second), dim=-1).flatten(-2)
        return torch.cat((head, rotated, tail), dim=-1)

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    return function
