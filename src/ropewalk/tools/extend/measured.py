"""What a measurement found, as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from ropewalk.tools.extend.subject import SELF_EXTEND


def measured_text(facts: Mapping[str, Any]) -> str:
    """Return the facts as text for a terminal, the verdict first."""
    unscaled = (f"{row['copied']:.2f} across {row['distance']:,}" for row in facts["unscaled"])
    lines = [*_verdict(facts), f"without scaling it copies {', '.join(unscaled)}"]
    lines = [wrapped for line in lines for wrapped in textwrap.wrap(line, _WIDTH, subsequent_indent="  ")]
    if facts["rows"]:
        head = ["method", "factor", f"at {facts['target']:,}", "(lowest seed)", "at half", "short texts", ""]
        lines += ["", *_columns([head, *(_row(facts, row) for row in facts["rows"])])]
        lines += _in_pytorch(facts)
    return "\n".join(lines)


_WIDTH = 85


def _verdict(facts: Mapping[str, Any]) -> list[str]:
    reach, stated, target = facts["reach"], facts["stated_length"], facts["target"]
    if not reach:
        return [
            f"No verdict: this model copies {facts['usual']:.2f} of the tokens at best, so its copy says nothing about "
            "how far it reads. Take the rule of `ropewalk extend` without --measure, and evaluate your own task."
        ]
    least = "at least " if reach >= max(row["distance"] for row in facts["unscaled"]) else ""
    first = (
        f"reach: {least}{reach:,} of the {stated:,} tokens that the config states. Up to there the model "
        f"usually copies {facts['usual']:.2f} of the tokens; a distance is reached with at least {facts['bar']:.2f}."
    )
    if facts["method"] == "none":
        return [first, f"verdict: nothing is needed for {target:,} tokens."]
    if facts["method"] is None:
        best = max((row for row in facts["rows"] if row["method"] != SELF_EXTEND), key=lambda row: row["at_target"])
        return [
            first,
            f"verdict: no method of engines reaches {target:,} tokens. The best is {best['method']} with factor "
            f"{best['factor']:g}, which copies {best['at_target']:.2f}. Choose a shorter target, or train the model on "
            "long texts.",
        ]
    row = next(r for r in facts["rows"] if (r["method"], r["factor"]) == (facts["method"], facts["factor"]))
    sure = f"every seed reaches (the lowest copies {row['lowest']:.2f})"
    if row["lowest"] < facts["bar"]:
        sure = f"not very, since a seed falls short ({row['lowest']:.2f}), so look at the other rows that reach"
    if row["at_half"] < facts["bar"]:
        sure += f"; halfway it copies {row['at_half']:.2f}"
    return [
        first,
        f"verdict: {row['method']} with factor {row['factor']:g}, the smallest that reaches {target:,} tokens "
        f"(copies {row['at_target']:.2f}), and of those the method that costs short texts least "
        f"({row['short']:+z.3f} nats per token).",
        f"how sure: {sure}. A copy is the least that reading needs, so evaluate your own task as well.",
    ]


def _in_pytorch(facts: Mapping[str, Any]) -> list[str]:
    """Return what Self-Extend does for this model, and the code for it."""
    if "left_out" in facts:
        return ["", *textwrap.wrap(f"Self-Extend was not measured: {facts['left_out']}", _WIDTH)]
    if (row := facts["self_extend"]) is None:
        return []
    said = (
        f"In PyTorch code, Self-Extend with groups of {row['factor']:g} beyond {row['window']:,} tokens reaches it too "
        f"(copies {row['at_target']:.2f}, short texts {row['short']:+z.3f}). No engine has it. It scores pairs twice:"
    )
    rope = f"ropewalk.SelfExtend(ropes.layers[{facts['layer']}], group={row['factor']:g}, window={row['window']})"
    given = rope if facts["kind"] is None else f"{{{facts['kind']!r}: {rope}}}"
    code = ["ropes = ropewalk.from_config(model.config.get_text_config())", f"accelerate(model, rope={given})"]
    return ["", *textwrap.wrap(said, _WIDTH), *(f"  {line}" for line in code)]


def _row(facts: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    chosen = (row["method"], row["factor"]) == (facts["method"], facts["factor"])
    mark = "chosen" if chosen else "reaches" if row["at_target"] >= facts["bar"] else ""
    numbers = [f"{row[key]:.2f}" for key in ("at_target", "lowest", "at_half")]
    return [row["method"], f"{row['factor']:g}", *numbers, f"{row['short']:+z.3f}", mark]


def _columns(rows: Iterable[list[str]]) -> list[str]:
    """Return the rows as lines, in columns: the first to the left, the others to the right."""
    rows = list(rows)
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]).rstrip() for row in rows]
