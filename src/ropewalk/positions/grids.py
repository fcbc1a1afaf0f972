"""Positions on a grid: images and videos, one row of coordinates for each axis."""

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
    """Rows and columns of the patches of an image, or frames, rows and columns of a video.

    Args:
        height, width: patches in a column and in a row of patches, at least 1.
        frames: frames, at least 1; None for an image.
        order: the axes of the result: a string of "t" (frame), "h" (row), "w" (column) and "0" (an axis on which all
            tokens are at 0, before start is added). "thw" when None, and "hw" where frames is None. An axis may be left
            out: "hw" of a video repeats rows and columns in each frame.
        merge: 1 for row-major tokens. m for the order in which each m × m patches stand behind one another, so that the
            patches that a vision tower merges into one token are neighbours (Qwen2-VL: 2); it divides height and width.
        start: position of the first token, for all axes or for each axis of the result; may be negative.
        device: where the result is made; the CPU when None.

    Returns:
        int64 `[axes, tokens]`, tokens = frames · height · width; frames vary slowest.

    Raises:
        RopeError: a size is no such integer, merge does not divide, order has another letter, or start has another
            length than order.

    Source:
        `get_vision_position_ids` of transformers 5.23 (vision_utils.py); `pos_ids` in the other projects.

    Example:
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
            fix = f"x is w, the column, and y is h, the row: {order.replace('x', 'w').replace('y', 'h')!r}."
        raise _checks.error(_GRID, f"order must be a string of the letters {known!r}", _checks.shown(order), fix)
    first = _start(start, order)
    sizes = {"t": 1 if frames is None else frames, "h": height, "w": width}
    values = [torch.arange(size, device=device) for size in sizes.values()]
    axes = dict(zip(sizes, _mesh(_GRID, values, merge), strict=True))
    axes["0"] = torch.zeros_like(axes["h"])
    return torch.stack([axes[letter] + begin for letter, begin in zip(order, first, strict=True)])


def mesh(*axes: Tensor, merge: int = 1) -> Tensor:
    """Every combination of coordinates: the tokens of a grid whose axes have any coordinates.

    Args:
        axes: the coordinates along each axis, `[n]`, int or float: first that of the slowest axis (frames, rows,
            columns). Another order of the axes is an index: `mesh(rows, columns)[[1, 0]]` has the column first.
        merge: as in `grid`, over the last two axes.

    Returns:
        `[axes, tokens]`; the dtype to which PyTorch promotes those of the axes; their device.

    Raises:
        RopeError: an axis is no such tensor, or merge does not divide the sizes of the last two.

    Example:
        >>> mesh(torch.tensor([0.5, 1.5]), torch.tensor([10, 20, 30]))
        tensor([[ 0.5000,  0.5000,  0.5000,  1.5000,  1.5000,  1.5000],
                [10.0000, 20.0000, 30.0000, 10.0000, 20.0000, 30.0000]])
    """
    if not axes:
        raise _checks.error(_MESH, "there must be an axis", "none", "Pass the coordinates along each axis.")
    for along in axes:
        if not isinstance(along, Tensor) or along.ndim != 1 or along.dtype == torch.bool or along.is_complex():
            fix = "Pass e.g. positions.axis(height), positions.axis(width)."
            raise _checks.error(_MESH, "each axis must be a tensor [n] of numbers", _checks.described(along), fix)
    dtype = axes[0].dtype
    for along in axes[1:]:
        dtype = torch.promote_types(dtype, along.dtype)
    return torch.stack(_mesh(_MESH, [along.to(dtype) for along in axes], merge))


def _start(start: int | Sequence[int], order: str) -> list[int]:
    """The first position on each axis."""
    each = [start] * len(order) if isinstance(start, (int, torch.SymInt)) else start
    if isinstance(each, str) or not isinstance(each, Sequence) or len(each) != len(order):
        must = f"start must be an integer or one for each axis of {order!r}"
        raise _checks.error(_GRID, must, _checks.described(start), f"Pass {len(order)} integers.")
    for one in each:
        if not isinstance(one, torch.SymInt):
            _checks.integer(_GRID, "start", one, at_least=-(2**62), at_most=2**62)
    return list(each)


def _mesh(who: str, axes: Sequence[Tensor], merge: int) -> list[Tensor]:
    """The coordinate of each token on each axis, one vector for each."""
    _checks.integer(who, "merge", merge, at_least=1)
    meshed = torch.meshgrid(*axes, indexing="ij")
    if merge == 1:
        return [one.flatten() for one in meshed]
    sizes = tuple(meshed[0].shape[-2:])
    if len(sizes) < 2 or sizes[0] % merge or sizes[1] % merge:
        fix = "Pad the image, or pass merge=1."
        raise _checks.error(who, f"merge must divide height and width, which are {sizes}", _checks.shown(merge), fix)
    rows, columns = sizes[0] // merge, sizes[1] // merge
    blocks = [one.reshape(-1, rows, merge, columns, merge) for one in meshed]
    return [one.transpose(2, 3).flatten() for one in blocks]
