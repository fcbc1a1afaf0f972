"""Write the report of a study: tables, findings and plots, all from the rows of `report.json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import findings
from findings import Results
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from methods import BASELINES, METHODS, TUNES
from tasks import Task
from training import replaced

from ropewalk import plots

_FURTHER_COLOURS = ("black", "navy", "darkred", "darkgreen")  # of the methods after the first ten
_MODELS = {"trained": "without fine-tuning", "tuned": "fine-tuned", **dict.fromkeys(BASELINES, "separate training")}


def describe_task(task: Task) -> dict[str, Any]:
    """Describe a task for `report.json`. All lengths are in tokens."""
    return {
        "name": task.name,
        "tokens": [task.tokens(length) for length in task.lengths],
        "trained": task.trained,
        "tune_steps": task.tune_recipe.steps,
        "measures": dict(task.measures),
    }


def write(result: dict[str, Any], folder: Path) -> list[str]:
    """Write report.txt and the plots, and return the lines of the text.

    Args:
        result: the content of `report.json`.
        folder: folder of the report, which must exist.
    """
    lines: list[str] = []
    for about in result["tasks"]:
        results = Results(about, result["rows"])
        lines += _tables(results)
        lines += (line for text in findings.paragraphs(results) for line in ("", *text.split("\n")))
        for name, figure in draw_figures(results).items():
            plots.save(figure, folder / f"{name}.png")
    lines += ["", *_legend(result), ""]
    with replaced(folder / "report.txt") as new:
        new.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [*lines, f"The report, JSON and plots are in {folder}."]


def _tables(results: Results) -> list[str]:
    about, seeds = results.about, len(results.seeds)
    spread = f"mean of {seeds} seeds ± half of their range" if seeds > 1 else "one seed"
    lines = []
    for measure, what in about["measures"].items():
        lines += ["", f"{about['name']}: {what}; {spread}; trained on up to {about['trained']:,} tokens", ""]
        head = ["× trained length", *(f"{tokens / about['trained']:g}" for tokens in about["tokens"])]
        lines += _format_table([head, *_rows(results, measure)])
    return lines


def _rows(results: Results, measure: str) -> list[list[str]]:
    rows = []
    for model, kind in _MODELS.items():
        for method in results.methods(model):
            label = method if model == "trained" else f"{method}, {kind}"
            rows.append([label, *(_cell(value, measure) for value in results.values(model, method, measure))])
    return rows


def _cell(values: Sequence[float], measure: str) -> str:
    mean, half_range = _mean(values), (max(values) - min(values)) / 2
    digits = findings.decimals(mean, measure)
    return f"{mean:.{digits}f}" + (f" ±{half_range:.{digits}f}" if len(values) > 1 else "")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format a Markdown table with aligned columns: the first to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = [
        [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))] for row in rows
    ]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return [lines[0], rule, *lines[1:]]


def _legend(result: dict[str, Any]) -> list[str]:
    """Describe each method in the tables."""
    names = {row["method"] for row in result["rows"]}
    what = {method.name: method.what for method in (*METHODS, *TUNES)} | BASELINES
    return [
        "Methods (n is the number of tokens, and trained is the trained length):",
        *(f"- {name}: {text}" for name, text in what.items() if name in names),
    ]


def draw_figures(results: Results) -> dict[str, Figure]:
    """Draw a figure for each measure of one task, and return them by their file names without suffix.

    Models without fine-tuning are in the upper half and fine-tuned ones in the lower half. Lines are means over the
    seeds, and bands extend from the smallest to the largest value.
    """
    about = results.about
    return {
        f"{about['name']}-{measure}": _figure(results, measure, what) for measure, what in about["measures"].items()
    }


def _figure(results: Results, measure: str, what: str) -> Figure:
    figure = plots.blank(height=10.0)
    upper, lower = figure.subplots(2, sharex=True, sharey=True)
    multiples = [tokens / results.about["trained"] for tokens in results.about["tokens"]]
    names = list(dict.fromkeys(name for model in results.models for name in results.methods(model)))
    untuned = ["trained", *(row for row in results.models if row not in ("trained", "tuned"))]
    for axes, models, title in ((upper, untuned, "without fine-tuning"), (lower, ["tuned"], "fine-tuned")):
        for model in models:
            for method in results.methods(model):
                _draw(axes, multiples, results.values(model, method, measure), method, names.index(method))
        axes.axvline(1, color="0.45", linewidth=1, label="trained length")
        axes.set(ylabel=what, title=f"{results.about['name']}, {title}")
        axes.grid(alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    upper.set_yscale("linear" if measure == "accuracy" else "log")
    lower.set_xlabel("length (× trained length)")
    lower.set_xscale("log", base=2)
    lower.set_xticks(multiples, [f"{value:g}" for value in multiples])
    return figure


def _draw(axes: Axes, x: Sequence[float], spreads: list[tuple[float, ...]], method: str, number: int) -> None:
    color, style = (f"C{number}", "-") if number < 10 else (_FURTHER_COLOURS[number - 10], "--")
    mean = [_mean(values) for values in spreads]
    axes.plot(x, mean, style, marker="o", markersize=3, linewidth=1.5, label=method, color=color)
    least, most = ([extreme(values) for values in spreads] for extreme in (min, max))
    axes.fill_between(x, least, most, color=color, alpha=0.15, linewidth=0)
