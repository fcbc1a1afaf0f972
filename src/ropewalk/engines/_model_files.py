"""`ModelFile`: which keys of a config the file of a model in an engine reads, and `read`, which reads a rope by it.

Each engine with a table has a JSON file beside it: a row for each model_type, or for a model_type and that of its text
model ("llava/llama"), and the classes that the engine does not have, by model_types. tests/golden/engine_models has
the recordings from which `tools/recording/tables.py` writes these files.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

from ropewalk._checks import RopeError, without_fix
from ropewalk.engines._config import SECTIONS, ConfigRope, to_finite
from ropewalk.schemes import ALIASES, SCHEMES, Scaling, build

Evidence = Literal["run", "read", "not recorded"]


@dataclass(frozen=True)
class ModelFile:
    """What the file of a model in an engine reads from a config.

    Args:
        file: the file.
        evidence: "run" if the keys were found by building the model of the engine, "read" if only in its source.
        as_transformers: whether the engine runs the model with the code of transformers. The config is then read as it
            is, because the ropes that ropewalk reads from it are compared with transformers.
        by_transformers: whether the file computes frequencies with the functions of transformers.
        rotates: whether the engine's model rotates at all.
        base: the keys of the base. The first one that the config has counts.
        otherwise: the base of a config without these keys, or the error of the engine. None if it was not recorded.
        pairing: the pairing with which the file rotates. "" if it is that of the weights.
        scaling: the objects of the config that may hold the scaling. The first one that the config has counts.
        others: exceptions: maps a rope_type to "dropped", "another scheme" or the error of the engine. "none" is a
            config without the objects in `scaling`, "null" and "empty" one in which `rope_scaling` is null or {}, and
            "only type" an object without the key `rope_type`. The name of an object before it restricts an exception to
            this object.
        fraction: the keys of the rotated fraction of the head, or of the number of channels (`rotary_dim`). None if the
            model has no such key.
        otherwise_fraction: the fraction for a config without these keys, or the error.
        attention_factor: the attention factor that replaces that of a scheme, dimensionless, or None.
        needs: further keys without which the engine does not load the config.
        section_needs: keys without which it does not load the config, in the object from which it reads the scaling.
        every: the key of a number n, its default, and the error for an n above the number of layers ("" for none). The
            last of every n layers is of the kind "full_attention", and the others are of the kind "sliding_attention".
            None if the engine uses the kinds of the config.
        kinds: maps a kind of layer to its own row, if the kinds differ.
    """

    file: str
    evidence: Evidence = "run"
    as_transformers: bool = False
    by_transformers: bool = False
    rotates: bool = True
    base: tuple[str, ...] = ()
    otherwise: float | str | None = None
    pairing: str = ""
    scaling: tuple[str, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    fraction: tuple[str, ...] | None = None
    otherwise_fraction: float | str = 1.0
    attention_factor: float | None = None
    needs: tuple[str, ...] = ()
    section_needs: tuple[str, ...] = ()
    every: tuple[str, int, str] | None = None
    kinds: Mapping[str, ModelFile] = field(default_factory=dict)


@dataclass(frozen=True)
class Reading:
    """A rope of a config as the file of a model reads it.

    Args:
        config: the rope, with the base, the scaling and the channels that the file reads. None if there is a `stop`.
        file: the row of the file, or None if none was recorded.
        notes: how it differs from the config, in whole sentences.
        stop: why there is no rope.
        why: "refused" if the engine rejects the config, "absent" if it has no such model, and "unknown" if what it
            reads was not recorded.
    """

    config: ConfigRope | None
    file: ModelFile | None = None
    notes: tuple[str, ...] = ()
    stop: str = ""
    why: Literal["", "refused", "absent", "unknown"] = ""


_OTHER = "another scheme"
_ARGUMENT = r"missing 1 required positional argument: '(\w+)'"
_ALL = "all"  # the kind of the layers of a config in which all are alike
_LISTS = ("base", "scaling", "fraction", "needs", "section_needs", "every")


@functools.cache
def _table(name: str) -> tuple[Mapping[str, ModelFile], Mapping[str, str], Mapping[str, list[str]], bool]:
    """Return the rows of an engine's table, the model_types that the engine does not have, `unless` and `inside`.

    A row is of a model_type, of a class in `architectures`, or, named "*", of all other known model_types. What it does
    not have is mapped to the class that it lacks, or "": `architectures` may name another. `unless` maps "auto_map", or
    "architectures" of a text model inside, to the model_types that the engine may have if a config has this key.
    `inside` is whether the engine reads a text model that another model contains by the row of its own model_type.
    """
    table = json.loads((Path(__file__).parent / f"{name}.json").read_text(encoding="utf-8"))
    rows = {model: _row(values) for model, values in table["models"].items()}
    return rows, table["absent"], table.get("absent_unless", {}), table.get("inside", False)


def _find(table: str, config: ConfigRope) -> tuple[ModelFile | None, str]:
    """Return the row for a config, and the model_type that the engine does not have; None and "" if there is none."""
    rows, absent, unless, inside = _table(table)
    whole = config.model.partition("/")[0]  # of its parts, an engine may have one without a name of its own
    stated = {"auto_map": config.whole.get("auto_map"), "architectures": config.values.get("architectures")}
    classes = config.whole.get("architectures")
    named = [*map(str, classes)] if isinstance(classes, list) else []
    names = [*named, config.model, *([config.model_type] if inside and config.known else [])]
    other = absent.get(whole) and named and absent[whole] not in named
    may = other or any(stated[key] and whole in unless[key] for key in unless)
    lacking = whole if whole in absent and not may else ""
    return next((rows[name] for name in names if name in rows), rows.get("*") if config.known else None), lacking


def _row(values: Mapping[str, Any]) -> ModelFile:
    lists = {key: tuple(values[key]) for key in _LISTS if key in values}
    kinds = {kind: _row({**values, "kinds": {}, **own}) for kind, own in values.get("kinds", {}).items()}
    return ModelFile(**{**values, **lists, "kinds": kinds})


def kind_of_layer(table: str, config: ConfigRope, layer: int) -> str:
    """Return the kind that an engine assigns to a layer of the config."""
    file = _find(table, config)[0]
    if file is None or file.every is None or not config.kind:
        return config.kind
    return "sliding_attention" if (layer + 1) % _every(file.every, config) else "full_attention"


def _every(every: tuple[str, int, str], config: ConfigRope) -> int:
    n = config.values.get(every[0])
    return n if isinstance(n, int) and n > 0 else every[1]


def read(table: str, config: ConfigRope) -> Reading:
    """Read a rope of a config as the file of its model in an engine does.

    Args:
        table: the name of the engine's table.
        config: the rope of the config.
    """
    file, lacking = _find(table, config)
    name = config.model.partition("/")[0]
    if lacking:
        wholes = [model.partition("/")[0] for model in _table(table)[0] if model.endswith(f"/{lacking}")][:2]
        whole = f" by itself: pass the whole config of {' or '.join(wholes)}" * bool(wholes)
        return Reading(None, stop=f"has no model {lacking}{whole}", why="absent")
    if file is None:
        said = f"What it reads for {name}, if it has such a model, was not recorded. This is its general rule."
        return Reading(config, notes=(said,))
    if file.as_transformers:
        said = f"It runs this model with {file.file}, the code of transformers."
        return Reading(config, file, (said,) * bool(file.file))
    if missing := [key for key in file.needs if _get(config.whole, key) is None and not config.file_format]:
        return Reading(None, file, stop=f"it needs the keys {', '.join(missing)}", why="refused")
    if file.every is not None and file.every[2] and _every(file.every, config) > config.layers:
        return Reading(None, file, stop=file.every[2], why="refused")
    kind, notes = kind_of_layer(table, config, config.layer), []
    if kind != config.kind:
        notes.append(f"It does not read layer_types, and gives these layers the rope of {kind}.")
    rope = config.ropes.get(kind, config.rope)
    # A file must read layers without a kind or a window alike, whatever kind it takes them for.
    own = file.kinds.get("sliding_attention" if kind in ("", _ALL) and config.window else kind)
    parts = [own or file] if own or kind not in ("", _ALL) else [*file.kinds.values()] or [file]
    if rope is not None and all(part.rotates and not part.kinds for part in parts):
        first, *others = [_read(part, replace(config, rope=rope, kind=kind), [*notes]) for part in parts]
        if all((other.config, other.stop) == (first.config, first.stop) for other in others):
            return first
    of = "the layers" if kind in ("", _ALL) else f"layers of the kind {kind}"
    return Reading(None, parts[0], stop=f"how it rotates {of} was not recorded", why="unknown")


def _read(file: ModelFile, config: ConfigRope, notes: list[str]) -> Reading:
    """Read the base, the scaling and the channels of a rope. Stop at the first one that the engine refuses."""
    paths = [path.split(".") for path in (*file.base, *file.scaling, *(file.fraction or ()))]
    parameters = config.values.get("rope_parameters") if any("rope_parameters" in path for path in paths) else None
    nested = any(len(path) == 3 for path in paths)  # rope_parameters.sliding_attention.rope_theta
    if isinstance(parameters, Mapping) and nested != any(isinstance(v, Mapping) for v in parameters.values()):
        return Reading(None, file, stop="how it reads rope_parameters of this form was not recorded", why="unknown")
    rope = config.rope
    ratio = to_finite(config.values.get("rope_ratio"))
    times = {} if ratio is None else {"10000 * rope_ratio": 10_000.0 * ratio}  # ChatGLM
    base = _first({**config.values, "layer_rope_theta": config.listed_base, **times}, file.base, file.otherwise)
    section, scaling = _scaling(file, config)
    if missing := [key for key in file.section_needs if section.get(key) is None]:
        stop = f"it needs the keys {', '.join(missing)} in {' or '.join(file.scaling)}"
        return Reading(None, file, stop=stop, why="refused")
    rotary_dim = _rotary_dim(file, config)
    missing = re.findall(_ARGUMENT, f"{base} {rotary_dim}")
    if len(missing) > 1:  # each error was recorded for a config that lacks only this key
        base = f"it needs the keys {', '.join(missing)} (TypeError: missing positional arguments)"
    for found in (base, scaling, rotary_dim):
        if found == _OTHER:
            stop = "it does not apply this scheme, and what it does instead was not recorded"
            return Reading(None, file, stop=stop, why="unknown")
        if isinstance(found, str):
            return Reading(None, file, stop=found, why="refused")
    if base is None:
        return Reading(None, file, stop="the base that it uses for this config was not recorded", why="unknown")
    if base != rope.base:
        keys = f"It reads the base from {' or '.join(file.base)}" if file.base else "It reads no key of the base"
        notes.append(f"{keys}, so the base is {base:g} and not {rope.base:g}.")
    if scaling != rope.scaling:
        none = f"It reads no scaling{' on NVIDIA GPUs' * ('/nvidia/' in file.file)}"
        keys = f"It reads the scaling from {' or '.join(file.scaling)}" if file.scaling else none
        notes.append(f"{'It does not apply this scaling' if section else keys}, so nothing is scaled.")
    if rotary_dim != rope.rotary_dim:
        keys = f"It reads the channels from {' or '.join(file.fraction)}, so it" if file.fraction else "It"
        notes.append(f"{keys} rotates {rotary_dim} channels of a head and not {rope.rotary_dim}.")
    if config.by_transformers is not None and not notes:
        read, scaled = (" or ".join(found) or "no key" for found in (file.base, file.scaling))
        notes.append(f"Of what is stated twice, it reads the base from {read} and the scaling from {scaled}.")
    if (pairing := file.pairing or rope.pairing) != rope.pairing:
        notes.append(f"It rotates with the pairing {pairing} and not {rope.pairing}.")
    numbers = {"base": base, "scaling": scaling, "rotary_dim": rotary_dim, "pairing": pairing}
    changed: dict[str, Any] = {key: value for key, value in numbers.items() if value != getattr(rope, key)}
    try:
        rope = replace(rope, **changed) if changed else rope
    except RopeError as e:  # such as an odd number of channels, or lists for another number of pairs
        said = f"i{' '.join(notes)[1:-1]} ({without_fix(e)})"
        return Reading(None, file, stop=said, why="refused" if "rotary_dim" in changed else "unknown")
    return Reading(replace(config, rope=rope, section=section), file, tuple(notes))


def _scaling(file: ModelFile, config: ConfigRope) -> tuple[Mapping[str, Any], Scaling | str | None]:
    """Return the object from which the file reads the scaling, and the scheme or the engine's error."""
    sections = {name: section for name in SECTIONS if (section := _section(config, name))}
    name = next((name for name in file.scaling if name in sections), "")
    section = sections.get(name, {})
    empty = config.values.get("rope_scaling") == {} and "rope_scaling" in file.scaling
    if empty and name and "empty" not in file.others:
        return section, _OTHER  # it may read the empty object in place of this one
    causes = [cause for other in ([name] if name else sections) for cause in _causes(other, sections[other])]
    if config.by_transformers is None and "type" in config.stated_twice:  # a class of transformers adds its rope_type
        causes.insert(0, "rope_scaling only type")
    if not name:  # a file that reads no scaling may reject one, or its absence
        causes.append("empty" if empty else "null" if "rope_scaling" in config.values or config.file_format else "none")
    outcome = next((file.others[cause] for cause in causes if cause in file.others), "" if name else "dropped")
    if outcome:
        return section, None if outcome == "dropped" else outcome
    if _type(section) == "default":
        return section, None
    schemes = [config.rope, *config.ropes.values()]  # a file may scale a kind of layer that the config does not scale
    own = next((rope.scaling for rope in schemes if rope is not None and rope.scaling is not None), None)
    alone = len(sections) == 1 and not config.stated_twice
    return section, own if own is not None and alone else _scheme(section, config.longest)


