"""Record golden files again from the installed packages, and report what changed. Run it by hand, outside CI.

    python tools/record_golden.py                              compare every file
    python tools/record_golden.py class_defaults llama mimi    compare only these rows of one file
    python tools/record_golden.py text_models --write          write changed rows and the package's version
    python tools/record_golden.py deployed --source DIR        record code that is not installed from a folder with it

The exit status is 1 if something changed. Numbers are compared bit for bit. Rows that cannot be recorded are kept. All
files take about ten minutes on two cores, and class_defaults alone about five.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from recording import (
    class_defaults,
    commands,
    coordinates,
    deployed,
    diffusion,
    engines,
    files,
    frequencies,
    llama_cpp,
    model_ropes,
    more_engines,
    multimodal,
    peers,
    released,
    rotated,
    roundings,
    stated_twice,
    towers,
    trainer_roundings,
    trainers,
    transformers_models,
)
from recording.model import CannotRecordError

GOLDEN = {
    Path(golden.path).stem: golden
    for golden in (
        class_defaults.GOLDEN,
        stated_twice.GOLDEN,
        rotated.TEXT_MODELS,
        rotated.MODELS,
        frequencies.SCHEMES,
        frequencies.LENGTHS,
        released.GOLDEN,
        towers.GOLDEN,
        diffusion.GOLDEN,
        *peers.GOLDEN,
        *coordinates.GOLDEN,
        multimodal.GOLDEN,
        *engines.GOLDEN,
        *more_engines.GOLDEN,
        llama_cpp.GOLDEN,
        transformers_models.GOLDEN,
        *model_ropes.GOLDEN,
        deployed.GOLDEN,
        commands.GOLDEN,
        roundings.GOLDEN,
        *trainers.GOLDEN,
        *trainer_roundings.GOLDEN,
    )
}


class UnknownNameError(Exception):
    """A name that is neither a row nor a new model type."""


def compare(
    golden: files.Golden, path: Path, names: list[str], seconds: int, source: Path | None = None
) -> files.Outcome:
    """Record rows of one file and look for new models, and compare them with the committed rows.

    Args:
        golden: the golden file.
        path: the committed file or folder.
        names: the rows to record, as in `Golden.selects`. Empty means all.
        seconds: the time limit of a row. A row that takes longer is kept.
        source: a clone or a folder of the code that is recorded, or None.

    Raises:
        UnknownNameError: a name is unknown. Nothing has been recorded then.
    """

    def record_in_time(row: dict[str, Any]) -> dict[str, Any]:
        with files.seconds(seconds, CannotRecordError):
            return golden.record(row, source) if golden.source else golden.record(row)

    rows = [row for row in golden.read(path) if golden.selects(names, row)]
    new = golden.new(names, seconds) if golden.new is not None else {}
    unknown = [name for name in names if name not in new and not any(golden.selects([name], row) for row in rows)]
    if unknown:
        also = (
            f", and {golden.package} {files.installed(golden.package)} has no such new model type" if golden.new else ""
        )
        raise UnknownNameError(f"{golden.path} has no row {', '.join(unknown)}{also}")
    outcome = files.compare(rows, golden.key, record_in_time, CannotRecordError)
    outcome.new = new
    return outcome


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", choices=GOLDEN, help="the golden file (default: all)")
    parser.add_argument(
        "names", nargs="*", help="rows of the file, by the first word of their name or by the whole name"
    )
    parser.add_argument("--write", action="store_true", help="write the changed rows")
    parser.add_argument("--path", type=Path, help="compare with this file instead of the committed one")
    parser.add_argument("--source", type=Path, help="a clone or a folder of the code, for a file that needs one")
    parser.add_argument(
        "--seconds", type=int, default=60, help="the time limit of a row; a row that takes longer is kept (default: 60)"
    )
    options = parser.parse_args(arguments)
    files.quiet()
    changed = False
    for golden in [GOLDEN[options.file]] if options.file else GOLDEN.values():
        path = options.path or files.FOLDER / golden.path
        try:
            outcome = compare(golden, path, options.names, options.seconds, options.source)
        except UnknownNameError as e:
            parser.error(str(e))
        print("\n".join(outcome.lines(golden)), flush=True)
        rewrite = outcome.changed or (outcome.same and not options.names)  # unchanged rows of another version
        if options.write and golden.replaceable and rewrite:
            files.write(path, golden, outcome)
        changed |= outcome.changed
    return int(changed)


if __name__ == "__main__":
    sys.exit(main())
