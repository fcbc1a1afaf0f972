"""The tables of models that ropewalk ships, written from the golden files in engine_models/ and trainers/.

python tools/recording/tables.py            compare the tables with the golden files
python tools/recording/tables.py --write    write them
python tools/recording/tables.py --judged   count the model_types of transformers that `diff` judges in each engine
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
PACKAGE = ROOT / "src" / "ropewalk" / "engines"
_DEFAULTS = {"pairing": "", "how": "run"}
_NAMES = {"how": "evidence"}


def _compact(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the values that `ModelFile` has by default, and without its model_type."""
    kept = {key: value for key, value in row.items() if key != "model_type" and value != _DEFAULTS.get(key)}
    if "every" in kept and not (kept["every"] and kept["every"][1]):
        del kept["every"]  # the key, or its default, was not found
    if "others" in kept:
        kept["others"] = _merged(kept["others"], kept["scaling"])
    if kept.pop("borrowed", None):
        kept["as_transformers"] = True
    if "kinds" in kept:
        kept["kinds"] = {kind: _compact(own) for kind, own in kept["kinds"].items()}
    return {_NAMES.get(key, key): value for key, value in kept.items()}


def _merged(others: dict[str, str], scaling: list[str]) -> dict[str, str]:
    """Begin each exception with the name of its object, and leave out the name in exceptions that both objects have."""
    first, second = "rope_scaling ", "rope_parameters "
    if len(scaling) == 1:  # then the recorder omits the name
        others = {
            cause if cause in ("none", "null", "empty") else f"{scaling[0]} {cause}": how
            for cause, how in others.items()
        }
    found = {}
    for key, outcome in others.items():
        cause = key.removeprefix(first).removeprefix(second)
        both = others.get(first + cause) == others.get(second + cause) == outcome
        found[cause if both else key] = outcome
    return found


def _lacking_class(why: str) -> str:
    """Return the class that an engine does not have, which the `architectures` of a config may not name; or ""."""
    return why.partition("there is no class ")[2]


def table(golden: dict[str, Any]) -> dict[str, Any]:
    """Return the table of an engine: the rows of its models, and the classes that it does not have."""
    rows = golden["rows"]
    absent = {row["model_type"].partition("/")[0]: _lacking_class(row["absent"]) for row in rows if "absent" in row}
    models = {row["model_type"]: _compact(row) for row in rows if "file" in row}
    if not models:  # transformers
        models = {"*": {"file": "", "as_transformers": True}}
    version = golden["peer"].get("version") or golden["peer"]["commit"][:9]
    inside = {"inside": True} if golden.get("inside") else {}
    without = [row["model_type"].partition("/")[0] for row in rows if "has no config" in row.get("absent", "")]
    unless = {"auto_map": list(dict.fromkeys(without))}  # the engine has the class, but not that of the config
    if golden.get("by_text"):  # it has the class that the text model names
        unless["architectures"] = [name for name in absent if any(f"{name}/" in row["model_type"] for row in rows)]
    exceptions = (
        {"absent_unless": {key: names for key, names in unless.items() if names}} if any(unless.values()) else {}
    )
    return {"version": version, **inside, "absent": absent, **exceptions, "models": models}


_OF_ROPES = {
    "head_dim": "head_dim",
    "rotary_dim": "rotary_dim",
    "base": "base",
    "weights": "pairing",
    "scaling": "scaling",
}
"""Maps the keys of a recorded rope to those of `_built_in.Model.ropes`."""


def trainer_table(golden: dict[str, Any]) -> dict[str, Any]:
    """Return the table of a trainer: its models with their shapes and the numbers of their ropes."""
    models = {}
    for row in golden["rows"]:
        ropes = {
            kind: {key: rope[recorded] for recorded, key in _OF_ROPES.items() if recorded in rope}
            for kind, rope in row["ropes"].items()
        }
        models[row["case"]] = {**{key: value for key, value in row.items() if key != "case"}, "ropes": ropes}
    return {"version": golden["peer"]["version"], "models": models}


def text(values: dict[str, Any]) -> str:
    """Return a table as JSON with a line for each model."""
    models = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in values["models"].items())
    others = "".join(f'"{key}": {json.dumps(value)},\n ' for key, value in values.items() if key != "models")
    return f'{{{others}"models": {{\n{models}\n }}}}\n'


_COUNTED = ("vllm", "sglang", "llama.cpp", "mlx-lm")


def judged() -> list[str]:
    """Return lines that say which model_types of transformers an engine has, but `diff` does not judge.

    Each model_type stands for the config with its class defaults, if ropewalk reads it and a layer rotates.
    """
    sys.path.insert(0, str(ROOT / "tools"))
    from recording import configs, files
    from ropewalk import diff

    files.quiet()
    has: dict[str, dict[str, str]] = {}
    for name in configs.model_types():
        try:
            found = diff.engines(configs.plain(configs.config_of(name)), names=_COUNTED, length=4096).facts
        except Exception:  # transformers builds no config, or ropewalk does not read it
            continue
        for engine, state in found["states"].items():
            if found["ropes"] and state != "absent":
                has.setdefault(engine, {})[name] = state
    unknown = {engine: [name for name, state in states.items() if state == "unknown"] for engine, states in has.items()}
    lines = [f"{engine}: {len(unknown[engine])} of {len(has[engine])}: {' '.join(unknown[engine])}" for engine in has]
    share = sum(map(len, unknown.values())) / sum(map(len, has.values()))
    return [*lines, f"not judged: {share:.1%}"]


def main(arguments: list[str]) -> int:
    if "--judged" in arguments:
        print("\n".join(judged()))
        return 0
    changed = False
    for path in sorted(GOLDEN.glob("*/models_of_*.json")):
        target = PACKAGE / f"{path.stem.removeprefix('models_of_')}.json"
        of = trainer_table if path.parent.name == "trainers" else table
        written = text(of(json.loads(path.read_text())))
        if not target.exists() or target.read_text() != written:
            changed = True
            print(f"{target.relative_to(ROOT)} differs from {path.name}")
            if "--write" in arguments:
                target.write_text(written)
    return int(changed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
