"""Anything that may hold a config → a dict and a name for messages. Bounded, and never a traceback from inside."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ropewalk._checks import RopeError, error, shown

# Real configs are a few kilobytes; those with long label lists, a few hundred.
_MAX_BYTES = 16 * 2**20


def load(source: Any) -> tuple[dict[str, Any], str]:
    """The config and what to call it in messages.

    Args:
        source: a dict; an object with `to_dict()` (a transformers config); a path to a JSON file, or to a folder that
            has a config.json or else a params.json.

    Raises:
        RopeError: there is nothing to read, or it is not one JSON object.
    """
    if isinstance(source, Mapping):
        return dict(source), "config"
    if hasattr(source, "to_dict") and not isinstance(source, type):
        name = type(source).__name__
        return _object(source.to_dict(), name), name
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        try:
            if path.is_dir():
                path = path / ("params.json" if _only_params(path) else "config.json")
            content = _read(path)
        except (OSError, ValueError) as e:
            if isinstance(e, RopeError):
                raise
            raise RopeError(f"{path}: cannot be read: {e}.") from e
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
        path = Path(source)
        if path.is_dir():
            return None
        if path.suffix.lower() == ".gguf":
            return path
        if not path.is_file():
            return None
        with path.open("rb") as file:
            return path if file.read(4) == b"GGUF" else None
    except (OSError, TypeError, ValueError):
        return None  # `load` says why


def _only_params(folder: Path) -> bool:
    """Whether a folder is Meta's: a params.json and no config.json."""
    return (folder / "params.json").is_file() and not (folder / "config.json").exists()


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
        raise RopeError(f"{path}: {e}") from None
    except (ValueError, RecursionError) as e:
        raise RopeError(f"{path}: must be JSON in UTF-8, got something else: {e}. Is the file complete?") from e


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RopeError(f"every key must be given once, got {shown(twice)} twice in one object. Remove one of them.")
    return result


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise error(name, "a config must be a JSON object", shown(value), "Is this a config.json?")
    return dict(value)
