"""Anything that may hold a config → a dict and a name for messages. Bounded, and never a traceback from inside."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ropewalk._checks import RopeError, error, nearest, shown, unreadable, within
from ropewalk.configs import hub

# Real configs are a few kilobytes; with labels for all classes of ImageNet-21k, less than two megabytes.
_MAX_BYTES = 2 * 2**20
# Labels and their numbers, twice 21,841, are the most values; and no config is nested nearly so deep.
_MAX_VALUES = 2**18
_MAX_DEPTH = 100
_IN_FOLDER = (
    "config.json",
    "params.json",
    "model_index.json",
)  # the last is that of a pipeline, which says what to pass


def load(source: Any, *, download: bool = False) -> tuple[dict[str, Any], str]:
    """The config and what to call it in messages.

    Args:
        source: a dict; an object with `to_dict()` (a transformers config); a path to a JSON file, or to a folder that
            has a config.json or else a params.json.
        download: whether the config of a hub id may be downloaded.

    Raises:
        RopeError: there is nothing to read, or it is not one JSON object.
    """
    if isinstance(source, Mapping):
        return _object(source, "config"), "config"
    if hasattr(source, "to_dict") and not isinstance(source, type):
        name = type(source).__name__
        try:
            values = source.to_dict()
        except Exception as e:
            raise error(name, "to_dict() must return the config", shown(e), "Pass a dict.") from e
        return _object(values, name), name
    if isinstance(source, str | os.PathLike):
        path = _path(source)
        try:
            if hub.is_id(path):
                path = hub.config_path(path.as_posix(), download=download)
            if path.is_dir():
                path = path / next((name for name in _IN_FOLDER if (path / name).is_file()), _IN_FOLDER[0])
            content = _read(path)
        except (OSError, ValueError) as e:
            if isinstance(e, RopeError):
                raise
            raise unreadable(str(path), e) from e
        return _object(_json(content, path), str(path)), str(path)
    raise error(
        "from_config",
        "source must be a dict, a config object with to_dict(), or a path",
        shown(source),
        "Pass the path of a config.json or of the folder that holds it.",
    )


def gguf_path(source: Any) -> Path | None:
    """The path, if it is that of a GGUF file: by its name or by its first four bytes."""
    if not isinstance(source, str | os.PathLike):
        return None
    try:
        path = _path(source)
        if path.is_dir():
            return None
        if path.suffix.lower() == ".gguf":
            return path
        if not path.is_file():
            return None
        with path.open("rb") as file:
            return path if file.read(4) == b"GGUF" else None
    except (OSError, ValueError):
        return None  # `load` says why


def plain(value: Any, name: str) -> Any:
    """A copy of a config's value: objects as dicts, lists and tuples as lists, arrays and tensors as lists of numbers.

    Values of other types stay as they are, since a config may hold some that rotation does not depend on.

    Raises:
        RopeError: it is nested too deep, holds too many values, or has a key that JSON could not have.
    """
    left = _MAX_VALUES

    def copied(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise error(name, f"a config must have at most {_MAX_VALUES} values", "more", "Is this a config.json?")
        if value is None or type(value) in (str, bool, int, float):  # NumPy's numbers are subclasses
            return value
        if depth > _MAX_DEPTH:
            raise error(name, f"a config must be nested at most {_MAX_DEPTH} deep", "more", "Is this a config.json?")
        if isinstance(value, list | tuple):
            return [copied(inner, depth + 1) for inner in value]
        if isinstance(value, Mapping):
            return {_key(key, name): copied(inner, depth + 1) for key, inner in value.items()}
        if callable(getattr(value, "tolist", None)):
            return copied(_listed(value, name), depth + 1)
        return value

    return copied(value, 0)


def without(config: Mapping[str, Any], ignore: tuple[str, ...], name: str) -> dict[str, Any]:
    """A copy of a config without some keys; "a.b" is b inside a, unless there is a key of that name.

    Raises:
        RopeError: a key is not there.
    """
    result = dict(config)
    for path in ignore:
        place, key, keys = result, path, list(config)
        while key not in place and "." in key:
            section, _, rest = key.partition(".")
            inner = place.get(section)
            if not isinstance(inner, Mapping):
                break
            place[section] = dict(inner)
            place, key, keys = place[section], rest, [f"{section}.{k}" for k in inner]
        if key not in place:
            meant = nearest(path, [str(k) for k in keys]) or _inside(path, result)
            raise error(name, "every key to ignore must be in the config", repr(path), f"Leave it out.{meant}")
        del place[key]
    return result


def _inside(key: str, config: Mapping[str, Any]) -> str:
    """A hint where the key stands inside of a section."""
    places = [f"{name}.{key}" for name, values in config.items() if isinstance(values, Mapping) and key in values]
    return f" Did you mean {shown(places[0])}?" if places else ""


def _listed(value: Any, name: str) -> Any:
    try:
        return value.tolist()
    except Exception as e:
        raise error(name, "tolist() must give the numbers of an array", shown(e), "Pass a list.") from e


def _key(key: object, name: str) -> object:
    """A string or a number: transformers has numbers as keys of labels, and json.dump makes strings of them."""
    if isinstance(key, str | float) or key is None or (isinstance(key, int) and key.bit_length() <= 64):
        return key
    raise error(name, "every key must be a string or a number of at most 64 bits", shown(key), "Remove it.")


def _path(source: str | os.PathLike[Any]) -> Path:
    """The path, also of an object whose `__fspath__` returns bytes.

    Raises:
        RopeError: the object is no path.
    """
    try:
        return Path(os.fsdecode(source))
    except Exception as e:
        raise error("from_config", "source must be a path", shown(e), "Pass a string.") from e


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise error(str(path), "the config must be a file", "none there", "Is the path right?")
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise error(str(path), f"a config must have at most {_MAX_BYTES} bytes", "more", "Is this a config.json?")
    return content


def _json(content: bytes, path: Path) -> object:
    try:
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=_without_duplicates)
    except RopeError as e:
        raise within(str(path), e) from None
    except (ValueError, RecursionError) as e:
        raise error(str(path), "must be JSON in UTF-8", f"something else: {e}", "Is the file complete?") from e


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise error(
            "JSON", "every key must be given once", f"{shown(twice)} twice in one object", "Remove one of them."
        )
    return result


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise error(name, "a config must be a JSON object", shown(value), "Is this a config.json?")
    return cast(dict[str, Any], plain(value, name))
