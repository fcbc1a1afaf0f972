"""Load a config from a dict, an object, a file or a folder, and check the other arguments of `from_config`.

Sizes are bounded, and every failure is a RopeError, except what the methods of an object of the caller raise.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ropewalk._checks import (
    RopeError,
    boolean,
    check_pairing,
    error,
    nearest,
    number,
    option,
    shown,
    unreadable_file,
    with_context,
)

# Real configs have a few kilobytes. With labels for all classes of ImageNet-21k they have less than two megabytes.
_MAX_BYTES = 2 * 2**20
# The largest real configs hold 2 × 21,841 labels and label numbers, and none is nested nearly this deep.
_MAX_VALUES = 2**18
_MAX_DEPTH = 100
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_NOT_A_CONFIG = "Pass a model's config.json."
_CONFIG_NAMES = (
    "config.json",
    "params.json",
    "model_config.yaml",
    "model_index.json",  # of a pipeline of diffusers, which is refused with a hint
)


_REQUIRED = {
    **dict.fromkeys(("pairing", "base", "text_only"), "a text model"),
    "factor": "Meta's params.json",
    "like": "a Hugging Face config of a text model",
}
"""The config that an argument of `from_config` requires."""


@dataclass
class Request:
    """The arguments of `from_config` beside the config, checked."""

    pairing: str | None = None
    base: float | None = None
    factor: float | None = None
    text_only: bool = False
    ignore: Collection[str] = ()
    download: bool = False
    engine: str | None = None
    like: str | None = None
    weights: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        who = "from_config"
        boolean(who, "text_only", self.text_only)
        if self.pairing is not None:
            check_pairing(who, self.pairing)
        if self.base is not None:
            self.base = number(who, option("base"), self.base, above=1.0)
        if self.factor is not None:
            self.factor = number(who, option("factor"), self.factor, at_least=1.0)
        boolean(who, "download", self.download)
        if self.like is not None:
            if not isinstance(self.like, str):
                raise error(who, "like must be a model_type", shown(self.like), 'Pass a string, e.g. like="llama".')
            other = "pairing" if self.pairing is not None else "engine" if self.engine is not None else ""
            if other:
                raise error(who, f"like and {other} must not both be passed", "both", "Omit one of them.")
        if self.weights is not None and self.engine is not None:
            raise error(who, "weights and engine must not both be passed", "both", "Omit one of them.")
        keys = self.ignore
        if isinstance(keys, str) or not isinstance(keys, Collection) or not all(isinstance(key, str) for key in keys):
            must, fix = "ignore must be a collection of keys", 'Pass a tuple, e.g. ignore=("my_rope_key",).'
            raise error(who, must, shown(keys), fix)
        self.ignore = tuple(dict.fromkeys(keys))

    def refuse(self, got: str, *names: str) -> None:
        """Raise a RopeError if one of these arguments was passed, since a config such as `got` does not take it."""
        for name in names:
            if getattr(self, name) not in (None, False):
                fix = f"Pass such a config, or omit {option(name)}."
                raise error("from_config", f"{option(name)} requires {_REQUIRED[name]}", got, fix)


def load(source: Any, *, download: bool = False) -> tuple[dict[str, Any], str]:
    """Load a config. Return it as a dict, and the name by which messages refer to it.

    Args:
        source: a dict, an object with `to_dict()` (a transformers config), a path to a JSON or YAML file, a path to a
            folder that contains a config.json, a params.json or a model_config.yaml, or a hub id.
        download: whether the config of a hub id may be downloaded.

    Raises:
        RopeError: the source does not exist, cannot be read, or does not contain a JSON object.
    """
    if isinstance(source, Mapping):
        return _config_dict(source, "config"), "config"
    if hasattr(source, "to_dict") and not isinstance(source, type):
        name = type(source).__name__
        return _config_dict(source.to_dict(), name), name
    if isinstance(source, str | os.PathLike):
        from ropewalk.configs import hub

        path = Path(os.fsdecode(source))
        try:
            if hub.is_id(path):
                path = hub.config_path(path.as_posix(), download=download)
            if path.is_dir():
                path = path / next((name for name in _CONFIG_NAMES if (path / name).is_file()), _CONFIG_NAMES[0])
        except OSError as e:
            raise unreadable_file(str(path), e) from e
        return _config_dict(read_json(path), str(path)), str(path)
    raise error(
        "from_config",
        "source must be a dict, a config object with to_dict(), or a path",
        shown(source),
        "Pass the path of a config.json or of the folder that contains it.",
    )


def load_any(config: Any, asked: Request) -> tuple[dict[str, Any], str, bool]:
    """Load a config of any format.

    Returns:
        Its values without the keys to ignore ({} for a GGUF file), its name, and whether `other_formats` reads it.

    Raises:
        RopeError: as `load`; or a factor was passed for a format of Hugging Face or diffusers.
    """
    path = gguf_path(config)
    if path is not None:
        return {}, str(path), True
    values, name = load(config, download=asked.download)
    values = without_keys(values, asked.ignore, name)
    other = (is_params(values) or is_litgpt(values)) and not is_denoiser(values)
    if not other:
        asked.refuse("a config of Hugging Face or diffusers", "factor")
    return values, name, other


def gguf_path(source: Any) -> Path | None:
    """Return the source as a path if its suffix or its first four bytes are those of a GGUF file, else None."""
    if not isinstance(source, str | os.PathLike):
        return None
    try:
        path = Path(os.fsdecode(source))
        if path.is_dir():
            return None
        if path.suffix.lower() == ".gguf":
            return path
        if not path.is_file():
            return None
        with path.open("rb") as file:
            return path if file.read(4) == b"GGUF" else None
    except (OSError, ValueError):
        return None  # `load` raises the error


def is_denoiser(values: Mapping[str, Any]) -> bool:
    """Whether the config is that of a diffusers model."""
    return isinstance(values.get("_class_name"), str) and "model_type" not in values


def is_params(config: Mapping[str, Any]) -> bool:
    """Whether the config is a params.json of Meta, or of another program that names sizes as Meta does."""
    return config.get("model_type", "transformer") == "transformer" and {"dim", "n_layers", "n_heads"} <= config.keys()


def is_litgpt(config: Mapping[str, Any]) -> bool:
    """Whether the config has the sizes that every model_config.yaml of litgpt states."""
    return {"n_layer", "n_embd", "n_head", "rotary_percentage", "rope_base", "block_size"} <= config.keys()


def to_plain(value: Any, name: str) -> Any:
    """Copy a value of a config, with mappings as dicts, and tuples, arrays and tensors as lists.

    Values of other types are kept unchanged, since a config may have them under keys that do not affect rotation.

    Raises:
        RopeError: the value is nested too deep, holds too many values, or has a key that JSON does not allow.
    """
    remaining = _MAX_VALUES

    def copy(value: Any, depth: int) -> Any:
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            raise error(name, f"a config must have at most {_MAX_VALUES} values", "more", _NOT_A_CONFIG)
        if value is None or type(value) in (str, bool, int, float):  # NumPy's numbers are subclasses
            return value
        if depth > _MAX_DEPTH:
            raise error(name, f"a config must be nested at most {_MAX_DEPTH} deep", "more", _NOT_A_CONFIG)
        if isinstance(value, list | tuple):
            return [copy(inner, depth + 1) for inner in value]
        if isinstance(value, Mapping):
            return {_check_key(key, name): copy(inner, depth + 1) for key, inner in value.items()}
        if callable(getattr(value, "tolist", None)):
            return copy(value.tolist(), depth + 1)
        return value

    return copy(value, 0)


def without_keys(config: Mapping[str, Any], ignore: Collection[str], name: str) -> dict[str, Any]:
    """Return a copy of a config without the keys in `ignore`. "a.b" is the key b inside a, unless there is a key "a.b".

    Raises:
        RopeError: a key in `ignore` is not in the config.
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
            hint = nearest(path, [str(k) for k in keys]) or _section_hint(path, result)
            raise error(name, f"every key in {option('ignore')} must be in the config", repr(path), f"Omit it.{hint}")
        del place[key]
    return result


