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
from ropewalk.configs.tables.wrappers import SHARED_NAMES

ARCHITECTURES: dict[str, Architecture] = {**TEXT, **SEVERAL_AXES, **REMOTE, **NO_ROPE_MODELS}


def name_of(model_type: str, config: Mapping[str, Any]) -> str:
    """Return the key of the row: the model_type, or that of another model whose files have the same one (Grok 2)."""
    key, value, other = SHARED_NAMES.get(model_type, ("", None, ""))
    return other if key and config.get(key) == value else model_type


def register(model_type: str, row: Architecture) -> None:
    """Register the `Architecture` of a model_type in this process, replacing any existing one."""
    ARCHITECTURES[model_type] = row
    vocabulary.cache_clear()


@cache
def vocabulary() -> frozenset[str]:
    """Return all config keys about rotation that are valid for at least one model."""
    return frozenset[str]().union(*(row.keys() | row.keys_without_effect.keys() for row in ARCHITECTURES.values()))
