"""Record class_defaults.json again from the installed transformers, and say what changed. Run by hand, outside CI.

    python tools/record_class_defaults.py                compare: exit status 1 if something changed
    python tools/record_class_defaults.py llama mimi     only these model types
    python tools/record_class_defaults.py --write        write the file; what is not recorded stays

ropewalk is asked for one thing only, the model types that it knows; no number comes from it. All rows take some ten
minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import recording
import recording_configs
import recording_file

FILE = recording_file.GOLDEN / "class_defaults.json"


def known() -> set[str]:
    """Model types that ropewalk reads, reads through, or refuses with a reason."""
    from ropewalk.configs.models import ARCHITECTURES
    from ropewalk.configs.wrappers import WRAPPERS

    return set(ARCHITECTURES) | set(WRAPPERS)


def unknown(installed: list[str], known_types: set[str]) -> list[str]:
    """Installed model types of which ropewalk says nothing."""
    return [name for name in installed if name not in known_types]


def key(row: dict[str, Any]) -> str:
    return " ".join((row["model_type"], row.get("variant", ""))).strip()


def record(row: dict[str, Any]) -> dict[str, Any]:
    """The row again: from the class defaults, or, for a variant, from the config that it has.

    Raises:
        CannotRecordError: see `recording.record`; also where the row is of a config that no rule makes.
    """
    if "variant" in row:
        made = recording.record(row["model_type"], recording_configs.config_from(row["model_type"], row["config"]))
        return {**made, "config": row["config"], "variant": row["variant"]}
    if row["model_type"] == "deepseek_v4" and row["config"]["num_hidden_layers"] == 4:
        made = recording.record(row["model_type"], recording_configs.config_from(row["model_type"], row["config"]))
        return {**made, "config": row["config"]}
    return recording.record(row["model_type"])


def summary(row: dict[str, Any]) -> str:
    """What a new row would have to say, for one layer of each kind."""
    kinds = []
    for index, layer in row["layers"].items():
        if layer is None:
            kinds.append(f"layer {index}: no rope")
        else:
            kinds.append(
                f"layer {index}: {layer['pairing']}, {layer['rotary_dim']} from channel {layer['rotary_offset']}"
            )
    return "; ".join(kinds) or "no layer with attention"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="model types; all where none is given")
    parser.add_argument("--compare", action="store_true", help="print what changed (the default)")
    parser.add_argument("--write", action="store_true", help="write the file as well")
    parser.add_argument("--file", type=Path, default=FILE, help="compare with this file")
    parser.add_argument("--seconds", type=int, default=60, help="keep a row that takes longer (60)")
    given = parser.parse_args(arguments)
    recording_file.quiet()
    committed = recording_file.load(given.file)
    rows = [row for row in committed["rows"] if not given.names or row["model_type"] in given.names]

    def limited(row: dict[str, Any]) -> dict[str, Any]:
        with recording_file.seconds(given.seconds, recording.CannotRecordError):
            return record(row)

    outcome = recording_file.compare(rows, key, limited, recording.CannotRecordError)
    installed = [name for name in recording_configs.model_types() if not given.names or name in given.names]
    new = [name for name in unknown(installed, known()) if recording_configs.rotates(name)]
    for name in new:
        try:
            with recording_file.seconds(given.seconds, recording.CannotRecordError):
                outcome.new[name] = summary(recording.record(name))
        except recording.CannotRecordError as error:
            outcome.new[name] = f"not recorded: {error}"
    print("\n".join(outcome.lines()))
    if given.write:
        recording_file.write(given.file, committed, outcome, key)
    return int(outcome.changed)


if __name__ == "__main__":
    sys.exit(main())
