"""`ARCHITECTURES` maps a model_type to its row, an `Architecture`. The rows are in `tables/`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from ropewalk.configs.architecture import Architecture
from ropewalk.configs.tables.no_rope import NO_ROPE_MODELS
from ropewalk.configs.tables.not_in_transformers import REMOTE
from ropewalk.configs.tables.several_axes import SEVERAL_AXES
from ropewalk.configs.tables.text import TEXT
from ropewalk.configs.tables.wrappers import BY_CLASS

ARCHITECTURES: dict[str, Architecture] = {**TEXT, **SEVERAL_AXES, **REMOTE, **NO_ROPE_MODELS}


def row_of(model_type: str, config: Mapping[str, Any]) -> Architecture | None:
    """Return the row of a model_type, or that of another model whose files have the same model_type (Grok 2)."""
    classes, other = BY_CLASS.get(model_type, (None, ""))
    return ARCHITECTURES.get(other if classes and config.get("architectures") == classes else model_type)


def register(model_type: str, row: Architecture) -> None:
    """Register the `Architecture` of a model_type in this process, replacing any existing one."""
    ARCHITECTURES[model_type] = row
    vocabulary.cache_clear()


@cache
def vocabulary() -> frozenset[str]:
    """Return all config keys about rotation that are valid for at least one model."""
    keys: set[str] = set()
    for model in ARCHITECTURES.values():
        keys |= model.keys() | model.keys_without_effect.keys()
    return frozenset(keys)
