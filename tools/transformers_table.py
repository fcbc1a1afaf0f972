"""Measure each model of tests/support/tiny_models.py with and without `accelerate`; write docs/transformers-models.md.

    python tools/transformers_table.py              measure all models, in about five minutes
    python tools/transformers_table.py towers       measure only the vision towers of tests/support/tiny_towers.py
    python tools/transformers_table.py llama phi3   measure only these models, and print the rows without writing

tests/integrations/test_transformers_table.py makes the same measurements, and compares them with bounds.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

PAGE = ROOT / "docs" / "transformers-models.md"
COLUMNS = (
    "model",
    "function",
    "rope",
    "difference",
    "drift of transformers",
    "exact, bitwise",
    "theirs, bitwise",
    "gradients",
    "tokens",
    "restored",
)
_HEAD = """# Which models of transformers are supported?

<!-- Written by tools/transformers_table.py -->

{count} model types of transformers and the [vision towers](#vision-towers) below were measured before and after
[`accelerate`](transformers.md), as small models with random weights in float32. Other model types can work too:
`accelerate` compares each model with its config before it changes anything, and raises an error if they do not match.

- **function**: the function of transformers that rotates q and k.
- **rope**: the pairing and the scheme. "Of a part": only the first channels of each head are rotated. "Of a slice": the
  first channels are not rotated.
- **difference** of the logits from those of transformers, divided by the largest logit, at positions 0 to 63. For
  LongRoPE, transformers uses its long frequencies here.
- **drift of transformers**: the difference at positions 99,936 to 99,999 between transformers and its own function
  with exact tables (cos and sin rounded once to float32).
- **exact, bitwise**: whether the logits there equal those of transformers' function with exact tables.
- **theirs, bitwise**: whether those with `angles="theirs"` equal those of transformers.
- **gradients**: the largest difference of a parameter's gradient, divided by the norm of the gradient, or by 1 % of the
  largest gradient norm of any parameter if that is larger.
- **tokens**: whether 12 greedily generated tokens are the same. A dash: the model does not generate.
- **restored**: whether the logits after `restore` are bitwise those before `accelerate`.

Also compiled with `fullgraph=True`: {compiled}.

"""
TOWER_COLUMNS = ("tower", "function", "rope", "difference", "theirs, bitwise", "gradients", "restored")
TOWERS_AT = "\n## Vision towers\n"
_TOWERS_HEAD = (
    TOWERS_AT
    + """
{count} towers, measured on images of several sizes, several packed images, and videos for towers that accept them, at
positions up to 8. The columns compare the last hidden states instead of the logits. Where the function is "its own",
the tower's own code rotates by exact cos and sin. **rope** also names the pattern of the axes, which is a constructor
of [`Axes`](several-axes.md#which-pair-uses-which-axis).

"""
)


def head(count: int) -> str:
    """Return the text above the table of models."""
    from tiny_models import COMPILED

    return _HEAD.format(count=count, compiled=", ".join(f"`{name}`" for name in COMPILED))


def cells(row: Any) -> list[str]:
    """Return the cells of a row of the table of models."""
    return [
        f"`{row.name}`",
        ", ".join(f"`{name}`" for name in row.function.split(", ")),
        "; ".join(short(rope) for rope in row.ropes),
        f"{row.near:.0e}",
        f"{row.drift:.0e}",
        yes_or_no(row.far_equal),
        yes_or_no(row.theirs_equal),
        f"{row.gradient:.0e}",
        yes_or_no(row.greedy),
        yes_or_no(row.undone),
    ]


def towers_head(count: int) -> str:
    """Return the text above the table of towers."""
    return _TOWERS_HEAD.format(count=count)


def tower_cells(row: Any) -> list[str]:
    """Return the cells of a row of the table of towers."""
    ropes = [f"{short(rope)}, {pattern(rope)}" for rope in row.ropes]
    return [
        f"`{row.name}`",
        f"`{row.function}`" if row.function else "its own",
        "; ".join(ropes),
        f"{row.near:.0e}",
        yes_or_no(row.theirs_equal),
        f"{row.gradient:.0e}",
        yes_or_no(row.undone),
    ]


def fixed_cells(row: Any) -> dict[int, str]:
    """Return column → cell, for the cells that are the same on every machine."""
    values = cells(row)
    return {column: values[column] for column in (0, 1, 2, 5, 6, 8, 9)}


def yes_or_no(value: bool | None) -> str:
    """Format a truth value. None becomes a dash."""
    return "–" if value is None else "yes" if value else "no"


def pattern(rope: str) -> str:
    """Return the name of the pattern in which a tower's rope divides its pairs among the axes, or "one axis"."""
    found = re.search(r"Axes\.([a-z]+)\(\(([\d, ]+)\)", rope)
    return found[1] if found and "0" not in found[2].split(", ") else "one axis"


def short(rope: str) -> str:
    """Shorten the repr of a rope to its pairing, slice and scheme. Sizes are omitted, because the models are small."""
    parts = rope.removeprefix("Rope(").removesuffix(")").split(", ")
    pairing = next(part for part in parts if part.startswith("pairing")).split("'")[1]
    sliced = [" of a part" for part in parts if part.startswith("rotary_dim")][:1]
    sliced += [" of a slice" for part in parts if part.startswith("rotary_offset")][:1]
    scheme = [f", {part.removeprefix('scaling=').partition('(')[0]}" for part in parts if part.startswith("scaling")]
    return pairing + "".join(sliced) + "".join(scheme)


def line(values: list[str] | tuple[str, ...]) -> str:
    """Format a row of a Markdown table."""
    return f"| {' | '.join(values)} |"


def towers() -> str:
    """Measure all towers, and return the section of the page about them."""
    from tiny_towers import TOWERS
    from tower_checks import measure

    lines = [line(TOWER_COLUMNS), line(["---"] * len(TOWER_COLUMNS))]
    for name in sorted(TOWERS):
        lines.append(line(tower_cells(measure(name))))
        print(lines[-1], flush=True)
    return towers_head(len(TOWERS)) + "\n".join(lines) + "\n"


def main(names: list[str]) -> None:
    import transformers

    from model_checks import measure
    from tiny_models import MODELS

    transformers.logging.set_verbosity_error()
    if names == ["towers"]:
        PAGE.write_text(PAGE.read_text("utf-8").partition(TOWERS_AT)[0] + towers(), "utf-8")
        return
    lines = [line(COLUMNS), line(["---"] * len(COLUMNS))]
    for name in names or MODELS:
        lines.append(line(cells(measure(name))))
        print(lines[-1], flush=True)
    if not names:
        count = len({name.partition(":")[0] for name in MODELS})
        PAGE.write_text(head(count) + "\n".join(lines) + "\n" + towers(), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
