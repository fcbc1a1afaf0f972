"""Coordinates along one axis of an image or a video, and the region of the training grid that an image covers."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.positions.sizes import check_bound, check_size

_AXIS, _CROP = "positions.axis", "positions.crop"
_AT = ("starts", "centres", "ends")


def axis(
    n: int,
    low: float = -1.0,
    high: float = 1.0,
    *,
    at: Literal["starts", "centres", "ends"] = "centres",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the coordinates of n tokens that divide an interval. `mesh` combines several axes into a grid.

    Args:
        n: number of tokens, at least 1.
        low, high: the interval, in any unit; low may be greater than high.
        at: the place of each token.
            "centres": the interval is divided into n equal cells, and a token is at the centre of each cell (DINOv3;
            timm's "centered" grid).
            "starts": as "centres", but a token is at the edge of its cell that is nearer to low (timm's "index" grid).
            "ends": n points from low to high, both included (timm's "pixel" grid). A single token is at low.
        dtype: torch.float32, which rounds a coordinate by up to 2⁻²⁴ of its size, or torch.float64.
        device: device of the result. None means PyTorch's default device.

    Returns:
        A tensor `[n]` of the given dtype. On devices that support float64, it is computed in float64 and rounded once.

    Raises:
        RopeError: n is not an integer of at least 1, low or high is not finite, or at or dtype is not one of the above.

    Examples:
        >>> axis(4)
        tensor([-0.7500, -0.2500,  0.2500,  0.7500])
        >>> axis(4, 0, 16, at="starts")
        tensor([ 0.,  4.,  8., 12.])
    """
    check_size(_AXIS, "n", n, at_least=1)
    check_bound(_AXIS, "low", low)
    check_bound(_AXIS, "high", high)
    _checks.choice(_AXIS, "at", at, _AT)
    if dtype not in (torch.float32, torch.float64):
        fix = "float16 and bfloat16 would move the tokens. Convert cos and sin instead."
        raise _checks.error(_AXIS, "dtype must be torch.float32 or torch.float64", _checks.shown(dtype), fix)
    number = torch.arange(n, device=device)
    position = number.to(dtype if number.device.type == "mps" else torch.float64)
    if at == "centres":
        position = position + 0.5
    cells = n if at != "ends" else max(n - 1, 1)
    # A weighted mean of both edges, which is exact at the edges and in the middle.
    return ((low * (cells - position) + high * position) / cells).to(dtype)


def crop(height: int, width: int, base_height: int, base_width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the centred region of the training grid that an image covers after it is scaled to fit into the grid.

    Args:
        height, width: patches of the image, at least 1. Only their ratio matters.
        base_height, base_width: patches of the grid that the model was trained on, at least 1.

    Returns:
        (top, left), (bottom, right) in patches of the training grid, rounded by Python's `round` (half to even).

    Raises:
        RopeError: a number is not an integer of at least 1.

    Source:
        CogVideoX 1.0, HunyuanDiT and Allegro in diffusers 0.42: `get_resize_crop_region_for_grid`.

    Examples:
        >>> crop(30, 60, 32, 32)
        ((8, 0), (24, 32))
    """
    for name, value in (
        ("height", height),
        ("width", width),
        ("base_height", base_height),
        ("base_width", base_width),
    ):
        _checks.length(_CROP, name, value)
    inner_height, inner_width = base_height, base_width
    if height / width > base_height / base_width:
        inner_width = round(base_height / height * width)
    else:
        inner_height = round(base_width / width * height)
    top, left = round((base_height - inner_height) / 2), round((base_width - inner_width) / 2)
    return (top, left), (top + inner_height, left + inner_width)
