"""An object of the class that is checked, made with the values that its parameters ask for."""

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
class Wishes:
    """What a class is asked for.

    Args:
        head_dim, rotary_dim: channels of a head, and the rotated ones.
        channels: of the tensors that are passed, where that is the rotated slice alone; head_dim when None.
        base: the base; None leaves the class its default, or 10000 where it has none.
        length: tokens, where a class wants to know how many; None leaves the class its default, or 4096.
        config: the config, for classes that take one.
        arguments: by name of the parameter, before all others.
    """

    head_dim: int = 64
    rotary_dim: int = 64
    base: float | None = None
    length: int | None = None
    config: Mapping[str, Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    channels: int | None = None


@dataclass(frozen=True)
class Made:
    """What was passed: the base (None where no parameter takes one), the length, and all by name."""

    base: float | None
    length: int | None
    given: dict[str, Any]
    base_name: str | None


def arguments(made: Any, wishes: Wishes) -> Made:
    """The arguments that make an object.

    Raises:
        RopeError: a parameter without default is for nothing known; the message says how to give it a value.
    """
    found = roles.of_constructor(made)
    given: dict[str, Any] = {}
    base = length = None
    for role, name in found.items():
        if name in wishes.arguments:
            continue
        default = roles.default_of(made, name)
        if role == "dim":
            given[name] = wishes.head_dim if name in _OF_A_HEAD else wishes.rotary_dim
        elif role == "rotary_dim":
            given[name] = wishes.rotary_dim
        elif role == "base":
            base = given[name] = wishes.base or default or 10_000.0
        elif role == "length":
            length = given[name] = wishes.length or default or 4096
        elif role == "config":
            given[name] = _config_object(made, wishes)
    given.update(wishes.arguments)
    if missing := roles.unfilled(made, given):
        raise _checks.error(
            "check",
            "every parameter of the class must have a default or a known meaning",
            ", ".join(missing),
            f"Pass it: --arg {missing[0]}=VALUE.",
        )
    base_name = found.get("base")
    return Made(base, length, given, base_name if base is not None else None)


def make(made: Any, given: Mapping[str, Any]) -> Any:
    """The object.

    Raises:
        RopeError: the class raises.
    """
    try:
        return made(**given)
    except Exception as e:  # whatever their class raises
        named = ", ".join(f"{name}={_checks.shown(value)}" for name, value in given.items() if name != "config")
        raise _checks.failed(
            f"check: {name_of(made)}({named}) cannot be made", e, "Pass other values with --arg."
        ) from e


def is_maker(found: Any) -> bool:
    """Whether it has to be called before there is something that rotates: a class, or a method of one."""
    return inspect.isclass(found) or isinstance(found, Method)


class _Config(SimpleNamespace):
    """A config with attributes, as those of transformers: what it does not say about scaling is None."""

    def get(self, key: str, default: Any = None) -> Any:
        """As a dict's."""
        return getattr(self, key, default)


def _config_object(made: Any, wishes: Wishes) -> Any:
    config = dict(wishes.config or {})
    if str(getattr(made, "__module__", "")).startswith("transformers."):
        from transformers import AutoConfig

        return AutoConfig.for_model(**config)
    heads = config.get("num_attention_heads")
    config.setdefault("rope_scaling", None)
    config.setdefault(
        "head_dim", config["hidden_size"] // heads if heads and "hidden_size" in config else wishes.head_dim
    )
    config.setdefault("rope_theta", wishes.base or 10_000.0)
    config.setdefault("max_position_embeddings", wishes.length or 4096)
    return _Config(**config)
