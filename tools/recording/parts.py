"""Classify the classes and modules of a model of transformers: rotary classes, attention, mixers, norms."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .configs import modeling_file, named_class


def is_rotary(module_or_class: Any) -> bool:
    """Return whether this is a rotary module or class."""
    cls = module_or_class if isinstance(module_or_class, type) else type(module_or_class)
    return "Rotary" in cls.__name__


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is an attention."""
    name = type(module).__name__
    return "Attention" in name or name.endswith("MLA")


def is_mixer(module: nn.Module) -> bool:
    """Return whether a module of a layer mixes tokens without attention."""
    kind = type(module).__name__
    inner = any(is_attention(part) for part in module.modules())
    return not inner and (("Mamba" in kind and "Layer" not in kind) or kind.endswith("Mixer"))


def shares_keys(layer: nn.Module) -> bool:
    """Return whether later layers reuse the keys of this one."""
    return any(getattr(part, "store_full_length_kv", False) for part in layer.modules())


def is_norm(module: nn.Module) -> bool:
    """Return whether a module normalizes its input and returns it.

    Modules that return only a factor, or that contain an attention, are not norms.
    """
    if "Norm" not in type(module).__name__ or any(is_attention(part) for part in module.modules()):
        return False
    if any(True for _ in module.parameters()):
        return True
    try:
        return module(torch.zeros(1, 1, 4)).shape == (1, 1, 4)  # type: ignore[no-any-return]
    except Exception:
        return True


@contextlib.contextmanager
def rotary_on_cpu(module: Any) -> Iterator[None]:
    """Build the rotary modules of a file on the CPU, because their buffers are needed. The rest is built on meta."""
    changed = []
    for cls in vars(module).values():
        if isinstance(cls, type) and issubclass(cls, nn.Module) and is_rotary(cls) and "__init__" in vars(cls):
            original = cls.__init__

            def build(self: Any, *args: Any, __original: Any = original, **kwargs: Any) -> None:
                with torch.device("cpu"):
                    __original(self, *args, **kwargs)

            changed.append((cls, original))
            cls.__init__ = build
    tables = {name: value for name, value in vars(module).items() if name == "create_sinusoidal_positions"}
    for name, table in tables.items():

        def fill(*args: Any, __table: Any = table, **kwargs: Any) -> Any:
            with torch.device("cpu"):
                return __table(*args, **kwargs)

        setattr(module, name, fill)
    try:
        yield
    finally:
        for name, table in tables.items():
            setattr(module, name, table)
        for cls, original in changed:
            cls.__init__ = original


@contextlib.contextmanager
def without_towers() -> Iterator[None]:
    """Replace inner models by the identity if their package is not installed."""
    from transformers import AutoModel, AutoModelForImageClassification

    originals = {auto: vars(auto)["from_config"] for auto in (AutoModel, AutoModelForImageClassification)}
    for auto, original in originals.items():

        def build(cls: Any, *args: Any, __original: Any = original, **kwargs: Any) -> Any:
            try:
                return __original.__func__(cls, *args, **kwargs)
            except ImportError:
                return nn.Identity()

        auto.from_config = classmethod(build)
    try:
        yield
    finally:
        for auto, original in originals.items():
            auto.from_config = original


def model_classes(config: Any) -> list[type]:
    """Return the classes of a file that can be built from this config alone, bare models first."""
    ranked = []
    module = modeling_file(config)
    for cls in vars(module).values():
        if not (isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == module.__name__):
            continue
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
        needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        annotation = str(parameters[0].annotation) if parameters else ""
        built = getattr(cls, "config_class", None) is type(config) or type(config).__name__ in annotation
        if built and needed == ["config"] and not cls.__name__.endswith(("PreTrainedModel", "RotaryEmbedding")):
            forward_parameters = inspect.signature(cls.forward).parameters
            rank = (
                "inputs_embeds" not in forward_parameters,
                "hidden_states" not in forward_parameters,
                "For" in cls.__name__,
            )
            ranked.append((rank, len(cls.__name__), cls))
    classes = [cls for *_, cls in sorted(ranked, key=lambda each: each[:2])]
    return classes or named_class(config)
