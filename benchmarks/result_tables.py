"""Write the tables of the pages from the files in benchmarks/results: python benchmarks/result_tables.py

A table is found by its first row and replaced. Each number is the median of a run. A range gives those of two runs.
tests/test_claims.py fails if a page has other numbers than the results.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MACHINE = "amd-zen4-2-cores"
RUNS = ("run-1", "run-2")
ONE_THREAD = ("one-thread-1", "one-thread-2")
NONE = "–"
DTYPES = ("float32", "bfloat16")
# Each row of the table of all libraries: the contender, and the files that have it.
CONTENDERS = {
    "`copy_` of q and k": ("copy_", RUNS),
    "`clone` of q and k": ("clone", RUNS),
    "`mul_` by a number": ("mul_", RUNS),
    "**ropewalk, in place**": ("ropewalk, in place", RUNS),
    "**ropewalk, new tensors**": ("ropewalk", RUNS),
    "ONNX Runtime": ("ONNX Runtime", RUNS),
    "Meta's complex numbers": ("Meta", RUNS),
    "Hugging Face's formula, `torch.compile`": ("Hugging Face, compiled", ("compiled",)),
    "JAX, compiled": ("JAX", ("jax",)),
    "Hugging Face's formula": ("Hugging Face", RUNS),
    "MLX": ("MLX", ("mlx",)),
    "rotary-embedding-torch": ("rotary-embedding-torch", ("rotary-embedding-torch",)),
}
BETWEEN = {(1, 8192), (8, 1024)}  # rows and held tokens that show the same trends as the cases around them
CACHES = ("ropewalk, KVCache", "transformers, DynamicCache", "transformers, StaticCache")


@functools.cache
def content(path: Path) -> dict[str, Any]:
    """Return the content of a file."""
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def results(name: str, machine: str = MACHINE) -> dict[str, Any]:
    """Return the content of a file in benchmarks/results, by the end of its name."""
    return content(RESULTS / f"{machine}-{name}.json")


def rows(runs: tuple[str, ...], machine: str = MACHINE, /, **wanted: Any) -> list[dict[str, Any]]:
    """Return the rows with these entries, at most one for each run."""
    return [row for run in runs for row in results(run, machine)["rows"] if wanted.items() <= row.items()]


def milliseconds(contender: str, runs: tuple[str, ...], **wanted: Any) -> str:
    """Return the medians of a contender for 4,096 tokens, "wrong", or NONE if no file has them."""
    found = rows(runs, **{"contender": contender, "tokens": 4096, "backward": False, **wanted})
    medians = [1e3 * row["median"] for row in found if row["state"] == "timed"]
    if not medians:
        return "wrong" if any(row["state"] == "wrong" for row in found) else NONE
    return span(medians, 1 if min(medians) < 9.95 else 0)


def span(values: list[float], decimals: int) -> str:
    """Return the least and the largest value, rounded, as one number if they are then equal."""
    least, most = f"{min(values):.{decimals}f}", f"{max(values):.{decimals}f}"
    return least if least == most else f"{least}{NONE}{most}"


def rotation() -> Iterator[tuple[str, ...]]:
    """Yield the cells of the table of all libraries."""
    yield ("4,096 tokens, ms", *(f"{dtype}, {memory} memory" for dtype in DTYPES for memory in ("kept", "new")))
    for label, (contender, runs) in CONTENDERS.items():
        cells = []
        for dtype in DTYPES:
            for memory in ("kept", "new"):
                needs_none = contender in ("copy_", "mul_") or "in place" in contender
                unfit = memory == "new" and needs_none
                cells.append(NONE if unfit else milliseconds(contender, runs, dtype=dtype, memory=memory))
        yield (label, *cells)


def ratios(over: str, under: str, **wanted: Any) -> str:
    """Return the median of one contender divided by that of another, in each run."""
    above, below = (rows(RUNS, contender=name, **wanted) for name in (over, under))
    return span([a["median"] / b["median"] for a, b in zip(above, below, strict=True)], 1)


def sizes() -> Iterator[tuple[str, ...]]:
    """Yield the cells of the table of numbers of tokens, in kept memory."""
    each = ("ms", "× `copy_`", "Hugging Face ×")
    yield "tokens", *(f"{dtype}, {what}" for dtype in DTYPES for what in each)
    forward = [(tokens, False) for tokens in (1, 32, 4096, 16_384)]
    for tokens, backward in [*forward, (4096, True), (16_384, True)]:
        cells = []
        for dtype in DTYPES:
            wanted = {"tokens": tokens, "backward": backward, "dtype": dtype, "memory": "kept"}
            times = [1e3 * row["median"] for row in rows(RUNS, contender="ropewalk", **wanted)]
            cells.append(span(times, 3 if tokens < 4096 else 1))
            cells += [ratios("ropewalk", "copy_", **wanted), ratios("Hugging Face", "ropewalk", **wanted)]
        yield f"{tokens:,}, with backward" if backward else f"{tokens:,}", *cells


def decoding(part: str) -> dict[tuple[Any, ...], dict[str, dict[str, Any]]]:
    """Return the rows of all files about decoding by dtype, rows and held tokens, and then by contender."""
    cells: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for file in sorted(RESULTS.glob(f"{MACHINE}-decode*.json")):
        for row in json.loads(file.read_text("utf-8"))[part]:
            if row["state"] == "timed":
                cells.setdefault((row["dtype"], row["batch"], row["held"]), {})[row["contender"]] = row
    return {key: cells[key] for key in sorted(cells, key=lambda key: (DTYPES.index(key[0]), *key[1:]))}


def decode_steps() -> Iterator[tuple[str, ...]]:
    """Yield the cells of the table of decoding: attention alone, and steps of a model."""
    names = [f"`{name.split()[1]}`" for name in CACHES]
    yield "dtype, rows × held tokens", *names, "tokens/s", *(f"{name} slower by" for name in names[1:])
    steps = decoding("model")
    for (dtype, batch, held), found in decoding("attention").items():
        model = steps[dtype, batch, held]
        # Some cases do not fit in memory with every cache.
        if model.keys() >= set(CACHES) and (batch, held) not in BETWEEN:
            ratios = (f"{found[name]['times_read']:.1f}" for name in CACHES)
            slower = (f"{model[name]['ahead']:.1f}" for name in CACHES[1:])
            speed = f"{model[CACHES[0]]['tokens_per_second']:.0f}"
            yield f"{dtype}, {batch} × {held:,}", *ratios, speed, *slower


def measured() -> Iterator[tuple[str, ...]]:
    """Yield the cells of the table of models that were extended: what each method copies with the factor chosen."""
    methods = {"llama3": "Llama 3", "yarn": "YaRN", "linear": "linear", "ntk": "NTK"}
    yield "model, target", "stated", "reach", "factor", *methods.values()
    for name in ("smollm2-16k", "smollm2-32k", "gemma3-64k", "gemma3-128k"):
        found = results(name, "extend")
        rows = {row["method"]: row for row in found["rows"] if row["factor"] == found["factor"]}
        cells = (f"{rows[method]['at_target']:.2f} / {rows[method]['short']:+z.3f}" for method in methods)
        title = f"{found['model']}, {found['target'] // 1024}k"
        yield title, f"{found['stated_length']:,}", f"{found['reach']:,}", f"{found['factor']:g}", *cells


TABLES: dict[str, tuple[Callable[[], Iterator[tuple[str, ...]]], ...]] = {
    "docs/speed.md": (rotation, sizes, decode_steps),
    "docs/extend.md": (measured,),
}


def filled(page: str, text: str) -> str:
    """Return the text of a page with its tables as the results give them. The first row of a table stays as it is."""
    for table in TABLES[page]:
        heading, *body = (f"| {' | '.join(cells)} |" for cells in table())
        before, found, after = text.partition(heading + "\n")
        if not found:
            raise SystemExit(f"{page} has no table that begins with {heading}")
        separator, *others = after.split("\n")
        while others and others[0].startswith("|"):
            others.pop(0)
        text = "\n".join([f"{before}{heading}", separator, *body, *others])
    return text


def main() -> None:
    """Write the tables of all pages."""
    for page in TABLES:
        path = ROOT / page
        path.write_text(filled(page, path.read_text("utf-8")), "utf-8")
        sys.stdout.write(f"{page}\n")


if __name__ == "__main__":
    main()
