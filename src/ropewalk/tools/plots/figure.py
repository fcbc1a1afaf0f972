"""Functions that all plots share: create an empty figure, save it, choose colours, name a scheme."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ropewalk import Rope, _checks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
BLUE, ORANGE, GREY = "tab:blue", "tab:orange", "0.45"


def blank(*, height: float) -> Figure:
    """Create an empty figure, 1000 pixels wide and 100 · height pixels high.

    Raises:
        RopeError: matplotlib is not installed, or MPLBACKEND names a backend that matplotlib does not know.
    """
    try:
        import matplotlib.figure
    except ImportError as e:
        raise _checks.missing_package("plots", "matplotlib", "plots") from e
    except ValueError as e:  # matplotlib checks MPLBACKEND in its import, although no backend is needed here
        raise _checks.error("plots", "matplotlib must accept MPLBACKEND", str(e), "Unset MPLBACKEND.") from e
    return matplotlib.figure.Figure(figsize=(10.0, height), dpi=100, layout="constrained")


def save(figure: Figure, path: str | Path) -> None:
    """Save a figure as PNG, SVG or PDF, depending on the suffix of path. An existing file is overwritten.

    Raises:
        RopeError: the folder does not exist, the suffix is not supported, or the file cannot be written.
    """
    path = check_path(path)
    try:
        figure.savefig(path)
    except OSError as e:
        got = f"{str(path)!r} ({e.strerror})"
        raise _checks.error("plots.save", "path must be writable", got, "Pass another path.") from e


def check_path(path: str | Path) -> Path:
    """Check that a plot can be saved at a path, and return it as a Path.

    Raises:
        RopeError: the folder does not exist, or the suffix is not one of `FORMATS`.
    """
    path = Path(path)
    if path.suffix.lower().removeprefix(".") not in FORMATS:
        listed = ", ".join("." + name for name in FORMATS)
        must = f"path must end in one of {listed}"
        raise _checks.error("plots.save", must, repr(str(path)), "Change the suffix of the file.")
    if not path.parent.is_dir():
        raise _checks.error("plots.save", "the folder of path must exist", repr(str(path.parent)), "Create it first.")
    return path


def check_rope(who: str, rope: object) -> None:
    """Raise a RopeError unless `rope` is a Rope."""
    if not isinstance(rope, Rope):
        fix = "For a LearnedRope, use plots.angle_field. For a model, pass one of its ropes."
        raise _checks.error(who, "rope must be a Rope", _checks.shown(rope), fix)


def names_of(who: str, rope: Rope, axis_names: Sequence[str]) -> list[str]:
    """Return the names of a rope's axes: `axis_names`, or "axis 0", "axis 1" and so on if it is empty.

    Raises:
        RopeError: axis_names is neither empty nor one name for each axis.
    """
    count = 0 if rope.axes is None else rope.axes.count
    if isinstance(axis_names, str) or len(axis_names) not in (0, count):
        must = f"axis_names must have a name for each of the {count} axes of the rope, or be empty"
        raise _checks.error(who, must, _checks.shown(axis_names), "Pass .axis_names of the result of from_config.")
    return list(axis_names) or [f"axis {a}" for a in range(count)]


def scheme_name(rope: Rope) -> str:
    """Return the name of a rope's scheme for a title or a label."""
    return "no scaling" if rope.scaling is None else rope.scaling.label


def colours(count: int) -> np.ndarray:
    """Return RGBA colours `[count, 4]` from dark to light, which can be read on white and, inverted, on black."""
    import matplotlib

    spread: np.ndarray = matplotlib.colormaps["plasma"](np.linspace(0.0, 0.48, count))
    return spread
