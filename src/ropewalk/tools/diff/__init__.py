"""Compare how engines rotate for one config, or the rotation of two configs. Find an engine's override for a config.

Only configs are read, and no model is loaded or run. `ropewalk.engines` describes how each engine reads a config.
"""

from __future__ import annotations

from ropewalk.engines import ENGINES, MORE_ENGINES, TRAINERS
from ropewalk.tools.diff.between_configs import ConfigDiff, configs
from ropewalk.tools.diff.between_engines import EngineDiff, engines
from ropewalk.tools.diff.for_engine import ForEngine, for_engine

__all__ = [
    "ENGINES", "MORE_ENGINES", "TRAINERS", "ConfigDiff", "EngineDiff", "ForEngine", "configs", "engines", "for_engine",
]  # fmt: skip
__dir__ = __all__.copy
