"""The model_types that transformers has. The ropes of its models are recorded in `class_defaults.json` and others."""

from __future__ import annotations

import importlib
from typing import Any

from . import files


def record(row: dict[str, Any]) -> dict[str, Any]:
    """Record whether transformers has a model_type."""
    known = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    name = row["model_type"]
    return {"model_type": name, **({} if name in known else {"absent": "not in CONFIG_MAPPING_NAMES"})}


GOLDEN = files.Golden("engine_models/models_of_transformers.json", lambda row: str(row["model_type"]), record)
