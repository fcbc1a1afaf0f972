"""Plot the results of a study: each measure by length, and the loss by position, with a line for each method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ropewalk import plots
from ropewalk.tools.lab.results import Results, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FURTHER_COLOURS = ("black", "navy", "darkred", "darkgreen")  # of the methods after the first ten


def draw_figures(results: Results) -> dict[str, Figure]:
    """Draw the figures of one task.

    Models without fine-tuning are in the upper half and fine-tuned ones in the lower half. Lines are means over the
    seeds, and bands extend from the smallest to the largest value.

    Returns:
        A dict from file names without suffix to figures.
    """
    about = results.about
    figures = {}
    multiples = [tokens / about["trained"] for tokens in about["tokens"]]
    for measure, description in about["measures"].items():
        figures[f"{about['name']}-{measure}"] = _figure(
            results,
            multiples,
            lambda model, method, measure=measure: results.values(model, method, measure),  # type: ignore[misc]
            xlabel="length (× trained length)",
            ylabel=description,
            trained=1,
            logarithmic=True,
        )
        figures[f"{about['name']}-{measure}"].axes[0].set_yscale("linear" if measure == "accuracy" else "log")
    if (width := about["position_width"]) is not None:
        figures[f"{about['name']}-positions"] = _figure(
            results,
            [width * i + width // 2 for i in range(about["tokens"][-1] // width)],
            results.loss_by_position,
            xlabel="position (tokens)",
            ylabel=f"loss (nats per byte), means of {width} positions",
            trained=about["trained"],
            logarithmic=False,
        )
    return figures


def _figure(
    results: Results,
    x: Sequence[float],
    line: Callable[[str, str], list[Spread]],
    *,
    xlabel: str,
    ylabel: str,
    trained: int,
    logarithmic: bool,
) -> Figure:
    """Plot a line for each model and method. `line(model, method)` returns its values at the coordinates x."""
    figure = plots.blank(height=10.0)
    upper, lower = figure.subplots(2, sharex=True, sharey=True)
    names = list(dict.fromkeys(name for model in results.models for name in results.methods(model)))
    untuned = ["trained", *(row for row in results.models if row not in ("trained", "tuned"))]
    for axes, models, title in ((upper, untuned, "without fine-tuning"), (lower, ["tuned"], "fine-tuned")):
        for model in models:
            for method in results.methods(model):
                _draw(axes, x, line(model, method), method, names.index(method))
        axes.axvline(trained, color="0.45", linewidth=1, label="trained length")
        axes.set(ylabel=ylabel, title=f"{results.about['name']}, {title}")
        axes.grid(alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    lower.set_xlabel(xlabel)
    if logarithmic:
        lower.set_xscale("log", base=2)
        lower.set_xticks(x, [f"{value:g}" for value in x])
    return figure


def _draw(axes: Axes, x: Sequence[float], spreads: list[Spread], method: str, number: int) -> None:
    color, style = (f"C{number}", "-") if number < 10 else (_FURTHER_COLOURS[number - 10], "--")
    mean = [s.mean for s in spreads]
    axes.plot(x, mean, style, marker="o", markersize=3, linewidth=1.5, label=method, color=color)
    least, most = ([f(s.values) for s in spreads] for f in (min, max))
    axes.fill_between(x, least, most, color=color, alpha=0.15, linewidth=0)
