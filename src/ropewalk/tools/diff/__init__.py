"""Compare how engines rotate for one config, or the rotation of two configs.

Only configs are read, and no model is loaded or run. `ropewalk.engines` describes how each engine reads a config.
"""

from __future__ import annotations

from ropewalk.engines import ENGINES, MORE_ENGINES, TRAINERS
from ropewalk.tools.diff.between_configs import ConfigDiff, configs
from ropewalk.tools.diff.between_engines import EngineDiff, engines

__all__ = ["ENGINES", "MORE_ENGINES", "TRAINERS", "ConfigDiff", "EngineDiff", "configs", "engines"]
__dir__ = __all__.copy
