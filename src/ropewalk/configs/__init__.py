"""What does a model's file mean? A config in, a `Rope` for each layer out; or an error that says what is missing.

Needs neither torch nor transformers.
"""

from __future__ import annotations

from ropewalk.configs.model_ropes import ModelRopes, QueryScale, VisionRopes
from ropewalk.configs.read import from_config

__all__ = ["ModelRopes", "QueryScale", "VisionRopes", "from_config"]
