"""Compare how engines rotate for one config, or compare the rotation of two configs.

Only configs are read: no model is loaded or run. How an engine reads a config is described by `ropewalk.engines`.
"""

from __future__ import annotations

from ropewalk.diff.between_configs import ConfigDiff as ConfigDiff
from ropewalk.diff.between_configs import configs as configs
from ropewalk.diff.between_engines import EngineDiff as EngineDiff
from ropewalk.diff.between_engines import engines as engines