def _section_hint(key: str, config: Mapping[str, Any]) -> str:
    """Return a hint that names the path of the key if it is inside an object of the config, else ""."""
    places = [f"{name}.{key}" for name, values in config.items() if isinstance(values, Mapping) and key in values]
    return f" Did you mean {shown(places[0])}?" if places else ""


def _check_key(key: object, name: str) -> object:
    """Return the key if it is a string, a number or None.

    For example, the keys of `id2label` are numbers, which json.dump writes as strings.

    Raises:
        RopeError: the key has another type, or is an integer of more than 64 bits.
    """
    if isinstance(key, str | float) or key is None or (isinstance(key, int) and key.bit_length() <= 64):
        return key
    raise error(name, "every key must be a string or a number of at most 64 bits", shown(key), "Remove the key.")


def read_json(path: Path, max_bytes: int = _MAX_BYTES) -> Any:
    """Return the content of a JSON file.

    Raises:
        RopeError: this is not an existing plain file, it has more than `max_bytes` bytes, or it is not JSON.
    """
    try:
        is_stream = (
            path.is_relative_to("/dev") and path.exists()
        )  # /dev/stdin, or the /dev/fd/63 of a shell's <(command)
        if not path.is_file() and not is_stream:
            in_folder = path.name == "config.json" and path.parent.is_dir()
            kinds = "A model has config.json, params.json or a GGUF file; an adapter rotates as its base model."
            fix = kinds if in_folder else "Check the path. It must be a file or the folder of a model."
            got = "something else" if path.exists() else "no such file"
            raise error(str(path), "the config must be an existing file", got, fix)
        if path.suffix in _WEIGHTS:
            raise error(str(path), "the config must be JSON or a GGUF file", "a file of weights", "Pass its folder.")
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as e:
        raise unreadable_file(str(path), e) from e
    if len(content) > max_bytes:
        raise error(str(path), f"the file must have at most {max_bytes:,} bytes", "more", "Check the path.")
    if path.suffix == ".yaml":
        return _parse_yaml(content, str(path))
    try:
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=_unique_keys)
    except RopeError as e:
        raise with_context(str(path), e) from None
    except (ValueError, RecursionError) as e:
        got = f"other content ({e})" if content.strip() else "an empty file"
        raise error(str(path), "the file must contain JSON in UTF-8", got, "Check that it is complete.") from e


def _parse_yaml(content: bytes, name: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise error(name, "PyYAML must be installed to read it", "no such package", "pip install pyyaml.") from None
    try:
        return yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise error(name, "the file must contain YAML", f"other content ({e})", "Check that it is complete.") from e


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise error("JSON", "the keys of an object must be unique", f"{shown(twice)} twice", "Remove one of them.")
    return result


def _config_dict(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise error(name, "a config must be a JSON object", shown(value), _NOT_A_CONFIG)
    return cast(dict[str, Any], to_plain(value, name))
