"""Shift and scale the coordinates of an image at random, as augmentation during training."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ropewalk import _checks

_WHO = "positions.augment"
_FLOATS = (torch.float32, torch.float64)


def augment(
    coordinates: Tensor,
    generator: torch.Generator | int,
    *,
    shift: float | None = None,
    jitter: float | None = None,
    rescale: float | None = None,
) -> Tensor:
    """Shift coordinates, scale them along each axis, and scale them along all axes, by random numbers.

    The three steps happen in this order. Each number is drawn once per call, so all tokens change alike. Use this only
    during training.

    Args:
        coordinates: float32 or float64, `[axes, tokens]` or `[axes, batch, tokens]`.
        generator: the source of random numbers. An int seeds a new generator on the CPU, which gives the same numbers
            on every device; they equal those of DINOv3 in transformers for the same seed.
        shift: add to each axis a uniform number from [-shift, shift]; at least 0, in the unit of coordinates.
        jitter: multiply each axis by a log-uniform number from [1/jitter, jitter]; at least 1.
        rescale: multiply all axes by one log-uniform number from [1/rescale, rescale]; at least 1. DINOv3 uses 2.

    Returns:
        New tensor with the shape, dtype and device of coordinates. No number is drawn for an argument that is None.

    Raises:
        RopeError: coordinates have another dtype or shape, generator is neither a generator nor a seed, or a number is
            out of range.

    Source:
        Siméoni et al. 2025 (DINOv3), arXiv:2508.10104; `augment_patches_center_coordinates` of transformers.

    Examples:
        >>> centres = torch.tensor([[-0.5, 0.5]])
        >>> torch.equal(augment(centres, 0, rescale=2.0), augment(centres, 0, rescale=2.0))
        True
    """
    if not isinstance(coordinates, Tensor) or coordinates.dtype not in _FLOATS or coordinates.ndim not in (2, 3):
        must = "coordinates must be float32 or float64 [axes, tokens] or [axes, batch, tokens]"
        fix = "Create them with positions.mesh, or convert them: positions.grid(4, 4).float()."
        raise _checks.error(_WHO, must, _checks.describe(coordinates), fix)
    if not isinstance(generator, torch.Generator):
        seed = _checks.integer(
            _WHO, "generator", generator, at_least=0, fix="Pass a torch.Generator, or an integer as its seed."
        )
        generator = torch.Generator().manual_seed(seed)
    source = generator
    axes = coordinates.shape[0]

    def uniform(count: int, limit: float) -> Tensor:
        numbers = torch.empty(count, dtype=coordinates.dtype, device=source.device).uniform_(
            -limit, limit, generator=source
        )
        return numbers.to(coordinates.device).view(-1, *[1] * (coordinates.ndim - 1))

    if shift is not None:
        coordinates = coordinates + uniform(axes, _checks.number(_WHO, "shift", shift, at_least=0.0))
    if jitter is not None:
        coordinates = coordinates * uniform(axes, math.log(_checks.number(_WHO, "jitter", jitter, at_least=1.0))).exp()
    if rescale is not None:
        coordinates = coordinates * uniform(1, math.log(_checks.number(_WHO, "rescale", rescale, at_least=1.0))).exp()
    return coordinates.clone() if shift is jitter is rescale is None else coordinates
