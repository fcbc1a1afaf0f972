"""What the classes and modules of a model of transformers are: rotary classes, attention, mixers, norms."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .configs import modeling_file, named_class


def is_rotary(module_or_class: Any) -> bool:
    cls = module_or_class if isinstance(module_or_class, type) else type(module_or_class)
    return "Rotary" in cls.__name__


def is_attention(module: nn.Module) -> bool:
    name = type(module).__name__
    return "Attention" in name or name.endswith("MLA")


def is_mixer(module: nn.Module) -> bool:
    """Whether a part of a layer mixes tokens without attention."""
    kind = type(module).__name__
    inner = any(is_attention(part) for part in module.modules())
    return not inner and (("Mamba" in kind and "Layer" not in kind) or kind.endswith("Mixer"))


def gives_keys(layer: nn.Module) -> bool:
    """Whether later layers take the keys of this one."""
    return any(getattr(part, "store_full_length_kv", False) for part in layer.modules())


def is_norm(module: nn.Module) -> bool:
    """Whether a part returns its input normed; not the factor alone, nor what an attention inside makes of it."""
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
    """Build the rotary classes of a file on the CPU, with all else on the meta device: their buffers are wanted."""
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
    """Leave out the models inside of a model whose package is not installed."""
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
    """The classes of a file that are built from this config alone and may hold its layers: the bare models first."""
    found = []
    module = modeling_file(config)
    for cls in vars(module).values():
        if not (isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == module.__name__):
            continue
        taken = list(inspect.signature(cls.__init__).parameters.values())[1:]
        needed = [p.name for p in taken if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        annotation = str(taken[0].annotation) if taken else ""
        built = getattr(cls, "config_class", None) is type(config) or type(config).__name__ in annotation
        if built and needed == ["config"] and not cls.__name__.endswith(("PreTrainedModel", "RotaryEmbedding")):
            given = inspect.signature(cls.forward).parameters
            rank = ("inputs_embeds" not in given, "hidden_states" not in given, "For" in cls.__name__)
            found.append((rank, len(cls.__name__), cls))
    classes = [cls for *_, cls in sorted(found, key=lambda each: each[:2])]
    return classes or named_class(config)
