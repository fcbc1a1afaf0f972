"""Construct an object of the class under test, and choose a value for each parameter of its constructor."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ropewalk import _checks
from ropewalk.tools.check import roles
from ropewalk.tools.check.target import Method, name_of

_OF_A_HEAD = {"head_dim", "head_size", "d_head", "dim_head", "d_k"}


@dataclass(frozen=True)
class Settings:
    """The values from which the arguments of a constructor are chosen.

    Args:
        head_dim, rotary_dim: the number of channels of a head, and of its rotated channels.
        base: the base. None keeps the default of the class, or means 10000 if it has no default.
        length: the number of tokens, for classes with such a parameter. None keeps the default of the class, or means
            4096.
        config: the config, for classes with a parameter for it: its keys, or a config object of transformers.
        arguments: maps names of parameters to the values that the user passed. They take precedence over all other
            fields.
        channels: the number of channels of the tensors that are passed to the target. It is rotary_dim if the target is
            passed only the rotated slice of a head. None means head_dim.
        layer: the index of the layer whose rope is expected, for code with a parameter for the kind of layer.
        notes: the warnings about the config, such as that only the rope of text tokens is read.
    """

    head_dim: int = 64
    rotary_dim: int = 64
    base: float | None = None
    length: int | None = None
    config: Any = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    channels: int | None = None
    layer: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arguments:
    """The chosen arguments of a constructor.

    Args:
        base: the base that is passed, or None if the constructor has no parameter for it.
        length: the number of tokens that is passed, or None if the constructor has no parameter for it.
        values: maps the names of parameters to the values of all arguments.
        layer_type: the kind of the expected layer in the config that is passed, such as "full_attention", or None.
    """

    base: float | None
    length: int | None
    values: dict[str, Any]
    layer_type: str | None = None


def choose_arguments(constructor: Any, settings: Settings) -> Arguments:
    """Choose a value for each parameter of a constructor.

    Raises:
        RopeError: a parameter without default has no known role. The message says how to pass a value.
    """
    owner = getattr(constructor, "owner", constructor)
    known = roles.parameters(owner) or {}
    parameter_of = roles.constructor_roles(known)
    values: dict[str, Any] = {}
    base = length = None
    for role, name in parameter_of.items():
        if name in settings.arguments:
            continue
        default = None if known[name].default is inspect.Parameter.empty else known[name].default
        if role == "dim":
            values[name] = settings.head_dim if name in _OF_A_HEAD else settings.rotary_dim
        elif role == "rotary_dim":
            values[name] = settings.rotary_dim
        elif role == "base":
            base = values[name] = settings.base or default or 10_000.0
        elif role == "length":
            length = values[name] = settings.length or default or 4096
        elif role == "config" and settings.config is not None:
            values[name] = _config_object(owner, known[name].annotation, settings.config)
    values.update(settings.arguments)
    missing = [name for name, p in known.items() if p.default is inspect.Parameter.empty and name not in values]
    if missing:
        must = "every parameter of the class must have a default or a name whose meaning is known"
        fix = f"Pass a value: --arg {missing[0]}=VALUE (in Python, arguments={{{missing[0]!r}: VALUE}})."
        if missing[0] == parameter_of.get("config"):
            fix = f"Pass the config that it reads: {_checks.argument('config')}."
        raise _checks.error("check", must, ", ".join(missing), fix)
    kinds = getattr(values.get(parameter_of.get("config", "")), "layer_types", None)
    return Arguments(base, length, values, kinds[settings.layer] if kinds else None)


def build(constructor: Any, values: Mapping[str, Any]) -> Any:
    """Call the constructor with these values.

    Raises:
        RopeError: the constructor raises.
    """
    try:
        return constructor(**values)
    except Exception as e:  # a constructor may raise anything
        named = ", ".join(f"{name}={_checks.shown(value)}" for name, value in values.items() if name != "config")
        fix = "Pass other arguments (--arg), or a config with the keys that it reads."
        raise _checks.error_from(f"check: {name_of(constructor)}({named}) cannot be constructed", e, fix) from e


def is_constructor(target: Any) -> bool:
    """Return whether this object must be constructed before it can rotate: a class, or a method of a class."""
    return inspect.isclass(target) or isinstance(target, Method)


class _Config(SimpleNamespace):
    """A config whose keys are attributes, like the config objects of transformers."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the config has no {name}")

    def get(self, key: str, default: Any = None) -> Any:
        """Return an attribute or the default, like `dict.get`."""
        return getattr(self, key, default)


def _config_object(owner: Any, annotation: Any, config: Any) -> Any:
    """Build the object to pass for the user's config, with the same keys and no others.

    A class of transformers, or one that is annotated with a config class of transformers, gets an object of that
    class, which adds the defaults of that version.
    """
    if not isinstance(config, Mapping):
        config = copy.deepcopy(config)
        return config.get_text_config() if hasattr(config, "get_text_config") else config
    if isinstance(annotation, str):  # of a module with `from __future__ import annotations`
        annotation = getattr(getattr(owner, "__init__", None), "__globals__", {}).get(annotation)
    classes = (*getattr(owner, "__mro__", ()), annotation)
    if any(str(getattr(cls, "__module__", "")).startswith("transformers.") for cls in classes):
        from transformers import AutoConfig

        return AutoConfig.for_model(**config)
    return _Config(**config)
