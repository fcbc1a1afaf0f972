"""Record golden files again from the installed packages, and say what changed. Run by hand, outside CI.

    python tools/record_golden.py                              compare every file: exit status 1 if something changed
    python tools/record_golden.py class_defaults llama mimi    only these rows of one file
    python tools/record_golden.py text_models --write          write file and version; what is not recorded stays
    python tools/record_golden.py llama2c --source DIR         a peer that is no package, from a clone of its repository

Numbers are compared bit for bit. All files take some ten minutes on two cores, class_defaults alone some five.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from recording import (
    class_defaults,
    coordinates,
    diffusion,
    engines,
    files,
    frequencies,
    ggml,
    learned,
    llama_cpp,
    peers,
    released,
    rotated,
    sources,
    towers,
)
from recording.model import CannotRecordError

GOLDEN = {
    Path(golden.path).stem: golden
    for golden in (
        class_defaults.GOLDEN,
        rotated.TEXT_MODELS,
        rotated.MODELS,
        frequencies.SCHEMES,
        frequencies.LENGTHS,
        released.GOLDEN,
        towers.GOLDEN,
        diffusion.GOLDEN,
        *peers.GOLDEN,
        *coordinates.GOLDEN,
        *sources.GOLDEN,
        ggml.GOLDEN,
        *engines.GOLDEN,
        llama_cpp.GOLDEN,
        learned.GOLDEN,
    )
}


class UnknownNameError(Exception):
    """A name that is no row, nor a model type that is new."""


def compare(
    golden: files.Golden, path: Path, names: list[str], seconds: int, source: Path | None = None
) -> files.Outcome:
    """Record the rows of one file that are asked for, and what is new.

    Raises:
        UnknownNameError: before a row is recorded.
    """

    def limited(row: dict[str, Any]) -> dict[str, Any]:
        with files.seconds(seconds, CannotRecordError):
            return golden.record(row, source) if golden.source else golden.record(row)

    rows = [row for row in golden.read(path) if golden.asks(names, row)]
    new = golden.new(names, seconds) if golden.new is not None else {}
    unknown = [name for name in names if name not in new and not any(golden.asks([name], row) for row in rows)]
    if unknown:
        less = f", and {golden.package} {files.installed(golden.package)} no such new model type" if golden.new else ""
        raise UnknownNameError(f"{golden.path} has no row {', '.join(unknown)}{less}")
    outcome = files.compare(rows, golden.key, limited, CannotRecordError)
    outcome.new = new
    return outcome


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", choices=GOLDEN, help="one golden file; all where none is given")
    parser.add_argument("names", nargs="*", help="rows of it, by the first word of their name or all of it")
    parser.add_argument("--write", action="store_true", help="write what changed")
    parser.add_argument("--path", type=Path, help="compare with this file in the place of the committed one")
    parser.add_argument("--source", type=Path, help="a clone of the repository, for a peer that is no package")
    parser.add_argument("--seconds", type=int, default=60, help="keep a row that takes longer (60)")
    given = parser.parse_args(arguments)
    files.quiet()
    changed = False
    for golden in [GOLDEN[given.file]] if given.file else GOLDEN.values():
        path = given.path or files.FOLDER / golden.path
        try:
            outcome = compare(golden, path, given.names, given.seconds, given.source)
        except UnknownNameError as e:
            parser.error(str(e))
        print("\n".join(outcome.lines(golden)), flush=True)
        again = outcome.changed or (outcome.same and not given.names)  # the same, from another version
        if given.write and golden.written and again:
            files.write(path, golden, outcome)
        changed |= outcome.changed
    return int(changed)


if __name__ == "__main__":
    sys.exit(main())
