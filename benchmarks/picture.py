"""Draw docs/assets/speed.svg from benchmarks/results: python benchmarks/picture.py

A bar is the median time of a rotation, divided by that of `copy_` in the same run, in memory that the process already
has. The label gives the range of the runs. Each machine with a file MACHINE-run-1.json has a bar in every row.
tests/test_claims.py fails if the committed picture shows other numbers than the results.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from result_tables import DTYPES, ONE_THREAD, RESULTS, ROOT, RUNS, results, rows, span

TEXT, PALE = "#1f2328", "#59636e"  # pale: text of less weight, and the line of copy_
OURS, OTHERS = "#00796b", "#aab4be"


@dataclass(frozen=True)
class Row:
    """A label, the contender that it names, and the ends of the names of its files."""

    label: str
    contender: str
    files: tuple[str, ...] = RUNS


CONTENDERS = (
    Row("ropewalk, in place", "ropewalk, in place"),
    Row("ropewalk, new", "ropewalk"),
    Row("ONNX Runtime", "ONNX Runtime"),
    Row("HF, torch.compile", "Hugging Face, compiled", ("compiled",)),
    Row("Hugging Face (HF)", "Hugging Face"),
)
ALONE = (
    Row("ropewalk", "ropewalk, in place", ONE_THREAD),
    Row("vLLM's operator", "vLLM, in place", ONE_THREAD),
)
BLOCKS = (
    ("1 token", 1, CONTENDERS),
    ("32 tokens", 32, CONTENDERS),
    ("4,096 tokens", 4096, CONTENDERS),
    ("4,096 tokens, in place, one thread", 4096, ALONE),
)

WIDTH, LEFT, COLUMN, BAR, LINE = 510, 156, 180, 116, 15  # all numbers are pixels of the picture


def machines() -> list[str]:
    """Return how the names of the files of each machine begin."""
    return sorted(path.name.removesuffix("-run-1.json") for path in RESULTS.glob("*-run-1.json"))


def ratios(machine: str, row: Row, dtype: str, tokens: int) -> list[float] | None:
    """Return the medians over those of `copy_`, of each run. None: the contender does not run this dtype."""
    files = tuple(end for end in row.files if (RESULTS / f"{machine}-{end}.json").exists())
    wanted = {"contender": row.contender, "dtype": dtype, "tokens": tokens, "memory": "kept", "backward": False}
    found = rows(files, machine, **wanted)
    timed = [one["times_copy"] for one in found if one["state"] == "timed"]
    return None if found and not timed else timed


def name(machine: str) -> str:
    """Return the processor, its cores, and the version of PyTorch."""
    run = results("run-1", machine)
    torch = run["versions"]["torch"].partition("+")[0]
    return f"{run['machine']['cpu']}, {run['machine']['cores']} cores, torch {torch}"


def words(x: float, y: float, said: str, colour: str, *, size: int = 14, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}"{more}>{escape(said, quote=False)}</text>'


def drawn() -> str:
    """Return the picture."""
    known = machines()
    shares = {
        (block, row, dtype, machine): found
        for block, tokens, contenders in BLOCKS
        for row in contenders
        for dtype in DTYPES
        for machine in known
        if (found := ratios(machine, row, dtype, tokens)) != []
    }
    unit = BAR / max(sum(found) / len(found) for found in shares.values() if found)
    lines, y = list(heading(known)), 64 + 20 * len(known)
    for block, _, contenders in BLOCKS:
        y += 30
        lines.append(words(0, y, block, TEXT, more=' font-weight="bold"'))
        top = y + 4
        for row in (row for row in contenders if any(key[:2] == (block, row) for key in shares)):
            y += 21
            ours = row.contender.startswith("ropewalk")
            weight = ' font-weight="bold"' if ours else ""
            lines.append(words(LEFT - 8, y, row.label, TEXT, more=f' text-anchor="end"{weight}'))
            for number, machine in enumerate(known):
                place = y + LINE * number
                for column, dtype in enumerate(DTYPES):
                    found = shares.get((block, row, dtype, machine), [])
                    if found != []:
                        colour = OURS if ours else OTHERS
                        lines += bar(LEFT + COLUMN * column, place, found, unit, colour, number)
            y += LINE * (len(known) - 1)
        for column in range(len(DTYPES)):
            x = LEFT + COLUMN * column + unit
            lines.append(f'<path d="M{x:.1f} {top}V{y + 6}" stroke="{PALE}" stroke-dasharray="3 3"/>')
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 10}" width="{WIDTH}" height="{y + 10}"'
        ' font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif">'
    )
    return "\n".join([opening, *lines, "</svg>"]) + "\n"


def heading(known: list[str]) -> Iterator[str]:
    """Yield the title, the machines and the heads of the columns."""
    yield words(0, 18, "Time to rotate q and k, divided by the time to copy them", TEXT, size=17)
    for number, machine in enumerate(known):
        y = 40 + 20 * number
        if len(known) > 1:
            yield f'<rect y="{y - 11}" width="12" height="12" fill="{TEXT}" opacity="{opacity(number)}"/>'
        yield words(18 if len(known) > 1 else 0, y, name(machine), PALE)
    for column, dtype in enumerate(DTYPES):
        x = LEFT + COLUMN * column
        yield words(x, 60 + 20 * len(known), dtype, TEXT, more=' font-weight="bold"')
    yield words(0, 60 + 20 * len(known), "dashed line: copy_", PALE)


def bar(x: float, y: float, found: list[float] | None, unit: float, colour: str, number: int) -> list[str]:
    """Return a bar and its label, or only the label if the contender does not run this dtype."""
    if found is None:
        return [words(round(x + unit + 5, 1), y, "does not run", PALE, size=13)]
    length = unit * sum(found) / len(found)
    label = span(found, 1 if min(found) < 9.95 else 0) + "×"
    return [
        f'<rect x="{x}" y="{y - 11}" width="{length:.1f}" height="12" fill="{colour}" opacity="{opacity(number)}"/>',
        words(round(max(length, unit) + x + 5, 1), y, label, TEXT, size=13),
    ]


def opacity(number: int) -> float:
    """Return the opacity of the bars of a machine: the first has full colour."""
    return (1, 0.6, 0.35)[min(number, 2)]


def main() -> None:
    """Write the picture."""
    path = ROOT / "docs" / "assets" / "speed.svg"
    path.write_text(drawn(), "utf-8")
    sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
