"""Find the code that rotates in a model of transformers."""

from __future__ import annotations

import importlib
from typing import Any

from transformers import AutoConfig


def code_of(model: str) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Return the rotary class of a model type, the function that its attention calls, and the default config."""
    config = AutoConfig.for_model(model)
    code = vars(importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_")))
    is_tower = "Vision" in type(config).__name__
    cls = next(code[name] for name in code if name.endswith("RotaryEmbedding") and ("Vision" in name) == is_tower)
    name = "apply_rotary_pos_emb"
    special = f"{name}_vision" if is_tower else f"{name}_interleave"
    is_special = special in code and (is_tower or getattr(config, "rope_interleave", True))
    return (cls, code[special if is_special else name]), config.to_dict()
