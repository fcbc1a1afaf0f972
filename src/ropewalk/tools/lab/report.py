"""Write the report of a study: tables, findings and plots, all from the rows of `report.json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ropewalk import plots
from ropewalk.tools.lab import findings, pictures
from ropewalk.tools.lab.files import atomic_write
from ropewalk.tools.lab.methods import METHODS, TUNES
from ropewalk.tools.lab.parts import BASELINES
from ropewalk.tools.lab.results import Results, Spread
from ropewalk.tools.lab.tasks import Task

_MODELS = {"trained": "without fine-tuning", "tuned": "fine-tuned", **dict.fromkeys(BASELINES, "separate training")}


def describe_task(task: Task) -> dict[str, Any]:
    """Describe a task for `report.json`. "length_is" is the unit of "lengths". All other lengths are in tokens."""
    return {
        "name": task.name,
        "length_is": task.length_is,
        "lengths": list(task.lengths),
        "tokens": [task.tokens(length) for length in task.lengths],
        "trained": task.trained,
        "tuned": task.tuned,
        "steps": task.recipe.steps,
        "tune_steps": task.tune_recipe.steps,
        "measures": dict(task.measures),
        "position_width": task.position_width,
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
        lines += [
            *_tables(results),
            *(line for text in findings.paragraphs(results) for line in ("", *text.split("\n"))),
        ]
        for name, figure in pictures.draw_figures(results).items():
            with atomic_write(folder / f"{name}.png", folder / f"{name}.unfinished.png") as unfinished:
                plots.save(figure, unfinished)
    lines += ["", *_legend(result), ""]
    with atomic_write(folder / "report.txt") as unfinished:
        unfinished.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [*lines, f"The report, JSON and plots are in {folder}."]


def _tables(results: Results) -> list[str]:
    about, seeds = results.about, len(results.seeds)
    spread = f"mean of {seeds} seeds ± half of their range" if seeds > 1 else "one seed"
    lines = []
    for measure, what in about["measures"].items():
        lines += ["", f"{about['name']}: {what}; {spread}; trained on up to {about['trained']:,} tokens", ""]
        head = [about["length_is"], *(f"{length:,}" for length in results.lengths)]
        lines += _format_table([head, *_rows(results, measure)])
    return lines


def _rows(results: Results, measure: str) -> list[list[str]]:
    rows = []
    for model, kind in _MODELS.items():
        for method in results.methods(model):
            label = method if model == "trained" else f"{method}, {kind}"
            rows.append([label, *(_cell(value, measure) for value in results.values(model, method, measure))])
    return rows


def _cell(value: Spread, measure: str) -> str:
    digits = findings.decimals(value.mean, measure)
    return f"{value.mean:.{digits}f}" + (f" ±{value.half_range:.{digits}f}" if len(value.values) > 1 else "")


def _format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format a Markdown table with aligned columns: the first to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| "
        + " | ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        + " |"
        for row in rows
    ]
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