def _scheme(section: Mapping[str, Any], longest: int | None) -> Scaling | None:
    """Return the scheme of an object that `from_config` did not read, since it read another one."""
    known = SCHEMES.get(ALIASES.get(_type(section), _type(section)))
    if known is None:
        return None
    scheme = known.class_for_keys(section.keys())
    values = {f.name: section[f.name] for f in fields(cast(Any, scheme)) if section.get(f.name) is not None}
    if longest is not None and scheme.rope_type in ("yarn", "llama3"):  # `Engine.without_length` may replace it
        values.setdefault("original_max_position_embeddings", longest)
    derived = {key: value for key, (value, _) in scheme.derived_fields(values, longest).items()}
    return build(scheme, {**values, **derived})


def _causes(name: str, section: Mapping[str, Any]) -> list[str]:
    """Return the keys of `ModelFile.others` that fit an object of the config, the most specific ones first."""
    keys = [key for key in ("type", "rope_type") if section.get(key) is not None]
    facts = ([f"only {keys[0]}"] if len(keys) == 1 else []) + [_type(section)]
    return [cause for fact in facts for cause in (f"{name} {fact}", fact)]


def _type(section: Mapping[str, Any]) -> str:
    return str(section.get("rope_type") or section.get("type") or "default")


def _section(config: ConfigRope, name: str) -> Mapping[str, Any]:
    """Return an object with rope parameters, or the one inside it for the kind of layer."""
    section = config.values.get(name)
    if not isinstance(section, Mapping):
        return {}
    own = section.get(config.section_name)
    return own if isinstance(own, Mapping) else section


def _rotary_dim(file: ModelFile, config: ConfigRope) -> int | str:
    """Return the number of channels that the file rotates, or the engine's error."""
    rope = config.rope
    if file.fraction is None or (rope.scaling is not None and rope.scaling.whole_head):
        return rope.rotary_dim
    path = next((path for path in file.fraction if _get(config.values, path) is not None), "")
    value = _first(config.values, file.fraction, file.otherwise_fraction)
    if isinstance(value, str) or value is None:
        return value or f"{path} is not a number"
    return int(value) if path in ("rotary_dim", "attn_rotary_emb") else int(rope.head_dim * value)


def _first(values: Mapping[str, Any], paths: tuple[str, ...], otherwise: float | str | None) -> float | str | None:
    """Return the first number that the config has at one of the paths, or `otherwise` if it has none."""
    numbers = (to_finite(_get(values, path)) for path in paths)
    return next((number for number in numbers if number is not None), otherwise)


def _get(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values
