"""Positions on a grid, for images and videos: one row of coordinates for each axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.positions.sizes import check_size

_GRID, _MESH = "positions.grid", "positions.mesh"


def grid(
    height: int,
    width: int,
    frames: int | None = None,
    *,
    order: str | None = None,
    merge: int = 1,
    start: int | Sequence[int] = 0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the row and column of each patch of an image, or the frame, row and column of each patch of a video.

    Args:
        height, width: number of patches in a column and in a row, at least 1.
        frames: number of frames, at least 1; None for an image.
        order: the axes of the result, as a string of the letters "t" (frame), "h" (row), "w" (column) and "0" (an axis
            on which every token is at start). None means "thw", or "hw" if frames is None. Axes may be omitted: "hw"
            for a video repeats rows and columns in each frame.
        merge: 1 for row-major tokens. For m > 1, the patches of each m × m block are consecutive, because a vision
            tower merges them into one token (m = 2 in Qwen2-VL). It must divide height and width.
        start: position of the first token: one integer for all axes, or one for each axis of the result. It may be
            negative.
        device: device of the result. None means PyTorch's default device.

    Returns:
        int64 `[axes, tokens]`, with tokens = frames · height · width. Frames vary slowest.

    Raises:
        RopeError: a size is out of range, merge does not divide height and width, order has an unknown letter, or the
            length of start differs from that of order.

    Source:
        `get_vision_position_ids` of transformers (vision_utils.py). Other projects call the result `pos_ids`.

    Examples:
        >>> grid(2, 3)
        tensor([[0, 0, 0, 1, 1, 1],
                [0, 1, 2, 0, 1, 2]])
        >>> grid(2, 4, merge=2)
        tensor([[0, 0, 1, 1, 0, 0, 1, 1],
                [0, 1, 0, 1, 2, 3, 2, 3]])
    """
    check_size(_GRID, "height", height, at_least=1)
    check_size(_GRID, "width", width, at_least=1)
    if frames is not None:
        check_size(_GRID, "frames", frames, at_least=1)
    known = "hw0" if frames is None else "thw0"
    order = known[:-1] if order is None else order
    if not isinstance(order, str) or not order or any(letter not in known for letter in order):
        fix = "Pass frames for an axis t." if frames is None else "Pass e.g. order='thw'."
        if isinstance(order, str) and len(order) <= 9 and set("xy") & set(order):
            fix = f"Use w for x (the column) and h for y (the row): {order.replace('x', 'w').replace('y', 'h')!r}."
        raise _checks.error(_GRID, f"order must be a string of the letters {known!r}", _checks.shown(order), fix)
    first = _start(start, order)
    sizes = {"t": 1 if frames is None else frames, "h": height, "w": width}
    values = [torch.arange(size, device=device) for size in sizes.values()]
    axes = dict(zip(sizes, _mesh(_GRID, values, merge), strict=True))
    axes["0"] = torch.zeros_like(axes["h"])
    return torch.stack([axes[letter] + begin for letter, begin in zip(order, first, strict=True)])


def mesh(*axes: Tensor, merge: int = 1) -> Tensor:
    """Combine the coordinates along each axis into the coordinates of all tokens of a grid.

    Args:
        axes: the coordinates along each axis, `[n]`, int or float, from the slowest axis to the fastest (frames, rows,
            columns). To reorder the axes, index the result: `mesh(rows, columns)[[1, 0]]` has the column first.
        merge: as in `grid`, for the last two axes.

    Returns:
        `[axes, tokens]`, on the device of the axes, in the dtype to which PyTorch promotes the dtypes of the axes.

    Raises:
        RopeError: there is no axis, an axis is not such a tensor, or merge does not divide the sizes of the last two
            axes.

    Examples:
        >>> mesh(torch.tensor([0.5, 1.5]), torch.tensor([10, 20, 30]))
        tensor([[ 0.5000,  0.5000,  0.5000,  1.5000,  1.5000,  1.5000],
                [10.0000, 20.0000, 30.0000, 10.0000, 20.0000, 30.0000]])
    """
    if not axes:
        raise _checks.error(_MESH, "axes must not be empty", "none", "Pass the coordinates along each axis.")
    for along in axes:
        if not isinstance(along, Tensor) or along.ndim != 1 or along.dtype == torch.bool or along.is_complex():
            fix = "Pass e.g. positions.axis(height), positions.axis(width)."
            raise _checks.error(_MESH, "each axis must be a tensor [n] of numbers", _checks.describe(along), fix)
    dtype = axes[0].dtype
    for along in axes[1:]:
        dtype = torch.promote_types(dtype, along.dtype)
    return torch.stack(_mesh(_MESH, [along.to(dtype) for along in axes], merge))


def _start(start: int | Sequence[int], order: str) -> list[int]:
    """Return the position of the first token on each axis."""
    each = [start] * len(order) if isinstance(start, (int, torch.SymInt)) else start
    if isinstance(each, str) or not isinstance(each, Sequence) or len(each) != len(order):
        must = f"start must be an integer, or one integer for each axis of {order!r}"
        raise _checks.error(_GRID, must, _checks.describe(start), f"Pass {len(order)} integers.")
    for value in each:
        if not isinstance(value, torch.SymInt):
            _checks.integer(_GRID, "start", value, at_least=-(2**62), at_most=2**62)
    return list(each)


def _mesh(who: str, axes: Sequence[Tensor], merge: int) -> list[Tensor]:
    """Return the coordinates of all tokens: one vector `[tokens]` for each axis."""
    _checks.integer(who, "merge", merge, at_least=1)
    meshed = torch.meshgrid(*axes, indexing="ij")
    if merge == 1:
        return [along.flatten() for along in meshed]
    sizes = tuple(meshed[0].shape[-2:])
    if len(sizes) < 2 or sizes[0] % merge or sizes[1] % merge:
        fix = "Pad the image, or pass merge=1."
        raise _checks.error(who, f"merge must divide height and width, which are {sizes}", _checks.shown(merge), fix)
    rows, columns = sizes[0] // merge, sizes[1] // merge
    blocks = [along.reshape(-1, rows, merge, columns, merge) for along in meshed]
    return [block.transpose(2, 3).flatten() for block in blocks]
