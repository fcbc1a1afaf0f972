"""Plot the inverse frequency of each pair."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ropewalk import Rope
from ropewalk.tools.plots.figure import BLUE, GREY, ORANGE, blank, check_rope, colours, names_of, scheme_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike


def inv_freq(rope: Rope, *, axis_names: Sequence[str] = ()) -> Figure:
    """Plot the inverse frequency of each pair, before and after scaling.

    Args:
        rope: any rope, with or without scaling.
        axis_names: names of the rope's axes for the legend, for example `.axis_names` of the result of `from_config` or
            of its `.vision`. Empty means "axis 0", "axis 1" and so on.

    Returns:
        A Figure of the inverse frequency (radians per token, log axis) over the pair index. The right axis shows the
        wavelength in tokens. The line "before scaling" is for the same Rope with scaling None. Pairs with inverse
        frequency 0 are omitted. A line marks the trained length if the scheme states it. If the rope has several axes,
        the colour of a pair's marker shows its axis, and the units are positions instead of tokens.

    Raises:
        RopeError: rope is not a Rope, axis_names does not fit its axes, or matplotlib is not installed.
    """
    check_rope("plots.inv_freq", rope)
    names = names_of("plots.inv_freq", rope, axis_names)
    unit = "token" if rope.axes is None else "position"
    figure = blank(height=6.0)
    axes = figure.subplots()
    before, after = dataclasses.replace(rope, scaling=None).inv_freq, rope.inv_freq
    axes.set_yscale("log")
    if rope.scaling is None:
        axes.plot(_nan_for_zero(after), "o-", color=BLUE, markersize=4, label="no scaling")
    else:
        axes.plot(_nan_for_zero(before), "o--", color=GREY, markersize=4, label="before scaling")
        axes.plot(_nan_for_zero(after), "o-", color=BLUE, markersize=4, label=f"after scaling: {scheme_name(rope)}")
    if rope.axes is not None:
        axis_of_pair = np.array(rope.axes.axis)
        for axis, colour in enumerate(colours(rope.axes.count)):
            (pairs,) = np.nonzero((axis_of_pair == axis) & (after > 0))
            axes.plot(pairs, after[pairs], "s", color=colour, zorder=3, label=names[axis])
    trained = None if rope.scaling is None else rope.scaling.trained_length(None)
    if trained is not None:
        label = f"one turn within the trained length of {trained:,} tokens"
        axes.axhline(2 * math.pi / trained, color=ORANGE, label=label)
    axes.set_xlabel("pair index (0 is the fastest)")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylabel(f"inverse frequency (radians per {unit})")
    tokens = axes.secondary_yaxis("right", functions=(_wavelength, _wavelength))
    tokens.set_ylabel(f"wavelength ({unit}s per full turn)")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(f"Inverse frequency of {len(after)} pairs (base {rope.base:,.10g}, {scheme_name(rope)})")
    return figure


def _nan_for_zero(frequency: np.ndarray) -> np.ndarray:
    """Replace each frequency of 0, which a log axis cannot show, with NaN."""
    return np.where(frequency > 0, frequency, np.nan)


def _wavelength(frequency: ArrayLike) -> ArrayLike:
    """Convert radians per token to tokens per turn. The same function converts back."""
    with np.errstate(divide="ignore"):
        return 2 * math.pi / np.asarray(frequency, dtype=np.float64)
