"""Plot the angles by which the pairs of a rope with several axes rotate the patches of an image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ropewalk import Rope, _checks
from ropewalk.tools.plots.figure import blank, colours, names_of

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
    """Plot the cosine of the angle by which each pair rotates each patch of an image.

    A pair of a `Rope` rotates by the position on one axis, so its panel shows stripes perpendicular to that axis. By
    default, the last two axes are row and column, in this order. Some models, such as Gemma 4, Llama 4 and SAM, have
    the column first. For them, pass `positions=grid(height, width, order="wh")`.

    Args:
        rope: a rope with axes, or a `LearnedRope` with several axes, whose pairs may rotate by all axes at once.
        height, width: the numbers of rows and columns of patches, each from 1 to 512.
        pairs: the indices of 1 to 16 pairs. None means the fastest pairs of each axis, about 8 in total, or the 8
            fastest pairs of a `LearnedRope`.
        positions: the positions of the patches, row by row, as for `rope.at`: `[axes, height · width]`, an array or a
            tensor on the CPU. None means rows and columns, counted from 0, on the last two axes, and 0 on the first
            of three axes (time or image). A `LearnedRope` requires positions, because its axes have no fixed meaning.
            In RoPE-Mixed they are (x, y).
        head: the index of a head, for a `LearnedRope` with separate frequencies for each head. Otherwise None.
        axis_names: names of the axes of a `Rope`, for example `.axis_names` of the result of `from_config` or of its
            `.vision`. It must be empty for a `LearnedRope`.

    Returns:
        A Figure with a panel for each pair. The panel shows the cosine of the angle (dimensionless, without attention
        factor) as a colour over column and row (patches). The title of a panel states the axis and the wavelength in
        positions, and its frame has the colour that `inv_freq` uses for the axis. For a `LearnedRope`, the title states
        the frequencies of all axes, and the wavelength along the direction in which the angle grows fastest.

    Raises:
        RopeError: rope has only one axis; positions is None, but rope is a `LearnedRope` or has neither two nor three
            axes; a number is out of range; positions has a wrong shape or is not finite; head or axis_names does not
            fit the rope; or matplotlib is not installed.

    Examples:
        >>> import ropewalk
        >>> rope = ropewalk.Rope(64, 10_000.0, "half", axes=ropewalk.Axes.axial((32, 32)))
        >>> figure = ropewalk.plots.angle_field(rope, 14, 14, pairs=[0, 4, 16, 20])
        >>> figure.axes[1].get_title()
        'pair 4: axis 0\\nwavelength 62.8'
    """
    speeds, axis, names = (
        _speeds_of_rope(rope, axis_names) if isinstance(rope, Rope) else _speeds_of_learned_rope(rope, head, axis_names)
    )
    if head is not None and isinstance(rope, Rope):
        raise _checks.error(_WHO, "head must be None for a Rope, whose heads are all the same", str(head), "Omit it.")
    for name, size in (("height", height), ("width", width)):
        _checks.integer(_WHO, name, size, at_least=1, at_most=_MOST_PATCHES)
    count, total = speeds.shape
    if positions is None and not axis:
        fix = 'For RoPE-Mixed, pass positions=ropewalk.positions.grid(height, width, order="wh").'
        raise _checks.error(_WHO, "positions must be passed for a LearnedRope", "None", fix)
    places = _grid(count, height, width) if positions is None else _check_positions(positions, (count, height * width))
    lengths = np.sqrt(np.square(speeds).sum(0))
    shown = (
        _fastest(axis or [0] * total, count if axis else 1, lengths) if pairs is None else _check_pairs(pairs, total)
    )
    columns = min(_COLUMNS, len(shown))
    panel_rows = math.ceil(len(shown) / columns)
    figure = blank(height=1.2 + panel_rows * (0.7 + 7.6 / columns * min(height / width, 2.0)))
    grid = figure.subplots(panel_rows, columns, squeeze=False).ravel()
    axis_colours = colours(count)
    for panel, pair in zip(grid, shown, strict=False):
        wavelength = 2 * math.pi / lengths[pair] if lengths[pair] else math.inf
        cosines = np.cos(speeds[:, pair] @ places).reshape(height, width)
        image = panel.imshow(cosines, interpolation="nearest", cmap="RdBu_r", vmin=-1, vmax=1)
        label = names[axis[pair]] if axis else ", ".join(f"{speed:.3g}" for speed in speeds[:, pair])
        panel.set_title(f"pair {pair}: {label}\nwavelength {wavelength:,.{0 if wavelength >= 100 else 1}f}")
        panel.locator_params(integer=True)
        for edge in panel.spines.values() if axis else ():
            edge.set(color=axis_colours[axis[pair]], linewidth=3)
    for panel in grid[len(shown) :]:
        panel.set_axis_off()
    figure.supxlabel("column (patches)")
    figure.supylabel("row (patches)")
    figure.colorbar(image, ax=list(grid), label="cos(angle), dimensionless", shrink=0.8, pad=0.02)
    figure.suptitle(f"Angles of {len(shown)} of {total} pairs over {height} × {width} patches")
    return figure


def _speeds_of_rope(rope: Rope, axis_names: Sequence[str]) -> tuple[np.ndarray, tuple[int, ...], list[str]]:
    """Return the speed of each pair along each axis, the axis of each pair, and the names of the axes.

    Speeds are float64 `[axes, pairs]`, in radians per position. A pair has speed 0 on all axes but its own.
    """
    if rope.axes is None:
        raise _checks.error(_WHO, "rope must have axes", "a rope with one axis", "Use plots.pairs.")
    own = np.arange(rope.axes.count)[:, None] == np.array(rope.axes.axis)
    return np.where(own, rope.inv_freq, 0.0), rope.axes.axis, names_of(_WHO, rope, axis_names)


def _speeds_of_learned_rope(
    rope: object, head: int | None, axis_names: Sequence[str]
) -> tuple[np.ndarray, tuple[int, ...], list[str]]:
    """Return the speeds of one head of a LearnedRope, float64 `[axes, pairs]`, with empty axes and names.

    Axes and names are empty sequences, because no pair of a LearnedRope belongs to a single axis.
    """
    from ropewalk import LearnedRope

    if not isinstance(rope, LearnedRope):
        must, fix = "rope must be a Rope with axes or a LearnedRope", "For a model, pass one of its ropes."
        raise _checks.error(_WHO, must, _checks.shown(rope), fix)
    if rope.axes == 1:
        raise _checks.error(
            _WHO, "rope must have axes", "a LearnedRope with one axis", "Pass a rope with two or more axes."
        )
    if len(axis_names):
        must, got = (
            "axis_names must be empty for a LearnedRope, whose pairs rotate by all axes",
            _checks.shown(axis_names),
        )
        raise _checks.error(_WHO, must, got, "Omit it.")
    if (head is None) != (rope.heads is None):
        must = "head must be an index if each head has its own frequencies, and None if all share them"
        raise _checks.error(_WHO, must, f"head={head} and heads={rope.heads}", "Pass head=0, for example, or omit it.")
    speeds = rope.inv_freq.detach().double().cpu().numpy()
    if head is not None and rope.heads is not None:
        speeds = speeds[:, _checks.integer(_WHO, "head", head, at_least=0, at_most=rope.heads - 1)]
    return speeds, (), []


def _grid(count: int, height: int, width: int) -> np.ndarray:
    """Return the row and column of each patch on the last two of `count` axes, float64 `[count, height · width]`.

    If there are three axes, all positions on the first one are 0.
    """
    if count not in (2, 3):
        fix = 'Pass positions, for example ropewalk.positions.grid(height, width, order="0hw0").'
        raise _checks.error(_WHO, "rope must have two or three axes if positions is None", str(count), fix)
    row, column = np.indices((height, width)).reshape(2, -1)
    return np.stack((*[np.zeros_like(row)] * (count - 2), row, column)).astype(np.float64)


def _check_positions(positions: ArrayLike, shape: tuple[int, int]) -> np.ndarray:
    """Convert positions to float64, and check that they are finite and have the shape `shape`."""
    try:
        places = np.asarray(positions, dtype=np.float64)
    except (TypeError, ValueError) as e:
        fix = "Pass a tensor on the CPU, or an array."
        raise _checks.error(_WHO, "positions must be numbers", _checks.describe(positions), fix) from e
    if places.shape != shape:
        must = f"positions must have shape {list(shape)}, [axes, height · width]"
        raise _checks.error(_WHO, must, f"shape {places.shape}", "Omit the tokens that are not patches.")
    if not np.isfinite(places).all():
        raise _checks.error(_WHO, "positions must be finite", "nan or inf", "Check how they are computed.")
    return places


def _fastest(axis: Sequence[int], count: int, speed: np.ndarray) -> list[int]:
    """Return the fastest pairs of each of `count` axes, about 8 in total, grouped by axis."""
    chosen: list[int] = []
    for number in range(count):
        (pairs,) = np.nonzero(np.equal(axis, number))
        fastest = pairs[np.argsort(-speed[pairs], kind="stable")]
        chosen += fastest[: max(1, 8 // count)].tolist()
    return chosen


def _check_pairs(pairs: Sequence[int], count: int) -> list[int]:
    """Check that `pairs` are indices below `count`, and return them as a list."""
    if isinstance(pairs, str) or not isinstance(pairs, Sequence) or not 1 <= len(pairs) <= _MOST_PAIRS:
        must = f"pairs must be a list of 1 to {_MOST_PAIRS} pairs"
        raise _checks.error(_WHO, must, _checks.shown(pairs), "Pass a list such as [0, 4].")
    return [_checks.integer(_WHO, "pairs", pair, at_least=0, at_most=count - 1) for pair in pairs]
