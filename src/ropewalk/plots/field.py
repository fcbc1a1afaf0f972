"""How the pairs of a rope with several axes see an image: the angle of each patch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ropewalk import Rope, _checks
from ropewalk.plots.figure import blank, colours, names_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

    from ropewalk import LearnedRope

_WHO = "plots.angle_field"
_COLUMNS, _MOST_PAIRS, _MOST_PATCHES = 4, 16, 512


def angle_field(
    rope: Rope | LearnedRope,
    height: int,
    width: int,
    *,
    pairs: Sequence[int] | None = None,
    positions: ArrayLike | None = None,
    head: int | None = None,
    axis_names: Sequence[str] = (),
) -> Figure:
    """The angle of each patch of an image, for a few pairs of a head: stripes across the axis that the pair listens to.

    Without positions, the last two axes are taken to be row and column. Where a model has column and row, as Gemma 4,
    Llama 4 and SAM have, the stripes would lie across the wrong side: pass `positions=grid(height, width, order="wh")`.

    Args:
        rope: a rope with axes; or a `LearnedRope` of several axes, whose pairs may listen to all of them.
        height, width: patches in a column and in a row of patches, from 1 to 512.
        pairs: which pairs, 1 to 16 of them; None for the fastest pairs of each axis, about 8 in all. For a
            `LearnedRope`, None gives the 8 fastest pairs.
        positions: what `rope.at` would get, `[axes, height · width]`, row-major: an array, or a tensor on the CPU. None
            for rows and columns from 0 on the last two axes, and 0 on an axis before them (time, image). A
            `LearnedRope` needs them, since only you know what its axes are: (x, y) in RoPE-Mixed.
        head: which head of a `LearnedRope` that has frequencies for each.
        axis_names: what the axes of a rope are: `.axis_names` of a model's ropes or of its tower.

    Returns:
        A Figure: a panel for each pair, whose colour is the cosine of the angle (dimensionless, without attention
        factor) over row and column (patches). Its title has the axis and the wavelength, in units of positions. Its
        frame has the colour of the axis in `inv_freq`. For a `LearnedRope` the title has the frequencies of all axes
        instead of the axis, and the wavelength along the direction in which the angle of the pair grows fastest.

    Raises:
        RopeError: the rope has no axes, or neither two nor three and no positions are given; a number is out of range;
            positions have another shape or are not finite; head or axis_names does not fit; matplotlib is missing.

    Example:
        >>> import ropewalk
        >>> rope = ropewalk.Rope(64, 10_000.0, "half", axes=ropewalk.Axes.axial((32, 32)))
        >>> figure = ropewalk.plots.angle_field(rope, 14, 14, pairs=[0, 4, 16, 20])
        >>> figure.axes[1].get_title()
        'pair 4: axis 0\\nwavelength 62.8'
    """
    speeds, axis, names = _of_rope(rope, axis_names) if isinstance(rope, Rope) else _of_learned(rope, head, axis_names)
    if head is not None and isinstance(rope, Rope):
        raise _checks.error(
            _WHO, "head must be None for a Rope, which has the same for all", str(head), "Leave it out."
        )
    for name, size in (("height", height), ("width", width)):
        _checks.integer(_WHO, name, size, at_least=1, at_most=_MOST_PATCHES)
    count, total = speeds.shape
    if positions is None and not axis:
        fix = 'Pass e.g. positions=ropewalk.positions.grid(height, width, order="wh"), for RoPE-Mixed.'
        raise _checks.error(_WHO, "positions must be given for a LearnedRope", "None", fix)
    places = (
        _grid(count, height, width) if positions is None else _checked_positions(positions, (count, height * width))
    )
    lengths = np.sqrt(np.square(speeds).sum(0))
    shown = _fastest(axis or [0] * total, count if axis else 1, lengths) if pairs is None else _checked(pairs, total)
    columns = min(_COLUMNS, len(shown))
    lines = math.ceil(len(shown) / columns)
    figure = blank(height=1.2 + lines * (0.7 + 7.6 / columns * min(height / width, 2.0)))
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    of_axis = colours(count)
    for panel, pair in zip(grid, shown, strict=False):
        wavelength = 2 * math.pi / lengths[pair] if lengths[pair] else math.inf
        cosines = np.cos(speeds[:, pair] @ places).reshape(height, width)
        image = panel.imshow(cosines, interpolation="nearest", cmap="RdBu_r", vmin=-1, vmax=1)
        listens = names[axis[pair]] if axis else ", ".join(f"{speed:.3g}" for speed in speeds[:, pair])
        panel.set_title(f"pair {pair}: {listens}\nwavelength {wavelength:,.{0 if wavelength >= 100 else 1}f}")
        panel.locator_params(integer=True)
        for edge in panel.spines.values() if axis else ():
            edge.set(color=of_axis[axis[pair]], linewidth=3)
    for panel in grid[len(shown) :]:
        panel.set_axis_off()
    figure.supxlabel("column (patches)")
    figure.supylabel("row (patches)")
    figure.colorbar(image, ax=list(grid), label="cos(angle), dimensionless", shrink=0.8, pad=0.02)
    figure.suptitle(f"Angles of {len(shown)} of {total} pairs over {height} × {width} patches")
    return figure


def _of_rope(rope: Rope, axis_names: Sequence[str]) -> tuple[np.ndarray, tuple[int, ...], list[str]]:
    """Of each pair its speed along each axis, radians per position, float64 `[axes, pairs]`; its axis; the names."""
    if rope.axes is None:
        raise _checks.error(_WHO, "rope must have axes", "a rope of one axis", "Draw plots.pairs.")
    own = np.arange(rope.axes.count)[:, None] == np.array(rope.axes.axis)
    return np.where(own, rope.inv_freq, 0.0), rope.axes.axis, names_of(_WHO, rope, axis_names)


def _of_learned(
    rope: object, head: int | None, axis_names: Sequence[str]
) -> tuple[np.ndarray, tuple[int, ...], list[str]]:
    """The same of one head of a LearnedRope, whose pairs have no axis of their own."""
    from ropewalk import LearnedRope

    if not isinstance(rope, LearnedRope):
        must, fix = "rope must be a Rope with axes or a LearnedRope", "Of a model, pass one of its ropes."
        raise _checks.error(_WHO, must, _checks.shown(rope), fix)
    if rope.axes == 1:
        raise _checks.error(_WHO, "rope must have axes", "a LearnedRope of one axis", "An image has two.")
    if len(axis_names):
        must, got = "axis_names must be () for a LearnedRope, whose pairs listen to all axes", _checks.shown(axis_names)
        raise _checks.error(_WHO, must, got, "Leave it out.")
    if (head is None) != (rope.heads is None):
        must = "head must be given if each head has its own frequencies, and None if all share them"
        raise _checks.error(_WHO, must, f"head={head} and heads={rope.heads}", "Pass e.g. head=0, or leave it out.")
    speeds = rope.inv_freq.detach().double().cpu().numpy()
    if head is not None and rope.heads is not None:
        speeds = speeds[:, _checks.integer(_WHO, "head", head, at_least=0, at_most=rope.heads - 1)]
    return speeds, (), []


def _grid(count: int, height: int, width: int) -> np.ndarray:
    """Row and column of each patch on the last two axes, float64 `[count, height · width]`; 0 on one before them."""
    if count not in (2, 3):
        fix = 'Pass e.g. positions=ropewalk.positions.grid(height, width, order="0hw0").'
        raise _checks.error(_WHO, "rope must have two or three axes if no positions are given", str(count), fix)
    row, column = np.indices((height, width)).reshape(2, -1)
    return np.stack((*[np.zeros_like(row)] * (count - 2), row, column)).astype(np.float64)


def _checked_positions(positions: ArrayLike, shape: tuple[int, int]) -> np.ndarray:
    """The positions as float64, if they are finite and of this shape."""
    try:
        places = np.asarray(positions, dtype=np.float64)
    except (TypeError, ValueError) as e:
        fix = "Pass a tensor on the CPU, or an array."
        raise _checks.error(_WHO, "positions must be numbers", _checks.described(positions), fix) from e
    if places.shape != shape:
        must = f"positions must have shape {list(shape)}, [axes, height · width]"
        raise _checks.error(_WHO, must, f"shape {places.shape}", "Leave out tokens that are no patches.")
    if not np.isfinite(places).all():
        raise _checks.error(_WHO, "positions must be finite", "nan or inf", "Look for what made them so.")
    return places


def _fastest(axis: Sequence[int], count: int, speed: np.ndarray) -> list[int]:
    """The fastest pairs of each axis, about 8 in all, one axis after another."""
    chosen: list[int] = []
    for one in range(count):
        (pairs,) = np.nonzero(np.equal(axis, one))
        fastest = pairs[np.argsort(-speed[pairs], kind="stable")]
        chosen += fastest[: max(1, 8 // count)].tolist()
    return chosen


def _checked(pairs: Sequence[int], count: int) -> list[int]:
    """The pairs that were asked for, of count."""
    if isinstance(pairs, str) or not isinstance(pairs, Sequence) or not 1 <= len(pairs) <= _MOST_PAIRS:
        must = f"pairs must be a list of 1 to {_MOST_PAIRS} pairs"
        raise _checks.error(_WHO, must, _checks.shown(pairs), "Pass e.g. pairs=[0, 4].")
    return [_checks.integer(_WHO, "pairs", pair, at_least=0, at_most=count - 1) for pair in pairs]
