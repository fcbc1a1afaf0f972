"""Construct an object of the class under test, and choose a value for each parameter of its constructor."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ropewalk import _checks
from ropewalk.conformance import roles
from ropewalk.conformance.target import Method, name_of

_OF_A_HEAD = {"head_dim", "head_size", "d_head", "dim_head", "d_k"}


@dataclass(frozen=True)
class Settings:
    """The values from which the arguments of a constructor are chosen.

    Args:
        head_dim, rotary_dim: the number of channels of a head, and of its rotated channels.
        channels: the number of channels of the tensors that are passed to the target. It is rotary_dim if the target is
            passed only the rotated slice of a head. None means head_dim.
        base: the base. None keeps the default of the class, or means 10000 if it has no default.
        length: the number of tokens, for classes with such a parameter. None keeps the default of the class, or means
            4096.
        config: the config, for classes with a parameter for it.
        arguments: maps names of parameters to the values that the user passed. They take precedence over all other
            fields.
    """

    head_dim: int = 64
    rotary_dim: int = 64
    base: float | None = None
    length: int | None = None
    config: Mapping[str, Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    channels: int | None = None


@dataclass(frozen=True)
class Arguments:
    """The chosen arguments of a constructor.

    Args:
        base: the base that is passed, or None if the constructor has no parameter for it.
        length: the number of tokens that is passed, or None if the constructor has no parameter for it.
        values: maps the names of parameters to the values of all arguments.
        base_name: the name of the parameter for the base, or None.
    """

    base: float | None
    length: int | None
    values: dict[str, Any]
    base_name: str | None


def choose_arguments(constructor: Any, settings: Settings) -> Arguments:
    """Choose a value for each parameter of a constructor.

    Raises:
        RopeError: a parameter without default has no known role. The message says how to pass a value.
    """
    parameter_of = roles.constructor_roles(constructor)
    values: dict[str, Any] = {}
    base = length = None
    for role, name in parameter_of.items():
        if name in settings.arguments:
            continue
        default = roles.default_of(constructor, name)
        if role == "dim":
            values[name] = settings.head_dim if name in _OF_A_HEAD else settings.rotary_dim
        elif role == "rotary_dim":
            values[name] = settings.rotary_dim
        elif role == "base":
            base = values[name] = settings.base or default or 10_000.0
        elif role == "length":
            length = values[name] = settings.length or default or 4096
        elif role == "config":
            values[name] = _config_object(constructor, settings)
    values.update(settings.arguments)
    if missing := roles.missing_parameters(constructor, values):
        raise _checks.error(
            "check",
            "every parameter of the class must have a default or a name whose meaning is known",
            ", ".join(missing),
            f"Pass a value: --arg {missing[0]}=VALUE.",
        )
    base_name = parameter_of.get("base")
    return Arguments(base, length, values, base_name if base is not None else None)


def build(constructor: Any, values: Mapping[str, Any]) -> Any:
    """Call the constructor with these values.

    Raises:
        RopeError: the constructor raises.
    """
    try:
        return constructor(**values)
    except Exception as e:  # a constructor may raise anything
        named = ", ".join(f"{name}={_checks.shown(value)}" for name, value in values.items() if name != "config")
        raise _checks.error_from(
            f"check: {name_of(constructor)}({named}) cannot be constructed", e, "Pass other values with --arg."
        ) from e


def is_constructor(target: Any) -> bool:
    """Return whether this object must be constructed before it can rotate: a class, or a method of a class."""
    return inspect.isclass(target) or isinstance(target, Method)


class _Config(SimpleNamespace):
    """A config whose keys are attributes, like the config objects of transformers."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return an attribute or the default, like `dict.get`."""
        return getattr(self, key, default)


def _config_object(constructor: Any, settings: Settings) -> Any:
    """Build the config object to pass. Common attributes that the config lacks are added, such as rope_scaling=None."""
    config = dict(settings.config or {})
    if str(getattr(constructor, "__module__", "")).startswith("transformers."):
        from transformers import AutoConfig

        return AutoConfig.for_model(**config)
    heads = config.get("num_attention_heads")
    config.setdefault("rope_scaling", None)
    config.setdefault(
        "head_dim", config["hidden_size"] // heads if heads and "hidden_size" in config else settings.head_dim
    )
    config.setdefault("rope_theta", settings.base or 10_000.0)
    config.setdefault("max_position_embeddings", settings.length or 4096)
    return _Config(**config)
