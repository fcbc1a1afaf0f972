"""`Override`: how a user gives an engine other rope parameters than the files of the model, and `spellings` of them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ropewalk.engines._config import ConfigRope
from ropewalk.rope.rope import Rope
from ropewalk.schemes import LongRoPE, YaRN

_ATTENTION_KEYS = ("attention_factor", "mscale", "mscale_all_dim")


@dataclass(frozen=True)
class Override:
    """The argument with which an engine at one version replaces keys of a model's config.

    Args:
        write: returns the command with this argument, from the model, the keys to replace, and the length to configure.
            A nested config is an object in the keys, and no keys mean no argument.
        source: the files of the engine that define the argument and apply it.
        merges: where the engine merges the new `rope_parameters` into those of the config, instead of replacing them.
        deepest: the largest depth of a nested config that the argument reaches.
        bases: maps files of models to the base that they take if an override leaves none, or to None if they stop.
            Other files take 10000.
        python: returns the same as a call in Python, if `write` returns a command for a shell.
    """

    write: Callable[[str, Mapping[str, Any], int], str]
    source: str
    merges: Literal["nowhere", "at the top", "below the top"]
    deepest: int
    python: Callable[[str, Mapping[str, Any], int], str] | None = None
    bases: Mapping[str, float | None] = field(default_factory=dict)

    def applied(self, old: Mapping[str, Any], new: Mapping[str, Any], depth: int) -> dict[str, Any]:
        """Return the `rope_parameters` that the engine has after the override, in a config at a depth."""
        if self.merges == ("below the top" if depth else "at the top"):
            return {**old, **new}
        return dict(new)

    def apply(self, loaded: Mapping[str, Any], keys: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
        """Return a config, as the classes of transformers 5 load it, after an override of keys.

        In these classes, `rope_scaling` is another name of `rope_parameters`, whose setter reads `rope_theta` too.
        """
        found, beside = dict(loaded), {} if depth else {key: keys[key] for key in keys if key == "rope_theta"}
        for key, value in keys.items():
            name = "rope_parameters" if key == "rope_scaling" else key
            old = found.get(name)
            if not isinstance(value, Mapping) or not isinstance(old, Mapping):
                found[name] = value
            elif name == "rope_parameters":
                found[name] = {**(beside if key != name else {}), **self.applied(old, value, depth)}
            else:
                found[name] = self.apply(old, value, depth + 1)
        return found


@dataclass(frozen=True)
class Flags:
    """The arguments with which an engine that reads no config.json at run time gets the rope of its layers.

    Args:
        write: returns the arguments, and the rope that the engine then computes. It gets the rope of the config, the
            rope that the engine computes without arguments, and the rope to state. If no argument states its scheme,
            it returns the reason.
        command: returns the command from the model, the arguments, and the length to configure.
        keep_windows: the model_types of which layers with a window keep the rope of the file, whatever the arguments.
    """

    write: Callable[[ConfigRope, Rope, Rope], tuple[str, Rope] | str]
    command: Callable[[str, str, int], str]
    keep_windows: frozenset[str] = frozenset()


def shell(command: str, override: str, length: str) -> Callable[[str, Mapping[str, Any], int], str]:
    """Return an `Override.write` for a shell.

    Args:
        command: the command, which ends before the model.
        override: the argument that takes the keys as JSON.
        length: the argument for the length.
    """

    def write(model: str, keys: Mapping[str, Any], tokens: int) -> str:
        words = [command, shlex.quote(model)]
        words += [override, shlex.quote(json.dumps(keys))] if keys else []
        return " ".join([*words, length, str(tokens)])

    return write


def call(
    name: str, override: str, length: str, *, model_argument: str = "", as_json: bool = False
) -> Callable[[str, Mapping[str, Any], int], str]:
    """Return an `Override.write` for Python, with arguments named as in `shell`.

    `model_argument` is "model_path=" if the model must be passed by this name.
    """

    def write(model: str, keys: Mapping[str, Any], tokens: int) -> str:
        named: dict[str, Any] = {override: json.dumps(keys) if as_json else dict(keys)} if keys else {}
        named[length] = tokens
        words = [f"{model_argument}{model!r}", *(f"{key}={value!r}" for key, value in named.items())]
        return f"{name}({', '.join(words)})"

    return write


def spellings(parameters: Mapping[str, Any], scaled: Rope | None) -> Iterator[dict[str, Any]]:
    """Yield `rope_parameters` that mean the same in the code of some engine, beginning with `parameters`.

    Engines read the attention factor from different keys.

    Args:
        parameters: the parameters in the schema of transformers 5, for all layers or for each kind of layer.
        scaled: the rope of the layers that are scaled, or None.
    """
    yield dict(parameters)
    scheme = None if scaled is None else scaled.scaling
    if scaled is not None and isinstance(scheme, YaRN):
        factor, default = scaled.attention_factor, YaRN(scheme.factor, 1).compute_attention_factor()
        yield _changed(parameters, "yarn", {"attention_factor": factor})
        yield _changed(parameters, "yarn", {"attn_factor": factor / default})
    if scaled is not None and isinstance(scheme, LongRoPE):
        short, long = (scaled.at_length(length).attention_factor for length in (1, 2**31))
        yield _changed(parameters, "longrope", {"short_mscale": short, "long_mscale": long})


def _changed(parameters: Mapping[str, Any], rope_type: str, keys: Mapping[str, float]) -> dict[str, Any]:
    """Return the parameters with other keys of the attention factor where they have this rope_type."""
    if parameters.get("rope_type") == rope_type:
        return {**{key: value for key, value in parameters.items() if key not in _ATTENTION_KEYS}, **keys}
    return {
        key: _changed(value, rope_type, keys) if isinstance(value, Mapping) else value
        for key, value in parameters.items()
    }


def put(config: Mapping[str, Any], path: list[str], value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config in which the object at the end of `path` is `value`."""
    if not path:
        return dict(value)
    return {**config, path[0]: put(config.get(path[0], {}), path[1:], value)}
