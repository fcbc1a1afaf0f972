"""Build the explorer's page: the template, style, scripts, numbers and Plotly in one HTML file."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources

import ropewalk
from ropewalk import ModelRopes, Rope, _checks
from ropewalk.tools.plots.interactive.curves import WHO, Curve, curves_of
from ropewalk.tools.plots.interactive.numbers import distances_of, frequencies, numbers_of

MOST_BYTES = 6_000_000
_COLUMNS = ("Model", "Layers", "Scheme", "Base", "Pairs", "Trained length", "Longest", "Attention factor")


def explorer(
    models: Mapping[str, Rope | ModelRopes],
    *,
    length: int | None = None,
    trained_length: int | None = None,
    pairs: Sequence[int] | None = None,
    note: str = "",
) -> str:
    """Build an interactive HTML page about one or several ropes. The page needs no network.

    Its figures show inverse frequencies before and after scaling, vectors that rotate with the position, cosines of all
    pairs over positions, scores over distance with their bound, the angles that occur at a length but did not occur in
    training, and the axis of each pair of a rope with several axes. Layers with different ropes are separate curves. A
    rope that depends on the length is drawn both for the trained and for the longest length.

    Args:
        models: a dict whose keys are names. Each value is a `Rope` or the result of `from_config`.
        length: the longest sequence, in tokens, at most 2**31 − 1. None means the length that the config of each
            model states, or that of its scaled context if that is greater, and for a Rope at least 131,072.
        trained_length: the trained length before scaling, in tokens, for models and ropes that do not state it.
        pairs: the indices of the 1 to 12 pairs whose vectors are drawn. None means six, spread over those that rotate.
        note: plain text for a paragraph above the figures.

    Returns:
        The page as HTML, at most 6 MB in UTF-8, of which Plotly's JavaScript is 4.8 MB.

    Raises:
        RopeError: `models` is not such a dict, nothing in it rotates tokens, a number is out of range, the page
            would be too large, or Plotly is not installed (extra `explore`).

    Examples:
        >>> import ropewalk
        >>> rope = ropewalk.Rope(128, 10_000.0, "half")
        >>> page = ropewalk.plots.explorer({"unscaled": rope}, trained_length=4096)  # doctest: +SKIP
    """
    for name, tokens in (("length", length), ("trained_length", trained_length)):
        if tokens is not None:
            _checks.integer(WHO, name, tokens, at_least=1, at_most=2**31 - 1)
    curves, towers = curves_of(models, length, trained_length)
    distance = distances_of(curves)
    names = list(models)
    data = {
        "distances": distance.tolist(),
        "curves": [{**_labels(curve), **numbers_of(curve, distance, pairs)} for curve in curves],
        "towers": [{**_labels(curve), "after": frequencies(curve.rope.inv_freq, None)} for curve in towers],
    }
    page = _fill_template(names, note, curves, data).encode(errors="backslashreplace")  # of names of files
    if len(page) > MOST_BYTES:
        must = f"the page must have at most {MOST_BYTES:,} bytes"
        raise _checks.error(WHO, must, f"{len(page):,} with {len(curves)} ropes", "Pass fewer models.")
    return page.decode()


def _fill_template(names: list[str], note: str, curves: list[Curve], data: Mapping[str, object]) -> str:
    """Fill the template. Text is escaped, and `<` is escaped in the JSON, so that no text can end a script element."""
    parts = {
        "title": html.escape(f"{names[0]} and {len(names) - 1} more" if len(names) > 5 else ", ".join(names)),
        "note": f'<p class="note">{html.escape(note)}</p>' if note else "",
        "table": _table(curves),
        "version": html.escape(ropewalk.__version__),
        "style": _read_file("page.css"),
        "plotly": _plotly(),
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "base": _read_file("base.js"),
        "figures": _read_file("figures.js"),
        "controls": _read_file("controls.js"),
    }
    pieces = _read_file("page.html").split("{{")
    return pieces[0] + "".join(
        parts[name] + text for name, text in (piece.split("}}", maxsplit=1) for piece in pieces[1:])
    )


def _labels(curve: Curve) -> dict[str, object]:
    """Return the labels of a curve for the page's script, and the axis of each pair."""
    axes = curve.rope.axes
    names = curve.axis_names or tuple(f"axis {number}" for number in range(axes.count if axes else 0))
    return {
        "label": curve.label,
        "scheme": curve.scheme,
        "trained": curve.trained,
        "longest": curve.longest,
        "unit": curve.unit,
        "axis": None if axes is None else axes.axis,
        "axisNames": names if axes else (),
    }


def _table(curves: list[Curve]) -> str:
    """Return the HTML table of the curves."""
    head = "".join(f'<th scope="col">{column}</th>' for column in _COLUMNS)
    rows = "".join(
        f'<tr><th scope="row">{html.escape(curve.label)}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(curve))
        + "</tr>"
        for curve in curves
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _cells(curve: Curve) -> list[str]:
    rope = curve.rope
    speed = rope.inv_freq
    rotating = int((speed > 0).sum())
    return [
        curve.layers or "—",
        curve.scheme,
        f"{rope.base:,.10g}",
        f"{len(speed)}" if rotating == len(speed) else f"{rotating} of {len(speed)} rotate",
        "not stated" if curve.trained is None else f"{curve.trained:,}",
        f"{curve.longest:,}",
        f"{rope.attention_factor:.4g}",
    ]


def _read_file(name: str) -> str:
    return resources.files("ropewalk.tools.plots.interactive").joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    """Return Plotly's JavaScript, which is part of its Python package."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as e:
        raise _checks.missing_package(WHO, "plotly", "explore") from e
    return str(get_plotlyjs())
