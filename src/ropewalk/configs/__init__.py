"""Read model configs: `from_config` returns the `Rope` of each layer, or raises an error that names what is missing.

This package needs neither torch nor transformers.
"""

from __future__ import annotations

from ropewalk.configs.architecture import HeadQueryScale, QueryScale
from ropewalk.configs.model_ropes import ModelRopes, VisionRopes
from ropewalk.configs.read import from_config

__all__ = ["HeadQueryScale", "ModelRopes", "QueryScale", "VisionRopes", "from_config"]
__dir__ = __all__.copy
